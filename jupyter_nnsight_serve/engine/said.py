"""What a block says: its prints, warnings and log lines, kept for the caller whose block it is.

Blocks run as greenlets on their worker's one thread, so whose text a ``write`` is follows from the
greenlet that is running. Text that no block wrote goes where it always went.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from greenlet import getcurrent

from .sources import plain

MOST_CHARACTERS = 2**16
"""Characters kept of what one request says."""


class Said:
    """The text one request's blocks wrote, in order.

    Attributes
    ----------
    parts
        Pairs of stream name (``stdout`` or ``stderr``) and text.
    """

    def __init__(self) -> None:
        self.parts: list[tuple[str, str]] = []
        self.room = MOST_CHARACTERS

    def add(self, stream: str, text: str) -> None:
        """Keep ``text``, up to `MOST_CHARACTERS` in all."""
        if self.room <= 0 or not text:
            return
        kept = text[: self.room]
        self.room -= len(kept)
        if self.room <= 0:
            kept += f"\n... (cut after {MOST_CHARACTERS} characters)\n"
        if self.parts and self.parts[-1][0] == stream:
            kept = self.parts.pop()[1] + kept
        self.parts.append((stream, kept))

    def collect(self) -> list[tuple[str, str]]:
        """The text, with the caller's own file names."""
        return [(stream, plain(text)) for stream, text in self.parts]


class Router(io.TextIOBase):
    """Stands in for ``sys.stdout`` or ``sys.stderr`` in a worker.

    Parameters
    ----------
    stream
        ``stdout`` or ``stderr``.
    rest
        Where text goes that no block wrote.
    """

    def __init__(self, stream: str, rest: TextIO) -> None:
        self.stream = stream
        self.rest = rest

    def write(self, text: str) -> int:
        reference = getattr(getcurrent(), "mediator", None)
        said = getattr(reference(), "said", None) if reference is not None else None
        if said is None:
            return self.rest.write(text)
        said.add(self.stream, text)
        return len(text)

    def flush(self) -> None:
        self.rest.flush()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self.rest.fileno()

    def isatty(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rest, name)


def route() -> None:
    """Put routers in place of this process's ``sys.stdout`` and ``sys.stderr``, once."""
    if not isinstance(sys.stdout, Router):
        sys.stdout = Router("stdout", sys.stdout)
        sys.stderr = Router("stderr", sys.stderr)


@contextlib.contextmanager
def listening(said: Said) -> Iterator[None]:
    """Keep what is written inside, on this thread's own code path, in ``said``."""
    stdout, stderr = _Listener("stdout", said), _Listener("stderr", said)
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        yield


class _Listener(io.TextIOBase):
    def __init__(self, stream: str, said: Said) -> None:
        self.stream = stream
        self.said = said

    def write(self, text: str) -> int:
        self.said.add(self.stream, text)
        return len(text)

    def writable(self) -> bool:
        return True
