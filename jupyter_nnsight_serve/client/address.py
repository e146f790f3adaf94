"""From what a person pastes to the address of a Jupyter server."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import parse_qs, urlsplit, urlunsplit

from .errors import HubError
from .secret import Secret

# What a browser's address bar has behind the server's own address.
_PAGE = re.compile(
    r"/(?:lab|tree|notebooks|edit|consoles|terminals|doc|login|api|(?<!/v1/)nnsight|v1/nnsight)"
    r"(?=/|$)"
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
    here
        Whether this machine knows it for one of its own servers, whatever its host is called.
    """

    url: str
    token: Secret
    here: bool = False

    @property
    def is_local(self) -> bool:
        """Whether it is on this machine."""
        return self.here or is_local(self.url)


def is_local(url: str) -> bool:
    """Whether ``url`` is on this machine."""
    host = (urlsplit(url).hostname or "").lower()
    return host in ("localhost", "::1") or host.startswith("127.")


def read_address(text: str) -> Address:
    """The address that ``text`` is, to the letter; it may lack ``http://``.

    Raises
    ------
    HubError
        It is no address of the web.
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
    token = parse_qs(parts.query).get("token", [""])[0]
    return Address(urlunsplit((parts.scheme, place, path, "", "")), Secret(token))


def candidates(url: str) -> list[str]:
    """The servers that ``url`` may be a page of, the longest address, ``url`` itself, first.

    A base URL may be a word that a page's address has as well, so only asking tells which it is.
    """
    parts = urlsplit(url)
    behind = _BEHIND_HUB.match(parts.path)
    root = behind.group() if behind else ""
    pages = _PAGE.finditer(parts.path.removeprefix(root))
    ends = [len(root) + page.start() for page in pages]
    return [url, *(parts._replace(path=parts.path[:end]).geturl() for end in reversed(ends))]


def hub_of(url: str) -> str | None:
    """The JupyterHub that ``url`` looks like a page of; None where it looks like a server's."""
    parts = urlsplit(url)
    if _BEHIND_HUB.match(parts.path) or not _HUB_PAGE.search(parts.path):
        return None
    return parts._replace(path=_HUB_PAGE.sub("", parts.path)).geturl()
