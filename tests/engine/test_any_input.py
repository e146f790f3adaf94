"""Whatever comes to the real server: answers as the specification has them, and an engine that goes on.

`pytest --fuzz 10000` tries that many broken bodies, `make fuzz` does.
"""

from __future__ import annotations

import http.client
import io
import json
import pickle
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests
import schemathesis
import torch
import zstandard
from arbitrary import many
from conftest import ROOT, Server, running, stock_client
from heard import Heard
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import checks

# All but what would stop the engine under the other tests.
API = schemathesis.openapi.from_path(ROOT / "jupyter_nnsight_serve" / "rest-api.yaml").exclude(
    path_regex="^/nnsight/engine/"
)

# A body of arbitrary bytes is one by the specification, and is refused: that is not checked here.
CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.ignored_auth,
]

REFUSALS = {400, 409, 413}


@pytest.fixture(scope="module")
def tiny(tiny_path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tiny_path, tmp_path_factory.mktemp("any-input")) as server:
        yield server
        assert server.status()["state"] == "ready", server.tail()


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as found:
        yield found


@API.parametrize()
@settings(
    max_examples=30,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_answers_are_those_of_the_specification(
    case: Any, tiny: Server, session: requests.Session
) -> None:
    case.call_and_validate(
        session=session,
        base_url=tiny.url,
        headers={"Authorization": f"token {tiny.token}"},
        checks=CHECKS,
        timeout=60,
    )


@pytest.fixture(scope="module")
def trace(tiny: Server, tiny_path: str) -> bytes:
    """A trace as the stock client sends it, with a tensor that its block captures."""
    model = stock_client(tiny_path)
    heard = Heard(model, tiny)
    weight = torch.arange(4.0)
    with model.trace([5, 6, 7], max_tokens=1, backend=heard):
        logits = (model.logits[:, :4] * weight).save()
    return heard.body


Mutation = Callable[[bytes], bytes]


@st.composite
def mutations(draw: st.DrawFn) -> Mutation:
    """A way to break a body."""
    kind = draw(st.sampled_from(["cut", "flip", "drop", "insert", "repeat", "swap", "replace"]))
    at, size = draw(st.floats(0, 1)), draw(st.integers(1, 40))
    new = draw(st.binary(min_size=1, max_size=40))

    def apply(body: bytes) -> bytes:
        start = int(at * (len(body) - 1))
        end = start + size
        return {
            "cut": body[:start],
            "flip": body[:start] + bytes(b ^ new[0] for b in body[start:end]) + body[end:],
            "drop": body[:start] + body[end:],
            "insert": body[:start] + new + body[start:],
            "repeat": body[:end] + body[start:],
            "swap": body[end:] + body[:end],
            "replace": body[:start] + new + body[start + len(new) :],
        }[kind]

    return apply


class Post:
    """Sends bodies on one connection."""

    def __init__(self, server: Server) -> None:
        self.server = server
        address = urlsplit(server.url)
        self.base = address.path
        self.connection = http.client.HTTPConnection(address.hostname or "", address.port, 60)

    def __enter__(self) -> Post:
        return self

    def __exit__(self, *exc: object) -> None:
        self.connection.close()

    def __call__(self, path: str, body: bytes, compressed: bool) -> tuple[int, bytes]:
        headers = {"ndif-api-key": self.server.token, "nnsight-compress": str(compressed)}
        self.connection.request("POST", self.base + path, body, headers)
        answer = self.connection.getresponse()
        return answer.status, answer.read()


def check(status: int, answer: bytes) -> None:
    """A result, whatever it is of, or a refusal that says why."""
    assert status == 200 or status in REFUSALS, (status, answer[:2000])
    if status in REFUSALS:
        error = json.loads(answer)
        assert error["detail"] == error["message"] and error["message"].strip()


@pytest.mark.parametrize("path", ["/nnsight/generate", "/nnsight/register/an-id"])
def test_broken_bodies_are_refused_in_a_sentence(
    path: str, tiny: Server, trace: bytes, pytestconfig: pytest.Config
) -> None:
    packed = zstandard.compress(trace)

    @many(pytestconfig)
    @given(st.lists(mutations(), min_size=1, max_size=3), st.booleans())
    def run(ways: list[Mutation], compressed: bool) -> None:
        body = packed if compressed else trace
        for way in ways:
            body = way(body)
        check(*post(path, body, compressed))

    with Post(tiny) as post:
        run()
    tiny.get("/nnsight/register/an-id", "DELETE")
    assert tiny.status()["requests"]["tracked"] == 0


def test_other_bodies_are_refused_in_a_sentence(tiny: Server, pytestconfig: pytest.Config) -> None:
    plain = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
        max_leaves=8,
    )
    pickles = st.builds(pickle.dumps, plain, st.integers(0, 5))

    @many(pytestconfig)
    @given(st.one_of(st.binary(max_size=300), pickles), st.booleans())
    def run(body: bytes, compressed: bool) -> None:
        status, answer = post("/nnsight/generate", body, compressed)
        assert status in REFUSALS, answer
        check(status, answer)

    with Post(tiny) as post:
        run()


def test_a_body_that_numbers_an_object_beyond_its_length_takes_no_memory(tiny: Server) -> None:
    # An object that is given the number 1,300,000,000: room for all before it would be 20 GB.
    body = b"\x80\x04Nr" + (1_300_000_000).to_bytes(4, "little") + b"."
    with Post(tiny) as post:
        for path in ("/nnsight/generate", "/nnsight/register/x"):
            status, answer = post(path, body, False)
            assert status == 400
            assert "it numbers more objects than it has bytes" in json.loads(answer)["message"]


def test_a_body_that_names_what_no_trace_needs_is_refused_before_it_is_loaded(
    tiny: Server, tmp_path: Any
) -> None:
    mark = tmp_path / "mark"

    class Touch:
        def __reduce__(self) -> Any:
            return eval, (f"open({str(mark)!r}, 'w')",)

    body = io.BytesIO()
    pickle.dump(Touch(), body)
    whole = body.getvalue()
    with Post(tiny) as post:
        for path in ("/nnsight/generate", "/nnsight/register/x"):
            for sent, compressed in ((whole, False), (zstandard.compress(whole), True)):
                status, answer = post(path, sent, compressed)
                assert status == 400
                said = json.loads(answer)["message"]
                assert "refers to builtins.eval, which this server does not load" in said
    assert not mark.exists()
