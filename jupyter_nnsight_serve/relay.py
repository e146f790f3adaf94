"""The base of the handlers that pass a body to the engine and its answer back.

A body is complete before the engine gets it (see `spool`). The answer goes back as it comes.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar

from tornado.iostream import StreamClosedError

from .admission import Trace
from .base import NNsightHandler
from .errors import NNsightServeError, Stalled, TooLarge, TraceTimeout, body_of, message_of
from .framed import CONTENT_TYPE, ERROR, FrameWatch, json_frame
from .spool import BodyGone, Spool
from .upstream import EngineLost, Exchange, ResponseHead

# Headers of the engine's answer that go on to the caller.
_RETURNED = ("Content-Type", "Content-Length", "Retry-After", "Etag")

_OUTCOMES: dict[int, str] = {503: "lost", 504: "timeout", 413: "too_large", 507: "too_large"}


class StreamingHandler(NNsightHandler):
    """A request that the engine answers.

    Subclasses say where in the engine it goes (`target`) and what follows from the answer
    (`answered`, `ended`).
    """

    # Whether it has a body, which is kept until it is complete.
    takes_body: ClassVar[bool] = True

    body: Spool | None = None
    exchange: Exchange | None = None
    trace: Trace | None = None
    sent = False
    _gone = False
    _head: ResponseHead | None = None
    _watch: FrameWatch | None = None
    _bytes_out = 0
    _stall: asyncio.TimerHandle | None = None

    def target(self) -> tuple[str, str, dict[str, str]]:
        """Method, path and headers of the engine's request."""
        raise NotImplementedError

    def answered(self, head: ResponseHead) -> None:
        """The engine's answer has begun."""

    def ended(self, outcome: str, told: dict[str, str]) -> None:
        """The request is over, in one of `metrics.OUTCOMES`, with the engine's headers."""

    def expect(self) -> None:
        """Check the request's headers, before its body is read."""
        limit = self.engine_settings.max_request_bytes
        length = self.body_length
        try:
            if length is not None and length > limit:
                raise TooLarge(length, limit, announced=True)
            self.supervisor.upstream()
        except NNsightServeError as error:
            self.over(_outcome_of(error))
            raise
        if self.takes_body:
            self.body = Spool(self.engine_settings.spool_dir)
            self._await_more()

    def _await_more(self) -> None:
        """Wait for the next piece of the body, and not for ever."""
        if self._stall is not None:
            self._stall.cancel()
        loop = asyncio.get_running_loop()
        self._stall = loop.call_later(self.engine_settings.stall_timeout, self._stalled)

    def _stalled(self) -> None:
        # Kept, because the loop holds tasks weakly.
        self._telling = asyncio.ensure_future(
            self.give_up(Stalled(self.engine_settings.stall_timeout))
        )

    async def data_received(self, chunk: bytes) -> None:
        """Keep a piece of the body."""
        if self._refused or self.body is None:
            await super().data_received(chunk)
            return
        self._await_more()
        try:
            await self.body.write(chunk)
            size, limit = self.body.size, self.engine_settings.max_request_bytes
            if self.trace is not None:
                self.trace.bytes_in = size
            if size > limit:
                raise TooLarge(size, limit, announced=False)
        except NNsightServeError as error:
            await self.give_up(error)

    async def relay(self) -> None:
        """The body is complete: give it to the engine, wait for the answer and pass it on."""
        self.complete()
        if self._refused:
            self._after_refusal()
            return
        try:
            head = await self._ask()
            self.answered(head)
            await self._answer(head)
        except TimeoutError:
            await self.give_up(TraceTimeout(self.engine_settings.trace_timeout))
        except (EngineLost, BodyGone, StreamClosedError):
            if self._gone:
                self._end_gone()
            else:
                await self.give_up(await self.supervisor.lost())
        except NNsightServeError as error:
            await self.give_up(error)
        except Exception:
            # Nobody expected it: it is logged and answered as such, and holds no place.
            if self.exchange is not None:
                self.exchange.abort()
            self.over("lost")
            raise

    def complete(self) -> None:
        """The body is complete."""
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    async def _ask(self) -> ResponseHead:
        """Send the request to the engine, and wait until its answer begins."""
        method, path, headers = self.target()
        size = 0 if self.body is None else self.body.size
        exchange = await self.supervisor.upstream().open(method, path, headers, size)
        self.exchange = exchange
        if self._gone:
            exchange.abort()
        if self.body is not None:
            async for piece in self.body.pieces():
                await exchange.write(piece)
            self.body.close()
        exchange.end()
        self.sent = True
        self._head = await exchange.response(self.engine_settings.trace_timeout)
        return self._head

    async def _answer(self, head: ResponseHead) -> None:
        """Pass the engine's answer on."""
        assert self.exchange is not None
        framed = head.headers.get("Content-Type") == CONTENT_TYPE
        if framed:
            self._watch = self._watch or FrameWatch()
        if self._headers_written and not framed:
            # The answer has begun with frames, so the engine's refusal ends it in one.
            status, refusal = await self.exchange.json(self.engine_settings.trace_timeout)
            await self._finish_framed(status, str(refusal.get("message", "")))
            return
        if not self._headers_written:
            self.set_status(head.status)
            for name in _RETURNED:
                if name in head.headers:
                    self.set_header(name, head.headers[name])
        await self.exchange.body_to(self._pass_on)
        self.finish(set_content_type=head.headers.get("Content-Type", "application/json"))
        self._end_answered(head)

    async def _pass_on(self, chunk: bytes) -> None:
        if self._watch is not None:
            self._watch.feed(chunk)
        await self.send(chunk)

    async def send(self, chunk: bytes) -> None:
        """Send a piece of the answer; returns when the connection has taken it."""
        self._bytes_out += len(chunk)
        if self.trace is not None:
            self.trace.bytes_out = self._bytes_out
        self.write(chunk)
        try:
            async with asyncio.timeout(self.engine_settings.stall_timeout):
                await self.flush()
        except TimeoutError:
            # A reader that reads no more holds a place on the engine.
            self._gone = True
            self._connection.close()
            raise StreamClosedError from None
        except StreamClosedError:
            self._gone = True
            raise

    # Ends, of which each request has one.

    def over(self, outcome: str, told: dict[str, str] | None = None) -> None:
        """Forget the body, and report the end. Safe to call again."""
        self.complete()
        if self.body is not None:
            self.body.close()
        self.ended(outcome, told or {})

    def _end_answered(self, head: ResponseHead) -> None:
        """The caller has been sent all of the answer."""
        told = dict(head.headers)
        if self._watch is not None:
            told.update(self._watch.told())
        if head.status != 200:
            outcome = _OUTCOMES.get(head.status, "refused")
        else:
            outcome = told.get("Nnsight-Outcome", "ok")
        self.over(outcome, told)

    def _end_gone(self) -> None:
        """The caller has closed the connection, perhaps because it has all it wanted."""
        head = self._head
        if head is not None and self._complete(head):
            self._end_answered(head)
        else:
            self.over("disconnected", dict(head.headers) if head else {})

    def _complete(self, head: ResponseHead) -> bool:
        """Whether the last byte of the answer is out."""
        if self._watch is not None:
            return self._watch.ended is not None
        return str(self._bytes_out) == head.headers.get("Content-Length")

    async def give_up(self, error: NNsightServeError) -> None:
        """Stop the engine's work on this request, and say why."""
        if self._refused or self._finished:
            return
        if self.exchange is not None:
            self.exchange.abort()
        self.over(_outcome_of(error))
        if not self._headers_written:
            self.refuse(error)
        elif self._watch is not None and self._watch.between_frames:
            await self._finish_framed(error.status_code, message_of(error.status_code, error))
        else:
            # Half of a result is out; only a broken connection tells the caller so.
            self._connection.close()

    async def _finish_framed(self, status: int, message: str) -> None:
        """End an answer that has begun with frames with an error in the result's place."""
        frame = json_frame(ERROR, {"status": status, **body_of(status, message)})
        try:
            await self._pass_on(frame)
        except StreamClosedError:
            self._end_gone()
            return
        self.finish(set_content_type=CONTENT_TYPE)
        self.over(_OUTCOMES.get(status, "refused"))

    def on_connection_close(self) -> None:
        """The caller is gone: closing the engine's connection aborts the work there."""
        self._gone = True
        super().on_connection_close()
        if self.exchange is not None:
            self.exchange.abort()
        self._end_gone()


def _outcome_of(error: NNsightServeError) -> str:
    return _OUTCOMES.get(error.status_code, "refused")
