"""Edits: blocks that stay on the engine, seen and cleared from a notebook."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlencode

from .link import Link


@dataclass
class InstalledEdit:
    """An edit on the server.

    Attributes
    ----------
    id, name
        What it is addressed by; without a name it runs for every request it applies to.
    owner
        Who installed it.
    created
        Unix time in seconds.
    bytes
        Size of its block.
    shared
        Whether an admin installed it for everybody.
    runs
        Requests that it has run for; None while there is no engine to ask.
    source
        Its block; None while there is no engine to ask.
    """

    id: str
    name: str | None
    owner: str
    created: float
    bytes: int
    shared: bool = False
    runs: int | None = None
    source: str | None = field(default=None, repr=False)
    cleared: bool = False
    link: Link | None = field(default=None, repr=False, compare=False)

    def clear(self) -> None:
        """Take it off the engine; twice is once."""
        if not self.cleared and self.link is not None:
            clear(self.link, self.id, self.owner, self.shared)
            self.cleared = True

    async def aclear(self) -> None:
        """`clear`, awaited."""
        await asyncio.to_thread(self.clear)

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.created))
        whose = f"{self.owner}, for everybody" if self.shared else self.owner
        runs = "" if self.runs is None else f"  {self.runs} run{'' if self.runs == 1 else 's'}"
        state = ", cleared" if self.cleared else ""
        return f"{self.name or '(for every trace)'}  {whose}  {since}{runs}  {self.id}{state}"


class EditList(list[InstalledEdit]):
    """Edits, oldest first, shown one a line.

    Attributes
    ----------
    removed
        The caller's last edits that went without being cleared: ``id``, ``name``, ``removed`` (Unix
        time in seconds), ``reason``.
    """

    def __init__(self, edits: Iterable[InstalledEdit] = (), removed: Iterable[Any] = ()) -> None:
        super().__init__(edits)
        self.removed: list[dict[str, Any]] = list(removed)

    def clear_all(self) -> None:
        """Clear every one of them."""
        for edit in self:
            edit.clear()

    def __repr__(self) -> str:
        gone = [
            f"{told.get('name') or told.get('id')} is gone: {told.get('reason')}"
            for told in self.removed
        ]
        return "\n".join([*(map(str, self) if self else ["no edits"]), *gone])


def listed(link: Link) -> EditList:
    """The caller's edits and the shared ones; an admin's list holds everybody's."""
    known = ("id", "name", "owner", "created", "bytes")
    since = {"shared": False, "runs": None, "source": None}
    answer = link.ask_json("GET", "/nnsight/register")
    return EditList(
        (
            InstalledEdit(
                **{key: entry.get(key) for key in known},
                **{key: entry.get(key, default) for key, default in since.items()},
                link=link,
            )
            for entry in answer.get("edits", ())
        ),
        answer.get("removed", ()),
    )


def install(
    link: Link, identity: str, name: str | None, body: bytes, shared: bool = False
) -> list[str]:
    """Install a serialized block; returns what the person should know."""
    options = {} if name is None else {"name": name}
    if shared:
        options["shared"] = "true"
    query = f"?{urlencode(options, quote_via=quote)}" if options else ""
    answer = link.ask_json(
        "POST",
        f"/nnsight/register/{quote(identity, safe='')}{query}",
        content=body,
        headers={"Content-Type": "application/octet-stream", "nnsight-compress": "False"},
        timeout=link.timeout,
    )
    return [str(warning) for warning in answer.get("warnings") or ()]


def clear(link: Link, identity: str, owner: str | None = None, shared: bool = False) -> None:
    """Take an edit off the engine; an unknown id changes nothing.

    Parameters
    ----------
    owner
        Whose edit an admin means.
    shared
        Whether the one that runs for everybody is meant.
    """
    options = {"shared": "true"} if shared else {} if owner is None else {"owner": owner}
    query = f"?{urlencode(options, quote_via=quote)}" if options else ""
    path = f"/nnsight/register/{quote(identity, safe='')}{query}"
    link.ask_json("DELETE", path, timeout=link.timeout)
