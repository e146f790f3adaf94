"""What a client without vLLM gets: the tree, the tokenizer, and answers in frames."""

from __future__ import annotations

import io
import json
import urllib.error
import urllib.request
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Server
from heard import Heard

PROMPT = "The Eiffel Tower is located in the city of"


def frames_of(answer: bytes) -> list[tuple[bytes, bytes]]:
    """The frames of a framed answer; nothing may be left over."""
    found = []
    while answer:
        length = int.from_bytes(answer[1:5], "little")
        found.append((answer[:1], answer[5 : 5 + length]))
        assert len(found[-1][1]) == length
        answer = answer[5 + length :]
    return found


def post(server: Server, body: bytes, **headers: str) -> bytes:
    request = urllib.request.Request(
        server.url + "/nnsight/generate",
        data=body,
        headers={
            "Authorization": f"Bearer {server.token}",
            "Accept": "application/vnd.nnsight-serve.frames",
            **headers,
        },
    )
    with urllib.request.urlopen(request) as answer:
        assert answer.headers["Content-Type"] == "application/vnd.nnsight-serve.frames"
        return bytes(answer.read())


def test_the_tree_is_the_models_and_its_id_is_stable(model: Any, smollm2: Server) -> None:
    code, told = smollm2.get("/nnsight/model")
    assert code == 200
    assert told["protocol"] == 1
    assert told["config"]["num_hidden_layers"] == 30
    layer = told["tree"]["children"]["model"]["children"]["layers"]["children"]["29"]
    assert layer["class"] == "LlamaDecoderLayer"
    assert set(layer["children"]) == {
        "self_attn",
        "mlp",
        "input_layernorm",
        "post_attention_layernorm",
    }

    def same(node: dict[str, Any], module: torch.nn.Module) -> None:
        if "same_as" in node:
            return
        assert node["class"] == type(module).__name__
        assert node["extra"] == module.extra_repr()
        assert list(node["children"]) == list(module._modules)
        for name, child in module._modules.items():
            assert child is not None
            same(node["children"][name], child)

    same(told["tree"], model._module)
    request = urllib.request.Request(
        smollm2.url + "/nnsight/model", headers={"Authorization": f"Bearer {smollm2.token}"}
    )
    with urllib.request.urlopen(request) as answer:
        etag = answer.headers["Etag"]
    assert "max_tokens" in told["config"]["sampling"]
    request.add_header("If-None-Match", etag)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request)
    assert caught.value.code == 304


def test_the_tokenizer_comes_as_files(model: Any, smollm2: Server, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    told = smollm2.get("/nnsight/model")[1]["tokenizer"]
    request = urllib.request.Request(
        smollm2.url + "/nnsight/model/tokenizer",
        headers={"Authorization": f"Bearer {smollm2.token}"},
    )
    with urllib.request.urlopen(request) as answer:
        archive = answer.read()
    assert len(archive) == told["bytes"]
    zipfile.ZipFile(io.BytesIO(archive)).extractall(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer(PROMPT).input_ids == model.tokenizer(PROMPT).input_ids


def test_a_framed_answer_tells_states_tokens_and_a_result(model: Any, smollm2: Server) -> None:
    heard = Heard(model, smollm2)
    with model.trace(
        PROMPT, temperature=0.0, max_tokens=12, ignore_eos=True, backend=heard
    ) as tracer:
        hidden = model.model.layers[3].output[0].save()
        result = tracer.result.save()
    found = frames_of(post(smollm2, heard.body, **{"Nnsight-Tokens": "1"}))
    kinds = b"".join(kind for kind, _ in found)
    assert kinds.startswith(b"S")
    assert kinds.endswith(b"RZ") or kinds.endswith(b"RRZ")
    pieces = [json.loads(payload) for kind, payload in found if kind == b"T"]
    assert "".join(piece["text"] for piece in pieces) == result.outputs[0].text
    ids = [token for piece in pieces for token in piece["token_ids"]]
    assert ids == list(result.outputs[0].token_ids)
    block = b"".join(payload for kind, payload in found if kind == b"R")
    length = int.from_bytes(block[8:16], "little")
    header = json.loads(block[16 : 16 + length])
    index = header["saves"]["hidden"]["tensor"]
    start = (16 + length + 63) // 64 * 64 + header["tensors"][index]["offset"]
    data = bytearray(block[start : start + header["tensors"][index]["nbytes"]])
    assert torch.equal(torch.frombuffer(data, dtype=torch.bfloat16).reshape(10, 576), hidden)
    record = header["saves"]["result"]
    assert record["record"] == "RequestOutput"
    assert header["generated_tokens"] == 12
    assert json.loads(found[-1][1])["outcome"] == "ok"
    line = next(line for line in reversed(smollm2.lines) if "outcome=" in line)
    assert "outcome=ok" in line
    assert "generated_tokens=12" in line


def test_a_trace_for_another_tree_is_refused_before_it_runs(model: Any, smollm2: Server) -> None:
    heard = Heard(model, smollm2)
    with model.trace(PROMPT, temperature=0.0, max_tokens=1, backend=heard):
        logits = model.logits.save()
    code, answer = smollm2.get(
        "/nnsight/generate", "POST", heard.body, **{"Nnsight-Tree": "0" * 64}
    )
    assert code == 409
    assert "The server serves" in answer["detail"]


def test_a_stock_client_of_another_model_is_refused(tiny_path: str, smollm2: Server) -> None:
    from conftest import stock_client

    other = stock_client(tiny_path)
    with (
        pytest.raises(ConnectionError, match=r"409: The server serves .*smollm2.*written for"),
        other.trace([5, 6, 7], max_tokens=1, **smollm2.where),
    ):
        logits = other.logits.save()
