"""The line that says what a long trace is at, and is gone when it is done."""

from __future__ import annotations

import importlib
import sys
import threading
import time
import warnings
from typing import Any

DELAY_SECONDS = 0.5
"""How long a trace runs before the line appears."""

REFRESH_SECONDS = 0.2
"""How often the line is redrawn at most."""


class Progress:
    """One trace's line, made with tqdm so that it works in a notebook and in a terminal.

    Parameters
    ----------
    shown
        Whether there is to be a line at all.
    """

    def __init__(self, shown: bool = True) -> None:
        self._shown = shown and visible()
        self._began = time.monotonic()
        self._drawn = 0.0
        self._text = "sending"
        self._bar: Any = None

    def state(self, state: dict[str, Any]) -> None:
        """The server says where the trace is."""
        if state.get("state") == "queued":
            place = state.get("place")
            self.say("queued" if place is None else f"queued at place {place}")
        else:
            tokens = state.get("tokens") or 0
            self.say(
                f"running, {tokens} token{'' if tokens == 1 else 's'}" if tokens else "running"
            )

    def receiving(self, received: int, total: int | None) -> None:
        """Part of the result, in bytes, has come."""
        of = f" of {total / 1e6:.1f}" if total else ""
        self.say(f"receiving {received / 1e6:.1f}{of} MB")

    def say(self, text: str) -> None:
        """What the trace is at now."""
        self._text = text
        self.tick()

    def tick(self) -> None:
        """Draw the line if it is time to."""
        now = time.monotonic()
        if not self._shown or now - self._began < DELAY_SECONDS:
            return
        if now - self._drawn < REFRESH_SECONDS:
            return
        self._drawn = now
        text = f"nnsight: {self._text} ({now - self._began:.0f} s)"
        try:
            if self._bar is None:
                self._bar = _bar(text)
            else:
                self._bar.set_description_str(text)
        except Exception:
            # A notebook without a working widget or a closed stream is no reason to lose a trace.
            self._shown = False

    def close(self) -> None:
        """Take the line away."""
        bar, self._bar, self._shown = self._bar, None, False
        if bar is not None:
            try:
                bar.close()
            except Exception:
                return


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
    """Whether this is a Jupyter kernel, and on the thread whose output goes to the cell."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return hasattr(shell, "kernel") and threading.current_thread() is threading.main_thread()


def _on_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):
        return False
