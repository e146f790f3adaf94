"""Which server is found, at which address, and what is sent to whom."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import sys
import textwrap
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from fake_server import TOKEN, FakeServer, problem

from jupyter_nnsight_serve import connect
from jupyter_nnsight_serve.client import EngineNotReady, HubError, discover
from jupyter_nnsight_serve.client.address import candidates, read_address

HUB_TOKEN = "token-of-the-hub"


def runtime_file(
    tmp_path: Path, url: str, pid: int | None = None, token: str = TOKEN, directory: str = "runtime"
) -> Path:
    pid = os.getpid() if pid is None else pid
    file = tmp_path / directory / f"jpserver-{pid}.json"
    file.write_text(json.dumps({"url": url + "/", "token": token, "pid": pid}))
    return file


def sent(server: FakeServer) -> set[str]:
    """What the server was sent as a token."""
    found = {seen.headers.get("Authorization") for seen in server.seen}
    return {str(value).removeprefix("Bearer ") for value in found if value}


def refused(*arguments: Any, kind: type[HubError] = HubError) -> str:
    with pytest.raises(kind) as caught:
        connect(*arguments)
    text = str(caught.value)
    assert "\n" not in text and TOKEN not in text
    return text


# Addresses.

BASES = ["/nnsight", "/team/nnsight", "/lab", "/tree", "/edit", "/doc", "/api/j", "/hub"]
BASES += ["/user/ada/nnsight", "/v1/nnsight", "/lab/lab"]


@pytest.mark.parametrize("base", BASES)
def test_a_base_url_may_be_any_word(
    server: FakeServer, base: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server.base = base
    for page in ("", "/", "/lab", "/lab/tree/lab/a.ipynb", "/nnsight/status", "/v1/nnsight"):
        assert connect(server.url + page, TOKEN).url == server.url, page
    file = runtime_file(tmp_path, server.url)
    assert connect().url == server.url
    assert connect(server.url + "/lab").url == server.url
    file.unlink()
    monkeypatch.setenv("NNSIGHT_SERVE_URL", server.url)
    monkeypatch.setenv("NNSIGHT_SERVE_TOKEN", TOKEN)
    assert connect().url == server.url


def test_a_server_without_the_extension_keeps_its_base_url(server: FakeServer) -> None:
    server.base = "/elsewhere"
    server.replies["/lab/api"] = (200, {}, b'{"version": "2.0"}')
    assert f"{server.root}/lab does not have the nnsight extension" in refused(server.root + "/lab")


def test_no_token_is_sent_to_find_the_base_url(server: FakeServer) -> None:
    connect(server.url + "/lab/tree/x?token=" + TOKEN)
    assert {s.path for s in server.seen if "Authorization" in s.headers} == {
        f"{server.base}/nnsight/model"
    }


def test_only_a_page_is_asked_about() -> None:
    for url in ("http://h", "http://h/base", "http://h/services/lab", "http://h/laboratory"):
        assert candidates(url) == [url]
    assert candidates("http://h/a/lab/tree/x") == [
        "http://h/a/lab/tree/x",
        "http://h/a/lab",
        "http://h/a",
    ]


# A server with no model.


def unset(server: FakeServer) -> None:
    """Make the server one whose admin has set no model."""
    why = "c.NNsightServe.model is not set; set it."
    server.replies[f"{server.base}/nnsight/health"] = problem(503, "the engine is failed")
    status = {"state": "failed", "reason": why, "model": {"name": ""}}
    server.replies[f"{server.base}/nnsight/status"] = (200, {}, json.dumps(status).encode())
    server.replies[f"{server.base}/nnsight/model"] = problem(503, why)


def test_a_server_with_no_model_is_none_beside_one_that_has(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = FakeServer().start()
    try:
        unset(own)
        runtime_file(tmp_path, own.url, 999_999)
        monkeypatch.setenv("JPY_PARENT_PID", "999999")
        # The only one.
        text = refused(kind=EngineNotReady)
        assert own.url in text and "c.NNsightServe.model is not set; set it." in text
        runtime_file(tmp_path, server.url)
        assert connect().url == server.url
        server.replies[f"{server.base}/nnsight/health"] = (404, {}, b"")
        assert "model is not set" in refused(kind=EngineNotReady)
    finally:
        own.stop()


def test_an_engine_that_loads_or_died_is_found(server: FakeServer, tmp_path: Path) -> None:
    runtime_file(tmp_path, server.url)
    server.replies[f"{server.base}/nnsight/health"] = problem(503, "the engine is not ready")
    for status in (
        {"state": "starting", "model": {"name": ""}},
        {"state": "failed", "model": {"name": "some/model"}},
    ):
        answer = (200, {}, json.dumps(status).encode())
        server.replies[f"{server.base}/nnsight/status"] = answer
        assert connect().url == server.url


# Tokens.


def test_a_hub_token_goes_to_the_hub_and_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTERHUB_API_TOKEN", HUB_TOKEN)
    monkeypatch.setenv("JUPYTERHUB_API_URL", "http://10.0.0.1:8081/hub/api")
    monkeypatch.setenv("JUPYTERHUB_PUBLIC_HUB_URL", "https://hub.example.org/hub/")
    monkeypatch.setenv("NNSIGHT_SERVE_URL", "https://other.example.org:444/services/nnsight")
    for url, goes in {
        "https://hub.example.org/services/x": True,
        "https://hub.example.org:443/services/x": True,
        "https://other.example.org:444/a": True,
        "http://10.0.0.1:8081/services/x": True,
        "http://hub.example.org/services/x": False,
        "https://hub.example.org:8443/services/x": False,
        "https://other.example.org/a": False,
        "https://elsewhere.example.org/services/x": False,
        "http://127.0.0.1:8888": False,
        "http://localhost": False,
    }.items():
        assert bool(discover.token_for(read_address(url))) is goes, url


def test_a_hub_token_does_not_go_to_any_port_of_this_machine(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("JUPYTERHUB_API_TOKEN", HUB_TOKEN)
    refused(server.url)
    assert sent(server) == set()
    # A server of this account that left no token is one that the Hub started.
    file = runtime_file(tmp_path, server.url, token="")
    refused(server.url)
    refused()
    assert sent(server) == {HUB_TOKEN}
    server.seen.clear()
    # It has ended, and its port may be anybody's.
    file.unlink()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    runtime_file(tmp_path, server.url, ended.pid, token="")
    monkeypatch.setenv("JPY_PARENT_PID", str(ended.pid))
    refused(server.url)
    refused()
    assert sent(server) == set()


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="files have no owners here")
def test_a_file_of_another_account_is_not_believed(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("JUPYTERHUB_API_TOKEN", HUB_TOKEN)
    runtime_file(tmp_path, server.url, token="")
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    refused(server.url)
    assert "no other Jupyter server of this account" in refused()
    assert sent(server) == set()


@pytest.mark.parametrize("around", ["{}\n", " {} ", "\t{}\r\n"])
def test_white_space_around_a_token_is_none_of_it(
    server: FakeServer, around: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = around.format(TOKEN)
    assert connect(server.url, token).url == server.url
    monkeypatch.setenv("NNSIGHT_SERVE_TOKEN", token)
    assert connect(server.url).url == server.url


@pytest.mark.parametrize("token", ["tökén", "one\ntwo", "one two", "“token”", "a\0b"])
def test_what_cannot_be_a_token_is_told(server: FakeServer, model: Any, token: str) -> None:
    text = refused(server.url, token)
    assert "This token cannot be one" in text and token not in text
    with pytest.raises(HubError, match="cannot be one"):
        with model.trace("a", serve="http://127.0.0.1:1", api_key=token):
            x = model.logits.save()


LOCALS = """
    import sys, os, signal, threading, time, traceback
    sys.modules["vllm"] = None
    from jupyter_nnsight_serve import connect
    token, url = sys.stdin.read().split()
    def shown(run):
        try:
            run()
        except BaseException as error:
            told = traceback.TracebackException.from_exception(error, capture_locals=True)
            frames = [frame for frame in told.stack if frame.filename != "<string>"]
            locals = {text for frame in frames for text in (frame.locals or {}).values()}
            print(type(error).__name__, len(frames), any(token in text for text in locals))
        else:
            print("no error")
    def interrupted(run):
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        shown(run)
    hub = connect(url, token)
    model = hub.model
    interrupted(hub.status)
    interrupted(lambda: connect(url + "/slow", token))
    interrupted(lambda: connect(url + "/slow/lab?token=" + token))
    shown(lambda: connect("ftp://host/?token=" + token))
    shown(lambda: connect(url + "/none", token))
    interrupted(lambda: model.generate("a", serve=url + "/slow", api_key=token))
    shown(lambda: model.generate("a", serve="ftp://x", api_key=token))
    shown(lambda: model.edit(serve="ftp://x", api_key=token))
"""


def test_a_traceback_with_variables_shows_no_token(server: FakeServer, tmp_path: Path) -> None:
    import time

    class Slow(dict):  # type: ignore[type-arg]
        def __contains__(self, path: object) -> bool:
            if "/slow/nnsight" in str(path) or str(path).endswith("/status"):
                time.sleep(3)
            return False

    server.replies = Slow()
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LOCALS)],
        input=f"{TOKEN} {server.url}",
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines(), done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[0] for line in lines] == [
        *["KeyboardInterrupt"] * 3,
        *["HubError"] * 2,
        "KeyboardInterrupt",
        *["HubError"] * 2,
    ], done.stdout + done.stderr
    assert {line[2] for line in lines} == {"False"}, done.stdout
    # Frames there are to look at.
    assert all(int(line[1]) for line in lines[:3])


# The server's own sentence.


def test_a_server_that_has_no_token_says_so(server: FakeServer) -> None:
    path = f"{server.base}/nnsight/model"
    server.replies[path] = problem(403, "This server runs without a token; start it with one.")
    for token in (TOKEN, None):
        assert refused(server.url, token) == "This server runs without a token; start it with one."
    server.replies[path] = problem(403, "Not a token; pass api_key= with one.")
    assert "call connect(url, token)" in refused(server.url)


# Certificates and proxies.


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate of localhost that nobody signed, and its key."""
    file = tmp_path / "certificate.pem"
    options = "-x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost".split()
    try:
        subprocess.run(
            ["openssl", "req", *options, "-keyout", file, "-out", tmp_path / "only.pem"]
            + ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"],
            check=True,
            capture_output=True,
        )
    except FileNotFoundError:
        pytest.skip("there is no openssl to make a certificate with")
    file.write_text(file.read_text() + (tmp_path / "only.pem").read_text())
    return file


def test_a_certificate_of_this_machines_own(
    server: FakeServer, certificate: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server.http.socket = context.wrap_socket(server.http.socket, server_side=True)
    url = server.url.replace("http://", "https://")
    assert "set SSL_CERT_FILE" in refused(url, TOKEN)
    runtime_file(tmp_path, url)
    assert "set SSL_CERT_FILE" in refused() and "does not answer" not in refused()
    # A proxy does not know this machine's ports, whoever signed for them.
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "only.pem"))
    assert connect(url, TOKEN).url == url and connect().url == url
    monkeypatch.delenv("SSL_CERT_FILE")
    folder = tmp_path / "trusted"
    folder.mkdir()
    (folder / "only.pem").write_text((tmp_path / "only.pem").read_text())
    subprocess.run(["openssl", "rehash", folder], check=True, capture_output=True)
    monkeypatch.setenv("SSL_CERT_DIR", str(folder))
    assert connect(url, TOKEN).url == url
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "nowhere.pem"))
    assert "SSL_CERT_FILE" in refused(url, TOKEN)


def test_a_server_of_this_machine_is_asked_without_a_proxy_whatever_its_name(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A server that listens everywhere leaves this machine's name, and that is no local one."""
    import socket

    asked: list[str] = []

    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(403)

        def log_message(self, *args: Any) -> None:
            return

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    Thread(target=proxy.serve_forever, args=(0.02,), daemon=True).start()
    known = socket.getaddrinfo

    def named(host: Any, *args: Any, **options: Any) -> Any:
        return known("127.0.0.1" if host == "node7.cluster" else host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", named)
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{proxy.server_address[1]}")
    url = server.url.replace("127.0.0.1", "node7.cluster")
    try:
        refused(url, TOKEN)
        assert asked and not server.seen
        asked.clear()
        runtime_file(tmp_path, url)
        assert connect().url == url and connect(url).url == url
        assert connect(url + "/lab").url == url
        with connect().model.trace("a"):
            pass
        monkeypatch.setenv("NNSIGHT_SERVE_URL", url)
        assert connect().url == url
        assert asked == []
    finally:
        proxy.shutdown()
        proxy.server_close()
