"""A request's body, kept until the engine is to have it.

A trace waits for its turn with its body complete, so that a slow sender holds no place on the
engine, and so that the answer, which tells the place in the queue, can begin. What is small stays
in memory; the rest goes to a file that has no name, so that it is gone with this process.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable
from typing import IO, Any, TypeVar

from .errors import NoRoom

_T = TypeVar("_T")

MEMORY_BYTES = 256 * 1024
"""The largest body that is kept in memory."""

PIECE_BYTES = 2**20
"""Bytes written to the file, and read from it, at a time."""


class BodyGone(Exception):
    """The body was forgotten while it was read: its sender is gone."""


class Spool:
    """One body.

    Parameters
    ----------
    directory
        Where its file would be; empty for the system's directory of temporary files.
    """

    def __init__(self, directory: str = "") -> None:
        self._directory = directory
        self._memory = bytearray()
        self._file: IO[bytes] | None = None
        self._closed = False
        # Calls on the file that threads are at.
        self._calls = 0
        self.size = 0

    async def write(self, chunk: bytes) -> None:
        """Keep a piece; raises `NoRoom` where the disk does not take it."""
        self.size += len(chunk)
        self._memory += chunk
        if len(self._memory) > (MEMORY_BYTES if self._file is None else PIECE_BYTES):
            await self._to_file()

    async def _to_file(self) -> None:
        piece, self._memory = self._memory, bytearray()
        try:
            if self._file is None:
                directory = self._directory or None
                self._file = tempfile.TemporaryFile(dir=directory, buffering=0)
            await self._call(_write_all, self._file, piece)
        except OSError as error:
            raise NoRoom(error) from None

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body, piece by piece; raises `BodyGone` once it is closed."""
        if self._file is not None:
            file = self._file
            await self._call(file.seek, 0)
            while piece := await self._call(file.read, PIECE_BYTES):
                yield piece
        if self._closed:
            raise BodyGone
        if self._memory:
            yield bytes(self._memory)

    async def _call(self, function: Callable[..., _T], *arguments: Any) -> _T:
        """Call a function of the file on a thread; the file stays open until it is through."""
        if self._closed:
            raise BodyGone
        self._calls += 1
        call = asyncio.get_running_loop().run_in_executor(None, function, *arguments)
        call.add_done_callback(self._called)
        return await call

    def _called(self, call: asyncio.Future[Any]) -> None:
        self._calls -= 1
        if self._closed:
            self.close()

    def close(self) -> None:
        """Forget the body."""
        self._closed = True
        self._memory = bytearray()
        if self._file is not None and not self._calls:
            self._file.close()
            self._file = None


def _write_all(file: IO[bytes], piece: bytearray) -> None:
    view = memoryview(piece)
    while view:
        view = view[file.write(view) :]
