"""The servers that are compared, each a tree of processes, started and stopped."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from .lines import ROOT

LOAD_SECONDS = 400


@dataclass
class Shape:
    """What is served.

    Attributes
    ----------
    model
        A model directory.
    arguments
        vLLM's engine arguments, eager.
    graphs
        What they become with CUDA graphs; None on a device that has none.
    taps
        The locations a tapped engine has.
    """

    model: str
    arguments: dict[str, Any]
    graphs: dict[str, Any] | None = None
    taps: list[str] = field(default_factory=list)


class System:
    """A server process.

    Attributes
    ----------
    url
        Where it listens.
    token
        What it wants to see.
    """

    def __init__(self, command: list[str], log: Path, **environment: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.token = secrets.token_hex(16)
        self.log = log
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [word.format(port=self.port) for word in command],
                cwd=ROOT,
                env={**os.environ, **environment, "JUPYTER_TOKEN": self.token},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )

    def wait(self) -> None:
        """Return once it would run a trace."""
        deadline = time.monotonic() + LOAD_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            with contextlib.suppress(urllib.error.URLError, OSError):
                with urllib.request.urlopen(f"{self.url}/health", timeout=10):
                    return
            time.sleep(0.5)
        raise RuntimeError(f"the server did not become ready; see {self.log}")

    def cpu_seconds(self) -> dict[str, float]:
        """CPU seconds so far of the server's processes, by their part.

        The first process is the server ("http"), its child the engine's own where there is one
        ("engine"), and everything below that computes ("worker").
        """
        totals = {"http": 0.0, "engine": 0.0, "worker": 0.0}
        top = psutil.Process(self.process.pid)
        for process in (top, *top.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                totals[self._part(process)] += times.user + times.system
        return totals

    def _part(self, process: psutil.Process) -> str:
        if process.pid == self.process.pid:
            return "http"
        own = process.ppid() == self.process.pid
        return "engine" if own and "jupyter_nnsight_serve.engine" in process.cmdline() else "worker"

    def stop(self) -> None:
        """End it and all that it started."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        _, left = psutil.wait_procs(family, timeout=5)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


@contextlib.contextmanager
def _running(system: System) -> Iterator[System]:
    try:
        system.wait()
        yield system
    finally:
        system.stop()


@contextlib.contextmanager
def stock(shape: Shape, log: Path, tapped: bool) -> Iterator[System]:
    """nnsight's own server."""
    taps = shape.taps if tapped else []
    arguments = shape.graphs if tapped else shape.arguments
    command = [sys.executable, "-m", "benchmarks.stock", shape.model, "{port}"]
    # Its braces are not for `format`.
    text = json.dumps(arguments).replace("{", "{{").replace("}", "}}")
    with _running(System([*command, text, *taps], log)) as system:
        yield system


@contextlib.contextmanager
def served(shape: Shape, log: Path, tapped: bool, **settings: Any) -> Iterator[System]:
    """This project's server."""
    with tempfile.TemporaryDirectory(prefix="nnsight-bench-") as folder:
        file = Path(folder) / "config.json"
        serve = {
            "model": shape.model,
            "engine_args": shape.graphs if tapped else shape.arguments,
            "taps": shape.taps if tapped else [],
            # One user sends everything, so that the engine and no limit is measured.
            "max_traces": 1024,
            "max_user_traces": 1024,
            "max_user_waiting": 1024,
            "max_edits": 1024,
            **settings,
        }
        app = {
            "ip": "127.0.0.1",
            "port_retries": 0,
            "allow_root": True,
            # A server of its own for nnsight would not answer /api/status, which is measured.
            "jpserver_extensions": {"jupyter_nnsight_serve": True},
        }
        file.write_text(json.dumps({"NNsightServe": serve, "ServerApp": app}))
        command = [
            *(sys.executable, "-m", "jupyter_server", "--config", str(file)),
            *("--ServerApp.port={port}", "--no-browser"),
        ]
        environment = {
            f"JUPYTER_{name}_DIR": str(Path(folder) / name.lower())
            for name in ("CONFIG", "RUNTIME", "DATA")
        }
        with _running(System(command, log, **environment)) as system:
            yield system
