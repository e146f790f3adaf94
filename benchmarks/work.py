"""What is measured: kinds of work, each written as a trace and as a request to vLLM alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

PROMPT_TOKENS = 128

# Different prompts for as many requests of one kind of work.
VARIANTS = 64


def prompt(number: int, tokens: int = PROMPT_TOKENS) -> list[int]:
    """The token ids of a prompt; no two begin alike."""
    return random.Random(number).choices(range(5, 500), k=tokens)


def logits(model: Any, ids: list[int], backend: Any) -> None:
    """One token, the logits saved."""
    with model.trace(ids, max_tokens=1, temperature=0.0, backend=backend):
        saved = model.logits.save()


def one_layer(model: Any, ids: list[int], backend: Any) -> None:
    """One token, one layer saved."""
    middle = len(model.model.layers) // 2
    with model.trace(ids, max_tokens=1, temperature=0.0, backend=backend):
        saved = model.model.layers[middle].output[0].save()


def all_layers(model: Any, ids: list[int], backend: Any) -> None:
    """One token, every layer saved."""
    with model.trace(ids, max_tokens=1, temperature=0.0, backend=backend):
        saved = [layer.output[0] for layer in model.model.layers].save()  # type: ignore[attr-defined]


def result(model: Any, ids: list[int], backend: Any) -> None:
    """64 tokens, the result saved."""
    settings = {"max_tokens": 64, "temperature": 0.0, "ignore_eos": True}
    with model.trace(ids, backend=backend, **settings) as tracer:
        saved = tracer.result.save()


def each_step(model: Any, ids: list[int], backend: Any) -> None:
    """64 tokens, one layer saved at each step."""
    middle = len(model.model.layers) // 2
    settings = {"max_tokens": 64, "temperature": 0.0, "ignore_eos": True}
    with model.trace(ids, backend=backend, **settings) as tracer:
        saved = list().save()  # type: ignore[attr-defined]
        for _ in tracer.iter[:64]:
            saved.append(model.model.layers[middle].output[0])


@dataclass(frozen=True)
class Work:
    """A kind of work.

    Attributes
    ----------
    write
        Writes the trace.
    tokens
        Tokens that are generated.
    clients
        Numbers of concurrent clients it is measured at; None for all.
    edit
        Whether an edit is installed meanwhile.
    """

    name: str
    write: Callable[[Any, list[int], Any], None]
    tokens: int = 1
    clients: tuple[int, ...] | None = None
    edit: bool = False


WORK = {
    work.name: work
    for work in (
        Work("logits", logits),
        Work("one layer", one_layer),
        Work("all layers", all_layers, clients=(1, 8)),
        Work("64 tokens, result", result, tokens=64),
        Work("64 tokens, each step", each_step, tokens=64),
        Work("logits, edited", logits, edit=True),
    )
}
