"""One Hub for the whole run; its external service gets the engine that the tests of a file want."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .hub import BASE, ROOT, Client, Hub, running_hub

PROXY = ROOT / ".proxy"


def pytest_configure(config: pytest.Config) -> None:
    """Warnings of the Hub's own packages are theirs."""
    config.addinivalue_line("filterwarnings", "default")


@pytest.fixture(scope="session")
def proxy() -> Path:
    """JupyterHub's proxy; where it is not, the tests are skipped, and in CI they fail."""
    command = PROXY / "configurable-http-proxy"
    if not command.exists():
        reason = PROXY / "reason"
        why = reason.read_text() if reason.exists() else "`make test` installs it"
        text = f"configurable-http-proxy is not here: {why.strip()}"
        if os.environ.get("CI"):
            pytest.fail(text)
        pytest.skip(text)
    return command


# Of the service with a real engine.
REAL: dict[str, Any] = {
    "model": str(ROOT / ".models" / "smollm2-135m-instruct"),
    "engine_args": {"max_model_len": 512, "kv_cache_memory_bytes": 200_000_000},
}


@pytest.fixture(scope="session")
def hub(proxy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """A Hub whose users' servers tell it every second what they do.

    Its external service loads a real engine, while the tests that need none run.
    """
    folder = tmp_path_factory.mktemp("hub")
    environment = {"JUPYTERHUB_ACTIVITY_INTERVAL": "1"}
    with running_hub(folder, proxy, REAL, environment) as found:
        yield found


@pytest.fixture(scope="session")
def managed(hub: Hub) -> str:
    """The address of the service that the Hub itself started, on the fake engine."""
    url = f"{hub.root}{BASE}/services/managed"
    Client(url, None).wait_ready(hub.process.tail)
    return url
