"""Running a captured block on the server and bringing its saves home."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sys
import weakref
from collections.abc import AsyncIterator, Generator, Iterator
from types import FrameType
from typing import Any

from nnsight.tracing.backend import Backend
from nnsight.tracing.tracer import mark
from nnsight.tracing.util import push

from . import caches, lines
from .body import trace_body
from .connection import Connection
from .errors import PickledSaveError, ServedTraceError, served_error
from .exchange import Event, Exchange
from .link import Link
from .outputs import Token
from .progress import visible
from .unpickle import ForeignCode
from .wire import Outcome, PickleForbidden

_TICK_SECONDS = 0.1
_ENDS = ("done", "failed")


class ServedBackend(Backend):  # type: ignore[misc]
    """Sends one trace.

    As ``tracer.backend`` of a trace with ``stream=True`` it is what is iterated over, with ``for``
    or ``async for``, for the text as it is generated; the saves are there when that has ended.

    Parameters
    ----------
    model
        nnsight's model that the trace is written against.
    connection
        What the traces of one `connect` share.
    link
        The server it goes to.
    written
        Headers that say what the trace is written for.
    stream
        Whether the caller iterates over the text.

    Attributes
    ----------
    saves
        Name to value, once the trace has ended.
    """

    def __init__(
        self,
        model: Any,
        connection: Connection,
        link: Link,
        written: dict[str, str],
        stream: bool = False,
    ) -> None:
        self.model = model
        self.connection = connection
        self.link = link
        self.written = written
        self.stream = stream
        self.awaited = False
        self.saves: dict[str, Any] = {}
        self._frame: FrameType | None = None
        self._body: bytes | None = None
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._exchange: Exchange | None = None

    # The three ways a trace is run.

    def __call__(self, tracer: Any) -> None:
        """Run the block; called by nnsight when its ``with`` ends."""
        self._body = trace_body(tracer)
        self._frame = tracer.info.frame
        if self.awaited:
            return
        if self.stream:
            exchange = self._start(self._events.put)
            # Who never reads the text does not want the trace, which would hold its place.
            weakref.finalize(self, exchange.close)
            return
        try:
            self._finish(self._wait())
        finally:
            self._frame = None

    async def run(self) -> None:
        """Run the block without holding up the event loop."""
        try:
            async for _ in self._aevents():
                pass
        finally:
            self._frame = None

    def __iter__(self) -> Iterator[Token]:
        """The text of a trace with ``stream=True`` as it is generated."""
        __tracebackhide__ = True
        self._check_streams()
        try:
            yield from self._tokens()
        except GeneratorExit:
            raise
        except BaseException as error:
            lines.raise_at(error, _reader(sys._getframe()))

    def _tokens(self) -> Iterator[Token]:
        try:
            for event in self._listen():
                if event.kind == "token":
                    yield _token(event.value)
                else:
                    self._finish(_outcome(event))
        finally:
            self._end()

    async def __aiter__(self) -> AsyncIterator[Token]:
        """`__iter__`, for ``async for``."""
        __tracebackhide__ = True
        self._check_streams()
        try:
            # A thread waits, and not the loop.
            while (event := await asyncio.to_thread(self._next)) is None or event.kind not in _ENDS:
                if event is not None and event.kind == "token":
                    yield _token(event.value)
            self._finish(_outcome(event))
        except GeneratorExit:
            self._end()
            raise
        except BaseException as error:
            self._end()
            lines.raise_at(error, _reader(sys._getframe()))
        self._end()

    def __await__(self) -> Generator[Any, None, dict[str, Any]]:
        """Wait for a trace with ``stream=True`` without looking at its text; gives its saves."""

        async def drain() -> dict[str, Any]:
            async for _ in self:
                pass
            return self.saves

        return drain().__await__()

    # What they share.

    def _start(self, report: Any) -> Exchange:
        assert self._body is not None
        headers = dict(self.written)
        if self.stream:
            headers["Nnsight-Tokens"] = "1"
        elif self.connection.line.wanted and visible():
            # Counting the tokens costs the engine a little, so only for somebody who looks.
            headers["Nnsight-Progress"] = "1"
        body, self._body = memoryview(self._body), None
        allow_pickle = self.connection.allow_pickle
        self._exchange = Exchange(self.link, headers, body, allow_pickle, report)
        self._exchange.start()
        return self._exchange

    def _next(self) -> Event | None:
        try:
            return self._events.get(timeout=_TICK_SECONDS)
        except queue.Empty:
            return None

    def _listen(self) -> Iterator[Event]:
        """Tokens and the end; between them the line of progress is kept."""
        progress = self.connection.line.trace(shown=not self.stream)
        try:
            while True:
                event = self._next()
                if event is None:
                    progress.tick()
                elif event.kind == "state":
                    progress.state(event.value)
                elif event.kind == "receiving":
                    progress.receiving(*event.value)
                else:
                    yield event
                    if event.kind != "token":
                        return
        finally:
            progress.close()

    def _wait(self) -> Outcome:
        exchange = self._start(self._events.put)
        try:
            # One more event than tokens: the end.
            *_, last = self._listen()
        except BaseException:
            # Interrupted: the server stops the trace when the connection ends.
            exchange.close()
            raise
        return _outcome(last)

    async def _aevents(self) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event] = asyncio.Queue()

        def report(event: Event) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        exchange = self._start(report)
        progress = self.connection.line.trace()
        try:
            while True:
                try:
                    event = await asyncio.wait_for(events.get(), _TICK_SECONDS)
                except TimeoutError:
                    progress.tick()
                    continue
                if event.kind == "state":
                    progress.state(event.value)
                elif event.kind == "receiving":
                    progress.receiving(*event.value)
                elif event.kind != "token":
                    break
                yield
        except BaseException:
            exchange.close()
            raise
        finally:
            progress.close()
        self._finish(_outcome(event))

    def _check_streams(self) -> None:
        if not self.stream:
            raise TypeError("only a trace with stream=True is iterated over")
        if self._exchange is None:
            raise RuntimeError("this trace's text has been read; it comes once")

    def _end(self) -> None:
        if self._exchange is not None:
            self._exchange.close()
        self._exchange = self._frame = None

    def _finish(self, outcome: Outcome) -> None:
        """Hand over what came: saves first, then what the blocks said, then what went wrong."""
        for view in outcome.views:
            caches.adopt(view, self.model)
        for value in outcome.saves.values():
            # Read by an enclosing session, which keeps only what is marked.
            mark(value)
        self.saves = outcome.saves
        if self._frame is not None:
            push(self._frame, outcome.saves)
        for stream, text in outcome.said:
            # A closed stream is no reason to lose the result.
            with contextlib.suppress(OSError, ValueError), self.connection.line.aside():
                print(text, end="", file=sys.stdout if stream == "stdout" else sys.stderr)
        if outcome.error is not None and not outcome.error.get("is_control_flow"):
            raise _served(outcome.error)
        if outcome.undecoded:
            raise _undecoded(outcome.undecoded)

    def __repr__(self) -> str:
        return f"<ServedBackend {self.link.url}>"


def _reader(frame: FrameType) -> FrameType | None:
    """The frame that reads the text, of which ``frame`` is the nearest one of this module."""
    found: FrameType | None = frame
    while found is not None and found.f_code.co_filename == __file__:
        found = found.f_back
    return found


def _token(value: dict[str, Any]) -> Token:
    return Token(
        value.get("text", ""),
        list(value.get("token_ids", ())),
        value.get("invoke", 0),
        value.get("sequence", 0),
    )


def _outcome(event: Event) -> Outcome:
    if event.kind == "failed":
        raise event.value
    found: Outcome = event.value
    return found


def _served(error: dict[str, Any]) -> ServedTraceError:
    return served_error(
        error.get("type_name", "Exception"),
        error.get("message", ""),
        error.get("traceback") or "",
        error.get("bases") or (),
    )


def _undecoded(undecoded: dict[str, Exception]) -> Exception:
    """Why saves could not be made here; the others are in place."""
    names = " and ".join(f"`{name}`" for name in undecoded)
    why = next(iter(undecoded.values()))
    if isinstance(why, PickleForbidden):
        return PickledSaveError(
            f"{names} came as a pickle, which connect(allow_pickle=False) forbids to open; save "
            "tensors, numbers, strings and lists, tuples or dicts of them. The other saves are "
            "here."
        )
    if isinstance(why, ForeignCode):
        return PickledSaveError(
            f"{names} holds {why}; save its parts as plain values. The other saves are here."
        )
    if isinstance(why, ImportError):
        module = (why.name or str(why)).partition(".")[0]
        return PickledSaveError(
            f"{names} needs the module {module!r}, which is not installed here; save the parts of "
            "it that you need. The other saves are here."
        )
    return PickledSaveError(
        f"{names} could not be made here ({type(why).__name__}: {why}); save its parts. The other "
        "saves are here."
    )
