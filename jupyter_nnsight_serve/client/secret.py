"""A token that shows itself to nobody by accident."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn


class Secret:
    """Holds a token, without the white space around it; its text is had by `reveal` alone.

    A notebook is shared with what it printed, and a block travels with what it captured: so a
    secret has no text of its own, and does not pickle.
    """

    __slots__ = ("_reveal",)

    def __init__(self, text: str | bytes | Secret | None) -> None:
        if isinstance(text, Secret):
            text = text.reveal()
        if isinstance(text, bytes):
            text = text.decode(errors="replace")
        text = (text or "").strip()
        # A closure and not a string, because debuggers and verbose tracebacks print attributes.
        self._reveal: Callable[[], str] = lambda: text

    def reveal(self) -> str:
        """The token; empty where there is none."""
        return self._reveal()

    @property
    def can_travel(self) -> bool:
        """Whether a header can hold it: visible ASCII, or nothing."""
        return all("!" <= sign <= "~" for sign in self._reveal())

    def __bool__(self) -> bool:
        return bool(self._reveal())

    def __repr__(self) -> str:
        return "<token>" if self else "<no token>"

    __str__ = __repr__

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a token does not travel: use in the block what it needs, not the hub")
