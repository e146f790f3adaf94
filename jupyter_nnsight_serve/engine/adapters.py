"""The adapter a request runs with, from the plain forms that a notebook without vLLM sends."""

from __future__ import annotations

import zlib
from typing import Any

from vllm.lora.request import LoRARequest


def lora_request(given: Any) -> LoRARequest | None:
    """``given`` as vLLM's own request for an adapter.

    Parameters
    ----------
    given
        None, vLLM's ``LoRARequest``, a dict of its fields, or the adapter's directory on this
        machine, which is its name as well.

    Raises
    ------
    TypeError, ValueError
        It is none of these; the text says what it has to be.
    """
    if given is None or isinstance(given, LoRARequest):
        return given
    if isinstance(given, str):
        # The engine keeps adapters by number, so that one path has to have one number.
        number = zlib.crc32(given.encode()) % (2**31 - 1) + 1
        given = {"lora_name": given, "lora_int_id": number, "lora_path": given}
    if not isinstance(given, dict):
        raise TypeError(
            "lora_request= takes an adapter's directory on the server, a dict of the fields of "
            f"vLLM's LoRARequest, or a LoRARequest, not a {type(given).__name__}"
        )
    try:
        return LoRARequest(**given)
    except (TypeError, ValueError, AssertionError) as error:
        raise ValueError(f"lora_request= does not make a LoRARequest of vLLM's: {error}") from None
