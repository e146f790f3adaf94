"""Results in the form that needs no unpickling: what is written is what was saved."""

from __future__ import annotations

import json
import math
import pickle
from collections import OrderedDict
from typing import Any

import numpy
import pytest
import torch
from canonical import canonical, differences
from nnsight.intervention.cache import Cache, CacheView, Entry
from vllm import SamplingParams
from vllm.logprobs import FlatLogprobs, Logprob
from vllm.lora.request import LoRARequest

from jupyter_nnsight_serve.client.wire import ResultDecoder
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


def home(allow_pickle: bool = False, **saves: Any) -> dict[str, Any]:
    """The saves as this package's client has them, by default without any pickle."""
    decoder = ResultDecoder(allow_pickle)
    for part in Encoder().parts(Outcome(saves=saves)):
        decoder.feed(memoryview(part))
    outcome = decoder.outcome()
    assert not outcome.undecoded, outcome.undecoded
    return outcome.saves


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
        "m": {"int": hex(2**70)},
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


@pytest.mark.parametrize(
    "value",
    [
        frozenset({1, 2}),
        complex(1, math.inf),
        -(10**5000),
        torch.device("cuda", 1),
        torch.arange(9.0).topk(2),
        torch.tensor([[3.0, 1.0]]).max(-1),
        numpy.arange(6, dtype=numpy.int16).reshape(2, 3).T,
        numpy.array(2.5),
        numpy.float32(1.5),
        numpy.bool_(True),
        numpy.zeros((0, 3)),
        numpy.broadcast_to(numpy.ones(2), (3, 2)),
        [(), {}, set(), [[]], {"a": (1, {2.5})}],
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_come_home_as_they_were_without_a_pickle(value: Any) -> None:
    found = home(x=value)["x"]
    assert type(found) is type(value)
    if isinstance(value, (complex, torch.device)):
        assert found == value
    else:
        assert not list(differences(canonical(value), canonical(found), None))


def test_text_and_numbers_of_a_type_of_their_own_keep_it() -> None:
    class Name(str):
        pass

    class Numbers(dict):  # type: ignore[type-arg]
        pass

    header, _ = encode(a=Name("x"), b=Numbers(), c=numpy.array(["z", 1], dtype=object))
    assert header["saves"] == {"a": {"pickle": 0}, "b": {"pickle": 1}, "c": {"pickle": 2}}


@pytest.mark.parametrize(
    "value",
    [
        numpy.str_("ä b"),
        numpy.array(["a", "", "äöü"]),
        numpy.array([["a", "bcd"]])[:, ::-1],
        numpy.array([b"a", b"bc"]),
        numpy.array([1.0, -2.5], dtype=">f4"),
        numpy.array([1], dtype=">i8")[0],
        numpy.array("2024-02-03", dtype="M8[D]"),
        numpy.timedelta64(3, "s"),
        numpy.longdouble(1) / 3,
        numpy.array(
            [(1, [2.0, 3.0], ("x",))], dtype=[("a", "i4"), ("b", ">f8", 2), ("c", [("d", "U3")])]
        ),
        numpy.zeros((0, 3), dtype="U2"),
        numpy.zeros(2, dtype={"names": ["a", "b"], "formats": ["i4", "i4"], "offsets": [0, 12]}),
    ],
    ids=lambda value: str(value.dtype)[:20],
)
def test_arrays_of_what_torch_does_not_have_need_no_pickle(value: Any) -> None:
    found, again = home(x=(value, value))["x"]
    assert type(found) is type(value) and found.dtype == value.dtype
    assert found.shape == value.shape and found.tobytes() == value.tobytes()
    if isinstance(found, numpy.ndarray):
        assert found is again and found.flags.writeable


def test_ordered_dicts_and_bytes_that_change_need_no_pickle() -> None:
    ordered: Any = OrderedDict(b=torch.ones(2), a=1)
    ordered["itself"] = ordered
    buffer = bytearray(b"\0\xff")
    state = torch.nn.BatchNorm1d(2).state_dict()
    found = home(x=(ordered, buffer, buffer), y=state)
    (kept, one, other), again = found["x"], found["y"]
    assert type(kept) is OrderedDict and list(kept) == ["b", "a", "itself"]
    assert kept["itself"] is kept and torch.equal(kept["b"], torch.ones(2))
    assert type(one) is bytearray and one == buffer and one is other
    assert again._metadata == state._metadata and list(again) == list(state)
    assert not list(differences(canonical(dict(state)), canonical(dict(again)), None))


def test_what_is_one_object_stays_one() -> None:
    row = [1]
    twice = [row, {"again": row}, (row,)]
    twice.append(twice)
    array = numpy.ones(3)
    found = home(x=twice, y=(array, array))
    (a, again, (b,), itself), (one, other) = found["x"], found["y"]
    assert a is again["again"] is b and a == [1] and itself is found["x"]
    assert one is other and isinstance(one, numpy.ndarray)
    many = [0]
    for _ in range(60):
        many = [many, many]
    assert len(json.dumps(encode(x=many)[0])) < 10_000
    around: Any = ([],)
    around[0].append(around)
    found = home(allow_pickle=True, x=around, y=row)
    assert found["x"][0][0] is found["x"] and found["y"] == [1]


def test_parameters_and_gradients() -> None:
    torch.manual_seed(1)
    probe = torch.nn.Linear(2, 1)
    probe.bias.requires_grad_(False)
    leaf = torch.ones(2, requires_grad=True)
    found = home(allow_pickle=True, w=probe.weight, b=probe.bias, l=leaf, m=leaf * 2, probe=probe)
    for name, kind, wanted in (
        ("w", torch.nn.Parameter, True),
        ("b", torch.nn.Parameter, False),
        ("l", torch.Tensor, True),
        ("m", torch.Tensor, True),
    ):
        assert type(found[name]) is kind and found[name].requires_grad is wanted
    again = found["probe"]
    assert [type(p) for p in again.parameters()] == [torch.nn.Parameter] * 2
    assert again.weight is found["w"] and torch.equal(again(leaf), probe(leaf))
    again(leaf).sum().backward()
    assert again.weight.grad is not None and again.bias.grad is None


def test_a_cache_comes_home_whole() -> None:
    cache = Cache(None, modules=["model.layers.1"], dtype=torch.float32, include_inputs=True)
    cache.entries["model.layers.1"] = [
        Entry((torch.ones(2), None), ((torch.zeros(1),), {"k": 3})),
        Entry(None, ((torch.nn.Linear(2, 2),), {})),
    ]
    found = home(x=CacheView(cache, None), y=CacheView(cache, None, "model.layers.1"))
    cache.entries["model.layers.1"].pop()
    found["x"]._cache.entries["model.layers.1"].pop()
    assert not list(differences(canonical(CacheView(cache, None)), canonical(found["x"]), None))
    assert found["y"].output[0][0].tolist() == [1, 1] and len(found["y"]) == 2
    assert "Linear" in found["y"].input[1].why
    kept = found["x"]._cache
    assert kept.targets == {"model.layers.1"} and kept.dtype is torch.float32
    assert kept.device == torch.device("cpu") and kept.include_inputs and kept.model is None


def test_records_of_vllm_come_home_by_their_parts() -> None:
    flat = FlatLogprobs()
    flat.append({5: Logprob(-0.5, 1, "a"), 6: Logprob(-1.5, 2, None)})
    found = home(
        flat=flat,
        lora=LoRARequest("a", 1, "/a"),
        params=SamplingParams(temperature=0.5, stop=["x"]),
        allow_pickle=True,
    )
    assert found["flat"][0][6].logprob == -1.5 and found["flat"][0][5].decoded_token == "a"
    assert found["lora"].lora_path == "/a" and found["lora"].lora_int_id == 1
    assert found["params"].temperature == 0.5 and found["params"].stop == ["x"]
