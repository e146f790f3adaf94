"""The stock client's backend, with the whole of the server's response kept for a look."""

from __future__ import annotations

import io
from typing import Any

import httpx
import torch
from nnsight.intervention.errors import raise_deferred
from nnsight.modeling.vllm.serve import http
from nnsight.modeling.vllm.serve.backend import LocalServeBackend
from nnsight.schema.request import RequestModel


class Heard(LocalServeBackend):
    """Sends a trace as the stock client does.

    Attributes
    ----------
    body
        What was sent.
    response
        What came back, decoded: ``saves``, ``error``, ``said``.
    """

    body: bytes = b""
    response: dict[str, Any]

    def __init__(self, model: Any, server: Any) -> None:
        super().__init__(model, server.url, api_key=server.token)

    def __call__(self, tracer: Any) -> None:
        self.body = RequestModel.serialize(tracer, compress=False)
        self._push(self._send(self.body), tracer)

    def _send(self, blob: bytes) -> dict[str, Any]:
        answer = httpx.post(
            f"{self.host}/v1/nnsight/generate",
            content=blob,
            headers=http.headers(self.api_key),
            timeout=http.timeout(),
        )
        http.check(answer)
        self.response = torch.load(
            io.BytesIO(answer.content), map_location="cpu", weights_only=False
        )
        raise_deferred(self.response["error"])
        return self.response["saves"]  # type: ignore[no-any-return]

    @property
    def words(self) -> str:
        """What the block said, on either stream."""
        return "".join(text for _, text in self.response["said"])
