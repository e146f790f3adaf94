"""The frames of a response that begins before its result is there.

A frame is one byte of kind, four bytes of length, little-endian, and its payload. States come when
something changed and at least every `HEARTBEAT_SECONDS`, so that no proxy takes a long trace for an
idle connection.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

CONTENT_TYPE = "application/vnd.nnsight-serve.frames"
HEARTBEAT_SECONDS = 5.0
STATE_SECONDS = 0.25
"""Seconds between two states when something changes all the time."""

STATE, TOKENS, RESULT, ERROR, END = b"S", b"T", b"R", b"E", b"Z"


def frame(kind: bytes, payload: bytes | memoryview = b"") -> bytes:
    """One frame."""
    return kind + len(payload).to_bytes(4, "little") + bytes(payload)


def json_frame(kind: bytes, **fields: Any) -> bytes:
    """One frame whose payload is a JSON object."""
    return frame(kind, json.dumps(fields).encode())


class Progress:
    """How far a running trace is.

    Parameters
    ----------
    text
        Whether the text is kept, piece by piece, as it is generated.
    """

    def __init__(self, text: bool) -> None:
        self.text = text
        self.pieces: list[dict[str, Any]] = []
        self.changed = asyncio.Event()
        self._tokens: dict[tuple[int, int], int] = {}
        self._characters: dict[tuple[int, int], int] = {}

    @property
    def tokens(self) -> int:
        """Tokens generated so far, over all invokes and sequences."""
        return sum(self._tokens.values())

    def update(self, invoke: int, output: Any) -> None:
        """Take a cumulative ``RequestOutput`` of one of the trace's invokes."""
        for completion in output.outputs:
            key = (invoke, completion.index)
            before, characters = self._tokens.get(key, 0), self._characters.get(key, 0)
            if self.text and len(completion.token_ids) > before:
                self.pieces.append(
                    {
                        "invoke": invoke,
                        "sequence": completion.index,
                        "text": completion.text[characters:],
                        "token_ids": list(completion.token_ids[before:]),
                    }
                )
            self._tokens[key] = len(completion.token_ids)
            self._characters[key] = len(completion.text)
        self.changed.set()

    async def frames(self, task: asyncio.Task[Any]) -> AsyncIterator[bytes]:
        """State and token frames until ``task`` is done."""
        while not task.done():
            yield self.state()
            for piece in self._taken():
                yield json_frame(TOKENS, **piece)
            self.changed.clear()
            await self._wait(task)
        for piece in self._taken():
            yield json_frame(TOKENS, **piece)

    def state(self) -> bytes:
        """A state frame."""
        return json_frame(STATE, state="running", tokens=self.tokens)

    def _taken(self) -> list[dict[str, Any]]:
        pieces, self.pieces = self.pieces, []
        return pieces

    async def _wait(self, task: asyncio.Task[Any]) -> None:
        """Wait until the task is done, there is news, or a heartbeat is due."""
        if not self.text:
            await asyncio.wait([task], timeout=STATE_SECONDS)
        changed = asyncio.ensure_future(self.changed.wait())
        try:
            await asyncio.wait(
                [task, changed],
                timeout=HEARTBEAT_SECONDS,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            changed.cancel()
