"""A trace on a served model: what is sent, what comes home, and how it fails."""

from __future__ import annotations

import asyncio
import gc
import pickle
import platform
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from fake_server import (
    TOKEN,
    FakeServer,
    Raw,
    Rec,
    error_of,
    forever,
    frame,
    problem,
    result,
    state,
)
from nnsight.intervention.envoy import Envoy
from nnsight.intervention.serialization import loads
from nnsight.modeling.vllm.tracer import VLLMTracer
from nnsight.tracing.tracer import WithBlockNotFoundError

from jupyter_nnsight_serve import connect
from jupyter_nnsight_serve.client import HubError, LoRARequest, ServedTraceError, TraceCut
from jupyter_nnsight_serve.client.errors import PickledSaveError, UnsendableError


def answering(server: FakeServer, saves: dict[str, Any] | None = None, **header: Any) -> None:
    server.answer = lambda seen: iter(result(saves, **header))


def persistent(model: Any) -> dict[str, Any]:
    return {"Tokenizer": "the tokenizer"} | {
        f"Envoy:{envoy.path}": envoy for envoy in model.modules()
    }


def test_saves_come_home_in_their_own_types(server: FakeServer, model: Any) -> None:
    values = {
        "bf16": torch.randn(7, 64).bfloat16(),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4, dtype=torch.int64),
        "flags": torch.tensor([True, False]),
        "f8": torch.randn(5).to(torch.float8_e4m3fn),
        "complex": torch.randn(3, dtype=torch.complex64),
        "many": [1, 2.5, None, ("a", {"k": [torch.ones(2)]}), {3}, True],
        "size": torch.Size((1, 2)),
        "dtype": torch.float16,
        "nan": float("nan"),
        "big": 2**80,
        "bytes": b"\0\1",
    }
    for part in (1, 7, 10**6):
        server.answer = lambda seen, part=part: iter(result(values, part=part))
        with model.trace("hello", max_tokens=1):
            bf16 = model.logits.save()
        scope = dict(locals())
        for name, value in values.items():
            found = scope[name]
            assert type(found) is type(value), name
            if isinstance(value, torch.Tensor):
                assert found.dtype == value.dtype and found.shape == value.shape
                assert found.device.type == "cpu"
                assert torch.equal(
                    found.reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)
                )
        assert torch.equal(scope["many"][3][1]["k"][0], torch.ones(2))
        assert scope["nan"] != scope["nan"] and scope["big"] == 2**80
    assert bf16.float().numpy().shape == (7, 64)
    with pytest.raises(TypeError):
        bf16.numpy()
    bf16.add_(1)
    bf16.resize_(100, 100)


def test_a_trace_is_small_and_is_nnsights_own_on_the_other_side(
    server: FakeServer, model: Any
) -> None:
    layers = model.model.layers
    with model.trace("hello", max_tokens=1, temperature=0.0) as tracer:
        hidden = layers[2].output[0].clone().save()
        logits = model.logits.save()
        out = tracer.result.save()
    (seen,) = server.traces()
    assert len(seen.body) < 1100
    assert TOKEN.encode() not in seen.body
    assert seen.headers["Nnsight-Tree"] == model.tree_id
    assert seen.headers["Content-Length"] == str(len(seen.body))
    assert "Nnsight-Tokens" not in seen.headers
    found, (source, _, variables) = loads(seen.body, persistent(model))
    assert type(found) is VLLMTracer
    assert found.envoy is model and found.args == ("hello",)
    assert found.kwargs == {"max_tokens": 1, "temperature": 0.0}
    assert found.fn == model._call
    assert variables["layers"] is layers and variables["tracer"] is found
    assert "layers[2].output[0]" in source


def test_a_view_of_a_large_tensor_travels_as_its_own_elements(
    server: FakeServer, model: Any
) -> None:
    large = torch.randn(1000, 1000)
    row = large[3]
    weight = torch.nn.Parameter(torch.randn(4, 4))
    derived = weight * 2
    with model.trace("hello"):
        x = (row.sum() + weight.sum() + derived.sum()).save()
    body = server.traces()[0].body
    assert len(body) < 12_000
    _, (_, _, variables) = loads(body, persistent(model))
    assert torch.equal(variables["row"], row)
    assert isinstance(variables["weight"], torch.nn.Parameter)
    assert variables["derived"].requires_grad and torch.equal(variables["derived"], derived)
    assert row.untyped_storage().nbytes() == 4_000_000


def test_a_module_of_the_notebook_travels_and_stays_as_it_is(
    server: FakeServer, model: Any
) -> None:
    probe = torch.nn.Linear(64, 1)
    with model.trace("hello"):
        score = probe(model.model.layers[1].output[0].float()).save()
    _, (_, _, variables) = loads(server.traces()[0].body, persistent(model))
    assert torch.equal(variables["probe"].weight, probe.weight)
    assert probe.weight.device.type == "cpu" and probe.weight.requires_grad


def test_what_cannot_be_sent_is_named_and_what_is_not_read_does_not_matter(
    server: FakeServer, model: Any
) -> None:
    lock = threading.Lock()
    with model.trace("hello"):
        x = model.logits.save()
    with pytest.raises(UnsendableError, match="`lock`.*cannot be sent") as caught:
        with model.trace("hello"):
            lock.acquire()
    assert len(server.traces()) == 1
    assert caught.traceback[-1].path == Path(__file__)


def test_the_hub_does_not_travel_with_its_token(server: FakeServer, hub: Any, model: Any) -> None:
    with pytest.raises(UnsendableError, match="`hub`"):
        with model.trace("hello"):
            hub.status()
    with pytest.raises(TypeError):
        pickle.dumps(hub)
    assert not server.traces()


def test_invokes_prompts_of_every_kind_and_settings(server: FakeServer, model: Any) -> None:
    tokens = model.tokenizer("The Eiffel Tower", return_tensors="pt")
    prompts = [[2, 3, 4], {"prompt_token_ids": [2, 3]}, tokens, {"input_ids": [[2, 3]]}]
    for prompt in prompts:
        with model.trace(prompt, max_new_tokens=3):
            x = model.logits.save()
    bodies = [loads(seen.body, persistent(model))[0] for seen in server.traces()]
    assert [body.kwargs for body in bodies] == [{"max_tokens": 3}] * 4
    assert bodies[0].args == ([2, 3, 4],) and bodies[1].args == ({"prompt_token_ids": [2, 3]},)
    assert type(bodies[2].args[0]) is dict
    assert bodies[2].args[0]["input_ids"].tolist() == [[2, 3, 4]]
    with model.trace(temperature=0.0) as tracer:
        with tracer.invoke("a", edits=["steer"]):
            a = model.logits.save()
        with tracer.invoke("b"):
            for _ in tracer.iter[:2]:
                b = model.logits.save()
            tracer.stop()
    source = loads(server.traces()[-1].body, persistent(model))[1][0]
    assert source.count("tracer.invoke") == 2


def test_a_tokenizer_captured_in_a_block_is_the_servers(server: FakeServer, model: Any) -> None:
    tokenizer = model.tokenizer
    with model.trace("hello"):
        text = tokenizer.decode([1]).save()
    variables = loads(server.traces()[0].body, persistent(model))[1][2]
    assert variables["tokenizer"] == "the tokenizer"


def test_an_adapter_travels_as_plain_data(server: FakeServer, model: Any) -> None:
    one = {"lora_name": "one", "lora_int_id": 3, "lora_path": "/adapters/one"}
    request = LoRARequest("one", 3, "/adapters/one")
    for given in ("/adapters/one", one, request):
        with model.trace("hello", lora_request=given, max_tokens=1):
            x = model.logits.save()
    with model.trace(max_tokens=1) as tracer:
        with tracer.invoke("hello", lora_request=request):
            x = model.logits.save()
    bodies = [loads(seen.body, persistent(model)) for seen in server.traces()]
    assert [body[0].kwargs["lora_request"] for body in bodies[:3]] == ["/adapters/one", one, one]
    assert bodies[3][1][2]["request"] == one and type(bodies[3][1][2]["request"]) is dict


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_new_token": 5}, "max_new_token.*\n.*did you mean max_new_tokens"),
        ({"temprature": 0.0}, "temprature.*\n.*temperature"),
        ({"scan": True}, "scan.*\n.*no forward pass"),
        ({"validate": True}, "validate"),
        ({"remote": True}, "remote.*\n.*NDIF"),
    ],
)
def test_wrong_arguments_are_named_before_anything_is_sent(
    server: FakeServer, model: Any, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        with model.trace("hello", **arguments):
            x = model.logits.save()
    with pytest.raises(TypeError, match=next(iter(arguments))):
        with model.trace(**arguments) as tracer:
            with tracer.invoke("hello"):
                x = model.logits.save()
    assert not server.traces()


def test_settings_of_a_newer_vllm_pass_unless_the_server_lists_its_own(
    server: FakeServer, model: Any
) -> None:
    with model.trace("hello", entirely_new=5):
        x = model.logits.save()
    server.extra = {"config": {"sampling": ["max_tokens"]}}
    other = connect(server.url, TOKEN).model
    with pytest.raises(TypeError, match="entirely_new"):
        with other.trace("hello", entirely_new=5):
            x = other.logits.save()


def test_a_parser_that_fails_for_no_reason_is_asked_again(
    server: FakeServer, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ast

    answering(server, {"x": 1})
    parse, failures = ast.parse, iter(range(2))

    def failing(*arguments: Any, **options: Any) -> Any:
        if next(failures, None) is not None:
            raise SystemError("AST constructor recursion depth mismatch (before=129, after=29)")
        return parse(*arguments, **options)

    monkeypatch.setattr(ast, "parse", failing)
    with model.trace("a"):
        x = model.logits.save()
    assert x == 1 and next(failures, None) is None


def test_nothing_ever_starts_a_local_engine(server: FakeServer, model: Any) -> None:
    outcome = Rec("RequestOutput", {"prompt": "a", "outputs": [], "saves": {"n": 3}})
    answering(server, {"outputs": outcome})
    (output,) = model.generate("a", max_tokens=2)
    assert output.prompt == "a" and output.saves == {"n": 3}
    answering(server, {"outputs": [outcome, outcome]})
    assert len(model.generate(["a", "b"], max_tokens=2)) == 2
    assert model.generate([]) == []
    for call in (model.dispatch, lambda: model("a"), lambda: model.interleave("__call__", "a")):
        with pytest.raises(NotImplementedError, match="runs on its server"):
            call()
    with pytest.raises(NotImplementedError):
        model.scan("a")
    with model.generate("a", max_tokens=1) as tracer:
        x = tracer.result.save()
    assert len(server.traces()) == 3


def test_a_result_has_vllms_attributes_without_vllm(server: FakeServer, model: Any) -> None:
    completion = Rec(
        "CompletionOutput",
        {
            "index": 0,
            "text": " Paris",
            "token_ids": [5],
            "finish_reason": "length",
            "logprobs": [{5: Rec("Logprob", {"logprob": -0.5, "rank": 1, "decoded_token": "P"})}],
            "lora_request": Rec(
                "LoRARequest", {"lora_name": "a", "lora_int_id": 1, "lora_path": "/a", "more": 2}
            ),
            "new_field": 1,
            "odd_field": Raw(b"cvllm.something\nThing\n."),
            "future": Rec("Future", {"x": 1}),
        },
    )
    output = Rec(
        "RequestOutput",
        {"prompt": "a", "prompt_token_ids": [1, 2], "outputs": [completion], "finished": True},
    )
    answering(server, {"r": output})
    with model.trace("a") as tracer:
        r = tracer.result.save()
    assert type(r).__name__ == "RequestOutput" and r.prompt_token_ids == [1, 2] and r.finished
    first = r.outputs[0]
    assert (first.text, first.token_ids, first.finish_reason) == (" Paris", [5], "length")
    assert first.logprobs[0][5].logprob == -0.5 and first.new_field == 1
    assert first.lora_request == LoRARequest("a", 1, "/a") and first.lora_request.more == 2
    assert pickle.loads(pickle.dumps(r)) == r
    assert "vllm" in first.odd_field.why and repr(first.future) == "Future(x=1)"
    flat = {
        "start_indices": [0, 2],
        "end_indices": [2, 3],
        "token_ids": [5, 6, 7],
        "logprobs": [-0.5, -1.0, -0.1],
        "ranks": [1, 2, 1],
        "decoded_tokens": ["P", "Q", "R"],
    }
    answering(server, {"r": Rec("FlatLogprobs", flat)})
    with model.trace("a") as tracer:
        r = tracer.result.save()
    assert len(r) == 2 and [sorted(position) for position in r] == [[5, 6], [7]]
    assert r[0][6].logprob == -1.0 and r[-1][7].decoded_token == "R" and len(r[:1]) == 1


@dataclass
class Result:
    """A class of the notebook."""

    score: float
    tensor: Any


def test_pickles_are_opened_only_if_allowed(server: FakeServer, model: Any) -> None:
    value = Result(1.5, torch.arange(3))
    answering(server, {"r": value, "ok": 3})
    with model.trace("a"):
        r = ok = model.logits.save()
    assert isinstance(r, Result) and torch.equal(r.tensor, torch.arange(3)) and ok == 3
    strict = connect(server.url, TOKEN, allow_pickle=False).model
    ok = None
    with pytest.raises(PickledSaveError, match="`r` came as a pickle"):
        with strict.trace("a"):
            r = ok = strict.logits.save()
    assert ok == 3


def test_a_class_of_the_notebook_is_the_same_class_when_it_comes_back(
    server: FakeServer, model: Any
) -> None:
    kind = type("Made", (), {"__module__": "__main__", "value": 1})
    there = f"import cloudpickle, sys; o = cloudpickle.loads({cloudpickle.dumps(kind())!r}); " + (
        "o.x = 5; sys.stdout.buffer.write(cloudpickle.dumps(o))"
    )
    back = subprocess.run([sys.executable, "-c", there], capture_output=True, check=True).stdout
    answering(server, {"made": Raw(back)})
    with model.trace("a"):
        made = model.logits.save()
    assert isinstance(made, kind) and made.x == 5


THERE = """
import sys, cloudpickle
from cloudpickle.cloudpickle import _lookup_class_or_track
names = {"__name__": "__main__"}
exec(sys.argv[1], names)
for name, identity in zip(sys.argv[3::2], sys.argv[4::2]):
    _lookup_class_or_track(identity, names[name])
sys.stdout.buffer.write(cloudpickle.dumps(eval(sys.argv[2], names)))
"""
CLASSES = """
import enum
SCALE = 1
class Scored:
    seen = []
    def __init__(self, x): self.x = x
    def show(self): return self.x * SCALE
class Colour(enum.Enum):
    RED = 1
    def shown(self): return self.name
"""


def from_the_server(made: str, **known: str) -> Raw:
    """What a server pickles of classes that it got under the ids ``known``, or has of its own."""
    words = [word for pair in known.items() for word in pair]
    command = [sys.executable, "-c", THERE, CLASSES, made, *words]
    return Raw(subprocess.run(command, capture_output=True, check=True).stdout)


def notebook() -> dict[str, Any]:
    """The names of a notebook that has the classes, and the ids they were sent under."""
    from cloudpickle.cloudpickle import _get_or_create_tracker_id

    names: dict[str, Any] = {"__name__": "__main__"}
    exec(CLASSES, names)
    names["ids"] = {name: _get_or_create_tracker_id(names[name]) for name in ("Scored", "Colour")}
    return names


OTHER_PYTHON = "3.99.1"


@pytest.mark.parametrize("python", [None, platform.python_version(), OTHER_PYTHON])
def test_a_class_of_the_notebook_is_left_as_it_is(
    server: FakeServer, model: Any, python: str | None
) -> None:
    names = notebook()
    kind, colour = names["Scored"], names["Colour"]
    before, seen = dict(vars(kind)), kind.seen
    there = from_the_server("[Scored(3), Colour.RED, {'again': Scored(4)}]", **names["ids"])
    answering(server, {"made": there}, python=python)
    with model.trace("a"):
        made = model.logits.save()
    assert type(made[0]) is kind and made[1] is colour.RED and type(made[2]["again"]) is kind
    assert kind.seen is seen and dict(vars(kind)) == before
    names["SCALE"] = 10
    assert made[0].show() == 30 and colour.RED.shown() == "RED"


def test_a_class_of_the_server_is_the_same_at_each_trace(server: FakeServer, model: Any) -> None:
    answering(server, {"made": from_the_server("Scored(3)", Scored="4" * 32)})
    kinds = []
    for _ in range(2):
        with model.trace("a"):
            made = model.logits.save()
        assert made.show() == 3
        kinds.append(type(made))
    assert kinds[0] is kinds[1]


@pytest.mark.parametrize(
    ("made", "what"),
    [
        ("Scored(3)", "the class Scored"),
        ("[Scored, Colour.RED]", "the class Scored and the class Colour"),
        ("lambda: 1", "the function <lambda>"),
        ("Scored(3).show", "the function Scored.show and the class Scored"),
    ],
)
def test_code_of_another_python_is_refused_by_name(
    server: FakeServer, model: Any, made: str, what: str
) -> None:
    answering(server, {"odd": from_the_server(made), "fine": 1}, python=OTHER_PYTHON)
    for _ in range(2):
        with pytest.raises(PickledSaveError) as caught:
            with model.trace("a"):
                odd = fine = model.logits.save()
    text = str(caught.value)
    assert f"`odd` holds {what}, whose code" in text and fine == 1
    assert f"Python {OTHER_PYTHON}" in text and f"Python {platform.python_version()}" in text


def test_a_save_of_a_module_that_is_not_here_is_named(server: FakeServer, model: Any) -> None:
    answering(server, {"odd": Raw(b"cvllm.something\nThing\n."), "fine": 1})
    with pytest.raises(PickledSaveError, match="`odd` needs the module 'vllm'"):
        with model.trace("a"):
            odd = fine = model.logits.save()
    assert fine == 1


def test_a_cache_needs_no_pickle_and_is_navigated_like_the_model(server: FakeServer) -> None:
    from nnsight.intervention.cache import Cache, CacheView, Entry

    cache = Cache(None, include_inputs=True)
    cache.entries["model.model.layers.1"] = [Entry(torch.ones(2), ((torch.zeros(1),), {"k": 3}))]
    view, lower = CacheView(cache, None), CacheView(cache, None, "model.model")
    answering(server, {"cache": view, "several": [view, lower]})
    model = connect(server.url, TOKEN, allow_pickle=False).model
    with model.trace("a") as tracer:
        cache = several = tracer.cache()
    for found in (cache, several[0]):
        assert torch.equal(found["model.model.layers.1"].output, torch.ones(2))
        assert torch.equal(found.model.model.layers[1].output, torch.ones(2))
        assert torch.equal(found.model.model.layers[1].input, torch.zeros(1))
        assert found.model.model.layers[1].inputs[1] == {"k": 3} and found._cache.include_inputs
    assert torch.equal(several[1].layers[1].output, torch.ones(2))


def test_what_the_block_said_is_said_here(
    server: FakeServer, model: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    answering(server, {}, said=[["stdout", "shape (7, 64)\n"], ["stderr", "UserWarning: x\n"]])
    with model.trace("a"):
        print("never here")
    out, err = capsys.readouterr()
    assert out == "shape (7, 64)\n" and err == "UserWarning: x\n"


def test_an_error_has_its_type_its_line_and_no_frame_of_ours(
    server: FakeServer, model: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    line = sys._getframe().f_lineno + 10
    remote = f'  File "{__file__}", line {line}, in {sys._getframe().f_code.co_name}\n    h[:]\n'
    answering(
        server,
        {"kept": torch.ones(2)},
        error=error_of("IndexError", "too many indices", remote),
        said=[["stdout", "before\n"]],
    )
    with pytest.raises(IndexError) as caught:
        with model.trace("a"):
            wrong = kept = model.logits[:, -1, :].save()
    error = caught.value
    assert isinstance(error, RuntimeError) and isinstance(error, ServedTraceError)
    assert str(error) == "IndexError: too many indices"
    assert torch.equal(kept, torch.ones(2))
    shown = "".join(traceback.format_exception(error))
    assert error.__context__ is None or error.__suppress_context__
    assert "wrong = kept = model.logits[:, -1, :].save()" in shown
    files = [entry.filename for entry in traceback.extract_tb(error.__traceback__)]
    assert set(files) == {__file__}
    assert capsys.readouterr().out == "before\n"
    assert sys.gettrace() is None or "coverage" in repr(sys.gettrace())


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("KeyError", KeyError),
        ("OutOfOrderError", RuntimeError),
        ("StopIteration", RuntimeError),
        ("UnicodeDecodeError", ValueError),
        ("ModuleNotFoundError", ImportError),
        ("NameError", NameError),
        ("AttributeError", AttributeError),
        ("OSError", OSError),
        ("NotImplementedError", NotImplementedError),
        ("SystemExit", RuntimeError),
        ("MemoryError", MemoryError),
        ("ExceptionGroup", RuntimeError),
    ],
)
def test_errors_of_many_types(server: FakeServer, model: Any, name: str, kind: Any) -> None:
    answering(server, {}, error=error_of(name, "the message"))
    with pytest.raises(kind) as caught:
        with model.trace("a"):
            x = model.logits.save()
    assert isinstance(caught.value, ServedTraceError) and isinstance(caught.value, RuntimeError)
    assert not isinstance(caught.value, (StopIteration, SystemExit))
    assert str(caught.value) == f"{name}: the message"
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_stop_is_no_error(server: FakeServer, model: Any) -> None:
    answering(server, {"x": 1}, error=error_of("EarlyStopException", ""))
    with model.trace("a") as tracer:
        x = model.logits.save()
        tracer.stop()
    assert x == 1


def test_an_answer_that_is_cut_is_told_and_never_asked_again(
    server: FakeServer, model: Any
) -> None:
    whole = b"".join(result({"x": torch.ones(100)}))
    for cut in (0, 3, 40, len(whole) - 25, len(whole) - 3):
        server.answer = lambda seen, cut=cut: iter([state(state="running"), whole[:cut]])
        before = len(server.traces())
        with pytest.raises(TraceCut, match="may have run.*not sent again"):
            with model.trace("a"):
                x = model.logits.save()
        assert len(server.traces()) == before + 1


def test_silence_is_given_up_after_the_timeout(server: FakeServer) -> None:
    def silent(seen: Any) -> Any:
        yield state(state="running")
        time.sleep(2)

    server.answer = silent
    model = connect(server.url, TOKEN, timeout=0.3).model
    with pytest.raises(TraceCut, match="nothing was heard.*0.3 s"):
        with model.trace("a"):
            x = model.logits.save()
    assert len(server.traces()) == 1


def test_refusals_are_the_servers_own_sentences(server: FakeServer, model: Any) -> None:
    body = b'{"status": 504, "message": "ran too long", "reason": "", "detail": "ran too long"}'
    server.answer = lambda seen: iter([frame("E", body)])
    with pytest.raises(HubError, match="^ran too long$") as caught:
        with model.trace("a"):
            x = model.logits.save()
    assert caught.value.status == 504
    files = {entry.filename for entry in traceback.extract_tb(caught.value.__traceback__)}
    assert files == {__file__}
    sentence = "the server serves X, this trace was written for Y"
    server.replies[f"{server.base}/nnsight/generate"] = problem(409, sentence)
    with pytest.raises(HubError, match=f"^{sentence}$"):
        with model.trace("a"):
            x = model.logits.save()


def test_frames_of_a_kind_that_is_not_known_are_skipped(server: FakeServer, model: Any) -> None:
    server.answer = lambda seen: iter([frame("Q", b"x" * 70_000), *result({"x": 1})])
    with model.trace("a"):
        x = model.logits.save()
    assert x == 1


def test_nonsense_is_an_error_and_no_crash(server: FakeServer, model: Any) -> None:
    for pieces in ([b"<html>"], [frame("R", b"NNSERVE9" + bytes(60)), frame("Z")], [frame("Z")]):
        server.answer = lambda seen, pieces=pieces: iter(pieces)
        with pytest.raises(HubError):
            with model.trace("a"):
                x = model.logits.save()


def test_eight_threads(server: FakeServer, model: Any) -> None:
    def answer(seen: Any) -> Any:
        tracer = loads(seen.body, persistent(model))[0]
        time.sleep(0.05)
        yield from result({"x": torch.full((3,), tracer.args[0][0])})

    server.answer = answer

    def run(number: int) -> Any:
        with model.trace([number]):
            x = model.logits.save()
        return x

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(run, range(64)))
    assert [int(x[0]) for x in found] == list(range(64))


def test_a_session_passes_values_between_traces(server: FakeServer, model: Any) -> None:
    answering(server, {"x": torch.ones(2)})
    with model.session():
        with model.trace("a"):
            x = model.logits.save()
        y = (x * 2).save()
    assert torch.equal(y, torch.full((2,), 2.0))


def test_another_server_by_name(server: FakeServer, model: Any) -> None:
    other = FakeServer(base="").start()
    other.answer = lambda seen: iter(result({"x": 2}))
    try:
        with model.trace("a", serve=other.url, api_key=TOKEN):
            x = model.logits.save()
        assert x == 2 and not server.traces()
        answering(server, {"x": 1})
        with model.trace("a", serve=server.url + "/", api_key=TOKEN):
            x = model.logits.save()
        assert x == 1
    finally:
        other.stop()


# Interrupts, event loops, streams.

INTERRUPTED = """
    import sys, time
    sys.modules["vllm"] = None
    from jupyter_nnsight_serve import connect
    model = connect({url!r}, {token!r}).model
    print("ready", flush=True)
    try:
        with model.trace("a", max_tokens=500):
            x = model.logits.save()
    except KeyboardInterrupt as error:
        import traceback
        files = [entry.filename for entry in traceback.extract_tb(error.__traceback__)]
        print("interrupted", time.time(), files, flush=True)
    with model.trace("a", max_tokens=500):
        x = model.logits.save()
    print(x, flush=True)
"""


def test_an_interrupt_ends_the_trace_at_once(server: FakeServer, tmp_path: Path) -> None:
    program = tmp_path / "cell.py"
    program.write_text(textwrap.dedent(INTERRUPTED).format(url=server.url, token=TOKEN))
    server.answer = lambda seen: forever() if len(server.traces()) == 1 else iter(result({"x": 7}))
    process = subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    while not server.traces():
        time.sleep(0.05)
    time.sleep(0.5)
    sent = time.time()
    process.send_signal(signal.SIGINT)
    word, when, files = process.stdout.readline().split(maxsplit=2)
    assert word == "interrupted" and float(when) - sent < 1
    assert str(program) in files and "client" not in files
    assert server.gone.wait(2)
    assert process.stdout.readline() == "7\n"
    assert process.wait(20) == 0


def test_in_a_running_loop_and_awaited(server: FakeServer, model: Any) -> None:
    answering(server, {"x": torch.ones(2)}, said=[["stdout", "said\n"]])

    async def cell() -> Any:
        with model.trace("a"):
            x = model.logits.save()
        async with model.trace("a") as tracer:
            x = y = model.logits.save()
        return x

    assert torch.equal(asyncio.run(cell()), torch.ones(2))


def test_awaited_traces_run_side_by_side_and_leave_the_loop_free(
    server: FakeServer, model: Any
) -> None:
    def answer(seen: Any) -> Any:
        tracer = loads(seen.body, persistent(model))[0]
        time.sleep(0.5)
        yield from result({"x": tracer.args[0][0]})

    server.answer = answer

    async def one(number: int) -> Any:
        async with model.trace([number]):
            x = model.logits.save()
        return x

    async def main() -> Any:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.02)
                ticks += 1

        ticking = asyncio.ensure_future(tick())
        found = await asyncio.gather(*map(one, range(6)))
        ticking.cancel()
        return found, ticks

    began = time.monotonic()
    found, ticks = asyncio.run(main())
    assert found == list(range(6)) and ticks > 8
    assert time.monotonic() - began < 2.5


def test_an_awaited_error_and_a_cancelled_trace(server: FakeServer, model: Any) -> None:
    async def wrong() -> None:
        async with model.trace("a"):
            x = model.logits.save()

    answering(server, {}, error=error_of("IndexError", "too many"))
    with pytest.raises(IndexError) as caught:
        asyncio.run(wrong())
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert frames[-1].filename == __file__ and not any("nnsight" in f.filename for f in frames[-2:])

    server.answer = lambda seen: forever()

    async def cancelled() -> None:
        await asyncio.wait_for(wrong(), 0.5)

    began = time.monotonic()
    with pytest.raises(TimeoutError):
        asyncio.run(cancelled())
    assert time.monotonic() - began < 1.5 and server.gone.wait(2)


def tokens(seen: Any) -> Any:
    assert seen.headers["Nnsight-Tokens"] == "1"
    for text in (" in", " Paris"):
        yield frame("T", b'{"invoke": 0, "sequence": 0, "text": "%s"}' % text.encode())
        time.sleep(0.05)
    yield from result({"x": 5})


def test_text_as_it_is_generated(server: FakeServer, model: Any) -> None:
    server.answer = tokens

    async def cell() -> Any:
        with model.trace("a", stream=True) as tracer:
            x = model.logits.save()
        pieces = [str(token) async for token in tracer.backend]
        return pieces, x, tracer.backend.saves

    assert asyncio.run(cell()) == ([" in", " Paris"], 5, {"x": 5})
    with model.trace("a", stream=True) as tracer:
        x = model.logits.save()
    assert "".join(token.text for token in tracer.backend) == " in Paris" and x == 5
    with pytest.raises(RuntimeError, match="once"):
        list(tracer.backend)

    async def drained() -> Any:
        with model.trace("a", stream=True) as tracer:
            x = model.logits.save()
        return await tracer.backend

    assert asyncio.run(drained()) == {"x": 5}


def test_text_of_an_awaited_block(server: FakeServer, model: Any) -> None:
    server.answer = tokens

    async def cell() -> Any:
        async with model.trace("a", stream=True) as tracer:
            x = model.logits.save()
        pieces = [str(token) async for token in tracer.backend]
        async with model.generate("a", stream=True) as tracer:
            y = model.logits.save()
        return pieces, x, await tracer.backend

    found = asyncio.run(asyncio.wait_for(cell(), 10))
    assert found == ([" in", " Paris"], 5, {"x": 5})


def test_text_without_a_block_is_refused(server: FakeServer, model: Any) -> None:
    with pytest.raises(TypeError, match="needs a block"):
        model.generate("a", stream=True)
    with pytest.raises(TypeError, match="needs a block"):
        model.trace("a", stream=True, trace=False)
    assert not server.traces()


def test_an_error_of_a_streamed_block_shows_its_line(server: FakeServer, model: Any) -> None:
    line = 0

    def answer(seen: Any) -> Any:
        yield frame("T", b'{"text": "a"}')
        where = f'Traceback:\n  File "{__file__}", line {line}, in cell\nIndexError: no\n'
        yield from result({}, error=error_of("IndexError", "no", where))

    server.answer = answer

    def plain() -> None:
        nonlocal line
        line = sys._getframe().f_lineno + 2
        with model.trace("a", stream=True) as tracer:
            x = model.logits.save()
        for token in tracer.backend:
            assert token.text == "a"

    async def awaited(drained: bool) -> None:
        nonlocal line
        line = sys._getframe().f_lineno + 2
        async with model.trace("a", stream=True) as tracer:
            x = model.logits.save()
        if drained:
            await tracer.backend
        else:
            async for token in tracer.backend:
                assert token.text == "a"

    for run in (
        plain,
        lambda: asyncio.run(awaited(False)),
        lambda: asyncio.run(awaited(True)),
    ):
        with pytest.raises(IndexError) as caught:
            run()
        entries = traceback.extract_tb(caught.value.__traceback__)
        assert entries[-1].lineno == line and "model.logits" in str(entries[-1].line)
        assert not any("jupyter_nnsight_serve/client" in entry.filename for entry in entries)


def test_a_stream_that_nobody_reads_ends_the_trace(server: FakeServer, model: Any) -> None:
    server.answer = lambda seen: forever()

    def cell() -> None:
        with model.trace("a", stream=True) as tracer:
            x = model.logits.save()

    cell()
    while not server.traces():
        time.sleep(0.01)
    gc.collect()
    assert server.gone.wait(3)


def test_a_stream_that_is_left_ends_the_trace(server: FakeServer, model: Any) -> None:
    def answer(seen: Any) -> Any:
        yield frame("T", b'{"text": "a"}')
        yield from forever()

    server.answer = answer
    with model.trace("a", stream=True) as tracer:
        x = model.logits.save()
    for token in tracer.backend:
        assert token.text == "a"
        break
    assert server.gone.wait(3)


def test_with_nest_asyncio(server: FakeServer, model: Any) -> None:
    nest_asyncio = pytest.importorskip("nest_asyncio2")
    answering(server, {"x": 3})

    async def inner() -> Any:
        async with model.trace("a"):
            x = model.logits.save()
        return x

    async def outer() -> Any:
        nest_asyncio.apply()
        with model.trace("a"):
            x = model.logits.save()
        return x, asyncio.get_running_loop().run_until_complete(inner())

    loop = asyncio.new_event_loop()
    try:
        assert loop.run_until_complete(outer()) == (3, 3)
    finally:
        loop.close()


def test_envoys_outside_of_a_trace_behave_as_nnsights(model: Any) -> None:
    assert isinstance(model.model.layers[0], Envoy)
    assert len(model.model.layers) == 4 and model.model.layers[-1].path.endswith("layers.3")
    assert [layer.path for layer in model.model.layers[1:3]] == [
        "model.model.layers.1",
        "model.model.layers.2",
    ]
    with pytest.raises(ValueError):
        model.model.layers[0].output  # noqa: B018


def test_modules_of_another_model_or_added_here_are_not_sent_under_a_wrong_name(
    server: FakeServer, model: Any, tmp_path: Path
) -> None:
    other = connect(server.url, TOKEN).model
    with pytest.raises(UnsendableError, match="`other`.*another model"):
        with model.trace("a"):
            x = other.logits.save()
    adapter = model.model.layers[0].adapter = torch.nn.Linear(2, 2)
    added = model.model.layers[0].adapter
    with pytest.raises(UnsendableError, match="`added`.*was added here"):
        with model.trace("a"):
            x = added.output.save()
    assert not server.traces() and adapter is not None


def test_an_error_of_a_type_that_is_not_built_in_is_caught_by_what_it_derives_from(
    server: FakeServer, model: Any
) -> None:
    error = {**error_of("VLLMValidationError", "too long"), "bases": ["Odd", "ValueError"]}
    answering(server, {}, error=error)
    with pytest.raises(ValueError, match="^VLLMValidationError: too long$") as caught:
        with model.trace("a"):
            x = model.logits.save()
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), ValueError)


AWAITED = """
import asyncio

async def cell():
    async with model.trace("a"):
        x = model.logits.save()
    return x

found = asyncio.run(cell())
"""
LATER = """
import contextlib

if True:
    with contextlib.suppress(OSError):
        y = 1
found = asyncio.run(cell())
"""
EDITED = """
with model.edit() as (tracer, edit):
    model.model.layers[1].output[0][:] = 0
"""
MAGIC = """
with model.trace([{number}]):
    x = model.logits.save()
"""


def test_under_the_time_magic(server: FakeServer, model: Any) -> None:
    shell = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell.instance()
    shell.user_ns["model"] = model
    try:
        for number in (1, 2):
            answering(server, {"x": number})
            cell = "%%time" + MAGIC.format(number=number)
            assert shell.run_cell(cell).success and shell.user_ns["x"] == number
        prompts = [loads(seen.body, persistent(model))[0].args for seen in server.traces()]
        assert prompts == [([1],), ([2],)]
        # Below `%%time` there is no top-level await, but a loop may run there.
        answering(server, {"x": 3})
        assert shell.run_cell("%%time" + AWAITED).success and shell.user_ns["found"] == 3
        assert shell.run_cell("%%time" + EDITED).success
        assert [seen.method for seen in server.seen if "register/" in seen.path] == ["POST"]
        # Its source is gone, and this cell's is not it.
        wrong = shell.run_cell("%%time" + LATER)
        assert isinstance(wrong.error_in_exec, WithBlockNotFoundError)
    finally:
        shell.clear_instance()
