"""The encoding of results that a client can read without unpickling.

One block of bytes: a magic, the length of a JSON header, the header, and the bytes of every tensor,
each aligned to 64 bytes, so that a reader maps them as they lie. Plain values are JSON with tags;
only what JSON and tensors cannot hold is pickled, its tensors still outside the pickle, and a
client may refuse such a value.

    b"NNSERVE1" | length of the header: 8 bytes, little-endian | header | padding | data

The header holds ``saves``, ``error``, ``said``, token counts, and for every tensor and pickle its
offset from the beginning of the data, which is the next multiple of 64 after the header.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import math
import pickle
from collections.abc import Iterator
from typing import Any

import cloudpickle
import torch

from .run import Outcome

MAGIC = b"NNSERVE1"
ALIGNMENT = 64

# vLLM's classes that a client without vLLM reads by their attributes.
_RECORDS = ("RequestOutput", "CompletionOutput", "Logprob", "RequestStateStats", "RequestMetrics")


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
        self._known: dict[int, tuple[Any, int]] = {}

    def parts(self, outcome: Outcome) -> Iterator[memoryview | bytes]:
        """The encoded outcome, in pieces that together are the block; tensors are not copied."""
        saves = {name: self.value(value) for name, value in outcome.saves.items()}
        header = json.dumps(
            {
                "saves": saves,
                "error": outcome.error,
                "said": outcome.said,
                "tensors": self.tensors,
                "pickles": self.pickles,
                "prompt_tokens": outcome.prompt_tokens,
                "generated_tokens": outcome.generated_tokens,
            },
            separators=(",", ":"),
        ).encode()
        before = len(MAGIC) + 8 + len(header)
        padding = bytes(-before % ALIGNMENT)
        yield MAGIC + len(header).to_bytes(8, "little") + header + padding
        yield from self._data

    def value(self, value: Any) -> Any:
        """``value`` as JSON with tags; its tensors and pickles join the data."""
        if value is None or isinstance(value, (bool, str)) or type(value) is int:
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"float": str(value)}
        if isinstance(value, torch.Tensor) and _plain(value):
            return {"tensor": self._tensor(value)}
        kind = type(value)
        if kind is list:
            return {"list": [self.value(item) for item in value]}
        if kind is tuple:
            return {"tuple": [self.value(item) for item in value]}
        if kind is dict:
            return {"dict": [[self.value(k), self.value(v)] for k, v in value.items()]}
        if kind is set:
            return {"set": [self.value(item) for item in value]}
        if kind is torch.Size:
            return {"size": list(value)}
        if kind is torch.dtype:
            return {"dtype": str(value).removeprefix("torch.")}
        if kind is bytes:
            return {"bytes": base64.b64encode(value).decode()}
        if kind.__name__ in _RECORDS and kind.__module__.startswith("vllm."):
            return {"record": kind.__name__, "fields": self._fields(value)}
        return {"pickle": self._pickle(value)}

    def _fields(self, record: Any) -> dict[str, Any]:
        if dataclasses.is_dataclass(record):
            names = [field.name for field in dataclasses.fields(record)]
            names += [name for name in getattr(record, "__dict__", {}) if name not in names]
        else:
            names = list(vars(record))
        # What nnsight keeps on an output for its own merging is in the saves already.
        return {
            name: self.value(getattr(record, name))
            for name in names
            if not name.startswith(("_", "nnsight_"))
        }

    def _tensor(self, tensor: torch.Tensor) -> int:
        known = self._known.get(id(tensor))
        if known is not None:
            return known[1]
        index = len(self.tensors)
        self._known[id(tensor)] = (tensor, index)
        data = tensor.detach().contiguous()
        nbytes = data.numel() * data.element_size()
        self.tensors.append(
            {
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "offset": self._offset,
                "nbytes": nbytes,
            }
        )
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
