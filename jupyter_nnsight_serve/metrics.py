"""Prometheus metrics, on the default registry that Jupyter's /metrics serves.

Jupyter's /metrics asks no Authorizer, so no user name, model path or edit name is ever a label.
The collectors belong to the process, as Jupyter's own do: a registry holds a name only once.
"""

from __future__ import annotations

from prometheus_client import Counter, Enum, Histogram

# How a trace can end, as the label `outcome` and in the log line.
OUTCOMES = ("ok", "error", "refused", "timeout", "disconnected", "lost", "too_large")

ENGINE_STATES = ("stopped", "starting", "ready", "failed")

_SECONDS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

TRACES = Counter("nnsight_serve_traces", "Traces by how they ended.", ["outcome"])
TRACE_QUEUED_SECONDS = Histogram(
    "nnsight_serve_trace_queued_seconds",
    "Seconds from a trace's headers to the moment the engine had all of it.",
    buckets=_SECONDS,
)
TRACE_RUN_SECONDS = Histogram(
    "nnsight_serve_trace_run_seconds",
    "Seconds from the moment the engine had all of a trace to its last byte to the caller.",
    buckets=_SECONDS,
)
BYTES_IN = Counter("nnsight_serve_request_bytes", "Bytes of traces and edits received.")
BYTES_OUT = Counter("nnsight_serve_response_bytes", "Bytes of traces' responses sent.")
ENGINE_STATE = Enum(
    "nnsight_serve_engine_state", "What the engine is doing.", states=list(ENGINE_STATES)
)

for _outcome in OUTCOMES:
    TRACES.labels(outcome=_outcome)
