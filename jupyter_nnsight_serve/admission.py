"""Which traces are here, from their headers to their last byte.

Every trace passes through here; nothing is refused or held back yet.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from . import metrics
from .identity import Caller


@dataclass
class Trace:
    """One trace on its way through.

    Parameters
    ----------
    owner
        The caller's name.
    id
        Names it in the log, in the engine and in the response's `Nnsight-Trace-Id`.
    started
        Unix time in seconds at which its headers were there.
    bytes_in, bytes_out
        Bytes of its request received and of its response sent, so far.
    forwarded
        `time.monotonic()` seconds at which the engine had all of it; None until then.
    """

    owner: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    started: float = field(default_factory=time.time)
    bytes_in: int = 0
    bytes_out: int = 0
    forwarded: float | None = None
    began: float = field(default_factory=time.monotonic)

    def model(self) -> dict[str, Any]:
        """What status tells of it."""
        return {
            "id": self.id,
            "owner": self.owner,
            "started": self.started,
            "state": "waiting" if self.forwarded is None else "running",
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
        }


class Admission:
    """The traces that are here now, and one log line and one count for each that ends."""

    def __init__(self, log: logging.Logger | logging.LoggerAdapter[Any]) -> None:
        self._log = log
        self._traces: dict[str, Trace] = {}

    def begin(self, caller: Caller) -> Trace:
        """A new trace of `caller`."""
        trace = Trace(owner=caller.name)
        self._traces[trace.id] = trace
        return trace

    def end(self, trace: Trace, outcome: str, told: Mapping[str, str]) -> None:
        """Count a trace, log it, and let go of it. A second call for the same trace is a no-op.

        Parameters
        ----------
        outcome
            One of `metrics.OUTCOMES`.
        told
            The engine's response headers, which hold its token counts.
        """
        if self._traces.pop(trace.id, None) is None:
            return
        now = time.monotonic()
        forwarded = now if trace.forwarded is None else trace.forwarded
        metrics.TRACES.labels(outcome=outcome).inc()
        metrics.TRACE_QUEUED_SECONDS.observe(forwarded - trace.began)
        metrics.TRACE_RUN_SECONDS.observe(now - forwarded)
        metrics.BYTES_IN.inc(trace.bytes_in)
        metrics.BYTES_OUT.inc(trace.bytes_out)
        self._log.info(
            "trace %s user=%s outcome=%s seconds=%.3f prompt_tokens=%s generated_tokens=%s "
            "bytes_in=%d bytes_out=%d",
            trace.id,
            trace.owner,
            outcome,
            now - trace.began,
            told.get("Nnsight-Prompt-Tokens", "-"),
            told.get("Nnsight-Generated-Tokens", "-"),
            trace.bytes_in,
            trace.bytes_out,
        )

    @property
    def running(self) -> int:
        """How many traces the engine has all of."""
        return sum(trace.forwarded is not None for trace in self._traces.values())

    @property
    def waiting(self) -> int:
        """How many traces are here that the engine does not have all of yet."""
        return len(self._traces) - self.running

    def ids(self) -> list[str]:
        """The ids of the traces that are here."""
        return list(self._traces)

    def visible_to(self, caller: Caller) -> list[dict[str, Any]]:
        """The caller's traces, oldest first."""
        return [trace.model() for trace in self._traces.values() if trace.owner == caller.name]
