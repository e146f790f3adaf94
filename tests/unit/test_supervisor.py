"""The engine process: started, watched, and gone when it is to be gone."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from jupyter_nnsight_serve import supervisor as module
from jupyter_nnsight_serve.engine_output import EngineOutput
from jupyter_nnsight_serve.errors import EngineUnavailable, without_paths
from jupyter_nnsight_serve.settings import EngineSettings
from jupyter_nnsight_serve.supervisor import EngineSupervisor
from jupyter_nnsight_serve.upstream import Upstream

from .jupyter_process import fake_command, gone

Record = Callable[[str], list[dict[str, Any]]]
LOG = logging.getLogger("test-supervisor")


@asynccontextmanager
async def supervised(
    tmp_path: Path,
    *arguments: str,
    command: list[str] | None = None,
    backoff: float = 1.0,
    max_restarts: int = 5,
    **options: Any,
) -> AsyncIterator[EngineSupervisor]:
    """A supervisor that has started its engine, and stops it in the end."""
    settings = EngineSettings(
        model="fake/model",
        engine_command=command
        or fake_command("--record", str(tmp_path / "record.jsonl"), *arguments),
        restart_backoff=backoff,
        max_restarts=max_restarts,
    )
    supervisor = EngineSupervisor(settings, str(tmp_path / "run"), LOG, **options)
    supervisor.start()
    try:
        yield supervisor
    finally:
        await supervisor.stop()


async def until(supervisor: EngineSupervisor, state: str, seconds: float = 10) -> None:
    async with asyncio.timeout(seconds):
        while supervisor.status.state != state:
            await asyncio.sleep(0.01)


async def until_not(supervisor: EngineSupervisor, state: str) -> None:
    async with asyncio.timeout(5):
        while supervisor.status.state == state:
            await asyncio.sleep(0.01)


async def until_gone(pid: int, seconds: float = 5) -> None:
    async with asyncio.timeout(seconds):
        while not gone(pid):
            await asyncio.sleep(0.02)


async def test_engine_becomes_ready_by_its_stages(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with supervised(tmp_path, "--load-seconds", "0.4") as supervisor:
        assert supervisor.status.state == "starting"
        begun = supervisor.status.since
        await asyncio.sleep(0.45)
        with pytest.raises(EngineUnavailable) as caught:
            supervisor.upstream()
        assert caught.value.status_code == 503
        assert caught.value.headers == {"Retry-After": "10"}
        assert caught.value.message.startswith("The engine is still loading fake/model (")
        assert caught.value.message.endswith("s so far); try again in 10 s.")
        await until(supervisor, "ready")
        assert supervisor.status.since > begun
        assert (supervisor.status.reason, supervisor.status.stage) == (None, None)
        assert (await supervisor.upstream().ask("GET", "/health", 5))[0] == 200
    assert "Engine: loading weights" in caplog.text


async def test_socket_is_this_accounts_alone_and_goes_with_the_engine(tmp_path: Path) -> None:
    async with supervised(tmp_path) as supervisor:
        await until(supervisor, "ready")
        path = Path(supervisor.upstream().path)
        assert path.parent.parent == tmp_path / "run"
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not path.parent.exists()


async def test_long_runtime_directory_is_not_used_for_the_socket(tmp_path: Path) -> None:
    settings = EngineSettings(model="m", engine_command=fake_command())
    long = tmp_path / ("x" * 90)
    supervisor = EngineSupervisor(settings, str(long), LOG)
    supervisor.start()
    await until(supervisor, "ready")
    path = supervisor.upstream().path
    assert len(os.fsencode(path)) < 100 and str(long) not in path
    assert list(long.iterdir()) == []
    await supervisor.stop()
    assert not os.path.exists(os.path.dirname(path))


async def test_stop_ends_the_engine_and_what_it_started(tmp_path: Path, record: Record) -> None:
    async with supervised(tmp_path, "--grandchild") as supervisor:
        await until(supervisor, "ready")
        engine, grandchild = record("started")[0]["pid"], record("grandchild")[0]["pid"]
        assert os.getpgid(grandchild) == engine != os.getpgid(0)
        await asyncio.gather(supervisor.stop(), supervisor.stop())
        assert supervisor.status.state == "stopped"
        await until_gone(engine)
        await until_gone(grandchild)
        await supervisor.stop()
        with pytest.raises(EngineUnavailable) as caught:
            supervisor.upstream()
        assert "The engine is stopped (it was stopped)" in caught.value.message


async def test_engine_that_ignores_everything_is_killed(
    tmp_path: Path, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.5)
    async with supervised(tmp_path, "--grandchild", "--ignore-sigterm") as supervisor:
        await until(supervisor, "ready")
        async with asyncio.timeout(3):
            await supervisor.stop()
        await until_gone(record("started")[0]["pid"])
        await until_gone(record("grandchild")[0]["pid"])


def test_stop_is_bounded_by_what_was_promised() -> None:
    assert module.GRACE_SECONDS + module.KILL_SECONDS <= 13


async def test_stop_while_starting_ends_it(tmp_path: Path, record: Record) -> None:
    async with supervised(tmp_path, "--load-seconds", "30") as supervisor:
        await asyncio.sleep(0)
        await supervisor.stop()
        assert supervisor.status.state == "stopped"
        assert supervisor.pid is None
    for started in record("started"):
        await until_gone(started["pid"])
    assert list((tmp_path / "run").iterdir()) == []


async def test_engine_can_be_started_again(tmp_path: Path) -> None:
    async with supervised(tmp_path) as supervisor:
        await until(supervisor, "ready")
        first = supervisor.pid
        supervisor.start()
        assert supervisor.pid == first
        await supervisor.stop()
        supervisor.start()
        await until(supervisor, "ready")
        assert supervisor.pid not in (None, first)


async def test_engine_that_says_it_failed_keeps_its_reason(tmp_path: Path) -> None:
    reason = "there is no file /data/models/x/config.json here"
    async with supervised(tmp_path, "--fail", reason) as supervisor:
        await until(supervisor, "failed")
        assert supervisor.status.reason == reason
        with pytest.raises(EngineUnavailable) as caught:
            supervisor.upstream()
        assert caught.value.message == (
            "The engine has failed: there is no file config.json here. The server's admin must "
            "look at it; trying again will not help until then."
        )
        assert caught.value.headers == {}
        async with asyncio.timeout(3):
            while supervisor.pid is not None:
                await asyncio.sleep(0.01)
        assert supervisor.status.reason == reason


async def test_engine_that_ends_is_failed_with_code_and_cause(
    tmp_path: Path, record: Record
) -> None:
    lines = [
        "(EngineCore pid=7) ERROR 12-01 10:00:00 [core.py:1] ValueError: too little memory",
        "RuntimeError: Engine core initialization failed. See root cause above.",
        "INFO 12-01 10:00:00 [x.py:1] bye",
    ]
    says = [part for line in lines for part in ("--say", line)]
    async with supervised(tmp_path, "--exit", "3", "--grandchild", *says) as supervisor:
        await until(supervisor, "failed")
        assert supervisor.status.reason == (
            "the engine process ended with exit code 3: ValueError: too little memory"
        )
        await until_gone(record("grandchild")[0]["pid"])
        assert list((tmp_path / "run").iterdir()) == []


async def test_engine_that_dies_is_started_again_and_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    up: list[str] = []

    async def note(upstream: Upstream) -> None:
        assert supervisor.status.state == "starting"
        assert (await upstream.ask("GET", "/health", 5))[0] == 200
        up.append(upstream.path)

    harmless = ("--say", "ValueError: this kernel is not there, taking another")
    async with supervised(tmp_path, *harmless, backoff=0.3, on_up=note) as supervisor:
        await until(supervisor, "ready")
        first = supervisor.pid
        assert first is not None
        os.kill(first, signal.SIGSEGV)
        await until(supervisor, "starting")
        died = "the engine process was killed by SIGSEGV"
        assert supervisor.status.reason == died
        assert supervisor.status.stage == "restarting in 0.3 s"
        assert supervisor.unavailable().message.startswith(f"The engine died: {died}")
        await until(supervisor, "ready")
        assert supervisor.pid not in (None, first)
        assert (supervisor.status.reason, supervisor.status.stage) == (None, None)
        assert len(set(up)) == 2
    assert f"Engine: died: {died}" in caplog.text


async def test_engine_that_keeps_dying_stays_failed(tmp_path: Path) -> None:
    async with supervised(tmp_path, backoff=0.01, max_restarts=2) as supervisor:
        for _ in range(3):
            await until(supervisor, "ready")
            assert supervisor.pid is not None
            os.kill(supervisor.pid, signal.SIGKILL)
            await until_not(supervisor, "ready")
        await until(supervisor, "failed")
        assert (supervisor.status.reason or "").endswith(
            "(it was restarted 2 times within an hour)"
        )
        supervisor.start()
        await until(supervisor, "ready")


async def test_engine_that_cannot_be_loaded_again_is_tried_again(
    tmp_path: Path, record: Record
) -> None:
    fails = tmp_path / "fails"
    async with supervised(
        tmp_path, "--fail-when", str(fails), backoff=0.2, max_restarts=3
    ) as supervisor:
        await until(supervisor, "ready")
        fails.write_text("no memory left on the device")
        os.kill(supervisor.pid or 0, signal.SIGKILL)
        async with asyncio.timeout(10):
            while "no memory left" not in (supervisor.status.reason or ""):
                await asyncio.sleep(0.01)
        fails.unlink()
        await until(supervisor, "ready")
    assert len(record("started")) >= 3


async def test_engine_is_not_ready_when_what_comes_first_fails(
    tmp_path: Path, record: Record
) -> None:
    attempts: list[int] = []

    async def fails_once(upstream: Upstream) -> None:
        attempts.append(1)
        if len(attempts) == 2:
            raise TimeoutError

    async with supervised(tmp_path, backoff=0.05, on_up=fails_once) as supervisor:
        await until(supervisor, "ready")
        os.kill(supervisor.pid or 0, signal.SIGKILL)
        await until_not(supervisor, "ready")
        await until(supervisor, "ready", 20)
    assert len(record("started")) == len(attempts) == 3


async def test_what_keeps_an_engine_from_being_started_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with supervised(tmp_path) as supervisor:
        await until(supervisor, "ready")
        await supervisor.stop()

        def full(*args: Any, **options: Any) -> str:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(module.tempfile, "mkdtemp", full)
            await supervisor.command("start")
            await until(supervisor, "failed")
            reason = "it could not be started: No space left on device"
            assert supervisor.status.reason == reason
        await supervisor.command("start")
        await until(supervisor, "ready")


async def test_wrong_settings_are_not_started_by_an_order(tmp_path: Path, record: Record) -> None:
    settings = EngineSettings(model="", engine_command=fake_command())
    supervisor = EngineSupervisor(settings, str(tmp_path), LOG)
    supervisor.refuse("c.NNsightServe.model is not set.")
    await supervisor.command("restart")
    assert (supervisor.status.state, supervisor.pid) == ("failed", None)
    assert supervisor.status.reason == "c.NNsightServe.model is not set."


async def test_no_order_starts_an_engine_once_the_server_ends(
    tmp_path: Path, record: Record
) -> None:
    async with supervised(tmp_path) as supervisor:
        await until(supervisor, "ready")
        ordered = asyncio.ensure_future(supervisor.command("restart"))
        await asyncio.sleep(0)
        await supervisor.close()
        await ordered
        supervisor.start()
        assert supervisor.status.state == "stopped"
    assert len(record("started")) == 1


async def test_of_two_orders_the_last_counts(tmp_path: Path, record: Record) -> None:
    async with supervised(tmp_path) as supervisor:
        await until(supervisor, "ready")
        await asyncio.gather(supervisor.command("restart"), supervisor.command("stop"))
        assert supervisor.status.state == "stopped"
    assert len(record("started")) == 1


async def test_stop_between_two_engines_starts_no_further(tmp_path: Path, record: Record) -> None:
    async with supervised(tmp_path, backoff=0.3) as supervisor:
        await until(supervisor, "ready")
        os.kill(supervisor.pid or 0, signal.SIGKILL)
        await until_not(supervisor, "ready")
        await supervisor.stop()
        await asyncio.sleep(0.5)
        assert supervisor.status.state == "stopped"
    assert len(record("started")) == 1


async def test_command_that_cannot_be_run_is_a_failure(tmp_path: Path) -> None:
    async with supervised(tmp_path, command=[str(tmp_path / "nothing")]) as supervisor:
        await until(supervisor, "failed")
        assert "c.NNsightServe.engine_command cannot be run" in (supervisor.status.reason or "")
    assert list((tmp_path / "run").iterdir()) == []


async def test_ready_engines_output_is_not_believed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with supervised(tmp_path, "--print-ready-lies") as supervisor:
        await until(supervisor, "ready")
        await asyncio.sleep(0.3)
        assert supervisor.status.state == "ready"


async def test_no_write_end_of_the_lifeline_is_inherited(tmp_path: Path) -> None:
    async with supervised(tmp_path) as supervisor:
        await until(supervisor, "ready")
        assert supervisor._transport is not None
        lifeline = supervisor._transport.get_pipe_transport(0)
        assert lifeline is not None
        handle = lifeline.get_extra_info("socket") or lifeline.get_extra_info("pipe")
        assert os.get_inheritable(handle.fileno()) is False


class TestOutput:
    """`EngineOutput`."""

    def make(self) -> tuple[EngineOutput, list[dict[str, Any]]]:
        events: list[dict[str, Any]] = []
        return EngineOutput(LOG, events.append), events

    def test_lines_are_logged_with_a_mark_and_their_own_level(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG)
        output, _ = self.make()
        output.feed(b"INFO 12-01 x\nWARN")
        output.feed(b"ING 12-01 y\n(Worker pid=3) ERROR 12-01 z\nplain\n\n  \n")
        assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
            ("INFO", "[engine] INFO 12-01 x"),
            ("WARNING", "[engine] WARNING 12-01 y"),
            ("ERROR", "[engine] (Worker pid=3) ERROR 12-01 z"),
            ("INFO", "[engine] plain"),
        ]

    def test_progress_bar_is_one_line_without_colours(self) -> None:
        output, _ = self.make()
        output.feed(b"\r 10%\r 50%\r\x1b[32m100%\x1b[0m done\r\n")
        assert list(output.lines) == ["100% done"]

    def test_endless_line_is_cut_and_not_kept(self) -> None:
        output, _ = self.make()
        for _ in range(100):
            output.feed(b"y" * 65536)
        assert len(output._pending) < 20_000
        output.feed(b"\nnext\n")
        assert [len(line) < 20_000 for line in output.lines] == [True, True]
        assert output.lines[0].endswith("y [cut]")
        assert output.lines[1] == "next"

    def test_events_are_handed_on_and_broken_ones_logged(self) -> None:
        output, events = self.make()
        output.feed(b'@engine {"event": "ready"}\n@engine {broken\n@engine 3\n')
        assert events == [{"event": "ready"}]
        assert list(output.lines) == ["@engine {broken", "@engine 3"]

    def test_only_the_last_lines_are_kept(self) -> None:
        output, _ = self.make()
        output.feed(b"".join(b"%d\n" % number for number in range(1000)))
        assert list(output.lines) == [str(number) for number in range(600, 1000)]

    def test_what_vllm_dumps_of_requests_is_left_out(self) -> None:
        output, _ = self.make()
        output.feed(
            b"ERROR 12-01 [dump_input.py:79] Dumping scheduler output for model execution: "
            b"SchedulerOutput(extra_args={'serve_block': b'secret'})\n"
            b"x {'serve_block': b'secret'}\n"
        )
        assert len(output.lines) == 2
        assert not any("secret" in line for line in output.lines)
        assert "model execution: [left out" in output.lines[0]

    def test_cause_without_an_exception_is_the_last_error_or_line(self) -> None:
        output, _ = self.make()
        assert output.cause() == ""
        output.feed(b"first\nlast\n")
        assert output.cause() == ": last"
        output.feed(b"ERROR 12-01 bad thing\nlast\n")
        assert output.cause() == ": ERROR 12-01 bad thing"


def test_paths_are_cut_out_of_messages() -> None:
    assert without_paths("no /a/b/c.json, see http://h/x/y and 1/2 or /single") == (
        "no c.json, see http://h/x/y and 1/2 or /single"
    )
