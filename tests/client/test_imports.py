"""What the client's modules import: each other one way, and never the extension or the engine."""

from __future__ import annotations

import ast
import graphlib
from pathlib import Path

import jupyter_nnsight_serve.client

FOLDER = Path(jupyter_nnsight_serve.client.__file__).parent
MODULES = {file.stem for file in FOLDER.glob("*.py")}


def imported(module: str) -> tuple[set[str], set[str]]:
    """The modules of the client, and of the package above it, that a module names anywhere."""
    own: set[str] = set()
    above: set[str] = set()
    for node in ast.walk(ast.parse((FOLDER / f"{module}.py").read_text())):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        names = [node.module] if node.module else [alias.name for alias in node.names]
        (own if node.level == 1 else above).update(str(name) for name in names)
    return own & MODULES, above


def test_modules_import_one_way() -> None:
    graph = {module: imported(module)[0] for module in MODULES}
    order = list(graphlib.TopologicalSorter(graph).static_order())
    assert order.index("backend") < order.index("model") < order.index("hub") < len(order)


def test_the_client_stands_alone() -> None:
    # Shared by all: what is neither the extension's nor the engine's.
    assert {name for module in MODULES for name in imported(module)[1]} <= {"parsing"}
