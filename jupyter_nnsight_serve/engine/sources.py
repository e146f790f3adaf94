"""Whose source is whose: every name under which a request's source is kept belongs to one scope.

nnsight finds a block's source again through process-wide tables: ``linecache``, ``SOURCES`` (text
by file name) and ``BLOCKS`` (compiled blocks by place). Notebooks of different people share file
names, so source is kept under ``<trace SCOPE> FILE`` instead, the scope being one request's, and
given back when the request ends. A traceback shows the caller's own file names again, and only
frames of the caller's own source.
"""

from __future__ import annotations

import contextlib
import contextvars
import linecache
import re
import traceback
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from nnsight.intervention.errors import DeferredError
from nnsight.intervention.interleaver import EarlyStopException
from nnsight.tracing.globals import BLOCKS, SOURCES
from vllm.exceptions import VLLMValidationError

# A scoped name, with the `[function:line]` that nnsight puts before the file of a function.
_SCOPED = re.compile(r"(?:\[[^\]\s]+:\d+\] |<trace [^>]*> )*<trace [^>]*> (?:\[[^\]\s]+:\d+\] )*")


# Every error is one of these, so they tell nothing.
_EVERY_ERROR = (Exception, BaseException, object)

MOST_CHARACTERS = 2**16
"""Characters kept of an error's text and of its traceback."""


@dataclass(frozen=True)
class Scope:
    """Whose source is being loaded.

    Attributes
    ----------
    key
        Unique among everything this process holds at the same time.
    filename
        The file name the caller's own source had.
    """

    key: str
    filename: str

    def name(self, filename: str, detail: str = "") -> str:
        """The scoped form of ``filename``."""
        return f"<trace {self.key}{detail}> {filename}"

    def keep(self, filename: str, source: str, detail: str = "") -> str:
        """Keep ``source`` under the scoped form of ``filename``, which is returned."""
        scoped = self.name(filename, detail)
        linecache.cache[scoped] = (len(source), None, source.splitlines(keepends=True), scoped)
        self.holds(scoped)
        return scoped

    def holds(self, name: str) -> None:
        """Have the table entries under ``name`` given back with this scope."""
        _kept[self.key].append(name)


# Scoped names by scope key, so that giving a scope back does not search the tables.
_kept: defaultdict[str, list[str]] = defaultdict(list)
_current: contextvars.ContextVar[Scope] = contextvars.ContextVar("scope")


def current() -> Scope:
    """The scope of what is being unpickled."""
    return _current.get()


def release(key: str) -> None:
    """Give back every table entry of the scope ``key``."""
    names = set(_kept.pop(key, ()))
    for name in names:
        linecache.cache.pop(name, None)
        SOURCES.pop(name, None)
    if names and BLOCKS:
        for place in [place for place in BLOCKS if place[0] in names]:
            BLOCKS.pop(place, None)


def plain(text: str) -> str:
    """``text`` with the caller's own file names in place of scoped ones."""
    return _SCOPED.sub("", text)


@contextlib.contextmanager
def loading(scope: Scope) -> Iterator[None]:
    """Keep the source of everything unpickled inside under ``scope``."""
    token = _current.set(scope)
    try:
        yield
    finally:
        _current.reset(token)


def capture_exception(exception: BaseException) -> DeferredError:
    """An exception as nnsight's deferred error, its traceback cut to the caller's own lines.

    ``bases`` is an entry more: the names of the built-in classes that its type derives from.
    """
    tb = getattr(exception, "__intervention_tb__", None) or exception.__traceback__
    frames = [
        frame for frame in traceback.extract_tb(tb) if frame.filename.startswith(("<trace ", "["))
    ]
    return {
        "type_name": type(exception).__name__,
        "message": _short(plain(_text(exception))),
        "traceback": _short(plain("".join(traceback.format_list(frames)))),
        "is_control_flow": isinstance(exception, EarlyStopException),
        "bases": _bases(exception),
    }


def _bases(exception: BaseException) -> list[str]:
    """The built-in classes that say what kind of error it is, nearest first."""
    if isinstance(exception, VLLMValidationError):
        # A ValueError on vLLM 0.25, a class of vLLM's own alone on 0.32.
        return ["ValueError"]
    return [
        kind.__name__
        for kind in type(exception).__mro__[1:]
        if kind.__module__ == "builtins" and kind not in _EVERY_ERROR
    ]


def _text(exception: BaseException) -> str:
    """``str(exception)``, which is the caller's code where the class is the caller's."""
    try:
        return str(exception)
    except BaseException as error:
        return f"its text cannot be had: its __str__ raised {type(error).__name__}"


def _short(text: str) -> str:
    """``text``, cut where nobody reads on."""
    if len(text) <= MOST_CHARACTERS:
        return text
    return f"{text[:MOST_CHARACTERS]}... ({len(text)} characters in all)"
