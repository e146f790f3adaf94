"""The frames of an answer: one byte of kind, four bytes of length, and a payload, again and again.

Kinds: ``S`` state, ``T`` text as it is generated, ``R`` a part of the result, ``Z`` the result is
complete, ``E`` an error in place of one. Kinds that are not known are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

MEDIA_TYPE = "application/vnd.nnsight-serve.frames"

_HEAD_BYTES = 5
_MOST_JSON = 2**26
"""Bytes of the largest frame that is held in one piece."""

_KNOWN = frozenset(b"STRZE")


class FrameError(ValueError):
    """The bytes are not frames."""


class FrameReader:
    """Takes an answer apart as it comes.

    Parameters
    ----------
    result
        Takes every piece of the result, in order, without it being kept here.
    """

    def __init__(self, result: Callable[[memoryview], None]) -> None:
        self._result = result
        self._head = bytearray()
        self._payload = bytearray()
        self._kind = 0
        self._left = 0

    def feed(self, data: bytes) -> Iterator[tuple[str, bytes]]:
        """Kind and payload of the frames that ``data`` completes, all but parts of the result."""
        view = memoryview(data)
        while True:
            if len(self._head) < _HEAD_BYTES:
                missing = _HEAD_BYTES - len(self._head)
                self._head += view[:missing]
                view = view[missing:]
                if len(self._head) < _HEAD_BYTES:
                    return
                self._begin()
            part, view = view[: self._left], view[self._left :]
            self._left -= len(part)
            if self._kind == ord("R"):
                if part:
                    self._result(part)
            elif self._kind in _KNOWN:
                self._payload += part
            if self._left:
                return
            kind, payload = chr(self._kind), bytes(self._payload)
            self._head.clear()
            self._payload.clear()
            if kind in "STZE":
                yield kind, payload

    def _begin(self) -> None:
        self._kind = self._head[0]
        self._left = int.from_bytes(self._head[1:], "little")
        if self._kind in _KNOWN and self._kind != ord("R") and self._left > _MOST_JSON:
            raise FrameError(f"a frame of {self._left} bytes where a few are expected")

    @property
    def between_frames(self) -> bool:
        """Whether what came so far ends with a whole frame."""
        return not self._head
