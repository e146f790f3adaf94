"""Programs over the forms in which a prompt can be given."""

from __future__ import annotations

from typing import Any

import nnsight

from .registry import OTHER, PROMPT, home, program

ONE = {"temperature": 0.0, "max_tokens": 1}


@program()
def token_ids(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    ids = model.tokenizer.encode(PROMPT)
    with model.trace(ids, **ONE, **where) as tracer:
        logits = model.logits.save()
        result = tracer.result.save()
    return home(logits=logits, result=result)


@program()
def tokenizer_output(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    inputs = model.tokenizer(PROMPT)
    with model.trace(inputs, **ONE, **where):
        logits = model.logits.save()
    return home(logits=logits)


@program()
def tokenizer_output_as_tensors(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    inputs = model.tokenizer(PROMPT, return_tensors="pt")
    with model.trace(inputs, **ONE, **where):
        logits = model.logits.save()
    return home(logits=logits)


@program()
def a_mask_chooses_tokens(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    ids = model.tokenizer.encode(PROMPT)
    masked = {"input_ids": ids, "attention_mask": [0] + [1] * (len(ids) - 1)}
    with model.trace(masked, **ONE, **where) as tracer:
        rows = nnsight.save(model.model.layers[0].output[0].shape[0])
        result = tracer.result.save()
    return home(rows=rows, result=result)


@program()
def a_tokens_prompt(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    from vllm import TokensPrompt

    prompt = TokensPrompt(prompt_token_ids=model.tokenizer.encode(PROMPT))
    with model.trace(prompt, **ONE, **where):
        logits = model.logits.save()
    return home(logits=logits)


@program()
def a_text_prompt(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace({"prompt": PROMPT}, **ONE, **where) as tracer:
        result = tracer.result.save()
    return home(result=result)


@program()
def a_prompt_of_one_token(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace([300], **ONE, **where):
        pair = nnsight.save(model.model.layers[31].output)
        logits = model.logits.save()
    return home(pair=pair, logits=logits)


@program()
def a_prompt_as_long_as_the_model_takes(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace([300 + i % 200 for i in range(511)], **ONE, **where):
        rows = nnsight.save(model.model.layers[0].output[0].shape[0])
        hidden = model.model.layers[10].output[0][-1].clone().save()
    return home(rows=rows, hidden=hidden)


@program()
def letters_from_elsewhere(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace("naïve café 東京 🙂 \x00 \t", **ONE, **where) as tracer:
        logits = model.logits.save()
        result = tracer.result.save()
    return home(logits=logits, result=result)


@program(batched=True)
def a_form_for_every_invoke(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    from vllm import TokensPrompt

    ids = model.tokenizer.encode(OTHER)
    with model.trace(**ONE, **where) as tracer:
        with tracer.invoke(PROMPT):
            text = model.logits.save()
        with tracer.invoke(ids):
            numbers = model.logits.save()
        with tracer.invoke(TokensPrompt(prompt_token_ids=ids)):
            tokens = model.logits.save()
    return home(text=text, numbers=numbers, tokens=tokens)
