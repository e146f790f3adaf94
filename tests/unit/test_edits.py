"""Edits: installed, listed and cleared, by whom they belong to."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from several_users import SeveralUsers

from jupyter_nnsight_serve.edits import Edit, EditBook, check_id
from jupyter_nnsight_serve.errors import BadRequest, NoRoom
from jupyter_nnsight_serve.extension import NNsightServe
from jupyter_nnsight_serve.identity import Caller
from jupyter_nnsight_serve.spool import BodyGone, Spool
from jupyter_nnsight_serve.upstream import EngineLost

from .conftest import Ask, said, wait_for, wait_state

Record = Callable[[str], list[dict[str, Any]]]
ANN, BOB = Caller("ann", admin=False), Caller("bob", admin=False)
ROOT = Caller("root", admin=True)


async def listed(ask: Ask, **options: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((await ask("/nnsight/register", **options)).body)
    return found


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_edit_is_installed_listed_and_cleared(
    ready: NNsightServe, ask: Ask, record: Record, prefix: str
) -> None:
    installed = await ask(
        f"{prefix}/nnsight/register/id-1?name=no%20fear",
        "POST",
        body=b"block",
        headers={"nnsight-compress": "True"},
    )
    assert json.loads(installed.body) == {
        "status": "ok",
        "id": "id-1",
        "name": "no fear",
        "warnings": [],
    }
    key = record("edit")[0]["key"]
    assert record("edit") == [
        {
            "event": "edit",
            "key": key,
            "id": "id-1",
            "name": "no fear",
            "size": 5,
            "compress": "True",
        }
    ]

    (edit,) = (await listed(ask))["edits"]
    assert edit.pop("created") > 1e9
    assert 0 <= edit.pop("age") < 10
    assert edit == {
        "id": "id-1",
        "name": "no fear",
        "owner": "owner",
        "shared": False,
        "bytes": 5,
        "runs": 3,
        "source": "a source",
    }

    if prefix:
        cleared = await ask("/v1/nnsight/register/id-1/clear", "POST")
    else:
        cleared = await ask("/nnsight/register/id-1", "DELETE")
    told = {"status": "ok", "id": "id-1", "cleared": True}
    assert (cleared.code, json.loads(cleared.body)) == (200, told)
    assert record("clear") == [{"event": "clear", "key": key, "known": True}]
    assert await listed(ask) == {"edits": [], "removed": []}


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
    assert await listed(ask) == {"edits": [], "removed": []}
    assert bodies(ready) == []


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


def bodies(extension: NNsightServe) -> list[Path]:
    """The files that hold edits."""
    runtime = Path(extension.serverapp.runtime_dir)
    return list(runtime.glob("nnsight-edits-*/*"))


async def test_edits_are_installed_again_before_the_next_engine_is_ready(
    ready: NNsightServe, ask: Ask, record: Record
) -> None:
    for number in range(3):
        await ask(f"/nnsight/register/x{number}?name=n{number}", "POST", body=b"block %d" % number)
    await ask("/nnsight/register/x1", "DELETE")
    (file, _) = bodies(ready)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    first = ready.supervisor.pid
    await ask("/v1/nnsight/generate", "POST", body=b'{"die": 1}')
    # Cleared while there is no engine: the next one never gets it.
    assert json.loads((await ask("/nnsight/register/x2", "DELETE")).body)["cleared"] is True
    await wait_state(ready, "ready")
    assert ready.supervisor.pid != first
    assert [(e["id"], e["name"], e["size"]) for e in record("edit")[3:]] == [("x0", "n0", 7)]
    assert [edit["id"] for edit in (await listed(ask))["edits"]] == ["x0"]
    await ask("/nnsight/generate", "POST", body=b"x")
    (edit,) = ready.edits.visible_to(ROOT)
    assert record("trace")[-1]["edits"] == edit.key


async def test_edit_that_the_next_engine_refuses_is_told_of(
    ready: NNsightServe, ask: Ask, record: Record
) -> None:
    await ask("/nnsight/register/x?name=n", "POST", body=b"blocks")
    (file,) = bodies(ready)
    file.write_bytes(b"broken")
    await ask("/v1/nnsight/generate", "POST", body=b'{"die": 1}')
    await wait_for(lambda: not ready.edits.visible_to(ROOT))
    await wait_state(ready, "ready")
    (told,) = (await listed(ask))["removed"]
    assert (told["id"], told["name"]) == ("x", "n")
    assert "the engine was restarted and refused it: the block does not load" in told["reason"]


async def test_installing_without_an_engine_is_503_and_clearing_is_not(
    extension: NNsightServe, ask: Ask
) -> None:
    assert (await ask("/nnsight/register/x", "POST", body=b"block")).code == 503
    assert bodies(extension) == []
    answer = await ask("/nnsight/register/x", "DELETE")
    assert (answer.code, json.loads(answer.body)["cleared"]) == (200, False)


def test_ids_that_nnsight_makes_are_taken() -> None:
    for edit_id in ("3f2c1f0e-9d2b-4d8f-8a53-0f6f2f9d8a11", "a", "A.b_c-9", "x" * 128):
        assert check_id(edit_id) == edit_id
    for edit_id in ("", ".", "..", "a/b", "a b", "é", "x" * 129):
        with pytest.raises(BadRequest):
            check_id(edit_id)


class TestSeveralUsers:
    """Edits over HTTP, of two users and an admin."""

    @pytest.fixture
    def jp_server_config(self, jp_server_config: dict[str, Any]) -> dict[str, Any]:
        jp_server_config["ServerApp"]["identity_provider_class"] = SeveralUsers
        return jp_server_config

    async def test_an_edit_runs_for_its_owner_only(
        self, ready: NNsightServe, ask: Ask, record: Record
    ) -> None:
        async def as_(user: str, path: str, method: str = "GET", body: bytes | None = None) -> Any:
            answer = await ask(path, method, body=body, key=user)
            return answer

        async def run(user: str) -> list[str]:
            await as_(user, "/nnsight/generate", "POST", b"x")
            keys = record("trace")[-1]["edits"]
            return keys.split(",") if keys else []

        async def names(user: str) -> list[tuple[str, str]]:
            found = json.loads((await as_(user, "/nnsight/register")).body)["edits"]
            return [(edit["owner"], edit["name"]) for edit in found]

        for user in ("ann", "bob"):
            await as_(user, "/nnsight/register/same-id?name=probe", "POST", b"block")
        ann, bob = (edit["key"] for edit in record("edit"))
        assert await run("ann") == [ann]
        assert await run("bob") == [bob]
        assert await run("carl") == []
        assert await names("ann") == [("ann", "probe")]
        assert await names("root") == [("ann", "probe"), ("bob", "probe")]

        refused = await as_("ann", "/nnsight/register/s?shared=true", "POST", b"block")
        assert refused.code == 403
        assert "Only an admin" in said(refused)
        shared = await as_("root", "/nnsight/register/s?shared=true&name=probe", "POST", b"block")
        assert shared.code == 200
        key = record("edit")[-1]["key"]
        # The own edit of the same name comes before the shared one.
        assert await run("ann") == [ann]
        assert await run("carl") == [key]
        assert await names("carl") == [("root", "probe")]

        unknown = await as_("carl", "/nnsight/register/same-id", "DELETE")
        named = await as_("carl", "/nnsight/register/same-id?owner=ann", "DELETE")
        for answer in (unknown, named):
            assert json.loads(answer.body)["cleared"] is False
        for path in ("/nnsight/register/s", "/nnsight/register/s?shared=true"):
            everybodys = await as_("carl", path, "DELETE")
            assert everybodys.code == 403
            assert "only an admin may clear it" in said(everybodys)
        assert (await as_("root", "/nnsight/register/same-id?owner=ann", "DELETE")).code == 200
        assert await run("ann") == [key]
        assert await run("bob") == [bob]
        await as_("root", "/nnsight/register/s", "DELETE")
        assert await run("ann") == []


async def spooled(body: bytes) -> Spool:
    spool = Spool()
    await spool.write(body)
    return spool


async def install(
    book: EditBook, edit_id: str, caller: Caller, name: str | None = None, shared: bool = False
) -> Edit:
    edit = Edit(edit_id, name, caller.name, shared)
    return book.add(await book.draft(edit, await spooled(b"block")))


class Clock:
    """A clock that tests set."""

    now = 1e9

    def __call__(self) -> float:
        return self.now


async def test_edit_goes_when_its_lifetime_is_over(tmp_path: Path) -> None:
    clock = Clock()
    book = EditBook(str(tmp_path), lifetime=100, clock=clock)
    old = await install(book, "old", ANN, "a")
    await install(book, "everybodys", ROOT, "b", shared=True)
    clock.now += 60
    young = await install(book, "young", ANN)
    clock.now += 40
    assert [edit.id for edit in book.visible_to(ANN)] == ["everybodys", "young"]
    assert old.key not in book.keys_for(ANN) and young.key in book.keys_for(ANN)
    assert book.stale() == [old.key]
    book.forgotten(old.key)
    assert book.stale() == []
    (told,) = book.removed_from(ANN)
    assert (told["id"], told["age"]) == ("old", 100)
    assert told["reason"] == "its lifetime of 100 s (edit_lifetime) was over"
    assert book.removed_from(BOB) == []
    assert len(list(tmp_path.glob("*/*"))) == 2


async def test_one_edit_too_many_takes_the_oldest(tmp_path: Path) -> None:
    book = EditBook(str(tmp_path), max_edits=2)
    for edit_id in ("1", "2"):
        await install(book, edit_id, ANN)
    await install(book, "1", ANN)
    await install(book, "1", BOB)
    await install(book, "3", ANN)
    assert [edit.id for edit in book.visible_to(ANN)] == ["1", "3"]
    assert [edit.id for edit in book.visible_to(BOB)] == ["1"]
    (told,) = book.removed_from(ANN)
    assert told["id"] == "2" and "max_edits" in told["reason"]


async def test_no_edit_is_kept_where_none_is_allowed(tmp_path: Path) -> None:
    book = EditBook(str(tmp_path), max_edits=0)
    edit = await install(book, "1", ANN)
    assert book.visible_to(ANN) == [] and book.stale() == [edit.key]


async def test_installing_again_is_another_edit_to_the_engine(tmp_path: Path) -> None:
    book = EditBook(str(tmp_path))
    first, second = await install(book, "1", ANN), await install(book, "1", ANN)
    assert first.key != second.key
    assert book.keys_for(ANN) == [second.key] and book.stale() == [first.key]
    assert len(list(tmp_path.glob("*/*"))) == 1


async def test_an_admin_clears_the_shared_one_of_two_with_one_id(tmp_path: Path) -> None:
    book = EditBook(str(tmp_path))
    own = await install(book, "1", ROOT)
    shared = await install(book, "1", ROOT, shared=True)
    assert book.find("1", ROOT) is own
    assert book.find("1", ROOT, shared=True) is shared
    assert book.find("1", ROOT, "root", shared=True) is shared


class Engine:
    """An engine's HTTP as `reinstall` uses it, whose answers a test gives."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.installed: list[str] = []

    async def open(self, method: str, target: str, headers: Any, length: int) -> Engine:
        self.target = target
        return self

    async def write(self, chunk: bytes) -> None:
        """Take a piece of the body."""

    def end(self) -> None:
        """The body is complete."""

    def abort(self) -> None:
        """The exchange is over."""

    async def json(self, timeout: float) -> tuple[int, dict[str, Any]]:
        answer = self.answers.pop(0) if self.answers else 200
        if callable(answer):
            answer = answer() or 200
        if isinstance(answer, Exception):
            raise answer
        self.installed.append(self.target.rsplit("=", 1)[1])
        return answer, {"message": "no"}


async def ids_after(book: EditBook, engine: Any) -> list[str]:
    with contextlib.suppress(EngineLost, TimeoutError):
        await book.reinstall(engine, 1)
    return [edit.id for edit in book.visible_to(ROOT)]


@pytest.mark.parametrize("fault", [503, 500, EngineLost(), TimeoutError()])
async def test_edits_outlive_an_engine_that_ends_while_it_gets_them(
    tmp_path: Path, fault: Any
) -> None:
    book = EditBook(str(tmp_path))
    for edit_id in ("1", "2", "3"):
        await install(book, edit_id, ANN)
    with pytest.raises((EngineLost, TimeoutError)):
        await book.reinstall(Engine(200, fault), 1)  # type: ignore[arg-type]
    assert await ids_after(book, Engine()) == ["1", "2", "3"]
    # One at which engines end is not tried for ever.
    assert await ids_after(book, Engine(200, fault)) == ["1", "2", "3"]
    assert await ids_after(book, Engine(200, fault)) == ["1", "3"]
    assert "ended twice" in book.removed_from(ANN)[0]["reason"]


async def test_clearing_while_edits_are_installed_again_keeps_the_others(tmp_path: Path) -> None:
    book = EditBook(str(tmp_path))
    one, two, three = [await install(book, edit_id, ANN) for edit_id in ("1", "2", "3")]

    def clear_two() -> None:
        book.clear(one)
        book.clear(two)

    engine = Engine(clear_two)
    assert await ids_after(book, engine) == ["3"]
    assert engine.installed == ["1", "3"]
    assert set(book.stale()) == {one.key, two.key}


async def test_body_that_goes_while_it_is_kept_leaves_no_file(tmp_path: Path) -> None:
    book = EditBook(str(tmp_path))
    body = await spooled(b"x" * 5_000_000)
    keeping = asyncio.ensure_future(book.draft(Edit("1", None, "ann"), body))
    await asyncio.sleep(0.001)
    body.close()
    with pytest.raises(BodyGone):
        await keeping
    assert list(tmp_path.glob("*/*")) == []


async def test_closing_leaves_no_file(tmp_path: Path) -> None:
    book = EditBook(str(tmp_path))
    await install(book, "1", ANN)
    draft = await book.draft(Edit("2", None, "ann"), await spooled(b"part"))
    draft.discard()
    assert len(list(tmp_path.glob("*/*"))) == 1
    book.close()
    assert list(tmp_path.iterdir()) == []


async def test_edit_that_the_disk_does_not_take_is_refused(tmp_path: Path) -> None:
    book = EditBook(str(tmp_path))
    await install(book, "1", ANN)
    (directory,) = tmp_path.iterdir()
    shutil.rmtree(directory)
    with pytest.raises(NoRoom) as caught:
        await install(book, "2", ANN)
    assert caught.value.status_code == 507
    assert "disk does not take this request's body now" in caught.value.message
