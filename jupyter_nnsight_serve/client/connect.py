"""Finding the server and making sure that it is one."""

from __future__ import annotations

import os
from pathlib import Path

from .address import read_address
from .cache import Cache
from .connection import Connection
from .errors import HubError
from .find import find
from .hub import Hub
from .link import Link
from .progress import Line
from .secret import Secret

DEFAULT_TIMEOUT = 120.0


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
        The server's address with its base URL; the one in a browser's address bar will do. Of a
        page's address only what is behind the server's own is left off.
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
    # A traceback that prints variables prints arguments, and an address may hold a token too.
    given, secret = None if url is None else Secret(url), Secret(token)
    url = token = None
    try:
        return _connect(given, secret, cache_dir, allow_pickle, timeout, progress)
    except HubError as error:
        raise error.with_traceback(None) from None


def _connect(
    given: Secret | None,
    token: Secret,
    cache_dir: str | os.PathLike[str] | None,
    allow_pickle: bool,
    timeout: float,
    progress: bool,
) -> Hub:
    address, secret = find(None if given is None else read_address(given.reveal()), token)
    hub = Hub(
        Connection(
            Link(address, secret, timeout),
            Cache(None if cache_dir is None else Path(cache_dir)),
            allow_pickle,
            Line(progress),
        )
    )
    hub.check()
    return hub
