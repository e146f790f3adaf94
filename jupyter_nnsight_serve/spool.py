"""A request's body, kept until the engine is to have it.

A trace waits for its turn with its body complete, so that a slow sender holds no place on the
engine, and so that the answer, which tells the place in the queue, can begin. What is small stays
in memory; the rest goes to a file that has no name, so that it is gone with this process.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from typing import IO

from .errors import NoRoom

MEMORY_BYTES = 256 * 1024
"""The largest body that is kept in memory."""

PIECE_BYTES = 2**20
"""Bytes written to the file, and read from it, at a time."""


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
            await asyncio.to_thread(_write_all, self._file, piece)
        except OSError as error:
            raise NoRoom(error) from None

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body, piece by piece."""
        if self._file is not None:
            file = self._file
            await asyncio.to_thread(file.seek, 0)
            while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
                yield piece
        if self._memory:
            yield bytes(self._memory)

    def close(self) -> None:
        """Forget the body."""
        self._memory = bytearray()
        if self._file is not None:
            self._file.close()
            self._file = None


def _write_all(file: IO[bytes], piece: bytearray) -> None:
    view = memoryview(piece)
    while view:
        view = view[file.write(view) :]
