"""Sentences about mistakes that a block's source shows before it runs.

Both are legal Python whose meaning in a trace is easy to miss: a save without a name brings
nothing back, and the invokes of one trace are requests of their own that share no names.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any


def unnamed_saves(tree: ast.AST) -> Iterator[str]:
    """A sentence for every ``.save()`` in ``tree`` whose value has no name to come home under."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and (saved := _saved(node.value)) is not None:
            if not isinstance(saved, ast.Name):
                yield (
                    f"line {node.lineno}: `{ast.unparse(node)}` has no name, so nothing comes "
                    f"back; write `name = {ast.unparse(node)}`."
                )
        elif (
            isinstance(node, ast.Assign)
            and _saved(node.value) is not None
            and any(isinstance(target, (ast.Tuple, ast.List)) for target in node.targets)
        ):
            yield (
                f"line {node.lineno}: `{ast.unparse(node)}` saves the whole and names its parts, "
                "so nothing comes back; save the whole under one name and unpack it after the "
                "trace."
            )


def _saved(node: ast.AST) -> ast.expr | None:
    """What ``node`` saves, when it is ``x.save()`` or ``nnsight.save(x)``."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return None
    if node.func.attr != "save":
        return None
    if isinstance(node.func.value, ast.Name) and node.func.value.id == "nnsight":
        return node.args[0] if node.args else None
    return None if node.args else node.func.value


def names_of_siblings(mediators: list[Any]) -> dict[str, str]:
    """Names that an invoke reads and only another invoke of the trace binds.

    Returns
    -------
    dict
        Name to the sentence that tells what to do.
    """
    if len(mediators) < 2:
        return {}
    bodies = [ast.Module(body=m.node.body, type_ignores=[]) for m in mediators if m.node]
    if len(bodies) != len(mediators):
        return {}
    bound = [_names(body, ast.Store) for body in bodies]
    found: dict[str, str] = {}
    for index, (body, mediator) in enumerate(zip(bodies, mediators, strict=True)):
        elsewhere = set().union(*bound[:index], *bound[index + 1 :])
        for name in (_names(body, ast.Load) & elsewhere) - bound[index]:
            if name not in mediator.lcls and name not in mediator.glbls:
                found[name] = (
                    f"it is bound in another invoke, and each invoke is a request of its own, "
                    f"which the engine schedules when it likes. Use two traces: save {name} in "
                    "the first and use it in the second."
                )
    return found


def _names(body: ast.Module, context: type[ast.expr_context]) -> set[str]:
    return {
        node.id
        for node in ast.walk(body)
        if isinstance(node, ast.Name) and isinstance(node.ctx, context)
    }
