"""Every route of a running Jupyter server, and what happens to who asks for it.

A server that loads the extension `routes_probe` (the text `PROBE`, as a module) tells its routes;
`ask_all` then asks for each with each method that it has, as somebody would who holds a token.
"""

from __future__ import annotations

import re
import socket
from re import _constants as kinds  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any
from urllib.parse import quote, urlsplit

import httpx

PATH = "/routes-probe"
PROBE = f'''
import json
from jupyter_server.auth.decorator import allow_unauthenticated
from jupyter_server.base.handlers import JupyterHandler
from tornado import web
from tornado.websocket import WebSocketHandler

def walk(router):
    for rule in router.rules:
        if hasattr(rule.target, "rules"):
            yield from walk(rule.target)
        else:
            yield rule

class Routes(JupyterHandler):
    @allow_unauthenticated
    def get(self):
        found = []
        for rule in walk(self.application.default_router):
            if not hasattr(rule.matcher, "regex"):
                # It has no path: nnsight's refusal of what was pasted into an address.
                continue
            methods = [
                m for m in rule.target.SUPPORTED_METHODS
                if getattr(rule.target, m.lower()) is not web.RequestHandler._unimplemented_method
            ]
            found.append({{
                "pattern": rule.matcher.regex.pattern,
                "handler": rule.target.__name__,
                "ours": rule.target.__module__.startswith("jupyter_nnsight_serve."),
                "methods": methods,
                "websocket": issubclass(rule.target, WebSocketHandler),
            }})
        self.finish(json.dumps(found))

def _jupyter_server_extension_points():
    return [{{"module": "routes_probe"}}]

def _load_jupyter_server_extension(serverapp):
    base = serverapp.base_url.rstrip("/")
    serverapp.web_app.add_handlers(".*$", [(base + "{PATH}", Routes)])
'''

# Handlers that show nobody anything of this server: pages that are there to be open, redirects to
# another route, and the answer to what is no route.
OPEN = {
    "APIVersionHandler": "Jupyter's version",
    "FileFindHandler": "files of Jupyter's packages",
    "PublicStaticFileHandler": "files of Jupyter's packages",
    "StaticFileHandler": "Jupyter's robots.txt",
    "LoginFormHandler": "the login page",
    "LogoutHandler": "ends the caller's own session",
    "JupyterHubLogoutHandler": "ends the caller's own session",
    "JupyterHubOAuthCallbackHandler": "the end of a login at the Hub",
    "MainHandler": "a page that says that a Jupyter server runs",
    "NotebooksRedirectHandler": "a redirect",
    "RedirectWithParams": "a redirect",
    "TrailingSlashHandler": "a redirect",
    "Template404": "no route",
    "Routes": "this test's own",
    "IdentityHandler": "the caller's own name",
    "PrometheusMetricsHandler": "counts, without names",
}


def ask_all(url: str, token: str, *, ours: bool = True) -> dict[str, set[tuple[str, int]]]:
    """What a caller gets who asks for everything: by handler, each method with its status.

    Parameters
    ----------
    url
        The server's address with its base URL.
    ours
        Whether nnsight's own routes are asked as well, with which an admin can stop the engine. Their
        handlers' names begin with ``nnsight:`` here.
    """
    headers = {"Authorization": f"token {token}"}
    routes = httpx.get(url + PATH, headers=headers).json()
    assert len(routes) > 40
    parts = urlsplit(url)
    found: dict[str, set[tuple[str, int]]] = {}
    with httpx.Client(headers=headers, timeout=30) as client:
        for route in routes:
            if route["ours"] and not ours:
                continue
            path = sample(route["pattern"])
            assert re.fullmatch(route["pattern"].removesuffix("$"), path), (route, path)
            place = f"{parts.scheme}://{parts.netloc}{quote(path, safe='/%')}"
            name = ("nnsight:" if route["ours"] else "") + route["handler"]
            statuses = found.setdefault(name, set())
            if route["websocket"]:
                statuses.add(("WEBSOCKET", upgrade(place, token)))
                continue
            for method in route["methods"]:
                if method != "OPTIONS":
                    body = None if method in ("GET", "HEAD") else b"{}"
                    statuses.add((method, status_of(client, method, place, body)))
    return found


def status_of(client: httpx.Client, method: str, url: str, body: bytes | None) -> int:
    """The status of an answer; 500 where the server closes the connection instead."""
    try:
        return client.request(method, url, content=body).status_code
    except httpx.RemoteProtocolError:
        return 500


def reached(found: dict[str, set[tuple[str, int]]]) -> set[str]:
    """The handlers besides nnsight's and those of `OPEN` that did something for the caller."""
    return {
        handler
        for handler, statuses in found.items()
        if not handler.startswith("nnsight:")
        and handler not in OPEN
        and any(status not in (401, 403) for _, status in statuses)
    }


def upgrade(url: str, token: str) -> int:
    """The status that a websocket's handshake gets."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), timeout=30) as sock:
        lines = [
            f"GET {parts.path} HTTP/1.1",
            f"Host: {parts.netloc}",
            "Connection: Upgrade",
            "Upgrade: websocket",
            "Sec-WebSocket-Version: 13",
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
            f"Authorization: token {token}",
        ]
        sock.sendall("\r\n".join(lines).encode() + b"\r\n\r\n")
        return int(sock.recv(4096).split()[1])


def sample(pattern: str) -> str:
    """A path that a route's regular expression matches."""
    return "".join(_samples(parser.parse(pattern)))


def _samples(parsed: Any) -> list[str]:
    return [_one(kind, value) for kind, value in parsed]


def _one(kind: Any, value: Any) -> str:
    if kind is kinds.LITERAL:
        return chr(value)
    if kind is kinds.NOT_LITERAL or kind is kinds.ANY:
        return "x"
    if kind is kinds.SUBPATTERN:
        return "".join(_samples(value[-1]))
    if kind is kinds.BRANCH:
        return "".join(_samples(value[1][0]))
    if kind in (kinds.MAX_REPEAT, kinds.MIN_REPEAT):
        least, most, inner = value
        return "".join(_samples(inner)) * max(least, min(most, 1))
    if kind is kinds.IN:
        first, given = value[0]
        if first is kinds.NEGATE or first is kinds.CATEGORY:
            return "x"
        return chr(given[0] if first is kinds.RANGE else given)
    assert kind in (kinds.AT, kinds.ASSERT, kinds.ASSERT_NOT), kind
    return ""
