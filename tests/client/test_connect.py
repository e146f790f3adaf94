"""Finding a server, and refusing what is not one, each in one sentence that says what to do."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
from fake_server import TOKEN, FakeServer, problem

from jupyter_nnsight_serve import connect
from jupyter_nnsight_serve.client import EngineNotReady, HubError

HTML = {"Content-Type": "text/html"}


def one_sentence(error: BaseException) -> str:
    text = str(error)
    assert "\n" not in text and TOKEN not in text and len(text) < 500
    return text


def runtime_file(tmp_path: Path, server: FakeServer, pid: int, token: str = TOKEN) -> None:
    info = {"url": server.url + "/", "token": token, "pid": pid, "base_url": server.base}
    (tmp_path / "runtime" / f"jpserver-{pid}.json").write_text(json.dumps(info))


# Where it looks.


@pytest.mark.parametrize(
    "page", ["", "/", "/lab", "/lab/tree/a%20b.ipynb", "/tree?", "/nnsight/generate", "/v1/nnsight"]
)
def test_what_is_in_the_address_bar_will_do(server: FakeServer, page: str) -> None:
    assert connect(server.url + page, TOKEN).url == server.url
    assert connect(server.url.removeprefix("http://") + page, TOKEN).url == server.url


def test_the_token_in_an_address_is_taken_out_of_it(server: FakeServer) -> None:
    hub = connect(f"{server.url}/lab?token={TOKEN}")
    assert TOKEN not in repr(hub) and hub.url == server.url


def test_user_names_with_an_at_sign(server: FakeServer) -> None:
    server.base = "/user/a%40b.org"
    assert connect(server.url, TOKEN).model.name == "some/model"


def test_the_environment_names_the_server(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NNSIGHT_SERVE_URL", server.url + "/")
    monkeypatch.setenv("JUPYTERHUB_API_TOKEN", TOKEN)
    assert connect().url == server.url
    monkeypatch.setenv("JUPYTERHUB_API_TOKEN", "another")
    monkeypatch.setenv("NNSIGHT_SERVE_TOKEN", TOKEN)
    assert connect().url == server.url


def test_the_kernels_own_server(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runtime_file(tmp_path, server, 999_999)
    monkeypatch.setenv("JPY_PARENT_PID", "999999")
    assert connect().url == server.url


def test_a_server_on_this_machine(server: FakeServer, tmp_path: Path) -> None:
    plain = FakeServer(base="/plain").start()
    plain.replies["/plain/nnsight/health"] = (404, HTML, b"no")
    try:
        runtime_file(tmp_path, plain, os.getppid())
        runtime_file(tmp_path, server, os.getpid())
        assert connect().url == server.url
    finally:
        plain.stop()


def test_several_servers_are_for_the_person_to_choose_from(
    server: FakeServer, tmp_path: Path
) -> None:
    other = FakeServer().start()
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        runtime_file(tmp_path, other, process.pid)
        runtime_file(tmp_path, server, os.getpid())
        with pytest.raises(HubError) as caught:
            connect()
    finally:
        other.stop()
        process.communicate()
    assert server.url in one_sentence(caught.value) and other.url in str(caught.value)


def test_what_was_tried_is_told(server: FakeServer, tmp_path: Path) -> None:
    server.replies[f"{server.base}/nnsight/health"] = (404, HTML, b"no")
    runtime_file(tmp_path, server, os.getppid())
    with pytest.raises(HubError) as caught:
        connect()
    text = one_sentence(caught.value)
    assert "NNSIGHT_SERVE_URL is not set" in text
    assert f"this kernel's own server, {server.url}, does not have the extension" in text
    assert "no other Jupyter server" in text and "connect(" in text


# What it refuses.


def refused(url: str, token: str | None = TOKEN, kind: type[HubError] = HubError) -> str:
    with pytest.raises(kind) as caught:
        connect(url, token)
    assert TOKEN not in "".join(traceback.format_exception(caught.value))
    assert len(traceback.extract_tb(caught.value.__traceback__)) <= 2
    return one_sentence(caught.value)


def test_a_page_of_the_hub_itself(server: FakeServer) -> None:
    for page in ("/hub/", "/hub/home", "/hub"):
        assert f"{server.root}/services/NAME" in refused(server.root + page)


@pytest.mark.parametrize("address", ["ftp://a/b", "http://", "http://a:port/", "file:///etc"])
def test_what_is_no_address(address: str) -> None:
    assert "not a server's address" in refused(address)


def test_a_missing_base_url(server: FakeServer) -> None:
    assert "base URL" in refused(server.root)
    server.replies["/nnsight/model"] = (302, {"Location": "/some/base/"}, b"")
    assert "base URL" in refused(server.root)


def test_a_server_without_the_extension(server: FakeServer) -> None:
    server.replies["/plain/nnsight/model"] = (404, HTML, b"<html>Jupyter</html>")
    server.replies["/plain/api"] = (200, {}, b'{"version": "2.0"}')
    text = refused(server.root + "/plain")
    assert "does not have the nnsight extension; install jupyter-nnsight-serve" in text


def test_nothing_there(server: FakeServer) -> None:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert "Nothing answers" in refused(f"http://127.0.0.1:{port}")
    assert "http://" in refused(server.url.replace("http://", "https://"))


@pytest.mark.parametrize("location", ["/hub/login?next=x", "/login", "/hub/api/oauth2/authorize?a"])
def test_a_login_page(server: FakeServer, location: str) -> None:
    server.replies[f"{server.base}/nnsight/model"] = (302, {"Location": location}, b"")
    assert "Not logged in" in refused(server.url) and "token is not accepted" in refused(server.url)
    assert "no token was sent" in refused(server.url, None)
    server.replies[f"{server.base}/nnsight/model"] = (200, HTML, b"<html>login</html>")
    assert "web page" in refused(server.url)


def test_a_wrong_or_missing_token(server: FakeServer) -> None:
    assert "token" in refused(server.url, "wrong") and "token" in refused(server.url, None)
    path = f"{server.base}/nnsight/model"
    server.replies[path] = (403, HTML, b"forbidden")
    assert "does not accept this token" in refused(server.url)
    assert "no token was sent" in refused(server.url, None)
    server.replies[path] = (401, HTML, b"")
    assert "no token was sent" in refused(server.url, None)


def test_what_a_hub_answers_for_a_server_that_does_not_run(server: FakeServer) -> None:
    path = f"{server.base}/nnsight/model"
    server.replies[path] = (424, {}, b'{"status": 424, "message": "x is not running"}')
    assert "is not running; start it" in refused(server.url)
    server.replies[path] = (503, HTML, b"Service Unavailable")
    assert "not running behind its proxy" in refused(server.url)
    server.replies[path] = (502, HTML, b"")
    assert "proxy" in refused(server.url)


def test_an_incompatible_nnsight_is_named_with_what_to_install(server: FakeServer) -> None:
    for version in ("0.8.0", "0.8.99", "0.8.1.dev3"):
        server.versions = {"nnsight": version, "python": "3.13.1", "torch": "9"}
        connect(server.url, TOKEN)
    server.versions = {"nnsight": "0.9.2"}
    text = refused(server.url)
    assert "nnsight 0.9.2" in text and "nnsight 0.8.1" in text and "nnsight==0.9.*" in text


def test_an_incompatible_protocol_is_named_with_what_to_install(server: FakeServer) -> None:
    server.protocol = 2
    server.versions = {"package": "0.7.0"}
    text = refused(server.url)
    assert "protocol 2" in text and "jupyter-nnsight-serve==0.7.0" in text


def test_a_tree_that_is_none(server: FakeServer) -> None:
    server.tree = {"class": "A", "children": {"b": {"same_as": "nowhere"}}}
    with pytest.raises(HubError, match="same version"):
        _ = connect(server.url, TOKEN).model


def test_an_engine_that_is_loading_is_waited_for(server: FakeServer) -> None:
    path, state = f"{server.base}/nnsight/model", f"{server.base}/nnsight/status"
    server.replies[path] = problem(503, "The engine is starting (loading weights).")
    server.replies[state] = (200, {}, b'{"state": "starting", "stage": "loading weights"}')
    hub = connect(server.url, TOKEN)
    with pytest.raises(EngineNotReady, match="loading weights"):
        _ = hub.model
    assert hub.status()["stage"] == "loading weights" and "starting" in repr(hub.status())
    with pytest.raises(EngineNotReady, match="still starting"):
        hub.wait(timeout=0)
    del server.replies[path], server.replies[state]
    assert hub.wait(timeout=5).model.name == "some/model"


# The token.


def test_the_token_is_nowhere(
    server: FakeServer, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.DEBUG)
    hub = connect(server.url, TOKEN)
    model = hub.model
    with model.trace("a"):
        x = model.logits.save()
    things = [hub, hub._link, hub._link.token, hub.status(), hub.edits(), model, vars(hub)]
    things += [vars(hub._link), model.trace("a"), model.trace("a").backend, hub._link._client]
    for thing in things:
        assert TOKEN not in repr(thing) and TOKEN not in str(thing)
    assert TOKEN not in caplog.text
    assert not any(TOKEN in seen.path or TOKEN.encode() in seen.body for seen in server.seen)
    kept = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert kept and not any(TOKEN.encode() in file.read_bytes() for file in kept)


# Importing and speed.

LIGHT = """
import sys
before = set(sys.modules)
import jupyter_nnsight_serve
assert not any(m in sys.modules for m in ("torch", "nnsight", "httpx", "jupyter_server"))
from jupyter_nnsight_serve import connect
assert not any(m in sys.modules for m in ("torch", "nnsight", "vllm", "jupyter_server"))
hub = connect({url!r}, {token!r})
assert "nnsight" not in sys.modules
import nnsight
import time, anyio
began = time.monotonic()
hub = connect({url!r}, {token!r})
model = hub.model
took = time.monotonic() - began
assert not any(m == "vllm" or m.startswith("vllm.") for m in sys.modules)
assert "jupyter_server" not in sys.modules
print(took)
"""


def test_imports_are_light_and_a_cached_model_is_there_at_once(server: FakeServer) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIGHT.format(url=server.url, token=TOKEN)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1
    answers = [s for s in server.seen if s.path.endswith("/model")]
    assert "If-None-Match" not in answers[0].headers and "If-None-Match" in answers[1].headers


ORDER = """
import sys
sys.modules["vllm"] = None
{first}
from jupyter_nnsight_serve import connect
model = connect({url!r}, {token!r}).model
import asyncio
async def cell():
    with model.trace("a"):
        x = model.logits.save()
    async with model.trace("a"):
        y = model.logits.save()
    async with model.edit(name="n") as (tracer, edit):
        model.model.layers[0].output[0][:] = 0
    await edit.aclear()
    return 1
print(asyncio.run(cell()))
"""


@pytest.mark.parametrize("first", ["import nnsight", "import httpx, anyio", "pass"])
def test_whatever_is_imported_first(server: FakeServer, first: str) -> None:
    program = ORDER.format(first=first, url=server.url, token=TOKEN)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "1\n", done.stderr


# The cache.


def test_the_cache_is_private_and_checked_at_each_connect(
    server: FakeServer, tmp_path: Path
) -> None:
    folder = tmp_path / "cache"
    model = connect(server.url, TOKEN, cache_dir=folder).model
    assert model.tokenizer("The Eiffel").input_ids == [2, 3]
    assert model.tokenizer.pad_token == "<eos>"
    for directory in (folder, folder / "models", folder / "tokenizers"):
        assert directory.stat().st_mode & 0o777 == 0o700
    again = connect(server.url, TOKEN, cache_dir=folder).model
    assert again.tokenizer("The").input_ids == [2]
    assert len([s for s in server.seen if s.path.endswith("/tokenizer")]) == 1
    server.tree = {**server.tree, "class": "OtherForCausalLM"}
    other = connect(server.url, TOKEN, cache_dir=folder).model
    assert repr(other).startswith("OtherForCausalLM(") and other.tree_id != model.tree_id


def test_a_cache_that_is_broken_or_cannot_be_written_is_none(
    server: FakeServer, tmp_path: Path
) -> None:
    folder = tmp_path / "cache"
    connect(server.url, TOKEN, cache_dir=folder)
    (kept,) = (folder / "models").iterdir()
    halved = json.loads(kept.read_text())
    del halved["model"]["tree"]
    for text in ("{", "[]", '{"etag": 1, "model": []}', "", json.dumps(halved)):
        kept.write_text(text)
        assert connect(server.url, TOKEN, cache_dir=folder).model.name == "some/model"
        assert connect(server.url, TOKEN, cache_dir=folder).model.name == "some/model"
    blocked = tmp_path / "file"
    blocked.write_text("")
    model = connect(server.url, TOKEN, cache_dir=blocked / "below").model
    assert model.tokenizer("The").input_ids == [2]


@pytest.mark.parametrize("harm", ["missing", "cut", "all", "wrong"])
def test_a_kept_tokenizer_that_is_broken_is_fetched_again(
    server: FakeServer, tmp_path: Path, harm: str
) -> None:
    folder = tmp_path / "cache"
    assert connect(server.url, TOKEN, cache_dir=folder).model.tokenizer("The").input_ids == [2]
    (kept,) = (folder / "tokenizers").iterdir()
    names = [entry.name for entry in kept.iterdir() if not entry.name.startswith(".")]
    for name in names if harm == "all" else ["tokenizer.json"]:
        file = kept / name
        if harm == "wrong":
            file.write_bytes(b"x" * file.stat().st_size)
        elif harm == "cut":
            file.write_bytes(file.read_bytes()[:20])
        else:
            file.unlink()
    for _ in range(2):
        found = connect(server.url, TOKEN, cache_dir=folder).model.tokenizer
        assert found("The Eiffel").input_ids == [2, 3]
    assert len([s for s in server.seen if s.path.endswith("/tokenizer")]) == 2


def test_an_archive_that_is_not_the_announced_one_is_refused(
    server: FakeServer, tmp_path: Path
) -> None:
    import hashlib
    import io
    import zipfile

    from jupyter_nnsight_serve.client.cache import Cache

    cache = Cache(tmp_path / "cache")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("../../outside", "x")
    evil = buffer.getvalue()
    with pytest.raises(ValueError, match="outside"):
        cache.keep_tokenizer(hashlib.sha256(evil).hexdigest(), evil)
    with pytest.raises(ValueError, match="announced"):
        cache.keep_tokenizer("0" * 64, evil)
    assert not (tmp_path / "outside").exists()
    assert list((tmp_path / "cache" / "tokenizers").iterdir()) == []


def test_only_so_many_are_kept(server: FakeServer, tmp_path: Path) -> None:
    from jupyter_nnsight_serve.client.cache import Cache

    cache = Cache(tmp_path / "cache")
    for number in range(30):
        cache.keep_model(f"http://{number}", "e", {"a": 1})
    assert len(list((tmp_path / "cache" / "models").iterdir())) == 16


def test_a_server_without_a_tokenizer(server: FakeServer) -> None:
    server.extra = {"tokenizer": {"id": None, "bytes": 0}}
    assert connect(server.url, TOKEN).model.tokenizer is None


# Edits and status.


def test_edits(server: FakeServer, hub: Any, model: Any) -> None:
    with pytest.warns(UserWarning, match="about caching") as caught:
        with hub.edit(name="steer it") as (tracer, edit):
            for _ in tracer.all():
                model.model.layers[2].output[0][:] += 1
    assert caught[0].filename == __file__
    (seen,) = [s for s in server.seen if "/register/" in s.path]
    assert seen.path.endswith("?name=steer%20it") and len(seen.body) < 1500
    assert TOKEN.encode() not in seen.body and TOKEN not in repr(edit)
    from nnsight.intervention.interleaver import Mediator
    from nnsight.intervention.serialization import loads

    ids = {f"Envoy:{envoy.path}": envoy for envoy in model.modules()}
    template = loads(seen.body, ids)
    assert isinstance(template, Mediator) and template.lcls["model"] is model
    edit.clear()
    edit.clear()
    assert [s.method for s in server.seen if "/register/" in s.path] == ["POST", "DELETE"]
    with pytest.warns(UserWarning), model.edit() as (tracer, _):
        model.model.layers[2].output[0][:] = 0
    model.clear_edits()
    assert model._installed_edits == []


def test_edits_of_others_are_listed_and_cleared(server: FakeServer, hub: Any) -> None:
    assert repr(hub.edits()) == "no edits"
    entry = {"id": "a", "name": "n", "owner": "me", "created": 0.0, "bytes": 3, "new": 1}
    more = {"shared": True, "runs": 1, "source": "x = 1"}
    server.edits = [entry, {**entry, **more, "id": "b", "name": None, "owner": "root"}]
    one, everybodys = edits = hub.edits()
    assert (one.name, one.shared, one.runs, one.source) == ("n", False, None, None)
    assert (everybodys.shared, everybodys.runs, everybodys.source) == (True, 1, "x = 1")
    first, second = repr(edits).splitlines()
    assert first.startswith("n  me  ") and "run" not in first
    assert second.startswith("(for every trace)  root, for everybody  ") and "  1 run  " in second
    one.clear()
    edits.clear_all()
    assert [s.path for s in server.seen if s.method == "DELETE"] == [
        f"{server.base}/nnsight/register/a?owner=me",
        f"{server.base}/nnsight/register/b?shared=true",
    ]


def test_edits_that_went_are_told_of_with_the_reason(server: FakeServer, hub: Any) -> None:
    server.removed = [{"id": "a", "name": "n", "removed": 1.0, "reason": "its lifetime was over"}]
    edits = hub.edits()
    assert edits == [] and edits.removed[0]["name"] == "n"
    assert repr(edits).splitlines() == ["no edits", "n is gone: its lifetime was over"]


def test_an_edit_for_everybody_says_so(server: FakeServer, hub: Any, model: Any) -> None:
    with pytest.warns(UserWarning), hub.edit(name="a b", shared=True) as (tracer, edit):
        model.model.layers[2].output[0][:] = 0
    (sent,) = [s for s in server.seen if s.method == "POST"]
    assert sent.path.endswith("?name=a%20b&shared=true")


def test_an_edit_that_is_refused(server: FakeServer, hub: Any, model: Any) -> None:
    class Refusing(dict):  # type: ignore[type-arg]
        def __contains__(self, path: object) -> bool:
            return "/register/" in str(path)

        def __getitem__(self, path: object) -> Any:
            return problem(400, "The edit could not be installed")

    server.replies = Refusing()
    with pytest.raises(HubError, match="^The edit could not be installed$") as caught:
        with model.edit() as (tracer, edit):
            model.model.layers[2].output[0][:] = 0
    files = {entry.filename for entry in traceback.extract_tb(caught.value.__traceback__)}
    assert files == {__file__}
    assert model._installed_edits == []
    with pytest.raises(ValueError, match="inplace"):
        model.edit(inplace=False)
    with pytest.raises(TypeError, match="string"):
        model.edit(name=3)


def test_a_trace_takes_little_time_of_its_own(model: Any) -> None:
    def once() -> None:
        with model.trace([1, 2], max_tokens=1):
            x = model.logits.save()

    once()
    began = time.perf_counter()
    for _ in range(50):
        once()
    assert (time.perf_counter() - began) / 50 < 0.05


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("https://h/services/nnsight", "https://h/services/nnsight"),
        ("https://h/services/nnsight/", "https://h/services/nnsight"),
        ("https://h/services/nnsight/nnsight/status", "https://h/services/nnsight"),
        ("https://h/lab/hub/services/lab/tree/x", "https://h/lab/hub/services/lab"),
        ("https://h/lab/user/j%40b/lab/tree/x.ipynb", "https://h/lab/user/j%40b"),
        ("https://h/user/api/named/lab", "https://h/user/api/named"),
        ("https://h/base/lab/tree/services", "https://h/base"),
    ],
)
def test_names_behind_a_hub_may_be_words_of_pages(given: str, url: str) -> None:
    from jupyter_nnsight_serve.client.address import candidates, read_address

    assert candidates(read_address(given).url)[-1] == url
