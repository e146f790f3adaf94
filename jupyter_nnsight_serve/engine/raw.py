"""The encoding of results that a client can read without unpickling.

One block of bytes: a magic, the length of a JSON header, the header, and the bytes of every tensor,
each aligned to 64 bytes, so that a reader maps them as they lie. Plain values, numpy's arrays,
nnsight's caches and vLLM's records are JSON with tags; only what JSON and tensors cannot hold is
pickled, its tensors still outside the pickle, and a client may refuse such a value.

    b"NNSERVE1" | length of the header: 8 bytes, little-endian | header | padding | data

The header holds ``saves``, ``error``, ``said``, token counts, the version of Python, whose code a
pickle may hold, and for every tensor and pickle its
offset from the beginning of the data, which is the next multiple of 64 after the header.

Within one save the containers (list, tuple, dict, set, frozenset, OrderedDict, bytearray, cache) are numbered in the order
in which they begin, and one that comes again is ``{"same": number}``.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import math
import pickle
import platform
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import numpy
import torch
from nnsight.intervention.cache import Cache, CacheView, Entry

from .run import Outcome

MAGIC = b"NNSERVE1"
ALIGNMENT = 64

_JSON_INTEGERS = 2**63
"""Larger ones are written in hexadecimal, of which a reader takes any number of digits."""


class _Entangled(Exception):
    """A tuple or set that holds itself, which only a pickle can say."""


class Encoder:
    """Encodes one outcome.

    Attributes
    ----------
    tensors
        Descriptions of the tensors found, in the order of their data.
    """

    def __init__(self) -> None:
        self.tensors: list[dict[str, Any]] = []
        self.pickles: list[dict[str, int]] = []
        self._data: list[memoryview | bytes] = []
        self._offset = 0
        # Tensors and arrays by id, each kept with its number so that its id stays its own.
        self._known: dict[int, tuple[Any, int]] = {}
        # Containers of the save that is being encoded, by id, and those that have not ended.
        self._numbers: dict[int, int] = {}
        self._open: set[int] = set()
        # Whether that is what a cache recorded.
        self._caching = False

    def parts(self, outcome: Outcome) -> Iterator[memoryview | bytes]:
        """The encoded outcome, in pieces that together are the block; tensors are not copied."""
        saves = {name: self.save(value) for name, value in outcome.saves.items()}
        header = json.dumps(
            {
                "saves": saves,
                "error": outcome.error,
                "said": outcome.said,
                "tensors": self.tensors,
                "pickles": self.pickles,
                "python": platform.python_version(),
                "prompt_tokens": outcome.prompt_tokens,
                "generated_tokens": outcome.generated_tokens,
            },
            separators=(",", ":"),
        ).encode()
        before = len(MAGIC) + 8 + len(header)
        padding = bytes(-before % ALIGNMENT)
        yield MAGIC + len(header).to_bytes(8, "little") + header + padding
        yield from self._data

    def save(self, value: Any) -> Any:
        """One save as JSON with tags."""
        self._numbers, self._open, self._caching = {}, set(), False
        try:
            return self.value(value)
        except (_Entangled, RecursionError):
            return {"pickle": self._pickle(value)}

    def value(self, value: Any) -> Any:
        """``value`` as JSON with tags; its tensors and pickles join the data."""
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind is int:
            return value if abs(value) < _JSON_INTEGERS else {"int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"float": str(value)}
        if isinstance(value, torch.Tensor) and _plain(value):
            return {"tensor": self._tensor(value)}
        if kind in _CONTAINERS:
            return self._container(kind, value)
        if kind in _SCALARS:
            tag, plain = _SCALARS[kind]
            return {tag: plain(value)}
        if kind is CacheView:
            return {"view": [value._node_path(), self.value(value._cache)]}
        if kind is Entry:
            return {"entry": [self.value(value.output), self.value(value.inputs)]}
        if kind.__module__ == "torch.return_types":
            return {"returned": kind.__name__, "items": [self.value(item) for item in value]}
        if self._caching and isinstance(value, torch.nn.Module):
            # vLLM's logits processor is called with the head: its weights, of a class of vLLM's.
            return {
                "unread": f"a module of the engine's, {kind.__name__}, which a cache leaves out"
            }
        if kind is numpy.ndarray or isinstance(value, numpy.generic):
            return self._array(value)
        if kind.__module__.partition(".")[0] == "vllm" and (fields := _fields(value)) is not None:
            return {
                "record": kind.__name__,
                "fields": {name: self.value(part) for name, part in fields.items()},
            }
        return {"pickle": self._pickle(value)}

    def _container(self, kind: type, value: Any) -> Any:
        number = self._numbers.get(id(value))
        if number is not None:
            if number in self._open and kind not in (list, dict, OrderedDict, Cache):
                raise _Entangled
            return {"same": number}
        number = self._numbers[id(value)] = len(self._numbers)
        self._open.add(number)
        tag = _CONTAINERS[kind]
        content: Any
        if kind is Cache:
            fields, self._caching = value.__getstate__(), True
            content = {name: self.value(fields[name]) for name in _CACHE_FIELDS}
            self._caching = False
        elif kind is dict:
            content = self._pairs(value)
        elif kind is OrderedDict:
            # A module's state keeps the versions of its parts in an attribute.
            content = [self._pairs(value), self._pairs(vars(value))]
        elif kind is bytearray:
            content = base64.b64encode(value).decode()
        else:
            content = [self.value(item) for item in value]
        self._open.discard(number)
        return {tag: content}

    def _pairs(self, value: Any) -> list[Any]:
        return [[self.value(key), self.value(item)] for key, item in value.items()]

    def _array(self, value: Any) -> Any:
        """A numpy array or scalar as a tensor with another tag.

        Where torch has no such dtype it is a tensor of bytes and numpy's own description of the
        dtype; it is pickled where its bytes are not all there is to it.
        """
        dtype = None
        known = self._known.get(id(value))
        try:
            tensor = torch.from_numpy(_contiguous(value))
        except (TypeError, ValueError):
            dtype = _description(value.dtype)
            if dtype is None:
                return {"pickle": self._pickle(value)}
            tensor = torch.from_numpy(_contiguous(value).reshape(-1).view(numpy.uint8))
        index = known[1] if known else self._tensor(tensor)
        self._known[id(value)] = (value, index)
        tagged: dict[str, Any] = {"array" if type(value) is numpy.ndarray else "scalar": index}
        if dtype is not None:
            tagged |= {"dtype": dtype, "shape": list(value.shape)}
        return tagged

    def _tensor(self, tensor: torch.Tensor) -> int:
        known = self._known.get(id(tensor))
        if known is not None:
            return known[1]
        index = len(self.tensors)
        self._known[id(tensor)] = (tensor, index)
        data = tensor.detach().contiguous()
        nbytes = data.numel() * data.element_size()
        entry = {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "offset": self._offset,
            "nbytes": nbytes,
        }
        if isinstance(tensor, torch.nn.Parameter):
            entry["parameter"] = True
        if tensor.requires_grad:
            entry["requires_grad"] = True
        self.tensors.append(entry)
        if nbytes:
            # A flat view of the elements as bytes; the array keeps the tensor's memory alive.
            self._append(memoryview(data.reshape(-1).view(torch.uint8).numpy()), nbytes)
        return index

    def _pickle(self, value: Any) -> int:
        buffer = io.BytesIO()
        try:
            _Pickler(buffer, self).dump(value)
        except (pickle.PicklingError, AttributeError, TypeError, ImportError):
            buffer = io.BytesIO()
            _CloudPickler(buffer, self).dump(value)
        self.pickles.append({"offset": self._offset, "nbytes": buffer.tell()})
        self._append(buffer.getvalue(), buffer.tell())
        return len(self.pickles) - 1

    def _append(self, data: memoryview | bytes, nbytes: int) -> None:
        self._data.append(data)
        if padding := -nbytes % ALIGNMENT:
            self._data.append(bytes(padding))
        self._offset += nbytes + padding


_CONTAINERS: dict[type, str] = {
    list: "list",
    tuple: "tuple",
    dict: "dict",
    set: "set",
    frozenset: "frozenset",
    OrderedDict: "ordered",
    bytearray: "bytearray",
    Cache: "cache",
}
_CACHE_FIELDS = (
    "entries",
    "targets",
    "device",
    "dtype",
    "detach",
    "include_output",
    "include_inputs",
    "non_blocking",
)
_SCALARS: dict[type, tuple[str, Callable[[Any], Any]]] = {
    bytes: ("bytes", lambda value: base64.b64encode(value).decode()),
    complex: ("complex", lambda value: [str(value.real), str(value.imag)]),
    torch.Size: ("size", list),
    torch.dtype: ("dtype", lambda value: str(value).removeprefix("torch.")),
    torch.device: ("device", str),
}


def _description(dtype: Any) -> Any:
    """A numpy dtype as JSON: text, or a list of fields; None where that does not tell all of it."""
    if dtype.hasobject or not dtype.itemsize:
        return None
    try:
        told = numpy.lib.format.dtype_to_descr(dtype)  # type: ignore[no-untyped-call]
        whole = numpy.lib.format.descr_to_dtype(told) == dtype  # type: ignore[no-untyped-call]
    except (TypeError, ValueError):
        return None
    return told if whole else None


def _contiguous(value: Any) -> Any:
    """A numpy array or scalar as an array that torch shares memory with; its shape is kept."""
    array = numpy.asarray(value)
    # `ascontiguousarray` would make one element of an array without axes a row.
    return array if array.flags.c_contiguous and array.flags.writeable else array.copy("C")


def _fields(value: Any) -> dict[str, Any] | None:
    """The parts by name of a result or a record of vLLM's; None if it is neither."""
    names: list[str] = list(getattr(value, "__struct_fields__", ()))
    if dataclasses.is_dataclass(value):
        names += [field.name for field in dataclasses.fields(value)]
    if not names and type(value).__module__ != "vllm.outputs":
        return None
    names += [name for name in getattr(value, "__dict__", {}) if name not in names]
    # What nnsight keeps on an output for its own merging is in the saves already.
    return {name: getattr(value, name) for name in names if not name.startswith(("_", "nnsight_"))}


def _plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is wholly told by its dtype, shape and elements."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


class _Pickler(pickle.Pickler):
    """Pickles with tensors outside."""

    def __init__(self, buffer: io.BytesIO, encoder: Encoder) -> None:
        super().__init__(buffer, protocol=5)
        self.encoder = encoder

    def persistent_id(self, obj: Any) -> Any:
        return _outside(obj, self.encoder)


class _CloudPickler(cloudpickle.Pickler):
    """The same for instances of classes that exist only in a notebook."""

    def __init__(self, buffer: io.BytesIO, encoder: Encoder) -> None:
        super().__init__(buffer, protocol=5)
        self.encoder = encoder

    def persistent_id(self, obj: Any) -> Any:
        return _outside(obj, self.encoder)


def _outside(obj: Any, encoder: Encoder) -> Any:
    if isinstance(obj, torch.Tensor) and _plain(obj):
        return ("tensor", encoder._tensor(obj))
    return None
