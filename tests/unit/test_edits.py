"""Edits: installed, listed and cleared, by whom they belong to."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from jupyter_nnsight_serve.edits import EditBook, check_id
from jupyter_nnsight_serve.errors import BadRequest, NotAllowed
from jupyter_nnsight_serve.extension import NNsightServe
from jupyter_nnsight_serve.identity import Caller

from .conftest import Ask, said, wait_for, wait_state

Record = Callable[[str], list[dict[str, Any]]]
ANN, BOB = Caller("ann", admin=False), Caller("bob", admin=False)
ROOT = Caller("root", admin=True)


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_edit_is_installed_listed_and_cleared(
    ready: NNsightServe, ask: Ask, record: Record, prefix: str
) -> None:
    installed = await ask(f"{prefix}/nnsight/register/id-1?name=no%20fear", "POST", body=b"block")
    assert json.loads(installed.body) == {
        "status": "ok",
        "id": "id-1",
        "name": "no fear",
        "warnings": [],
    }
    assert record("edit") == [{"event": "edit", "id": "id-1", "name": "no fear", "size": 5}]

    (edit,) = json.loads((await ask(f"{prefix}/nnsight/register")).body)["edits"]
    assert edit.pop("created") > 1e9
    assert edit == {"id": "id-1", "name": "no fear", "owner": "owner", "bytes": 5}

    if prefix:
        cleared = await ask("/v1/nnsight/register/id-1/clear", "POST")
    else:
        cleared = await ask("/nnsight/register/id-1", "DELETE")
    told = {"status": "ok", "id": "id-1", "cleared": True}
    assert (cleared.code, json.loads(cleared.body)) == (200, told)
    assert record("clear") == [{"event": "clear", "id": "id-1", "known": True}]
    assert json.loads((await ask("/nnsight/register")).body) == {"edits": []}


async def test_unnamed_edit_has_no_name(ready: NNsightServe, ask: Ask, record: Record) -> None:
    await ask("/v1/nnsight/register/x", "POST", body=b"block")
    assert record("edit")[0]["name"] is None


async def test_clearing_an_unknown_edit_is_no_error(ready: NNsightServe, ask: Ask) -> None:
    for path, method in (
        ("/v1/nnsight/register/x/clear", "POST"),
        ("/nnsight/register/x", "DELETE"),
    ):
        answer = await ask(path, method)
        assert answer.code == 200
        assert json.loads(answer.body)["cleared"] is False


async def test_edit_that_does_not_load_is_not_listed(ready: NNsightServe, ask: Ask) -> None:
    response = await ask("/v1/nnsight/register/x", "POST", body=b"broken")
    assert response.code == 400
    assert said(response) == "the block does not load"
    assert json.loads((await ask("/nnsight/register")).body) == {"edits": []}


async def test_odd_id_is_400(ready: NNsightServe, ask: Ask, record: Record) -> None:
    for edit_id in ("a%20b", "a%2Fb", "..", "%2e%2e", "x" * 129, "a%0d%0ab"):
        for method, path in (
            ("POST", f"/nnsight/register/{edit_id}"),
            ("DELETE", f"/nnsight/register/{edit_id}"),
            ("POST", f"/v1/nnsight/register/{edit_id}/clear"),
        ):
            response = await ask(path, method)
            assert response.code == 400, path
            assert "An edit's id is" in said(response)
    assert not record("edit") and not record("clear")


async def test_edits_go_with_their_engine(ready: NNsightServe, ask: Ask) -> None:
    await ask("/v1/nnsight/register/x", "POST", body=b"block")
    await ask("/v1/nnsight/generate", "POST", body=b'{"die": 1}')
    await wait_state(ready, "failed")
    await wait_for(lambda: ready.edits.visible_to(ROOT) == [])
    cleared = await ask("/v1/nnsight/register/x/clear", "POST")
    assert cleared.code == 503
    assert "ended with exit code 1" in said(cleared)


def test_ids_that_nnsight_makes_are_taken() -> None:
    for edit_id in ("3f2c1f0e-9d2b-4d8f-8a53-0f6f2f9d8a11", "a", "A.b_c-9", "x" * 128):
        assert check_id(edit_id) == edit_id
    for edit_id in ("", ".", "..", "a/b", "a b", "é", "x" * 129):
        with pytest.raises(BadRequest):
            check_id(edit_id)


def test_edit_is_its_owners_and_the_admins() -> None:
    book = EditBook()
    book.add("1", None, ANN, 10)
    assert [edit["id"] for edit in book.visible_to(ANN)] == ["1"]
    assert [edit["id"] for edit in book.visible_to(ROOT)] == ["1"]
    assert book.visible_to(BOB) == []
    for caller in (ANN, ROOT):
        book.check_may_change("1", caller)
    with pytest.raises(NotAllowed) as caught:
        book.check_may_change("1", BOB)
    assert "ann" not in caught.value.message
    book.check_may_change("unknown", BOB)
