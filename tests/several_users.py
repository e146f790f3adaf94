"""An identity provider for tests with several users: whose token it is, is who it is."""

from __future__ import annotations

from typing import Any

from jupyter_server.auth import IdentityProvider, User


class SeveralUsers(IdentityProvider):
    """Every token is the name of its user; root is an admin of the Hub."""

    def get_user(self, handler: Any) -> User | None:
        name = self.get_token(handler)
        if not name:
            return None
        user = User(username=name)
        user.hub_user = {"admin": name == "root"}  # type: ignore[attr-defined]
        return user

    def is_token_authenticated(self, handler: Any) -> bool:
        """Whether no browser's cookie is what tells who it is: never here."""
        return True
