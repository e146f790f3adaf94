"""Programs with blocks that are installed on the engine: named, unnamed, chosen and cleared."""

# ruff: noqa: F841 -- what an edit saves is named in its block and read off the result.
from __future__ import annotations

from typing import Any

import nnsight
import torch

from .registry import OTHER, PROMPT, home, program

ONE = {"temperature": 0.0, "max_tokens": 1}


def saves_of(result: Any) -> Any:
    """What the edits saved for the request that ``result`` is of."""
    # nnsight gathers them from a set of names, whose order is another one in every process.
    return dict(sorted(result.saves.items())) if hasattr(result, "saves") else "none"


@program()
def an_edit_reads(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.edit(**where) as (_, edit):
        hidden = model.model.layers[3].output[0].clone().save()
        rows = nnsight.save(hidden.shape[0])
    try:
        with model.trace(PROMPT, **ONE, **where) as tracer:
            mine = model.model.layers[3].output[0].save()
            result = tracer.result.save()
    finally:
        edit.clear()
    return home(saves=saves_of(result), mine=mine, result=result)


@program()
def an_edit_writes(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.edit(**where) as (_, edit):
        model.model.layers[3].output[0][:] += 2
    try:
        with model.trace(PROMPT, **ONE, **where):
            seen = model.model.layers[3].output[0].save()
            logits = model.logits.save()
    finally:
        edit.clear()
    return home(seen=seen, logits=logits)


@program()
def an_edit_assigns(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.edit(**where) as (_, edit):
        mlp = model.model.layers[3].mlp
        mlp.output = torch.zeros_like(mlp.output)
    try:
        with model.trace(PROMPT, **ONE, **where):
            seen = model.model.layers[3].mlp.output.save()
            logits = model.logits.save()
    finally:
        edit.clear()
    return home(seen=seen, logits=logits)


@program()
def a_cleared_edit_is_gone(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.edit(**where) as (_, edit):
        model.model.layers[3].output[0][:] += 2
        gone = nnsight.save(1)
    edit.clear()
    edit.clear()
    with model.trace(PROMPT, **ONE, **where) as tracer:
        logits = model.logits.save()
        result = tracer.result.save()
    return home(logits=logits, saves=saves_of(result), cleared=edit.cleared)


@program()
def edits_run_in_the_order_of_their_installing(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.edit(**where) as (_, first):
        model.model.layers[3].mlp.output[:] += 1
        early = model.model.layers[3].mlp.output.clone().save()
    with model.edit(**where) as (_, second):
        model.model.layers[3].mlp.output[:] *= 2
        late = model.model.layers[3].mlp.output.clone().save()
    try:
        with model.trace(PROMPT, **ONE, **where) as tracer:
            seen = model.model.layers[3].mlp.output.save()
            result = tracer.result.save()
    finally:
        first.clear()
        second.clear()
    return home(seen=seen, saves=saves_of(result))


@program()
def a_named_edit_is_chosen(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.edit(name="probe", **where) as (_, probe):
        score = model.model.layers[16].output[1][-1].float().norm().save()
    with model.edit(name="steer", **where) as (_, steer):
        model.model.layers[8].output[0][:] += 5
        steered = nnsight.save(True)
    with model.edit(**where) as (_, always):
        stamp = nnsight.save("always")
    try:
        with model.trace(PROMPT, edits=["probe"], **ONE, **where) as tracer:
            logits = model.logits.save()
            result = tracer.result.save()
    finally:
        for edit in (probe, steer, always):
            edit.clear()
    return home(names=(probe.name, always.name), logits=logits, saves=saves_of(result))


@program()
def no_named_edit_is_chosen(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.edit(name="steer", **where) as (_, steer):
        model.model.layers[8].output[0][:] += 5
        steered = nnsight.save(True)
    with model.edit(**where) as (_, always):
        stamp = nnsight.save("always")
    try:
        with model.trace(PROMPT, edits=[], **ONE, **where) as tracer:
            logits = model.logits.save()
            result = tracer.result.save()
    finally:
        steer.clear()
        always.clear()
    return home(logits=logits, saves=saves_of(result))


@program()
def edits_that_share_a_name(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.edit(name="twin", **where) as (_, one):
        first = nnsight.save(1)
    with model.edit(name="twin", **where) as (_, two):
        second = nnsight.save(2)
    try:
        with model.trace(PROMPT, edits=["twin"], **ONE, **where) as tracer:
            both = tracer.result.save()
        one.clear()
        with model.trace(PROMPT, edits=["twin"], **ONE, **where) as tracer:
            left = tracer.result.save()
    finally:
        one.clear()
        two.clear()
    return home(both=saves_of(both), left=saves_of(left))


@program(batched=True)
def invokes_choose_their_edits(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.edit(name="steer", **where) as (_, edit):
        model.model.layers[3].output[0][:] += 5
        steered = nnsight.save(True)
    try:
        with model.trace(edits=["steer"], **ONE, **where) as tracer:
            with tracer.invoke(PROMPT):
                seen = model.model.layers[9].output[1].save()
                results = tracer.result.save()
            with tracer.invoke(OTHER, edits=[]):
                seen = model.model.layers[9].output[1].save()
                results = tracer.result.save()
    finally:
        edit.clear()
    return home(seen=seen, saves=[saves_of(result) for result in results])


@program()
def an_edit_follows_every_step(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.edit(**where) as (tracer, edit):
        rows = nnsight.save([])
        for step in tracer.all():
            rows.append((step, model.model.layers[3].output[0].shape[0]))
    try:
        with model.trace(PROMPT, temperature=0.0, max_tokens=3, ignore_eos=True, **where) as tracer:
            result = tracer.result.save()
    finally:
        edit.clear()
    return home(saves=saves_of(result))


@program()
def an_edit_and_a_trace_save_one_name(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.edit(**where) as (_, edit):
        hidden = nnsight.save("the edit's")
    try:
        with model.trace(PROMPT, **ONE, **where) as tracer:
            hidden = nnsight.save("the trace's")
            result = tracer.result.save()
    finally:
        edit.clear()
    return home(hidden=hidden, saves=saves_of(result))


@program(batched=True)
def an_edit_on_several_sequences(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.edit(**where) as (_, edit):
        rows = nnsight.save(model.model.layers[3].output[0].shape[0])
    try:
        with model.trace(PROMPT, n=2, temperature=1.0, seed=4, max_tokens=1, **where) as tracer:
            mine = nnsight.save(model.model.layers[3].output[0].shape[0])
            result = tracer.result.save()
    finally:
        edit.clear()
    return home(mine=mine, saves=saves_of(result))


@program()
def an_edit_uses_a_helper_and_a_vector(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    def moved(hidden: torch.Tensor) -> torch.Tensor:
        return hidden + vector

    vector = torch.linspace(-1, 1, 64).to(torch.bfloat16)
    with model.edit(name="move it", **where) as (_, edit):
        hidden, residual = model.model.layers[3].output
        model.model.layers[3].output = (moved(hidden), residual)
    try:
        with model.trace(PROMPT, edits=["move it"], **ONE, **where):
            seen = model.model.layers[3].output[0].save()
    finally:
        edit.clear()
    return home(seen=seen)
