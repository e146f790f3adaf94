"""What the engine process does for a request, whatever it was asked through."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from vllm.v1.engine.exceptions import EngineDeadError

from . import raw, sizes, wire
from .blocks import contained
from .build import Builder
from .errors import BadBodyError, EngineDownError, EngineError, OtherModelError
from .frames import Progress
from .model import describe
from .published import Published
from .run import Outcome, Runner
from .scan import Scan
from .sources import capture_exception

THREAD_BYTES = 2**20
"""Results of more bytes than this are encoded on a thread, so that the loop keeps running."""

SOURCE_CHARACTERS = 20_000
"""Of an edit's source as a listing shows it."""

STATUS_SECONDS = 2.0
"""Seconds a status answer waits for the workers before it goes out without their count."""


Encode = Callable[[Outcome], list[memoryview | bytes]]
"""Turns an outcome into the pieces of a response's body."""


class Engine:
    """What the handlers share: the model and what builds and runs traces on it.

    Parameters
    ----------
    model
        A dispatched asynchronous ``nnsight.modeling.vllm.VLLM``.
    max_request_bytes, max_response_bytes
        Largest body of a request and of a response, in bytes.
    max_trace_tokens
        Most tokens a trace may ask to generate; 0 for no limit.
    scan
        Looks at bodies before they are loaded.
    """

    def __init__(
        self,
        model: Any,
        max_request_bytes: int,
        max_response_bytes: int,
        max_trace_tokens: int = 0,
        scan: Scan | None = None,
    ) -> None:
        self.model = model
        self.llm = model.vllm_entrypoint
        self.builder = Builder(model, max_request_bytes, max_trace_tokens, scan)
        self.runner = Runner(self.llm, max_response_bytes)
        self.max_request_bytes = max_request_bytes
        self.max_response_bytes = max_response_bytes
        self.description = describe(model)
        self.published = Published(model, self.description)
        self.sources: dict[str, str] = {}

    def check_tree(self, tree_id: str | None, name: str | None) -> None:
        """Refuse a trace whose client says it was written for another tree.

        Parameters
        ----------
        tree_id
            The id of the client's tree; None for a client that sends the tree itself.
        name
            The client's model.
        """
        if tree_id is not None and tree_id != self.published.tree_id:
            raise OtherModelError(
                f"The server serves {self.builder.name}, this trace was written for "
                f"{name or 'another model'}: their module trees differ. Connect again to get the "
                "served model's."
            )

    async def generate(
        self,
        body: bytes,
        compressed: bool,
        encode: Encode,
        progress: Progress | None = None,
        edits: Sequence[str] = (),
    ) -> tuple[Outcome, list[memoryview | bytes]]:
        """Run a serialized trace.

        Parameters
        ----------
        encode
            `encode_stock` or `encode_raw`.
        progress
            Told how far it is.
        edits
            Keys of the installed edits it may run.

        Returns
        -------
        tuple
            What it came to, and that as the pieces of the response's body. A caller's own error,
            in the build or in a block, is part of the outcome.
        """
        try:
            trace = self.builder.trace(body, compressed, progress is not None, edits)
        except EngineError:
            raise
        except Exception as error:
            outcome = Outcome(error=capture_exception(error))
        else:
            outcome = await self.runner.run(trace, progress)
        try:
            total = sizes.check(outcome.saves, self.max_response_bytes)
        except sizes.SaveTooLargeError as error:
            outcome, total = outcome.failed(error), 0
        try:
            parts = (
                await asyncio.to_thread(encode, outcome)
                if total > THREAD_BYTES
                else encode(outcome)
            )
            # What the look at the saves did not count, such as long lists of numbers.
            sizes.check_encoded(sum(map(len, parts)), self.max_response_bytes)
        except Exception as error:
            outcome = outcome.failed(error)
            parts = encode(outcome)
        return outcome, parts

    async def register(
        self, edit_id: str, body: bytes, compressed: bool, name: str | None
    ) -> list[str]:
        """Install an edit on every worker.

        Returns
        -------
        list of str
            What the person who installs it should know.
        """
        body = self.builder.decompressed(body, compressed)
        try:
            source = self.builder.edit(body)
        except EngineError:
            raise
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            raise BadBodyError(f"The edit could not be installed: {said}") from error
        for refused in await self._workers("serve_register", edit_id, body, name):
            if refused is not None:
                await self.clear(edit_id)
                raise BadBodyError(f"The edit could not be installed: {refused}")
        self.sources[edit_id] = source
        if self.llm.vllm_config.cache_config.enable_prefix_caching:
            return [
                "This engine runs with prefix caching, so requests that nnsight did not make may "
                "skip tokens it has cached, and the edit does not see those."
            ]
        return []

    async def clear(self, edit_id: str) -> None:
        """Remove an edit from every worker; an unknown id changes nothing."""
        self.sources.pop(edit_id, None)
        await self._workers("nnsight_clear_registered", edit_id)

    async def edits(self, keys: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Source, and requests run so far, of the installed edits with these keys."""
        runs: dict[str, int] = (await self._workers("serve_edit_runs"))[0]
        return {
            key: {"source": self.sources[key][:SOURCE_CHARACTERS], "runs": runs.get(key, 0)}
            for key in keys
            if key in self.sources
        }

    async def status(self) -> dict[str, Any]:
        """The model, versions, settings and load of this engine."""
        try:
            counts = await asyncio.wait_for(self._workers("nnsight_request_count"), STATUS_SECONDS)
            tracked = max(counts)
        except (TimeoutError, EngineError):
            tracked = None
        return {
            **self.description,
            "running": self.runner.active,
            "waiting": 0,
            "tracked_requests": tracked,
        }

    async def tokenizer(self) -> tuple[str, bytes]:
        """The tokenizer's id and its files as a zip archive."""
        identity = await asyncio.to_thread(lambda: self.published.tokenizer_id)
        return identity, self.published.tokenizer

    async def _workers(self, method: str, *args: Any) -> list[Any]:
        """Call ``method`` on every worker."""
        try:
            result: list[Any] = await self.llm.collective_rpc(method, args=args)
        except EngineDeadError:
            raise EngineDownError("The engine has died; try again once it is ready.") from None
        return result


def encode_stock(outcome: Outcome) -> list[memoryview | bytes]:
    """An outcome as the stock client reads it."""
    with contained():
        return [wire.encode(outcome)]


def encode_raw(outcome: Outcome) -> list[memoryview | bytes]:
    """An outcome as this project's client reads it."""
    with contained():
        return list(raw.Encoder().parts(outcome))
