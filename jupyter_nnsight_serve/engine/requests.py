"""The blocks riding a worker's requests, with what serving several people adds.

nnsight's `Requests` keeps the workers of every request. Added here: the source of each request
lives in a scope of its own, what its blocks say is kept for its caller, and a loop that ends early
says so there too.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from nnsight.modeling.vllm.model_runners.GPUModelRunner import Requests

from . import blocks, sizes, sources
from .blocks import Block
from .said import Said
from .sources import Scope

BLOCK = "serve_block"
"""Key of ``SamplingParams.extra_args`` under which a request carries its serialized block."""

SCOPE = "serve_scope"
"""Key under which it carries ``[scope key, file name]`` for the block's source."""

EDITS = "serve_edits"
"""Key under which a served request carries the keys of the edits that are there for it."""


class ServeRequests(Requests):
    """nnsight's requests of one worker, each with its own edits, sources and voice."""

    templates: dict[str, Any]
    names: dict[str, str | None]

    def __init__(self) -> None:
        super().__init__()
        self.said: dict[str, Said] = {}
        self.scopes: dict[str, str] = {}
        self.runs: dict[str, int] = {}

    def register(
        self,
        registration_id: str,
        payload: bytes,
        persistent_objects: dict[str, Any],
        name: str | None = None,
    ) -> None:
        scope = Scope(f"edit {registration_id}", f"<edit {name or registration_id}>")
        sources.release(scope.key)
        self.templates[registration_id] = blocks.loads(payload, persistent_objects, scope)
        self.names[registration_id] = name
        self.runs[registration_id] = 0

    def unregister(self, registration_id: str) -> None:
        super().unregister(registration_id)
        self.runs.pop(registration_id, None)
        sources.release(f"edit {registration_id}")

    def add(self, new_requests: list[Any], persistent_objects: dict[str, Any]) -> None:
        fresh = [data for data in new_requests if data.req_id not in self.requests]
        for data in fresh:
            extra = data.sampling_params.extra_args or {}
            # A request that nnsight makes in its own process does not say, and runs them all.
            with self._only(extra.get(EDITS, list(self.templates))):
                super().add([data], persistent_objects)
            request = self.requests[data.req_id]
            for key in request.copies:
                self.runs[key] += 1
            if BLOCK in extra:
                scope = Scope(*extra[SCOPE])
                self.scopes[request.id] = scope.key
                try:
                    request.mediator = blocks.loads(extra[BLOCK], persistent_objects, scope)
                except Exception as exception:
                    request.error = request.error or sources.capture_exception(exception)
            said = self.said[request.id] = Said()
            for mediator in request.workers():
                mediator.__class__ = Block
                mediator.said = said

    @contextlib.contextmanager
    def _only(self, keys: Sequence[str]) -> Iterator[None]:
        """Have the edits of ``keys`` be all that are installed, in their order."""
        installed = self.templates, self.names
        keys = [key for key in keys if key in self.templates]
        self.templates = {key: self.templates[key] for key in keys}
        self.names = {key: self.names[key] for key in keys}
        try:
            yield
        finally:
            self.templates, self.names = installed

    def serve_result(self, mediator: Any, output: Any) -> None:
        try:
            super().serve_result(mediator, output)
        except Exception as exception:
            # Raised by the block, after its last step: nnsight 0.8.1 lets it end the collect, which
            # takes along what the block saved and every request collected with it.
            mediator.exception = exception
            mediator.pending = None
            self.record(mediator)

    def finish_dangling(
        self, mediator: Any, taps: frozenset[str] = frozenset(), quiet: bool = False
    ) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            super().finish_dangling(mediator, taps, quiet)
        for warning in caught:
            mediator.said.add("stderr", f"{warning.category.__name__}: {warning.message}\n")

    def speakers(self, ids: set[str]) -> list[tuple[str, Said]]:
        """Whose words the requests named by ``ids`` are: the engine's request id, and the words."""
        return [
            (request.key(ids)[0], self.said[request.id])
            for request in self.requests.values()
            if request.named(ids) and request.id in self.said
        ]

    def limit(self, ids: set[str], max_bytes: int) -> None:
        """Put an error in the place of saves of more than ``max_bytes`` bytes."""
        for request in self.requests.values():
            if request.mediator is None or not request.named(ids):
                continue
            try:
                sizes.check(request.saves(), max_bytes)
            except Exception as error:
                request.error = request.error or sources.capture_exception(error)
                request.mediator.nnsight_saved = set()
                request.mediator.presaved = set()

    def forget(self) -> None:
        """Give back what belonged to requests that are over."""
        for request_id in self.said.keys() - self.requests.keys():
            del self.said[request_id]
            if request_id in self.scopes:
                sources.release(self.scopes.pop(request_id))
