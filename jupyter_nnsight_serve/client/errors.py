"""What can go wrong at a notebook, and how an error of a block looks there.

What kept a trace from running is a `HubError`. What a block raised is a `ServedTraceError`, which
is a RuntimeError, as nnsight's own client raises, and also of the built-in type that was raised:
``except IndexError`` and ``except RuntimeError`` both catch it.
"""

from __future__ import annotations

import builtins
import functools
from collections.abc import Sequence
from typing import Any


class HubError(ConnectionError):
    """The server was not reached, or it refused; the text says what to do.

    Attributes
    ----------
    status
        The HTTP status, where there was an answer.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class EngineNotReady(HubError):
    """The server is there and its engine cannot take a trace now.

    Attributes
    ----------
    retry_after
        Seconds after which trying again makes sense, where the server says so.
    """

    def __init__(self, message: str, status: int = 503, retry_after: float | None = None) -> None:
        super().__init__(message, status)
        self.retry_after = retry_after


class NotTrusted(HubError):
    """The server's certificate is not one that this machine trusts."""


class TraceCut(HubError):
    """The answer to a trace ended before it was complete; the trace may have run."""


class UnsendableError(TypeError):
    """A block reads a name whose value cannot be sent."""


class PickledSaveError(ValueError):
    """A save came as a pickle, and ``allow_pickle=False`` forbids to open it."""


class ServedTraceError(RuntimeError):
    """What the block raised in the engine.

    Attributes
    ----------
    type_name
        The name of the exception's own type.
    message
        Its own text.
    remote_traceback
        The lines of the block, and of functions it called, that it passed through.
    bases
        The names of the classes that its own type derives from, where the server told.
    """

    def __init__(self, type_name: str, message: str, remote_traceback: str = "") -> None:
        # The first line is the text nnsight's own client gives, so that code that matches on it
        # goes on to work.
        super().__init__(f"{type_name}: {message}")
        self.type_name = type_name
        self.message = message
        self.remote_traceback = remote_traceback
        self.bases: tuple[str, ...] = ()

    def __str__(self) -> str:
        # Some of the built-in types would make another text of it (KeyError, ImportError).
        return f"{self.type_name}: {self.message}"

    def __reduce__(self) -> Any:
        return served_error, (self.type_name, self.message, self.remote_traceback, self.bases)


# Types that mean something to the interpreter where they appear, or that are not made of one text.
_UNSAFE = (StopIteration, StopAsyncIteration, UnicodeError, BaseExceptionGroup)


@functools.cache
def _type_of(name: str) -> type[ServedTraceError]:
    """`ServedTraceError`, also of the built-in exception type ``name`` where that is safe."""
    found = getattr(builtins, name, None)
    if name.startswith("Unicode"):
        found = ValueError
    if (
        not isinstance(found, type)
        or not issubclass(found, Exception)
        or issubclass(found, _UNSAFE)
        or issubclass(ServedTraceError, found)
    ):
        return ServedTraceError
    return type(
        "ServedTraceError",
        (ServedTraceError, found),
        {"__module__": __name__, "__doc__": ServedTraceError.__doc__},
    )


def served_error(
    type_name: str, message: str, remote_traceback: str = "", bases: Sequence[str] = ()
) -> ServedTraceError:
    """The error to raise for what a block raised.

    Parameters
    ----------
    bases
        The names of the classes that the exception's own type derives from, nearest first, where
        the server tells them: the first one that is built in is the type to catch it by.
    """
    kinds = [_type_of(name) for name in (type_name, *bases)]
    kind = next((kind for kind in kinds if kind is not ServedTraceError), ServedTraceError)
    error = kind(type_name, message, remote_traceback)
    error.bases = tuple(bases)
    return error
