"""Who owns which edit.

An edit is a block that stays on the engine and runs for every request. The engine knows it by an
id that the client made; who installed it is known only here.
"""

from __future__ import annotations

import re
import time
from dataclasses import asdict, dataclass
from typing import Any

from .errors import BadRequest, NotAllowed
from .identity import Caller

_ID = re.compile(r"[A-Za-z0-9_.-]{1,128}")


def check_id(edit_id: str) -> str:
    """`edit_id`, or `BadRequest` when it is not one the engine can be addressed by."""
    # "." and ".." would be taken for steps in the engine's URL path.
    if not _ID.fullmatch(edit_id) or set(edit_id) == {"."}:
        raise BadRequest(
            "An edit's id is 1 to 128 letters, digits, dots, dashes or underscores; use the id "
            "that nnsight's edit() makes."
        )
    return edit_id


@dataclass(frozen=True)
class Edit:
    """An installed edit.

    Parameters
    ----------
    id
        The client's id of it.
    name
        What requests may address it by, or None when it runs for every request.
    owner
        The caller who installed it.
    created
        Unix time in seconds.
    bytes
        Size of the serialized block.
    """

    id: str
    name: str | None
    owner: str
    created: float
    bytes: int


class EditBook:
    """The edits installed on the engine that runs now."""

    def __init__(self) -> None:
        self._edits: dict[str, Edit] = {}

    def check_may_change(self, edit_id: str, caller: Caller) -> None:
        """Raise `NotAllowed` when `edit_id` is somebody else's."""
        edit = self._edits.get(edit_id)
        if edit is not None and edit.owner != caller.name and not caller.admin:
            raise NotAllowed(
                "This edit's id belongs to another user's edit, which only that user or an admin "
                "may replace or clear; GET /nnsight/register lists yours."
            )

    def add(self, edit_id: str, name: str | None, caller: Caller, size: int) -> None:
        """Record an edit of `size` bytes that the engine has installed."""
        self._edits[edit_id] = Edit(edit_id, name, caller.name, time.time(), size)

    def remove(self, edit_id: str) -> bool:
        """Forget an edit; whether it was there."""
        return self._edits.pop(edit_id, None) is not None

    def forget_all(self) -> None:
        """Forget every edit: they were in an engine that is gone."""
        self._edits.clear()

    def visible_to(self, caller: Caller) -> list[dict[str, Any]]:
        """The caller's edits, oldest first; an admin's list holds everybody's."""
        return [
            asdict(edit)
            for edit in sorted(self._edits.values(), key=lambda edit: edit.created)
            if caller.admin or edit.owner == caller.name
        ]
