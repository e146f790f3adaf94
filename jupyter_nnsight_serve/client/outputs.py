"""vLLM's result objects as plain records, with the same attribute names."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from types import SimpleNamespace
from typing import Any

from .lora import LoRARequest


@dataclass
class Logprob:
    """One token's log-probability (natural logarithm), rank from 1, and text."""

    logprob: float = 0.0
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One generated sequence."""

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: Any = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """Whether the sequence has ended."""
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """What one request came to; ``saves`` holds what edits saved for it."""

    request_id: str = ""
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: Any = None
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = True
    metrics: Any = None


@dataclass
class RequestStateStats:
    """When a request was queued, scheduled and answered, in the engine's seconds."""


@dataclass
class FlatLogprobs(Sequence[dict[int, Logprob]]):
    """Log-probabilities of every position in flat lists; reads as a list of dicts by token id.

    Those of position i are the elements from ``start_indices[i]`` to ``end_indices[i]`` of the
    other lists.
    """

    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int | None] = field(default_factory=list)
    decoded_tokens: list[str | None] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.start_indices)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        return {
            self.token_ids[at]: Logprob(self.logprobs[at], self.ranks[at], self.decoded_tokens[at])
            for at in range(self.start_indices[index], self.end_indices[index])
        }


class Record(SimpleNamespace):
    """A record of vLLM's of a kind this client does not know; shown by its kind's name."""

    def __reduce__(self) -> Any:
        return record, (type(self).__name__, vars(self))


RECORDS: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        Logprob,
        FlatLogprobs,
        CompletionOutput,
        RequestOutput,
        RequestStateStats,
        LoRARequest,
    )
}


@functools.cache
def _unknown(kind: str) -> type[Record]:
    return type(kind, (Record,), {"__module__": __name__, "__doc__": Record.__doc__})


def record(kind: str, values: dict[str, Any]) -> Any:
    """The record of ``kind`` with ``values``; those it does not declare become attributes."""
    known = RECORDS.get(kind)
    if known is None:
        return _unknown(kind)(**values)
    declared = {item.name for item in fields(known)}
    made = known(**{name: value for name, value in values.items() if name in declared})
    for name in values.keys() - declared:
        setattr(made, name, values[name])
    return made


@dataclass(frozen=True)
class Unread:
    """Stands for a part of a record that could not be made here."""

    why: str


@dataclass(frozen=True)
class Token:
    """A piece of text as it is generated.

    Attributes
    ----------
    text
        What came since the last piece of this sequence.
    token_ids
        Its tokens.
    invoke, sequence
        Which of the trace's invokes, and which of its ``n`` sequences, it belongs to; from 0.
    """

    text: str
    token_ids: list[int]
    invoke: int = 0
    sequence: int = 0

    def __str__(self) -> str:
        return self.text
