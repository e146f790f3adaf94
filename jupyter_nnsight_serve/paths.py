"""Which path a client that asked for a wrong one probably meant."""

from __future__ import annotations

import difflib
from typing import Any

from jupyter_server.utils import url_path_join
from tornado.httputil import HTTPServerRequest
from tornado.routing import Matcher

PAGES = (
    *("lab", "tree", "doc", "edit", "notebooks", "consoles", "terminals", "retro", "nbclassic"),
)
"""The first part of the addresses that a browser shows of a Jupyter server."""

_RESOURCES = {
    "generate": ("POST", "/nnsight/generate", "run a trace"),
    "register": ("POST", "/nnsight/register/{id}", "install an edit"),
    "clear": ("DELETE", "/nnsight/register/{id}", "clear an edit"),
    "health": ("GET", "/nnsight/health", "ask whether a trace would run"),
    "status": ("GET", "/nnsight/status", "ask for the server's status"),
    "start": ("POST", "/nnsight/engine/start", "start the engine, as an admin"),
    "stop": ("POST", "/nnsight/engine/stop", "stop the engine, as an admin"),
    "restart": ("POST", "/nnsight/engine/restart", "restart the engine, as an admin"),
    "usage": ("GET", "/nnsight/usage", "ask for each user's totals, as an admin"),
    "model": ("GET", "/nnsight/model", "ask for the served model's tree"),
    "tokenizer": ("GET", "/nnsight/model/tokenizer", "ask for its tokenizer"),
}


class PastedAddress(Matcher):
    """A request of nnsight's client that was given an address with a ``?`` in it."""

    def match(self, request: HTTPServerRequest) -> dict[str, Any] | None:
        """Whether its path ended up in the query."""
        pasted = request.method == "POST" and "/v1/nnsight/" in request.query
        return {} if pasted else None


def advice(path: str, base_url: str, query: str = "") -> str:
    """The sentence for a path that is nearly right.

    Parameters
    ----------
    path, query
        What was asked for.
    base_url
        The server's base URL, with its leading and trailing slash.
    """
    if "/v1/nnsight/" in query:
        return (
            "The address given as serve= has a '?' in it, behind which nnsight appended its own "
            f"path; give this server's address up to and including {base_url}, and the token as "
            "api_key=."
        )
    parts = [part for part in path.split("/") if part]
    meant = [
        word
        for part in reversed(parts)
        for word in difflib.get_close_matches(part.lower(), list(_RESOURCES), n=1, cutoff=0.75)
    ]
    shown = path if len(path) <= 200 else path[:200] + "..."
    if not meant:
        some = ", ".join(f"{m} {url_path_join(base_url, p)}" for m, p, _ in _RESOURCES.values())
        return f"There is no {shown} here; this server has {some}."
    method, right, purpose = _RESOURCES[meant[0]]
    sentence = (
        f"There is no {shown} here; the path to {purpose} is "
        f"{method} {url_path_join(base_url, right)}"
    )
    if "/v1/nnsight" in path:
        # The stock client appends this to what it was given as serve=.
        return (
            f"{sentence}. With serve= give this server's address up to and including "
            f"{base_url} and nothing behind it: nnsight appends the rest."
        )
    if not path.startswith(base_url):
        return (
            f"{sentence}. This server's base URL is {base_url}: give it with the server's address."
        )
    return sentence + "."
