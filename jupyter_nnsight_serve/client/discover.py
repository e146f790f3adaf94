"""Where the server may be that this notebook belongs to.

A kernel is told its server's process id (JPY_PARENT_PID); the server leaves its address and token
in its runtime directory, in a file named after that id.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from .address import Address, read_address
from .errors import HubError
from .secret import Secret

URL_VARIABLE = "NNSIGHT_SERVE_URL"
TOKEN_VARIABLE = "NNSIGHT_SERVE_TOKEN"
HUB_TOKEN_VARIABLE = "JUPYTERHUB_API_TOKEN"
_HUB_ADDRESSES = (
    # Where the Hub, or whoever set the variable, says that servers of the Hub are.
    URL_VARIABLE,
    "JUPYTERHUB_API_URL",
    "JUPYTERHUB_PUBLIC_URL",
    "JUPYTERHUB_PUBLIC_HUB_URL",
    "JUPYTERHUB_HOST",
)


@dataclass(frozen=True)
class RunningServer:
    """A Jupyter server that left its file on this machine."""

    address: Address
    pid: int


def token_for(address: Address) -> Secret:
    """The token this environment has for ``address``; a token is sent to nobody but its server."""
    if address.token:
        return address.token
    named = os.environ.get(URL_VARIABLE)
    own = os.environ.get(TOKEN_VARIABLE)
    if own and (not named or _same_server(named, address.url)):
        return Secret(own)
    known = _known(address)
    if known is not None and known.address.token:
        return known.address.token
    hub = os.environ.get(HUB_TOKEN_VARIABLE)
    places = [os.environ.get(name) for name in _HUB_ADDRESSES]
    if hub and any(place and _same_server(place, address.url) for place in places):
        return Secret(hub)
    return Secret(None)


def placed(address: Address) -> Address:
    """``address``, marked where a file of this account says that it is on this machine."""
    return address if _known(address) is None else replace(address, here=True)


def _known(address: Address) -> RunningServer | None:
    return next((one for one in running_servers() if one.address.url == address.url), None)


def own_server() -> RunningServer | None:
    """The Jupyter server that started this kernel, if its file is there."""
    parents = {os.environ.get("JPY_PARENT_PID"), str(os.getppid())}
    for directory in _runtime_directories():
        for parent in parents:
            if parent and (server := _read(directory / f"jpserver-{parent}.json")):
                return server
    return None


def running_servers() -> list[RunningServer]:
    """The Jupyter servers of this account on this machine, newest first."""
    found: dict[str, tuple[float, RunningServer]] = {}
    for directory in _runtime_directories():
        for file in directory.glob("jpserver-*.json"):
            server = _read(file) if _own(file) else None
            if server is not None and _alive(server.pid):
                found[server.address.url] = (file.stat().st_mtime, server)
    newest = sorted(found.values(), key=lambda entry: entry[0], reverse=True)
    return [server for _, server in newest]


def _runtime_directories() -> Iterator[Path]:
    """Where a Jupyter server of this account leaves its file, the likeliest first."""
    seen: set[Path] = set()
    candidates: list[str] = []
    with contextlib.suppress(ImportError):
        from jupyter_core.paths import jupyter_runtime_dir

        candidates.append(jupyter_runtime_dir())
    candidates.append(os.environ.get("JUPYTER_RUNTIME_DIR", ""))
    # The kernel's connection file stands beside its server's.
    candidates += [os.path.dirname(word) for word in sys.argv if word.endswith(".json")]
    for candidate in candidates:
        path = Path(candidate)
        if candidate and path not in seen and path.is_dir():
            seen.add(path)
            yield path


def _read(file: Path) -> RunningServer | None:
    try:
        info: dict[str, Any] = json.loads(file.read_text())
        pid = int(info["pid"])
        token = Secret(info.get("token"))
        if not token and _own(file) and _alive(pid):
            token = Secret(os.environ.get(HUB_TOKEN_VARIABLE))
        return RunningServer(Address(read_address(info["url"]).url, token, here=True), pid)
    except (OSError, ValueError, KeyError, TypeError, HubError):
        return None


def _own(file: Path) -> bool:
    """Whether a file is this account's; what is in another's is that one's word."""
    if sys.platform == "win32":
        return True
    try:
        return file.stat().st_uid == os.getuid()
    except OSError:
        return False


def _alive(pid: int) -> bool:
    """Whether a process of this account has this id."""
    if sys.platform == "win32":
        # Signal 0 would end the process there.
        return True
    try:
        os.kill(pid, 0)
    except OSError:
        # None has it, or another account's: the server is gone, and its port may be anybody's.
        return False
    return True


def _same_server(one: str, other: str) -> bool:
    """Whether two addresses have one scheme, host and port."""
    return _origin(one) is not None and _origin(one) == _origin(other)


def _origin(url: str) -> tuple[str, str, int | None] | None:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        return None
    if host is None:
        return None
    return parts.scheme, host, port or {"http": 80, "https": 443}.get(parts.scheme)
