"""Whose turn it is: the traces that are here, from their headers to their last byte.

The engine gets a trace once its body is complete and a place is free. Places are given round-robin
over the users that wait, so that one user's queue is no longer wait for the others, and no user
holds more than a share of them, so that a short trace meets a bounded number of long ones.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from . import metrics
from .errors import EngineUnavailable, TooManyTraces
from .identity import Caller

RECEIVING, WAITING, RUNNING = "receiving", "waiting", "running"


@dataclass(frozen=True)
class Limits:
    """How many traces there may be.

    Parameters
    ----------
    traces
        Traces on the engine at a time.
    user_traces
        Traces of one user on the engine at a time.
    user_waiting
        Traces of one user that are being received or wait for their turn.
    """

    traces: int = 256
    user_traces: int = 64
    user_waiting: int = 256


@dataclass(eq=False)
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
    state
        "receiving" its body, "waiting" for its turn, or "running" on the engine.
    bytes_in, bytes_out
        Bytes of its request received and of its response sent, so far.
    """

    owner: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    started: float = field(default_factory=time.time)
    state: str = RECEIVING
    bytes_in: int = 0
    bytes_out: int = 0
    began: float = field(default_factory=time.monotonic)
    # `time.monotonic()` seconds, and the engine's time shared out so far, at which it began to run.
    forwarded: float | None = None
    shared_out: float = 0.0
    turn: asyncio.Future[bool] | None = None

    def model(self, place: int | None) -> dict[str, Any]:
        """What status tells of it."""
        return {
            "id": self.id,
            "owner": self.owner,
            "started": self.started,
            "state": self.state,
            "place": place,
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
        }


@dataclass(frozen=True)
class Finished:
    """A trace that is over.

    Parameters
    ----------
    outcome
        One of `metrics.OUTCOMES`.
    queued_seconds, run_seconds
        From its headers to its turn, and from then to its end.
    engine_seconds
        Its part of the engine's time: while n traces run, each has an nth of it.
    prompt_tokens, generated_tokens
        Over all its invokes; None where the engine did not tell.
    """

    id: str
    owner: str
    outcome: str
    queued_seconds: float
    run_seconds: float
    engine_seconds: float
    prompt_tokens: int | None
    generated_tokens: int | None
    bytes_in: int
    bytes_out: int


class Admission:
    """The traces that are here now, whose turn is next, and a report of each that ends.

    Parameters
    ----------
    on_finished
        Called with each trace that is over.
    """

    def __init__(
        self,
        log: logging.Logger | logging.LoggerAdapter[Any],
        limits: Limits | None = None,
        on_finished: Callable[[Finished], None] = lambda finished: None,
    ) -> None:
        self._log = log
        self._limits = limits or Limits()
        self._on_finished = on_finished
        self._traces: dict[str, Trace] = {}
        # By user; the user whose turn is next comes first.
        self._queues: OrderedDict[str, deque[Trace]] = OrderedDict()
        self._running: Counter[str] = Counter()
        self._not_running: Counter[str] = Counter()
        # What each running trace has had of the engine's time since there is one, and when.
        self._shared_out = 0.0
        self._shared_at = time.monotonic()

    def begin(self, caller: Caller) -> Trace:
        """A new trace of `caller`, whose body is to come.

        Raises
        ------
        TooManyTraces
            The caller has as many that do not run yet as the limit allows.
        """
        try:
            self._count_in(caller)
        except TooManyTraces:
            metrics.TRACES.labels(outcome="refused").inc()
            raise
        trace = Trace(owner=caller.name)
        self._traces[trace.id] = trace
        return trace

    def _count_in(self, caller: Caller) -> None:
        """Count one more that does not run yet, or raise `TooManyTraces`."""
        if self._not_running[caller.name] >= self._limits.user_waiting:
            raise TooManyTraces(self._limits.user_waiting)
        self._not_running[caller.name] += 1

    def reserve(self, caller: Caller) -> Callable[[], None]:
        """Count an edit that is received and installed among what of `caller` does not run.

        Returns
        -------
        Ends that; a second call is a no-op.

        Raises
        ------
        TooManyTraces
            The caller has as many as the limit allows.
        """
        self._count_in(caller)
        held = [caller.name]

        def release() -> None:
            while held:
                _less(self._not_running, held.pop())

        return release

    def queue(self, trace: Trace) -> asyncio.Future[bool]:
        """The trace's body is complete. The result is done when its turn has come.

        It is then True; False when the trace ended before its turn, and `EngineUnavailable` when
        the engine did.
        """
        trace.turn = asyncio.get_running_loop().create_future()
        if trace.id not in self._traces:
            # Its caller left before its body was looked at.
            trace.turn.set_result(False)
            return trace.turn
        trace.state = WAITING
        self._queues.setdefault(trace.owner, deque()).append(trace)
        self._advance()
        return trace.turn

    def refuse_waiting(self, error: EngineUnavailable) -> None:
        """There is no engine any more: nobody's turn will come."""
        for queue in self._queues.values():
            for trace in queue:
                if trace.turn is not None and not trace.turn.done():
                    trace.turn.set_exception(error)
                    # A caller who left does not ask for it.
                    trace.turn.exception()
        self._queues.clear()

    def _advance(self) -> None:
        """Give the free places away."""
        while self._running.total() < self._limits.traces:
            most = self._limits.user_traces
            owner = next((o for o in self._queues if self._running[o] < most), None)
            if owner is None:
                return
            queue = self._queues[owner]
            trace = queue.popleft()
            if queue:
                self._queues.move_to_end(owner)
            else:
                del self._queues[owner]
            self._share_out()
            _less(self._not_running, owner)
            self._running[owner] += 1
            trace.state = RUNNING
            trace.forwarded = time.monotonic()
            trace.shared_out = self._shared_out
            if trace.turn is not None and not trace.turn.done():
                trace.turn.set_result(True)

    def _share_out(self) -> None:
        """Share the time since the last call out to the traces that ran in it."""
        now = time.monotonic()
        running = self._running.total()
        if running:
            self._shared_out += (now - self._shared_at) / running
        self._shared_at = now

    def place(self, trace: Trace) -> int | None:
        """How many turns it is until the trace's, counting its own; None when it does not wait.

        Round-robin, each other user has as many turns before it as the trace's own user has, and
        one more when that user's turn comes first. One who holds a full share takes no turns.
        """
        own = self._queues.get(trace.owner)
        if trace.state != WAITING or own is None or trace not in own:
            return None
        index = own.index(trace)
        place, first = index + 1, 1
        for owner, queue in self._queues.items():
            if owner == trace.owner:
                first = 0
            elif self._running[owner] < self._limits.user_traces:
                place += min(len(queue), index + first)
        return place

    def end(self, trace: Trace, outcome: str, told: Mapping[str, str]) -> None:
        """Report a trace, and let go of it. A second call for the same trace is a no-op.

        Parameters
        ----------
        outcome
            One of `metrics.OUTCOMES`.
        told
            The engine's response headers, which hold its token counts.
        """
        if self._traces.pop(trace.id, None) is None:
            return
        self._share_out()
        if trace.state == RUNNING:
            _less(self._running, trace.owner)
        else:
            _less(self._not_running, trace.owner)
            queue = self._queues.get(trace.owner)
            if queue is not None and trace in queue:
                queue.remove(trace)
                if not queue:
                    del self._queues[trace.owner]
        if trace.turn is not None and not trace.turn.done():
            trace.turn.set_result(False)
        self._advance()
        self._report(trace, outcome, told)

    def _report(self, trace: Trace, outcome: str, told: Mapping[str, str]) -> None:
        now = time.monotonic()
        forwarded = now if trace.forwarded is None else trace.forwarded
        finished = Finished(
            id=trace.id,
            owner=trace.owner,
            outcome=outcome,
            queued_seconds=forwarded - trace.began,
            run_seconds=now - forwarded,
            engine_seconds=0.0 if trace.forwarded is None else self._shared_out - trace.shared_out,
            prompt_tokens=_number(told.get("Nnsight-Prompt-Tokens")),
            generated_tokens=_number(told.get("Nnsight-Generated-Tokens")),
            bytes_in=trace.bytes_in,
            bytes_out=trace.bytes_out,
        )
        metrics.TRACES.labels(outcome=outcome).inc()
        metrics.TRACE_QUEUED_SECONDS.observe(finished.queued_seconds)
        metrics.TRACE_RUN_SECONDS.observe(finished.run_seconds)
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
        self._on_finished(finished)

    @property
    def running(self) -> int:
        """How many traces the engine has."""
        return self._running.total()

    @property
    def waiting(self) -> int:
        """How many traces are here that the engine does not have yet."""
        return len(self._traces) - self.running

    def ids(self) -> list[str]:
        """The ids of the traces that are here."""
        return list(self._traces)

    def visible_to(self, caller: Caller) -> list[dict[str, Any]]:
        """The caller's traces, oldest first; an admin's list holds everybody's."""
        return [
            trace.model(self.place(trace))
            for trace in self._traces.values()
            if caller.admin or trace.owner == caller.name
        ]


def _less(counter: Counter[str], key: str) -> None:
    """Count one less, and keep no key of a count of zero."""
    counter[key] -= 1
    if counter[key] <= 0:
        del counter[key]


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None
