"""A notebook's environment: nnsight, and no vLLM."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Whatever imports vLLM fails, as where it is not installed.
sys.modules["vllm"] = None  # type: ignore[assignment]

from fake_server import TOKEN, FakeServer

from jupyter_nnsight_serve import connect


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let torch and transformers warn where they are imported into the test process."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(autouse=True)
def nothing_around(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An environment that names no server."""
    for name in (
        "NNSIGHT_SERVE_URL",
        "NNSIGHT_SERVE_TOKEN",
        "JUPYTERHUB_API_TOKEN",
        "JUPYTERHUB_API_URL",
        "JUPYTERHUB_PUBLIC_URL",
        "JUPYTERHUB_PUBLIC_HUB_URL",
        "JUPYTERHUB_HOST",
        "SSL_CERT_FILE",
        "SSL_CERT_DIR",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "JPY_PARENT_PID",
    ):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "runtime").mkdir()
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))


@pytest.fixture
def server() -> Iterator[FakeServer]:
    found = FakeServer().start()
    yield found
    found.stop()


@pytest.fixture
def hub(server: FakeServer) -> Any:
    return connect(server.url, TOKEN)


@pytest.fixture
def model(hub: Any) -> Any:
    return hub.model
