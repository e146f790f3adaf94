"""Programs over the steps of a generation: loops, stops, ends, caches and the result."""

from __future__ import annotations

from typing import Any

import nnsight
import torch

from .registry import OTHER, PROMPT, home, program

EOS = 1


@program()
def iter_first_steps(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, temperature=0.0, max_tokens=4, ignore_eos=True, **where) as tracer:
        logits = nnsight.save([])
        for _ in tracer.iter[:3]:
            logits.append(model.logits)
        after = nnsight.save("the loop ended by itself")
    return home(logits=logits, after=after)


@program()
def iter_a_range(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, temperature=0.0, max_tokens=5, ignore_eos=True, **where) as tracer:
        steps = nnsight.save([])
        hidden = nnsight.save([])
        for step in tracer.iter[1:3]:
            steps.append(step)
            hidden.append(model.model.layers[2].output[0])
    return home(steps=steps, hidden=hidden)


@program()
def iter_one_step(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, temperature=0.0, max_tokens=4, ignore_eos=True, **where) as tracer:
        for _ in tracer.iter[2]:
            logits = model.logits.save()
            sample = nnsight.save(model.samples.item())
    return home(logits=logits, sample=sample)


@program()
def iter_a_list_of_steps(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, temperature=0.0, max_tokens=5, ignore_eos=True, **where) as tracer:
        picked = nnsight.save({})
        for step in tracer.iter[[0, 2, 4]]:
            picked[step] = model.logits
    return home(picked=picked)


@program()
def iter_from_a_step(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, temperature=0.0, max_tokens=4, ignore_eos=True, **where) as tracer:
        steps = nnsight.save([])
        for step in tracer.iter[2:]:
            steps.append((step, model.samples.item()))
    return home(steps=steps)


@program()
def iter_without_bounds(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, temperature=0.0, max_tokens=3, ignore_eos=True, **where) as tracer:
        steps = nnsight.save([])
        for step in tracer.iter[:]:
            steps.append((step, model.samples.clone()))
        steps.append("never reached")
    return home(steps=steps, after=locals().get("after", "unbound"))


@program()
def tracer_all(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, temperature=0.0, max_tokens=5, ignore_eos=True, **where) as tracer:
        shapes = nnsight.save([])
        for _ in tracer.all():
            shapes.append(tuple(model.model.layers[0].output[0].shape))
    return home(shapes=shapes)


@program()
def a_loop_that_outruns_its_request(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, temperature=0.0, max_tokens=3, ignore_eos=True, **where) as tracer:
        samples = nnsight.save([])
        for _ in tracer.iter[:8]:
            samples.append(model.samples.item())
        after = tracer.result.save()
    return home(samples=samples, after=locals().get("after", "unbound"))


@program()
def a_loop_that_its_request_fills(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, temperature=0.0, max_tokens=6, ignore_eos=True, **where) as tracer:
        samples = nnsight.save([])
        for _ in tracer.iter[:6]:
            samples.append(model.samples.item())
        result = tracer.result.save()
    return home(samples=samples, result=result)


@program()
def a_stop_string_ends_it_early(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    word = model.tokenizer.encode(" Paris")
    stop = model.tokenizer.decode(word[-1:])
    with model.trace(
        PROMPT, temperature=0.0, max_tokens=8, ignore_eos=True, stop=[stop], **where
    ) as tracer:
        samples = nnsight.save([])
        for step in tracer.iter[:8]:
            if step == 1:
                model.samples = torch.full_like(model.samples, word[-1])
            samples.append(model.samples.item())
        after = tracer.result.save()
    return home(enough=1 <= len(samples) < 8, after=locals().get("after", "unbound"))


@program()
def an_end_of_sequence_ends_it_early(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, temperature=0.0, max_tokens=8, **where) as tracer:
        samples = nnsight.save([])
        for step in tracer.iter[:8]:
            forced = EOS if step == 2 else 300 + step
            model.samples = torch.full_like(model.samples, forced)
            samples.append(model.samples.item())
        after = tracer.result.save()
    return home(samples=samples, after=locals().get("after", "unbound"))


@program()
def the_result_of_an_early_end(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, temperature=0.0, max_tokens=8, **where) as tracer:
        for step in tracer.iter[:3]:
            model.samples = torch.full_like(model.samples, EOS if step == 2 else 300)
        result = tracer.result.save()
    return home(result=result)


@program()
def stop_after_a_read(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, temperature=0.0, max_tokens=5, **where) as tracer:
        hidden = model.model.layers[3].output[0].clone().save()
        tracer.stop()
        logits = model.logits.save()
    return home(hidden=hidden, logits=locals().get("logits", "unbound"))


@program()
def stop_in_a_loop(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, temperature=0.0, max_tokens=8, **where) as tracer:
        samples = nnsight.save([])
        for step in tracer.iter[:8]:
            model.samples = torch.full_like(model.samples, 300 + step)
            samples.append(model.samples.item())
            if step == 1:
                tracer.stop()
    return home(samples=samples)


@program()
def stop_in_one_of_two_invokes(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(temperature=0.0, max_tokens=3, ignore_eos=True, **where) as tracer:
        with tracer.invoke(PROMPT):
            first = nnsight.save(tuple(model.model.layers[3].output[0].shape))
            tracer.stop()
        with tracer.invoke(OTHER):
            second = nnsight.save([])
            for step in tracer.iter[:3]:
                model.samples = torch.full_like(model.samples, 300 + step)
                second.append(model.samples.item())
    return home(first=first, second=second)


@program()
def steer_every_step(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, temperature=0.0, max_tokens=4, ignore_eos=True, **where) as tracer:
        shifts = nnsight.save([])
        for _ in tracer.all():
            before = model.model.layers[5].output[0].float().sum()
            model.model.layers[5].output[0][:] += 2
            shifts.append(model.model.layers[5].output[0].float().sum() - before)
    return home(shifts=shifts)


@program()
def steer_the_prompt_only(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, temperature=0.0, max_tokens=3, ignore_eos=True, **where) as tracer:
        model.model.layers[5].output[0][:] += 2
        after = nnsight.save([])
        for step in tracer.iter[1:3]:
            model.samples = torch.full_like(model.samples, 300 + step)
            after.append(model.samples.item())
        result = tracer.result.save()
    return home(after=after, prompt=result.prompt_token_ids)


@program()
def edit_at_one_step(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, temperature=0.0, max_tokens=5, ignore_eos=True, **where) as tracer:
        zeroed = nnsight.save([])
        for step in tracer.iter[:]:
            if step == 2:
                model.model.layers[20].mlp.output[:] = 0
            zeroed.append(bool((model.model.layers[20].mlp.output == 0).all()))
    return home(zeroed=zeroed)


@program()
def keep_state_across_steps(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, temperature=0.0, max_tokens=4, ignore_eos=True, **where) as tracer:
        total = nnsight.save(torch.zeros(4))
        seen = 0
        for step in tracer.iter[:4]:
            seen += model.model.layers[1].output[0].shape[0]
            total[step] = seen
            model.samples = torch.full_like(model.samples, 310 + step)
        count = nnsight.save(seen)
    return home(total=total, count=count)


@program()
def rebind_a_save_every_step(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, temperature=0.0, max_tokens=3, ignore_eos=True, **where) as tracer:
        for step in tracer.iter[:3]:
            model.samples = torch.full_like(model.samples, 320 + step)
            sample = model.samples.save()
    return home(sample=sample)


@program()
def cache_some_modules(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, temperature=0.0, max_tokens=1, **where) as tracer:
        cache = tracer.cache(modules=[model.model.layers[0], "model.model.layers.9.mlp"])
    return home(cache=cache, keys=sorted(cache.keys()))


@program()
def cache_inputs(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, temperature=0.0, max_tokens=1, **where) as tracer:
        cache = tracer.cache(modules=[model.model.layers[4].mlp], include_inputs=True)
    return home(cache=cache)


@program()
def cache_in_another_dtype(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, temperature=0.0, max_tokens=1, **where) as tracer:
        cache = tracer.cache(
            modules=[model.model.layers[4]],
            dtype=torch.float32,
            include_output=False,
            include_inputs=True,
        )
    return home(cache=cache)


@program()
def cache_every_module(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, temperature=0.0, max_tokens=1, **where) as tracer:
        cache = tracer.cache()
    return home(cache=cache)


@program()
def a_cache_leaves_the_model_alone(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, temperature=0.0, max_tokens=1, **where):
        without = model.logits.save()
    with model.trace(PROMPT, temperature=0.0, max_tokens=1, **where) as tracer:
        cache = tracer.cache(include_inputs=True)
        logits = model.logits.save()
    return home(same=torch.equal(without, logits), cached=len(cache.keys()))


@program()
def cache_every_step(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, temperature=0.0, max_tokens=3, ignore_eos=True, **where) as tracer:
        cache = tracer.cache(modules=[model.model.layers[0].mlp])
        for step in tracer.iter[:3]:
            model.samples = torch.full_like(model.samples, 330 + step)
    return home(cache=cache, visits=len(cache["model.model.layers.0.mlp"]))


@program()
def cache_what_an_edit_left(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, temperature=0.0, max_tokens=1, **where) as tracer:
        cache = tracer.cache(modules=[model.model.layers[3].mlp, model.model.layers[3]])
        model.model.layers[3].mlp.output[:] = 0
    return home(cache=cache)


@program()
def the_result(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, temperature=0.0, max_tokens=4, ignore_eos=True, **where) as tracer:
        result = tracer.result.save()
    return home(result=result)


@program()
def the_result_after_reads(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, temperature=0.0, max_tokens=2, ignore_eos=True, **where) as tracer:
        hidden = model.model.layers[8].output[1].clone().save()
        result = tracer.result
        text = nnsight.save(result.outputs[0].text)
        finished = nnsight.save(result.finished)
    return home(hidden=hidden, text=text, finished=finished)


@program()
def generate_is_trace(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.generate(
        PROMPT, temperature=0.0, max_new_tokens=3, ignore_eos=True, **where
    ) as tracer:
        samples = nnsight.save([])
        for _ in tracer.all():
            samples.append(model.samples.item())
    return home(samples=samples)
