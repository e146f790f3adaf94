"""A served trace means what the same trace means on a local engine.

Every program of `programs` runs three times on the same weights: here with nnsight's stock client
and with this package's own against a Jupyter server with the extension, and in `local_run.py` on an
in-process synchronous engine with the same worker class. The local run is the reference, and a
one-rank one also for a served engine of two tensor-parallel ranks.

What may differ. On one rank nothing, bitwise, unless requests of one trace share steps: which of
them do is the scheduler's choice, and bfloat16 sums round by the shape of the batch. Two ranks add
up what one rank sums at once, which rounds differently in each of the 32 layers. `TOLERANCE` holds
for both; what is not floating-point, tokens included, has to be the same.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from canonical import Record, Tensor, differences, outcome
from conftest import ENGINE_ARGS, Server, running, stock_client
from programs import PROGRAMS
from programs.registry import CACHED, PROMPT, Split

from jupyter_nnsight_serve import connect

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

# On the model here bfloat16 alone puts hidden states up to 1.8 % of their norm away from what
# float32 gives (transformers, layer by layer), and two roundings can be that far off to either side.
TOLERANCE = 0.04

ENGINES: dict[str, dict[str, Any]] = {
    "one rank": {"enable_lora": True, "max_lora_rank": 8},
    # Without adapters: vLLM wraps the layers of an engine that takes them, and nnsight does not
    # put the ranks' outputs of a wrapped layer together.
    "two ranks": {"tensor_parallel_size": 2},
    "two ranks with adapters": {
        "tensor_parallel_size": 2,
        "enable_lora": True,
        "max_lora_rank": 8,
    },
}
ONE_RANK = pytest.mark.parametrize("served", ["one rank"], indirect=True)
EVERYWHERE = pytest.mark.parametrize("served", ["one rank", "two ranks"], indirect=True)


@pytest.fixture(scope="module")
def local(
    request: pytest.FixtureRequest, tiny_path: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What the programs of this run come to on a local engine, which is gone afterwards."""
    wanted = {
        item.callspec.params["name"]
        for item in request.session.items
        if item.path == Path(__file__) and hasattr(item, "callspec")
        if "name" in item.callspec.params
    }
    output = tmp_path_factory.mktemp("local") / "outcomes.pt"
    arguments = {**ENGINE_ARGS, **ENGINES["one rank"]}
    command = [sys.executable, str(Path(__file__).with_name("local_run.py")), tiny_path]
    run = subprocess.run(
        [
            *command,
            str(output),
            json.dumps(arguments),
            *(name for name in PROGRAMS if name in wanted),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-6000:]
    outcomes: dict[str, Any] = torch.load(output, weights_only=False)
    return outcomes


@pytest.fixture(scope="module")
def served(
    request: pytest.FixtureRequest,
    local: dict[str, Any],
    tiny_path: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    """A server with one of `ENGINES`; it starts once the local engine is gone."""
    arguments = {**ENGINE_ARGS, **ENGINES[request.param]}
    with pytest.MonkeyPatch.context() as patch:
        if "tensor_parallel_size" in arguments:
            # One CPU for each rank.
            patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        folder = tmp_path_factory.mktemp("served")
        with running(tiny_path, folder, {"engine_args": arguments}) as server:
            yield server


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> int:
    arguments = ENGINES[request.node.callspec.params["served"]]
    count: int = arguments.get("tensor_parallel_size", 1)
    return count


@pytest.fixture(scope="module")
def client(tiny_path: str) -> Any:
    return stock_client(tiny_path)


@pytest.fixture(scope="module")
def own(served: Server, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The served model as this package's own client has it."""
    cache = tmp_path_factory.mktemp("cache")
    return connect(served.url, served.token, cache_dir=cache, progress=False).model


def check(
    name: str, client: Any, where: dict[str, str], local: dict[str, Any], ranks: int = 1
) -> None:
    """Run a program on the served engine and compare with what it came to on the local one."""
    program = PROGRAMS[name]
    expected = local[name]
    # Two engines can be wrong alike: only a refusal is right to raise on the local one.
    refusal = program.run.__module__.endswith(".refusals")
    assert refusal or expected.kind != "raised", expected.parts["text"]
    found = outcome(lambda: program.run(client, where))
    if ranks > 1:
        expected = over_two_ranks(expected, program.split)
    if program.advised:
        found, advice = without_advice(expected, found)
        assert advice
    tolerance = TOLERANCE if ranks > 1 or program.batched else None
    wrong = list(differences(expected, found, tolerance))
    assert not wrong, "\n".join(wrong)


@EVERYWHERE
@pytest.mark.parametrize("name", [name for name in PROGRAMS if not PROGRAMS[name].adapter])
def test_a_program_means_the_same(
    name: str, served: Server, client: Any, local: dict[str, Any], ranks: int
) -> None:
    if ranks > 1 and PROGRAMS[name].one_rank:
        pytest.skip(PROGRAMS[name].one_rank)
    check(name, client, served.where, local, ranks)


OWN_TEXTS = {
    # The stock client leaves it to the reader to find out which name the lock is in.
    "a_captured_thing_that_cannot_travel": "UnsendableError: The block reads `lock`, which cannot "
    "be sent to the server (TypeError: cannot pickle '_thread.lock' object); take what the block "
    "needs of it into a plain value or a tensor above the trace.",
}
"""What a program raises here, where this package's own client says it in words of its own."""


@ONE_RANK
@pytest.mark.parametrize("name", list(PROGRAMS))
def test_a_program_means_the_same_with_the_client_that_needs_no_vllm(
    name: str, own: Any, local: dict[str, Any]
) -> None:
    if name not in OWN_TEXTS:
        check(name, own, {}, local)
        return
    assert local[name].kind == "raised"
    found = outcome(lambda: PROGRAMS[name].run(own, {}))
    assert found == Record("raised", {"text": OWN_TEXTS[name]})


def without_advice(expected: Any, found: Any) -> tuple[Any, str]:
    """The served error as far as the local one goes, and what it says on top."""
    text, more = expected.parts["text"], found.parts["text"]
    return Record(found.kind, {"text": more[: len(text)]}), more[len(text) :]


def over_two_ranks(expected: Any, split: dict[str, Split]) -> Any:
    """What one rank brings home, laid out as two ranks have it."""
    if isinstance(expected, Record) and expected.kind == "CacheView":
        split = {path: CACHED[path.rsplit(".")[-1]] for path in expected.parts if is_split(path)}
    if not isinstance(expected, Record):
        return expected
    parts = {
        name: laid_out(part, split[name]) if name in split else over_two_ranks(part, {})
        for name, part in expected.parts.items()
    }
    return Record(expected.kind, parts)


def is_split(path: str) -> bool:
    return path.rsplit(".")[-1] in CACHED


def laid_out(expected: Any, split: Split) -> Any:
    """The tensors in ``expected`` with the columns that ``split`` leaves, in its order."""
    if isinstance(expected, Record):
        parts = {name: laid_out(part, split) for name, part in expected.parts.items()}
        return Record(expected.kind, parts)
    if not isinstance(expected, Tensor) or sum(split.widths) != expected.shape[-1]:
        return expected
    halves = [part.chunk(2, dim=-1) for part in expected.data.split(split.widths, dim=-1)]
    ranks = range(2 if split.gathered else 1)
    data = torch.cat([half[rank] for rank in ranks for half in halves], dim=-1)
    return replace(expected, data=data, shape=tuple(data.shape))


def test_there_are_many_programs() -> None:
    assert len(PROGRAMS) >= 60


@EVERYWHERE
def test_a_cache_changes_nothing(served: Server, client: Any) -> None:
    found = PROGRAMS["a_cache_leaves_the_model_alone"].run(client, served.where)
    assert found["same"]


@EVERYWHERE
def test_what_was_saved_before_an_error_is_in_the_response(served: Server, client: Any) -> None:
    from nnsight.modeling.vllm.serve.backend import LocalServeBackend

    answers = []

    class Keeping(LocalServeBackend):
        """The stock backend, which also keeps the answer that it raises the error of."""

        def _send(self, blob: bytes) -> Any:
            import io

            import httpx

            response = httpx.post(
                f"{self.host}/v1/nnsight/generate",
                content=blob,
                headers={"ndif-api-key": self.api_key, "nnsight-compress": "False"},
                timeout=60,
            )
            answers.append(torch.load(io.BytesIO(response.content), weights_only=False))
            return answers[-1]["saves"]

    backend = Keeping(client, served.url, served.token)
    with client.trace(PROMPT, temperature=0.0, max_tokens=1, backend=backend):
        hidden = client.model.layers[3].output[0].save()
        late = client.model.layers[4].output[0][:, :, 0].save()
    (answer,) = answers
    assert answer["error"]["type_name"] == "IndexError"
    assert set(answer["saves"]) == {"hidden"}
    assert hidden.shape == (12, 64)
    assert "late" not in locals()


@EVERYWHERE
def test_an_error_names_the_line_that_raised_it(served: Server, client: Any) -> None:
    with pytest.raises(RuntimeError) as caught:
        with client.trace(PROMPT, temperature=0.0, max_tokens=1, **served.where):
            hidden = client.model.layers[3].output[0].save()
            hidden[:, :, 0]  # noqa: B018
    line = test_an_error_names_the_line_that_raised_it.__code__.co_firstlineno + 5
    text = str(caught.value)
    assert text.startswith("IndexError: too many indices for tensor of dimension 2\n")
    assert f"line {line}, in" in text
    assert os.path.basename(__file__) in text
    assert "site-packages" not in text


@EVERYWHERE
def test_nothing_is_left_of_the_traces(served: Server) -> None:
    status = served.status()
    assert status["state"] == "ready"
    assert status["requests"]["tracked"] == 0, status


# Last in this file, so that the engine of two ranks is not started a second time for what follows.
@pytest.mark.parametrize("served", ["one rank", "two ranks with adapters"], indirect=True)
@pytest.mark.parametrize("name", [name for name in PROGRAMS if PROGRAMS[name].adapter])
def test_a_program_with_an_adapter_means_the_same(
    name: str, served: Server, client: Any, local: dict[str, Any], ranks: int
) -> None:
    check(name, client, served.where, local, ranks)
