"""Which server to use: the one that was given, the one that is named, or one of this machine's."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import httpx

from . import discover
from .address import Address, candidates, hub_of, read_address
from .errors import EngineNotReady, HubError, NotTrusted
from .link import Link, message_of
from .secret import Secret

_LOOK_SECONDS = 2.0
_ASK_SECONDS = 10.0


def find(given: Address | None, token: Secret) -> tuple[Address, Secret]:
    """The address to use, and the token for it.

    Raises
    ------
    HubError
        There is none; the text says what was tried.
    """
    if given is not None:
        address = discover.placed(_server_of(given))
    elif named := os.environ.get(discover.URL_VARIABLE):
        address = discover.placed(read_address(named))
    else:
        address = _around(token)
    return address, token or address.token or discover.token_for(address)


def _server_of(given: Address) -> Address:
    """The server that ``given`` is, or is a page of."""
    urls = candidates(given.url)
    hub = hub_of(given.url)
    if len(urls) == 1 and hub is None:
        return given
    known = {server.address.url for server in discover.running_servers()}
    for url in urls:
        if url in known:
            return replace(given, url=url)
    try:
        for url in urls:
            if _is_server(url):
                return replace(given, url=url)
    except HubError:
        # Nobody is there at all, which whoever asks next tells in its own sentence.
        pass
    if hub is not None:
        raise HubError(
            f"{hub}/hub is JupyterHub's own page and serves no traces; give the address of the "
            f"server that does, {hub}/services/NAME for a shared service or {hub}/user/NAME for "
            "somebody's server."
        )
    return replace(given, url=urls[-1])


def _is_server(url: str) -> bool:
    """Whether a Jupyter server answers at ``url``; no token is sent to find out."""
    link = Link(Address(url, Secret(None)), Secret(None), _ASK_SECONDS)
    if _has_extension(link.look("/nnsight/health", _ASK_SECONDS)):
        return True
    # The Hub's own API tells a version as well.
    return hub_of(url) is None and link.has_jupyter()


@dataclass(frozen=True)
class _Sight:
    """What was seen of a server.

    Attributes
    ----------
    problem
        Why it is not one to use; None when it is.
    sentence
        What it says of itself when all it lacks is a model.
    """

    problem: str | None = None
    sentence: str | None = None


def _around(token: Secret) -> Address:
    """The one server of this machine that serves traces, the kernel's own before the others."""
    tried = [f"{discover.URL_VARIABLE} is not set"]
    idle: list[str] = []
    own = discover.own_server()
    if own is None:
        tried.append("this process was not started by a Jupyter server whose file is here")
    else:
        seen = _look_at(own.address, token)
        if seen.problem is None:
            return own.address
        tried.append(f"this kernel's own server, {own.address.url}, {seen.problem}")
        idle += [seen.sentence] if seen.sentence else []
    others = [s for s in discover.running_servers() if own is None or s.pid != own.pid]
    if not others:
        tried.append("no other Jupyter server of this account runs on this machine")
    having = []
    for server in others:
        seen = _look_at(server.address, token)
        if seen.problem is None:
            having.append(server.address)
        else:
            tried.append(f"{server.address.url} {seen.problem}")
            idle += [seen.sentence] if seen.sentence else []
    if len(having) > 1:
        names = " or ".join(f"connect({address.url!r})" for address in having)
        raise HubError(f"Several Jupyter servers on this machine serve traces; choose one: {names}")
    if having:
        return having[0]
    if idle:
        raise EngineNotReady(idle[0])
    raise HubError(
        f"No server that serves nnsight traces was found: {'; '.join(tried)}. Give its address: "
        'connect("https://HOST/BASE_URL", token).'
    )


def _look_at(address: Address, token: Secret) -> _Sight:
    """Whether the server at ``address`` has the extension, and a model to serve."""
    try:
        link = Link(address, token or address.token, _LOOK_SECONDS)
        answer = link.look("/nnsight/health", _LOOK_SECONDS)
        if not _has_extension(answer):
            return _Sight("does not have the extension")
        # An engine that is ready has a model, whoever set it.
        status = None if answer.status_code == 200 else link.look("/nnsight/status", _LOOK_SECONDS)
    except NotTrusted as error:
        return _Sight(f"is not trusted: {str(error).rstrip('.')}")
    except HubError:
        return _Sight("does not answer")
    if status is None:
        return _Sight()
    told = _told(status)
    if told.get("state") not in ("failed", "stopped") or (told.get("model") or {}).get("name"):
        return _Sight()
    why = told.get("reason") or "c.NNsightServe.model is not set"
    return _Sight("has no model to serve", f"The server at {address.url} serves nothing: {why}")


def _has_extension(answer: httpx.Response) -> bool:
    if answer.status_code == 503:
        return message_of(answer) is not None
    return answer.status_code == 200 and _told(answer).get("status") == "ok"


def _told(answer: httpx.Response) -> dict[str, Any]:
    try:
        body = answer.json()
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}
