"""What everything of one `connect` shares."""

from __future__ import annotations

from dataclasses import dataclass

from .cache import Cache
from .link import Link
from .progress import Line


@dataclass(frozen=True)
class Connection:
    """The way to a server, and what the person chose for it.

    Attributes
    ----------
    link
        HTTP to the server.
    cache
        What is kept on disk between kernels.
    allow_pickle
        Whether saves that are neither tensors nor plain containers are unpickled.
    line
        The line that says what its traces are at.
    """

    link: Link
    cache: Cache
    allow_pickle: bool
    line: Line
