"""A real Jupyter server with the extension, as a process of its own, on the fake engine."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

FAKE_ENGINE = Path(__file__).parent.parent / "fake_engine.py"
TOKEN = "a-token-of-the-tests"


def fake_command(*arguments: str) -> list[str]:
    """The `engine_command` that runs the fake engine."""
    return [sys.executable, str(FAKE_ENGINE), *arguments]


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def wait_until(condition: Callable[[], Any], seconds: float = 15.0) -> Any:
    """The first true value of `condition`; fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"not within {seconds} s")


def gone(pid: int) -> bool:
    """Whether a process runs no more; one that nobody reaped yet runs no more either."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class JupyterProcess:
    """A running server.

    Parameters
    ----------
    directory
        Where its configuration, its log and what the fake engine records are.
    settings
        Values of `c.NNsightServe`.
    standalone
        Run `jupyter nnsight-serve` instead of loading the extension into `jupyter server`.
    """

    def __init__(
        self,
        directory: Path,
        *engine_arguments: str,
        settings: dict[str, Any] | None = None,
        standalone: bool = False,
        extensions: tuple[str, ...] = (),
        arguments: tuple[str, ...] = (),
    ) -> None:
        self.directory = directory
        self.record_file = directory / "record.jsonl"
        self.log_file = directory / "jupyter.log"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        config = {
            "model": "fake/model",
            "engine_command": fake_command("--record", str(self.record_file), *engine_arguments),
            **(settings or {}),
        }
        config_dir = directory / "config"
        config_dir.mkdir()
        (config_dir / "jupyter_nnsight_serve_config.json").write_text(
            json.dumps({"NNsightServe": config})
        )
        loaded = {name: True for name in ("jupyter_nnsight_serve", *extensions)}
        environment = {
            **os.environ,
            "JUPYTER_CONFIG_DIR": str(config_dir),
            "JUPYTER_DATA_DIR": str(directory / "data"),
            "JUPYTER_RUNTIME_DIR": str(directory / "runtime"),
            "JUPYTER_TOKEN": TOKEN,
            "PYTHONPATH": os.pathsep.join([str(directory), str(Path(__file__).parents[2])]),
        }
        module = "jupyter_nnsight_serve" if standalone else "jupyter_server"
        command = [
            sys.executable,
            "-m",
            module,
            "--allow-root",
            "--ServerApp.ip=127.0.0.1",
            f"--ServerApp.port={self.port}",
            "--ServerApp.port_retries=0",
            f"--ServerApp.root_dir={directory}",
            *arguments,
        ]
        if not standalone:
            command += ["--no-browser", f"--ServerApp.jpserver_extensions={loaded}"]
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=directory,
            )

    @property
    def log(self) -> str:
        """What it printed."""
        return self.log_file.read_text(errors="replace")

    def record(self, event: str) -> list[dict[str, Any]]:
        """What the fake engine recorded of a kind."""
        if not self.record_file.exists():
            return []
        lines = self.record_file.read_text().splitlines()
        return [found for line in lines if (found := json.loads(line))["event"] == event]

    def ask(
        self, path: str, body: bytes | None = None, token: str | None = TOKEN, timeout: float = 30
    ) -> tuple[int, bytes]:
        """Status and body of a request."""
        request = urllib.request.Request(self.url + path, data=body)
        if token is not None and path.startswith(("/nnsight", "/v1")):
            request.add_header("ndif-api-key", token)
        elif token is not None:
            request.add_header("Authorization", f"token {token}")
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    def listening(self) -> bool:
        """Whether Jupyter answers; fails when it has ended."""
        assert self.process.poll() is None, self.log
        try:
            return self.ask("/api")[0] == 200
        except OSError:
            return False

    def state(self) -> str:
        """The engine's state."""
        state: str = json.loads(self.ask("/nnsight/status")[1])["state"]
        return state

    def wait_listening(self) -> None:
        """Wait until Jupyter answers."""
        wait_until(self.listening, 30)

    def wait_ready(self) -> None:
        """Wait until the engine is ready."""
        self.wait_listening()
        wait_until(lambda: self.state() == "ready", 30)

    @property
    def engine_pid(self) -> int:
        """The engine's process id."""
        pid: int = wait_until(lambda: self.record("started"))[-1]["pid"]
        return pid

    @property
    def grandchild_pid(self) -> int:
        """The process id of what the engine started."""
        pid: int = wait_until(lambda: self.record("grandchild"))[-1]["pid"]
        return pid

    def close(self) -> None:
        """End it, whatever state it is in, and what it started."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        for found in [*self.record("started"), *self.record("grandchild")]:
            if not gone(found["pid"]):
                psutil.Process(found["pid"]).kill()


@contextmanager
def jupyter_process(directory: Path, *arguments: str, **options: Any) -> Iterator[JupyterProcess]:
    """A server that listens, and is ended afterwards."""
    server = JupyterProcess(directory, *arguments, **options)
    try:
        server.wait_listening()
        yield server
    finally:
        server.close()


def socket_dirs(directory: Path) -> list[Path]:
    """The engine's socket directories that are left."""
    return [path for path in (directory / "runtime").glob("nnsight-*") if path.is_dir()]


def errors_in(log: str) -> list[str]:
    """Lines of the log that no healthy server writes."""
    return re.findall(r".*(?:Traceback|Uncaught exception|never retrieved|was destroyed).*", log)
