"""The list of programs, and what a comparison has to know of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Body = Callable[[Any, dict[str, Any]], dict[str, Any]]

PROMPT = "The Eiffel Tower is located in the city of"
OTHER = "Madison Square Garden is located in the city of"
SHORT = "Hello world!"
HIDDEN = 64
VOCABULARY = 512


@dataclass(frozen=True)
class Split:
    """How the last axis of a value is laid out when the model is split over two ranks.

    nnsight puts the ranks' outputs of a parallel layer one behind the other, and leaves alone what
    lies between parallel layers. A layer that holds several matrices (query, key and value; gate
    and up) has a share of each on every rank.

    Attributes
    ----------
    widths
        Widths of the matrices on one rank alone, in their order.
    gathered
        Whether the shares of both ranks are there, or the first rank's only.
    """

    widths: tuple[int, ...]
    gathered: bool = False


QKV = (HIDDEN, HIDDEN, HIDDEN)
GATE_UP = (2 * HIDDEN, 2 * HIDDEN)
CACHED = {
    "qkv_proj": Split(QKV, gathered=True),
    "gate_up_proj": Split(GATE_UP, gathered=True),
    "act_fn": Split((2 * HIDDEN,)),
    "attn": Split((HIDDEN,)),
    "rotary_emb": Split((HIDDEN,)),
}
"""Last part of a module's path to how its output is split, for values in a cache."""


@dataclass(frozen=True)
class Program:
    """A program and how its values compare.

    Attributes
    ----------
    run
        The program.
    batched
        Whether several of its requests may share a step. The engine decides which do, and bfloat16
        arithmetic rounds by the batch, so such values agree within a tolerance and not bitwise.
    split
        Returned name to how it is split over ranks.
    one_rank
        Why the program means something else on several ranks; empty when it does not.
    adapter
        Whether it needs an engine with adapters.
    advised
        Whether the served error goes on, after the local one's text, with what to do instead.
    """

    run: Body
    batched: bool = False
    split: dict[str, Split] = field(default_factory=dict)
    one_rank: str = ""
    adapter: bool = False
    advised: bool = False


PROGRAMS: dict[str, Program] = {}


def program(**how: Any) -> Any:
    """Put the decorated function on the list under its own name; see `Program` for ``how``."""

    def add(run: Body) -> Body:
        if run.__name__ in PROGRAMS:
            raise ValueError(f"two programs are called {run.__name__}")
        PROGRAMS[run.__name__] = Program(run, **how)
        return run

    return add


def home(**values: Any) -> dict[str, Any]:
    """What came home, by name."""
    return values
