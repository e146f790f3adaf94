"""The extension in a real server: `jupyter nnsight-serve`, and loaded by another one."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from .jupyter_process import (
    JupyterProcess,
    errors_in,
    free_port,
    jupyter_process,
    wait_until,
)

WRONG = [
    ({"model": ""}, "c.NNsightServe.model is not set"),
    ({"engine_args": 3}, "c.NNsightServe.engine_args: expected a dict"),
    ({"modle": "x"}, "c.NNsightServe.modle is not a setting"),
]

# An extension that tells what the server's process has imported.
PROBE = """
import json, sys
from jupyter_server.base.handlers import JupyterHandler
from tornado import web

class Modules(JupyterHandler):
    @web.authenticated
    def get(self):
        self.finish(json.dumps(sorted(sys.modules)))

def _jupyter_server_extension_points():
    return [{"module": "probe"}]

def _load_jupyter_server_extension(serverapp):
    serverapp.web_app.add_handlers(".*$", [("/api/probe", Modules)])
"""


def test_wrong_setting_ends_the_command_with_one_sentence(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], tuple[str, ...], str]] = [
        *((settings, (), sentence) for settings, sentence in WRONG),
        ({}, ("--NNsightServe.trace_timeot=3",), "c.NNsightServe.trace_timeot is not a setting"),
        ({}, ("--NNsightServe.trace_timeout=soon",), "c.NNsightServe.trace_timeout: expected a fl"),
        (
            {},
            ("--NNsightServe.engine_args={'max_model_lem': 1}",),
            "c.NNsightServe.engine_args has",
        ),
    ]
    servers = []
    for number, (settings, arguments, _) in enumerate(cases):
        directory = tmp_path / str(number)
        directory.mkdir()
        servers.append(
            JupyterProcess(directory, settings=settings, standalone=True, arguments=arguments)
        )
    try:
        codes = [server.process.wait(60) for server in servers]
    finally:
        for server in servers:
            server.close()
    assert codes == [1] * len(cases)
    for server, (_, _, sentence) in zip(servers, cases, strict=True):
        assert "Traceback" not in server.log
        (line,) = [line for line in server.log.splitlines() if sentence in line]
        assert line.startswith(f"jupyter nnsight-serve: {sentence}")
        assert server.log.endswith(line + "\n")
        assert not server.record("started")


@pytest.mark.parametrize(("settings", "sentence"), WRONG[1:])
def test_wrong_setting_is_logged_by_a_server_that_runs_on(
    tmp_path: Path, settings: dict[str, Any], sentence: str
) -> None:
    with jupyter_process(tmp_path, settings=settings) as server:
        status, body = server.ask("/v1/nnsight/generate", b"x")
        assert (status, sentence in json.loads(body)["detail"]) == (503, True)
    (line,) = [line for line in server.log.splitlines() if sentence in line]
    assert line.startswith("[E ")
    assert errors_in(server.log) == []


def test_command_serves_and_stops(tmp_path: Path) -> None:
    with jupyter_process(tmp_path, standalone=True) as server:
        server.wait_ready()
        assert server.ask("/v1/nnsight/generate", b"x") == (200, b"got 1 bytes")
        server.process.terminate()
        assert server.process.wait(15) == 0
    assert "[engine]" not in server.log or errors_in(server.log) == []


def test_help_lists_the_settings_with_their_units() -> None:
    text = subprocess.run(
        [sys.executable, "-m", "jupyter_nnsight_serve", "--help-all"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in (
        *("model", "revision", "engine_args", "taps", "device", "autostart"),
        *("max_request_bytes", "max_response_bytes", "trace_timeout", "engine_command"),
    ):
        assert f"--NNsightServe.{name}=" in text
    unwrapped = " ".join(text.split())
    for unit in ("in bytes", "Seconds from when the engine has all of a trace"):
        assert unit in unwrapped


def test_server_never_imports_torch_vllm_or_nnsight(tmp_path: Path) -> None:
    (tmp_path / "probe.py").write_text(PROBE)
    with jupyter_process(tmp_path, extensions=("probe",)) as server:
        server.wait_ready()
        # Whatever is imported late is imported now.
        assert server.ask("/v1/nnsight/generate", b"x")[0] == 200
        assert server.ask("/v1/nnsight/register/x?name=y", b"x")[0] == 200
        assert server.ask("/v1/nnsight/register/x/clear", b"")[0] == 200
        assert server.ask("/nnsight/health")[0] == 200
        assert server.ask("/v1/nnsight/generate", b"x", token="wrong")[0] == 403
        assert server.ask("/metrics")[0] == 200
        modules = json.loads(server.ask("/api/probe")[1])
    assert "jupyter_nnsight_serve.relay" in modules
    heavy = {"torch", "vllm", "nnsight", "transformers", "numpy", "ray", "uvloop", "nest_asyncio"}
    assert heavy.isdisjoint(name.split(".")[0] for name in modules)


def test_jupyter_answers_throughout_the_load(tmp_path: Path) -> None:
    server = JupyterProcess(tmp_path, "--load-seconds", "4")
    seconds: list[float] = []
    try:
        # From the first moment: the engine is started before the first request is looked at.
        wait_until(lambda: "is running at" in server.log, 60)
        while not seconds or server.state() != "ready":
            begun = time.monotonic()
            assert server.ask("/api/status")[0] == 200
            seconds.append(time.monotonic() - begun)
            time.sleep(0.02)
    finally:
        server.close()
    assert len(seconds) > 20
    # Jupyter itself gets ready in the first one.
    assert seconds[0] < 1.5
    assert max(seconds[1:]) < 0.5


def test_port_in_use_does_not_leave_an_engine(tmp_path: Path) -> None:
    with socket.socket() as taken:
        port = free_port()
        taken.bind(("127.0.0.1", port))
        taken.listen()
        server = JupyterProcess(tmp_path, arguments=(f"--ServerApp.port={port}",))
        try:
            wait_until(lambda: server.process.poll() is not None, 20)
            assert not server.record("started")
        finally:
            server.close()
