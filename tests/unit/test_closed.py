"""A standalone server is closed: its users reach nnsight, and of the rest nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import routes
from jupyter_server.auth import AllowAllAuthorizer

from .jupyter_process import TOKEN, JupyterProcess, jupyter_process

REST = {
    *("ContentsHandler", "CheckpointsHandler", "MainKernelHandler", "KernelWebsocketHandler"),
    *("SessionRootHandler", "TerminalRootHandler", "TermSocket", "ShutdownHandler"),
    *("AuthenticatedFileHandler", "NbconvertFileHandler", "APIStatusHandler", "ConfigHandler"),
}
PROBE = "--ServerApp.jpserver_extensions={'routes_probe': True, 'jupyter_server_terminals': True}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JupyterProcess]:
    """`jupyter nnsight-serve` with terminals, which tells its routes."""
    directory = tmp_path_factory.mktemp("closed")
    (directory / "routes_probe.py").write_text(routes.PROBE)
    with jupyter_process(directory, standalone=True, arguments=(PROBE,)) as found:
        found.wait_ready()
        yield found


def test_user_reaches_nnsight_and_nothing_else(server: JupyterProcess) -> None:
    found = routes.ask_all(server.url, TOKEN, ours=False)
    assert set(found) >= REST | {"PrometheusMetricsHandler"}
    extra = routes.reached(found)
    assert not extra, {handler: found[handler] for handler in extra}
    assert server.process.poll() is None
    assert server.ask("/v1/nnsight/generate", b"x") == (200, b"got 1 bytes")


def test_another_authorizer_is_taken_where_it_is_configured(tmp_path: Path) -> None:
    name = f"{AllowAllAuthorizer.__module__}.{AllowAllAuthorizer.__name__}"
    argument = f"--ServerApp.authorizer_class={name}"
    with jupyter_process(tmp_path, standalone=True, arguments=(argument,)) as server:
        assert server.ask("/api/contents")[0] == 200
        assert json.loads(server.ask("/nnsight/status")[1])["caller"]["name"] == "owner"


def test_extension_closes_nothing_in_a_server_of_others(tmp_path: Path) -> None:
    with jupyter_process(tmp_path) as server:
        assert server.ask("/api/contents")[0] == 200
