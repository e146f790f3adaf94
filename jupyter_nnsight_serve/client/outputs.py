"""vLLM's result objects as plain records, with the same attribute names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


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


RECORDS: dict[str, type] = {
    kind.__name__: kind for kind in (Logprob, CompletionOutput, RequestOutput, RequestStateStats)
}


@dataclass
class Record:
    """A result object of a kind this client does not know."""


def record(kind: str, fields: dict[str, Any]) -> Any:
    """The record of ``kind`` with ``fields``; fields it does not declare become attributes."""
    made = RECORDS.get(kind, Record)()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


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
