"""Edits: blocks that stay on the engine, seen and cleared from a notebook."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from urllib.parse import quote

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
    """

    id: str
    name: str | None
    owner: str
    created: float
    bytes: int
    cleared: bool = False
    link: Link | None = field(default=None, repr=False, compare=False)

    def clear(self) -> None:
        """Take it off the engine; twice is once."""
        if not self.cleared and self.link is not None:
            clear(self.link, self.id)
            self.cleared = True

    async def aclear(self) -> None:
        """`clear`, awaited."""
        await asyncio.to_thread(self.clear)

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.created))
        state = ", cleared" if self.cleared else ""
        return f"{self.name or '(for every request)'}  {self.owner}  {since}  {self.id}{state}"


class EditList(list[InstalledEdit]):
    """Edits, oldest first, shown one a line."""

    def clear_all(self) -> None:
        """Clear every one of them."""
        for edit in self:
            edit.clear()

    def __repr__(self) -> str:
        return "\n".join(map(str, self)) or "no edits"


def listed(link: Link) -> EditList:
    """The caller's edits; an admin's list holds everybody's."""
    known = ("id", "name", "owner", "created", "bytes")
    return EditList(
        InstalledEdit(**{key: entry.get(key) for key in known}, link=link)
        for entry in link.ask_json("GET", "/nnsight/register").get("edits", ())
    )


def install(link: Link, identity: str, name: str | None, body: bytes) -> list[str]:
    """Install a serialized block; returns what the person should know."""
    query = "" if name is None else f"?name={quote(name, safe='')}"
    answer = link.ask_json(
        "POST",
        f"/nnsight/register/{quote(identity, safe='')}{query}",
        content=body,
        headers={"Content-Type": "application/octet-stream", "nnsight-compress": "False"},
        timeout=link.timeout,
    )
    return [str(warning) for warning in answer.get("warnings") or ()]


def clear(link: Link, identity: str) -> None:
    """Take an edit off the engine; an unknown id changes nothing."""
    link.ask_json("DELETE", f"/nnsight/register/{quote(identity, safe='')}", timeout=link.timeout)
