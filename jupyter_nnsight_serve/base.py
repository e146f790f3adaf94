"""The base of every handler: authentication before the first byte of a body, and JSON errors.

Every handler streams its request body, also those that expect none: Tornado would otherwise hold
up to half a gigabyte of it before it asks who is there.

A client sends its whole body before it looks for an answer. Closing the connection on it makes the
kernel reset it, and the answer is lost. So a refusal is sent at once, and then the body is read
and thrown away, for a bounded time and size.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

from jupyter_server.auth.decorator import authorized
from jupyter_server.base.handlers import APIHandler
from jupyter_server.extension.handler import ExtensionHandlerMixin
from jupyter_server.utils import url_path_join
from tornado import web
from tornado.http1connection import HTTP1Connection

from .admission import Admission
from .authorizer import ACTIONS, AUTH_RESOURCE, Rules
from .edits import EditBook
from .errors import EngineUnavailable, NotAllowed, WrongMethod, body_of, message_of
from .identity import Caller, adopt_api_key, caller_of, refusal
from .record import Recorder
from .settings import EngineSettings
from .supervisor import EngineSupervisor
from .upstream import EngineLost

if TYPE_CHECKING:
    from tornado.concurrent import Future

# How long, and for how many bytes, a refused request's body is read and thrown away.
DRAIN_SECONDS = 10.0
DRAIN_BYTES = 512 * 2**20

# Seconds the engine has to answer a question that runs no trace.
ASK_SECONDS = 5.0

UNAUTHORIZED = (
    "You are signed in, but this server does not let you use its nnsight engine; ask its admin "
    f"for access to the resource {AUTH_RESOURCE!r}."
)

# What a caller is told who may not do it, by permission.
MISSING = {
    "read": (
        "You are signed in, but this server does not let you use its nnsight engine; ask its "
        "admin to let you trace (c.NNsightServe.tracers)."
    ),
    "trace": (
        "You are signed in, but this server does not let you run traces; ask its admin to let "
        "you (c.NNsightServe.tracers)."
    ),
    "edit": (
        "You are signed in, but this server does not let you install edits; ask its admin to let "
        "you (c.NNsightServe.editors)."
    ),
    "admin": "Only an admin of this server's nnsight engine may do that (c.NNsightServe.admins).",
}

_Method = TypeVar("_Method", bound=Callable[..., Any])


def allowed_to(permission: str) -> Callable[[_Method], _Method]:
    """Let an async method of a handler run only for who has a permission.

    Jupyter's authorizer is asked, and then the rules of the settings, so that an authorizer that
    allows everything makes nobody an admin.

    Parameters
    ----------
    permission
        One of `authorizer.ACTIONS`.
    """
    # Named here: without arguments `authorized` keeps the action of the first request it sees.
    asking: Any = authorized(
        action=ACTIONS[permission], resource=AUTH_RESOURCE, message=UNAUTHORIZED
    )

    def decorate(method: _Method) -> _Method:
        @wraps(method)
        async def checked(self: NNsightHandler, *args: Any, **kwargs: Any) -> Any:
            if permission not in self.caller.may:
                raise NotAllowed(MISSING[permission])
            return await method(self, *args, **kwargs)

        return cast(_Method, asking(checked))

    return decorate


@web.stream_request_body
class NNsightHandler(ExtensionHandlerMixin, APIHandler):
    """A resource of this extension."""

    auth_resource = AUTH_RESOURCE

    # Whether the resource is open to everybody; its methods are then @allow_unauthenticated.
    open_to_all = False

    _refused = False
    _drained = 0
    _drain_end: asyncio.TimerHandle | None = None

    # What the handlers work on.

    @property
    def supervisor(self) -> EngineSupervisor:
        """The engine's supervisor."""
        return cast(EngineSupervisor, self.settings["nnsight_supervisor"])

    @property
    def admission(self) -> Admission:
        """The traces that are here."""
        return cast(Admission, self.settings["nnsight_admission"])

    @property
    def edits(self) -> EditBook:
        """The installed edits."""
        return cast(EditBook, self.settings["nnsight_edits"])

    @property
    def recorder(self) -> Recorder:
        """The totals of each user."""
        return cast(Recorder, self.settings["nnsight_recorder"])

    @property
    def engine_settings(self) -> EngineSettings:
        """The extension's settings."""
        return cast(EngineSettings, self.settings["nnsight_settings"])

    @property
    def caller(self) -> Caller:
        """Who sent this request."""
        return caller_of(self, cast(Rules, self.settings["nnsight_rules"]))

    # Before the body.

    async def prepare(self) -> None:  # type:ignore[override]
        """Authenticate and admit the request on its headers alone, or refuse it."""
        # Limits are checked here, with a sentence; Tornado would close with a bare 400.
        self._connection.set_max_body_size(sys.maxsize)
        adopt_api_key(self.request)
        try:
            if not self.implements(self.request.method or ""):
                raise self.wrong_method()
            await self._authenticate()
            if self.request.method != "OPTIONS":
                admission = self.admit()
                if admission is not None:
                    await admission
        except web.HTTPError as error:
            self.refuse(error)

    def admit(self) -> Awaitable[None] | None:
        """For subclasses: look at the headers, and raise to refuse before the body is read."""
        return None

    async def _authenticate(self) -> None:
        if not self.check_host():
            raise NotAllowed(
                "This server answers only under a local name; reach it as 127.0.0.1 or localhost, "
                "or ask its admin to set c.ServerApp.allow_remote_access = True."
            )
        try:
            await super().prepare()
        except web.HTTPError as error:
            if self.open_to_all:
                return
            raise await refusal(self, error.status_code) or error from None
        is_preflight = self.request.method == "OPTIONS"
        if self.current_user is None and not self.open_to_all and not is_preflight:
            raise await refusal(self, 403) or web.HTTPError(403)

    @classmethod
    def implements(cls, method: str) -> bool:
        """Whether the resource has this HTTP method."""
        found = getattr(cls, method.lower(), None) if method in cls.SUPPORTED_METHODS else None
        return found is not None and found is not web.RequestHandler._unimplemented_method

    def wrong_method(self) -> WrongMethod:
        """A 405 that names the right methods."""
        allowed = [m for m in self.SUPPORTED_METHODS if m != "OPTIONS" and self.implements(m)]
        return WrongMethod(
            f"{self.request.method} is not a method of {self.request.path[:200]}; "
            f"use {' or '.join(allowed)}.",
            {"Allow": ", ".join(allowed)},
        )

    # The body of a request that has none, or that is refused.

    async def data_received(self, chunk: bytes) -> None:
        """Throw a piece of the body away."""
        self._drained += len(chunk)
        if self._drained > DRAIN_BYTES:
            self._end_drain()

    @property
    def _connection(self) -> HTTP1Connection:
        return cast(HTTP1Connection, self.request.connection)

    @property
    def body_length(self) -> int | None:
        """Bytes of the request's body as its headers say; None when they do not say."""
        # The same length said twice is one length, joined by a comma.
        said = self.request.headers.get("Content-Length", "").split(",")[0].strip()
        if said.isascii() and said.isdigit():
            return int(said)
        return None if "Transfer-Encoding" in self.request.headers else 0

    def refuse(self, error: web.HTTPError) -> None:
        """Answer with `error` at once, whatever of the body is still to come."""
        if self._refused or self._finished or self._headers_written:
            return
        self._refused = True
        # Tornado calls the method once the body is read, refused or not.
        setattr(self, (self.request.method or "get").lower(), self._after_refusal)
        waits = self.request.headers.get("Expect", "").lower() == "100-continue"
        if self.body_length == 0 or waits:
            # Nothing is on its way.
            self.send_error(error.status_code, exc_info=(type(error), error, None))
            return
        self.clear()
        self.set_status(error.status_code)
        content = self._error_content(error.status_code, error)
        self.set_header("Content-Length", len(content))
        self.write(content)
        self.flush()
        self._drain_end = asyncio.get_running_loop().call_later(DRAIN_SECONDS, self._end_drain)

    def _after_refusal(self, *args: str) -> None:
        """Stands in for the method of a refused request."""
        if not self._finished:
            self.finish()

    def _end_drain(self) -> None:
        if self._refused and not self._finished:
            self.finish()

    def on_finish(self) -> None:
        """Let go of the drain's timer."""
        if self._drain_end is not None:
            self._drain_end.cancel()

    # Errors.

    def send_error(self, status_code: int = 500, **kwargs: Any) -> None:
        """Send an error, unless the request is answered already."""
        if self._headers_written:
            self._end_drain()
            if not self._finished:
                # Half of a response is out; only a broken connection tells the client so.
                self._connection.close()
            return
        super().send_error(status_code, **kwargs)

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        """Every error is JSON with `message`, `reason` and `detail`."""
        exc_info = kwargs.get("exc_info")
        error = exc_info[1] if exc_info else None
        if status_code == 405 and not isinstance(error, WrongMethod):
            error = self.wrong_method()
        self.finish(self._error_content(status_code, error))

    def _error_content(self, status: int, error: BaseException | None) -> bytes:
        for name, value in getattr(error, "headers", {}).items():
            self.set_header(name, value)
        self.set_header("Content-Type", "application/json")
        if self._refused:
            # Tornado closes after an answer that came before the body's end, without saying so.
            self.set_header("Connection", "close")
        return json.dumps(body_of(status, message_of(status, error))).encode()

    def log_exception(self, *args: Any) -> None:
        """Log what nobody expected; a refusal is in Jupyter's request log already."""
        if not isinstance(args[1], web.HTTPError):
            super().log_exception(*args)

    async def forget_stale(self) -> None:
        """Have the engine forget the edits that are no longer in the book.

        No trace runs them any more, so an engine that cannot be asked only keeps them in memory.
        """
        for key in self.edits.stale():
            try:
                await self.supervisor.upstream().ask("DELETE", f"/edits/{key}", ASK_SECONDS)
            except (EngineLost, EngineUnavailable):
                return
            self.edits.forgotten(key)

    # Answers.

    def answer(self, model: dict[str, Any] | list[Any], status: int = 200) -> Future[None]:
        """Answer with JSON."""
        self.set_status(status)
        return self.finish(json.dumps(model))

    def url_of(self, path: str) -> str:
        """A path of this extension as the client has to ask for it."""
        return url_path_join(self.base_url, path)
