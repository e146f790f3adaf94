"""A real Jupyter server with the extension on a real vLLM CPU engine, and the stock client for it.

One engine serves a whole test run per model; `tiny` (random weights, 32 layers) is for speed and
`smollm2` for meaning. Two engines on one machine need their memory shares set, which every
``engine_args`` here does.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / ".models"
ENGINE_ARGS: dict[str, Any] = {"max_model_len": 512, "kv_cache_memory_bytes": 200_000_000}
START_SECONDS = 240


def pytest_configure(config: pytest.Config) -> None:
    """Let torch, transformers and vLLM warn here, where they are imported into the test process."""
    config.addinivalue_line("filterwarnings", "default")


class Server:
    """A Jupyter server process with the extension, and what a test asks of it.

    Attributes
    ----------
    url
        Its address, with the base URL, without a slash at the end.
    token
        What its API wants.
    lines
        Its log so far.
    """

    def __init__(
        self,
        model: str,
        folder: Path,
        settings: dict[str, Any] | None = None,
        server_app: dict[str, Any] | None = None,
        base: str = "/some/base",
    ) -> None:
        self.token = secrets.token_hex(16)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}{base}"
        self.root = f"http://127.0.0.1:{port}"
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "ServerApp": {
                "port": port,
                "port_retries": 0,
                "ip": "127.0.0.1",
                "base_url": base,
                **(server_app or {}),
            },
            "IdentityProvider": {"token": self.token},
            "NNsightServe": {"model": model, "engine_args": ENGINE_ARGS, **(settings or {})},
        }
        file = folder / "config.json"
        file.write_text(json.dumps(config))
        environment = {
            **os.environ,
            "JUPYTER_CONFIG_DIR": str(folder / "config"),
            "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
            "JUPYTER_DATA_DIR": str(folder / "data"),
            "HF_HUB_OFFLINE": "1",
            # Where server_app names classes of the tests.
            "PYTHONPATH": str(ROOT / "tests"),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jupyter_nnsight_serve", "--config", str(file), "--allow-root"],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout:
            for line in self.process.stdout:
                self.lines.append(line.rstrip())

    def get(
        self, path: str, method: str = "GET", body: bytes | None = None, **headers: str
    ) -> tuple[int, dict[str, Any]]:
        """Status and JSON of one request with the server's token."""
        request = urllib.request.Request(self.url + path, data=body, method=method)
        for name, value in {"Authorization": f"Bearer {self.token}", **headers}.items():
            request.add_header(name, value)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def status(self) -> dict[str, Any]:
        """GET /nnsight/status."""
        return self.get("/nnsight/status")[1]

    def tail(self) -> str:
        """The end of its log, for a failing test's message."""
        return "\n".join(self.lines[-60:])

    def wait_ready(self) -> None:
        """Return when the engine is ready, fail with its log when it will not be."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.tail()
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                state = self.status().get("state")
                if state == "ready":
                    return
                assert state != "failed", self.tail()
            time.sleep(0.3)
        raise AssertionError(self.tail())

    def stop(self) -> None:
        """End the server as its supervisor would."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(5)
        self.reader.join(5)

    @property
    def where(self) -> dict[str, str]:
        """The keywords that send a trace here."""
        return {"serve": self.url, "api_key": self.token}


@contextlib.contextmanager
def running(
    model: str,
    folder: Path,
    settings: dict[str, Any] | None = None,
    server_app: dict[str, Any] | None = None,
    base: str = "/some/base",
) -> Iterator[Server]:
    """A ready server, stopped at the end."""
    server = Server(model, folder, settings, server_app, base)
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()


def stock_client(model: str, **arguments: Any) -> Any:
    """nnsight's own client for a served model: its tree on the meta device, nothing of ours."""
    if not torch.accelerator.is_available():
        # What current vLLM needs on any host without an accelerator to build a meta tree.
        torch.accelerator.empty_cache = lambda *args, **kwargs: None
        torch.accelerator.synchronize = lambda *args, **kwargs: None
    from nnsight.modeling.vllm import VLLM

    return VLLM(model, max_model_len=512, **arguments)


@pytest.fixture(scope="session")
def smollm2_path() -> str:
    return str(MODELS / "smollm2-135m-instruct")


@pytest.fixture(scope="session")
def tiny_path() -> str:
    return str(MODELS / "tiny-llama")


@pytest.fixture(scope="session")
def smollm2(smollm2_path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(smollm2_path, tmp_path_factory.mktemp("smollm2")) as server:
        yield server


@pytest.fixture(scope="session")
def model(smollm2_path: str) -> Any:
    return stock_client(smollm2_path)
