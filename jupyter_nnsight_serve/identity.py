"""Who the caller is: Jupyter's own identity, reached also through nnsight's `ndif-api-key` header.

The stock nnsight client knows only the header `ndif-api-key`. Its value is put where Jupyter (and
JupyterHub's identity provider) look for a token, so that nothing here ever compares a token.
JupyterHub's provider is recognised by what it has, a `hub_auth`; the package jupyterhub need not be
installed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jupyter_server.auth import IdentityProvider, PasswordIdentityProvider
from jupyter_server.auth.identity import LegacyIdentityProvider
from tornado.httputil import HTTPServerRequest

from .authorizer import ALL, Person, Rules
from .errors import CrossSite, NNsightServeError, NoAccess, NoToken, Tokenless, WrongToken

if TYPE_CHECKING:
    from jupyter_server.base.handlers import JupyterHandler

# Jupyter's own providers give every token-authenticated request a new random anonymous user, so
# everyone who holds the server's token is this one owner.
TOKEN_OWNER = "owner"
_ANONYMOUS = (IdentityProvider, PasswordIdentityProvider, LegacyIdentityProvider)


@dataclass(frozen=True)
class Caller:
    """Who sent a request.

    Parameters
    ----------
    name
        The owner of what the request makes; stable over requests.
    admin
        Whether the caller may see everybody's traces and edits, and control the engine.
    may
        The caller's permissions, of `authorizer.ACTIONS`.
    """

    name: str
    admin: bool
    may: frozenset[str] = frozenset()


def adopt_api_key(request: HTTPServerRequest) -> None:
    """Turn `ndif-api-key: TOKEN` into `Authorization: Bearer TOKEN`, where there is none yet."""
    key = request.headers.get("ndif-api-key", "").strip()
    if key and "Authorization" not in request.headers:
        request.headers["Authorization"] = f"Bearer {key}"


def server_owner() -> str | None:
    """The Hub user whose own server this process is; None for a Hub service and without a Hub."""
    if os.environ.get("JUPYTERHUB_SERVICE_NAME"):
        return None
    return os.environ.get("JUPYTERHUB_USER") or None


def caller_of(handler: JupyterHandler, rules: Rules) -> Caller:
    """The caller of an authenticated request, whoever's server this is."""
    user = handler.current_user
    if type(handler.identity_provider) in _ANONYMOUS:
        return Caller(TOKEN_OWNER, admin=True, may=ALL)
    told: dict[str, Any] = getattr(user, "hub_user", None) or {}
    person = Person(
        name=str(user.username),
        kind=str(told.get("kind", "user")),
        hub_admin=bool(told.get("admin", False)),
        groups=frozenset(told.get("groups") or ()),
        scopes=frozenset(told.get("scopes") or ()),
    )
    may = rules.permissions(person)
    # A service may have the name of a user, and is somebody else.
    name = person.name if person.kind == "user" else f"{person.kind}:{person.name}"
    return Caller(name, admin="admin" in may, may=may)


async def refusal(handler: JupyterHandler, status: int) -> NNsightServeError | None:
    """Why Jupyter refused to authenticate this request, as a sentence.

    Jupyter checks XSRF before it looks whether there is a user at all, so a wrong token surfaces
    as a missing `_xsrf` argument. What the request carries says which of the two it is.

    Parameters
    ----------
    status
        The HTTP status Jupyter refused it with.

    Returns
    -------
    The error to answer with, or None where Jupyter's own is to stand (a Hub out of reach).
    """
    if status >= 500:
        return None
    hub_auth = getattr(handler.identity_provider, "hub_auth", None)
    if hub_auth is not None and handler.current_user is None:
        # Asked a second time, it tells what it found at the first.
        known = await hub_auth.get_user(handler, sync=False)
        if known:
            return NoAccess(os.environ.get("JUPYTERHUB_SERVICE_NAME"))
    provider = handler.identity_provider
    if not provider.auth_enabled:
        return Tokenless("without a token")
    if type(provider) in (IdentityProvider, PasswordIdentityProvider) and not provider.token:
        password = getattr(provider, "hashed_password", "")
        return Tokenless("with a password and without a token" if password else "without a token")
    if "Authorization" in handler.request.headers or handler.get_argument("token", ""):
        return WrongToken()
    if handler.current_user is None:
        return NoToken()
    return CrossSite(
        "A browser's login cookie is not enough to run code here, because another web page could "
        "use it"
    )
