"""Envoys by path: the name every process that knows the model gives to the same envoy.

An envoy tagged with a persistent id is pickled as that id alone, so a module tree the far side
already has does not travel. A path names the same envoy on the client, in the engine process and
in the worker.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Set
from typing import Any


def walk(envoy: Any) -> Iterator[Any]:
    """Every envoy of the tree under ``envoy``, itself first."""
    yield envoy
    for child in envoy._children:
        yield from walk(child)


def unlist_adapted(root: Any) -> None:
    """Take out of the lists what vLLM wraps in the layers of an engine with adapters.

    The module under such a layer is in the worker's tree only, and whoever asks for every module
    (``tracer.cache()``) is given those of the model that was loaded. It stays reachable by name.
    """
    from vllm.lora.layers import BaseLayerWithLoRA

    for envoy in walk(root):
        if isinstance(envoy._module, BaseLayerWithLoRA):
            inner = envoy._child_map.pop("base_layer", None)
            if inner in envoy._children:
                envoy._children.remove(inner)


def envoys_by_id(root: Any) -> dict[str, Any]:
    """Persistent id to envoy, for every envoy under ``root``."""
    return {f"Envoy:{envoy.path}": envoy for envoy in walk(root)}


def tag(envoys: dict[str, Any], known: dict[str, Any]) -> bool:
    """Have the envoys of one tree pickled by id, if ``known`` holds the same tree.

    The tree is the same when every envoy has its twin at the same path: same class, same aliases,
    no edits of its own. Otherwise (a caller's own ``envoys=`` or ``rename=``) nothing is tagged and
    the tree travels whole, since the far side's envoys would not behave like it.

    Parameters
    ----------
    envoys, known
        Two trees, as `envoys_by_id` has them.

    Returns
    -------
    bool
        Whether the tree was tagged.
    """
    for identity, envoy in envoys.items():
        twin: Any = known.get(identity)
        if type(twin) is not type(envoy) or twin._aliases != envoy._aliases or envoy._edits:
            return False
    for identity, envoy in envoys.items():
        envoy.__dict__["_persistent_id"] = identity
    return True


def specification(module: Any) -> dict[str, Any]:
    """A module tree as JSON, for a client that builds it from stubs.

    Parameters
    ----------
    module
        The root ``torch.nn.Module``.

    Returns
    -------
    dict
        ``class``, ``module`` (where the class is defined), ``extra`` (what its repr says besides),
        ``children`` by name and, where it has any, ``parameters`` as name to dtype and shape; a
        module that stands elsewhere in the tree already is ``{"same_as": its dotted name}``.
    """
    names: dict[int, str] = {}

    def node(module: Any, name: str) -> dict[str, Any]:
        if id(module) in names:
            return {"same_as": names[id(module)]}
        names[id(module)] = name
        parameters = {
            key: [str(value.dtype).removeprefix("torch."), list(value.shape)]
            for key, value in module._parameters.items()
            if value is not None
        }
        return {
            "class": type(module).__name__,
            "module": type(module).__module__,
            "extra": module.extra_repr(),
            **({"parameters": parameters} if parameters else {}),
            "children": {
                key: node(child, f"{name}.{key}" if name else key)
                for key, child in module._modules.items()
                if child is not None
            },
        }

    return node(module, "")


def tree_id(specification: dict[str, Any]) -> str:
    """What two trees share when they have the same classes at the same paths."""

    def shape(node: dict[str, Any]) -> Any:
        if "same_as" in node:
            return node["same_as"]
        return [node["class"], {key: shape(child) for key, child in node["children"].items()}]

    return hashlib.sha256(json.dumps(shape(specification)).encode()).hexdigest()


def difference(ids: Set[str], known: Set[str]) -> str | None:
    """A path that is in one of two trees only, or None when they have the same paths."""
    if ids == known:
        return None
    differing = sorted(ids ^ known, key=lambda path: (len(path), path))
    return differing[0].removeprefix("Envoy:")
