"""nnsight's caches of activations, made from their parts."""

from __future__ import annotations

from typing import Any

from nnsight.intervention.cache import Cache, CacheView, Entry

_FIELDS = (
    "entries",
    "targets",
    "device",
    "dtype",
    "detach",
    "include_output",
    "include_inputs",
    "non_blocking",
)


def cache(fields: dict[str, Any]) -> Cache:
    """A cache with the ``fields`` that came; it has no model."""
    made = Cache.__new__(Cache)
    made.__dict__.update({name: fields[name] for name in _FIELDS}, model=None, _open={})
    return made


def entry(output: Any, inputs: Any) -> Entry:
    """What one visit to a module left."""
    return Entry(output, inputs)


def view(of: Cache, path: str | None) -> CacheView:
    """A view of a cache, at a module's path or at the root."""
    return CacheView(of, None, path)


def adopt(found: CacheView, model: Any) -> None:
    """Let a view that came home be navigated like ``model``."""
    if found._cache.model is None:
        found._cache.model = model
    if found._path is not None and found._envoy is None:
        at = next((envoy for envoy in model.modules() if envoy.path == found._path), None)
        object.__setattr__(found, "_envoy", at)
