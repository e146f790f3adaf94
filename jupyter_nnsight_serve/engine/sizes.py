"""How large what a block saved is, told before it is copied or sent."""

from __future__ import annotations

from types import GetSetDescriptorType
from typing import Any

import torch


class SaveTooLargeError(Exception):
    """What a trace saved is more than the server sends."""


def nbytes(value: Any) -> int:
    """Bytes of all tensors, arrays, strings and bytes in ``value``, each counted once.

    Looks through containers and the attributes of objects; a view counts its own elements, as
    only those are sent.
    """
    total = 0
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if id(item) in seen or isinstance(item, (int, float, type)):
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            total += _elements(item) * item.element_size()
        elif isinstance(item, (str, bytes, bytearray)):
            total += len(item)
        elif isinstance(item, dict):
            waiting.extend(item.values())
        elif isinstance(item, (list, tuple, set, frozenset)):
            waiting.extend(item)
        elif isinstance(getattr(type(item), "nbytes", None), property | GetSetDescriptorType):
            total += int(item.nbytes)
        elif not callable(item):
            waiting.extend(_attributes(item))
    return total


def _attributes(item: Any) -> list[Any]:
    """The values of an object's own attributes; none where its class does not give them."""
    try:
        return list(vars(item).values())
    except Exception:
        return []


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


ENVELOPE_BYTES = 2**20
"""Bytes that a result may take besides its saves."""


def check_encoded(size: int, limit: int) -> None:
    """Refuse an encoded result that is larger than its saves were let be."""
    if size > limit + ENVELOPE_BYTES:
        raise SaveTooLargeError(
            f"this trace's result is {size} bytes once encoded, and this server sends at most "
            f"{limit} (max_response_bytes). Save less, or use several traces."
        )
