"""The notebook's side: traces on a served model, from an environment with nnsight and no vLLM.

    from jupyter_nnsight_serve import connect

    hub = connect()
    model = hub.model
    with model.trace("The Eiffel Tower is in", max_tokens=5) as tracer:
        hidden = sum(model.model.layers[16].output).save()
        result = tracer.result.save()

`connect` finds a server and speaks HTTP only; nnsight and torch are imported with ``hub.model``.
"""

from __future__ import annotations

from .connect import connect
from .errors import EngineNotReady, HubError, ServedTraceError, TraceCut
from .hub import Hub
from .lora import LoRARequest

__all__ = [
    "EngineNotReady",
    "Hub",
    "HubError",
    "LoRARequest",
    "ServedTraceError",
    "TraceCut",
    "connect",
]
