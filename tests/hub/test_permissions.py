"""Who may do what at a Hub service, decided by the Hub's groups, scopes and tokens."""

from __future__ import annotations

import time
from urllib.parse import quote

import httpx
import pytest
import routes

from .hub import ADA, BOSS, EVE, JOSE, Client, Hub

SORRY = "it does not carry the scope access:services!service=managed"


@pytest.fixture(scope="module")
def clients(hub: Hub, managed: str) -> dict[str, Client]:
    """Each user with a token of all that the user may do."""
    names = (ADA, JOSE, EVE, BOSS)
    return {name: Client(managed, hub.user_token(name)["token"]) for name in names}


def refused(answer: httpx.Response) -> str:
    """The sentence of a refusal."""
    assert answer.status_code == 403, answer.text
    error = answer.json()
    assert error["detail"] == error["message"] and "xsrf" not in error["message"].lower()
    return str(error["message"])


@pytest.mark.parametrize("name", [ADA, JOSE])
def test_member_of_the_group_traces_under_the_own_name(
    clients: dict[str, Client], hub: Hub, name: str
) -> None:
    assert clients[name].status()["caller"]["name"] == name
    answer = clients[name].ask("POST", "/v1/nnsight/generate", b"x")
    assert (answer.status_code, answer.text) == (200, "got 1 bytes")
    trace = answer.headers["Nnsight-Trace-Id"]
    hub.process.wait_said(f"trace {trace} user={name} outcome=ok")


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/v1/nnsight/generate"), ("POST", "/nnsight/register/x"), ("GET", "/nnsight/status")],
)
def test_user_outside_the_group_is_refused_in_a_sentence(
    clients: dict[str, Client], method: str, path: str
) -> None:
    said = refused(clients[EVE].ask(method, path, b"x"))
    assert SORRY in said and "not in a group" in said


def test_token_without_the_scope_is_refused_and_with_it_accepted(hub: Hub, managed: str) -> None:
    without = hub.user_token(JOSE, ["users:activity!user"])["token"]
    said = refused(Client(managed, without).ask("POST", "/v1/nnsight/generate", b"x"))
    assert SORRY in said and "server_token_scopes" in said
    with_it = hub.user_token(JOSE, ["access:services!service=managed"])["token"]
    assert Client(managed, with_it).ask("POST", "/v1/nnsight/generate", b"x").status_code == 200


def test_no_token_and_an_unknown_one_are_told_apart(managed: str) -> None:
    answer = Client(managed, None).ask("POST", "/v1/nnsight/generate", b"x")
    assert answer.status_code == 401 and "JupyterHub token" in answer.json()["detail"]
    said = refused(Client(managed, "0" * 32).ask("POST", "/v1/nnsight/generate", b"x"))
    assert "not one this server accepts" in said


def test_revoked_token_stops_working_within_the_cache_time(hub: Hub, managed: str) -> None:
    made = hub.user_token(JOSE)
    client = Client(managed, made["token"])
    assert client.ask("POST", "/v1/nnsight/generate", b"x").status_code == 200
    hub.revoke(JOSE, made)
    revoked = time.monotonic()
    while client.ask("POST", "/v1/nnsight/generate", b"x").status_code == 200:
        # cache_max_age is 3 seconds here, and a request of this machine takes part of one.
        assert time.monotonic() - revoked < 5
        time.sleep(0.1)
    said = refused(client.ask("POST", "/v1/nnsight/generate", b"x"))
    assert "not one this server accepts" in said


def test_user_who_leaves_the_group_is_refused_after_the_cache_time(hub: Hub, managed: str) -> None:
    hub.api("POST", "/groups/nnsight-users/users", {"users": [EVE]})
    try:
        client = Client(managed, hub.user_token(EVE)["token"])
        assert client.ask("POST", "/v1/nnsight/generate", b"x").status_code == 200
    finally:
        hub.api("DELETE", "/groups/nnsight-users/users", {"users": [EVE]})
    time.sleep(3.5)
    assert SORRY in refused(client.ask("POST", "/v1/nnsight/generate", b"x"))


def test_editor_edits_tracer_only_traces(clients: dict[str, Client]) -> None:
    assert clients[ADA].status()["caller"]["may"] == ["edit", "read", "trace"]
    assert clients[JOSE].status()["caller"]["may"] == ["read", "trace"]
    assert clients[ADA].ask("POST", "/nnsight/register/mine", b"x").status_code == 200
    said = refused(clients[JOSE].ask("POST", "/nnsight/register/mine", b"x"))
    assert "c.NNsightServe.editors" in said
    assert "c.NNsightServe.editors" in refused(
        clients[JOSE].ask("DELETE", "/nnsight/register/mine")
    )
    cleared = clients[ADA].ask("DELETE", "/nnsight/register/mine").json()
    assert cleared["cleared"] is True


def test_only_an_admin_installs_an_edit_for_everybody(clients: dict[str, Client]) -> None:
    shared = "/nnsight/register/ours?shared=true"
    assert "Only an admin" in refused(clients[ADA].ask("POST", shared, b"x"))
    assert clients[BOSS].ask("POST", shared, b"x").status_code == 200
    assert clients[BOSS].ask("DELETE", "/nnsight/register/ours").json()["cleared"] is True


def test_hub_admin_is_an_admin_with_every_token_that_has_access(hub: Hub, managed: str) -> None:
    for scopes in (None, ["access:services!service=managed"]):
        client = Client(managed, hub.user_token(BOSS, scopes)["token"])
        assert client.status()["caller"] == {
            "name": BOSS,
            "may": ["admin", "edit", "read", "trace"],
        }
    without = Client(managed, hub.user_token(BOSS, ["users:activity!user"])["token"])
    assert SORRY in refused(without.ask("GET", "/nnsight/status"))


def test_nobody_reaches_the_rest_of_the_service(hub: Hub, managed: str) -> None:
    for name in (ADA, BOSS):
        token = hub.user_token(name)["token"]
        found = routes.ask_all(hub.managed_direct, token, ours=name != BOSS)
        assert {"ContentsHandler", "MainKernelHandler", "ShutdownHandler"} <= set(found)
        extra = routes.reached(found)
        assert not extra, {handler: found[handler] for handler in extra}


def test_another_users_token_on_my_server(hub: Hub) -> None:
    url = hub.start_server(ADA, "mine")
    try:
        own = Client(url, hub.user_token(ADA)["token"])
        own.wait_ready(hub.process.tail)
        assert own.status()["caller"]["may"] == ["admin", "edit", "read", "trace"]
        other = Client(url, hub.user_token(JOSE)["token"])
        said = refused(other.ask("POST", "/v1/nnsight/generate", b"x"))
        assert "the scope access:servers" in said and ADA not in said
        hub.api("POST", f"/shares/{quote(ADA)}/mine", {"user": JOSE})
        other = Client(url, hub.user_token(JOSE)["token"])
        assert other.status()["caller"] == {"name": JOSE, "may": ["edit", "read", "trace"]}
        answer = other.ask("POST", "/v1/nnsight/generate", b"x")
        assert answer.status_code == 200
        trace = answer.headers["Nnsight-Trace-Id"]
        hub.process.wait_said(f"trace {trace} user={JOSE} outcome=ok")
    finally:
        hub.stop_server(ADA, "mine")
