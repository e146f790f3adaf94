"""Who may do what: an Authorizer that closes the rest of the server, and the rules for this part.

Two questions are asked of every request. Jupyter's own authorizer is asked about the resource
`nnsight`; `NNsightAuthorizer` says yes to that and no to everything else, so that a server which
several people share gives none of them its files, kernels and terminals. Then `Rules` tells which
of the permissions the caller has. Another authorizer may say no more often, and can give nothing
that the rules do not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jupyter_server.auth import Authorizer, User

from .errors import SettingError

if TYPE_CHECKING:
    from jupyter_server.base.handlers import JupyterHandler

# The resource that Jupyter's authorizer is asked about.
AUTH_RESOURCE = "nnsight"

# Each permission, and what it is called when Jupyter's authorizer is asked. A trace is code that
# runs; an edit stays and changes what runs later.
ACTIONS = {"read": "read", "trace": "execute", "edit": "write", "admin": "write"}

ALL = frozenset(ACTIONS)

EVERYONE = "everyone"
HUB_ADMINS = "hub-admins"
_KINDS = ("group", "user", "service", "scope")


class NNsightAuthorizer(Authorizer):
    """Lets whoever is signed in reach nnsight, and nothing else on this server."""

    def is_authorized(
        self, handler: JupyterHandler, user: User, action: str, resource: str
    ) -> bool:
        """Whether this is about the resource `nnsight`."""
        return resource == AUTH_RESOURCE


@dataclass(frozen=True)
class Person:
    """What the server knows of who sent a request.

    Parameters
    ----------
    name
        The name at the Hub, or at whatever identity provider there is.
    kind
        `"user"`, or `"service"` for a token of a Hub service.
    hub_admin
        Whether the Hub calls this user an admin.
    groups, scopes
        The user's groups at the Hub, and the scopes of the token, as the Hub expands them.
    """

    name: str
    kind: str = "user"
    hub_admin: bool = False
    groups: frozenset[str] = field(default_factory=frozenset)
    scopes: frozenset[str] = field(default_factory=frozenset)

    def is_one_of(self, entry: str) -> bool:
        """Whether an entry of a rule names this person."""
        kind, _, value = entry.partition(":")
        if kind == "group":
            return value in self.groups
        if kind in ("user", "service"):
            return (kind, value) == (self.kind, self.name)
        if kind == "scope":
            # Who has a scope without a filter has it for everything.
            return value in self.scopes or value.partition("!")[0] in self.scopes
        return entry == EVERYONE or (entry == HUB_ADMINS and self.hub_admin)


@dataclass(frozen=True)
class Rules:
    """The settings `tracers`, `editors` and `admins`.

    Parameters
    ----------
    owner
        The Hub user whose own server this is, and who may do everything on it; None on a server
        that belongs to nobody, such as a Hub service.

    Raises
    ------
    SettingError
        An entry is none that can match.
    """

    tracers: tuple[str, ...] = (EVERYONE,)
    editors: tuple[str, ...] = (EVERYONE,)
    admins: tuple[str, ...] = (HUB_ADMINS,)
    owner: str | None = None

    def __post_init__(self) -> None:
        for name in ("tracers", "editors", "admins"):
            for entry in getattr(self, name):
                kind, _, value = entry.partition(":")
                if entry not in (EVERYONE, HUB_ADMINS) and not (kind in _KINDS and value):
                    raise SettingError(
                        f"c.NNsightServe.{name} has {entry!r}; an entry is '{EVERYONE}', "
                        f"'{HUB_ADMINS}', 'group:NAME', 'user:NAME', 'service:NAME' or "
                        "'scope:SCOPE'."
                    )

    def permissions(self, person: Person) -> frozenset[str]:
        """What `person` may do: who may edit may trace, and who may trace may read."""
        if person.kind == "user" and self.owner is not None and person.name == self.owner:
            return ALL
        if any(map(person.is_one_of, self.admins)):
            return ALL
        if any(map(person.is_one_of, self.editors)):
            return frozenset({"read", "trace", "edit"})
        if any(map(person.is_one_of, self.tracers)):
            return frozenset({"read", "trace"})
        return frozenset()
