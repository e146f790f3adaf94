"""`NNsightServe`, the Jupyter Server extension: its settings, and what is wired to what."""

from __future__ import annotations

import logging
import os
import re
import sys
from typing import Any

from jupyter_server.auth import AllowAllAuthorizer
from jupyter_server.extension.application import ExtensionApp
from jupyter_server.serverapp import ServerApp
from tornado.routing import PathMatches, Rule
from traitlets import Bool, Dict, Enum, Float, Int, List, TraitError, Unicode, default
from traitlets.config import Config

from ._version import __version__
from .activity import Activity
from .admission import Admission, Limits
from .authorizer import EVERYONE, HUB_ADMINS, NNsightAuthorizer, Rules
from .edits import EditBook
from .errors import SettingError
from .handlers import ROUTES, NearMissHandler
from .identity import server_owner
from .paths import PastedAddress
from .record import Recorder
from .settings import DEFAULT_COMMAND, EngineSettings, check_names
from .supervisor import EngineSupervisor, Status
from .upstream import Upstream

# Seconds an engine that starts again has for each edit.
REINSTALL_SECONDS = 60.0


class NNsightServe(ExtensionApp):
    """Serve nnsight traces on one vLLM engine that is independent of any kernel."""

    # Names the config file, jupyter_nnsight_serve_config.py, and the command, jupyter nnsight-serve.
    name = "nnsight-serve"
    version = __version__
    description = __doc__ or ""
    # A node that people share loads what it is there for, not what each of them has installed.
    load_other_extensions = False
    aliases = {**ExtensionApp.aliases, "model": "NNsightServe.model"}

    model = Unicode(
        "",
        help="""The model to serve: a name on the model hub ('name' or 'organisation/name'), or the
        path of a model directory with config.json in it.""",
    ).tag(config=True)

    revision = Unicode(
        None,
        allow_none=True,
        help="""Branch, tag or commit of the model on the hub. Default: the hub's main branch.""",
    ).tag(config=True)

    engine_args = Dict(
        key_trait=Unicode(),
        help="""Further arguments of vLLM's engine, by the names of its EngineArgs, such as
        {'max_model_len': 4096, 'tensor_parallel_size': 2}. On a CPU engine gpu_memory_utilization
        is the share (0 to 1) of the machine's memory. On the command line give a Python dict.""",
    ).tag(config=True)

    taps = List(
        Unicode(),
        help="""Places of the model that a CUDA-graph engine serves, as nnsight's patterns, such as
        ['model.layers.*.output']. Default: none, which runs the engine eagerly and serves every
        place.""",
    ).tag(config=True)

    device = Enum(
        ["auto", "cuda", "cpu"],
        "auto",
        help="""Where the engine runs; auto takes the installed vLLM's.""",
    ).tag(config=True)

    autostart = Bool(
        True, help="""Whether the engine starts together with the Jupyter server."""
    ).tag(config=True)

    max_request_bytes = Int(
        2**30,
        help="""Largest body, in bytes, of a trace or an edit as it is sent. Default: 1 GiB.""",
    ).tag(config=True)

    max_response_bytes = Int(
        4 * 2**30, help="""Largest result, in bytes, of a trace. Default: 4 GiB."""
    ).tag(config=True)

    trace_timeout = Float(
        600.0,
        help="""Seconds from when the engine has all of a trace or an edit until its result is
        there; the wait for a turn does not count. Then it is stopped.""",
    ).tag(config=True)

    stall_timeout = Float(
        60.0,
        help="""Seconds after which a caller is let go of who sends no more of a body, or takes no
        more of an answer.""",
    ).tag(config=True)

    max_traces = Int(
        256,
        help="""Traces that the engine has at a time; the others wait, and users take turns.""",
    ).tag(config=True)

    max_user_traces = Int(
        64, help="""Traces of one user that the engine has at a time; the user's others wait."""
    ).tag(config=True)

    max_user_waiting = Int(
        256,
        help="""Traces of one user that may wait for their turn or be on their way here; one more
        is refused.""",
    ).tag(config=True)

    max_trace_tokens = Int(
        0,
        help="""Tokens that a trace may ask to generate (max_tokens), over all its invokes and
        sequences; 0 for no limit but the model's.""",
    ).tag(config=True)

    spool_dir = Unicode(
        "",
        help="""Directory for the bodies of traces, above 256 KiB each, that are on their way here
        or wait. Default: the system's directory of temporary files; set it where that is small, or
        kept in memory.""",
    ).tag(config=True)

    restart_backoff = Float(
        1.0,
        help="""Seconds before an engine that died is started again. Doubled with each restart of
        the last hour, to 60 seconds at most.""",
    ).tag(config=True)

    max_restarts = Int(
        5,
        help="""How often within an hour an engine that died is started again; one more death, and
        it stays failed until an admin starts it.""",
    ).tag(config=True)

    max_edits = Int(
        32,
        help="""Edits a user may have installed at a time; one more, and the oldest goes.""",
    ).tag(config=True)

    edit_lifetime = Float(
        7 * 24 * 3600.0,
        help="""Seconds after which a user's edit goes, whether it was cleared or not; 0 for never.
        Edits that an admin shares stay. Default: a week.""",
    ).tag(config=True)

    tracers = List(
        Unicode(),
        [EVERYONE],
        help="""Who may run traces, of those who may reach this server: 'everyone',
        'hub-admins', 'group:NAME', 'user:NAME' or 'service:NAME' as JupyterHub names them, or
        'scope:SCOPE' for tokens that have this scope. With a plain Jupyter token, and for the
        user whose own server this is, everything is allowed. Default: everyone.""",
    ).tag(config=True)

    editors = List(
        Unicode(),
        [EVERYONE],
        help="""Who may install edits for their own traces, and run traces; entries as in
        tracers. Default: everyone.""",
    ).tag(config=True)

    admins = List(
        Unicode(),
        [HUB_ADMINS],
        help="""Who may install edits for everybody, control the engine and see everybody's
        traces and edits, besides all else; entries as in tracers. Default: hub-admins, the users
        that JupyterHub calls admins.""",
    ).tag(config=True)

    engine_command = List(
        Unicode(),
        list(DEFAULT_COMMAND),
        help="""The command that runs the engine process, as a list of strings. Default: this
        package's own engine, in the Python that runs Jupyter.""",
    ).tag(config=True)

    engine_command_prefix = List(
        Unicode(),
        help="""A command that the engine is run inside of, as a list of strings, such as that of
        bubblewrap; {directory} in it is the engine's own directory, which it must be able to write
        to. Default: none.""",
    ).tag(config=True)

    engine_environment = Dict(
        key_trait=Unicode(),
        value_trait=Unicode(),
        help="""Further environment variables of the engine process. Of Jupyter's own it gets
        paths, locale and proxies, and those of CUDA, NCCL, vLLM, torch and the model hub, but
        nothing that is named like a secret.""",
    ).tag(config=True)

    refused_globals = List(
        Unicode(),
        help="""Names, as 'module.name', that a trace or an edit may not refer to, besides those
        that no trace needs, such as os.system. This stops accidents, not attackers.""",
    ).tag(config=True)

    @default("open_browser")
    def _default_open_browser(self) -> bool:
        # There is no page to show.
        assert self.serverapp is not None
        return bool(self.serverapp.config["ServerApp"].get("open_browser", False))

    activity: Activity | None = None

    # The first wrong setting, as a sentence; None when all are right.
    _problem: str | None = None

    def update_config(self, config: Config) -> None:
        """Take settings over, remembering the first wrong one.

        Jupyter swallows what its extensions raise while it links them, and traitlets exits or only
        warns. So a wrong setting is kept, and judged once the server is known (`_judge`).
        """
        config = Config(config)
        section = config.get(type(self).__name__, Config())
        try:
            check_names(section, self.trait_names(config=True))
        except SettingError as error:
            self._problem = self._problem or str(error)
            for name in set(section) - set(self.trait_names(config=True)):
                del section[name]
        try:
            super().update_config(config)
        except (TraitError, ValueError, TypeError) as error:
            self._problem = self._problem or _sentence(error)

    def _jupyter_server_config(self) -> dict[str, Any]:
        """What `jupyter nnsight-serve` sets in its server: nothing is open but nnsight."""
        config: dict[str, Any] = super()._jupyter_server_config()  # type:ignore[no-untyped-call]
        assert self.serverapp is not None
        if "authorizer_class" not in self.serverapp.config["ServerApp"]:
            config["ServerApp"]["authorizer_class"] = NNsightAuthorizer
        return config

    def _rules(self) -> Rules:
        """Who may do what; with a wrong entry nobody but the owner may do anything."""
        try:
            return Rules(
                tuple(self.tracers), tuple(self.editors), tuple(self.admins), server_owner()
            )
        except SettingError as error:
            self._problem = self._problem or str(error)
            return Rules((), (), (), server_owner())

    def initialize_settings(self) -> None:
        """Make the objects that the handlers work on."""
        assert self.serverapp is not None
        log: logging.Logger | logging.LoggerAdapter[Any] = self.log
        settings = EngineSettings(
            model=self.model,
            revision=self.revision,
            engine_args=dict(self.engine_args),
            taps=list(self.taps),
            device=self.device,
            max_request_bytes=self.max_request_bytes,
            max_response_bytes=self.max_response_bytes,
            trace_timeout=self.trace_timeout,
            max_traces=self.max_traces,
            max_user_traces=self.max_user_traces,
            max_user_waiting=self.max_user_waiting,
            max_trace_tokens=self.max_trace_tokens,
            spool_dir=self.spool_dir,
            stall_timeout=self.stall_timeout,
            restart_backoff=self.restart_backoff,
            max_restarts=self.max_restarts,
            max_edits=self.max_edits,
            edit_lifetime=self.edit_lifetime,
            engine_command=list(self.engine_command),
            engine_command_prefix=list(self.engine_command_prefix),
            engine_environment=dict(self.engine_environment),
            refused_globals=list(self.refused_globals),
        )
        runtime = self.serverapp.runtime_dir
        assert self.serverapp.event_logger is not None
        self.recorder = Recorder(self.serverapp.event_logger, settings.devices, log)
        self.edits = EditBook(
            runtime, settings.max_edits, settings.edit_lifetime, self.recorder.edit_changed
        )
        self.admission = Admission(
            log,
            Limits(settings.max_traces, settings.max_user_traces, settings.max_user_waiting),
            self.recorder.trace_finished,
        )

        async def reinstall(upstream: Upstream) -> None:
            await self.edits.reinstall(upstream, REINSTALL_SECONDS)

        self.supervisor = EngineSupervisor(settings, runtime, log, reinstall, self._engine_changed)
        rules = self._rules()
        self._judge(settings)
        self.settings.update(
            {
                "nnsight_rules": rules,
                "nnsight_settings": settings,
                "nnsight_edits": self.edits,
                "nnsight_admission": self.admission,
                "nnsight_supervisor": self.supervisor,
                "nnsight_recorder": self.recorder,
            }
        )

    def _engine_changed(self, before: Status, now: Status) -> None:
        """The engine's state changed; who waits for one that is gone is told."""
        self.recorder.engine_state_changed(before, now)
        if before.state == "ready":
            self.admission.refuse_waiting(self.supervisor.unavailable())

    def _judge(self, settings: EngineSettings) -> None:
        """End the process over a wrong setting when it is ours; let another server run on."""
        if self._problem is None:
            try:
                settings.check()
            except SettingError as error:
                self._problem = str(error)
        if self._problem is None:
            return
        assert self.serverapp is not None
        if self.serverapp.starter_app is self:
            sys.stderr.write(f"jupyter nnsight-serve: {self._problem}\n")
            self.exit(1)
        self.log.error("nnsight-serve does not start: %s", self._problem)
        self.supervisor.refuse(self._problem)

    def initialize_handlers(self) -> None:
        """Add the routes."""
        self.handlers.extend(ROUTES)
        assert self.serverapp is not None
        base = self.serverapp.base_url.strip("/")
        arguments = {"name": self.name}
        rules = [Rule(PastedAddress(), NearMissHandler, arguments)]
        if base:
            # A client that left the base URL out is outside every other route.
            outside = rf"/(?!{re.escape(base)}(?:/|$))(?:(?:v1/)?nnsight(?:/.*)?|health)"
            rules.append(Rule(PathMatches(outside), NearMissHandler, arguments))
        self.serverapp.web_app.add_handlers(".*$", rules)  # type:ignore[no-untyped-call]

    async def _start_jupyter_server_extension(self, serverapp: ServerApp) -> None:
        """The server's loop runs: start the engine, without waiting for it."""
        self.activity = Activity(serverapp.web_app.settings["last_activity_times"], self.admission)
        self.activity.start()
        shared = os.environ.get("JUPYTERHUB_SERVICE_NAME")
        if shared and isinstance(serverapp.authorizer, AllowAllAuthorizer):
            self.log.warning(
                "Everybody who may reach the Hub service %s may use this server's files, kernels "
                "and terminals too; to close them set c.ServerApp.authorizer_class = "
                "'jupyter_nnsight_serve.authorizer.NNsightAuthorizer'.",
                shared,
            )
        if self._problem is None and self.autostart:
            self.supervisor.start()

    def current_activity(self) -> list[str] | None:
        """Traces that are here keep Jupyter from shutting down as idle."""
        return self.admission.ids() or None

    async def stop_extension(self) -> None:
        """The server stops: so does the engine."""
        if self.activity is not None:
            self.activity.stop()
        await self.supervisor.close()
        self.edits.close()


def _sentence(error: Exception) -> str:
    """What traitlets says of a value of the wrong type, with the setting's name in front."""
    said = re.sub(
        r"The '(\w+)' trait of an? NNsightServe instance ", r"c.NNsightServe.\1: ", str(error)
    )
    return said if said.startswith("c.") else f"A value of c.NNsightServe is wrong: {said}"


def main() -> None:
    """Run `jupyter nnsight-serve`."""
    NNsightServe.launch_instance()  # type:ignore[no-untyped-call]
