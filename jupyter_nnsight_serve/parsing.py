"""`ast.parse`, called again where CPython 3.11 fails for no reason of the source's.

Its AST code keeps the depth of its recursion in a place that all threads share. A second thread, or
a finalizer, that parses at the same moment makes it raise SystemError, "AST constructor recursion
depth mismatch" (python/cpython#106905).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

ATTEMPTS = 4

_T = TypeVar("_T")


def again(parse: Callable[[], _T]) -> _T:
    """What ``parse`` returns, called again after a SystemError, at most `ATTEMPTS` times."""
    for _ in range(ATTEMPTS - 1):
        try:
            return parse()
        except SystemError:
            continue
    return parse()
