"""How large what a block saved is, told before it is copied or sent."""

from __future__ import annotations

from typing import Any

import torch


class SaveTooLargeError(Exception):
    """What a trace saved is more than the server sends."""


def nbytes(value: Any) -> int:
    """Bytes of the elements of all tensors in ``value``, each tensor counted once.

    Looks through containers and the attributes of objects; a view counts its own elements, as
    only those are sent.
    """
    total = 0
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if id(item) in seen or isinstance(item, (str, bytes, int, float, type)):
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            total += _elements(item) * item.element_size()
        elif isinstance(item, dict):
            waiting.extend(item.values())
        elif isinstance(item, (list, tuple, set, frozenset)):
            waiting.extend(item)
        elif not callable(item):
            waiting.extend(getattr(item, "__dict__", {}).values())
    return total


def _elements(tensor: torch.Tensor) -> int:
    """How many elements of ``tensor`` are sent; a sparse one sends those that it stores."""
    elements: int = tensor.numel()
    if tensor.layout is not torch.strided and hasattr(tensor, "_nnz"):
        elements = int(tensor._nnz()) * (1 + tensor.ndim)
    return elements


def check(saves: dict[str, Any], limit: int) -> int:
    """The size in bytes of ``saves``, which must not be more than ``limit``.

    Raises
    ------
    SaveTooLargeError
        It is more; the message names the limit, the total and the largest saves.
    """
    total = nbytes(saves)
    if total > limit:
        sizes = sorted(((nbytes(value), name) for name, value in saves.items()), reverse=True)
        largest = ", ".join(f"{name} ({size} bytes)" for size, name in sizes[:3])
        raise SaveTooLargeError(
            f"this trace saved {total} bytes, and this server sends at most {limit} "
            f"(max_response_bytes); the largest: {largest}. Save less of them, or use several "
            "traces."
        )
    return total
