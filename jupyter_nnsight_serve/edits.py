"""Who owns which edit, and which edits a caller's traces run.

An edit is a block that stays on the engine. It belongs to who installed it and runs for that
caller's traces only; one that an admin shares runs for everybody's. The engine knows edits by keys
made here, so that two callers may use one id or one name, and a trace tells it by these keys what
to run. The serialized blocks are kept in files, from which an engine that starts again gets them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import tempfile
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlencode

from .errors import BadRequest, NoRoom, NotAllowed
from .identity import Caller
from .spool import Spool
from .upstream import CHUNK_BYTES, EngineLost, Upstream

_ID = re.compile(r"[A-Za-z0-9_.-]{1,128}")

# Removed edits that an owner's listing still tells of.
REMOVED_KEPT = 20


def check_id(edit_id: str) -> str:
    """`edit_id`, or `BadRequest` when it is not one an edit can be addressed by."""
    if not _ID.fullmatch(edit_id) or set(edit_id) == {"."}:
        raise BadRequest(
            "An edit's id is 1 to 128 letters, digits, dots, dashes or underscores; use the id "
            "that nnsight's edit() makes."
        )
    return edit_id


@dataclass(frozen=True)
class Edit:
    """An edit.

    Parameters
    ----------
    id
        The client's id of it.
    name
        What a trace may list it by, or None when it runs for every trace.
    owner
        The caller who installed it.
    shared
        Whether it runs for everybody's traces.
    compressed
        The `nnsight-compress` header that its body came with.
    created
        Unix time in seconds.
    bytes
        Size of the serialized block.
    key
        What the engine knows it by. Each installation has a key of its own, so that what is still
        on its way to the engine for an earlier one cannot meet a later one.
    """

    id: str
    name: str | None
    owner: str
    shared: bool = False
    compressed: str = "False"
    created: float = 0.0
    bytes: int = 0
    key: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def place(self) -> tuple[str | None, str]:
        """Where it is in the book: ids are each owner's own, and the shared ones'."""
        return None if self.shared else self.owner, self.id

    @property
    def target(self) -> str:
        """Path and query of the request that installs it in the engine."""
        named = {} if self.name is None else {"name": self.name}
        return f"/edits/{self.key}?{urlencode({'id': self.id, **named})}"

    def model(self, now: float) -> dict[str, Any]:
        """What a listing tells of it."""
        return {
            "id": self.id,
            "name": self.name,
            "owner": self.owner,
            "shared": self.shared,
            "created": self.created,
            "age": max(0.0, now - self.created),
            "bytes": self.bytes,
        }


@dataclass(frozen=True)
class Draft:
    """An edit whose body is kept at `path`, and that the engine is yet to take."""

    edit: Edit
    path: str
    size: int

    def discard(self) -> None:
        """Forget the body of a draft that came to nothing; a second call is a no-op."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)


class EditBook:
    """The edits of all callers.

    Parameters
    ----------
    parent
        Directory in which the directory of the bodies is made.
    max_edits
        Edits a caller may have; one more, and the caller's oldest goes.
    lifetime
        Seconds after which an edit goes; 0 for no limit. Shared edits stay.
    on_change
        Called with "installed", "cleared" or "removed", the edit, and the reason of a removal.
    clock
        Unix time in seconds.
    """

    def __init__(
        self,
        parent: str,
        max_edits: int = 32,
        lifetime: float = 0.0,
        on_change: Callable[[str, Edit, str | None], None] = lambda action, edit, reason: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._parent = parent
        self._max_edits = max_edits
        self._lifetime = lifetime
        self._on_change = on_change
        self._clock = clock
        self._directory: str | None = None
        self._edits: dict[tuple[str | None, str], Edit] = {}
        # How often an engine ended while it was given an edit again.
        self._ended_at: Counter[str] = Counter()
        self._removed: deque[dict[str, Any]] = deque(maxlen=1000)
        # Keys the engine still has and no longer needs.
        self._stale: set[str] = set()

    # Installing

    async def draft(self, edit: Edit, body: Spool) -> Draft:
        """Keep the body of an edit that the engine is to take; raises `NoRoom`."""
        if self._directory is None:
            os.makedirs(self._parent, mode=0o700, exist_ok=True)
            self._directory = tempfile.mkdtemp(prefix="nnsight-edits-", dir=self._parent)
        draft = Draft(edit, self._body(edit.key), body.size)
        try:
            with open(
                os.open(draft.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb"
            ) as kept:
                async for piece in body.pieces():
                    await asyncio.to_thread(kept.write, piece)
        except OSError as error:
            draft.discard()
            raise NoRoom(error) from None
        except BaseException:
            draft.discard()
            raise
        return draft

    def add(self, draft: Draft) -> Edit:
        """Record a draft that the engine has installed."""
        edit = replace(draft.edit, created=self._clock(), bytes=draft.size)
        # An edit that is installed again is the newest.
        before = self._edits.pop(edit.place, None)
        if before is not None:
            self._let_go(before)
        self._edits[edit.place] = edit
        self._on_change("installed", edit, None)
        own = [e for e in self._edits.values() if e.owner == edit.owner and not e.shared]
        for oldest in own[: max(0, len(own) - self._max_edits)] if not edit.shared else ():
            self._remove(
                oldest,
                f"you have {self._max_edits} newer ones, and max_edits allows no more; clear "
                "edits that you no longer use",
            )
        return edit

    # Removing

    def find(
        self, edit_id: str, caller: Caller, owner: str | None = None, *, shared: bool = False
    ) -> Edit | None:
        """The edit that `caller` means and may clear: an own one, or for an admin any.

        Parameters
        ----------
        owner
            Whose edit an admin means.
        shared
            Whether the shared one is meant.

        Raises
        ------
        NotAllowed
            It is a shared one, which the caller sees and may not clear.
        """
        everybodys = self._edits.get((None, edit_id))
        if shared or owner not in (None, caller.name):
            found = everybodys if shared else self._edits.get((owner, edit_id))
            own = None
        else:
            own = self._edits.get((caller.name, edit_id))
            found = own or everybodys
        if found is None or found is own or caller.admin:
            return found
        if found.shared:
            raise NotAllowed(
                "An admin of this server installed this edit for everybody, and only an admin may "
                "clear it; edits=[...] runs the named edits that it lists and no others."
            )
        return None

    def clear(self, edit: Edit) -> None:
        """Forget an edit that its owner or an admin no longer wants."""
        self._remove(edit, None)

    def _remove(self, edit: Edit, reason: str | None) -> None:
        if self._edits.get(edit.place) is not edit:
            return
        del self._edits[edit.place]
        self._let_go(edit)
        self._on_change("cleared" if reason is None else "removed", edit, reason)
        if reason is not None:
            now = self._clock()
            told = {**edit.model(now), "removed": now, "reason": reason}
            self._removed.append(told)

    def _let_go(self, edit: Edit) -> None:
        """Forget an edit's body, and have the engine forget the edit."""
        with contextlib.suppress(OSError):
            os.unlink(self._body(edit.key))
        self._stale.add(edit.key)

    def expire(self) -> None:
        """Remove what has reached its lifetime."""
        if self._lifetime:
            oldest = self._clock() - self._lifetime
            for edit in [e for e in self._edits.values() if e.created <= oldest and not e.shared]:
                self._remove(edit, f"its lifetime of {self._lifetime:g} s (edit_lifetime) was over")

    # Asking

    def keys_for(self, caller: Caller) -> list[str]:
        """The engine's keys of what the caller's traces may run, in the order of installation.

        Where the caller's own edit and a shared one have the same name, the own one counts.
        """
        self.expire()
        own = {e.name for e in self._edits.values() if e.owner == caller.name and not e.shared}
        own.discard(None)
        return [
            edit.key
            for edit in self._edits.values()
            if (edit.name not in own if edit.shared else edit.owner == caller.name)
        ]

    def visible_to(self, caller: Caller) -> list[Edit]:
        """The caller's edits and the shared ones, oldest first; an admin's list holds all."""
        self.expire()
        return [
            edit
            for edit in self._edits.values()
            if caller.admin or edit.shared or edit.owner == caller.name
        ]

    def removed_from(self, caller: Caller) -> list[dict[str, Any]]:
        """The caller's last edits that went without being cleared, each with the reason."""
        mine = [told for told in self._removed if told["owner"] == caller.name]
        return mine[-REMOVED_KEPT:]

    def now(self) -> float:
        """Unix time in seconds."""
        return self._clock()

    # The engine

    async def reinstall(self, upstream: Upstream, timeout: float) -> None:
        """Give every edit to an engine that has just loaded.

        Raises
        ------
        EngineLost, TimeoutError
            The engine ended, or hangs. The edits stay for the next.

        Parameters
        ----------
        timeout
            Seconds the engine has for each.
        """
        self.expire()
        self._stale.clear()
        for edit in list(self._edits.values()):
            if self._edits.get(edit.place) is not edit:
                # Cleared while others were installed.
                continue
            try:
                status, answer = await self._install(edit, upstream, timeout)
            except FileNotFoundError:
                # Cleared just now; its body went first.
                continue
            except (EngineLost, TimeoutError):
                self._blame(edit)
                raise
            if status >= 500:
                self._blame(edit)
                raise EngineLost
            if status != 200:
                said = str(answer.get("message", status))
                self._remove(edit, f"the engine was restarted and refused it: {said}")
            elif self._edits.get(edit.place) is not edit:
                self._stale.add(edit.key)
        self._ended_at.clear()

    def _blame(self, edit: Edit) -> None:
        """The engine ended while it was given this edit; the second time it is the edit's doing."""
        self._ended_at[edit.key] += 1
        if self._ended_at[edit.key] > 1:
            self._remove(edit, "the engine ended twice while this was installed again")

    async def _install(
        self, edit: Edit, upstream: Upstream, timeout: float
    ) -> tuple[int, dict[str, Any]]:
        headers = {"nnsight-compress": edit.compressed}
        with open(self._body(edit.key), "rb") as body:
            exchange = await upstream.open("PUT", edit.target, headers, edit.bytes)
            try:
                while chunk := body.read(CHUNK_BYTES):
                    await exchange.write(chunk)
                exchange.end()
                return await exchange.json(timeout)
            finally:
                exchange.abort()

    def stale(self) -> list[str]:
        """Keys that the engine is to forget."""
        return list(self._stale)

    def forgotten(self, key: str) -> None:
        """The engine has forgotten a stale key."""
        self._stale.discard(key)

    def close(self) -> None:
        """Forget everything; the server ends."""
        self._edits.clear()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def _body(self, key: str) -> str:
        assert self._directory is not None
        return os.path.join(self._directory, key)
