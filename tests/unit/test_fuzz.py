"""Arbitrary bytes at every entry of the Jupyter server: clean answers, and a server that goes on.

`pytest --fuzz 10000` tries that many inputs at each entry, `make fuzz` does.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from urllib.parse import quote, quote_from_bytes

import pytest
from arbitrary import many
from hypothesis import given
from hypothesis import strategies as st

from .jupyter_process import TOKEN, JupyterProcess, errors_in, jupyter_process

# What a request that is in order is answered with; all else is to be one of the 4xx.
FINE = {200, 204, 304}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JupyterProcess]:
    with jupyter_process(tmp_path_factory.mktemp("fuzz"), settings={"max_edits": 5}) as running:
        running.wait_ready()
        yield running
        assert running.ask("/nnsight/status")[0] == 200
        assert running.ask("/nnsight/generate", b"x")[1] == b"got 1 bytes"
    assert errors_in(running.log) == []


class Wire:
    """One connection at a time, on which bytes are sent as they are."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.sock: socket.socket | None = None

    def close(self) -> None:
        if self.sock is not None:
            self.sock.close()
            self.sock = None

    def exchange(self, request: bytes) -> tuple[int, bytes, bytes]:
        """Status, headers and body of the answer; status 0 where the connection was closed."""
        if self.sock is None:
            self.sock = socket.create_connection(("127.0.0.1", self.port), 20)
        try:
            self.sock.sendall(request)
            return self._answer(self.sock)
        except (ConnectionError, EOFError):
            self.close()
            return 0, b"", b""

    def _answer(self, sock: socket.socket) -> tuple[int, bytes, bytes]:
        data = b""
        while b"\r\n\r\n" not in data:
            data += self._more(sock)
        head, _, body = data.partition(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        fields = {
            name.strip().lower(): value.strip()
            for name, _, value in (line.partition(b":") for line in head.split(b"\r\n")[1:])
        }
        length = int(fields.get(b"content-length", b"0"))
        while len(body) < length:
            body += self._more(sock)
        # What lies behind is the answer to the bytes behind the request.
        body = body[:length]
        if fields.get(b"connection", b"").lower() == b"close" or status == 400:
            self.close()
        return status, head, body

    def _more(self, sock: socket.socket) -> bytes:
        data = sock.recv(65536)
        if not data:
            raise EOFError
        return data


@pytest.fixture
def wire(server: JupyterProcess) -> Iterator[Wire]:
    found = Wire(server.port)
    yield found
    found.close()


def request(
    method: str, target: str, *headers: bytes, body: bytes = b"", token: bool = True
) -> bytes:
    lines = [f"{method} {target} HTTP/1.1".encode(), b"Host: 127.0.0.1"]
    if token:
        lines.append(b"ndif-api-key: " + TOKEN.encode())
    lines += [*headers, b"Content-Length: %d" % len(body)]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def check(answer: tuple[int, bytes, bytes], *, closing: bool = False) -> None:
    """An answer in order, or a 4xx whose sentence says what was wrong."""
    status, head, body = answer
    if status == 0:
        assert closing, "the connection was closed without an answer"
        return
    assert status in FINE or 400 <= status < 500, (status, body)
    # Tornado itself answers what is no HTTP, with a bare 400.
    if status >= 400 and (body or not closing):
        error = json.loads(body)
        assert error["message"] == error["detail"] and error["message"].strip()
        assert "Traceback" not in error["message"]


text = st.text(max_size=200)
segments = st.one_of(
    text.map(lambda value: quote(value, safe="")),
    st.binary(max_size=60).map(lambda value: quote_from_bytes(value, safe="")),
    st.sampled_from(["..", ".", "%2e%2e", "%00", "a%2fb", "x" * 129, "%ff", "%", "%zz"]),
)
visible = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=60)


def test_ids(server: JupyterProcess, wire: Wire, pytestconfig: pytest.Config) -> None:
    @many(pytestconfig)
    @given(segments, st.sampled_from(["POST", "DELETE"]), st.sampled_from(["", "/v1"]))
    def run(edit_id: str, method: str, prefix: str) -> None:
        body = b"block" if method == "POST" else b""
        target = f"{prefix}/nnsight/register/{edit_id}"
        check(wire.exchange(request(method, target, body=body)), closing="%" in edit_id)

    run()


def test_query_strings(server: JupyterProcess, wire: Wire, pytestconfig: pytest.Config) -> None:
    keys = st.sampled_from(["name", "shared", "owner", "id", "token", "_xsrf", ""])
    pairs = st.lists(st.tuples(keys, segments), max_size=4)

    @many(pytestconfig)
    @given(pairs, st.sampled_from(["POST", "DELETE"]))
    def run(query: list[tuple[str, str]], method: str) -> None:
        joined = "&".join(f"{key}={value}" for key, value in query)
        body = b"block" if method == "POST" else b""
        target = f"/nnsight/register/an-id?{joined}"
        check(wire.exchange(request(method, target, body=body)), closing=True)

    run()


def test_paths_and_methods(server: JupyterProcess, wire: Wire, pytestconfig: pytest.Config) -> None:
    known = st.sampled_from(
        ["nnsight", "v1", "generate", "register", "clear", "status", "health", "model", "usage"]
    )
    methods = st.sampled_from(["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])

    @many(pytestconfig)
    @given(methods, st.lists(st.one_of(known, visible.map(quote)), max_size=5))
    def run(method: str, parts: list[str]) -> None:
        target = "/nnsight/" + "/".join(parts)
        # The fake engine has no model to tell of.
        if "/model" not in target:
            check(wire.exchange(request(method, target)), closing=True)

    run()


def test_headers(server: JupyterProcess, wire: Wire, pytestconfig: pytest.Config) -> None:
    names = st.sampled_from(
        [
            "nnsight-compress",
            "Accept",
            "Nnsight-Tree",
            "Nnsight-Model",
            "Nnsight-Tokens",
            "Nnsight-Progress",
            "Nnsight-Edits",
            "Nnsight-Timeout",
            "Nnsight-Trace-Id",
            "Authorization",
            "ndif-api-key",
            "Content-Type",
            "Content-Encoding",
            "Cookie",
            "Origin",
            "Referer",
            "X-XSRFToken",
            "If-None-Match",
            "X-Forwarded-For",
            "Connection",
            "Range",
        ]
    ).map(str.encode)
    values = st.one_of(visible.map(str.encode), st.binary(max_size=80))
    fields = st.lists(st.tuples(names, values).map(b": ".join), max_size=5)

    @many(pytestconfig)
    @given(fields, st.booleans())
    def run(headers: list[bytes], token: bool) -> None:
        whole = request("POST", "/nnsight/generate", *headers, body=b"x", token=token)
        check(wire.exchange(whole), closing=True)
        wire.close()

    run()


def test_lengths(server: JupyterProcess, wire: Wire, pytestconfig: pytest.Config) -> None:
    numbers = st.integers(-5, 2**70).map(lambda number: b"%d" % number)
    lengths = st.one_of(numbers, visible.map(str.encode))

    @many(pytestconfig)
    @given(
        lengths, st.sampled_from([b"", b"Transfer-Encoding: chunked\r\n"]), st.binary(max_size=60)
    )
    def run(length: bytes, encoding: bytes, body: bytes) -> None:
        head = request("POST", "/nnsight/generate").rsplit(b"Content-Length", 1)[0]
        wire.close()
        sock = socket.create_connection(("127.0.0.1", server.port), 20)
        wire.sock = sock
        sock.sendall(head + encoding + b"Content-Length: " + length + b"\r\n\r\n" + body)
        # An end of input, for which a longer body than was sent would wait.
        sock.shutdown(socket.SHUT_WR)
        try:
            answer = wire._answer(sock)
        except (ConnectionError, EOFError):
            answer = (0, b"", b"")
        wire.close()
        check(answer, closing=True)

    run()
