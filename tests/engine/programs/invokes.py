"""Programs of several invokes, sampling settings, and several sequences of one prompt."""

from __future__ import annotations

from typing import Any

import nnsight
import torch

from .registry import OTHER, PROMPT, SHORT, home, program

ONE = {"temperature": 0.0, "max_tokens": 1}


@program(batched=True)
def one_name_in_every_invoke(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(**ONE, **where) as tracer:
        for prompt in (PROMPT, OTHER, SHORT):
            with tracer.invoke(prompt):
                hidden = model.model.layers[3].output[0].save()
    return home(hidden=hidden)


@program(batched=True)
def a_name_for_every_invoke(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(**ONE, **where) as tracer:
        with tracer.invoke(PROMPT):
            first = model.logits.save()
        with tracer.invoke(OTHER):
            second = model.logits.save()
    return home(first=first, second=second)


@program()
def one_invoke(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(**ONE, **where) as tracer:
        with tracer.invoke(PROMPT):
            logits = model.logits.save()
            result = tracer.result.save()
    return home(logits=logits, result=result)


@program(batched=True)
def slots_shared_by_invokes(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(**ONE, **where) as tracer:
        rows = nnsight.save([None] * 3)
        for index, prompt in enumerate((PROMPT, OTHER)):
            with tracer.invoke(prompt):
                rows[index] = model.model.layers[3].output[0]
    return home(rows=rows)


@program(batched=True)
def a_dict_shared_by_invokes(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(**ONE, **where) as tracer:
        rows = nnsight.save({})
        with tracer.invoke(PROMPT):
            rows["first"] = model.logits
        with tracer.invoke(OTHER):
            rows["second"] = model.logits
            mine = model.samples.save()
    return home(rows=rows, mine=mine)


@program(batched=True)
def a_list_appended_to_by_invokes(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(**ONE, **where) as tracer:
        rows = nnsight.save([])
        with tracer.invoke(PROMPT):
            rows.append(tuple(model.model.layers[3].output[0].shape))
        with tracer.invoke(SHORT):
            rows.append(tuple(model.model.layers[3].output[0].shape))
    return home(rows=rows)


@program(batched=True)
def values_made_above_the_invokes(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(**ONE, **where) as tracer:
        scale = torch.tensor(3.0)
        untouched = nnsight.save({"scale": scale})
        with tracer.invoke(PROMPT):
            first = (model.model.layers[3].output[0].float().norm() * scale).save()
        with tracer.invoke(OTHER):
            second = (model.model.layers[3].output[0].float().norm() * scale).save()
    return home(untouched=locals().get("untouched", "unbound"), first=first, second=second)


@program(batched=True)
def an_edit_in_one_invoke_only(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(**ONE, **where) as tracer:
        with tracer.invoke(PROMPT):
            clean = model.model.layers[9].output[1].save()
        with tracer.invoke(PROMPT):
            model.model.layers[3].output[0][:] += 3
            steered = model.model.layers[9].output[1].save()
        with tracer.invoke(PROMPT):
            block, residual = model.model.layers[3].output
            model.model.layers[3].output = (block + 3, residual)
            assigned = model.model.layers[9].output[1].save()
    return home(clean=clean, steered=steered, assigned=assigned)


@program(batched=True)
def a_result_of_every_invoke(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(temperature=0.0, max_tokens=2, ignore_eos=True, **where) as tracer:
        for prompt in (PROMPT, OTHER):
            with tracer.invoke(prompt):
                for _ in tracer.iter[:2]:
                    model.samples = torch.full_like(model.samples, 300)
                results = tracer.result.save()
    return home(results=results)


@program(batched=True)
def a_cache_in_every_invoke(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(**ONE, **where) as tracer:
        with tracer.invoke(PROMPT):
            first = tracer.cache(modules=[model.model.layers[0]])
        with tracer.invoke(SHORT):
            second = tracer.cache(modules=[model.model.layers[0]])
    return home(first=first, second=second)


@program(batched=True)
def a_loop_in_every_invoke(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(temperature=0.0, ignore_eos=True, **where) as tracer:
        with tracer.invoke(PROMPT, max_tokens=2):
            short = nnsight.save([])
            for _ in tracer.all():
                short.append(tuple(model.logits.shape))
        with tracer.invoke(OTHER, max_tokens=5):
            long = nnsight.save([])
            for _ in tracer.all():
                long.append(tuple(model.logits.shape))
    return home(short=short, long=long)


@program()
def settings_on_the_trace(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(
        PROMPT, temperature=0.9, top_p=0.9, seed=11, max_tokens=4, ignore_eos=True, **where
    ) as tracer:
        result = tracer.result.save()
    return home(result=result)


@program(batched=True)
def settings_on_the_trace_of_invokes(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(temperature=0.0, max_tokens=3, ignore_eos=True, **where) as tracer:
        with tracer.invoke(PROMPT):
            first = tracer.result.save()
        with tracer.invoke(OTHER):
            second = tracer.result.save()
    return home(
        first=len(first.outputs[0].token_ids),
        second=len(second.outputs[0].token_ids),
        reason=first.outputs[0].finish_reason,
    )


@program(batched=True)
def an_invoke_asks_for_the_default(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    # 16 tokens and a temperature of 1 are what vLLM takes when nothing is said.
    with model.trace(temperature=0.0, max_tokens=2, ignore_eos=True, **where) as tracer:
        with tracer.invoke(PROMPT, max_tokens=16):
            long = tracer.result.save()
        with tracer.invoke(PROMPT, temperature=1.0, seed=5):
            drawn = model.samples.save()
        with tracer.invoke(PROMPT):
            greedy = model.samples.save()
    return home(long=len(long.outputs[0].token_ids), drawn=drawn, greedy=greedy)


@program()
def log_probabilities(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, temperature=0.0, max_tokens=1, logprobs=2, **where) as tracer:
        result = tracer.result.save()
    found = result.outputs[0].logprobs
    return home(count=len(found), best=max(entry.logprob for entry in found[0].values()))


@program()
def a_stop_token(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(
        PROMPT, temperature=0.0, max_tokens=6, ignore_eos=True, stop_token_ids=[303], **where
    ) as tracer:
        for step in tracer.iter[:3]:
            model.samples = torch.full_like(model.samples, 301 + step)
        result = tracer.result.save()
    return home(result=result)


@program(batched=True)
def several_sequences(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, n=3, temperature=1.0, seed=2, max_tokens=1, **where) as tracer:
        hidden = model.model.layers[3].output[0].save()
        samples = model.samples.save()
        result = tracer.result.save()
    return home(hidden=hidden, samples=samples, result=result)


@program(batched=True)
def several_sequences_in_an_invoke(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(temperature=1.0, seed=2, max_tokens=1, **where) as tracer:
        with tracer.invoke(PROMPT, n=2):
            shapes = nnsight.save(tuple(model.model.layers[3].output[0].shape))
        with tracer.invoke(SHORT):
            shapes = nnsight.save(tuple(model.model.layers[3].output[0].shape))
    return home(shapes=shapes)
