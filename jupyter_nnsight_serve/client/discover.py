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
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from .address import Address, is_local, read_address
from .errors import HubError
from .secret import Secret

URL_VARIABLE = "NNSIGHT_SERVE_URL"
TOKEN_VARIABLE = "NNSIGHT_SERVE_TOKEN"
HUB_TOKEN_VARIABLE = "JUPYTERHUB_API_TOKEN"
_HUB_ADDRESSES = (
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


def environment_token() -> Secret:
    """The token that the environment has for the server it names."""
    return Secret(os.environ.get(TOKEN_VARIABLE) or os.environ.get(HUB_TOKEN_VARIABLE))


def token_for(address: Address) -> Secret:
    """The token this environment has for ``address``; a token is sent to nobody but its server."""
    if address.token:
        return address.token
    named = os.environ.get(URL_VARIABLE)
    own = os.environ.get(TOKEN_VARIABLE)
    if own and (not named or _same_host(named, address.url)):
        return Secret(own)
    for server in running_servers():
        if server.address.url == address.url and server.address.token:
            return server.address.token
    hub = os.environ.get(HUB_TOKEN_VARIABLE)
    places = [os.environ.get(name) for name in _HUB_ADDRESSES]
    if hub and (
        is_local(address.url) or any(place and _same_host(place, address.url) for place in places)
    ):
        return Secret(hub)
    return Secret(None)


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
            server = _read(file)
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
        address = read_address(info["url"])
        token = Secret(info.get("token") or os.environ.get(HUB_TOKEN_VARIABLE))
        return RunningServer(Address(address.url, token), int(info["pid"]))
    except (OSError, ValueError, KeyError, TypeError, HubError):
        return None


def _alive(pid: int) -> bool:
    if sys.platform == "win32":
        # Signal 0 would end the process there.
        return True
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except OSError:
        return False
    return True


def _same_host(one: str, other: str) -> bool:
    first, second = urlsplit(one), urlsplit(other)
    return first.hostname is not None and (first.hostname, first.port) == (
        second.hostname,
        second.port,
    )
