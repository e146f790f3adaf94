"""Who may do what, found out before a byte of a body is read."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
from jupyter_server.auth import Authorizer, passwd
from jupyter_server.serverapp import ServerApp

from jupyter_nnsight_serve.extension import NNsightServe
from jupyter_nnsight_serve.handlers import ROUTES

from .conftest import Ask, RawClient, said

Record = Callable[[str], list[dict[str, Any]]]

PROTECTED = [
    ("POST", "/nnsight/generate"),
    ("POST", "/v1/nnsight/generate"),
    ("POST", "/nnsight/register/an-id"),
    ("POST", "/v1/nnsight/register/an-id?name=n"),
    ("DELETE", "/nnsight/register/an-id"),
    ("POST", "/v1/nnsight/register/an-id/clear"),
    ("GET", "/nnsight/register"),
    ("GET", "/nnsight/status"),
]


async def test_no_token_is_401_and_says_to_pass_api_key(
    ready: NNsightServe, ask: Ask, record: Record
) -> None:
    for method, path in PROTECTED:
        response = await ask(path, method, key=None)
        assert response.code == 401, path
        assert "carries no token" in said(response)
        assert "api_key=" in said(response)
    assert not record("trace") and not record("edit") and not record("clear")


@pytest.mark.parametrize("header", ["ndif-api-key", "Authorization"])
async def test_wrong_token_is_403_and_says_to_pass_api_key(
    ready: NNsightServe, ask: Ask, record: Record, header: str
) -> None:
    wrong = {"ndif-api-key": "wr0ng", "Authorization": "token wr0ng"}[header]
    for method, path in PROTECTED:
        response = await ask(path, method, key=None, headers={header: wrong})
        assert response.code == 403, path
        assert "token of this request is not one this server accepts" in said(response)
        assert "api_key=" in said(response)
        assert "wr0ng" not in said(response) and "xsrf" not in said(response).lower()
    assert not record("trace") and not record("edit") and not record("clear")


async def test_right_token_is_taken_in_every_form(
    ready: NNsightServe, ask: Ask, token: str
) -> None:
    for method, path in PROTECTED:
        for name, form in (("ndif-api-key", "{}"), ("Authorization", "token {}")):
            response = await ask(path, method, key=None, headers={name: form.format(token)})
            assert response.code == 200, path
    headers = {"Authorization": f"Bearer {token}"}
    assert (await ask("/nnsight/status", key=None, headers=headers)).code == 200


async def test_authorization_wins_over_api_key(ready: NNsightServe, ask: Ask, token: str) -> None:
    headers = {"Authorization": "token wrong"}
    assert (await ask("/nnsight/status", key=token, headers=headers)).code == 403


async def test_health_is_open(ready: NNsightServe, ask: Ask) -> None:
    for path in ("/nnsight/health", "/health"):
        for key in (None, "wrong"):
            response = await ask(path, key=key)
            assert (response.code, json.loads(response.body)) == (200, {"status": "ok"})


@pytest.mark.parametrize("headers", [{}, {"ndif_api_key": "wrong"}])
@pytest.mark.parametrize("length", [{"Content_Length": 10**12}, {"Transfer_Encoding": "chunked"}])
async def test_refusal_comes_before_any_of_the_body(
    ready: NNsightServe,
    raw: RawClient,
    jp_base_url: str,
    headers: dict[str, str],
    length: dict[str, Any],
    record: Record,
) -> None:
    async with raw:
        raw.head("POST", jp_base_url + "v1/nnsight/generate", **headers, **length)
        status, answered, body = await raw.answer(2)
    assert status == (403 if headers else 401)
    assert answered["connection"] == "close"
    assert "api_key=" in json.loads(body)["detail"]
    assert not record("headers")


async def test_body_of_a_refused_request_is_read_away_so_that_the_answer_arrives(
    ready: NNsightServe, raw: RawClient, jp_base_url: str
) -> None:
    size = 32 * 2**20
    async with raw:
        raw.head("POST", jp_base_url + "v1/nnsight/generate", Content_Length=size)
        for _ in range(size // 2**20):
            raw.writer.write(b"x" * 2**20)
            await raw.writer.drain()
        status, _, _ = await raw.answer(2)
    assert status == 401


async def test_body_of_a_refused_request_is_not_read_for_ever(
    ready: NNsightServe, raw: RawClient, jp_base_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jupyter_nnsight_serve.base.DRAIN_SECONDS", 0.3)
    async with raw:
        raw.head("POST", jp_base_url + "v1/nnsight/generate", Content_Length=10**12)
        assert (await raw.answer(2))[0] == 401
        async with asyncio.timeout(2):
            assert await raw.reader.read() == b""


async def test_expecting_client_is_refused_without_being_told_to_continue(
    ready: NNsightServe, raw: RawClient, jp_base_url: str
) -> None:
    async with raw:
        raw.head(
            "POST", jp_base_url + "v1/nnsight/generate", Content_Length=9, Expect="100-continue"
        )
        status, _, _ = await raw.answer(2)
        assert status == 401
        async with asyncio.timeout(2):
            assert await raw.reader.read() == b""


async def test_body_that_nobody_wants_is_not_held(
    ready: NNsightServe, raw: RawClient, jp_base_url: str
) -> None:
    # Tornado holds the body of every handler that does not stream it, before it asks who is there.
    for _, handler in ROUTES:
        assert handler._stream_request_body, handler
    async with raw:
        raw.head("POST", jp_base_url + "nnsight/register/x/clear", Content_Length=10**11)
        assert (await raw.answer(2))[0] == 401


class TestCookies:
    """A browser that is signed in."""

    async def cookies(self, ask: Ask) -> dict[str, str]:
        """The cookies of a browser that came with the token once."""
        found: dict[str, str] = {}
        for path, token in (("/api/status", self.token), ("/login", "")):
            response = await ask(path, key=token, headers={"Authorization": f"token {token}"})
            for line in response.headers.get_list("Set-Cookie"):
                name, value = line.split(";")[0].split("=", 1)
                found[name] = value
        return found

    @pytest.fixture(autouse=True)
    def _token(self, token: str) -> None:
        self.token = token

    async def test_post_without_xsrf_token_is_refused_with_a_sentence(
        self, ready: NNsightServe, ask: Ask, record: Record
    ) -> None:
        cookies = await self.cookies(ask)
        header = "; ".join(f"{name}={value}" for name, value in cookies.items())
        paths = ("/nnsight/generate", "/nnsight/register/x", "/nnsight/register/x/clear")
        # A body that is there already when the headers are refused takes another way than one that
        # is not; which of them happens is a matter of timing.
        for path in paths * 10:
            response = await ask(path, "POST", key=None, headers={"Cookie": header}, body=b"x")
            assert response.code == 403
            assert "login cookie is not enough" in said(response)
            assert "X-XSRFToken" in said(response)
        assert not record("trace") and not record("edit") and not record("clear")

    async def test_post_with_xsrf_token_runs(
        self, ready: NNsightServe, ask: Ask, record: Record
    ) -> None:
        cookies = await self.cookies(ask)
        header = "; ".join(f"{name}={value}" for name, value in cookies.items())
        response = await ask(
            "/nnsight/generate",
            "POST",
            key=None,
            headers={"Cookie": header, "X-XSRFToken": cookies["_xsrf"]},
            body=b"x",
        )
        assert response.code == 200

    async def test_wrong_api_key_is_named_also_with_a_good_cookie(
        self, ready: NNsightServe, ask: Ask
    ) -> None:
        cookies = await self.cookies(ask)
        header = "; ".join(f"{name}={value}" for name, value in cookies.items())
        response = await ask("/nnsight/generate", "POST", key="bad", headers={"Cookie": header})
        assert response.code == 403
        assert "token of this request" in said(response)


class TestWithoutToken:
    """A Jupyter server whose authentication is switched off."""

    @pytest.fixture
    def jp_server_config(self, jp_server_config: dict[str, Any]) -> dict[str, Any]:
        jp_server_config["IdentityProvider"] = {"token": ""}
        jp_server_config["ServerApp"]["token"] = ""
        return jp_server_config

    async def test_post_is_refused_because_any_web_page_could_send_it(
        self, ready: NNsightServe, ask: Ask
    ) -> None:
        for key in (None, "any"):
            response = await ask("/nnsight/generate", "POST", key=key)
            assert response.code == 403
            assert "runs without a token" in said(response)
            assert "--IdentityProvider.token=" in said(response)
            assert "api_key=" not in said(response)


class TestWithPassword:
    """A Jupyter server that has a password, and with it no token."""

    @pytest.fixture
    def jp_server_config(self, jp_server_config: dict[str, Any]) -> dict[str, Any]:
        password = passwd("a password", algorithm="sha1")
        jp_server_config["PasswordIdentityProvider"] = {"hashed_password": password}
        jp_server_config["IdentityProvider"] = {"token": ""}
        jp_server_config["ServerApp"]["token"] = ""
        return jp_server_config

    async def test_is_told_that_there_is_no_token_to_pass(
        self, ready: NNsightServe, ask: Ask
    ) -> None:
        for key in (None, "any"):
            for method, path in PROTECTED:
                response = await ask(path, method, key=key)
                assert response.code == 403, path
                assert "with a password and without a token" in said(response), path
                assert "api_key=" not in said(response)


class OnlyReading(Authorizer):
    """Lets everybody read and nobody write."""

    asked: list[tuple[str, str]] = []

    def is_authorized(self, handler: Any, user: Any, action: str, resource: str) -> bool:
        self.asked.append((action, resource))
        return action == "read"


class TestAuthorizer:
    """Jupyter's Authorizer decides, on the resource nnsight."""

    @pytest.fixture
    def jp_server_config(self, jp_server_config: dict[str, Any]) -> dict[str, Any]:
        OnlyReading.asked.clear()
        jp_server_config["ServerApp"]["authorizer_class"] = OnlyReading
        return jp_server_config

    async def test_is_asked_for_every_method(
        self, ready: NNsightServe, ask: Ask, record: Record
    ) -> None:
        for method, path in [*PROTECTED, *reversed(PROTECTED)]:
            OnlyReading.asked.clear()
            response = await ask(path, method, body=b"x" if method == "POST" else None)
            assert response.code == (200 if method == "GET" else 403), path
            if method != "GET":
                assert "ask its admin for access" in said(response)
            action = "execute" if "generate" in path else "read" if method == "GET" else "write"
            assert set(OnlyReading.asked) == {(action, "nnsight")}, path
        assert not record("trace") and not record("edit") and not record("clear")

    async def test_is_asked_before_the_body_is_read(
        self, ready: NNsightServe, raw: RawClient, jp_base_url: str, token: str
    ) -> None:
        async with raw:
            raw.head(
                "POST", jp_base_url + "nnsight/generate", ndif_api_key=token, Content_Length=10**9
            )
            assert (await raw.answer(2))[0] == 403


async def test_token_is_in_no_log(
    ready: NNsightServe, ask: Ask, token: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    caplog.clear()
    await ask("/v1/nnsight/generate", "POST", body=b"x")
    await ask("/v1/nnsight/generate", "POST", key="another-token", body=b"x")
    await ask("/nnsight/status?token=" + token, key=None)
    assert caplog.text
    assert token not in caplog.text and "another-token" not in caplog.text


async def test_foreign_host_name_is_refused_with_a_sentence(
    ready: NNsightServe, ask: Ask, jp_serverapp: ServerApp
) -> None:
    response = await ask("/nnsight/status", headers={"Host": "evil.example"})
    assert response.code == 403
    assert "allow_remote_access" in said(response)
