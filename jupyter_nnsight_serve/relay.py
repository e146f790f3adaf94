"""The base of the handlers that pass a body to the engine and its answer back, as both come."""

from __future__ import annotations

import asyncio
import time

from tornado.iostream import StreamClosedError

from . import framed
from .admission import Trace
from .base import NNsightHandler
from .errors import NNsightServeError, TooLarge, TraceTimeout
from .upstream import EngineLost, Exchange, ResponseHead


class StreamingHandler(NNsightHandler):
    """A request whose body goes to the engine as it comes, and whose answer comes back likewise.

    Subclasses say where in the engine it goes (`target`) and what follows from the answer
    (`answered`).
    """

    exchange: Exchange | None = None
    trace: Trace | None = None
    bytes_in = 0
    sent = False
    _gone = False
    _head: ResponseHead | None = None
    _tail = b""
    _bytes_out = 0

    def target(self) -> tuple[str, str, dict[str, str]]:
        """Method, path and headers of the engine's request; may raise to refuse."""
        raise NotImplementedError

    def answered(self, head: ResponseHead) -> None:
        """The engine's answer has begun."""

    def ended(self, outcome: str, head: ResponseHead | None) -> None:
        """The request is over, in one of `metrics.OUTCOMES`."""

    async def open(self) -> None:
        """Check the request's headers and begin the engine's request."""
        limit = self.engine_settings.max_request_bytes
        length = self.body_length
        method, path, headers = self.target()
        try:
            if length is not None and length > limit:
                raise TooLarge(length, limit, announced=True)
            self.exchange = await self.supervisor.upstream().open(method, path, headers, length)
            self.exchange.on_lost = self._engine_lost
        except EngineLost:
            self.ended("lost", None)
            raise await self.supervisor.lost() from None
        except NNsightServeError as error:
            self.ended("too_large" if isinstance(error, TooLarge) else "refused", None)
            raise

    async def data_received(self, chunk: bytes) -> None:
        """Pass a piece of the body on, and wait until the engine's socket has taken it."""
        if self._refused or self.exchange is None:
            await super().data_received(chunk)
            return
        self.bytes_in += len(chunk)
        if self.trace is not None:
            self.trace.bytes_in = self.bytes_in
        limit = self.engine_settings.max_request_bytes
        if self.bytes_in > limit:
            self.give_up("too_large", TooLarge(self.bytes_in, limit, announced=False))
        elif not self.exchange.answered():
            try:
                await self.exchange.write(chunk)
            except EngineLost:
                # `_engine_lost` answers.
                return

    def _engine_lost(self) -> None:
        """The engine went away; the caller is told now, also when its body has stalled."""
        if not self.sent:
            # Kept, because the loop holds tasks weakly.
            self._telling = asyncio.ensure_future(self._tell_lost())

    async def _tell_lost(self) -> None:
        self.give_up("lost", await self.supervisor.lost())

    async def relay(self) -> None:
        """The body is complete: wait for the engine's answer and pass it on."""
        exchange = self.exchange
        if self._refused or exchange is None:
            if not self._finished:
                self.finish()
            return
        try:
            exchange.end()
            self.sent = True
            if self.trace is not None:
                self.trace.forwarded = time.monotonic()
            head = await exchange.response(self.engine_settings.trace_timeout)
            self._head = head
            self.answered(head)
            self.set_status(head.status)
            for name in ("Content-Type", "Content-Length", "Retry-After", "Etag"):
                if name in head.headers:
                    self.set_header(name, head.headers[name])
            await exchange.body_to(self._pass_on)
        except TimeoutError:
            self.give_up("timeout", TraceTimeout(self.engine_settings.trace_timeout))
        except EngineLost:
            if self._gone:
                self._end_gone()
            else:
                self.give_up("lost", await self.supervisor.lost())
        else:
            self.finish(set_content_type=head.headers.get("Content-Type", "application/json"))
            self._end_answered(head)

    def _end_answered(self, head: ResponseHead) -> None:
        """The caller has been sent all of the answer."""
        outcome = _outcome(head)
        if head.headers.get("Content-Type") == framed.CONTENT_TYPE:
            told = framed.end_of(self._tail)
            outcome = "refused" if told is None else told["Nnsight-Outcome"]
            head.headers.update(told or {})
        self.ended(outcome, head)

    def _end_gone(self) -> None:
        """The caller has closed the connection, perhaps because it has all it wanted."""
        if self._head is not None and self._complete(self._head):
            self._end_answered(self._head)
        else:
            self.ended("disconnected", self._head)

    def _complete(self, head: ResponseHead) -> bool:
        """Whether the last byte of the answer is out."""
        if head.headers.get("Content-Type") == framed.CONTENT_TYPE:
            return framed.end_of(self._tail) is not None
        return str(self._bytes_out) == head.headers.get("Content-Length")

    async def _pass_on(self, chunk: bytes) -> None:
        self._tail = (self._tail + chunk[-framed.TAIL_BYTES :])[-framed.TAIL_BYTES :]
        self._bytes_out += len(chunk)
        if self.trace is not None:
            self.trace.bytes_out = self._bytes_out
        self.write(chunk)
        try:
            await self.flush()
        except StreamClosedError:
            self._gone = True
            raise

    def give_up(self, outcome: str, error: NNsightServeError) -> None:
        """Stop the engine's work on this request, and say why."""
        if self._refused:
            return
        if self.exchange is not None:
            self.exchange.abort()
        self.ended(outcome, None)
        if self._headers_written:
            self._connection.close()
        else:
            self.refuse(error)

    def on_connection_close(self) -> None:
        """The caller is gone: closing the engine's connection aborts the work there."""
        self._gone = True
        super().on_connection_close()
        if self.exchange is not None:
            self.exchange.abort()
        self._end_gone()


def _outcome(head: ResponseHead) -> str:
    """How a trace that was answered in full ended."""
    if head.status != 200:
        return "lost" if head.status == 503 else "refused"
    return "error" if head.headers.get("Nnsight-Outcome") == "error" else "ok"
