"""Tornado handlers: one class a resource, each turning HTTP into one call on a plain object."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jupyter_server.auth.decorator import allow_unauthenticated
from tornado import web
from tornado.iostream import StreamClosedError

from . import framed
from .base import ASK_SECONDS, NNsightHandler, allowed_to
from .edits import Draft, Edit, check_id
from .errors import EngineUnavailable, NoRoom, NotAllowed, NotFound
from .paths import PAGES, advice
from .relay import StreamingHandler
from .spool import BodyGone
from .status import status_model
from .upstream import EngineLost, ResponseHead

# Seconds a trace waits for its turn before it is told its place.
QUIET_SECONDS = 0.25

# Edits that the engine is asked about at a time.
KEYS_AT_ONCE = 50

ORDERS = ("start", "stop", "restart")

# Headers of a trace that are for the engine; the two that say what it is written for go with an
# edit as well.
_WRITTEN_FOR = ("Nnsight-Tree", "Nnsight-Model")
_PASSED = ("nnsight-compress", "Accept", *_WRITTEN_FOR, "Nnsight-Tokens", "Nnsight-Progress")


def _present(headers: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """Those of the named headers that are there."""
    return {name: headers[name] for name in names if name in headers}


class GenerateHandler(StreamingHandler):
    """Run a serialized trace."""

    @web.authenticated
    @allowed_to("trace")
    async def admit(self) -> None:
        """Admit a trace on its headers."""
        self.trace = self.admission.begin(self.caller)
        self.set_header("Nnsight-Trace-Id", self.trace.id)
        self.expect()

    def target(self) -> tuple[str, str, dict[str, str]]:
        """The engine's generate."""
        assert self.trace is not None
        headers = self.request.headers
        passed = _present(headers, _PASSED)
        return (
            "POST",
            "/generate",
            {
                **passed,
                "Nnsight-Trace-Id": self.trace.id,
                "Nnsight-Edits": ",".join(self.edits.keys_for(self.caller)),
                "Nnsight-Timeout": str(self.engine_settings.trace_timeout),
            },
        )

    def ended(self, outcome: str, told: dict[str, str]) -> None:
        """Count and log the trace."""
        if self.trace is not None:
            self.admission.end(self.trace, outcome, told)

    @web.authenticated
    @allowed_to("trace")
    async def post(self) -> None:
        """Answer with what the trace saved, once its turn has come."""
        self.complete()
        if self._gone:
            return
        try:
            came = await self._turn()
        except EngineUnavailable as error:
            await self.give_up(error)
        else:
            if came:
                await self.relay()

    async def _turn(self) -> bool:
        """Wait for the trace's turn; whether it came before the caller left."""
        assert self.trace is not None
        turn = self.admission.queue(self.trace)
        if framed.CONTENT_TYPE in self.request.headers.get("Accept", ""):
            await asyncio.wait([turn], timeout=QUIET_SECONDS)
            while not turn.done():
                await self._tell_place()
                await asyncio.wait([turn], timeout=framed.HEARTBEAT_SECONDS)
        return await turn

    async def _tell_place(self) -> None:
        """Begin the answer, or go on with it, with a frame that tells the place in the queue."""
        assert self.trace is not None
        if not self._headers_written:
            self.set_header("Content-Type", framed.CONTENT_TYPE)
            self._watch = framed.FrameWatch()
        place = self.admission.place(self.trace)
        with contextlib.suppress(StreamClosedError):
            await self.send(framed.json_frame(framed.STATE, {"state": "queued", "place": place}))


class EditHandler(StreamingHandler):
    """Install an edit, or clear it."""

    draft: Draft | None = None
    installed = False
    release: Callable[[], None] = staticmethod(lambda: None)

    @web.authenticated
    @allowed_to("edit")
    async def admit(self) -> None:
        """Admit an edit on its headers."""
        edit_id = check_id(self.path_args[0])
        if self.request.method != "POST":
            return
        shared = self.get_query_argument("shared", "false") == "true"
        if shared and not self.caller.admin:
            raise NotAllowed(
                "Only an admin of this server may install an edit for everybody; leave shared out "
                "to install it for your own traces."
            )
        self.edit = Edit(
            id=edit_id,
            name=self.get_query_argument("name", None),
            owner=self.caller.name,
            shared=shared,
            compressed=self.request.headers.get("nnsight-compress", "False"),
        )
        self.release = self.admission.reserve(self.caller)
        self.expect()

    def target(self) -> tuple[str, str, dict[str, str]]:
        """The engine's own place for this edit."""
        written_for = _present(self.request.headers, _WRITTEN_FOR)
        return "PUT", self.edit.target, {"nnsight-compress": self.edit.compressed, **written_for}

    def answered(self, head: ResponseHead) -> None:
        """Record an edit that the engine took."""
        if head.status == 200 and self.draft is not None:
            edit = self.edits.add(self.draft)
            self.installed = True
            self.log.info(
                "edit %s installed user=%s name=%s shared=%s bytes_in=%d",
                edit.id,
                edit.owner,
                edit.name,
                edit.shared,
                edit.bytes,
            )

    def on_connection_close(self) -> None:
        """An edit the engine has all of gets installed whoever waits, so its answer is awaited."""
        if not self.sent:
            super().on_connection_close()

    def ended(self, outcome: str, told: dict[str, str]) -> None:
        """Forget the body of an edit that was not installed."""
        self.release()
        if self.draft is not None and not self.installed:
            self.draft.discard()

    @web.authenticated
    @allowed_to("edit")
    async def post(self, edit_id: str) -> None:
        """Answer with what the engine says to the edit."""
        assert self.body is not None
        self.complete()
        try:
            self.draft = await self.edits.draft(self.edit, self.body)
        except NoRoom as error:
            await self.give_up(error)
            return
        except BodyGone:
            return
        await self.relay()
        await self.forget_stale()

    @web.authenticated
    @allowed_to("edit")
    async def delete(self, edit_id: str) -> None:
        """Clear an edit; unknown ids are a no-op."""
        await clear_edit(self, edit_id)


class ClearEditHandler(NNsightHandler):
    """Clear an edit, the way the stock client asks for it."""

    @web.authenticated
    @allowed_to("edit")
    async def post(self, edit_id: str) -> None:
        """Clear an edit; unknown ids are a no-op."""
        await clear_edit(self, check_id(edit_id))


async def clear_edit(handler: NNsightHandler, edit_id: str) -> None:
    """Forget an edit of the caller's; somebody else's is as unknown as one that is not there."""
    edit = handler.edits.find(
        edit_id,
        handler.caller,
        handler.get_query_argument("owner", None),
        shared=handler.get_query_argument("shared", "false") == "true",
    )
    if edit is not None:
        handler.edits.clear(edit)
        handler.log.info(
            "edit %s cleared user=%s owner=%s", edit.id, handler.caller.name, edit.owner
        )
        await handler.forget_stale()
    await handler.answer({"status": "ok", "id": edit_id, "cleared": edit is not None})


class EditsHandler(NNsightHandler):
    """The caller's edits."""

    @web.authenticated
    @allowed_to("read")
    async def get(self) -> None:
        """List the caller's edits and the shared ones; an admin sees everybody's."""
        edits = self.edits.visible_to(self.caller)
        await self.forget_stale()
        known: dict[str, Any] = {}
        for start in range(0, len(edits), KEYS_AT_ONCE):
            keys = ",".join(edit.key for edit in edits[start : start + KEYS_AT_ONCE])
            try:
                _, answer = await self.supervisor.upstream().ask(
                    "GET", f"/edits?keys={keys}", ASK_SECONDS
                )
            except (EngineLost, EngineUnavailable):
                # What the engine counts is not to be had; what is installed is known here.
                break
            known.update(answer.get("edits", {}))
        now = self.edits.now()
        await self.answer(
            {
                "edits": [
                    {
                        **edit.model(now),
                        "runs": known.get(edit.key, {}).get("runs"),
                        "source": known.get(edit.key, {}).get("source"),
                    }
                    for edit in edits
                ],
                "removed": self.edits.removed_from(self.caller),
            }
        )


class ModelHandler(StreamingHandler):
    """What a client needs to write traces for the served model; the engine tells it."""

    source = "/model"
    takes_body = False

    @web.authenticated
    @allowed_to("read")
    async def admit(self) -> None:
        """Refuse where there is no engine to ask."""
        self.expect()

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


class EngineHandler(NNsightHandler):
    """Control of the engine."""

    @web.authenticated
    @allowed_to("admin")
    async def post(self, order: str) -> None:
        """Start, stop or restart the engine; answers with the state it then is in."""
        if order not in ORDERS:
            raise NotFound(
                f"There is no {order[:100]!r} here; an engine takes {', '.join(ORDERS)}."
            )
        self.log.info("engine %s ordered user=%s", order, self.caller.name)
        await self.supervisor.command(order)
        status = self.supervisor.status
        await self.answer({"state": status.state, "reason": status.reason})


class UsageHandler(NNsightHandler):
    """What each user has had of the engine."""

    _track_activity = False

    @web.authenticated
    @allowed_to("admin")
    async def get(self) -> None:
        """Totals since the server started, for admins."""
        await self.answer(self.recorder.usage())


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
        raise NotFound(advice(self.request.path, self.base_url, self.request.query))

    @allow_unauthenticated
    async def get(self) -> None:
        """Never reached: `admit` refuses."""

    head = post = put = patch = delete = get


_ID = r"([^/]+)"

# What nnsight's client appends to serve=.
_CALL = r"(?:generate|register/[^/]+(?:/clear)?)"

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
    (r"/nnsight/usage", UsageHandler),
    (r"/nnsight/engine/([^/]+)", EngineHandler),
    (r"/v1/nnsight/status", StatusHandler),
    # What comes close: anything below the two prefixes, the stock client's paths below the address
    # of a page of Jupyter's, and the words themselves without a prefix.
    (r"/nnsight(?:/.*)?", NearMissHandler),
    (r"/(?:v1/)+nnsight(?:/.*)?", NearMissHandler),
    (rf"/(?:{'|'.join(PAGES)})(?:/.*)?/v1/nnsight/{_CALL}", NearMissHandler),
    (r"/(?:v1/)?(?:generate|register)(?:/.*)?", NearMissHandler),
    (r"/v1/(?:gen|reg|hea|sta|nns)[^/]*(?:/.*)?", NearMissHandler),
    (r"/v1/?", NearMissHandler),
]
