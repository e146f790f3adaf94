"""Decoding a result: tensors into memory of their own as they arrive, containers without pickle.

A result is a magic word, a JSON header, and the raw bytes of tensors and pickles, each at its
offset. The header says what is saved under which name and where the bytes are.
"""

from __future__ import annotations

import base64
import ctypes
import io
import json
from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch

from . import caches
from .outputs import Unread, record
from .unpickle import Unpickler

MAGIC = b"NNSERVE1"
ALIGNMENT = 64

_FIXED = len(MAGIC) + 8
_MOST_HEADER = 2**31


class WireError(ValueError):
    """The bytes are not a result."""


@dataclass
class Outcome:
    """What a trace came to.

    Attributes
    ----------
    saves
        Name to value.
    undecoded
        Name to the reason, for saves that could not be made here.
    error
        What a block raised, as nnsight's deferred error, or None.
    said
        Pairs of stream (``stdout`` or ``stderr``) and text that the blocks wrote.
    views
        The views of caches in the saves; they have no model yet.
    """

    saves: dict[str, Any] = field(default_factory=dict)
    undecoded: dict[str, Exception] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    said: list[tuple[str, str]] = field(default_factory=list)
    views: list[Any] = field(default_factory=list)
    prompt_tokens: int = 0
    generated_tokens: int = 0


class PickleForbidden(Exception):
    """A value is a pickle, and those are not to be opened."""


class ResultDecoder:
    """Takes a result's bytes as they come.

    Parameters
    ----------
    allow_pickle
        Whether values that are neither tensors nor plain containers are unpickled.
    """

    def __init__(self, allow_pickle: bool = True) -> None:
        self.allow_pickle = allow_pickle
        self.received = 0
        self.total: int | None = None
        self._head = bytearray()
        self._need = _FIXED
        self._header: dict[str, Any] | None = None
        self._data_start = 0
        self._tensors: list[torch.Tensor] = []
        self._pickles: list[bytearray] = []
        self._starts: list[int] = []
        self._regions: list[tuple[int, memoryview]] = []
        self._numbered: list[Any] = []
        self._arrays: dict[int, Any] = {}
        self._views: list[Any] = []

    def feed(self, part: memoryview) -> None:
        """Take the next bytes."""
        self.received += len(part)
        while self._header is None and part:
            take = min(self._need - len(self._head), len(part))
            self._head += part[:take]
            part = part[take:]
            if len(self._head) == self._need:
                self._advance()
        if part:
            self._place(self.received - len(part) - self._data_start, part)

    def _advance(self) -> None:
        if self._need == _FIXED:
            if self._head[: len(MAGIC)] != MAGIC:
                raise WireError("the result does not begin as one")
            length = int.from_bytes(self._head[len(MAGIC) :], "little")
            if length > _MOST_HEADER:
                raise WireError("the result's header is too long")
            self._need += length
            if length:
                return
        self._header = json.loads(self._head[_FIXED:])
        self._data_start = -(-self._need // ALIGNMENT) * ALIGNMENT
        self._lay_out()

    def _lay_out(self) -> None:
        """Make room for everything the header announces."""
        assert self._header is not None
        end = 0
        for entry in self._header.get("tensors", ()):
            tensor = torch.empty(entry["shape"], dtype=_dtype(entry["dtype"]))
            if tensor.nbytes != entry["nbytes"]:
                raise WireError("a tensor's size does not fit its shape")
            self._tensors.append(tensor)
            end = max(end, self._room(entry, _bytes_of(tensor)))
        for entry in self._header.get("pickles", ()):
            self._pickles.append(bytearray(entry["nbytes"]))
            end = max(end, self._room(entry, memoryview(self._pickles[-1])))
        self._regions.sort(key=lambda region: region[0])
        self._starts = [start for start, _ in self._regions]
        self.total = self._data_start + end if end else self._need

    def _room(self, entry: dict[str, Any], memory: memoryview) -> int:
        if len(memory):
            self._regions.append((entry["offset"], memory))
        return int(entry["offset"]) + len(memory)

    def _place(self, offset: int, part: memoryview) -> None:
        """Copy ``part``, which stands at ``offset`` from the first data byte, to where it goes."""
        end = offset + len(part)
        index = max(bisect_right(self._starts, offset) - 1, 0)
        for start, memory in self._regions[index:]:
            if start >= end:
                break
            low, high = max(start, offset), min(start + len(memory), end)
            if low < high:
                memory[low - start : high - start] = part[low - offset : high - offset]

    def outcome(self) -> Outcome:
        """What came; to be asked once everything has."""
        if self._header is None or self.total is None or self.received < self.total:
            raise WireError("the result is not complete")
        header = self._header
        self._mark(header)
        outcome = Outcome(
            error=header.get("error"),
            said=[(stream, text) for stream, text in header.get("said", ())],
            prompt_tokens=header.get("prompt_tokens", 0),
            generated_tokens=header.get("generated_tokens", 0),
        )
        for name, value in header["saves"].items():
            self._numbered = []
            try:
                outcome.saves[name] = self._value(value)
            except Exception as error:
                outcome.undecoded[name] = error
        outcome.views = self._views
        return outcome

    def _mark(self, header: dict[str, Any]) -> None:
        """Have tensors be parameters, or require a gradient, that did in the block."""
        for index, entry in enumerate(header.get("tensors", ())):
            wanted = bool(entry.get("requires_grad"))
            try:
                if entry.get("parameter"):
                    self._tensors[index] = torch.nn.Parameter(self._tensors[index], wanted)
                elif wanted:
                    self._tensors[index].requires_grad_()
            except RuntimeError as error:
                raise WireError(str(error)) from None

    def _value(self, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        tag: str
        content: Any
        tag, content = next(iter(value.items()))
        match tag:
            case "tensor":
                return self._tensors[content]
            case "array":
                if content not in self._arrays:
                    self._arrays[content] = self._array(content, value)
                return self._arrays[content]
            case "scalar":
                return self._array(content, value)[()]
            case (
                "list" | "tuple" | "dict" | "set" | "frozenset" | "ordered" | "bytearray" | "cache"
            ):
                return self._container(tag, content)
            case "same":
                return self._numbered[content]
            case "float":
                return float(content)
            case "int":
                return int(content, 16)
            case "complex":
                return complex(*map(float, content))
            case "size":
                return torch.Size(content)
            case "dtype":
                return _dtype(content)
            case "device":
                return torch.device(content)
            case "bytes":
                return base64.b64decode(content)
            case "returned":
                return getattr(torch.return_types, content)(self._values(value["items"]))
            case "view":
                path, cache = content
                self._views.append(view := caches.view(self._value(cache), path))
                return view
            case "entry":
                return caches.entry(*self._values(content))
            case "unread":
                return Unread(content)
            case "record":
                fields = {name: self._field(name, item) for name, item in value["fields"].items()}
                return record(content, fields)
            case "pickle":
                return self._unpickle(content)
        raise WireError(f"a value of a kind this client does not know: {tag}")

    def _array(self, index: int, about: dict[str, Any]) -> Any:
        """A numpy array; of a dtype that torch does not have, the bytes are in the tensor."""
        memory = self._tensors[index].numpy()
        if "dtype" not in about:
            return memory
        dtype = numpy.lib.format.descr_to_dtype(_tuples(about["dtype"]))  # type: ignore[no-untyped-call]
        if dtype.hasobject:
            raise WireError("an array of objects, which bytes do not tell")
        return numpy.ndarray(about["shape"], dtype, memory)

    def _values(self, items: list[Any]) -> list[Any]:
        return [self._value(item) for item in items]

    def _container(self, tag: str, content: Any) -> Any:
        """A container, numbered as it begins, so that what is in it can name it."""
        number = len(self._numbered)
        mutable: dict[str, Any] = {"list": list, "dict": dict, "ordered": OrderedDict}
        made: Any = mutable[tag]() if tag in mutable else None
        # What cannot be made before its items are is never named by one of them.
        self._numbered.append(made)
        if tag == "list":
            made.extend(self._values(content))
        elif tag in ("dict", "ordered"):
            pairs, attributes = (content, ()) if tag == "dict" else content
            for key, item in pairs:
                made[self._value(key)] = self._value(item)
            for key, item in attributes:
                vars(made)[self._value(key)] = self._value(item)
        elif tag == "bytearray":
            made = bytearray(base64.b64decode(content))
        elif tag == "cache":
            made = caches.cache({name: self._value(part) for name, part in content.items()})
        else:
            made = {"tuple": tuple, "set": set, "frozenset": frozenset}[tag](self._values(content))
        self._numbered[number] = made
        return made

    def _field(self, name: str, value: Any) -> Any:
        """A field of one of vLLM's records; one that cannot be made here says why."""
        if name == "saves":
            return self._value(value)
        try:
            return self._value(value)
        except PickleForbidden:
            return Unread("it came as a pickle, and connect(allow_pickle=False) forbids those")
        except (ImportError, AttributeError) as error:
            return Unread(str(error))

    def _unpickle(self, index: int) -> Any:
        if not self.allow_pickle:
            raise PickleForbidden
        assert self._header is not None
        data = io.BytesIO(self._pickles[index])
        return Unpickler(data, self._tensors, self._header.get("python")).load()


def _tuples(description: Any) -> Any:
    """numpy's description of a dtype with the tuples that JSON made lists of."""
    if not isinstance(description, list):
        return description
    return [_field(*entry) for entry in description]


def _field(name: Any, dtype: Any, shape: Any = None) -> Any:
    title = tuple(name) if isinstance(name, list) else name
    found = (title, _tuples(dtype))
    return found if shape is None else (*found, tuple(shape))


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise WireError(f"this torch ({torch.__version__}) has no dtype {name}")
    return found


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor; valid while the tensor lives."""
    if not tensor.nbytes:
        return memoryview(b"")
    array = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(array).cast("B")
