"""Finding the server and making sure that it is one."""

from __future__ import annotations

import os
from pathlib import Path

import httpx

from . import discover
from .address import Address, read_address
from .cache import Cache
from .connection import Connection
from .errors import HubError
from .hub import Hub
from .link import Link
from .progress import Line
from .secret import Secret

DEFAULT_TIMEOUT = 120.0
_LOOK_SECONDS = 2.0


def connect(
    url: str | None = None,
    token: str | None = None,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    allow_pickle: bool = True,
    timeout: float = DEFAULT_TIMEOUT,
    progress: bool = True,
) -> Hub:
    """Connect to a Jupyter server that serves nnsight traces.

    Without ``url`` it is looked for: NNSIGHT_SERVE_URL (with NNSIGHT_SERVE_TOKEN or the
    notebook's JUPYTERHUB_API_TOKEN), the Jupyter server this kernel belongs to, then the Jupyter
    servers of this account on this machine.

    Parameters
    ----------
    url
        The server's address with its base URL; the one in a browser's address bar will do.
    token
        A token of the server, or a JupyterHub token.
    cache_dir
        Where trees and tokenizers are kept; Jupyter's data directory if it is not given.
    allow_pickle
        Whether saves that are neither tensors nor plain containers are unpickled, which lets the
        server run code here. Without it such a save is an error that names it.
    timeout
        Seconds without a sign of life after which a trace is given up. A server tells at least
        every 5 seconds that it still runs one.
    progress
        Whether a trace that takes longer than half a second shows a line that says what it is at.

    Raises
    ------
    HubError
        There is no such server; the text says what was tried or what to do.
    """
    __tracebackhide__ = True
    try:
        return _connect(url, token, cache_dir, allow_pickle, timeout, progress)
    except HubError as error:
        raise error.with_traceback(None) from None


def _connect(
    url: str | None,
    token: str | None,
    cache_dir: str | os.PathLike[str] | None,
    allow_pickle: bool,
    timeout: float,
    progress: bool,
) -> Hub:
    address, secret = _find(url, Secret(token))
    hub = Hub(
        Connection(
            Link(address.url, secret, timeout),
            Cache(None if cache_dir is None else Path(cache_dir)),
            allow_pickle,
            Line(progress),
        )
    )
    hub.check()
    return hub


def _find(url: str | None, token: Secret) -> tuple[Address, Secret]:
    """The address to use, and the token for it."""
    if url is not None:
        address = read_address(url)
        return address, token or discover.token_for(address)
    tried = [f"{discover.URL_VARIABLE} is not set"]
    named = os.environ.get(discover.URL_VARIABLE)
    if named:
        address = read_address(named)
        return address, token or address.token or discover.environment_token()
    own = discover.own_server()
    if own is None:
        tried.append("this process was not started by a Jupyter server whose file is here")
    elif (problem := _without_extension(own.address)) is None:
        return own.address, token or own.address.token
    else:
        tried.append(f"this kernel's own server, {own.address.url}, {problem}")
    others = [s for s in discover.running_servers() if own is None or s.pid != own.pid]
    if not others:
        tried.append("no other Jupyter server of this account runs on this machine")
    having = []
    for server in others:
        problem = _without_extension(server.address)
        if problem is None:
            having.append(server)
        else:
            tried.append(f"{server.address.url} {problem}")
    if len(having) > 1:
        names = " or ".join(f"connect({s.address.url!r})" for s in having)
        raise HubError(f"Several Jupyter servers on this machine serve traces; choose one: {names}")
    if having:
        return having[0].address, token or having[0].address.token
    raise HubError(
        f"No server that serves nnsight traces was found: {'; '.join(tried)}. Give its address: "
        'connect("https://HOST/BASE_URL", token).'
    )


def _without_extension(address: Address) -> str | None:
    """Why the server at ``address`` is not one to use; None when it has the extension."""
    try:
        answer = httpx.get(
            f"{address.url}/nnsight/health",
            timeout=_LOOK_SECONDS,
            trust_env=not address.is_local,
        )
    except httpx.HTTPError:
        return "does not answer"
    try:
        body = answer.json()
    except ValueError:
        body = None
    if isinstance(body, dict) and answer.status_code in (200, 503):
        return None
    return "does not have the extension"
