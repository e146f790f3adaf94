"""Bodies that wait: in memory while they are small, else in a file."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from jupyter_nnsight_serve import spool as module
from jupyter_nnsight_serve.errors import NoRoom
from jupyter_nnsight_serve.spool import MEMORY_BYTES, Spool


def files() -> int:
    """How many deleted files this process holds open."""
    held = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            held += os.readlink(f"/proc/self/fd/{fd}").endswith("(deleted)")
        except FileNotFoundError:
            continue
    return held


async def whole(spool: Spool) -> bytes:
    return b"".join([piece async for piece in spool.pieces()])


@pytest.mark.parametrize("size", [0, 1, MEMORY_BYTES, MEMORY_BYTES + 1, 3 * 2**20 + 17])
async def test_body_comes_back_as_it_went_in_and_again(tmp_path: Path, size: int) -> None:
    before = files()
    body = os.urandom(size)
    spool = Spool(str(tmp_path))
    for start in range(0, size, 65536):
        await spool.write(body[start : start + 65536])
    assert spool.size == size
    assert files() - before == (size > MEMORY_BYTES)
    assert await whole(spool) == body
    assert await whole(spool) == body
    # The file has no name, so that no end of this process leaves it.
    assert list(tmp_path.iterdir()) == []
    spool.close()
    assert files() == before


async def test_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: Any, piece: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    spool = Spool(str(tmp_path))
    monkeypatch.setattr(module, "_write_all", full)
    with pytest.raises(NoRoom) as caught:
        await spool.write(b"x" * (MEMORY_BYTES + 1))
    assert caught.value.status_code == 507
    assert "No space left on device" in caught.value.message
    spool.close()
