"""Traces in a cell under ``%%time``.

nnsight reads a block's source by the file name of its code. IPython compiles what stands below
``%%time`` under one name for every cell and leaves no source under it.
"""

from __future__ import annotations

import ast
import linecache
from types import CodeType, FrameType

from nnsight.tracing.globals import BLOCKS, SOURCES

_TIMED = "<timed exec>"
_FRAMES = 32
"""How far up `%%time` is looked for; an event loop that runs inside of it takes some."""


def lend_source(frame: FrameType) -> None:
    """Have nnsight find the source of ``frame`` if it runs under ``%%time``."""
    if frame.f_code.co_filename != _TIMED:
        return
    caller = frame.f_back
    for _ in range(_FRAMES):
        if caller is None:
            return
        source = caller.f_locals.get("expr")
        if caller.f_code.co_name == "time" and isinstance(source, str):
            if _holds(source, frame.f_code):
                break
            return
        caller = caller.f_back
    else:
        return
    if SOURCES.get(_TIMED) == source:
        return
    # Blocks of an earlier cell are kept under the same name.
    for place in [place for place in BLOCKS if place[0] == _TIMED]:
        BLOCKS.pop(place, None)
    SOURCES[_TIMED] = source
    lines = source.splitlines(keepends=True)
    linecache.cache[_TIMED] = (len(source), None, lines, _TIMED)


def _holds(source: str, code: CodeType) -> bool:
    """Whether ``code`` is of the cell, and not of an earlier one that stood below ``%%time``."""
    if code.co_name == "<module>":
        return True
    waiting = [compile(source, _TIMED, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)]
    while waiting:
        found = waiting.pop()
        if (found.co_name, found.co_firstlineno) == (code.co_name, code.co_firstlineno):
            return bool(found.co_code == code.co_code)
        waiting += [part for part in found.co_consts if isinstance(part, CodeType)]
    return False
