"""The line that says what long traces are at, and is gone when they are done.

One line for a connection, however many traces run at once: what a person expects of `tqdm`, whose
own bar over a pool of threads stays readable above it.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

DELAY_SECONDS = 0.5
"""How long a trace runs before the line appears."""

REFRESH_SECONDS = 0.2
"""How often the line is redrawn at most."""


class Line:
    """The line, made with tqdm so that it works in a notebook and in a terminal.

    Parameters
    ----------
    wanted
        Whether there is to be a line at all.
    """

    def __init__(self, wanted: bool = True) -> None:
        self.wanted = wanted
        self._lock = threading.RLock()
        self._traces: list[Progress] = []
        self._drawn = 0.0
        self._bar: Any = None

    def trace(self, shown: bool = True) -> Progress:
        """What one trace tells of itself, until it is closed."""
        found = Progress(self)
        if self.wanted and shown and visible():
            with self._lock:
                self._traces.append(found)
        return found

    def draw(self) -> None:
        """Draw the line if it is time to."""
        now = time.monotonic()
        with self._lock:
            if now - self._drawn < REFRESH_SECONDS or not self._traces:
                return
            if now - self._traces[0].began < DELAY_SECONDS:
                return
            self._drawn = now
            try:
                self._show(f"nnsight: {self._text(now)}")
            except Exception:
                # A notebook without a working widget, or a closed stream: no reason to lose a
                # trace.
                self.wanted = False
                self._traces.clear()

    def _text(self, now: float) -> str:
        seconds = f"({now - self._traces[0].began:.0f} s)"
        if len(self._traces) == 1:
            return f"{self._traces[0].text} {seconds}"
        kinds = [trace.kind for trace in self._traces]
        parts = [f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)]
        if tokens := sum(trace.tokens for trace in self._traces):
            parts.append(_tokens(tokens))
        return f"{len(self._traces)} traces: {', '.join(parts)} {seconds}"

    def _show(self, text: str) -> None:
        if self._bar is None:
            self._bar = _bar(text)
        else:
            self._bar.set_description_str(text)

    def remove(self, trace: Progress) -> None:
        """Take a trace off the line, and the line away with the last one."""
        with self._lock:
            if trace in self._traces:
                self._traces.remove(trace)
            if self._traces or self._bar is None:
                return
            bar, self._bar, self._drawn = self._bar, None, 0.0
            with contextlib.suppress(Exception):
                bar.close()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Have the line out of the way of what is written inside."""
        with self._lock:
            if self._bar is not None:
                self._bar.clear()
            try:
                yield
            finally:
                if self._bar is not None:
                    self._bar.refresh()


class Progress:
    """What one trace is at; made by `Line.trace`.

    Attributes
    ----------
    kind
        ``sending``, ``queued``, ``running`` or ``receiving``.
    text
        That in full.
    tokens
        Tokens it has generated.
    """

    def __init__(self, line: Line) -> None:
        self._line = line
        self.began = time.monotonic()
        self.kind = self.text = "sending"
        self.tokens = 0

    def state(self, state: dict[str, Any]) -> None:
        """The server says where the trace is."""
        if state.get("state") == "queued":
            place = state.get("place")
            self.say("queued", "queued" if place is None else f"queued at place {place}")
        else:
            self.tokens = state.get("tokens") or 0
            self.say("running", "running" + (f", {_tokens(self.tokens)}" if self.tokens else ""))

    def receiving(self, received: int, total: int | None) -> None:
        """Part of the result, in bytes, has come."""
        of = f" of {total / 1e6:.1f}" if total else ""
        self.say("receiving", f"receiving {received / 1e6:.1f}{of} MB")

    def say(self, kind: str, text: str) -> None:
        """What the trace is at now."""
        self.kind, self.text = kind, text
        self._line.draw()

    def tick(self) -> None:
        """Time has passed."""
        self._line.draw()

    def close(self) -> None:
        """The trace is done."""
        self._line.remove(self)


def _tokens(count: int) -> str:
    return f"{count} token{'' if count == 1 else 's'}"


def _bar(text: str) -> Any:
    with warnings.catch_warnings():
        # tqdm warns when there are no widgets; its line of text does as well.
        warnings.simplefilter("ignore")
        tqdm = importlib.import_module("tqdm.auto").tqdm
        return tqdm(desc=text, total=None, leave=False, bar_format="{desc}")


def visible() -> bool:
    """Whether somebody would see the line."""
    return _in_notebook() or _on_terminal()


def _in_notebook() -> bool:
    """Whether this is a Jupyter kernel."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return hasattr(shell, "kernel")


def _on_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):
        return False
