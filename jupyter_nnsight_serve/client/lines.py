"""Tracebacks that end at the person's own lines.

An exception raised in a ``with`` statement's exit shows the frames of the exit, which are this
package's and nnsight's. The frames cannot be left out by whoever raises; but a traceback's entry
for the frame below can be cut off behind it, once the exception is there. A trace function of that
frame is told so, the means nnsight itself uses to skip the block.

In their place stand entries for the lines of the block at which the engine was.
"""

from __future__ import annotations

import ast
import linecache
import re
import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn

from ..parsing import again
from .errors import ServedTraceError

_LINE = re.compile(r'^\s*File "(?P<file>.+?)", line (?P<line>\d+)(?:, in (?P<name>.+))?$', re.M)
_MOST = 20


def tail_of(remote_traceback: str) -> types.TracebackType | None:
    """Traceback entries for the lines that a remote traceback's text names."""
    tail: types.TracebackType | None = None
    for found in reversed(list(_LINE.finditer(remote_traceback))[-_MOST:]):
        entry = _entry(found["file"], int(found["line"]), found["name"] or "<module>")
        if entry is not None:
            tail = types.TracebackType(tail, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return tail


def _entry(file: str, line: int, name: str) -> types.TracebackType | None:
    """A traceback entry at ``line`` of ``file``, where nothing of this process ran."""
    if not 0 < line < 10**6:
        return None
    text = linecache.getline(file, line).rstrip()
    tree = again(lambda: ast.parse("raise LookupError"))
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt | ast.expr):
            # The whole line, so that nothing in it is pointed at.
            node.lineno = node.end_lineno = line
            node.col_offset = len(text) - len(text.lstrip())
            node.end_col_offset = max(len(text.encode()), node.col_offset + 1)
    code = compile(tree, file, "exec")
    try:
        exec(code.replace(co_name=name), {"__name__": name})
    except LookupError as error:
        here = error.__traceback__
        return here.tb_next if here is not None else None
    return None


class _Cut:
    """Cuts a traceback behind ``frame`` when an exception arrives there, then steps back."""

    def __init__(self, frame: types.FrameType, tail: types.TracebackType | None) -> None:
        self.frame = frame
        self.tail = tail
        self.previous: Callable[..., Any] | None = sys.gettrace()
        self.previous_local = frame.f_trace

    def arm(self) -> None:
        sys.settrace(_nothing)
        self.frame.f_trace = self.step

    def step(self, frame: types.FrameType, event: str, argument: Any) -> Any:
        if event == "exception":
            argument[2].tb_next = self.tail
        frame.f_trace = self.previous_local
        sys.settrace(self.previous)
        return self.previous_local


def _nothing(*_: Any) -> None:
    return None


def cut_behind(frame: types.FrameType | None, tail: types.TracebackType | None) -> None:
    """Have the exception that is raised next in this thread end at ``frame``, with ``tail``.

    To be called right before it is raised.
    """
    if isinstance(frame, types.FrameType):
        _Cut(frame, tail).arm()


def raise_at(error: BaseException, frame: types.FrameType | None) -> NoReturn:
    """Raise ``error`` so that its traceback ends at the person's lines; from an ``except``.

    Parameters
    ----------
    frame
        The person's, out of which the exception is about to come.
    """
    __tracebackhide__ = True
    tail = tail_of(error.remote_traceback) if isinstance(error, ServedTraceError) else None
    error.__context__ = None
    cut_behind(frame, tail)
    raise error.with_traceback(None)
