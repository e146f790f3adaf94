"""A connection to one server: its model, its state, its edits."""

from __future__ import annotations

import threading
import time
from importlib import metadata
from typing import TYPE_CHECKING, Any, NoReturn

import httpx

from . import edits
from .connection import Connection
from .errors import EngineNotReady, HubError

if TYPE_CHECKING:
    from .model import ServedModel

PROTOCOL = 1
_POLL_SECONDS = 1.0


class Status(dict[str, Any]):
    """What the server says of itself; shown in a few lines."""

    def __repr__(self) -> str:
        model = self.get("model") or {}
        lines = [f"{model.get('name')}: {self.get('state')}"]
        lines += [str(self[key]) for key in ("stage", "reason") if self.get(key)]
        lines.append(f"{self.get('running')} running, {self.get('waiting')} waiting")
        lines.append(f"on {self.get('device')}")
        versions = self.get("versions") or {}
        lines.append(", ".join(f"{name} {version}" for name, version in versions.items()))
        return "\n".join(line for line in lines if line)


class Hub:
    """A server that runs traces; made by `connect`.

    Attributes
    ----------
    url
        Its address.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._link = connection.link
        self._description: dict[str, Any] | None = None
        self._model: ServedModel | None = None
        self._lock = threading.RLock()

    @property
    def url(self) -> str:
        """The server's address."""
        return self._link.url

    def check(self) -> None:
        """Make sure that the server is one to work with.

        Raises
        ------
        HubError
            It is not; an engine that is not ready is no reason.
        """
        try:
            self._describe()
        except EngineNotReady:
            return

    def _describe(self) -> dict[str, Any]:
        """The served model's description, from the cache where the server says it still holds."""
        kept = self._connection.cache.model(self.url)
        headers = {"If-None-Match": kept[0]} if kept is not None else {}
        response = self._link.ask("GET", "/nnsight/model", headers=headers)
        if response.status_code == 304 and kept is not None:
            description = kept[1]
        else:
            description = self._read(response)
        _check_versions(description)
        self._description = description
        return description

    def _read(self, response: httpx.Response) -> dict[str, Any]:
        """The description that came, kept for the next kernel."""
        try:
            description = response.json()
        except ValueError:
            description = None
        if not isinstance(description, dict) or "protocol" not in description:
            raise self._link.not_an_api()
        if etag := response.headers.get("ETag"):
            self._connection.cache.keep_model(self.url, etag, description)
        return description

    @property
    def model(self) -> ServedModel:
        """The served model: its tree, configuration and tokenizer, and traces on it."""
        with self._lock:
            if self._model is None:
                description = self._description or self._describe()
                self._model = _model_of(self._connection, description)
            return self._model

    def status(self) -> Status:
        """What the server says of its model, engine and load, and of the caller's traces."""
        return Status(self._link.ask_json("GET", "/nnsight/status"))

    def wait(self, timeout: float = 600.0) -> Hub:
        """Return when the engine can take a trace.

        Parameters
        ----------
        timeout
            Seconds.

        Raises
        ------
        HubError
            It has failed or is stopped, or is not ready in time; the text says why.
        """
        end = time.monotonic() + timeout
        progress = self._connection.line.trace()
        try:
            while True:
                status = self.status()
                state = status.get("state")
                if state == "ready":
                    return self
                if state in ("failed", "stopped"):
                    raise EngineNotReady(f"The engine is {state}: {status.get('reason')}")
                if time.monotonic() > end:
                    raise EngineNotReady(f"The engine is still {state} after {timeout:g} s.")
                progress.say("loading", f"engine {state}: {status.get('stage') or ''}".rstrip(": "))
                time.sleep(_POLL_SECONDS)
        finally:
            progress.close()

    def edit(self, *, name: str | None = None, shared: bool = False) -> Any:
        """Install a block on the engine: ``with hub.edit(name="...") as (tracer, edit):``.

        It runs for your traces; with ``shared=True``, which takes an admin, for everybody's.
        """
        return self.model.edit(name=name, shared=shared)

    def edits(self) -> edits.EditList:
        """Your edits and the shared ones, each with `clear`; an admin sees everybody's."""
        return edits.listed(self._link)

    def __repr__(self) -> str:
        model = (self._description or {}).get("name")
        return f"<Hub {self.url}{f': {model}' if model else ''}>"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a Hub holds a token and does not travel; use hub.model in the block")


def _model_of(connection: Connection, description: dict[str, Any]) -> ServedModel:
    # anyio cannot define its asyncio backend once nnsight has given every object a `save`; who
    # needs it in this process (httpx.AsyncClient does) gets it, if this is the first import.
    try:
        import anyio._backends._asyncio  # noqa: F401
    except (ImportError, TypeError):
        pass
    from .model import ServedModel

    return ServedModel(connection, description)


def _check_versions(description: dict[str, Any]) -> None:
    """Refuse a server whose traces are not this notebook's."""
    versions = description.get("versions") or {}
    protocol = description.get("protocol")
    if protocol != PROTOCOL:
        ours = _installed("jupyter-nnsight-serve")
        theirs = versions.get("package")
        raise HubError(
            f"The server speaks protocol {protocol} (jupyter-nnsight-serve {theirs}) and this "
            f"notebook {PROTOCOL} (jupyter-nnsight-serve {ours}); install the server's version "
            f"here, `pip install jupyter-nnsight-serve=={theirs}`, and restart the kernel."
        )
    theirs, ours = versions.get("nnsight"), _installed("nnsight")
    if theirs and ours and _series(theirs) != _series(ours):
        raise HubError(
            f"The server runs nnsight {theirs} and this notebook has nnsight {ours}, whose traces "
            f"it cannot read; install the server's series here, `pip install "
            f'"nnsight=={_series(theirs)}.*"`, and restart the kernel.'
        )
    if ours is None:
        raise HubError(
            "This notebook's environment has no nnsight; install it, `pip install "
            f'"nnsight=={_series(theirs or "0.8")}.*"`, and restart the kernel.'
        )


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _series(version: str) -> str:
    return ".".join(version.split(".")[:2])
