"""What a program brought home, as plain data that two runs of it can be compared on.

Values keep their types: a tensor is its class, dtype, shape, device type and bytes; a finished
request its prompt and completions, without what differs from run to run (ids, times); a cache its
entries by path; an instance of a class that came from a notebook its class's name and fields.

An exception is one text, ``<Type>: <message>``, of which the first line is compared. The stock
served client raises ``RuntimeError("<Type>: <message>...")`` for whatever went wrong in the engine,
and this package's own client a RuntimeError of the same text that is of the original type as well,
while a local engine raises that for an error of a block and the original type for one of the build
or of vLLM's own checks, so the type raised is not part of what is compared.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch

_DEFERRED = re.compile(r"\w*(?:Error|Exception|Interrupt|Exit|Stop\w*): ")


@dataclasses.dataclass
class Tensor:
    """A tensor or an array; ``data`` is a plain tensor in host memory."""

    kind: str
    dtype: str
    shape: tuple[int, ...]
    device: str
    requires_grad: bool
    data: torch.Tensor


@dataclasses.dataclass
class Record:
    """An object: its class's name, and its parts by name or position."""

    kind: str
    parts: dict[Any, Any]


def outcome(run: Callable[[], dict[str, Any]]) -> Any:
    """What ``run`` returns or raises, as plain data."""
    try:
        return canonical(run())
    except Exception as error:
        return Record("raised", {"text": first_line(error)})


def first_line(error: BaseException) -> str:
    """``<Type>: <message>`` of an error or of the error that it carries, its first line."""
    text = str(error)
    if not isinstance(error, RuntimeError) or not _DEFERRED.match(text):
        text = f"{type(error).__name__}: {text}"
    return text.split("\n")[0]


def canonical(value: Any) -> Any:
    """``value`` as plain data."""
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, (numpy.ndarray, numpy.generic)):
        return _array(value)
    kind = type(value).__name__
    if isinstance(value, dict):
        return Record(kind, {_key(key): canonical(item) for key, item in value.items()})
    if isinstance(value, (set, frozenset)):
        return Record(kind, {repr(item): canonical(item) for item in value})
    if isinstance(value, (list, tuple)):
        return Record(kind, {index: canonical(item) for index, item in enumerate(value)})
    return _object(kind, value)


def _key(key: Any) -> Any:
    return key if isinstance(key, (str, int)) else repr(key)


def _tensor(value: torch.Tensor) -> Tensor:
    data = value.detach().to("cpu").contiguous().clone()
    return Tensor(
        type(value).__name__,
        str(value.dtype),
        tuple(value.shape),
        value.device.type,
        value.requires_grad,
        data,
    )


def _array(value: Any) -> Tensor:
    data = torch.from_numpy(numpy.array(value))
    return Tensor(type(value).__name__, str(value.dtype), tuple(value.shape), "numpy", False, data)


_REQUEST = ("prompt", "prompt_token_ids", "finished", "outputs", "saves")
_COMPLETION = (
    "index",
    "text",
    "token_ids",
    "finish_reason",
    "stop_reason",
    "logprobs",
    "cumulative_logprob",
    "saves",
)


def _object(kind: str, value: Any) -> Any:
    if kind == "RequestOutput":
        return _attributes(kind, value, _REQUEST)
    if kind == "CompletionOutput":
        return _attributes(kind, value, _COMPLETION)
    if kind == "CacheView":
        return Record(kind, {path: canonical(list(e)) for path, e in value._cache.entries.items()})
    if isinstance(value, torch.nn.Module):
        return Record(kind, {name: canonical(p) for name, p in value.state_dict().items()})
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return _attributes(kind, value, names)
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value)
    return Record(kind, {name: canonical(part) for name, part in vars(value).items()})


def _attributes(kind: str, value: Any, names: Any) -> Record:
    return Record(
        kind, {name: _part(name, getattr(value, name)) for name in names if hasattr(value, name)}
    )


def _part(name: str, value: Any) -> Any:
    # nnsight gathers saves from a set of names, whose order is another one in every process.
    return canonical(dict(sorted(value.items())) if name == "saves" else value)


def differences(
    expected: Any, found: Any, tolerance: float | None, path: str = ""
) -> Iterator[str]:
    """Where ``found`` is not what is expected, one line each.

    Parameters
    ----------
    tolerance
        None for bitwise. Otherwise the largest norm of the difference of two floating-point
        tensors, as a share of the norm of the expected one; for a lone number, as a share of it.
    """
    if type(expected) is not type(found):
        yield f"{path}: {_brief(expected)} became {_brief(found)}"
    elif isinstance(expected, Record):
        yield from _record_differences(expected, found, tolerance, path)
    elif isinstance(expected, Tensor):
        yield from _tensor_differences(expected, found, tolerance, path)
    elif isinstance(expected, float) and tolerance is not None:
        if not math.isclose(expected, found, rel_tol=tolerance, abs_tol=tolerance):
            yield f"{path}: {expected} became {found}"
    elif expected != found and not (expected != expected and found != found):
        yield f"{path}: {expected!r} became {found!r}"


def _record_differences(
    expected: Record, found: Record, tolerance: float | None, path: str
) -> Iterator[str]:
    if expected.kind != found.kind:
        yield f"{path}: {expected.kind} became {found.kind}"
        return
    if list(expected.parts) != list(found.parts):
        yield f"{path}: parts {list(expected.parts)} became {list(found.parts)}"
        return
    for name, part in expected.parts.items():
        yield from differences(part, found.parts[name], tolerance, f"{path}.{name}".lstrip("."))


def _tensor_differences(
    expected: Tensor, found: Tensor, tolerance: float | None, path: str
) -> Iterator[str]:
    for name in ("kind", "dtype", "shape", "device", "requires_grad"):
        if getattr(expected, name) != getattr(found, name):
            yield f"{path}: {name} {getattr(expected, name)} became {getattr(found, name)}"
            return
    one, other = expected.data, found.data
    if tolerance is None or not one.dtype.is_floating_point:
        if _bytes(one) != _bytes(other):
            yield f"{path}: values differ ({describe_distance(one, other)})"
    elif distance(one, other) > tolerance:
        yield f"{path}: values differ ({describe_distance(one, other)}), tolerance {tolerance}"


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def distance(expected: torch.Tensor, found: torch.Tensor) -> float:
    """The norm of the difference as a share of the norm of what is expected."""
    if torch.equal(expected, found):
        return 0.0
    one, other = expected.double(), found.double()
    return float((one - other).norm() / one.norm().clamp_min(1e-12))


def describe_distance(expected: torch.Tensor, found: torch.Tensor) -> str:
    """The distance in words, for a failure's message."""
    if not expected.dtype.is_floating_point:
        return f"{expected.flatten()[:8].tolist()} and {found.flatten()[:8].tolist()}"
    return f"relative distance {distance(expected, found):.3g}"


def _brief(value: Any) -> str:
    if isinstance(value, Record):
        if value.kind == "raised":
            return f"raised {value.parts['text']!r}"
        return f"{value.kind}({', '.join(map(str, list(value.parts)[:6]))})"
    if isinstance(value, Tensor):
        return f"{value.kind}{value.shape} {value.dtype}"
    return repr(value)
