"""Tornado handlers: one class a resource, each turning HTTP into one call on a plain object."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from jupyter_server.auth.decorator import allow_unauthenticated
from tornado import web

from .base import NNsightHandler, allowed_to
from .edits import check_id
from .errors import EngineUnavailable, NotFound
from .paths import advice
from .relay import StreamingHandler
from .status import status_model
from .upstream import EngineLost, ResponseHead

# Seconds the engine has to answer a question that runs no trace.
ASK_SECONDS = 5.0


# Headers of a trace that are for the engine.
_PASSED = ("nnsight-compress", "Accept", "Nnsight-Tree", "Nnsight-Tokens", "Nnsight-Progress")


class GenerateHandler(StreamingHandler):
    """Run a serialized trace."""

    @web.authenticated
    @allowed_to("trace")
    async def admit(self) -> None:
        """Admit a trace on its headers."""
        self.trace = self.admission.begin(self.caller)
        self.set_header("Nnsight-Trace-Id", self.trace.id)
        await self.open()

    def target(self) -> tuple[str, str, dict[str, str]]:
        """The engine's generate."""
        assert self.trace is not None
        headers = self.request.headers
        passed = {name: headers[name] for name in _PASSED if name in headers}
        return (
            "POST",
            "/generate",
            {
                **passed,
                "Nnsight-Trace-Id": self.trace.id,
                "Nnsight-Timeout": str(self.engine_settings.trace_timeout),
            },
        )

    def ended(self, outcome: str, head: ResponseHead | None) -> None:
        """Count and log the trace."""
        if self.trace is not None:
            self.admission.end(self.trace, outcome, head.headers if head else {})

    @web.authenticated
    @allowed_to("trace")
    async def post(self) -> None:
        """Answer with what the trace saved."""
        await self.relay()


class EditHandler(StreamingHandler):
    """Install an edit, or clear it."""

    @web.authenticated
    @allowed_to("edit")
    async def admit(self) -> None:
        """Admit an edit on its headers."""
        self.edit_id = check_id(self.path_args[0])
        self.edits.check_may_change(self.edit_id, self.caller)
        if self.request.method == "POST":
            await self.open()

    def target(self) -> tuple[str, str, dict[str, str]]:
        """The engine's own place for this edit."""
        self.edit_name = self.get_query_argument("name", None)
        query = "" if self.edit_name is None else "?" + urlencode({"name": self.edit_name})
        compress = self.request.headers.get("nnsight-compress", "False")
        return "PUT", f"/edits/{self.edit_id}{query}", {"nnsight-compress": compress}

    def answered(self, head: ResponseHead) -> None:
        """Record an edit that the engine took."""
        if head.status == 200:
            self.edits.add(self.edit_id, self.edit_name, self.caller, self.bytes_in)
            self.log.info(
                "edit %s installed user=%s name=%s bytes_in=%d",
                self.edit_id,
                self.caller.name,
                self.edit_name,
                self.bytes_in,
            )

    def on_connection_close(self) -> None:
        """An edit the engine has all of gets installed whoever waits, so its answer is awaited."""
        if not self.sent:
            super().on_connection_close()

    @web.authenticated
    @allowed_to("edit")
    async def post(self, edit_id: str) -> None:
        """Answer with what the engine says to the edit."""
        await self.relay()

    @web.authenticated
    @allowed_to("edit")
    async def delete(self, edit_id: str) -> None:
        """Clear an edit; unknown ids are a no-op."""
        await clear_edit(self, self.edit_id)


class ClearEditHandler(NNsightHandler):
    """Clear an edit, the way the stock client asks for it."""

    @web.authenticated
    @allowed_to("edit")
    async def post(self, edit_id: str) -> None:
        """Clear an edit; unknown ids are a no-op."""
        self.edits.check_may_change(check_id(edit_id), self.caller)
        await clear_edit(self, edit_id)


async def clear_edit(handler: NNsightHandler, edit_id: str) -> None:
    """Clear an edit in the engine, then forget it."""
    try:
        status, answer = await handler.supervisor.upstream().ask(
            "DELETE", f"/edits/{edit_id}", handler.engine_settings.trace_timeout
        )
    except EngineLost:
        raise await handler.supervisor.lost() from None
    if status == 200:
        answer["cleared"] = handler.edits.remove(edit_id)
        if answer["cleared"]:
            handler.log.info("edit %s cleared user=%s", edit_id, handler.caller.name)
    await handler.answer(answer, status)


class EditsHandler(NNsightHandler):
    """The caller's edits."""

    @web.authenticated
    @allowed_to("read")
    async def get(self) -> None:
        """List the caller's edits; an admin sees everybody's."""
        await self.answer({"edits": self.edits.visible_to(self.caller)})


class ModelHandler(StreamingHandler):
    """What a client needs to write traces for the served model; the engine tells it."""

    source = "/model"

    @web.authenticated
    @allowed_to("read")
    async def admit(self) -> None:
        """Ask the engine."""
        await self.open()

    def target(self) -> tuple[str, str, dict[str, str]]:
        """The engine's own place for it."""
        known = self.request.headers.get("If-None-Match")
        return "GET", self.source, {"If-None-Match": known} if known else {}

    @web.authenticated
    @allowed_to("read")
    async def get(self) -> None:
        """Answer with what the engine says."""
        await self.relay()


class TokenizerHandler(ModelHandler):
    """The served model's tokenizer, as a zip archive."""

    source = "/model/tokenizer"


class HealthHandler(NNsightHandler):
    """Whether a trace would run now. Open to all, so it tells nothing else."""

    open_to_all = True
    _track_activity = False

    @allow_unauthenticated
    async def get(self) -> None:
        """200 when a trace would run now, 503 with the state when not."""
        try:
            status, _ = await self.supervisor.upstream().ask("GET", "/health", ASK_SECONDS)
        except (EngineLost, EngineUnavailable):
            status = 503
        if status == 200:
            await self.answer({"status": "ok"})
            return
        state = self.supervisor.status.state
        said = "not answering" if state == "ready" else state
        raise EngineUnavailable(
            f"No trace would run now: the engine is {said}; "
            f"GET {self.url_of('/nnsight/status')} with a token tells why.",
            self.supervisor.unavailable().retry_after,
        )


class StatusHandler(NNsightHandler):
    """Model, versions, engine settings, state, load and the caller's traces."""

    _track_activity = False

    @web.authenticated
    @allowed_to("read")
    async def get(self) -> None:
        """Tell what is known, also while there is no engine."""
        engine: dict[str, Any] = {}
        try:
            _, engine = await self.supervisor.upstream().ask("GET", "/status", ASK_SECONDS)
        except (EngineLost, EngineUnavailable):
            pass
        await self.answer(
            status_model(
                self.engine_settings, self.supervisor.status, self.admission, self.caller, engine
            )
        )


class NearMissHandler(NNsightHandler):
    """A path that is nearly right: the answer names the right one.

    It says nothing about this server that its documentation does not, and does not look who asks.
    """

    open_to_all = True

    @classmethod
    def implements(cls, method: str) -> bool:
        """A wrong path is wrong with every method."""
        return True

    async def _authenticate(self) -> None:
        """Nobody has to be known to be told the right path."""

    def admit(self) -> None:
        """Refuse whatever comes."""
        raise NotFound(advice(self.request.path, self.base_url))

    @allow_unauthenticated
    async def get(self) -> None:
        """Never reached: `admit` refuses."""

    head = post = put = patch = delete = get


_ID = r"([^/]+)"

# The project's own paths first, the stock client's second; both are the same handlers.
ROUTES: list[tuple[str, type[NNsightHandler]]] = [
    (r"/nnsight/generate", GenerateHandler),
    (r"/v1/nnsight/generate", GenerateHandler),
    (r"/nnsight/register", EditsHandler),
    (r"/v1/nnsight/register", EditsHandler),
    (rf"/nnsight/register/{_ID}", EditHandler),
    (rf"/v1/nnsight/register/{_ID}", EditHandler),
    (rf"/nnsight/register/{_ID}/clear", ClearEditHandler),
    (rf"/v1/nnsight/register/{_ID}/clear", ClearEditHandler),
    (r"/nnsight/model", ModelHandler),
    (r"/nnsight/model/tokenizer", TokenizerHandler),
    (r"/nnsight/health", HealthHandler),
    (r"/v1/nnsight/health", HealthHandler),
    (r"/health", HealthHandler),
    (r"/nnsight/status", StatusHandler),
    (r"/v1/nnsight/status", StatusHandler),
    # What comes close: anything below the two prefixes, the stock client's prefix below another
    # page's address, and the words themselves without it.
    (r"/nnsight(?:/.*)?", NearMissHandler),
    (r"/(?:.+/)?v1/nnsight(?:/.*)?", NearMissHandler),
    (r"/(?:v1/)?(?:generate|register)(?:/.*)?", NearMissHandler),
    (r"/v1/(?:gen|reg|hea|sta|nns)[^/]*(?:/.*)?", NearMissHandler),
    (r"/v1/?", NearMissHandler),
]
