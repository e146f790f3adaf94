"""A tapped engine: CUDA graphs, with the declared places served at every replay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import Server, running

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device"
)

PROMPT = "The Eiffel Tower is located in the city of"


@pytest.fixture(scope="module")
def tapped(smollm2_path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    settings = {"taps": ["model.layers.*.output"]}
    with running(smollm2_path, tmp_path_factory.mktemp("tapped"), settings) as server:
        yield server


def test_status_shows_the_taps(tapped: Server) -> None:
    settings = tapped.status()["settings"]
    assert settings["enforce_eager"] is False
    assert "model.model.layers.3.output" in settings["taps"]


def test_a_tapped_layer_reads_as_on_an_eager_engine(
    model: Any, smollm2: Server, tapped: Server
) -> None:
    def states(server: Server) -> list[torch.Tensor]:
        with model.trace(
            PROMPT, temperature=0.0, max_tokens=4, ignore_eos=True, **server.where
        ) as tracer:
            kept = [].save()
            for _ in tracer.iter[:4]:
                kept.append(model.model.layers[10].output[0])
        return kept

    for eager, replayed in zip(states(smollm2), states(tapped), strict=True):
        assert eager.shape == replayed.shape
        assert (eager - replayed).float().norm() < 0.05 * eager.float().norm()


def test_an_in_place_edit_reaches_a_replayed_graph(model: Any, tapped: Server) -> None:
    def text(zeroed: bool) -> list[int]:
        with model.trace(
            PROMPT, temperature=0.0, max_tokens=4, ignore_eos=True, **tapped.where
        ) as tracer:
            for _ in tracer.iter[:4]:
                hidden = model.model.layers[5].output[0]
                if zeroed:
                    hidden[:] = 0
            result = tracer.result.save()
        return list(result.outputs[0].token_ids)

    assert text(True) != text(False)


def test_an_untapped_place_is_an_error_that_says_so(model: Any, tapped: Server) -> None:
    with (
        pytest.raises(RuntimeError, match="is not a tap on this engine"),
        model.trace(PROMPT, temperature=0.0, max_tokens=1, **tapped.where),
    ):
        model.model.layers[5].mlp.output.clone()
