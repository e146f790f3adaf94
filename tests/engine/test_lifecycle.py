"""A real engine lives and dies with its Jupyter server."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest
from conftest import Server, stock_client

GONE_SECONDS = 15


def engine_processes(server: Server) -> list[psutil.Process]:
    """The engine process and everything it started."""
    return [
        process
        for child in psutil.Process(server.process.pid).children()
        for process in [child, *child.children(recursive=True)]
    ]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_no_process_is_left(number: signal.Signals, tiny_path: str, tmp_path: Path) -> None:
    server = Server(tiny_path, tmp_path)
    try:
        worst = 0.0
        deadline = time.monotonic() + 240
        while server.process.poll() is None and time.monotonic() < deadline:
            try:
                begin = time.monotonic()
                server.get("/api/status")
                worst = max(worst, time.monotonic() - begin)
                status = server.status()
            except OSError:
                time.sleep(0.05)
                continue
            assert status["state"] in ("starting", "ready"), server.tail()
            if status["state"] == "ready":
                break
            time.sleep(0.05)
        # Jupyter answers while the engine loads.
        assert worst < 1.0
        processes = engine_processes(server)
        assert len(processes) >= 3
        names = " ".join(process.name() for process in processes)
        assert "VLLM" in names or len(processes) >= 3

        server.process.send_signal(number)
        begin = time.monotonic()
        _, alive = psutil.wait_procs(processes, timeout=GONE_SECONDS)
        left = [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
        assert not left, left
        assert time.monotonic() - begin < GONE_SECONDS
        server.process.wait(GONE_SECONDS)
    finally:
        if server.process.poll() is None:
            server.process.kill()


def test_no_process_is_left_when_callers_code_holds_the_interpreter(
    tiny_path: str, tmp_path: Path
) -> None:
    """The engine process's own threads cannot run then, so they cannot see that Jupyter is gone."""
    model = stock_client(tiny_path)
    server = Server(tiny_path, tmp_path)
    try:
        server.wait_ready()
        processes = engine_processes(server)

        def hold() -> None:
            with (
                contextlib.suppress(Exception),
                model.trace(max_tokens=1, **server.where) as tracer,
            ):
                total = sum(range(10**10))
                with tracer.invoke([5, 6, 7]):
                    logits = model.logits.save()

        threading.Thread(target=hold, daemon=True).start()
        time.sleep(3)
        server.process.kill()
        _, alive = psutil.wait_procs(processes, timeout=GONE_SECONDS)
        assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
    finally:
        server.stop()


def test_an_engine_process_that_is_killed_takes_its_workers_along_and_is_started_again(
    tiny_path: str, tmp_path: Path
) -> None:
    server = Server(tiny_path, tmp_path)
    try:
        server.wait_ready()
        (engine,) = psutil.Process(server.process.pid).children()
        processes = engine_processes(server)
        os.kill(engine.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(processes, timeout=GONE_SECONDS)
        assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
        deadline = time.monotonic() + 5
        while server.status()["state"] != "starting":
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert "SIGKILL" in server.status()["reason"]
        code, answer = server.get("/nnsight/generate", "POST", b"x")
        assert code == 503
        assert "SIGKILL" in answer["detail"] and "restarting" in answer["detail"]
    finally:
        server.stop()
