"""What the end of a framed response says of its trace.

A framed response has begun before its outcome is known, so the engine tells it in the last frame
instead of in headers. The Jupyter process reads no other frame.
"""

from __future__ import annotations

import json
from typing import Any

CONTENT_TYPE = "application/vnd.nnsight-serve.frames"

TAIL_BYTES = 256
"""More bytes than the last frame of a complete result has."""

_HEADERS = {
    "outcome": "Nnsight-Outcome",
    "prompt_tokens": "Nnsight-Prompt-Tokens",
    "generated_tokens": "Nnsight-Generated-Tokens",
}


def end_of(tail: bytes) -> dict[str, str] | None:
    """The outcome in a response's last bytes, by the names of the headers that else tell it.

    Parameters
    ----------
    tail
        The last `TAIL_BYTES` bytes of the response, or all of it.

    Returns
    -------
    None where the response does not end with a complete result.
    """
    at = tail.rfind(b"Z")
    while at >= 0:
        payload = tail[at + 5 :]
        if len(payload) == int.from_bytes(tail[at + 1 : at + 5], "little"):
            try:
                told: Any = json.loads(payload)
            except ValueError:
                told = None
            if isinstance(told, dict):
                return {_HEADERS[key]: str(value) for key, value in told.items() if key in _HEADERS}
        at = tail.rfind(b"Z", 0, at)
    return None
