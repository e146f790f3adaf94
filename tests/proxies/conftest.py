"""One real server under a base URL as JupyterHub makes them, and proxies in front of it.

`Server`, `running` and `stock_client` are those of the engine tests, whose module has the name of
this one.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from cutting import CuttingProxy

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".proxy"
BASE = "/jhub/user/anna%40example.org"
IDLE_SECONDS = 20.0
"""What both proxies take for an idle connection."""


def pytest_configure(config: pytest.Config) -> None:
    """Let torch, transformers and vLLM warn here, where they are imported into the test process."""
    config.addinivalue_line("filterwarnings", "default")


def _engine_conftest() -> Any:
    spec = importlib.util.spec_from_file_location(
        "engine_conftest", ROOT / "tests" / "engine" / "conftest.py"
    )
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    model = str(ROOT / ".models" / "tiny-llama")
    with _engine_conftest().running(model, tmp_path_factory.mktemp("server"), base=BASE) as found:
        yield found


@pytest.fixture(scope="session")
def stock(server: Any) -> Any:
    """nnsight's own client."""
    return _engine_conftest().stock_client(str(ROOT / ".models" / "tiny-llama"))


@pytest.fixture(scope="session")
def cutting(server: Any) -> Iterator[str]:
    """The server's address through a proxy that cuts idle connections."""
    with cutting_after(server, IDLE_SECONDS) as url:
        yield url


@contextlib.contextmanager
def cutting_after(server: Any, seconds: float) -> Iterator[str]:
    """The server's address through a proxy that cuts connections idle for ``seconds``."""
    proxy = CuttingProxy(int(server.root.rsplit(":", 1)[1]), seconds)
    try:
        yield f"http://127.0.0.1:{proxy.port}{BASE}"
    finally:
        proxy.stop()


@pytest.fixture(scope="session")
def hub_proxy(server: Any) -> Iterator[str]:
    """The address of configurable-http-proxy with the server's route, and one to nothing."""
    command = FOLDER / "configurable-http-proxy"
    if not command.exists():
        reason = FOLDER / "reason"
        why = reason.read_text().strip() if reason.exists() else "`make proxy` installs it"
        text = f"configurable-http-proxy is not here: {why}"
        if os.environ.get("CI"):
            pytest.fail(text)
        pytest.skip(text)
    port, api, nothing = (_free_port() for _ in range(3))
    milliseconds = str(int(IDLE_SECONDS * 1000))
    options = {
        "--ip": "127.0.0.1",
        "--port": str(port),
        "--api-ip": "127.0.0.1",
        "--api-port": str(api),
        "--timeout": milliseconds,
        "--proxy-timeout": milliseconds,
        "--log-level": "warn",
    }
    process = subprocess.Popen(
        [command, *(word for option in options.items() for word in option)],
        stdin=subprocess.DEVNULL,
        env={**os.environ, "CONFIGPROXY_AUTH_TOKEN": "the-proxy's"},
    )
    try:
        routes = {"/jhub/user/anna@example.org": server.root}
        routes["/jhub/user/gone"] = f"http://127.0.0.1:{nothing}"
        for path, target in routes.items():
            _add_route(api, path, target, process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(10)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _add_route(api: int, path: str, target: str, process: subprocess.Popen[bytes]) -> None:
    """Tell the proxy a route, as JupyterHub does; waits until its API is there."""
    for _ in range(100):
        assert process.poll() is None
        with contextlib.suppress(httpx.ConnectError):
            answer = httpx.post(
                f"http://127.0.0.1:{api}/api/routes{path}",
                json={"target": target},
                headers={"Authorization": "token the-proxy's"},
                trust_env=False,
            )
            assert answer.status_code == 201, answer.text
            return
        time.sleep(0.1)
    raise AssertionError("configurable-http-proxy did not start")
