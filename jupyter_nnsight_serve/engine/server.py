"""The engine process's HTTP server: traces, edits and status, on a Unix socket only."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
from typing import Any, cast

from tornado import web
from tornado.http1connection import HTTP1Connection
from tornado.httpserver import HTTPServer
from vllm.v1.engine.exceptions import EngineDeadError

from . import sizes, wire
from .build import Builder
from .errors import EngineDownError, EngineError, TooLargeError
from .model import describe
from .run import Outcome, Runner
from .sources import capture_exception

log = logging.getLogger("jupyter_nnsight_serve.engine")

CHUNK_BYTES = 2**20
"""Bytes written to the socket before waiting for its reader."""

THREAD_BYTES = 2**20
"""Results of more bytes than this are encoded on a thread, so that the loop keeps running."""

STATUS_SECONDS = 2.0
"""Seconds a status answer waits for the workers before it goes out without their count."""


class Engine:
    """What the handlers share: the model and what builds and runs traces on it.

    Parameters
    ----------
    model
        A dispatched asynchronous ``nnsight.modeling.vllm.VLLM``.
    max_request_bytes, max_response_bytes
        Largest body of a request and of a response, in bytes.
    """

    def __init__(self, model: Any, max_request_bytes: int, max_response_bytes: int) -> None:
        self.model = model
        self.llm = model.vllm_entrypoint
        self.builder = Builder(model, max_request_bytes)
        self.runner = Runner(self.llm, max_response_bytes)
        self.max_request_bytes = max_request_bytes
        self.max_response_bytes = max_response_bytes
        self.description = describe(model)

    async def generate(self, body: bytes, compressed: bool) -> tuple[Outcome, memoryview]:
        """Run a serialized trace.

        Returns
        -------
        tuple
            What it came to, and that as the bytes of the response. A caller's own error, in the
            build or in a block, is part of the outcome.
        """
        try:
            trace = self.builder.trace(body, compressed)
        except EngineError:
            raise
        except Exception as error:
            outcome = Outcome(error=capture_exception(error))
        else:
            outcome = await self.runner.run(trace)
        try:
            total = sizes.check(outcome.saves, self.max_response_bytes)
        except sizes.SaveTooLargeError as error:
            outcome, total = outcome.failed(error), 0
        try:
            if total > THREAD_BYTES:
                return outcome, await asyncio.to_thread(wire.encode, outcome)
            return outcome, wire.encode(outcome)
        except Exception as error:
            outcome = outcome.failed(error)
            return outcome, wire.encode(outcome)

    async def register(self, edit_id: str, body: bytes, name: str | None) -> list[str]:
        """Install an edit on every worker.

        Returns
        -------
        list of str
            What the person who installs it should know.
        """
        self.builder.edit(body)
        await self._workers("nnsight_register", edit_id, body, name)
        if self.llm.vllm_config.cache_config.enable_prefix_caching:
            return [
                "This engine runs with prefix caching, so requests that nnsight did not make may "
                "skip tokens it has cached, and the edit does not see those."
            ]
        return []

    async def clear(self, edit_id: str) -> None:
        """Remove an edit from every worker; an unknown id changes nothing."""
        await self._workers("nnsight_clear_registered", edit_id)

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

    async def _workers(self, method: str, *args: Any) -> list[Any]:
        """Call ``method`` on every worker."""
        try:
            result: list[Any] = await self.llm.collective_rpc(method, args=args)
        except EngineDeadError:
            raise EngineDownError("The engine has died; try again once it is ready.") from None
        return result


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
        compressed = self.request.headers.get("nnsight-compress", "").lower() == "true"
        self.task = asyncio.ensure_future(self.engine.generate(self.body(), compressed))
        try:
            outcome, payload = await self.task
        except asyncio.CancelledError:
            if self.task.cancelled():
                return
            raise
        self.set_header("Content-Type", "application/octet-stream")
        self.set_header("Content-Length", str(len(payload)))
        self.set_header("Nnsight-Outcome", "error" if outcome.error else "ok")
        self.set_header("Nnsight-Prompt-Tokens", str(outcome.prompt_tokens))
        self.set_header("Nnsight-Generated-Tokens", str(outcome.generated_tokens))
        del outcome
        for start in range(0, len(payload), CHUNK_BYTES):
            self.write(bytes(payload[start : start + CHUNK_BYTES]))
            await self.flush()
        await self.finish()

    def on_connection_close(self) -> None:
        if self.task is not None:
            self.task.cancel()


class EditHandler(Handler):
    """Installs and clears an edit."""

    async def put(self, edit_id: str) -> None:
        name = self.get_query_argument("name", None)
        try:
            warnings = await self.engine.register(edit_id, self.body(), name)
        except EngineError:
            raise
        except Exception as error:
            raise web.HTTPError(
                400,
                f"The edit could not be installed: {type(error).__name__}: {error}".replace(
                    "%", "%%"
                ),
            ) from error
        self.finish({"status": "ok", "id": edit_id, "name": name, "warnings": warnings})

    async def delete(self, edit_id: str) -> None:
        await self.engine.clear(edit_id)
        self.finish({"status": "ok", "id": edit_id})


class StatusHandler(Handler):
    """What this engine is and does."""

    async def get(self) -> None:
        self.finish(json.dumps(await self.engine.status()))


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
            (r"/status", StatusHandler, {"engine": engine}),
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
