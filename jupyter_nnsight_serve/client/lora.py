"""vLLM's LoRARequest for an environment without vLLM."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass
class LoRARequest:
    """Which adapter a request runs with; travels as a plain dict.

    Parameters
    ----------
    lora_name
        A name for it.
    lora_int_id
        A number above 0 that is this adapter's alone on the engine.
    lora_path
        Its directory on the server.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __reduce_ex__(self, protocol: object) -> Any:
        return dict, ([(item.name, getattr(self, item.name)) for item in fields(self)],)
