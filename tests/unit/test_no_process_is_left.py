"""However Jupyter ends, the engine and what it started are gone within 15 seconds."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from .jupyter_process import (
    JupyterProcess,
    errors_in,
    gone,
    jupyter_process,
    socket_dirs,
    wait_until,
)

SECONDS = 15.0


def all_gone(server: JupyterProcess) -> bool:
    return gone(server.engine_pid) and gone(server.grandchild_pid)


@pytest.mark.parametrize(
    ("name", "loading"),
    [("SIGTERM", False), ("SIGINT", False), ("SIGKILL", False), ("SIGTERM", True)],
)
def test_signal(tmp_path: Path, name: str, loading: bool) -> None:
    with jupyter_process(
        tmp_path, "--grandchild", "--load-seconds", "60" if loading else "0"
    ) as server:
        if loading:
            assert server.grandchild_pid
        else:
            server.wait_ready()
        assert not all_gone(server)
        begun = time.monotonic()
        server.process.send_signal(signal.Signals[name])
        server.process.wait(SECONDS)
        wait_until(lambda: all_gone(server), SECONDS - (time.monotonic() - begun))
    if name != "SIGKILL":
        assert socket_dirs(tmp_path) == []
        assert errors_in(server.log) == []
        assert "Unknown child" not in server.log


def test_interrupt_with_an_engine_that_ignores_everything(tmp_path: Path) -> None:
    # Jupyter calls no stop hook here, so this is what happens when the interpreter ends.
    with jupyter_process(tmp_path, "--grandchild", "--ignore-sigterm") as server:
        server.wait_ready()
        begun = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        server.process.wait(SECONDS)
        wait_until(lambda: all_gone(server), SECONDS - (time.monotonic() - begun))
    assert socket_dirs(tmp_path) == []


def test_trace_under_way(tmp_path: Path) -> None:
    with jupyter_process(tmp_path, "--grandchild") as server:
        server.wait_ready()

        def trace() -> None:
            try:
                server.ask("/v1/nnsight/generate", b'{"never": true}')
            except OSError:
                pass

        thread = threading.Thread(target=trace)
        thread.start()
        wait_until(lambda: server.record("trace"))
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(SECONDS)
        thread.join(5)
        assert not thread.is_alive()
        wait_until(lambda: all_gone(server), SECONDS)
    assert errors_in(server.log) == []


# Another extension whose stop hook fails: Jupyter then does not end, and the engine still does.
BROKEN = """
from jupyter_server.extension.application import ExtensionApp

class Broken(ExtensionApp):
    name = "broken"
    async def stop_extension(self):
        raise RuntimeError("this one never stops properly")

def _jupyter_server_extension_points():
    return [{"module": "broken", "app": Broken}]
"""


def test_another_extension_that_fails_to_stop(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    with jupyter_process(tmp_path, "--grandchild", extensions=("broken",)) as server:
        server.wait_ready()
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: all_gone(server), SECONDS)
    assert "never stops properly" in server.log


def test_kernel_that_outlives_jupyter_does_not_hold_the_lifeline(tmp_path: Path) -> None:
    # A process that Jupyter started the way kernels are, and that stays when Jupyter is killed.
    (tmp_path / "starter.py").write_text(
        "import subprocess, sys, asyncio\n"
        "async def _start_jupyter_server_extension(serverapp):\n"
        "    await asyncio.sleep(1.5)\n"
        "    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'],\n"
        "                             close_fds=False, start_new_session=True)\n"
        "    open('child', 'w').write(str(child.pid))\n"
        "def _load_jupyter_server_extension(serverapp): pass\n"
        "def _jupyter_server_extension_points(): return [{'module': 'starter'}]\n"
    )
    with jupyter_process(tmp_path, "--grandchild", extensions=("starter",)) as server:
        server.wait_ready()
        child = int(wait_until(lambda: _read(tmp_path)))
        try:
            server.process.kill()
            wait_until(lambda: all_gone(server), SECONDS)
            assert not gone(child)
        finally:
            os.kill(child, signal.SIGKILL)


def _read(tmp_path: Path) -> str:
    path = tmp_path / "child"
    return path.read_text() if path.exists() else ""


def test_ctrl_c_in_a_terminal_does_not_reach_the_engine_before_it_is_confirmed(
    tmp_path: Path,
) -> None:
    with jupyter_process(tmp_path, "--grandchild") as server:
        server.wait_ready()
        # Another session and process group than Jupyter's, which is what a terminal signals.
        assert os.getsid(server.engine_pid) == server.engine_pid
        assert os.getpgid(server.grandchild_pid) == server.engine_pid
        assert os.getsid(server.process.pid) != server.engine_pid
