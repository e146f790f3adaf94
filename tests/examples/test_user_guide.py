"""The code blocks of docs/user-guide.md run as they stand: in order, in one namespace."""

from __future__ import annotations

import nbformat
import pytest
from conftest import ROOT, Run, printed

pytestmark = pytest.mark.engine

GUIDE = ROOT / "docs" / "user-guide.md"


def code_blocks(text: str) -> list[str]:
    """The indented blocks of a Markdown text, without the lines for a shell."""
    blocks: list[list[str]] = []
    inside = False
    before = ""
    for line in text.splitlines():
        if line.startswith("    ") and (inside or not before):
            if not inside:
                blocks.append([])
            inside = True
            blocks[-1].append(line[4:])
        elif not line and inside:
            blocks[-1].append("")
        else:
            inside = False
        before = line
    kept = ["\n".join(line for line in block if not line.startswith("pip ")) for block in blocks]
    return [block.strip("\n") for block in kept if block.strip()]


def test_blocks_are_found() -> None:
    text = (
        "a\n\n    pip install b\n\n    c()\n\n    d()\n\nfrom\n    here\n\n    with e:\n        f\n"
    )
    assert code_blocks(text) == ["c()\n\nd()", "with e:\n    f"]


def test_the_user_guide(run: Run) -> None:
    blocks = code_blocks(GUIDE.read_text())
    assert len(blocks) >= 6
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(b) for b in blocks])
    found = run(
        notebook,
        outputs="[output.outputs[0].text for output in outputs]",
        hidden="list(hidden.shape)",
        prompt="len(model.tokenizer('The Eiffel Tower is in').input_ids)",
        edits="len(hub.edits())",
    )
    said = printed(notebook)
    assert "30 x LlamaDecoderLayer(" in said
    assert len(found["outputs"]) == 2 and all(found["outputs"])
    assert found["hidden"] == [found["prompt"], 576]
    assert found["edits"] == 0
    assert "IndexError: too many indices for tensor of dimension 2" in said
    counts = [cell.execution_count for cell in notebook.cells]
    assert counts == list(range(1, len(blocks) + 1))
