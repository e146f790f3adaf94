"""Traces through the extension: both path families, passed on and back as they are."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest

from jupyter_nnsight_serve.extension import NNsightServe

from .conftest import Ask, RawClient, said, wait_for, wait_state

PATHS = ["/nnsight/generate", "/v1/nnsight/generate"]
Record = Callable[[str], list[dict[str, Any]]]


@pytest.mark.parametrize("path", PATHS)
async def test_trace_goes_to_the_engine_and_its_answer_comes_back(
    ready: NNsightServe, ask: Ask, record: Record, path: str
) -> None:
    response = await ask(path, "POST", body=b"a block", headers={"nnsight-compress": "True"})
    assert (response.code, response.body) == (200, b"got 7 bytes")
    assert response.headers["Content-Type"] == "application/octet-stream"
    assert response.headers["Content-Length"] == "11"
    (trace,) = record("trace")
    assert (trace["size"], trace["compress"], trace["length"]) == (7, "True", "7")
    assert record("headers")[0]["id"] == response.headers["Nnsight-Trace-Id"]


async def test_callers_headers_and_token_do_not_reach_the_engine(
    ready: NNsightServe, ask: Ask, record: Record, token: str
) -> None:
    await ask(PATHS[0], "POST", body=b"x", headers={"Cookie": "a=b", "X-Other": "1"})
    assert record("trace")[0]["headers"] == [
        "Content-Length",
        "Host",
        "Nnsight-Edits",
        "Nnsight-Timeout",
        "Nnsight-Trace-Id",
    ]
    assert token not in json.dumps(record("started"))


async def test_chunked_body_goes_through(
    ready: NNsightServe, raw: RawClient, jp_base_url: str, token: str, record: Record
) -> None:
    async with raw:
        raw.head(
            "POST",
            jp_base_url + "nnsight/generate",
            ndif_api_key=token,
            Transfer_Encoding="chunked",
        )
        for _ in range(3):
            raw.writer.write(b"5\r\nhello\r\n")
            await raw.writer.drain()
            await asyncio.sleep(0.02)
        raw.writer.write(b"0\r\n\r\n")
        status, _, body = await raw.answer()
    assert (status, body) == (200, b"got 15 bytes")
    # The engine gets a body once it is complete, and then its length is known.
    assert record("trace")[0]["length"] == "15"


async def test_body_over_the_http_servers_own_limit_goes_through(
    ready: NNsightServe, raw: RawClient, jp_base_url: str, token: str
) -> None:
    # Tornado's is 100 MB here and 512 MiB in Jupyter, and ends with a bare 400.
    pieces = 101
    async with raw:
        raw.head(
            "POST",
            jp_base_url + "nnsight/generate",
            ndif_api_key=token,
            Content_Length=pieces * 2**20,
        )
        for _ in range(pieces):
            raw.writer.write(b"x" * 2**20)
            await raw.writer.drain()
        status, _, body = await raw.answer()
    assert (status, body) == (200, f"got {pieces * 2**20} bytes".encode())


async def test_engines_refusal_comes_back_with_its_sentence(ready: NNsightServe, ask: Ask) -> None:
    response = await ask(PATHS[1], "POST", body=b'{"refuse": 400}')
    assert response.code == 400
    assert said(response) == "the fake engine refuses this trace"


async def test_one_connection_serves_several_traces(
    ready: NNsightServe, raw: RawClient, jp_base_url: str, token: str
) -> None:
    async with raw:
        for size in (3, 4, 5):
            raw.head(
                "POST", jp_base_url + "nnsight/generate", ndif_api_key=token, Content_Length=size
            )
            raw.writer.write(b"z" * size)
            status, _, body = await raw.answer()
            assert (status, body) == (200, f"got {size} bytes".encode())


async def test_disconnected_caller_is_aborted_in_the_engine(
    ready: NNsightServe, raw: RawClient, jp_base_url: str, token: str, record: Record
) -> None:
    order = b'{"never": true}'
    async with raw:
        raw.head(
            "POST", jp_base_url + "nnsight/generate", ndif_api_key=token, Content_Length=len(order)
        )
        raw.writer.write(order)
        await wait_for(lambda: record("trace"))
        assert ready.admission.running == 1
    await wait_for(lambda: record("aborted"), 2)
    assert ready.admission.ids() == []


async def test_caller_who_leaves_while_sending_never_reaches_the_engine(
    ready: NNsightServe, raw: RawClient, jp_base_url: str, token: str, record: Record
) -> None:
    async with raw:
        raw.head("POST", jp_base_url + "nnsight/generate", ndif_api_key=token, Content_Length=10**8)
        raw.writer.write(b"begin")
        await wait_for(lambda: ready.admission.waiting == 1)
    await wait_for(lambda: not ready.admission.ids())
    assert record("headers") == []


class TestTimeout:
    """`trace_timeout`."""

    @pytest.fixture
    def serve_settings(self) -> dict[str, Any]:
        return {"trace_timeout": 0.3}

    async def test_answers_504_naming_it_and_stops_the_engines_work(
        self, ready: NNsightServe, ask: Ask, record: Record
    ) -> None:
        response = await ask(PATHS[1], "POST", body=b'{"never": true}')
        assert response.code == 504
        assert "trace_timeout (0.3 s)" in said(response)
        await wait_for(lambda: record("aborted"), 2)

    async def test_counts_to_the_first_byte_only(self, ready: NNsightServe, ask: Ask) -> None:
        response = await ask(PATHS[1], "POST", body=b'{"seconds": 0.05}')
        assert response.code == 200


async def test_dying_engine_is_told_at_once_to_whoever_waits(ready: NNsightServe, ask: Ask) -> None:
    waiting = [asyncio.ensure_future(ask(PATHS[1], "POST", body=b'{"never": true}')) for _ in "ab"]
    await wait_for(lambda: ready.admission.running == 2)
    killer = await ask(PATHS[1], "POST", body=b'{"die": 3}')
    async with asyncio.timeout(2):
        answers = [killer, *await asyncio.gather(*waiting)]
    for answer in answers:
        assert answer.code == 503
        assert "The engine died: the engine process ended with exit code 3" in said(answer)
        assert "It is restarting" in said(answer) and answer.headers["Retry-After"] == "10"
    await wait_state(ready, "ready")
    assert (await ask(PATHS[1], "POST", body=b"a block")).body == b"got 7 bytes"


async def test_engine_that_dies_in_the_middle_of_an_answer_breaks_the_connection(
    ready: NNsightServe, raw: RawClient, jp_base_url: str, token: str
) -> None:
    order = b'{"die_midway": true}'
    async with raw:
        raw.head(
            "POST", jp_base_url + "nnsight/generate", ndif_api_key=token, Content_Length=len(order)
        )
        raw.writer.write(order)
        with pytest.raises(asyncio.IncompleteReadError) as caught:
            await raw.answer()
    assert len(caught.value.partial) == 2**19
    await wait_state(ready, "starting")


async def test_engine_that_dies_while_a_body_is_sent_is_told_when_the_body_is_there(
    ready: NNsightServe, raw: RawClient, jp_base_url: str, token: str, ask: Ask
) -> None:
    async with raw:
        raw.head("POST", jp_base_url + "nnsight/generate", ndif_api_key=token, Content_Length=10)
        raw.writer.write(b"begin")
        await wait_for(lambda: ready.admission.waiting == 1)
        await ask(PATHS[1], "POST", body=b'{"die": -9}')
        raw.writer.write(b"ended")
        status, _, body = await raw.answer()
    assert status == 503
    assert b"was killed by SIGKILL" in body


async def test_log_has_one_line_a_trace(
    ready: NNsightServe, ask: Ask, token: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    response = await ask(PATHS[1], "POST", body=b'{"raise": true, "secret": "in the body"}')
    lines = [r for r in caplog.records if r.getMessage().startswith("trace ")]
    assert [line.levelname for line in lines] == ["INFO"]
    assert re.fullmatch(
        rf"trace {response.headers['Nnsight-Trace-Id']} user=owner outcome=error "
        r"seconds=\d+\.\d{3} prompt_tokens=7 generated_tokens=1 bytes_in=40 bytes_out=12",
        lines[0].getMessage(),
    )
    assert token not in caplog.text
    assert "in the body" not in caplog.text
