"""Every notebook of examples/ runs without vLLM and shows what its text says it shows.

The numbers are SmolLM2-135M-Instruct's. Bounds leave room for bfloat16's rounding on another
processor, and none for an effect that is not there.
"""

from __future__ import annotations

from typing import Any

import nbformat
import pytest
from conftest import ROOT, Run, plots, printed
from nbformat import NotebookNode

pytestmark = pytest.mark.engine

EXAMPLES = ROOT / "examples"
NAMES = [
    "activation_patching",
    "attention_and_mlp",
    "logit_lens",
    "probe_sweep",
    "quickstart",
    "steering",
]


def read(name: str) -> NotebookNode:
    return nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)


def test_every_notebook_is_run_here_and_listed() -> None:
    assert sorted(path.stem for path in EXAMPLES.rglob("*.ipynb")) == NAMES
    listed = (EXAMPLES / "README.md").read_text()
    assert [name for name in NAMES if f"({name}.ipynb)" not in listed] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_kept_without_outputs_and_says_how_to_go_on(name: str) -> None:
    notebook = read(name)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.outputs for cell in code] == [[]] * len(code)
    assert {cell.execution_count for cell in code} == {None}
    assert "## For another model" in notebook.cells[-1].source


def test_quickstart(run: Run) -> None:
    found = run(
        notebook := read("quickstart"),
        next_token="next_token",
        shape="list(hidden.shape)",
        norm="norm",
        turn="float(direction.float().norm())",
        before="before",
        after="after",
    )
    assert found["next_token"] == " Paris"
    assert found["shape"] == [10, 576]
    assert found["norm"] == pytest.approx(439.6, rel=0.02)
    assert found["turn"] == pytest.approx(238.5, rel=0.02)
    assert found["before"].startswith(" Paris") and "Rome" not in found["before"]
    assert found["after"].startswith(" Rome") and "Paris" not in found["after"]
    assert "LlamaDecoderLayer" in printed(notebook)


def test_logit_lens(run: Run) -> None:
    found = run(
        notebook := read("logit_lens"),
        shape="list(words.shape)",
        appears="appears",
        paris="[lens_paris, model_paris]",
        ranks="list(ranks.values())",
    )
    assert found["shape"] == [30, 10]
    assert 25 <= found["appears"] <= 28
    assert found["paris"][1] == pytest.approx(0.70, abs=0.05)
    assert found["paris"][0] == pytest.approx(found["paris"][1], abs=0.02)
    # Every fact is the first choice at the end, and lost among others in the middle.
    assert [curve[-1] for curve in found["ranks"]] == [1, 1, 1, 1]
    assert min(min(curve[:21]) for curve in found["ranks"]) > 100
    assert plots(notebook) == 2


def test_activation_patching(run: Run) -> None:
    found = run(
        notebook := read("activation_patching"),
        differences="[float(clean_difference), float(corrupt_difference)]",
        recovery="recovery.tolist()",
        parts="parts.tolist()",
        handover="handover",
        mover="mover",
        heads="by_head.tolist()",
    )
    clean, corrupt = found["differences"]
    assert clean > 5 and corrupt < -4
    recovery = found["recovery"]
    assert len(recovery) == 30 and found["handover"] == found["mover"] == 23
    for layer, row in enumerate(recovery):
        assert [abs(value) < 0.02 for value in row[:3]] == [True] * 3, layer
        country, last = (1.0, 0.0) if layer < 23 else (0.0, 1.0)
        assert row[3:] == pytest.approx([country, last], abs=0.1), layer
    assert found["parts"][23][0] > 0.9
    assert max(mlp for _, mlp in found["parts"]) < 0.4
    heads: list[float] = found["heads"]
    assert len(heads) == 9 and heads.index(max(heads)) == 4 and max(heads) > 0.8
    assert plots(notebook) == 2


def test_steering(run: Run) -> None:
    found = run(
        notebook := read("steering"),
        steered="steered",
        controls="controls",
        texts="texts",
        afterwards="[output.outputs[0].text for output in afterwards]",
        left="len(hub.edits())",
    )
    steered = found["steered"]
    assert max(steered[:3]) < 0 < steered[3] < steered[4] < steered[5]
    reach = max(steered) - min(steered)
    assert reach > 5
    assert max(max(control) - min(control) for control in found["controls"]) < reach / 2
    # At no dose nothing is added, whatever the direction is.
    assert {control[3] for control in found["controls"]} == {steered[3]}
    texts = found["texts"]
    assert len(texts["as it is"]) == 3
    for other in ("pleasant", "unpleasant"):
        assert all(a != b for a, b in zip(texts["as it is"], texts[other], strict=True))
    assert texts["pleasant"] != texts["unpleasant"]
    assert found["afterwards"] == texts["as it is"] and found["left"] == 0
    shown = [
        output.data["text/plain"]
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if output.output_type == "execute_result"
    ]
    assert [line.split()[0] for line in shown[-1].splitlines()] == [
        "example-pleasant",
        "example-unpleasant",
    ]
    assert plots(notebook) == 1


def test_probe_sweep(run: Run) -> None:
    found: dict[str, Any] = run(
        notebook := read("probe_sweep"),
        shape="list(states.shape)",
        split="[int(train.sum()), int((~train).sum())]",
        shared="len(set(a for a, t in zip(used, train) if t) & "
        "set(a for a, t in zip(used, train) if not t))",
        word="of_word",
        sentence="of_sentence",
        chance="float(of_chance.mean())",
        settled="settled",
        difference="difference",
    )
    assert found["shape"] == [96, 31, 576]
    assert found["split"] == [64, 32] and found["shared"] == 0
    word, sentence = found["word"], found["sentence"]
    # The last token is the same everywhere, so its embedding can tell nothing.
    assert word[0] == sentence[0] == 0.5
    assert sum(word[1:9]) / 8 > 0.8 > 0.75 > sum(sentence[1:9]) / 8
    assert 11 <= found["settled"] <= 18
    assert min(sentence[18:]) >= 0.95
    assert found["chance"] == pytest.approx(0.5, abs=0.08)
    assert found["difference"] < 0.02
    assert plots(notebook) == 1


def test_attention_and_mlp(run: Run) -> None:
    found = run(
        notebook := read("attention_and_mlp"),
        shapes="[list(attention.shape), list(mlp.shape)]",
        error="error",
        parts="parts",
        actual="actual",
        strong="strong",
        by_attention="by_attention.tolist()",
        by_head="by_head.tolist()",
        pattern_error="pattern_error",
        leader="leader",
        looks="pattern[leader, -1].tolist()",
        neurons="[float(by_neuron.sum()), float(by_mlp[loud]), float(by_neuron.max())]",
    )
    assert found["shapes"] == [[30, 5, 576]] * 2
    assert found["error"] < 0.05
    assert found["actual"] == pytest.approx(7.375, abs=0.5)
    assert found["parts"] == pytest.approx(found["actual"], abs=0.3)
    # The block and the head that activation patching finds as well.
    assert found["strong"] == 23 and found["leader"] == 4
    total = found["by_attention"][23]
    assert total == pytest.approx(sum(found["by_head"]), abs=0.05)
    assert found["by_head"][4] > 0.6 * total > 1.5
    assert found["pattern_error"] < 0.02
    assert sum(found["looks"]) == pytest.approx(1, abs=1e-3) and found["looks"][3] > 0.8
    all_neurons, block, loudest = found["neurons"]
    assert all_neurons == pytest.approx(block, abs=0.05) and loudest > 0.4 * block
    assert plots(notebook) == 3
