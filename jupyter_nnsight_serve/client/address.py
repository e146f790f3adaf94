"""From what a person pastes to the address of a Jupyter server."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import parse_qs, urlsplit, urlunsplit

from .errors import HubError
from .secret import Secret

# What a browser's address bar has behind the server's own address.
_PAGE = re.compile(
    r"/(?:lab|tree|notebooks|edit|consoles|terminals|doc|login|api|nnsight|v1/nnsight)(?:/.*)?$"
)
_HUB_PAGE = re.compile(r"/hub(?:/.*)?$")
# A server behind JupyterHub: its name, and the Hub's base URL, may be words that pages have too.
_BEHIND_HUB = re.compile(r"(?:.*/services/|(?!.*/hub/user/).*?/user/)[^/]+")


@dataclass(frozen=True)
class Address:
    """Where a server is.

    Attributes
    ----------
    url
        With the base URL, without a slash at the end, a user or a token.
    token
        The token that stood in it; false where there was none.
    """

    url: str
    token: Secret

    @property
    def is_local(self) -> bool:
        """Whether it is on this machine."""
        return is_local(self.url)


def is_local(url: str) -> bool:
    """Whether ``url`` is on this machine."""
    host = (urlsplit(url).hostname or "").lower()
    return host in ("localhost", "::1") or host.startswith("127.")


def read_address(text: str) -> Address:
    """The server's address in ``text``, which may be a page of it or lack ``http://``.

    Raises
    ------
    HubError
        It is a page of JupyterHub itself, or no address of the web.
    """
    text = text.strip()
    if "://" not in text:
        text = f"http://{text}"
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or parts.scheme not in ("http", "https"):
        raise HubError(
            "This is not a server's address; give it as https://HOST:PORT/BASE_URL, for example "
            "http://127.0.0.1:8888."
        )
    place = f"[{host}]" if ":" in host else host
    place += f":{port}" if port is not None else ""
    path = parts.path.rstrip("/")
    behind = _BEHIND_HUB.match(path)
    root = behind.group() if behind else ""
    if not root and _HUB_PAGE.search(path):
        base = urlunsplit((parts.scheme, place, _HUB_PAGE.sub("", path), "", ""))
        raise HubError(
            f"{base}/hub is JupyterHub's own page and serves no traces; give the address of the "
            f"server that does, {base}/services/NAME for a shared service or {base}/user/NAME for "
            "somebody's server."
        )
    path = root + _PAGE.sub("", path.removeprefix(root))
    token = parse_qs(parts.query).get("token", [""])[0]
    return Address(urlunsplit((parts.scheme, place, path, "", "")), Secret(token))
