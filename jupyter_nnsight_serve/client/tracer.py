"""The tracers of a served model: ``with`` and ``async with``, and short tracebacks."""

from __future__ import annotations

import asyncio
import sys
import uuid
import warnings
from types import CodeType, FrameType
from typing import Any

from nnsight.intervention.interleaver import Mediator
from nnsight.modeling.vllm.registration import RegisteringTracer, ServeRegistration
from nnsight.modeling.vllm.tracer import VLLMTracer
from nnsight.tracing.tracer import skip_context, skippable

from ..parsing import again
from . import edits, lines, magics
from .body import edit_body
from .link import Link


class Parsing:
    """Finds the block of a tracer, also while another thread parses."""

    def parse(self, *arguments: Any) -> Any:
        """See nnsight's ``Tracer.parse``."""
        return again(lambda: super(Parsing, self).parse(*arguments))  # type: ignore[misc]


class ServedTracer(Parsing, VLLMTracer):  # type: ignore[misc]
    """A trace on a served model; travels as nnsight's own class."""

    def __reduce_ex__(self, protocol: object) -> Any:
        return object.__new__, (VLLMTracer,), self.__getstate__()

    def _frame(self) -> FrameType | None:
        frame: FrameType | None = self.info.frame if self.info is not None else None
        return frame

    def __exit__(self, *exception: Any) -> bool:
        __tracebackhide__ = True
        frame = self._frame()
        try:
            handled: bool = super().__exit__(*exception)
            return handled
        except BaseException as error:
            lines.raise_at(error, frame)

    def __enter__(self) -> ServedTracer:
        # Spelled out, because both look for the caller's frame at a fixed depth.
        magics.lend_source(sys._getframe(1))
        self.capture()
        if skippable(self.node):
            skip_context(self)
        return self

    async def __aenter__(self) -> ServedTracer:
        # Spelled out, as `__enter__` is.
        magics.lend_source(sys._getframe(1))
        self.capture()
        if skippable(self.node):
            skip_context(self)
        return self

    async def __aexit__(self, *exception: Any) -> bool:
        __tracebackhide__ = True
        frame, backend = self._frame(), self.backend
        try:
            # What streams is waited for where its text is read.
            backend.awaited = not getattr(backend, "stream", False)
            handled: bool = super().__exit__(*exception)
            if handled and backend.awaited:
                await backend.run()
            return handled
        except BaseException as error:
            lines.raise_at(error, frame)


class ServedRegistration(ServeRegistration):  # type: ignore[misc]
    """The handle on an edit that was installed from here."""

    def __init__(
        self, model: Any, identity: str, link: Link, name: str | None, shared: bool
    ) -> None:
        super().__init__(model, identity, link.url, api_key=None, name=name)
        self.link = link
        self.shared = shared

    def install(self, payload: bytes) -> None:
        for warning in edits.install(self.link, self.id, self.name, payload, self.shared):
            # install <- RegisteringTracer.__exit__ <- our __exit__ <- the person's line.
            warnings.warn(warning, stacklevel=4)

    async def ainstall(self, payload: bytes) -> None:
        for warning in await asyncio.to_thread(
            edits.install, self.link, self.id, self.name, payload, self.shared
        ):
            warnings.warn(warning, stacklevel=4)

    def uninstall(self) -> None:
        edits.clear(self.link, self.id)

    async def auninstall(self) -> None:
        await asyncio.to_thread(edits.clear, self.link, self.id)


class ServedEdit(Parsing, RegisteringTracer):  # type: ignore[misc]
    """A block that stays on the engine: ``with model.edit() as (tracer, edit):``."""

    def __init__(self, model: Any, link: Link, name: str | None, shared: bool) -> None:
        super().__init__(model, serve=link.url, name=name)
        self._link = link
        self._shared = shared

    def _handle(self) -> ServedRegistration:
        return ServedRegistration(
            self._model, f"registration-{uuid.uuid4().hex}", self._link, self._name, self._shared
        )

    def __enter__(self) -> tuple[ServedEdit, ServedRegistration]:
        # Spelled out, because all look for the caller's frame at a fixed depth.
        magics.lend_source(sys._getframe(1))
        self.capture()
        if skippable(self.node):
            skip_context(self)
        self.registration = self._handle()
        return self, self.registration

    async def __aenter__(self) -> tuple[ServedEdit, ServedRegistration]:
        # Spelled out, as `__enter__` is.
        magics.lend_source(sys._getframe(1))
        self.capture()
        if skippable(self.node):
            skip_context(self)
        self.registration = self._handle()
        return self, self.registration

    def __reduce_ex__(self, protocol: object) -> Any:
        # A block with `tracer.all()` reads the tracer, of which the engine needs no more than a
        # trace's: where the block was sent, and the handle on it, stay here.
        state: Any = self.__getstate__()
        own = {key: state[key] for key in ("info", "envoy", "fn", "args", "kwargs")}
        return object.__new__, (VLLMTracer,), own

    def execute(self, code: CodeType) -> None:
        frame = self.info.frame
        template = Mediator(code, frame.f_globals, dict(frame.f_locals), node=self.node)
        self._payload = edit_body(template, self._model)

    def __exit__(self, *exception: Any) -> bool:
        __tracebackhide__ = True
        frame = self.info.frame if self.info is not None else None
        try:
            handled: bool = super().__exit__(*exception)
            return handled
        except BaseException as error:
            lines.raise_at(error, frame)

    async def __aexit__(self, *exception: Any) -> bool:
        __tracebackhide__ = True
        frame = self.info.frame if self.info is not None else None
        try:
            handled: bool = await super().__aexit__(*exception)
            return handled
        except BaseException as error:
            lines.raise_at(error, frame)
