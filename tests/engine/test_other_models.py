"""Traces written for another model than the served one, or for its tree under other names."""

from __future__ import annotations

import sys
from typing import Any

import cloudpickle
import nnsight
import pytest
import torch
from conftest import Server, stock_client
from nnsight import Envoy

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PROMPT = "The Eiffel Tower is located in the city"
ONE = {"temperature": 0.0, "max_tokens": 1}


class Halving(Envoy):
    """A feed-forward block with a way of its own to look at it."""

    def halved(self) -> torch.Tensor:
        """Half of what it puts out."""
        return self.output / 2


def test_a_trace_for_another_model_is_refused_with_what_only_that_has(
    tiny_path: str, smollm2: Server
) -> None:
    other = stock_client(tiny_path)
    with pytest.raises(ConnectionError) as caught, other.trace(PROMPT, **ONE, **smollm2.where):
        # Both models have this layer; the trace's tree is what tells them apart.
        other.model.layers[3].output[0].save()
    for part in (
        "returned 409: The server serves ",
        "smollm2-135m-instruct, this trace was written for another model, which has "
        "'model.model.layers.30'",
    ):
        assert part in str(caught.value)


def test_an_edit_for_another_model_is_refused_and_not_installed(
    tiny_path: str, smollm2: Server
) -> None:
    other = stock_client(tiny_path)
    with (
        pytest.raises(ConnectionError, match="returned 409: The server serves"),
        other.edit(**smollm2.where) as (_, _edit),
    ):
        other.model.layers[3].output[0][:] = 0
    assert smollm2.get("/nnsight/register")[1]["edits"] == []


def test_a_tree_with_other_names_works_as_it_does_locally(
    model: Any, smollm2_path: str, smollm2: Server
) -> None:
    with model.trace(PROMPT, **ONE, **smollm2.where):
        expected = model.model.layers[3].mlp.output.save()
    renamed = stock_client(smollm2_path, rename={"model.layers": "blocks", "mlp": "feed"})
    with renamed.trace(PROMPT, **ONE, **smollm2.where):
        found = renamed.blocks[3].feed.output.save()
    assert torch.equal(found, expected)


def test_envoys_of_the_callers_own_class_work_as_they_do_locally(
    model: Any, smollm2_path: str, smollm2: Server
) -> None:
    with model.trace(PROMPT, **ONE, **smollm2.where):
        expected = model.model.layers[3].mlp.output.save()
    own = stock_client(smollm2_path, envoys={"mlp": Halving})
    assert type(own.model.layers[3].mlp) is Halving
    with (
        pytest.raises(RuntimeError, match=rf"nnsight\.register\({__name__}\)"),
        own.trace(PROMPT, **ONE, **smollm2.where),
    ):
        own.model.layers[3].mlp.halved().save()
    nnsight.register(sys.modules[__name__])
    try:
        with own.trace(PROMPT, **ONE, **smollm2.where):
            found = own.model.layers[3].mlp.halved().save()
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    assert torch.equal(found, expected / 2)
