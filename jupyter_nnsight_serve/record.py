"""What happened, for admins: events on Jupyter's event bus, and totals of each user."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from jupyter_events import EventLogger

from .admission import Finished
from .edits import Edit
from .supervisor import Status

_SCHEMAS = Path(__file__).parent / "events"
_ID = "https://events.jupyter.org/jupyter_nnsight_serve/{}/v1"


@dataclass
class Total:
    """One user's use of the engine since the server started.

    Parameters
    ----------
    traces
        How many, by outcome.
    engine_seconds
        Seconds of the engine's time: while n traces run, each has an nth of it.
    gpu_seconds
        The same times the number of the engine's devices.
    queued_seconds
        Seconds that traces waited for their turns.
    """

    traces: dict[str, int] = field(default_factory=dict)
    engine_seconds: float = 0.0
    gpu_seconds: float = 0.0
    queued_seconds: float = 0.0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    bytes_in: int = 0
    bytes_out: int = 0


class Recorder:
    """Emits events and keeps totals.

    Parameters
    ----------
    events
        Jupyter's event bus, on which an admin configures handlers (c.EventLogger).
    devices
        Devices the engine runs on.
    log
        Gets the errors of event handlers.
    """

    def __init__(
        self,
        events: EventLogger,
        devices: int,
        log: logging.Logger | logging.LoggerAdapter[Any],
    ) -> None:
        self._events = events
        self._log = log
        self._devices = devices
        self._since = time.time()
        self._totals: dict[str, Total] = {}
        for path in sorted(_SCHEMAS.glob("*.yaml")):
            events.register_event_schema(path)

    def trace_finished(self, trace: Finished) -> None:
        """A trace is over."""
        total = self._totals.setdefault(trace.owner, Total())
        total.traces[trace.outcome] = total.traces.get(trace.outcome, 0) + 1
        total.engine_seconds += trace.engine_seconds
        total.gpu_seconds += trace.engine_seconds * self._devices
        total.queued_seconds += trace.queued_seconds
        total.prompt_tokens += trace.prompt_tokens or 0
        total.generated_tokens += trace.generated_tokens or 0
        total.bytes_in += trace.bytes_in
        total.bytes_out += trace.bytes_out
        data = asdict(trace)
        data["user"] = data.pop("owner")
        self._emit("trace_finished", data)

    def edit_changed(self, action: str, edit: Edit, reason: str | None) -> None:
        """An edit was "installed", "cleared" by its owner or an admin, or "removed" by a limit."""
        self._emit(
            "edit_changed",
            {
                "action": action,
                "id": edit.id,
                "name": edit.name,
                "user": edit.owner,
                "shared": edit.shared,
                "bytes": edit.bytes,
                "reason": reason,
            },
        )

    def engine_state_changed(self, before: Status, now: Status) -> None:
        """The engine came to another state."""
        self._emit(
            "engine_state_changed",
            {"before": before.state, "state": now.state, "reason": now.reason},
        )

    def usage(self) -> dict[str, Any]:
        """What GET /nnsight/usage tells."""
        return {
            "since": self._since,
            "devices": self._devices,
            "users": {name: asdict(total) for name, total in sorted(self._totals.items())},
        }

    def _emit(self, name: str, data: dict[str, Any]) -> None:
        try:
            self._events.emit(schema_id=_ID.format(name), data=data)
        except Exception:
            # A handler of the admin's that fails is no reason to lose a trace.
            self._log.exception("The event %s could not be recorded", name)
