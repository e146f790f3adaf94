"""What traces served on SmolLM2-135M mean: against transformers, and against what people expect."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from conftest import Server

PROMPT = "The Eiffel Tower is located in the city of"


@pytest.fixture(scope="module")
def reference(smollm2_path: str) -> Any:
    """transformers' hidden states for PROMPT, the embedding first, and its last logits."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    model = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32)
    states: list[torch.Tensor] = []
    model.model.embed_tokens.register_forward_hook(lambda *call: states.append(call[2][0]))
    for layer in model.model.layers:
        layer.register_forward_hook(
            lambda *call: states.append(
                (call[2][0] if isinstance(call[2], tuple) else call[2])[-10:]
            )
        )
    with torch.no_grad():
        outputs = model(**tokenizer(PROMPT, return_tensors="pt"))
    return [state.reshape(10, 576) for state in states], outputs.logits[0, -1]


def relative(value: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of ``expected``."""
    return float((value.float() - expected).norm() / expected.norm())


def test_next_token_is_paris(model: Any, smollm2: Server, reference: Any) -> None:
    with model.trace(PROMPT, temperature=0.0, max_tokens=1, **smollm2.where) as tracer:
        logits = model.logits.save()
        result = tracer.result.save()
    assert logits.shape == (1, model.tokenizer.vocab_size)
    assert model.tokenizer.decode(logits.argmax(dim=-1)) == " Paris"
    assert result.outputs[0].text == " Paris"
    # Thirty bf16 layers against fp32: the logits carry the rounding of all of them.
    assert relative(logits[0], reference[1]) < 0.05


def test_hidden_states_agree_with_transformers(model: Any, smollm2: Server, reference: Any) -> None:
    with model.trace(PROMPT, temperature=0.0, max_tokens=1, **smollm2.where):
        first = model.model.layers[0].output
        low = (first[0] + first[1]).save()
        middle = model.model.layers[15].output
        mid = (middle[0] + middle[1]).save()
        last = model.model.layers[20].output
        high = (last[0] + last[1]).save()
    states = reference[0]
    for value, layer in ((low, 0), (mid, 15), (high, 20)):
        assert value.dtype == torch.bfloat16
        assert value.device.type == "cpu"
        assert value.shape == states[layer + 1].shape
        assert relative(value, states[layer + 1]) < 0.01


@pytest.mark.parametrize("layer", [0, 15, 29])
def test_a_bare_save_is_what_was_read(
    layer: int, model: Any, smollm2: Server, reference: Any
) -> None:
    with model.trace(PROMPT, temperature=0.0, max_tokens=1, **smollm2.where):
        output = model.model.layers[layer].output
        bare = output[0].save()
        residual = output[1].save()
        cloned = output[0].clone().save()
    assert torch.equal(bare, cloned)
    # bf16 against fp32: what thirty layers round adds up.
    tolerance = 0.01 if layer < 20 else 0.05
    assert relative(bare.float() + residual.float(), reference[0][layer + 1]) < tolerance


def test_reads_kept_over_steps_are_each_step_own(model: Any, smollm2: Server) -> None:
    with model.trace(PROMPT, temperature=0.0, max_tokens=4, ignore_eos=True, **smollm2.where) as t:
        bare, cloned = [].save(), [].save()
        for _ in t.iter[:4]:
            output = model.model.layers[10].output[0]
            bare.append(output)
            cloned.append(output.clone())
    assert [value.shape[0] for value in bare] == [10, 1, 1, 1]
    assert all(torch.equal(a, b) for a, b in zip(bare, cloned, strict=True))


def test_in_place_and_assigned_edits_change_the_run_alike(model: Any, smollm2: Server) -> None:
    def logits(how: str) -> torch.Tensor:
        with model.trace(PROMPT, temperature=0.0, max_tokens=1, **smollm2.where):
            if how == "in place":
                model.model.layers[5].output[0][:] = 0
            if how == "assigned":
                output = model.model.layers[5].output
                model.model.layers[5].output = (torch.zeros_like(output[0]), output[1])
            value = model.logits.save()
        return value

    plain, in_place, assigned = logits(""), logits("in place"), logits("assigned")
    assert not torch.equal(plain, in_place)
    assert torch.equal(in_place, assigned)


def test_several_invokes_come_home_each(model: Any, smollm2: Server) -> None:
    with model.trace(temperature=0.0, max_tokens=1, **smollm2.where) as tracer:
        with tracer.invoke(PROMPT):
            one = model.logits.save()
            both = model.logits.save()
        with tracer.invoke("The capital of Japan is"):
            two = model.logits.save()
            both = model.logits.save()
    assert isinstance(both, list)
    assert torch.equal(both[0], one)
    assert torch.equal(both[1], two)
    assert model.tokenizer.decode(two.argmax(dim=-1)) == " Tokyo"


def test_steering_changes_the_text(model: Any, smollm2: Server) -> None:
    def text(direction: torch.Tensor | None) -> str:
        with model.trace(PROMPT, temperature=0.0, max_tokens=8, **smollm2.where) as tracer:
            if direction is not None:
                hidden = model.model.layers[12].output[0]
                hidden[:] += direction.to(hidden.device, hidden.dtype)
            result = tracer.result.save()
        return str(result.outputs[0].text)

    with model.trace(temperature=0.0, max_tokens=1, **smollm2.where) as tracer:
        with tracer.invoke("Rome Italy Rome"):
            there = sum(model.model.layers[12].output)[-1].save()
        with tracer.invoke("Paris France Paris"):
            here = sum(model.model.layers[12].output)[-1].save()
    assert text(None).startswith(" Paris")
    assert text(4 * (there - here)) != text(None)


def test_an_error_in_a_block_is_the_callers_and_the_engine_serves_on(
    model: Any, smollm2: Server
) -> None:
    with (
        pytest.raises(RuntimeError) as caught,
        model.trace(PROMPT, temperature=0.0, max_tokens=1, **smollm2.where),
    ):
        hidden = model.model.layers[3].output[0]
        hidden[:, -1, :]
    text = str(caught.value)
    assert text.startswith("IndexError: too many indices for tensor of dimension 2")
    assert "hidden[:, -1, :]" in text
    assert "test_meaning.py" in text
    assert "site-packages" not in text
    assert "engine/" not in text.replace("tests/engine/", "")
    test_next_token_after_error(model, smollm2)


def test_next_token_after_error(model: Any, smollm2: Server) -> None:
    with model.trace(PROMPT, temperature=0.0, max_tokens=1, **smollm2.where):
        logits = model.logits.save()
    assert model.tokenizer.decode(logits.argmax(dim=-1)) == " Paris"


def test_edits_run_for_every_trace_until_cleared(model: Any, smollm2: Server) -> None:
    def logits(**more: Any) -> torch.Tensor:
        with model.trace(PROMPT, temperature=0.0, max_tokens=1, **more, **smollm2.where):
            value = model.logits.save()
        return value

    plain = logits()
    with model.edit(**smollm2.where) as (_, edit):
        model.model.layers[5].output[0][:] = 0
    try:
        edited = logits()
        assert not torch.equal(plain, edited)
        listed = smollm2.get("/nnsight/register")[1]["edits"]
        assert [item["id"] for item in listed] == [edit.id]
    finally:
        edit.clear()
    assert torch.equal(logits(), plain)
    assert smollm2.get("/nnsight/register")[1]["edits"] == []


def test_a_named_edit_runs_where_it_is_asked_for(model: Any, smollm2: Server) -> None:
    with model.edit(name="probe", **smollm2.where) as (_, edit):
        score = model.model.layers[16].output[0][-1].norm().save()
    try:
        with model.trace(
            PROMPT, temperature=0.0, max_tokens=1, edits=["probe"], **smollm2.where
        ) as tracer:
            result = tracer.result.save()
        assert result.saves["score"].ndim == 0
        with model.trace(
            PROMPT, temperature=0.0, max_tokens=1, edits=[], **smollm2.where
        ) as tracer:
            bare = tracer.result.save()
        assert "score" not in getattr(bare, "saves", {})
        with (
            pytest.raises(RuntimeError, match="no edit is installed under that name"),
            model.trace(PROMPT, max_tokens=1, edits=["prob"], **smollm2.where),
        ):
            model.logits.save()
    finally:
        edit.clear()


def test_a_caller_who_leaves_frees_the_request(model: Any, smollm2: Server) -> None:
    import http.client
    from urllib.parse import urlsplit

    from nnsight.modeling.vllm.serve.backend import LocalServeBackend

    bodies: list[bytes] = []

    class Keep(LocalServeBackend):
        def _send(self, blob: bytes) -> dict[str, Any]:
            bodies.append(blob)
            return {}

    backend = Keep(model, smollm2.url)
    with model.trace(PROMPT, max_tokens=480, ignore_eos=True, backend=backend) as tracer:
        for _ in tracer.all():
            model.model.layers[3].output[0].save()
    address = urlsplit(smollm2.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port or 0)
    connection.request(
        "POST", address.path + "/v1/nnsight/generate", bodies[0], {"ndif-api-key": smollm2.token}
    )
    deadline = time.monotonic() + 10
    while smollm2.status()["requests"]["tracked"] != 1:
        assert time.monotonic() < deadline
    connection.close()
    left = time.monotonic()
    while smollm2.status()["requests"]["tracked"] != 0:
        assert time.monotonic() < left + 2
    assert smollm2.status()["running"] == 0


def test_jupyter_answers_while_traces_run(model: Any, smollm2: Server) -> None:
    seconds: list[float] = []
    done = threading.Event()

    def probe() -> None:
        while not done.is_set():
            begin = time.monotonic()
            smollm2.get("/api/status")
            seconds.append(time.monotonic() - begin)
            time.sleep(0.01)

    thread = threading.Thread(target=probe)
    thread.start()
    try:
        for _ in range(5):
            with model.trace(PROMPT, temperature=0.0, max_tokens=4, **smollm2.where) as tracer:
                states = tracer.cache()
            assert len(states["model.model.layers.3"].output) == 4  # one for each step
    finally:
        done.set()
        thread.join()
    # One answer in many may wait for the machine itself.
    assert sorted(seconds)[-2] < 0.5
