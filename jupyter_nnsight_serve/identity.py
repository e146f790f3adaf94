"""Who the caller is: Jupyter's own identity, reached also through nnsight's `ndif-api-key` header.

The stock nnsight client knows only the header `ndif-api-key`. Its value is put where Jupyter (and
JupyterHub's identity provider) look for a token, so that nothing here ever compares a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jupyter_server.auth import IdentityProvider, PasswordIdentityProvider
from jupyter_server.auth.identity import LegacyIdentityProvider
from tornado.httputil import HTTPServerRequest

from .errors import CrossSite, NNsightServeError, NoToken, WrongToken

if TYPE_CHECKING:
    from jupyter_server.base.handlers import JupyterHandler

# The resource that Jupyter's Authorizer is asked about.
AUTH_RESOURCE = "nnsight"

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
        Whether the caller may see everybody's traces and edits.
    """

    name: str
    admin: bool


def adopt_api_key(request: HTTPServerRequest) -> None:
    """Turn `ndif-api-key: TOKEN` into `Authorization: Bearer TOKEN`, where there is none yet."""
    key = request.headers.get("ndif-api-key", "").strip()
    if key and "Authorization" not in request.headers:
        request.headers["Authorization"] = f"Bearer {key}"


def caller_of(handler: JupyterHandler) -> Caller:
    """The caller of an authenticated request."""
    user = handler.current_user
    if type(handler.identity_provider) in _ANONYMOUS:
        return Caller(TOKEN_OWNER, admin=True)
    hub_user = getattr(user, "hub_user", None) or {}
    return Caller(str(user.username), admin=bool(hub_user.get("admin", False)))


def refusal(handler: JupyterHandler, status: int) -> NNsightServeError | None:
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
    if "Authorization" in handler.request.headers or handler.get_argument("token", ""):
        return WrongToken()
    if not handler.identity_provider.auth_enabled:
        return CrossSite(
            "This Jupyter server runs without a token, and then it accepts no request that "
            "lacks its XSRF token, so that no web page can run code on it"
        )
    if handler.current_user is None:
        return NoToken()
    return CrossSite(
        "A browser's login cookie is not enough to run code here, because another web page could "
        "use it"
    )
