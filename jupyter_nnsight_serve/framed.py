"""The frames of a response that begins before its result is there.

The Jupyter process passes the engine's frames on unread. It looks at their heads only, to know
where one ends: there it may tell a place in the queue, or an error, in a frame of its own. And it
reads the last frame, which tells the outcome that other responses have in their headers.
"""

from __future__ import annotations

import json
from typing import Any

CONTENT_TYPE = "application/vnd.nnsight-serve.frames"

HEARTBEAT_SECONDS = 5.0
"""No response is silent for longer, so that no proxy takes it for an idle connection."""

STATE, ERROR, END = b"S", b"E", b"Z"

_HEAD_BYTES = 5
_END_BYTES = 4096

_HEADERS = {
    "outcome": "Nnsight-Outcome",
    "prompt_tokens": "Nnsight-Prompt-Tokens",
    "generated_tokens": "Nnsight-Generated-Tokens",
}

# How a trace ended whose answer is an error of this HTTP status.
_OF_STATUS = {503: "lost", 504: "timeout"}


def json_frame(kind: bytes, fields: dict[str, Any]) -> bytes:
    """One frame whose payload is a JSON object."""
    payload = json.dumps(fields).encode()
    return kind + len(payload).to_bytes(4, "little") + payload


class FrameWatch:
    """Follows a response's frames as they pass.

    Attributes
    ----------
    ended
        Kind of the last frame, "Z" or "E", once it is complete.
    """

    def __init__(self) -> None:
        self._head = bytearray()
        self._left = 0
        self._end = bytearray()
        self.ended: str | None = None

    @property
    def between_frames(self) -> bool:
        """Whether what has passed ends with a whole frame."""
        return not self._head

    def feed(self, chunk: bytes) -> None:
        """A piece passes."""
        at = 0
        while at < len(chunk):
            missing = _HEAD_BYTES - len(self._head)
            if missing:
                self._head += chunk[at : at + missing]
                at += missing
                if len(self._head) < _HEAD_BYTES:
                    return
                self._left = int.from_bytes(self._head[1:], "little")
            part = min(self._left, len(chunk) - at)
            if self._head[:1] in (END, ERROR) and len(self._end) < _END_BYTES:
                self._end += chunk[at : at + part]
            at += part
            self._left -= part
            if self._left:
                return
            if self._head[:1] in (END, ERROR):
                self.ended = self._head[:1].decode()
            self._head.clear()

    def told(self) -> dict[str, str]:
        """The outcome in the last frame, by the names of the headers that else tell it."""
        try:
            told: Any = json.loads(self._end)
        except ValueError:
            return {}
        if not isinstance(told, dict):
            return {}
        if self.ended == "E":
            return {"Nnsight-Outcome": _OF_STATUS.get(told.get("status", 0), "refused")}
        return {_HEADERS[key]: str(value) for key, value in told.items() if key in _HEADERS}
