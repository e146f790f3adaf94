"""`EngineSupervisor`: starts, watches, restarts and stops the engine process.

The engine is a session and process group of its own, so that a Ctrl-C meant for Jupyter does not
reach it and so that all of it, EngineCore and workers too, can be killed by one number. Its stdin
is the lifeline: the extension holds the only write end, so the engine reads its end when this
process is gone, however it went, and ends itself.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import logging
import os
import shutil
import signal
import tempfile
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from .engine_output import EngineOutput
from .environment import engine_command, engine_environment, model_hub_token
from .errors import EngineUnavailable, without_paths
from .metrics import ENGINE_STATE
from .settings import EngineSettings
from .upstream import Upstream

# Seconds a graceful stop may take before the process group is killed, and the seconds after that
# in which the kernel has to report the end.
GRACE_SECONDS = 10.0
KILL_SECONDS = 3.0

# A Unix socket's path has room for 107 bytes on Linux, 103 on macOS.
_SOCKET_PATH_BYTES = 100

RETRY_SECONDS = 10

# How long a restart counts against `max_restarts`, and the longest pause before one.
RESTART_WINDOW_SECONDS = 3600.0
MAX_BACKOFF_SECONDS = 60.0

# Seconds in which the exit of an engine whose connection broke is reported.
LOST_SECONDS = 3.0


@dataclass(frozen=True)
class Status:
    """What the engine is doing.

    Parameters
    ----------
    state
        "stopped", "starting", "ready" or "failed".
    since
        Unix time in seconds at which it came to this state.
    reason
        Why it is stopped or failed; of a starting engine, why the one before it ended.
    stage
        What a starting engine is at.
    """

    state: str
    since: float
    reason: str | None = None
    stage: str | None = None


class EngineSupervisor:
    """Owns the engine process.

    Parameters
    ----------
    settings
        What to start.
    runtime_dir
        Where the directory of the engine's socket is made.
    log
        Gets the engine's log, each line marked.
    on_up
        Awaited when an engine has loaded, before it counts as ready; gets its HTTP.
    on_change
        Called when the state has changed, with the status before and the one now.
    """

    def __init__(
        self,
        settings: EngineSettings,
        runtime_dir: str,
        log: logging.Logger | logging.LoggerAdapter[Any],
        on_up: Callable[[Upstream], Awaitable[None]] | None = None,
        on_change: Callable[[Status, Status], None] = lambda before, now: None,
    ) -> None:
        self._settings = settings
        self._runtime_dir = runtime_dir
        self._log = log
        self._on_up = on_up
        self._on_change = on_change
        self._transport: asyncio.SubprocessTransport | None = None
        self._exited: asyncio.Event | None = None
        self._starting: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._socket_dir: str | None = None
        self._output: EngineOutput | None = None
        self._upstream: Upstream | None = None
        self._raising: asyncio.Task[None] | None = None
        self._failing: asyncio.Task[None] | None = None
        self._restart: asyncio.TimerHandle | None = None
        self._restarts: deque[float] = deque()
        # Whether an engine with these settings has been ready, and what this one says it failed of.
        self._proven = False
        self._told: str | None = None
        # Why none may be started; and whether the server ends.
        self._problem: str | None = None
        self._closed = False
        self._order: object = None
        self._status = Status("stopped", time.time(), reason="it has not been started")
        ENGINE_STATE.state(self._status.state)

    @property
    def status(self) -> Status:
        """What the engine is doing now."""
        return self._status

    @property
    def pid(self) -> int | None:
        """The engine's process id, which is its process group too; None when there is none."""
        return None if self._transport is None else self._transport.get_pid()

    def start(self) -> None:
        """Start the engine, and return at once. A second call while it runs is a no-op."""
        if self._closed or self._stopping is not None:
            return
        if self.status.state in ("starting", "ready"):
            return
        if self._problem is not None:
            self.fail(self._problem)
            return
        self._restarts.clear()
        self._begin_start(None)

    def _begin_start(self, reason: str | None) -> None:
        """Start the engine; `reason` is why the one before it ended."""
        self._restart = None
        self._told = None
        self._set(Status("starting", time.time(), reason, stage="starting the process"))
        self._starting = asyncio.ensure_future(self._start_or_fail())

    def refuse(self, problem: str) -> None:
        """Start no engine, for this reason."""
        self._problem = problem
        self.fail(problem)

    def fail(self, reason: str) -> None:
        """Record why no engine can be started."""
        self._set(Status("failed", time.time(), reason=reason))

    def upstream(self) -> Upstream:
        """The engine's HTTP, or `EngineUnavailable` saying why there is none now."""
        if self.status.state != "ready" or self._upstream is None:
            raise self.unavailable()
        return self._upstream

    def unavailable(self) -> EngineUnavailable:
        """Why a request cannot run now, and what to do, for the person at the notebook."""
        status = self.status
        reason = without_paths(status.reason or "").rstrip(".")
        if status.state == "starting":
            seconds = int(time.time() - status.since)
            name = self._settings.display_name
            if reason:
                return EngineUnavailable(
                    f"The engine died: {reason}. It is restarting ({status.stage}, {seconds} s so "
                    f"far); what was running is not run again, so try again in {RETRY_SECONDS} s.",
                    RETRY_SECONDS,
                )
            return EngineUnavailable(
                f"The engine is still loading {name} ({status.stage}, {seconds} s so far); "
                f"try again in {RETRY_SECONDS} s.",
                RETRY_SECONDS,
            )
        if status.state == "failed":
            return EngineUnavailable(
                f"The engine has failed: {reason}. The server's admin must look at it; trying "
                "again will not help until then."
            )
        if status.state == "stopped":
            return EngineUnavailable(
                f"The engine is stopped ({reason}); ask the server's admin to start it."
            )
        return EngineUnavailable(
            "The engine broke off this request without a reason; try again.", RETRY_SECONDS
        )

    async def lost(self) -> EngineUnavailable:
        """Why the connection to the engine broke.

        The connection of a dying engine breaks some milliseconds before its exit is reported.
        """
        if self._exited is not None and self.status.state == "ready":
            await _wait(self._exited, LOST_SECONDS)
        return self.unavailable()

    async def stop(self) -> None:
        """Stop the engine and everything it started; returns within 15 seconds, when it is gone.

        Safe to call in any state, twice, and while another call is under way.
        """
        await asyncio.shield(self._begin_stop())

    async def command(self, order: str) -> None:
        """Do what an admin orders: "start", "stop" or "restart". Returns once it is under way.

        A stop that is under way is waited for before a start. Of several orders the last counts.
        """
        mine = self._order = object()
        if order != "start" or self._stopping is not None:
            await self.stop()
        if order != "stop" and self._order is mine:
            self.start()

    async def close(self) -> None:
        """Stop the engine for good; the server ends."""
        self._closed = True
        await self.stop()

    # Starting

    @property
    def _socket_path(self) -> str:
        assert self._socket_dir is not None
        return os.path.join(self._socket_dir, "engine.sock")

    @property
    def _token_path(self) -> str:
        assert self._socket_dir is not None
        return os.path.join(self._socket_dir, "hub-token")

    def _keep_token(self) -> None:
        """Put the model hub's token where the engine finds it while it loads."""
        token = model_hub_token(os.environ)
        if token is not None:
            with open(os.open(self._token_path, os.O_CREAT | os.O_WRONLY, 0o600), "w") as file:
                file.write(token)

    def _forget_token(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._token_path)

    def _make_socket_dir(self) -> str:
        try:
            os.makedirs(self._runtime_dir, mode=0o700, exist_ok=True)
            made = tempfile.mkdtemp(prefix="nnsight-", dir=self._runtime_dir)
        except OSError:
            return tempfile.mkdtemp(prefix="nnsight-")
        if len(os.fsencode(os.path.join(made, "engine.sock"))) < _SOCKET_PATH_BYTES:
            return made
        os.rmdir(made)
        return tempfile.mkdtemp(prefix="nnsight-")

    async def _start_or_fail(self) -> None:
        try:
            await self._start()
        except Exception as error:
            self._log.exception("Engine: could not be started")
            what = error.strerror if isinstance(error, OSError) else None
            self.fail(f"it could not be started: {what or f'{type(error).__name__}: {error}'}")
            await self._end_process()
            self._remove_socket_dir()

    async def _start(self) -> None:
        self._socket_dir = self._make_socket_dir()
        self._upstream = Upstream(self._socket_path)
        self._exited = exited = asyncio.Event()
        self._output = output = EngineOutput(self._log, self._on_event)
        settings = self._settings
        command = engine_command(
            settings.engine_command_prefix, settings.engine_command, self._socket_dir
        )
        environment = engine_environment(os.environ, settings.engine_environment, self._token_path)
        try:
            self._keep_token()
            transport, _ = await asyncio.get_running_loop().subprocess_exec(
                lambda: _EngineProtocol(output, self._on_exit),
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                env=environment,
                cwd=self._socket_dir,
                umask=0o077,
            )
        except OSError as error:
            self._remove_socket_dir()
            exited.set()
            self.fail(
                f"c.NNsightServe.engine_command cannot be run: {error.strerror or error} "
                f"({os.path.basename(command[0])})"
            )
            self._log.error("Engine: %s", self.status.reason)
            return
        self._transport = transport
        atexit.register(self._stop_now)
        lifeline = transport.get_pipe_transport(0)
        assert isinstance(lifeline, asyncio.WriteTransport)
        lifeline.write(json.dumps(self._settings.engine_config(self._socket_path)).encode() + b"\n")
        self._log.info("Engine: started %s as process %d", self._settings.model, self.pid)

    def _on_event(self, event: dict[str, Any]) -> None:
        """An event of the engine. None is believed once it has loaded: then callers' code prints."""
        if self.status.state != "starting" or self._stopping or self._raising is not None:
            return
        if event.get("event") == "stage":
            stage = str(event.get("stage", ""))
            self._set_stage(stage)
            self._log.info("Engine: %s", stage)
        elif event.get("event") == "ready":
            self._forget_token()
            self._raising = asyncio.ensure_future(self._raise())
        elif event.get("event") == "failed":
            self._told = str(event.get("reason") or "it gave no reason")
            self._failing = asyncio.ensure_future(self._end_process())

    async def _raise(self) -> None:
        """The engine has loaded: have done what comes before the first trace, then open it."""
        assert self._upstream is not None
        upstream = self._upstream
        try:
            if self._on_up is not None:
                await self._on_up(upstream)
        except Exception as error:
            if self._exited is not None and not await _wait(self._exited, LOST_SECONDS):
                # It lives, and cannot be opened to traces without what comes before them.
                self._log.error("Engine: the edits could not be installed again: %r", error)
                self._told = "the edits could not be installed again"
                await self._end_process()
            return
        if self.status.state == "starting" and self._upstream is upstream:
            seconds = time.time() - self.status.since
            self._proven = True
            if self._output is not None:
                # What it said while it loaded is not why it ends later.
                self._output.lines.clear()
            self._set(Status("ready", time.time()))
            self._log.info("Engine: ready after %.1f s", seconds)

    def _set_stage(self, stage: str) -> None:
        self._set(Status("starting", self.status.since, self.status.reason, stage))

    # Ending

    def _on_exit(self) -> None:
        """The engine process has ended; whatever it started ends now."""
        transport, output = self._transport, self._output
        if transport is None or output is None or self._exited is None:
            return
        self._kill_group(signal.SIGKILL)
        self._transport = None
        atexit.unregister(self._stop_now)
        code = transport.get_returncode()
        transport.close()
        self._remove_socket_dir()
        self._raising = None
        if self.status.state in ("starting", "ready") and self._stopping is None:
            if self._told is None:
                self._died(f"the engine process {_ending(code)}{output.cause()}")
            else:
                self._died(output.reason(self._told))
        self._exited.set()

    def _died(self, reason: str) -> None:
        """The engine ended without being told to: restart it, or say why not."""
        now = time.monotonic()
        while self._restarts and self._restarts[0] < now - RESTART_WINDOW_SECONDS:
            self._restarts.popleft()
        if not self._proven or len(self._restarts) >= self._settings.max_restarts:
            if self._restarts:
                reason = f"{reason} (it was restarted {len(self._restarts)} times within an hour)"
            self.fail(reason)
            self._log.error("Engine: failed: %s", reason)
            return
        pause = min(self._settings.restart_backoff * 2 ** len(self._restarts), MAX_BACKOFF_SECONDS)
        self._restarts.append(now)
        self._log.error("Engine: died: %s; restarting in %g s", reason, pause)
        self._set(Status("starting", time.time(), reason, f"restarting in {pause:g} s"))
        self._restart = asyncio.get_running_loop().call_later(pause, self._begin_start, reason)

    def _begin_stop(self) -> asyncio.Task[None]:
        """The one stop that is under way."""
        if self._stopping is None:
            if self._restart is not None:
                self._restart.cancel()
                self._restart = None
            if self.status.state != "failed":
                self._set(Status("stopped", time.time(), reason="it was stopped"))
            self._stopping = asyncio.ensure_future(self._stop())
        return self._stopping

    async def _stop(self) -> None:
        try:
            if self._starting is not None:
                await asyncio.wait([self._starting])
            await self._end_process()
            self._remove_socket_dir()
        finally:
            self._stopping = None

    async def _end_process(self) -> None:
        """End the engine process, if there is one; returns when it is gone."""
        exited = self._exited
        if self._transport is None or exited is None:
            return
        lifeline = self._transport.get_pipe_transport(0)
        if lifeline is not None:
            lifeline.close()
        self._signal(signal.SIGTERM)
        if not await _wait(exited, GRACE_SECONDS):
            self._log.warning("Engine: killed, for it did not stop in %g s", GRACE_SECONDS)
            self._kill_group(signal.SIGKILL)
            await _wait(exited, KILL_SECONDS)

    def _stop_now(self) -> None:
        """Stop the engine without a loop, when the interpreter ends and nobody called `stop`.

        Jupyter does not call its extensions' stop hooks when Ctrl-C interrupts a server that has
        no terminal.
        """
        pid = self.pid
        if pid is None:
            return
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline and _alive(pid):
            time.sleep(0.02)
        self._kill_group(signal.SIGKILL)
        self._remove_socket_dir()

    def _signal(self, number: signal.Signals) -> None:
        if self.pid is not None:
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                pass

    def _kill_group(self, number: signal.Signals) -> None:
        """Signal the engine's whole process group; its number stays taken while a member lives."""
        if self.pid is not None:
            try:
                os.killpg(self.pid, number)
            except (ProcessLookupError, PermissionError):
                pass

    def _remove_socket_dir(self) -> None:
        if self._upstream is not None:
            self._upstream.close()
            self._upstream = None
        if self._socket_dir is not None:
            shutil.rmtree(self._socket_dir, ignore_errors=True)
            self._socket_dir = None

    def _set(self, status: Status) -> None:
        before, self._status = self._status, status
        if before.state != status.state:
            ENGINE_STATE.state(status.state)
            self._on_change(before, status)


class _EngineProtocol(asyncio.SubprocessProtocol):
    """Hands the process's output and end on, in the loop.

    The end is taken from `process_exited` and not from the end of the output, which a surviving
    child of the engine would hold open.
    """

    def __init__(self, output: EngineOutput, on_exit: Callable[[], None]) -> None:
        self._output = output
        self._on_exit = on_exit

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self._output.feed(data)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if fd == 1:
            self._output.flush()

    def process_exited(self) -> None:
        # What the process wrote last is still on its way through the pipe.
        asyncio.get_running_loop().call_later(0.05, self._on_exit)


def _ending(code: int | None) -> str:
    """How a process ended, from its return code."""
    if code is None:
        return "ended"
    if code < 0:
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"
    return f"ended with exit code {code}"


def _alive(pid: int) -> bool:
    """Whether a child process still runs; leaves the reaping to the loop's child watcher."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


async def _wait(event: asyncio.Event, seconds: float) -> bool:
    """Wait for `event`, at most `seconds`; whether it came."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
