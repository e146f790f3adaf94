"""What an operator's settings do to a trace: sizes, prefix caching, chunked prefill."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import nnsight
import pytest
import torch
from conftest import ENGINE_ARGS, Server, running, stock_client
from heard import Heard

LONG = [5 + index % 400 for index in range(1500)]
MODERATE = LONG[:300]
ONE = {"temperature": 0.0, "max_tokens": 1}


@pytest.fixture(scope="module")
def server(tiny_path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    settings = {
        "max_response_bytes": 300_000,
        "max_request_bytes": 400_000,
        "engine_args": {
            **ENGINE_ARGS,
            "max_model_len": 2048,
            "enable_prefix_caching": True,
            "enable_chunked_prefill": True,
            "max_num_batched_tokens": 512,
        },
    }
    with running(tiny_path, tmp_path_factory.mktemp("limits"), settings) as one:
        yield one


@pytest.fixture(scope="module")
def tiny(tiny_path: str) -> Any:
    return stock_client(tiny_path)


def test_status_shows_the_effective_settings(server: Server) -> None:
    settings = server.status()["settings"]
    assert settings["enable_prefix_caching"] is True
    assert settings["enable_chunked_prefill"] is True
    assert settings["max_num_batched_tokens"] == 512
    assert settings["max_model_len"] == 2048


def test_a_repeated_prompt_comes_back_whole(tiny: Any, server: Server) -> None:
    seen = []
    for _ in range(3):
        with tiny.trace(MODERATE, **ONE, **server.where):
            hidden = tiny.model.layers[4].output[0].save()
        seen.append(hidden)
    assert [value.shape for value in seen] == [(300, 64)] * 3
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])


def test_an_edit_sees_whole_prompts_and_its_owner_is_warned(tiny: Any, server: Server) -> None:
    with tiny.edit(name="rows", **server.where) as (_, edit):
        rows = nnsight.save(int(tiny.model.layers[4].output[0].shape[0]))
    try:
        for _ in range(2):
            with tiny.trace(MODERATE, **ONE, edits=["rows"], **server.where) as tracer:
                result = tracer.result.save()
            assert result.saves["rows"] == 300
    finally:
        edit.clear()
    bodies: list[bytes] = []
    from nnsight.modeling.vllm.registration import ServeRegistration

    class Keep(ServeRegistration):
        def install(self, payload: bytes) -> None:
            bodies.append(payload)

    tracer = tiny.edit(name="rows", **server.where)
    tracer._handle = lambda: Keep(tiny, "kept", server.url)
    with tracer:
        rows = nnsight.save(int(tiny.model.layers[4].output[0].shape[0]))
    code, answer = server.get("/nnsight/register/kept?name=rows", "POST", bodies[0])
    assert code == 200
    assert "prefix caching" in answer["warnings"][0]
    assert server.get("/nnsight/register/kept", "DELETE")[0] == 200


def test_a_chunked_prompt_is_an_error_and_never_a_slice(tiny: Any, server: Server) -> None:
    with (
        pytest.raises(RuntimeError, match=r"1500-token prompt was split across steps") as caught,
        tiny.trace(LONG, **ONE, **server.where),
    ):
        hidden = tiny.model.layers[4].output[0].save()
    assert "chunked prefill" in str(caught.value)


def test_saves_over_the_limit_are_refused_with_the_largest(tiny: Any, server: Server) -> None:
    with (
        pytest.raises(RuntimeError, match="SaveTooLargeError") as caught,
        tiny.trace(MODERATE, **ONE, **server.where),
    ):
        everything = [tiny.model.layers[layer].output[0] for layer in range(32)].save()
        little = tiny.logits.save()
    text = str(caught.value)
    assert "max_response_bytes" in text
    assert "300000" in text
    assert f"everything ({32 * 300 * 64 * 2} bytes), little (1024 bytes)" in text
    with (
        pytest.raises(RuntimeError, match=r"SaveTooLargeError.*states \("),
        tiny.trace(MODERATE, **ONE, **server.where) as tracer,
    ):
        states = tracer.cache()


@pytest.mark.parametrize("kind", ["array", "bytes", "text", "numbers"])
def test_whatever_is_large_is_refused(kind: str, tiny: Any, server: Server) -> None:
    with (
        pytest.raises(RuntimeError, match="SaveTooLargeError"),
        tiny.trace(MODERATE, **ONE, **server.where),
    ):
        import numpy as np

        large = nnsight.save(
            {
                "array": np.zeros(300_000),
                "bytes": b"x" * 2_000_000,
                "text": "x" * 2_000_000,
                "numbers": list(range(600_000)),
            }[kind]
        )
        little = tiny.logits.save()


def test_a_sparse_tensor_counts_what_it_stores(tiny: Any, server: Server) -> None:
    with tiny.trace(MODERATE, **ONE, **server.where):
        sparse = torch.sparse_coo_tensor([[1], [2]], [3.0], (100_000, 100_000)).save()
    assert sparse.shape == (100_000, 100_000)
    assert float(sparse.coalesce().values()[0]) == 3.0


def test_invokes_that_are_too_large_together_are_refused(tiny: Any, server: Server) -> None:
    with (
        pytest.raises(RuntimeError, match="SaveTooLargeError"),
        tiny.trace(**ONE, **server.where) as tracer,
    ):
        for _ in range(3):
            with tracer.invoke(MODERATE):
                states = [tiny.model.layers[layer].output[0] for layer in range(4)].save()


def test_a_slice_carries_the_slice(tiny: Any, server: Server) -> None:
    heard = Heard(tiny, server)
    with tiny.trace(MODERATE, **ONE, backend=heard):
        row = tiny.model.layers[4].output[0][-1].save()
    assert row.shape == (64,)
    assert row.untyped_storage().nbytes() == 128


def test_a_body_over_the_limit_is_refused_with_both_sizes(tiny: Any, server: Server) -> None:
    weights = torch.zeros(200_000)
    with (
        pytest.raises(ConnectionError, match=r"413.*max_request_bytes") as caught,
        tiny.trace(MODERATE, **ONE, **server.where),
    ):
        total = (weights.sum() + tiny.logits.sum()).save()
    assert "400000" in str(caught.value).replace(",", "")


def test_a_small_body_that_unpacks_to_a_large_one_is_refused(server: Server) -> None:
    import zstandard

    body = zstandard.ZstdCompressor().compress(bytes(50_000_000))
    assert len(body) < 10_000
    code, answer = server.get("/nnsight/generate", "POST", body, **{"nnsight-compress": "True"})
    assert code == 413
    assert "once decompressed" in answer["detail"]


def test_metrics_count_and_name_nobody(tiny: Any, server: Server) -> None:
    with tiny.trace(MODERATE, **ONE, **server.where):
        logits = tiny.logits.save()
    request = urllib.request.Request(
        server.url + "/metrics", headers={"Authorization": f"Bearer {server.token}"}
    )
    with urllib.request.urlopen(request) as answer:
        text = answer.read().decode()
    assert 'nnsight_serve_traces_total{outcome="ok"}' in text
    assert "owner" not in "".join(line for line in text.splitlines() if "nnsight" in line)


def test_one_line_is_logged_for_each_trace(tiny: Any, server: Server) -> None:
    before = len(server.lines)
    with tiny.trace(MODERATE, temperature=0.0, max_tokens=2, ignore_eos=True, **server.where):
        logits = tiny.logits.save()
    time.sleep(0.5)
    lines = [line for line in server.lines[before:] if "trace " in line and "outcome=" in line]
    assert len(lines) == 1
    assert "outcome=ok" in lines[0]
    assert "prompt_tokens=300" in lines[0]
    assert "generated_tokens=2" in lines[0]
    assert server.token not in "\n".join(server.lines)
