"""What people who do this work ran into, each with its right outcome."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import textwrap
import threading
import warnings
from pathlib import Path
from typing import Any

import cloudpickle
import nnsight
import pytest
import torch
from conftest import Server
from heard import Heard

PROMPT = "The Eiffel Tower is located in the city"  # 9 tokens
ONE = {"temperature": 0.0, "max_tokens": 1}


def test_shapes_have_no_batch_axis_and_a_third_index_is_an_error_at_its_line(
    model: Any, smollm2: Server
) -> None:
    with model.trace(PROMPT, **ONE, **smollm2.where):
        hidden = model.model.layers[3].output[0]
        shape = nnsight.save(tuple(hidden.shape))
        last = hidden[-1].save()
        logits_shape = nnsight.save(tuple(model.logits.shape))
    tokens = len(model.tokenizer(PROMPT).input_ids)
    assert shape == (tokens, 576)
    assert last.shape == (576,)
    assert logits_shape == (1, 49152)
    with (
        pytest.raises(
            RuntimeError, match=r"^IndexError: too many indices.*\n(.*\n)*.*\[:, -1, :\]"
        ),
        model.trace(PROMPT, **ONE, **smollm2.where),
    ):
        model.model.layers[3].output[0][:, -1, :]


def test_logits_of_every_position_by_the_documented_recipe(model: Any, smollm2: Server) -> None:
    with model.trace(PROMPT, **ONE, **smollm2.where):
        normed = model.model.norm.output[0]
        every = model.logits_processor(model.lm_head._module, normed).save()
        last = model.logits.save()
    assert every.shape == (len(model.tokenizer(PROMPT).input_ids), 49152)
    assert torch.allclose(every[-1].float(), last[0].float(), rtol=0.02, atol=0.05)


def test_saves_keep_their_dtype_and_come_to_the_cpu(model: Any, smollm2: Server) -> None:
    with model.trace(PROMPT, **ONE, **smollm2.where):
        hidden = model.model.layers[3].output[0].save()
    assert hidden.dtype == torch.bfloat16
    assert hidden.device.type == "cpu"
    assert hidden.float().numpy().shape == hidden.shape
    with pytest.raises(TypeError, match="BFloat16"):
        hidden.numpy()


def test_an_activation_of_one_trace_patches_another(model: Any, smollm2: Server) -> None:
    def logits(donor: torch.Tensor | None) -> torch.Tensor:
        with model.trace("The Colosseum is located in the city of", **ONE, **smollm2.where):
            if donor is not None:
                target = model.model.layers[10].output[0]
                target[-1] = donor[-1].to(target.device, target.dtype)
            value = model.logits.save()
        return value

    with model.trace(PROMPT, **ONE, **smollm2.where):
        donor = model.model.layers[10].output[0].save()
    assert not torch.equal(logits(donor), logits(None))


def test_token_ids_pass_untouched_and_strings_are_tokenized_once(
    model: Any, smollm2: Server
) -> None:
    text = model.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], tokenize=False, add_generation_prompt=True
    )
    ids = model.tokenizer(text).input_ids
    got = []
    for prompt in (text, ids, model.tokenizer(text, return_tensors="pt")):
        with model.trace(prompt, **ONE, **smollm2.where) as tracer:
            rows = nnsight.save(int(model.model.layers[0].output[0].shape[0]))
            result = tracer.result.save()
        got.append((rows, list(result.prompt_token_ids)))
    assert got == [(len(ids), ids)] * 3


def test_a_prompt_that_is_too_long_is_one_callers_error(model: Any, smollm2: Server) -> None:
    texts: list[str] = []

    def other() -> None:
        with model.trace(
            PROMPT, temperature=0.0, max_tokens=60, ignore_eos=True, **smollm2.where
        ) as tracer:
            result = tracer.result.save()
        texts.append(result.outputs[0].text)

    thread = threading.Thread(target=other)
    thread.start()
    with (
        pytest.raises(RuntimeError, match=r"(?s)ValidationError|ValueError") as caught,
        model.trace(list(range(600)), **ONE, **smollm2.where),
    ):
        model.logits.save()
    assert "512" in str(caught.value)
    assert "600" in str(caught.value)
    thread.join()
    assert len(texts) == 1


def test_a_loop_that_ends_early_says_so(model: Any, smollm2: Server) -> None:
    heard = Heard(model, smollm2)
    with model.trace(
        "One, two, three, four",
        temperature=0.0,
        max_tokens=20,
        stop=[","],
        backend=heard,
    ) as tracer:
        steps = [].save()
        for _ in tracer.iter[:20]:
            steps.append(model.logits.argmax(-1))
        never = tracer.result.save()
    assert 0 < len(steps) < 20
    assert "never" not in heard.response["saves"]
    assert "the loop asked for a step the run did not make" in heard.words

    with model.trace(
        "One, two, three, four",
        temperature=0.0,
        max_tokens=20,
        ignore_eos=True,
        **smollm2.where,
    ) as tracer:
        steps = [].save()
        for _ in tracer.iter[:20]:
            steps.append(model.logits.argmax(-1))
        result = tracer.result.save()
    assert len(steps) == 20
    assert [int(step) for step in steps] == list(result.outputs[0].token_ids)


def test_steering_in_a_loop_reaches_every_step_and_outside_the_first(
    model: Any, smollm2: Server
) -> None:
    def steered(everywhere: bool) -> list[bool]:
        with model.trace(
            PROMPT, temperature=0.0, max_tokens=4, ignore_eos=True, **smollm2.where
        ) as tracer:
            before, after = [].save(), [].save()
            for step in tracer.iter[:4]:
                hidden = model.model.layers[5].output[0]
                before.append(hidden.clone())
                if everywhere or step == 0:
                    hidden[:] += 1
                after.append(model.model.layers[5].output[0])
        return [torch.equal(b, a + 1) for a, b in zip(before, after, strict=True)]

    assert steered(True) == [True] * 4
    assert steered(False) == [True, False, False, False]


def test_a_list_of_strings_is_refused_and_a_list_of_ids_is_one_prompt(
    model: Any, smollm2: Server
) -> None:
    with (
        pytest.raises(RuntimeError, match=r"Use a separate tracer\.invoke"),
        model.trace(["a", "b"], **ONE, **smollm2.where),
    ):
        model.logits.save()
    with model.trace([5, 6, 7], **ONE, **smollm2.where):
        rows = nnsight.save(int(model.model.layers[0].output[0].shape[0]))
    assert rows == 3


def test_a_save_without_a_name_is_warned_about(model: Any, smollm2: Server) -> None:
    heard = Heard(model, smollm2)
    with model.trace(PROMPT, **ONE, backend=heard):
        count = nnsight.save(int(model.model.layers[0].output[0].shape[0]))
        model.logits.save()
        rows, width = model.logits.shape.save()  # noqa: RUF059
    assert count == len(model.tokenizer(PROMPT).input_ids)
    assert set(heard.response["saves"]) == {"count"}
    assert "`model.logits.save()` has no name" in heard.words
    assert "saves the whole and names its parts" in heard.words


@pytest.mark.parametrize("wrong", ["order", "never"])
def test_a_location_that_is_not_reached_is_an_error_that_names_it(
    wrong: str, model: Any, smollm2: Server
) -> None:
    with (
        pytest.raises(RuntimeError, match="OutOfOrderError") as caught,
        model.trace(PROMPT, **ONE, **smollm2.where),
    ):
        if wrong == "order":
            model.model.layers[5].output[0].clone()
            model.model.layers[2].output[0].clone()
        else:
            model.lm_head.output.clone()
    assert ("layers.2" if wrong == "order" else "lm_head") in str(caught.value)
    assert smollm2.status()["requests"]["tracked"] == 0


def test_patching_across_invokes_points_to_two_traces(model: Any, smollm2: Server) -> None:
    with (
        pytest.raises(RuntimeError, match=r"(?s)NameError.*Use two traces"),
        model.trace(**ONE, **smollm2.where) as tracer,
    ):
        with tracer.invoke(PROMPT):
            donor = model.model.layers[5].output[0]
        with tracer.invoke(PROMPT):
            model.model.layers[5].output[0][:] = donor
    with (
        pytest.raises(RuntimeError, match="barrier"),
        model.trace(**ONE, **smollm2.where) as tracer,
    ):
        barrier = tracer.barrier(2)
        with tracer.invoke(PROMPT):
            barrier()


@pytest.mark.parametrize(
    ("option", "value"), [("scan", True), ("validate", True), ("max_new_token", 5)]
)
def test_an_option_that_does_not_exist_is_named(
    option: str, value: Any, model: Any, smollm2: Server
) -> None:
    with (
        pytest.raises(RuntimeError, match=f"TypeError.*{option}"),
        model.trace(PROMPT, **{option: value}, **smollm2.where),
    ):
        model.logits.save()


@pytest.mark.parametrize("how", ["assign", "input", "skip", "tuple", "nothing"])
def test_a_replacement_that_does_not_fit_ends_its_own_trace_only(
    how: str, model: Any, smollm2: Server
) -> None:
    others: list[str] = []

    def other() -> None:
        with model.trace(
            PROMPT, temperature=0.0, max_tokens=40, ignore_eos=True, **smollm2.where
        ) as tracer:
            result = tracer.result.save()
        others.append(result.outputs[0].text)

    threads = [threading.Thread(target=other) for _ in range(2)]
    for thread in threads:
        thread.start()
    with (
        pytest.raises(
            RuntimeError, match=r"(ValueError|TypeError): .*the value assigned"
        ) as caught,
        model.trace(PROMPT, **ONE, **smollm2.where),
    ):
        layer = model.model.layers[3]
        if how == "assign":
            out = layer.output
            layer.output = (out[0][:-1], out[1])
        elif how == "input":
            layer.mlp.input = layer.mlp.input[:1]
        elif how == "skip":
            layer.mlp.skip(torch.zeros(1, 576))
        elif how == "tuple":
            layer.output = layer.output[0]
        else:
            layer.mlp.output = None
    assert "test_cases.py" in str(caught.value)
    for thread in threads:
        thread.join()
    assert len(others) == 2
    assert others[0] == others[1]


def test_skipping_in_one_of_two_requests_is_that_requests_own(model: Any, smollm2: Server) -> None:
    with model.trace(**ONE, **smollm2.where) as tracer:
        with tracer.invoke(PROMPT):
            model.model.layers[3].mlp.skip(torch.zeros(9, 576))
            skipped = model.logits.save()
        with tracer.invoke(PROMPT):
            whole = model.logits.save()
    with model.trace(PROMPT, **ONE, **smollm2.where):
        model.model.layers[3].mlp.output = torch.zeros(9, 576)
        assigned = model.logits.save()
    assert not torch.allclose(skipped.float(), whole.float(), atol=0.5)
    assert torch.allclose(skipped.float(), assigned.float(), atol=0.3)


def test_a_helper_of_the_callers_own_module_runs_once_registered(
    model: Any, smollm2: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text("def twice(x):\n    return x * 2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import only_here  # type: ignore[import-not-found]

    def run() -> Any:
        with model.trace(PROMPT, **ONE, **smollm2.where):
            doubled = only_here.twice(model.logits).save()
            plain = model.logits.save()
        return doubled, plain

    with pytest.raises(RuntimeError, match=r"'only_here'.*nnsight\.register\(only_here\)"):
        run()
    nnsight.register(only_here)
    try:
        doubled, plain = run()
    finally:
        cloudpickle.unregister_pickle_by_value(only_here)
        sys.modules.pop("only_here")
    assert torch.equal(doubled, plain * 2)


def test_what_the_block_does_not_use_does_not_matter(model: Any, smollm2: Server) -> None:
    lock, file, generator = threading.Lock(), open(__file__), iter([1])  # noqa: SIM115
    with model.trace(PROMPT, **ONE, **smollm2.where):
        logits = model.logits.save()
    assert logits.shape == (1, 49152)
    file.close()
    del lock, generator


def test_a_dataframe_travels_when_the_block_uses_it_and_else_not(
    model: Any, smollm2: Server
) -> None:
    import pandas

    prompts = pandas.DataFrame({"text": [PROMPT, "One two three"], "scale": [2.0, 3.0]})
    large = pandas.DataFrame({"numbers": range(1_000_000)})
    unused = Heard(model, smollm2)
    with model.trace(PROMPT, **ONE, backend=unused):
        plain = model.logits.save()
    assert len(large) == 1_000_000 and len(unused.body) < 100_000

    used = Heard(model, smollm2)
    with model.trace(max_tokens=1, temperature=0.0, backend=used) as tracer:
        with tracer.invoke(prompts.iloc[0].text):
            scaled = (model.logits * prompts.iloc[0].scale).save()
    assert torch.equal(scaled, plain * 2)
    assert len(unused.body) < len(used.body) < len(unused.body) + 20_000


TRACE = """
with model.trace(prompt, **one, **where):
    logits = model.logits.save()
print(word(logits))
"""

CELLS = {
    "plain": TRACE,
    "timed": "%%time" + TRACE,
    "a VS Code cell": "#%% a title" + TRACE,
    "awaited": "import asyncio\nawait asyncio.sleep(0)" + TRACE + "await asyncio.sleep(0)",
    "in an async def": "async def run():"
    + textwrap.indent(TRACE, "    ")
    + "    await asyncio.sleep(0)\nawait run()",
    "executed text": f"exec({TRACE!r})",
    "a function of executed text": "space = dict(globals())\n"
    f"exec('def run():' + {textwrap.indent(TRACE, '    ')!r}, space)\nspace['run']()",
    "after both": TRACE,
}


def test_the_stock_client_in_the_cells_of_a_kernel(smollm2: Server, smollm2_path: str) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    setup = f"""
        import torch
        torch.accelerator.empty_cache = torch.accelerator.synchronize = lambda *a, **k: None
        from nnsight.modeling.vllm import VLLM
        model = VLLM({smollm2_path!r}, max_model_len=512)
        where, one, prompt = {smollm2.where!r}, {ONE!r}, {PROMPT + " of"!r}
        word = lambda logits: model.tokenizer.decode(logits.argmax())
    """
    cells = {"setup": textwrap.dedent(setup), **CELLS}
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(cell.strip()) for cell in cells.values()]
    )
    nbclient.NotebookClient(
        notebook, timeout=240, kernel_name="python3", allow_errors=True
    ).execute()
    outputs = {
        name: "".join(
            str(output.get("text") or f"{output.get('ename')}: {output.get('evalue')}")
            for output in cell.outputs
            if output.get("name") != "stderr"
        )
        for name, cell in zip(cells, notebook.cells, strict=True)
    }
    del outputs["setup"]
    # IPython keeps no source of a cell under %%time either; this package's own client lends it one.
    for name in ("executed text", "a function of executed text", "timed"):
        assert "WithBlockNotFoundError: " in outputs.pop(name), name
    for name, text in outputs.items():
        assert text.splitlines()[0] == " Paris", (name, text)


@dataclasses.dataclass
class Reading:
    """A class as a notebook cell defines one."""

    layer: int
    hidden: Any


def test_an_instance_of_a_notebook_class_comes_back_as_one(model: Any, smollm2: Server) -> None:
    space: dict[str, Any] = {"dataclasses": dataclasses, "__name__": "__main__"}
    exec("@dataclasses.dataclass\nclass Cell:\n    layer: int\n    hidden: object\n", space)
    Cell = space["Cell"]
    with model.trace(PROMPT, **ONE, **smollm2.where):
        reading = nnsight.save(Cell(3, model.model.layers[3].output[0]))
    assert isinstance(reading, Cell)
    assert reading.hidden.shape == (9, 576)


def test_a_probe_captured_in_the_block_scores_as_it_does_here(model: Any, smollm2: Server) -> None:
    torch.manual_seed(0)
    probe = torch.nn.Linear(576, 1)
    with model.trace(PROMPT, **ONE, **smollm2.where):
        hidden = model.model.layers[8].output[0].save()
        score = probe.to(hidden.device)(hidden.float()).save()
    assert torch.allclose(score, probe(hidden.float()), atol=1e-5)
    assert probe.weight.requires_grad
    assert next(probe.parameters()).device.type == "cpu"


def test_prints_and_warnings_reach_their_caller_and_no_other(model: Any, smollm2: Server) -> None:
    heard = [Heard(model, smollm2) for _ in range(6)]

    def run(index: int) -> None:
        with model.trace(
            PROMPT, temperature=0.0, max_tokens=6, ignore_eos=True, backend=heard[index]
        ) as tracer:
            for step in tracer.iter[:6]:
                print("caller", index, "step", step, tuple(model.model.layers[2].output[0].shape))
            warnings.warn(f"warned {index}", stacklevel=1)
            shape = nnsight.save(index)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, one in enumerate(heard):
        lines = [line for line in one.words.splitlines() if line.startswith("caller")]
        assert lines == [
            f"caller {index} step {step} ({9 if step == 0 else 1}, 576)" for step in range(6)
        ]
        assert f"UserWarning: warned {index}" in one.words
        assert one.response["saves"]["shape"] == index
        assert not any(f"warned {other}" in one.words for other in range(6) if other != index)
    assert not any("caller 3 step" in line for line in smollm2.lines)


def test_what_an_erring_block_saved_is_in_the_response(model: Any, smollm2: Server) -> None:
    heard = Heard(model, smollm2)
    with (
        pytest.raises(RuntimeError, match="ZeroDivisionError") as caught,
        model.trace(PROMPT, **ONE, backend=heard),
    ):
        print("so far so good")
        kept = model.model.layers[3].output[0].save()
        1 / 0  # noqa: B018
    assert heard.response["saves"]["kept"].shape == (9, 576)
    assert "so far so good" in str(caught.value)


def test_requests_with_one_file_name_and_other_source_keep_their_own_lines(
    model: Any, smollm2: Server
) -> None:
    """Two notebooks whose cells share a file name, at the same time."""
    import linecache

    def fail(word: str, caught: list[str]) -> None:
        source = (
            "with model.trace(PROMPT, temperature=0.0, max_tokens=8, **where):\n"
            "    first = model.model.layers[1].output[0].save()\n"
            f"    {word} = helper(first)\n"
        )
        space = {
            "model": model,
            "PROMPT": PROMPT,
            "where": smollm2.where,
            "__name__": "__main__",
        }
        # Each notebook has a process of its own, where a cell's name is not unique to it.
        name = f"/tmp/{word}/cell.py"
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        try:
            exec(compile(source, name, "exec"), space)
        except RuntimeError as error:
            caught.append(str(error))

    results: dict[str, list[str]] = {"alpha": [], "beta": []}
    threads = [
        threading.Thread(target=fail, args=(word, caught)) for word, caught in results.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for word, other in (("alpha", "beta"), ("beta", "alpha")):
        (text,) = results[word]
        assert f"{word} = helper(first)" in text
        assert other not in text
        assert "line 3" in text


@pytest.mark.parametrize(
    "body", [b"", b"\x00" * 10, bytes(range(256)) * 4, "pickle of a dict", "truncated"]
)
def test_a_body_that_is_no_trace_is_a_clear_400_and_the_next_trace_runs(
    body: Any, model: Any, smollm2: Server
) -> None:
    import pickle

    heard = Heard(model, smollm2)
    with model.trace(PROMPT, **ONE, backend=heard):
        logits = model.logits.save()
    if body == "pickle of a dict":
        body = pickle.dumps({"a": 1})
    elif body == "truncated":
        body = heard.body[: len(heard.body) // 2]
    for path in ("/nnsight/generate", "/v1/nnsight/generate"):
        code, answer = smollm2.get(path, "POST", body)
        assert code == 400
        assert "not a serialized nnsight trace" in answer["detail"]
        assert answer["message"] == answer["detail"]
    with model.trace(PROMPT, **ONE, **smollm2.where):
        again = model.logits.save()
    assert torch.equal(again, logits)


def test_a_compressed_body_is_taken(model: Any, smollm2: Server) -> None:
    import io
    import urllib.request

    import zstandard

    heard = Heard(model, smollm2)
    with model.trace(PROMPT, **ONE, backend=heard):
        logits = model.logits.save()
    request = urllib.request.Request(
        smollm2.url + "/v1/nnsight/generate",
        data=zstandard.ZstdCompressor().compress(heard.body),
        headers={"ndif-api-key": smollm2.token, "nnsight-compress": "True"},
    )
    with urllib.request.urlopen(request) as answer:
        result = torch.load(io.BytesIO(answer.read()), weights_only=False)
    assert torch.equal(result["saves"]["logits"], logits)


class Unprintable(Exception):
    """Its text cannot be had."""

    def __str__(self) -> str:
        raise KeyboardInterrupt


class ExitsWhenPickled:
    """Ends the process of whoever pickles it."""

    def __reduce__(self) -> Any:
        sys.exit(4)


@pytest.mark.parametrize("how", ["unprintable", "huge", "greenlet", "pickled", "conjugate"])
def test_a_callers_class_cannot_take_the_engine_along(
    how: str, model: Any, smollm2: Server
) -> None:
    import greenlet

    this = sys.modules[__name__]
    nnsight.register(this)
    before = smollm2.status()["since"]
    try:
        if how == "conjugate":
            with model.trace(PROMPT, **ONE, **smollm2.where):
                value = torch.tensor([1 + 2j]).conj().save()
                eighth = torch.tensor([[0.5], [2.0]]).to(torch.float8_e4m3fn).save()
            assert torch.equal(value, torch.tensor([1 - 2j]))
            assert eighth.dtype == torch.float8_e4m3fn
            assert torch.equal(eighth.float(), torch.tensor([[0.5], [2.0]]))
        else:
            with pytest.raises(RuntimeError) as caught, model.trace(PROMPT, **ONE, **smollm2.where):
                logits = model.logits.save()
                if how == "unprintable":
                    raise Unprintable
                if how == "huge":
                    raise ValueError("x" * 5_000_000)
                if how == "greenlet":
                    raise greenlet.GreenletExit
                value = nnsight.save(ExitsWhenPickled())
            text = str(caught.value)
            assert len(text) < 200_000
            assert {
                "unprintable": "Unprintable: its text cannot be had",
                "huge": "5000000 characters in all",
                "greenlet": "GreenletExit",
                "pickled": "SystemExit",
            }[how] in text
    finally:
        cloudpickle.unregister_pickle_by_value(this)
    assert smollm2.status()["since"] == before


@pytest.mark.parametrize("how", ["exit", "interrupt", "generator", "above", "assertion"])
def test_what_would_end_a_process_ends_only_the_block(
    how: str, model: Any, smollm2: Server
) -> None:
    before = smollm2.status()["since"]
    with pytest.raises(RuntimeError) as caught:
        if how == "above":
            with model.trace(**ONE, **smollm2.where) as tracer:
                sys.exit(3)
                with tracer.invoke(PROMPT):
                    model.logits.save()
        else:
            with model.trace(PROMPT, **ONE, **smollm2.where):
                hidden = model.model.layers[3].output[0].save()
                if how == "exit":
                    sys.exit(3)
                elif how == "interrupt":
                    raise KeyboardInterrupt
                elif how == "generator":
                    raise GeneratorExit
                assert hidden is None, "not none"
    assert {
        "exit": "SystemExit: 3",
        "above": "SystemExit: 3",
        "interrupt": "KeyboardInterrupt",
        "generator": "GeneratorExit",
        "assertion": "AssertionError: not none",
    }[how] in str(caught.value)
    assert smollm2.status()["state"] == "ready"
    assert smollm2.status()["since"] == before


@pytest.mark.parametrize("where", ["block", "above"])
def test_a_trace_inside_a_block_is_refused(where: str, model: Any, smollm2: Server) -> None:
    with pytest.raises(RuntimeError, match="cannot start another trace"):
        if where == "block":
            with model.trace(PROMPT, **ONE, **smollm2.where):
                with model.trace("another"):
                    inner = model.logits.save()
        else:
            with model.trace(**ONE, **smollm2.where) as tracer:
                with model.trace("another"):
                    inner = model.logits.save()
                with tracer.invoke(PROMPT):
                    logits = model.logits.save()
    assert smollm2.status()["state"] == "ready"


@pytest.mark.parametrize(
    ("setting", "value"), [("max_tokens", 1.5), ("top_k", 2.5), ("seed", 1.5), ("seed", 2**70)]
)
def test_a_sampling_value_of_the_wrong_kind_is_its_callers_error(
    setting: str, value: Any, model: Any, smollm2: Server
) -> None:
    with (
        pytest.raises(RuntimeError, match=r"\w+Error: .+"),
        model.trace(PROMPT, **{"temperature": 0.5, setting: value}, **smollm2.where),
    ):
        model.logits.save()
    with model.trace(PROMPT, **ONE, **smollm2.where):
        logits = model.logits.save()
    assert logits.shape == (1, 49152)


@pytest.mark.parametrize("how", ["transpose", "resize", "shrink", "data", "logits"])
def test_reshaping_what_was_read_in_place_is_an_error_in_the_block(
    how: str, model: Any, smollm2: Server
) -> None:
    before = smollm2.status()["since"]
    with (
        pytest.raises(
            RuntimeError, match=r"ValueError: a tensor that was read .* in place"
        ) as caught,
        model.trace(PROMPT, **ONE, **smollm2.where),
    ):
        hidden = model.model.layers[0].output[0]
        if how == "transpose":
            hidden.t_()
        elif how == "resize":
            hidden.resize_(50, 50)
        elif how == "shrink":
            hidden.resize_(1)
        elif how == "data":
            hidden.data = torch.zeros(7, 3)
        else:
            model.logits.resize_(5, 5)
        logits = model.logits.save()
    assert "test_cases.py" in str(caught.value)
    status = smollm2.status()
    assert (status["state"], status["since"]) == ("ready", before)
    assert status["requests"]["tracked"] == 0


class Opaque:
    """Its attributes cannot be looked at."""

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("no")


def test_functions_and_odd_objects_can_be_saved_or_say_why_not(model: Any, smollm2: Server) -> None:
    with model.trace(PROMPT, **ONE, **smollm2.where):
        twice = nnsight.save(lambda x: x * 2)
        logits = model.logits.save()
    assert twice(4) == 8
    this = sys.modules[__name__]
    nnsight.register(this)
    try:
        with (
            contextlib.suppress(RuntimeError),
            model.trace(PROMPT, **ONE, **smollm2.where),
        ):
            opaque = nnsight.save(Opaque())
    finally:
        cloudpickle.unregister_pickle_by_value(this)
    assert smollm2.status()["requests"]["tracked"] == 0
