"""A Jupyter server inside the test's own loop, with the extension on the fake engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from jupyter_server.serverapp import ServerApp
from jupyter_server.utils import url_path_join
from tornado.httpclient import HTTPResponse

from jupyter_nnsight_serve.extension import NNsightServe

from .jupyter_process import fake_command


@pytest.fixture
def record_file(tmp_path: Path) -> Path:
    """Where the fake engine writes what it saw."""
    return tmp_path / "record.jsonl"


@pytest.fixture
def record(record_file: Path) -> Callable[[str], list[dict[str, Any]]]:
    """What the fake engine saw of a kind."""

    def read(event: str) -> list[dict[str, Any]]:
        if not record_file.exists():
            return []
        lines = record_file.read_text().splitlines()
        return [found for line in lines if (found := json.loads(line))["event"] == event]

    return read


@pytest.fixture
def engine_arguments() -> list[str]:
    """What the fake engine is to do; tests override it."""
    return []


@pytest.fixture
def serve_settings() -> dict[str, Any]:
    """Settings of the extension; tests override them."""
    return {}


@pytest.fixture
def jp_server_config(
    engine_arguments: list[str], serve_settings: dict[str, Any], record_file: Path
) -> dict[str, Any]:
    """Jupyter's configuration."""
    return {
        "ServerApp": {"jpserver_extensions": {"jupyter_nnsight_serve": True}},
        "NNsightServe": {
            "model": "fake/model",
            "engine_command": fake_command("--record", str(record_file), *engine_arguments),
            **serve_settings,
        },
    }


@pytest.fixture
def extension(jp_serverapp: ServerApp) -> NNsightServe:
    """The extension, loaded; its engine is not started."""
    app: NNsightServe = jp_serverapp.extension_manager.extension_points["nnsight-serve"].app
    return app


@pytest.fixture
def started(
    jp_serverapp: ServerApp, extension: NNsightServe, jp_asyncio_loop: asyncio.AbstractEventLoop
) -> NNsightServe:
    """The extension after the server's loop started it; its engine may still be loading."""
    jp_asyncio_loop.run_until_complete(jp_serverapp.extension_manager.start_all_extensions())
    return extension


async def wait_state(extension: NNsightServe, *states: str, seconds: float = 20.0) -> None:
    """Wait until the engine is in one of `states`."""
    async with asyncio.timeout(seconds):
        while extension.supervisor.status.state not in states:
            await asyncio.sleep(0.01)


async def wait_for(condition: Callable[[], Any], seconds: float = 10.0) -> Any:
    """The first true value of `condition`."""
    async with asyncio.timeout(seconds):
        while not (value := condition()):
            await asyncio.sleep(0.01)
        return value


@pytest.fixture
def ready(started: NNsightServe, jp_asyncio_loop: asyncio.AbstractEventLoop) -> NNsightServe:
    """The extension with a ready engine."""
    jp_asyncio_loop.run_until_complete(wait_state(started, "ready"))
    return started


@pytest.fixture
def token(jp_serverapp: ServerApp) -> str:
    """The server's token."""
    found: str = jp_serverapp.identity_provider.token
    return found


Ask = Callable[..., Awaitable[HTTPResponse]]


@pytest.fixture
def ask(jp_serverapp: ServerApp, http_server_client: Any, jp_base_url: str, token: str) -> Ask:
    """Send a request; `key` is the ndif-api-key, by default the right one, None for none."""

    async def send(
        path: str,
        method: str = "GET",
        *,
        key: str | None = token,
        headers: dict[str, str] | None = None,
        body: bytes | None = None,
        below_base: bool = True,
        **options: Any,
    ) -> HTTPResponse:
        sent = dict(headers or {})
        if key is not None and path.startswith(("/api", "/metrics")):
            # Jupyter's own pages know nothing of nnsight's header.
            sent["Authorization"] = f"token {key}"
        elif key is not None:
            sent["ndif-api-key"] = key
        if body is None and method in ("POST", "PUT", "PATCH"):
            body = b""
        response: HTTPResponse = await http_server_client.fetch(
            url_path_join(jp_base_url, path) if below_base else path,
            method=method,
            headers=sent,
            body=body,
            raise_error=False,
            allow_nonstandard_methods=True,
            **options,
        )
        return response

    return send


def said(response: HTTPResponse) -> str:
    """The sentence of an error, after checking the error's form."""
    assert response.headers["Content-Type"].split(";")[0] == "application/json"
    error = json.loads(response.body)
    assert set(error) == {"message", "reason", "detail"}
    assert error["detail"] == error["message"]
    return str(error["message"])


class RawClient:
    """A connection on which a test writes what it likes."""

    def __init__(self, port: int) -> None:
        self.port = port

    async def __aenter__(self) -> RawClient:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except OSError:
            pass

    def head(self, method: str, path: str, **headers: str | int) -> None:
        """Write a request's head; underscores in names become dashes."""
        lines = [f"{method} {path} HTTP/1.1", f"Host: 127.0.0.1:{self.port}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.writer.write("\r\n".join(lines).encode() + b"\r\n\r\n")

    async def answer(self, seconds: float = 5.0) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the response."""
        async with asyncio.timeout(seconds):
            top = (await self.reader.readuntil(b"\r\n\r\n")).decode()
            first, *lines = top.strip().split("\r\n")
            headers = {
                k.lower(): v for k, v in (line.split(": ", 1) for line in lines if ": " in line)
            }
            body = await self.reader.readexactly(int(headers.get("content-length", "0")))
        return int(first.split()[1]), headers, body


@pytest.fixture
def raw(http_server: Any, jp_serverapp: ServerApp, http_server_port: Any) -> RawClient:
    """A raw connection to the server, to be entered with `async with`."""
    return RawClient(http_server_port[-1])
