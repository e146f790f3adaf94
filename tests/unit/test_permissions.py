"""Who may do what, by the rules of the settings, whatever Jupyter's authorizer says."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jupyter_server.auth import IdentityProvider, User
from jupyter_server.serverapp import ServerApp

from jupyter_nnsight_serve.authorizer import ALL, NNsightAuthorizer, Person, Rules
from jupyter_nnsight_serve.errors import SettingError
from jupyter_nnsight_serve.extension import NNsightServe
from jupyter_nnsight_serve.identity import server_owner

from .conftest import Ask, said

TRACER, EDITOR = frozenset({"read", "trace"}), frozenset({"read", "trace", "edit"})


@pytest.mark.parametrize(
    ("rules", "person", "may"),
    [
        ({}, Person("ann"), EDITOR),
        ({}, Person("ann", hub_admin=True), ALL),
        ({"editors": ()}, Person("ann"), TRACER),
        ({"editors": (), "tracers": ()}, Person("ann"), frozenset()),
        ({"admins": ()}, Person("ann", hub_admin=True), EDITOR),
        ({"admins": ("group:a",)}, Person("ann", groups=frozenset({"a"})), ALL),
        ({"admins": ("group:a",)}, Person("ann", groups=frozenset({"ab", "b"})), EDITOR),
        ({"admins": ("user:ann",)}, Person("ann"), ALL),
        ({"admins": ("user:ann",)}, Person("ann", kind="service"), EDITOR),
        ({"admins": ("service:ann",)}, Person("ann", kind="service"), ALL),
        ({"admins": ("user:a b@c:d",)}, Person("a b@c:d"), ALL),
        ({"admins": ("scope:custom:n:x",)}, Person("a", scopes=frozenset({"custom:n:x"})), ALL),
        ({"admins": ("scope:custom:n:x",)}, Person("a", scopes=frozenset({"custom:n"})), EDITOR),
        ({"admins": ("scope:read:x!user=a",)}, Person("b", scopes=frozenset({"read:x"})), ALL),
        (
            {"admins": ("scope:read:x",)},
            Person("b", scopes=frozenset({"read:x!user=b"})),
            EDITOR,
        ),
        ({"tracers": (), "editors": (), "admins": (), "owner": "ann"}, Person("ann"), ALL),
        ({"tracers": (), "editors": (), "owner": "ann"}, Person("bob"), frozenset()),
        ({"tracers": (), "editors": (), "owner": "ann"}, Person("ann", "service"), frozenset()),
    ],
)
def test_rules(rules: dict[str, Any], person: Person, may: frozenset[str]) -> None:
    assert Rules(**rules).permissions(person) == may


@pytest.mark.parametrize("entry", ["ann", "groups:x", "group:", "*", "Everyone", ""])
def test_entry_that_can_match_nobody_is_named(entry: str) -> None:
    with pytest.raises(SettingError, match=r"c\.NNsightServe\.editors has .*'group:NAME'"):
        Rules(editors=(entry,))


def test_owner_is_the_hub_user_of_an_own_server_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUPYTERHUB_SERVICE_NAME", raising=False)
    monkeypatch.delenv("JUPYTERHUB_USER", raising=False)
    assert server_owner() is None
    monkeypatch.setenv("JUPYTERHUB_USER", "ann")
    assert server_owner() == "ann"
    # A service that the Hub starts has both.
    monkeypatch.setenv("JUPYTERHUB_SERVICE_NAME", "nnsight")
    assert server_owner() is None


class FakeHub(IdentityProvider):
    """Takes a token for what the Hub would say of its user, as JSON."""

    def get_user(self, handler: Any) -> User | None:  # type: ignore[override]
        told = json.loads(handler.request.headers["Authorization"].removeprefix("Bearer "))
        handler._token_authenticated = True
        user = User(told["name"])
        user.hub_user = told  # type: ignore[attr-defined]
        return user


def token(name: str, **more: Any) -> str:
    """What `FakeHub` takes for a user."""
    return json.dumps({"name": name, "kind": "user", "admin": False, "groups": [], **more})


class TestForeignAuthorizer:
    """Jupyter's own authorizer allows everything, and makes nobody an admin."""

    @pytest.fixture
    def serve_settings(self) -> dict[str, Any]:
        return {"tracers": ["everyone"], "editors": ["group:editors"], "admins": ["hub-admins"]}

    @pytest.fixture
    def jp_server_config(self, jp_server_config: dict[str, Any]) -> dict[str, Any]:
        jp_server_config["ServerApp"]["identity_provider_class"] = FakeHub
        return jp_server_config

    async def test_rules_decide(
        self, ready: NNsightServe, ask: Ask, jp_serverapp: ServerApp
    ) -> None:
        assert not isinstance(jp_serverapp.authorizer, NNsightAuthorizer)
        ann, eve = token("ann"), token("eve", groups=["editors"])
        root, bot = token("root", admin=True), token("ann", kind="service")
        for key, name, may in (
            (ann, "ann", TRACER),
            (eve, "eve", EDITOR),
            (root, "root", ALL),
            # Somebody else than the user of the same name.
            (bot, "service:ann", TRACER),
        ):
            told = json.loads((await ask("/nnsight/status", key=key)).body)["caller"]
            assert told == {"name": name, "may": sorted(may)}
        assert (await ask("/nnsight/generate", "POST", key=ann, body=b"x")).code == 200
        for method, path in (
            ("POST", "/nnsight/register/x"),
            ("DELETE", "/nnsight/register/x"),
            ("POST", "/v1/nnsight/register/x/clear"),
        ):
            response = await ask(path, method, key=ann, body=b"x" if method == "POST" else None)
            assert response.code == 403 and "c.NNsightServe.editors" in said(response)
            response = await ask(path, method, key=eve, body=b"x" if method == "POST" else None)
            assert response.code == 200


class TestNobody:
    """A caller of whom no rule says anything may not even read."""

    @pytest.fixture
    def serve_settings(self) -> dict[str, Any]:
        return {"tracers": ["group:tracers"], "editors": [], "admins": []}

    @pytest.fixture
    def jp_server_config(self, jp_server_config: dict[str, Any]) -> dict[str, Any]:
        jp_server_config["ServerApp"]["identity_provider_class"] = FakeHub
        return jp_server_config

    async def test_is_refused_everything(self, ready: NNsightServe, ask: Ask) -> None:
        for method, path in (
            ("POST", "/v1/nnsight/generate"),
            ("GET", "/nnsight/status"),
            ("GET", "/nnsight/register"),
            ("GET", "/nnsight/model"),
            ("GET", "/nnsight/model/tokenizer"),
        ):
            body = b"x" if method == "POST" else None
            response = await ask(path, method, key=token("root", admin=True), body=body)
            assert response.code == 403 and "c.NNsightServe.tracers" in said(response), path
