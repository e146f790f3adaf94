"""Programs that read and write what flows through the model in one forward pass."""

from __future__ import annotations

from typing import Any

import nnsight
import torch

from .registry import GATE_UP, HIDDEN, OTHER, PROMPT, QKV, SHORT, Split, home, program

ONE = {"temperature": 0.0, "max_tokens": 1}


@program()
def read_an_output(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, **ONE, **where):
        hidden = model.model.layers[3].output[0].clone().save()
    return home(hidden=hidden)


@program()
def read_an_output_without_a_clone(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, **ONE, **where):
        first = model.model.layers[0].output[0].save()
        middle = model.model.layers[15].output[1].save()
        last = model.model.layers[29].output[0].save()
    return home(first=first, middle=middle, last=last)


@program()
def read_a_tuple(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, **ONE, **where):
        pair = nnsight.save(model.model.layers[3].output)
        block, residual = model.model.layers[4].output
        total = (block + residual).save()
    return home(pair=pair, total=total)


@program()
def read_inputs(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, **ONE, **where):
        positions = model.model.layers[2].input.save()
        inputs = nnsight.save(model.model.layers[3].inputs)
        into_mlp = model.model.layers[3].mlp.input.save()
    return home(positions=positions, inputs=inputs, into_mlp=into_mlp)


@program()
def read_every_layer(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, **ONE, **where):
        states = nnsight.save([])
        for layer in model.model.layers:
            out = layer.output
            states.append((out[0] + out[1])[-1])
    return home(states=states)


@program(split={"qkv": Split(QKV, gathered=True), "gate_up": Split(GATE_UP, gathered=True)})
def read_inside_a_layer(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    layer = model.model.layers[7]
    with model.trace(PROMPT, **ONE, **where):
        normed = nnsight.save(layer.input_layernorm.output)
        qkv = layer.self_attn.qkv_proj.output[0].save()
        projected = layer.self_attn.o_proj.output[0].save()
        attention = layer.self_attn.output.save()
        gate_up = layer.mlp.gate_up_proj.output[0].save()
        into_down = layer.mlp.down_proj.input.save()
        mlp = layer.mlp.output.save()
    return home(
        normed=normed,
        qkv=qkv,
        projected=projected,
        attention=attention,
        gate_up=gate_up,
        into_down=into_down,
        mlp=mlp,
    )


@program(split={"activation": Split((2 * HIDDEN,)), "mixed": Split((HIDDEN,))})
def read_between_parallel_layers(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, **ONE, **where):
        mixed = model.model.layers[7].self_attn.attn.output.save()
        activation = model.model.layers[7].mlp.act_fn.output.save()
    return home(activation=activation, mixed=mixed)


@program()
def read_the_ends(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, **ONE, **where):
        embedded = model.model.embed_tokens.output.save()
        normed = nnsight.save(model.model.norm.output)
        whole = nnsight.save(model.model.output)
        logits = model.logits.save()
        samples = model.samples.save()
    return home(embedded=embedded, normed=normed, whole=whole, logits=logits, samples=samples)


@program()
def save_what_is_not_a_tensor(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(SHORT, **ONE, **where):
        hidden = model.model.layers[3].output[0]
        shape = nnsight.save(hidden.shape)
        rows, width = shape
        count = nnsight.save(int(rows))
        kind = nnsight.save(str(hidden.dtype))
        dtype = nnsight.save(hidden.dtype)
        nothing = nnsight.save(None)
        text = nnsight.save("naïve 東京 🙂")
        nested = nnsight.save({"a": [1, (2.5, None)], "b": {3, 4}, 5: b"bytes"})
    return home(
        shape=shape, count=count, kind=kind, dtype=dtype, nothing=nothing, text=text, nested=nested
    )


@program()
def save_many_dtypes(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, **ONE, **where):
        hidden = model.model.layers[3].output[0]
        single = hidden.float().save()
        double = hidden.double().mean().save()
        half = hidden.half()[:, ::7].save()
        mask = (torch.arange(hidden.shape[0]) % 3 == 0).save()
        turned = hidden.T.save()
        top = nnsight.save(torch.arange(10.0).topk(3))
        empty = hidden[:0].save()
        number = nnsight.save(hidden.float().norm().item())
    return home(
        single=single,
        double=double,
        half=half,
        mask=mask,
        turned=turned,
        top=top,
        empty=empty,
        number=number,
    )


@program()
def write_in_place(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, **ONE, **where):
        before = model.model.layers[3].output[0].clone().save()
        model.model.layers[3].output[0][:] += 1
        after = model.model.layers[3].output[0].save()
        later = model.model.layers[9].output[1].save()
        logits = model.logits.save()
    return home(before=before, after=after, later=later, logits=logits)


@program()
def write_one_position(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    direction = torch.linspace(-1, 1, HIDDEN)
    with model.trace(PROMPT, **ONE, **where):
        hidden = model.model.layers[5].output[0]
        hidden[-1] += direction.to(hidden.device, hidden.dtype)
        later = model.model.layers[6].output[0].save()
        logits = model.logits.save()
    return home(later=later, logits=logits)


@program()
def write_by_assignment(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, **ONE, **where):
        block, residual = model.model.layers[3].output
        model.model.layers[3].output = (block * 2, residual)
        after = nnsight.save(model.model.layers[3].output)
        logits = model.logits.save()
    return home(after=after, logits=logits)


@program()
def zero_an_mlp_in_place(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, **ONE, **where):
        model.model.layers[20].mlp.output[:] = 0
        mlp = model.model.layers[20].mlp.output.save()
        logits = model.logits.save()
    return home(mlp=mlp, logits=logits)


@program()
def zero_an_mlp_by_assignment(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, **ONE, **where):
        mlp = model.model.layers[20].mlp
        mlp.output = torch.zeros_like(mlp.output)
        logits = model.logits.save()
    return home(logits=logits)


@program()
def edit_a_kept_read_after_moving_on(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, **ONE, **where):
        early = model.model.layers[3].output[0]
        kept = early.save()
        later = model.model.layers[4].output[0].save()
        logits = model.logits.save()
    return home(kept=kept, later=later, logits=logits)


@program()
def write_an_input(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, **ONE, **where):
        mlp = model.model.layers[3].mlp
        mlp.input = mlp.input * 0.5
        after = mlp.output.save()
        logits = model.logits.save()
    return home(after=after, logits=logits)


@program()
def write_an_input_in_place(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, **ONE, **where):
        model.model.layers[3].mlp.input[:, :8] = 0
        after = model.model.layers[3].mlp.output.save()
    return home(after=after)


@program()
def write_all_inputs(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, **ONE, **where):
        args, kwargs = model.model.layers[3].inputs
        model.model.layers[3].inputs = ((args[0], args[1] * 0, args[2]), kwargs)
        after = nnsight.save(model.model.layers[3].output)
        logits = model.logits.save()
    return home(after=after, logits=logits)


@program()
def write_a_parallel_layer(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, **ONE, **where):
        model.model.layers[3].self_attn.qkv_proj.output[0][:] *= 0.5
        attention = model.model.layers[3].self_attn.output.save()
        model.model.layers[5].mlp.down_proj.input[:, 100] += 3
        mlp = model.model.layers[5].mlp.output.save()
        logits = model.logits.save()
    return home(attention=attention, mlp=mlp, logits=logits)


@program(one_rank="the values are the last columns of one rank, and on two the last of each half")
def write_columns_of_a_merged_layer(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, **ONE, **where):
        model.model.layers[3].self_attn.qkv_proj.output[0][:, -HIDDEN:] = 0
        attention = model.model.layers[3].self_attn.output.save()
    return home(attention=attention)


@program()
def write_the_embedding(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, **ONE, **where):
        model.model.embed_tokens.output[2] = 0
        logits = model.logits.save()
    return home(logits=logits)


@program()
def read_a_source_operation(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, **ONE, **where):
        attention = model.model.layers[3].source.self_self_attn_0.output.save()
        mlp = model.model.layers[3].source.self_mlp_0.output.save()
        down = model.model.layers[4].mlp.source.self_down_proj_0.output[0].save()
    return home(attention=attention, mlp=mlp, down=down)


@program(split={"query": Split((HIDDEN,)), "values": Split((HIDDEN,))})
def read_source_operations_between_parallel_layers(
    model: Any, where: dict[str, Any]
) -> dict[str, Any]:
    with model.trace(PROMPT, **ONE, **where):
        values = model.model.layers[3].self_attn.source.qkv_split_0.output[2].clone().save()
        query = model.model.layers[3].self_attn.source.self_rotary_emb_0.output[0].clone().save()
    return home(query=query, values=values)


@program()
def write_a_source_operation(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, **ONE, **where):
        attention = model.model.layers[3].source.self_self_attn_0
        attention.output = torch.zeros_like(attention.output)
        model.model.layers[4].source.self_mlp_0.output[:] *= 2
        pair = nnsight.save(model.model.layers[4].output)
        logits = model.logits.save()
    return home(pair=pair, logits=logits)


@program()
def read_logits_and_samples(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, **ONE, **where):
        logits = model.logits.save()
        samples = model.samples.save()
        token = nnsight.save(model.tokenizer.decode(logits.argmax(dim=-1)))
    return home(logits=logits, samples=samples, token=token)


@program()
def replace_logits(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, temperature=0.0, max_tokens=3, **where) as tracer:
        replaced = torch.zeros_like(model.logits)
        replaced[:, 300] = 5
        model.logits = replaced
        logits = model.logits.save()
        result = tracer.result.save()
    return home(logits=logits, result=result)


@program()
def write_logits_in_place(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, temperature=0.5, seed=0, max_tokens=1, **where) as tracer:
        model.logits[:, 301] = 1e4
        logits = model.logits.save()
        samples = model.samples.save()
        result = tracer.result.save()
    return home(logits=logits, samples=samples, result=result)


@program()
def replace_samples(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, temperature=0.0, max_tokens=3, **where) as tracer:
        model.samples = torch.full_like(model.samples, 302)
        after = model.samples.save()
        result = tracer.result.save()
    return home(after=after, result=result)


@program()
def sampling_leaves_saved_logits_alone(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, temperature=0.5, top_k=5, seed=3, max_tokens=1, **where):
        logits = model.logits.save()
        samples = model.samples.save()
    return home(logits=logits, samples=samples)


@program()
def logit_lens(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, **ONE, **where):
        out = model.model.layers[20].output
        hidden = out[0] + out[1]
        lens = model.logits_processor(model.lm_head, model.model.norm(hidden)).save()
    return home(lens=lens)


@program()
def logits_of_every_position(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, **ONE, **where):
        hidden = model.model.norm.output[0]
        every = model.logits_processor(model.lm_head, hidden).save()
        logits = model.logits.save()
    return home(every=every, logits=logits)


@program()
def skip_a_module(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, **ONE, **where):
        mlp = model.model.layers[3].mlp
        mlp.skip(torch.zeros_like(mlp.input))
        pair = nnsight.save(model.model.layers[3].output)
        logits = model.logits.save()
    return home(pair=pair, logits=logits)


@program()
def skip_a_layer(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, **ONE, **where):
        args, _ = model.model.layers[3].inputs
        model.model.layers[3].skip((args[1], args[2]))
        pair = nnsight.save(model.model.layers[3].output)
        logits = model.logits.save()
    return home(pair=pair, logits=logits)


@program()
def patch_from_an_earlier_trace(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, **ONE, **where):
        donor = nnsight.save(tuple(part.clone() for part in model.model.layers[4].output))
    with model.trace(OTHER, **ONE, **where):
        for served, saved in zip(model.model.layers[4].output, donor, strict=True):
            served[-1] = saved[-1].to(served.device, served.dtype)
        patched = model.logits.save()
    return home(donor=donor, patched=patched)
