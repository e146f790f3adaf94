"""A request's block as it runs in this process.

What is unpickled from a caller is loaded through here, so that its source is kept under the
request's own scope, and a block's mistake ends that block, never the step it runs in.
"""

from __future__ import annotations

import contextlib
import io
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from greenlet import GreenletExit, getcurrent
from nnsight.intervention import serialization
from nnsight.intervention.interleaver import Event, Mediator, Pending

from . import lifeline, sources
from .sources import Scope, plain


class BlockExitError(Exception):
    """A block raised what would end the process, such as SystemExit or KeyboardInterrupt."""


@contextlib.contextmanager
def contained() -> Iterator[None]:
    """Turn whatever a caller's code raises inside into an `Exception`.

    The process is everybody's: ``exit()`` in one caller's block is that block's error.
    """
    try:
        yield
    except (Exception, lifeline.Stopped):
        raise
    except BaseException as error:
        text = f"{type(error).__name__}: {error}".rstrip(": ")
        contained = BlockExitError(
            f"the block raised {text}, which ends the block and nothing else"
        )
        contained.__intervention_tb__ = error.__traceback__  # type: ignore[attr-defined]
        raise contained from None


class Block(Mediator):
    """nnsight's worker of one block, on an engine that other people's blocks share.

    Attributes
    ----------
    source
        The text of the block; on those that were unpickled.
    """

    source: str

    def __setstate__(self, state: dict[str, Any]) -> None:
        source, glbls, lcls = state["reduced"]
        scope = sources.current()
        filename = scope.keep(scope.filename, source)
        self.source = source
        Mediator.__init__(self, compile(source, filename, "exec"), glbls, lcls, copy=state["copy"])
        self.presaved = state["presaved"]

    def switch(self, *args: Any) -> Any:
        """Resume the block; a module it asks to skip is run, and its output replaced.

        A step's forward is shared by requests that do not skip the module, so it runs for all
        rows, and the replacement takes the place of this request's. nnsight's own skip raises in
        the middle of the shared step instead, which ends the engine.
        """
        with contained():
            pending = super().switch(*args)
        if isinstance(pending, GreenletExit):
            # A greenlet that raises this has ended, and hands it over as its result.
            raise BlockExitError("the block raised GreenletExit, which ends the block")
        if isinstance(pending, Pending) and pending.event is Event.SKIP:
            location = pending.provider.removesuffix(".skip") + ".output"
            return pending._replace(event=Event.SWAP, provider=location)
        return pending

    def handle(self, provider: str, value: Any) -> Any:
        """Serve the block at ``provider``; an assignment that does not fit is raised in it."""
        batcher = self.interleaver.batcher
        batcher.serving += 1
        try:
            value = super().handle(provider, value)
            batcher.settle()
            return value
        except Exception as error:
            if not self.alive or hasattr(error, "__intervention_tb__"):
                raise
            # Refused on the model's side, while the block is parked at the line that wrote it.
            self.worker.parent = getcurrent()
            try:
                with contained():
                    self.pending = self.worker.throw(error)
            except Exception as thrown:
                thrown.__intervention_tb__ = thrown.__traceback__  # type: ignore[attr-defined]
                raise
            return value
        finally:
            batcher.serving -= 1


def _load_function(source: str, name: str, *rest: Any) -> Any:
    """nnsight's ``_load_function``, with the function's source kept under the current scope."""
    *metadata, filename, line = rest
    scope = sources.current()
    # Two lambdas can share a line, so the place alone does not tell them apart: a function that
    # travels on from here would take the source of the one loaded last.
    place = f" {name.strip('<>')}:{line}:{zlib.crc32(source.encode()):08x}"
    scoped = scope.name(plain(filename), place)
    function = serialization._load_function(source, name, *metadata, scoped, line)
    scope.holds(function.__code__.co_filename)
    return function


_REPLACED: dict[tuple[str, str], Callable[..., Any]] = {
    (Mediator.__module__, "Mediator"): Block,
    (serialization.__name__, "_load_function"): _load_function,
}


class Unpickler(serialization.CustomCloudUnpickler):
    """nnsight's unpickler, with what keeps source replaced by what keeps it under a scope."""

    def find_class(self, module: str, name: str) -> Any:
        return _REPLACED.get((module, name)) or super().find_class(module, name)


def loads(data: bytes, persistent_objects: dict[str, Any], scope: Scope) -> Any:
    """Unpickle ``data`` with its source kept under ``scope``."""
    with sources.loading(scope):
        return Unpickler(io.BytesIO(data), persistent_objects).load()
