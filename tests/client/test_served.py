"""The client against the real server and a real engine on the CPU, in an environment without vLLM."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from jupyter_nnsight_serve import connect
from jupyter_nnsight_serve.client import HubError

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "The Eiffel Tower is located in the city of"
GREEDY = {"temperature": 0.0}


def _running() -> Any:
    """`running` of the engine tests, whose module has the name of this folder's conftest."""
    spec = importlib.util.spec_from_file_location(
        "engine_conftest", ROOT / "tests" / "engine" / "conftest.py"
    )
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found.running


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    model = ROOT / ".models" / "smollm2-135m-instruct"
    if not model.is_dir():
        pytest.skip("make models")
    with _running()(str(model), tmp_path_factory.mktemp("served")) as server:
        yield server


@pytest.fixture
def hub(served: Any) -> Any:
    return connect(served.url, served.token)


@pytest.fixture
def model(hub: Any) -> Any:
    return hub.model


def test_there_is_no_vllm_here(model: Any) -> None:
    with pytest.raises(ImportError):
        import vllm  # noqa: F401


def test_the_promise(model: Any) -> None:
    with model.trace(PROMPT, max_tokens=5, **GREEDY) as tracer:
        hidden = model.model.layers[16].output[0].clone().save()
        result = tracer.result.save()
    assert hidden.dtype == torch.bfloat16 and hidden.device.type == "cpu"
    assert hidden.shape == (len(result.prompt_token_ids), 576)
    assert hidden.float().numpy().shape == hidden.shape
    assert result.outputs[0].text.startswith(" Paris") and result.finished
    assert model.tokenizer(PROMPT).input_ids == result.prompt_token_ids


def test_connecting_again_is_quick(served: Any) -> None:
    _ = connect(served.url, served.token).model
    began = time.monotonic()
    _ = connect(served.url, served.token).model
    assert time.monotonic() - began < 1


def test_what_is_printed_is_the_real_models_tree(model: Any) -> None:
    text = repr(model)
    assert text.startswith("LlamaForCausalLM(") and "30 x LlamaDecoderLayer(" in text
    assert "QKVParallelLinear(in_features=576" in text


def test_a_rendered_chat_prompt_and_its_ids_give_the_same_rows(model: Any) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    text = model.tokenizer.apply_chat_template(messages, tokenize=False)
    ids = model.tokenizer(text, add_special_tokens=False).input_ids
    rows = []
    for prompt in (text, ids, {"prompt_token_ids": ids}, model.tokenizer(text)):
        with model.trace(prompt, max_tokens=1, **GREEDY) as tracer:
            n = model.model.layers[0].output[0].shape[0].save()
            r = tracer.result.save()
        rows.append((n, list(r.prompt_token_ids)))
    assert rows[1:] == [(len(ids), ids)] * 3 and rows[0] == rows[1]


def test_invokes_iterations_stops_and_caches(model: Any) -> None:
    with model.trace(max_tokens=3, **GREEDY) as tracer:
        with tracer.invoke(PROMPT):
            plain = model.logits.save()
        with tracer.invoke(PROMPT):
            model.model.layers[5].output[0][:] = 0
            edited = model.logits.save()
    assert plain.shape == edited.shape and not torch.equal(plain, edited)
    with model.trace(PROMPT, max_tokens=3, ignore_eos=True, **GREEDY) as tracer:
        cache = tracer.cache(modules=[model.model.layers[3]])
        steps = [].save()
        for _ in tracer.iter[:3]:
            steps.append(model.logits.argmax(-1))
    assert len(steps) == 3 and len(cache["model.model.layers.3"].output) == 3
    assert cache.model.model.layers[3].output[0][0].shape[-1] == 576
    with model.trace(PROMPT, max_tokens=3, **GREEDY) as tracer:
        first = model.model.layers[0].output[0].clone().save()
        tracer.stop()
    assert first.shape[-1] == 576


def test_an_activation_of_one_trace_is_patched_into_another(model: Any) -> None:
    with model.trace(PROMPT, max_tokens=1, **GREEDY):
        donor = model.model.layers[8].output[0].clone().save()
        before = model.logits.save()
    with model.trace(PROMPT, max_tokens=1, **GREEDY):
        there = model.model.layers[8].output[0]
        there[-1] = donor[0].to(there.device, there.dtype)
        after = model.logits.save()
    assert not torch.equal(before, after)


def test_named_edits(hub: Any, model: Any) -> None:
    with hub.edit(name="silence") as (tracer, edit):
        seen = model.model.layers[5].output[0].norm().save()
        for _ in tracer.all():
            model.model.layers[10].output[0][:] = 0
    try:
        assert [e.name for e in hub.edits()] == ["silence"]
        plain = model.generate(PROMPT, max_tokens=5, edits=[], **GREEDY)[0]
        quiet = model.generate(PROMPT, max_tokens=5, edits=["silence"], **GREEDY)[0]
        assert plain.outputs[0].text != quiet.outputs[0].text
        assert isinstance(quiet.saves["seen"], torch.Tensor) and plain.saves == {}
    finally:
        edit.clear()
    assert not hub.edits()


def test_an_error_shows_the_lines_of_the_block_and_keeps_what_was_saved(
    model: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def helper(value: Any) -> Any:
        return value[:, 0, 0, 0]

    with pytest.raises(IndexError) as caught:
        with model.trace("Hello", max_tokens=1):
            kept = model.model.layers[2].output[0].clone().save()
            print("the block was here")
            wrong = helper(kept)
    entries = traceback.extract_tb(caught.value.__traceback__)
    assert {entry.filename for entry in entries} == {__file__}
    assert [entry.line for entry in entries[-2:]] == [
        "wrong = helper(kept)",
        "return value[:, 0, 0, 0]",
    ]
    assert kept.shape[-1] == 576 and "the block was here" in capsys.readouterr().out


def test_mistakes_are_named(model: Any, served: Any) -> None:
    # vLLM's own class of error, caught by what it derives from.
    with pytest.raises(ValueError, match="VLLMValidationError: .*maximum context length is 512"):
        with model.trace("hello " * 1000, max_tokens=1):
            x = model.logits.save()

    class OfMine(LookupError, BufferError):
        """A class of the notebook."""

    for kind in (LookupError, RuntimeError):
        with pytest.raises(kind, match="OfMine: layer 3") as caught:
            with model.trace("Hello", max_tokens=1):
                raise OfMine("layer 3")
        assert caught.value.bases == ("LookupError", "BufferError")
    with pytest.raises(ValueError, match="separate tracer.invoke"):
        with model.trace(["a", "b"], max_tokens=1):
            x = model.logits.save()
    with pytest.raises(HubError, match="token"):
        connect(served.url, "wrong")
    with pytest.raises(HubError, match="base URL"):
        connect(served.root, served.token)


def test_a_tree_that_is_not_the_served_one_is_refused(served: Any) -> None:
    model = connect(served.url, served.token).model
    model.tree_id = "0" * 64
    sentence = "The server serves .*smollm2-135m-instruct, this trace was written for .*-instruct"
    with pytest.raises(HubError, match=sentence) as caught:
        with model.trace("Hello", max_tokens=1):
            x = model.logits.save()
    assert caught.value.status == 409


def test_awaited_streamed_and_from_threads(model: Any) -> None:
    async def cell() -> Any:
        async with model.trace(PROMPT, max_tokens=4, **GREEDY) as tracer:
            awaited = tracer.result.save()
        with model.trace(PROMPT, max_tokens=4, stream=True, **GREEDY) as tracer:
            streamed = tracer.result.save()
        text = "".join([token.text async for token in tracer.backend])
        return awaited.outputs[0].text, streamed.outputs[0].text, text

    awaited, streamed, text = asyncio.run(cell())
    assert awaited == streamed == text

    def one(number: int) -> Any:
        with model.trace([number + 5, 7], max_tokens=1, **GREEDY) as tracer:
            r = tracer.result.save()
        return r.prompt_token_ids[0]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(one, range(16))) == [number + 5 for number in range(16)]


def test_an_interrupt_frees_the_engine(hub: Any, model: Any) -> None:
    import signal

    timer = threading.Timer(2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        with model.trace(PROMPT, max_tokens=480, ignore_eos=True):
            x = model.logits.save()
    assert time.monotonic() - began < 3.5
    end = time.monotonic() + 20
    while hub.status()["running"] and time.monotonic() < end:
        time.sleep(0.2)
    assert not hub.status()["running"]


def test_a_class_of_the_notebook_comes_back_as_itself(model: Any) -> None:
    kind = type("Made", (), {"__module__": "__main__", "where": "here"})
    with model.trace("Hello", max_tokens=1):
        made = kind()
        made.norm = model.model.layers[0].output[0].norm()
        made.save()
    assert isinstance(made, kind) and isinstance(made.norm, torch.Tensor)


def test_without_pickle_the_usual_saves_still_come(served: Any) -> None:
    model = connect(served.url, served.token, allow_pickle=False).model
    with model.trace(PROMPT, max_tokens=2, logprobs=1, **GREEDY) as tracer:
        hidden = model.model.layers[3].output[0].clone().save()
        result = tracer.result.save()
    assert hidden.shape[0] == len(result.prompt_token_ids)
    assert next(iter(result.outputs[0].logprobs[0].values())).logprob <= 0
    with model.trace(PROMPT, max_tokens=1, flat_logprobs=True, logprobs=2, **GREEDY) as tracer:
        cache = tracer.cache(include_inputs=True)
        top = model.logits.topk(3).save()
        array = model.logits.float().numpy().save()
        result = tracer.result.save()
    assert top.indices[0, 0] == array.argmax() == result.outputs[0].token_ids[0]
    assert len(result.outputs[0].logprobs[0]) == 2
    assert len(cache.keys()) > 300 and cache.model.model.layers[3].mlp.output.shape[-1] == 576
    assert "ParallelLMHead" in cache.model.logits_processor.inputs[0][0].why
    assert sys.modules["vllm"] is None


def test_parameters_have_their_shapes_here(model: Any) -> None:
    weight = model.model.layers[3].mlp.down_proj.weight
    assert weight.shape == (576, 1536) and weight.dtype == torch.bfloat16
    assert weight.device.type == "meta"


def test_a_module_of_the_notebook_that_is_edited_and_reloaded_runs_as_it_is_now(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import nnsight

    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "probe_of_mine.py"
    file.write_text("class Reading(dict):\n    pass\n\ndef read(h):\n    return Reading(n=1)\n")
    import probe_of_mine  # type: ignore[import-not-found]

    nnsight.register(probe_of_mine)
    found = []
    for number in (1, 22):
        file.write_text(file.read_text().replace("n=1", f"n={number}"))
        importlib.invalidate_caches()
        importlib.reload(probe_of_mine)
        with model.trace("Hello", max_tokens=1):
            reading = probe_of_mine.read(model.model.layers[0].output[0]).save()
        assert isinstance(reading, probe_of_mine.Reading)
        found.append(reading["n"])
    assert found == [1, 22]


OFFLINE = """
import sys
sys.modules["vllm"] = None
import torch
from jupyter_nnsight_serve import connect
assert not torch.cuda.is_available()
model = connect({url!r}, {token!r}).model
with model.trace("The Eiffel Tower is located in the city of", max_tokens=1, temperature=0) as tracer:
    result = tracer.result.save()
print(model.tokenizer.decode(result.outputs[0].token_ids))
"""


def test_a_kernel_without_gpu_vllm_and_model_hub(served: Any, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path / "nothing"),
    }
    program = OFFLINE.format(url=served.url, token=served.token)
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert done.stdout == " Paris\n", done.stderr


CELLS = {
    "connected": """
        import asyncio, sys
        sys.modules["vllm"] = None
        from concurrent.futures import ThreadPoolExecutor
        from jupyter_nnsight_serve import connect
        model = connect().model
        prompt = "The Eiffel Tower is located in the city of"
        """,
    "a plain cell": """
        with model.trace(prompt, max_tokens=1, temperature=0.0) as tracer:
            r = tracer.result.save()
        print(r.outputs[0].text)
        """,
    "awaited at the top": """
        async with model.trace(prompt, max_tokens=1, temperature=0.0) as tracer:
            r = tracer.result.save()
        print(r.outputs[0].text)
        """,
    "in a function that is awaited": """
        async def cell():
            async with model.trace(prompt, max_tokens=1, temperature=0.0) as tracer:
                r = tracer.result.save()
            return r.outputs[0].text

        print(await cell())
        """,
    "eight threads": """
        def one(number):
            with model.trace(prompt, max_tokens=1, temperature=0.0) as tracer:
                r = tracer.result.save()
            return r.outputs[0].text

        with ThreadPoolExecutor(8) as pool:
            print(*set(pool.map(one, range(8))), sep="")
        """,
    "timed": """
        %%time
        with model.trace(prompt, max_tokens=1, temperature=0.0) as tracer:
            r = tracer.result.save()
        print(r.outputs[0].text)
        """,
    "after nest_asyncio": """
        import nest_asyncio2
        nest_asyncio2.apply()
        with model.trace(prompt, max_tokens=1, temperature=0.0) as tracer:
            r = tracer.result.save()
        assert asyncio.get_running_loop().run_until_complete(cell()) == r.outputs[0].text
        print(r.outputs[0].text)
        """,
    "wrong": """
        def helper(hidden):
            return hidden[:, 0, 0, 0]

        with model.trace(prompt, max_tokens=1):
            wrong = helper(model.model.layers[2].output[0]).save()
        """,
}


def visible(outputs: list[Any], stream: str) -> str:
    """What stays of the text that a cell wrote to a stream."""
    text = "".join(
        o["text"] for o in outputs if o["output_type"] == "stream" and o["name"] == stream
    )
    lines = []
    for line in text.split("\n"):
        shown: list[str] = []
        for piece in line.split("\r"):
            shown[: len(piece)] = piece
        lines.append("".join(shown).rstrip())
    return "\n".join(lines)


def test_in_the_cells_of_a_kernel(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a loop runs already; with its progress line, which leaves nothing behind."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    monkeypatch.setenv("NNSIGHT_SERVE_URL", served.url)
    monkeypatch.setenv("NNSIGHT_SERVE_TOKEN", served.token)
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(textwrap.dedent(cell).strip()) for cell in CELLS.values()]
    )
    client = nbclient.NotebookClient(
        notebook, timeout=120, kernel_name="python3", allow_errors=True
    )
    client.execute()
    outputs = {name: cell.outputs for name, cell in zip(CELLS, notebook.cells, strict=True)}
    for name, found in outputs.items():
        errors = [output for output in found if output["output_type"] == "error"]
        assert bool(errors) == (name == "wrong"), errors
        # Where there are no widgets, tqdm says so when nnsight's own dependencies import it.
        if name != "connected":
            assert visible(found, "stderr") == "", found
        if name not in ("connected", "wrong"):
            first, *more = visible(found, "stdout").strip("\n").split("\n")
            assert first == " Paris" and (name == "timed") == bool(more), found
    shown = re.sub("\x1b\\[[0-9;]*m", "", "\n".join(outputs["wrong"][-1]["traceback"]))
    assert "ServedTraceError: IndexError: too many indices" in shown
    assert "return hidden[:, 0, 0, 0]" in shown and "site-packages" not in shown
    assert "jupyter_nnsight_serve" not in shown
