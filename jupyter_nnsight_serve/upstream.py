"""HTTP to the engine over its Unix socket, streamed both ways.

A request is an `Exchange`: its body is written chunk by chunk, each write waiting until the
engine's socket took the chunk, and its response body is handed over chunk by chunk, each waiting
until the receiver is done with the one before. So the Jupyter process holds one chunk of a trace
in each direction, however large the trace is. Tornado's own client reads its response only after
the whole request is sent and cannot be told to stop; its connection class can do both.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

from tornado import httputil
from tornado.http1connection import HTTP1Connection, HTTP1ConnectionParameters
from tornado.iostream import IOStream, StreamClosedError

# Bytes read from the engine's socket at once: few wake-ups for gigabytes, little held.
CHUNK_BYTES = 256 * 1024

# Connections that are kept for the next traces.
IDLE_CONNECTIONS = 64

# The largest answer read as a whole: status, health and errors, never a trace's result.
_JSON_BYTES = 4 * 1024 * 1024

Sink = Callable[[bytes], Awaitable[None]]


async def _discard(chunk: bytes) -> None:
    """A sink for a response nobody wants any more."""


class EngineLost(Exception):
    """The connection to the engine cannot be made, or broke before the response was complete."""


class ResponseHead:
    """Status and headers of the engine's response."""

    def __init__(self, status: int, headers: httputil.HTTPHeaders) -> None:
        self.status = status
        self.headers = headers


async def _connect(path: str) -> IOStream:
    """A stream to the Unix socket at `path`.

    A Unix socket whose backlog is full answers EAGAIN at once, where TCP would wait; Tornado takes
    that for a connection on its way, so it is waited out here.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        while True:
            try:
                sock.connect(path)
                break
            except BlockingIOError:
                await asyncio.sleep(0.005)
    except BaseException:
        sock.close()
        raise
    return IOStream(sock, read_chunk_size=CHUNK_BYTES)


class Exchange(httputil.HTTPMessageDelegate):
    """One request to the engine and its response.

    The order of use is `write` any number of times, `end`, `response`, `body_to`. `abort` may come
    at any time and makes whatever waits raise `EngineLost`; so does an engine that goes away.
    """

    def __init__(
        self,
        stream: IOStream,
        start_line: httputil.RequestStartLine,
        headers: httputil.HTTPHeaders,
        release: Callable[[IOStream], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        self._connection = HTTP1Connection(
            stream,
            True,
            HTTP1ConnectionParameters(chunk_size=CHUNK_BYTES, max_body_size=sys.maxsize),
        )
        # Sent with the first piece of the body: a trace is usually one piece, and one system call.
        self._unsent: tuple[httputil.RequestStartLine, httputil.HTTPHeaders] | None
        self._unsent = (start_line, headers)
        self._release = release
        self._released = False
        self._head: asyncio.Future[ResponseHead] = loop.create_future()
        self._sink: asyncio.Future[Sink] = loop.create_future()
        self._done: asyncio.Future[None] = loop.create_future()
        self._lost = False
        # Called once when the engine goes away by itself.
        self.on_lost: Callable[[], None] | None = None
        # Reading begins with the request: only then is an engine that dies, or that answers before
        # it has the whole request, noticed while the request is still being sent.
        self._reading = asyncio.ensure_future(self._read())

    async def write(self, chunk: bytes) -> None:
        """Send a piece of the request's body; returns when the socket has taken it.

        Returns early once the response has begun: the engine may then read no further.
        """
        if self._released:
            return
        if self._unsent is not None:
            future = self._connection.write_headers(*self._unsent, chunk)
            self._unsent = None
        else:
            future = self._connection.write(chunk)
        if not future.done():
            # The connection drops the future of a write that is pending when it closes.
            await asyncio.wait(
                (future, self._head, self._reading), return_when=asyncio.FIRST_COMPLETED
            )
        if self._lost:
            raise EngineLost

    def end(self) -> None:
        """Say that the request's body is complete."""
        if self._released:
            return
        if self._unsent is not None:
            self._connection.write_headers(*self._unsent)
            self._unsent = None
        self._connection.finish()

    def answered(self) -> bool:
        """Whether the response has begun, or can no longer come."""
        return self._head.done()

    async def response(self, timeout: float) -> ResponseHead:
        """The response's head; raises `TimeoutError` when it takes more than `timeout` seconds."""
        async with asyncio.timeout(timeout):
            return await asyncio.shield(self._head)

    async def body_to(self, sink: Sink) -> None:
        """Hand the response's body to `sink`, which is awaited for each piece."""
        if not self._sink.done():
            self._sink.set_result(sink)
        await asyncio.shield(self._done)

    async def json(self, timeout: float) -> tuple[int, dict[str, Any]]:
        """Status and body of a response that is a small JSON object."""
        body = bytearray()

        async def collect(chunk: bytes) -> None:
            body.extend(chunk)
            if len(body) > _JSON_BYTES:
                self.abort()

        async with asyncio.timeout(timeout):
            head = await self.response(timeout)
            await self.body_to(collect)
        try:
            answer = json.loads(bytes(body))
        except ValueError:
            raise EngineLost from None
        return head.status, answer if isinstance(answer, dict) else {}

    def abort(self) -> None:
        """Close the connection, which makes the engine stop working on the request."""
        self.on_lost = None
        if self._released:
            return
        self._connection.close()
        if not self._sink.done():
            self._sink.set_result(_discard)
        self._lose()

    def _lose(self) -> None:
        self._lost = self._lost or not self._done.done()
        for future in (self._head, self._done):
            if not future.done():
                future.set_exception(EngineLost())
                # Whoever waits gets it; where nobody waits it is no news.
                future.exception()
        callback, self.on_lost = self.on_lost, None
        if self._lost and callback is not None:
            callback()

    async def _read(self) -> None:
        kept = False
        try:
            kept = await self._connection.read_response(self)
        except (StreamClosedError, OSError):
            pass
        finally:
            # An engine that refuses before it has the whole request closes the connection.
            if kept and self._head.result().status == 200:
                self._released = True
                self._release(self._connection.stream)
            else:
                self._lose()
                self._connection.close()

    # Tornado's side: called as the response comes in.

    async def headers_received(
        self,
        start_line: httputil.RequestStartLine | httputil.ResponseStartLine,
        headers: httputil.HTTPHeaders,
    ) -> None:
        """The response's head is there; its body is read once somebody takes it."""
        line = cast(httputil.ResponseStartLine, start_line)
        if line.code < 200:
            return
        if not self._head.done():
            self._head.set_result(ResponseHead(line.code, headers))
        await self._sink

    async def data_received(self, chunk: bytes) -> None:
        """A piece of the response's body."""
        sink = self._sink.result()
        try:
            await sink(chunk)
        except StreamClosedError:
            # The receiver is gone. Raising here would only fill the log.
            self.abort()

    def finish(self) -> None:
        """The response is complete."""
        if not self._done.done():
            self._done.set_result(None)

    def on_connection_close(self) -> None:
        """The engine's side of the connection is closed before the response was complete."""
        self._lose()


class Upstream:
    """The engine's HTTP server at the Unix socket `path`, and the connections to it that idle."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._idle: list[IOStream] | None = []

    def close(self) -> None:
        """Close the idle connections, and keep none from now on."""
        idle, self._idle = self._idle or [], None
        for stream in idle:
            stream.close()

    def _release(self, stream: IOStream) -> None:
        if stream.closed():
            return
        if self._idle is None or len(self._idle) >= IDLE_CONNECTIONS:
            stream.close()
            return
        # A stream notices that its other end is closed only while it has such a callback.
        stream.set_close_callback(lambda: self._forget(stream))
        self._idle.append(stream)

    def _forget(self, stream: IOStream) -> None:
        if self._idle and stream in self._idle:
            self._idle.remove(stream)

    async def _stream(self) -> IOStream:
        while self._idle:
            stream = self._idle.pop()
            stream.set_close_callback(None)
            if not stream.closed():
                return stream
        return await _connect(self.path)

    async def open(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str] | None = None,
        length: int | None = 0,
    ) -> Exchange:
        """Begin a request.

        Parameters
        ----------
        target
            The path in the engine, with its query.
        length
            Bytes of the body; None when it is not known, which sends it in chunks.

        Raises
        ------
        EngineLost
            Nothing listens there.
        """
        try:
            stream = await self._stream()
        except OSError:
            raise EngineLost from None
        fields = httputil.HTTPHeaders(headers or {})
        fields["Host"] = "engine"
        if length is not None:
            fields["Content-Length"] = str(length)
        start_line = httputil.RequestStartLine(method, target, "HTTP/1.1")
        return Exchange(stream, start_line, fields, self._release)

    async def ask(self, method: str, target: str, timeout: float) -> tuple[int, dict[str, Any]]:
        """Status and JSON of a request without a body; at most `timeout` seconds.

        Raises
        ------
        EngineLost
            The engine is gone, or did not answer in time.
        """
        try:
            async with asyncio.timeout(timeout):
                exchange = await self.open(method, target)
                try:
                    exchange.end()
                    return await exchange.json(timeout)
                finally:
                    exchange.abort()
        except TimeoutError:
            raise EngineLost from None
