"""Stub modules: the served model's module tree by class names, without weights or vLLM.

nnsight reads a tree for its structure and shows it by its modules' names and `extra_repr`. A class
made for a name does both.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from .errors import HubError

_CONTAINERS: tuple[tuple[str, type[torch.nn.Module]], ...] = (
    ("ModuleList", torch.nn.ModuleList),
    ("Sequential", torch.nn.Sequential),
    ("ModuleDict", torch.nn.ModuleDict),
)


class _Extra:
    """Mixin: the text a module shows in its parentheses is what the server's module shows."""

    served_extra = ""

    def extra_repr(self) -> str:
        return self.served_extra


def build(tree: Any) -> torch.nn.Module:
    """The stub of a served model's root module.

    Parameters
    ----------
    tree
        ``{"class", "module", "extra", "children": {name: node}}``; a node of ``{"same_as": path}``
        is the module at that path from the root, a second time.

    Raises
    ------
    HubError
        The tree is not one.
    """
    try:
        built: dict[str, torch.nn.Module] = {}
        return _build(tree, "", built)
    except (KeyError, TypeError, AttributeError) as error:
        raise HubError(
            f"The server's description of its model is not one this client can read ({error!r}); "
            "install the same version of jupyter-nnsight-serve here and there."
        ) from None


def _build(node: dict[str, Any], path: str, built: dict[str, torch.nn.Module]) -> torch.nn.Module:
    if "same_as" in node:
        return built[node["same_as"]]
    module: torch.nn.Module = _stub_class(node["class"], node.get("module", ""), _kind(node))()
    built[path] = module
    if node.get("extra"):
        module.__dict__["served_extra"] = node["extra"]
    for name, (dtype, shape) in node.get("parameters", {}).items():
        value = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        module._parameters[name] = torch.nn.Parameter(value, requires_grad=False)
    for name, child in node.get("children", {}).items():
        # Not `add_module`: it refuses names that torch's own class has, which a model may use.
        module._modules[name] = _build(child, f"{path}.{name}" if path else name, built)
    return module


def _kind(node: dict[str, Any]) -> str:
    """What the module can be asked: "list" and the like, or "" for a plain module."""
    for name, _ in _CONTAINERS:
        if name in node["class"]:
            return name
    names = list(node.get("children", ()))
    is_list = "List" in node["class"] and names == [str(index) for index in range(len(names))]
    return "ModuleList" if is_list else ""


@functools.cache
def _stub_class(name: str, module: str, kind: str) -> type[torch.nn.Module]:
    """The class for modules called ``name``; one class for one name, as in the real tree."""
    base = dict(_CONTAINERS).get(kind, torch.nn.Module)
    return type(
        name,
        (_Extra, base),
        {"__module__": module, "__doc__": f"Stands for the server's {module}.{name}."},
    )
