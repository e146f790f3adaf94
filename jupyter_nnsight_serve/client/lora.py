"""vLLM's LoRARequest for an environment without vLLM."""

from __future__ import annotations

import importlib
import operator
import zlib
from dataclasses import dataclass
from typing import Any


class _ServerModule:
    """A module that is imported where this is unpickled."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> Any:
        return importlib.import_module, (self.name,)


@dataclass(frozen=True)
class LoRARequest:
    """Which adapter a request runs with; arrives as vLLM's own class.

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

    def __reduce__(self) -> Any:
        make = operator.methodcaller(
            "LoRARequest", self.lora_name, self.lora_int_id, self.lora_path
        )
        return make, (_ServerModule("vllm.lora.request"),)


def lora_request(given: Any) -> Any:
    """``given`` as a request for an adapter.

    A string is the adapter's directory on the server and its name; a dict holds the fields of
    `LoRARequest`; anything else is passed on.
    """
    if isinstance(given, str):
        # The engine keeps adapters by number, so that one path has to have one number.
        return LoRARequest(given, zlib.crc32(given.encode()) % (2**31 - 1) + 1, given)
    if isinstance(given, dict):
        return LoRARequest(**given)
    return given
