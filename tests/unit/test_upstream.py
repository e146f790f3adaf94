"""Exchanges with the engine: connections kept, and broken ones noticed."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from tornado import web
from tornado.httpserver import HTTPServer
from tornado.netutil import bind_unix_socket

import jupyter_nnsight_serve
from jupyter_nnsight_serve.extension import NNsightServe
from jupyter_nnsight_serve.handlers import ROUTES, NearMissHandler
from jupyter_nnsight_serve.upstream import EngineLost, Upstream

from .conftest import RawClient, wait_for


class Counting(HTTPServer):
    """Counts its connections."""

    def handle_stream(self, stream: Any, address: Any) -> None:
        self.connections = getattr(self, "connections", 0) + 1
        super().handle_stream(stream, address)


class Echo(web.RequestHandler):
    def post(self) -> None:
        self.finish({"size": len(self.request.body)})

    def delete(self) -> None:
        self.set_status(418)
        self.finish({})

    async def get(self) -> None:
        await asyncio.sleep(30)


@asynccontextmanager
async def serving(path: Path) -> AsyncIterator[Counting]:
    server = Counting(web.Application([("/", Echo)]))
    server.add_socket(bind_unix_socket(str(path)))
    try:
        yield server
    finally:
        server.stop()
        await server.close_all_connections()


async def send(upstream: Upstream, *chunks: bytes) -> dict[str, Any]:
    exchange = await upstream.open("POST", "/", length=None)
    for chunk in chunks:
        await exchange.write(chunk)
    exchange.end()
    status, answer = await exchange.json(5)
    assert status == 200
    exchange.abort()
    return answer


async def test_connection_is_kept_for_the_next_trace(tmp_path: Path) -> None:
    async with serving(tmp_path / "s") as server:
        upstream = Upstream(str(tmp_path / "s"))
        for size in (1, 100_000, 3):
            assert await send(upstream, b"x" * size, b"yy") == {"size": size + 2}
            await asyncio.sleep(0)
        assert server.connections == 1
        both = await asyncio.gather(send(upstream, b"1"), send(upstream, b"22"))
        assert both == [{"size": 1}, {"size": 2}]
        assert server.connections == 2
        upstream.close()


async def test_connection_is_not_kept_after_an_error_or_an_abort(tmp_path: Path) -> None:
    async with serving(tmp_path / "s") as server:
        upstream = Upstream(str(tmp_path / "s"))
        assert (await upstream.ask("DELETE", "/", 5))[0] == 418
        with pytest.raises(EngineLost):
            await upstream.ask("GET", "/", 0.1)
        assert await send(upstream, b"x") == {"size": 1}
        assert server.connections == 3
        upstream.close()


async def test_connection_that_the_engine_closed_is_not_used_again(tmp_path: Path) -> None:
    async with serving(tmp_path / "s") as server:
        upstream = Upstream(str(tmp_path / "s"))
        await send(upstream, b"x")
        await asyncio.sleep(0)
        await server.close_all_connections()
        await asyncio.sleep(0.05)
        assert await send(upstream, b"xx") == {"size": 2}
        upstream.close()


async def test_nobody_listening_is_a_lost_engine(tmp_path: Path) -> None:
    with pytest.raises(EngineLost):
        await Upstream(str(tmp_path / "nothing")).open("GET", "/")


async def test_full_backlog_is_waited_out(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s"))
        listening.listen(0)
        upstream = Upstream(str(tmp_path / "s"))
        opening = [asyncio.ensure_future(upstream.open("POST", "/")) for _ in range(3)]
        await asyncio.sleep(0.1)
        assert [task.done() for task in opening].count(False) >= 1
        accepted = []
        listening.setblocking(False)
        for _ in range(3):
            accepted.append(await wait_for(lambda: _accept(listening)))
        for task in opening:
            (await task).abort()
        for connection in accepted:
            connection.close()


def _accept(listening: socket.socket) -> socket.socket | None:
    try:
        return listening.accept()[0]
    except BlockingIOError:
        return None


async def test_write_to_an_engine_that_reads_no_more_ends_when_it_dies(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s"))
        listening.listen(1)
        exchange = await Upstream(str(tmp_path / "s")).open("POST", "/", length=None)
        accepted = listening.accept()[0]

        async def write() -> None:
            for _ in range(64):
                await exchange.write(b"x" * 2**20)

        writing = asyncio.ensure_future(write())
        await asyncio.sleep(0.1)
        assert not writing.done()
        accepted.close()
        with pytest.raises(EngineLost):
            async with asyncio.timeout(2):
                await writing


async def test_refused_request_says_that_the_connection_ends(
    extension: NNsightServe, raw: RawClient, jp_base_url: str
) -> None:
    # Else a client that keeps connections sends its next request into a closed one.
    async with raw:
        raw.head("GET", jp_base_url + "nnsight/stats")
        status, headers, _ = await raw.answer()
    assert (status, headers["connection"]) == (404, "close")


def test_rest_api_describes_every_route() -> None:
    path = Path(jupyter_nnsight_serve.__file__).parent / "rest-api.yaml"
    api = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert api["info"]["version"] == jupyter_nnsight_serve.__version__
    described = {
        (method.upper(), re.sub(r"\{\w+\}", "{}", route))
        for route, item in api["paths"].items()
        for method in item
        if method in ("get", "post", "put", "delete")
    }
    served = {
        (method, re.sub(r"\(\[\^/\]\+\)", "{}", pattern))
        for pattern, handler in ROUTES
        if pattern.startswith("/nnsight") and handler is not NearMissHandler
        for method in ("GET", "POST", "PUT", "DELETE")
        if handler.implements(method)
    }
    assert described == served
