"""The engine process's HTTP server: traces, edits and status, on a Unix socket only."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
from collections.abc import Iterator
from typing import Any, cast
from urllib.parse import unquote

from tornado import web
from tornado.http1connection import HTTP1Connection
from tornado.httpserver import HTTPServer
from tornado.iostream import StreamClosedError

from . import frames
from .errors import EngineDownError, EngineError, TooLargeError, TraceTimeoutError
from .frames import Progress
from .run import Outcome
from .service import Engine, encode_raw, encode_stock

log = logging.getLogger("jupyter_nnsight_serve.engine")

CHUNK_BYTES = 2**20
"""Bytes written to the socket before waiting for its reader."""


@web.stream_request_body
class Handler(web.RequestHandler):
    """Base of the handlers: reads the body in chunks up to a limit, answers errors as JSON."""

    def initialize(self, engine: Engine) -> None:
        self.engine = engine
        self.chunks: list[bytes] = []
        self.received = 0

    def prepare(self) -> None:
        # Tornado's own limit would answer with a bare 400.
        cast(HTTP1Connection, self.request.connection).set_max_body_size(2**62)

    def data_received(self, chunk: bytes) -> None:
        self.received += len(chunk)
        if self.received > self.engine.max_request_bytes:
            self.chunks.clear()
        else:
            self.chunks.append(chunk)

    @property
    def compressed(self) -> bool:
        """Whether the body is a zstd frame, as nnsight's clients say it."""
        return self.request.headers.get("nnsight-compress", "").lower() == "true"

    def check_tree(self) -> None:
        """Refuse what its client says was written for another tree."""
        headers = self.request.headers
        self.engine.check_tree(
            headers.get("Nnsight-Tree"), unquote(headers.get("Nnsight-Model", ""))
        )

    def body(self) -> bytes:
        """The whole body."""
        if self.received > self.engine.max_request_bytes:
            raise TooLargeError(
                f"The body is {self.received} bytes, more than the "
                f"{self.engine.max_request_bytes} bytes this server takes (max_request_bytes); "
                "capture less in the block."
            )
        body = b"".join(self.chunks)
        self.chunks.clear()
        return body

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        error = kwargs["exc_info"][1] if "exc_info" in kwargs else None
        if isinstance(error, EngineError):
            message, reason = str(error), error.reason
        elif isinstance(error, web.HTTPError):
            message, reason = error.log_message or self._reason, self._reason
        else:
            message = f"The engine process failed on this request: {type(error).__name__}: {error}"
            reason = "Engine error"
        self.finish({"message": message, "reason": reason, "detail": message})

    def log_exception(self, typ: Any, value: Any, tb: Any) -> None:
        if not isinstance(value, EngineError):
            super().log_exception(typ, value, tb)

    def _handle_request_exception(self, error: BaseException) -> None:
        if isinstance(error, EngineError):
            self.set_status(error.status, error.reason)
            self.write_error(error.status, exc_info=(type(error), error, None))
        else:
            super()._handle_request_exception(error)


class GenerateHandler(Handler):
    """Runs a trace; the caller's going away aborts it."""

    task: asyncio.Task[Any] | None = None

    async def post(self) -> None:
        headers = self.request.headers
        self.check_tree()
        framed = frames.CONTENT_TYPE in headers.get("Accept", "")
        watched = headers.get("Nnsight-Tokens") or headers.get("Nnsight-Progress")
        progress = Progress(text=headers.get("Nnsight-Tokens") == "1") if framed else None
        self.task = asyncio.ensure_future(
            self.engine.generate(
                self.body(),
                self.compressed,
                encode_raw if framed else encode_stock,
                progress if watched else None,
                [key for key in headers.get("Nnsight-Edits", "").split(",") if key],
            )
        )
        try:
            if progress is None:
                await self.answer(*await self.task)
            else:
                await self.answer_framed(self.task, progress)
        except (asyncio.CancelledError, StreamClosedError):
            if not self.task.cancelled() and not self.task.done():
                raise

    async def answer(self, outcome: Outcome, parts: list[memoryview | bytes]) -> None:
        """Answer with a result and nothing else."""
        self.set_header("Content-Type", "application/octet-stream")
        self.set_header("Content-Length", str(sum(len(part) for part in parts)))
        self.set_header("Nnsight-Outcome", "error" if outcome.error else "ok")
        self.set_header("Nnsight-Prompt-Tokens", str(outcome.prompt_tokens))
        self.set_header("Nnsight-Generated-Tokens", str(outcome.generated_tokens))
        del outcome
        for piece in _pieces(parts):
            self.write(bytes(piece))
            await self.flush()
        await self.finish()

    async def answer_framed(self, task: asyncio.Task[Any], progress: Progress) -> None:
        """Answer at once with frames, and with the result's when it is there."""
        self.set_header("Content-Type", frames.CONTENT_TYPE)
        seconds = self.request.headers.get("Nnsight-Timeout")
        try:
            async with asyncio.timeout(float(seconds) if seconds else None):
                async for piece in progress.frames(task):
                    self.write(piece)
                    await self.flush()
                outcome, parts = await task
        except TimeoutError:
            task.cancel()
            await self.fail_framed(
                TraceTimeoutError(
                    f"The trace ran for more than {seconds} s, the limit of this server "
                    "(trace_timeout), and was stopped; do less in one trace."
                )
            )
            return
        except EngineError as error:
            await self.fail_framed(error)
            return
        for part in _pieces(parts):
            self.write(frames.frame(frames.RESULT, part))
            await self.flush()
        self.write(
            frames.json_frame(
                frames.END,
                outcome="error" if outcome.error else "ok",
                prompt_tokens=outcome.prompt_tokens,
                generated_tokens=outcome.generated_tokens,
            )
        )
        await self.finish()

    async def fail_framed(self, error: EngineError) -> None:
        """End a framed answer with an error in place of the result."""
        text = str(error)
        self.write(
            frames.json_frame(
                frames.ERROR,
                status=error.status,
                message=text,
                reason=error.reason,
                detail=text,
            )
        )
        await self.finish()

    def on_connection_close(self) -> None:
        # Tornado's ends the wait for the rest of a body.
        super().on_connection_close()
        self.chunks.clear()
        if self.task is not None:
            self.task.cancel()


def _pieces(parts: list[memoryview | bytes]) -> Iterator[memoryview]:
    """The bytes of ``parts`` in order, in pieces of at most `CHUNK_BYTES`."""
    for part in parts:
        view = memoryview(part)
        for start in range(0, len(view), CHUNK_BYTES):
            yield view[start : start + CHUNK_BYTES]


class EditHandler(Handler):
    """Installs and clears an edit."""

    async def put(self, edit_id: str) -> None:
        self.check_tree()
        name = self.get_query_argument("name", None)
        warnings = await self.engine.register(edit_id, self.body(), self.compressed, name)
        known_as = self.get_query_argument("id", edit_id)
        self.finish({"status": "ok", "id": known_as, "name": name, "warnings": warnings})

    async def delete(self, edit_id: str) -> None:
        await self.engine.clear(edit_id)
        self.finish({"status": "ok", "id": edit_id})


class EditsHandler(Handler):
    """What is known of installed edits."""

    async def get(self) -> None:
        keys = self.get_query_argument("keys", "").split(",")
        self.finish({"edits": await self.engine.edits(keys)})


class StatusHandler(Handler):
    """What this engine is and does."""

    async def get(self) -> None:
        self.finish(json.dumps(await self.engine.status()))


class ModelHandler(Handler):
    """What a client needs to write traces for the served model."""

    async def get(self) -> None:
        await self.engine.tokenizer()
        published = self.engine.published.description
        self.set_header("Etag", self.engine.published.etag)
        if self.check_etag_header():
            self.set_status(304)
            self.finish()
            return
        self.finish(published)


class TokenizerHandler(Handler):
    """The served model's tokenizer, as files."""

    async def get(self) -> None:
        identity, archive = await self.engine.tokenizer()
        self.set_header("Content-Type", "application/zip")
        self.set_header("Etag", f'"{identity}"')
        for piece in _pieces([archive]):
            self.write(bytes(piece))
            await self.flush()
        await self.finish()


class HealthHandler(Handler):
    """Whether a trace would run now."""

    def get(self) -> None:
        if self.engine.llm.errored:
            raise EngineDownError("The engine has died.")
        self.finish({"status": "ok"})


def listen(engine: Engine, path: str) -> HTTPServer:
    """Serve ``engine`` on a Unix socket at ``path`` that only this account may open."""
    application = web.Application(
        [
            (r"/generate", GenerateHandler, {"engine": engine}),
            (r"/edits/([^/]+)", EditHandler, {"engine": engine}),
            (r"/edits", EditsHandler, {"engine": engine}),
            (r"/status", StatusHandler, {"engine": engine}),
            (r"/model", ModelHandler, {"engine": engine}),
            (r"/model/tokenizer", TokenizerHandler, {"engine": engine}),
            (r"/health", HealthHandler, {"engine": engine}),
        ],
        log_function=_log_failures,
    )
    server = HTTPServer(application, max_body_size=2**62)
    server.add_socket(_bind(path))
    return server


def _bind(path: str) -> socket.socket:
    """A listening socket at ``path`` with mode 0600 from its first moment."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.setblocking(False)
    before = os.umask(0o177)
    try:
        listener.bind(path)
    finally:
        os.umask(before)
    listener.listen(1024)
    return listener


def _log_failures(handler: web.RequestHandler) -> None:
    """Log the requests this process could not answer; the Jupyter server logs every trace."""
    if handler.get_status() >= 500:
        log.error("%s %s %s", handler.get_status(), handler.request.method, handler.request.path)
