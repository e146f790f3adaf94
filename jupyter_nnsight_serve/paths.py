"""Which path a client that asked for a wrong one probably meant."""

from __future__ import annotations

import difflib

from jupyter_server.utils import url_path_join

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


def advice(path: str, base_url: str) -> str:
    """The sentence for a path that is nearly right.

    Parameters
    ----------
    path
        The path that was asked for.
    base_url
        The server's base URL, with its leading and trailing slash.
    """
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
