"""Results in the form that needs no unpickling: what is written is what was saved."""

from __future__ import annotations

import json
import math
import pickle
from typing import Any

import pytest
import torch

from jupyter_nnsight_serve.engine.raw import ALIGNMENT, MAGIC, Encoder
from jupyter_nnsight_serve.engine.run import Outcome


def encode(**saves: Any) -> tuple[dict[str, Any], bytes]:
    """The header and the data of encoded saves."""
    block = b"".join(bytes(part) for part in Encoder().parts(Outcome(saves=saves)))
    assert block[:8] == MAGIC
    length = int.from_bytes(block[8:16], "little")
    start = 16 + length
    start += -start % ALIGNMENT
    return json.loads(block[16 : 16 + length]), block[start:]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6, dtype=torch.float32).reshape(2, 3),
        torch.arange(6).reshape(2, 3).t(),
        torch.ones(3, 5, dtype=torch.bfloat16)[1:, ::2],
        torch.tensor(2.5, dtype=torch.float64),
        torch.zeros(0, 4),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]),
        torch.ones(4, dtype=torch.float8_e4m3fn),
        torch.nn.Parameter(torch.ones(2)),
    ],
)
def test_tensors_are_their_elements(tensor: torch.Tensor) -> None:
    header, data = encode(x=tensor)
    assert header["saves"] == {"x": {"tensor": 0}}
    (one,) = header["tensors"]
    assert one["offset"] % ALIGNMENT == 0
    assert one["shape"] == list(tensor.shape)
    dtype = getattr(torch, one["dtype"])
    assert dtype == tensor.dtype
    piece = data[one["offset"] : one["offset"] + one["nbytes"]]
    assert one["nbytes"] == tensor.numel() * tensor.element_size()
    if piece:
        back = torch.frombuffer(bytearray(piece), dtype=dtype).reshape(one["shape"])
        assert (
            torch.equal(back.view(torch.uint8), tensor.detach().contiguous().view(torch.uint8))
            if (tensor.ndim)
            else back == tensor
        )


def test_plain_values_are_tagged_json() -> None:
    header, _ = encode(
        a=None, b=True, c=3, d=1.5, e="é", f=[1, (2, {"k": 3})], g=float("nan"), h=b"\x00",
        i=torch.Size([2, 3]), j=torch.bfloat16, k={1: "x"}, l=-math.inf, m=2**70,
    )  # fmt: skip
    assert header["saves"] == {
        "a": None,
        "b": True,
        "c": 3,
        "d": 1.5,
        "e": "é",
        "f": {"list": [1, {"tuple": [2, {"dict": [["k", 3]]}]}]},
        "g": {"float": "nan"},
        "h": {"bytes": "AA=="},
        "i": {"size": [2, 3]},
        "j": {"dtype": "bfloat16"},
        "k": {"dict": [[1, "x"]]},
        "l": {"float": "-inf"},
        "m": 2**70,
    }
    assert header["pickles"] == []


def test_one_tensor_under_two_names_is_sent_once() -> None:
    tensor = torch.ones(1000)
    header, data = encode(a=tensor, b=[tensor])
    assert len(header["tensors"]) == 1
    assert header["saves"]["b"] == {"list": [{"tensor": 0}]}
    assert len(data) < 4100


class Odd:
    """An object that JSON has no form for."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def test_what_json_cannot_hold_is_pickled_with_its_tensors_outside() -> None:
    header, data = encode(x=Odd(torch.arange(100_000, dtype=torch.float32)))
    assert header["saves"] == {"x": {"pickle": 0}}
    (one,) = header["pickles"]
    assert one["nbytes"] < 1000
    (tensor,) = header["tensors"]

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: Any) -> Any:
            assert pid == ("tensor", 0)
            piece = data[tensor["offset"] : tensor["offset"] + tensor["nbytes"]]
            return torch.frombuffer(bytearray(piece), dtype=torch.float32)

    import io

    piece = data[one["offset"] : one["offset"] + one["nbytes"]]
    back = Unpickler(io.BytesIO(piece)).load()
    assert torch.equal(back.tensor, torch.arange(100_000, dtype=torch.float32))
