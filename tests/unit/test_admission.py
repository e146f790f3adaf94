"""Whose turn it is: limits, round-robin, places, and who is told what while waiting."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from several_users import SeveralUsers

from jupyter_nnsight_serve import admission as module
from jupyter_nnsight_serve import handlers
from jupyter_nnsight_serve.admission import Admission, Finished, Limits, Trace
from jupyter_nnsight_serve.errors import EngineUnavailable, TooManyTraces
from jupyter_nnsight_serve.extension import NNsightServe
from jupyter_nnsight_serve.framed import CONTENT_TYPE, FrameWatch, json_frame
from jupyter_nnsight_serve.identity import Caller

from .conftest import Ask, RawClient, said, wait_for, wait_state

Record = Callable[[str], list[dict[str, Any]]]
ROOT = Caller("root", admin=True)
LOG = logging.getLogger("test-admission")


class Room:
    """An admission, and the order in which traces got their turn."""

    def __init__(self, **limits: int) -> None:
        self.finished: list[Finished] = []
        self.admission = Admission(LOG, Limits(**limits), self.finished.append)
        self.order: list[str] = []
        self.traces: dict[str, Trace] = {}

    def come(self, *names: str) -> None:
        """Traces named by their user's letter and a number come, complete."""
        for name in names:
            trace = self.admission.begin(Caller(name[0], admin=False))
            self.traces[name] = trace
            turn = self.admission.queue(trace)
            if turn.done():
                self.order.append(name)
            else:
                turn.add_done_callback(lambda _, name=name: self.order.append(name))

    async def end(self, *names: str) -> None:
        for name in names:
            self.admission.end(self.traces[name], "ok", {})
            await asyncio.sleep(0)

    def places(self) -> dict[str, int]:
        found = {name: self.admission.place(trace) for name, trace in self.traces.items()}
        return {name: place for name, place in found.items() if place is not None}


async def test_users_take_turns_however_many_traces_each_has() -> None:
    room = Room(traces=1)
    room.come("a1", "a2", "a3", "a4", "b1", "b2", "c1")
    assert room.order == ["a1"]
    for name in ("a1", "a2", "b1", "c1", "a3", "b2", "a4"):
        assert room.order[-1] == name
        await room.end(name)
    assert room.order == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]
    assert (room.admission.running, room.admission.waiting) == (0, 0)


async def test_places_are_the_turns_to_come() -> None:
    room = Room(traces=1)
    room.come("a1", "a2", "a3", "a4", "b1", "b2", "c1")
    while places := room.places():
        expected = sorted(places, key=lambda name: places[name])
        assert sorted(places.values()) == list(range(1, len(places) + 1))
        await room.end(room.order[-1])
        assert room.order[-1] == expected[0]


async def test_user_holds_a_share_and_a_newcomer_starts_at_once() -> None:
    room = Room(traces=4, user_traces=2)
    room.come(*(f"a{n}" for n in range(10)))
    assert room.order == ["a0", "a1"]
    room.come("b1")
    assert room.order == ["a0", "a1", "b1"]
    await room.end("b1")
    assert room.order == ["a0", "a1", "b1"]
    await room.end("a0")
    assert room.order == ["a0", "a1", "b1", "a2"]


async def test_too_many_waiting_are_refused_by_the_limits_name() -> None:
    room = Room(traces=1, user_waiting=2)
    room.come("a1", "a2", "a3")
    with pytest.raises(TooManyTraces) as caught:
        room.come("a4")
    assert caught.value.status_code == 429
    assert caught.value.headers == {"Retry-After": "5"}
    assert "max_user_waiting" in caught.value.message
    room.come("b1")
    await room.end("a2")
    room.come("a5")
    assert set(room.places()) == {"a3", "a5", "b1"}


async def test_trace_that_leaves_the_queue_leaves_no_hole() -> None:
    room = Room(traces=1)
    room.come("a1", "b1", "a2")
    await room.end("b1")
    assert room.traces["b1"].turn is not None and room.traces["b1"].turn.result() is False
    await room.end("a1")
    assert room.traces["a2"].state == "running"
    await room.end("a1", "a2", "a2")
    assert [finished.outcome for finished in room.finished] == ["ok"] * 3
    assert vars(room.admission)["_running"] == {}
    assert vars(room.admission)["_not_running"] == {}


async def test_trace_that_ended_before_it_was_queued_takes_no_place() -> None:
    room = Room(traces=1)
    trace = room.admission.begin(Caller("a", admin=False))
    room.admission.end(trace, "disconnected", {})
    assert await room.admission.queue(trace) is False
    assert (room.admission.running, room.admission.waiting) == (0, 0)


async def test_edits_on_their_way_count_as_waiting() -> None:
    room = Room(user_waiting=2)
    caller = Caller("a", admin=False)
    release = room.admission.reserve(caller)
    room.admission.begin(caller)
    with pytest.raises(TooManyTraces):
        room.admission.reserve(caller)
    release()
    release()
    room.admission.reserve(caller)()
    assert vars(room.admission)["_not_running"] == {"a": 1}


async def test_who_holds_a_full_share_is_in_nobodys_way() -> None:
    room = Room(traces=3, user_traces=1)
    room.come("a1", "a2", "b1", "b2", "c1", "c2")
    assert room.order == ["a1", "b1", "c1"]
    assert room.places() == {"a2": 1, "b2": 1, "c2": 1}


async def test_engine_that_goes_away_is_told_to_all_that_wait() -> None:
    room = Room(traces=1)
    room.come("a1", "a2", "b1")
    room.admission.refuse_waiting(EngineUnavailable("gone"))
    for name in ("a2", "b1"):
        turn = room.traces[name].turn
        assert turn is not None
        with pytest.raises(EngineUnavailable):
            turn.result()
        await room.end(name)
    await room.end("a1")
    assert (room.admission.running, room.admission.waiting) == (0, 0)


async def test_engine_time_is_shared_by_those_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    room = Room(traces=2)
    room.come("a1")
    now[0] += 2
    room.come("b1")
    now[0] += 4
    await room.end("a1")
    now[0] += 1
    await room.end("b1")
    now[0] += 50
    room.come("a2")
    now[0] += 3
    await room.end("a2")
    seconds = [(f.owner, f.run_seconds, f.engine_seconds) for f in room.finished]
    assert seconds == [("a", 6, 4), ("b", 5, 3), ("a", 3, 3)]


def test_frames_are_followed_however_they_are_cut() -> None:
    frames = [json_frame(b"S", {"a": 1}), b"R" + (3).to_bytes(4, "little") + b"ZSE", b"T\0\0\0\0"]
    end = json_frame(b"Z", {"outcome": "error", "prompt_tokens": 3, "generated_tokens": 1})
    whole = b"".join(frames) + end
    ends = {0, len(whole)} | {sum(map(len, frames[:n])) for n in (1, 2, 3)}
    for size in (1, 2, 3, 7, len(whole)):
        watch = FrameWatch()
        for start in range(0, len(whole), size):
            watch.feed(whole[start : start + size])
            assert watch.between_frames == (min(start + size, len(whole)) in ends)
            assert (watch.ended == "Z") == (start + size >= len(whole))
        assert watch.told() == {
            "Nnsight-Outcome": "error",
            "Nnsight-Prompt-Tokens": "3",
            "Nnsight-Generated-Tokens": "1",
        }
    for status, outcome in ((503, "lost"), (504, "timeout"), (400, "refused")):
        watch = FrameWatch()
        watch.feed(json_frame(b"E", {"status": status, "message": "no"}))
        assert watch.told() == {"Nnsight-Outcome": outcome}


def test_last_frame_that_tells_nothing_is_no_error() -> None:
    for payload in (b"1+", b"1", b"[]", b"\xff", b""):
        for kind in (b"E", b"Z"):
            watch = FrameWatch()
            watch.feed(kind + len(payload).to_bytes(4, "little") + payload)
            assert (watch.ended, watch.told()) == (kind.decode(), {})


def read_frames(data: bytes) -> list[tuple[str, Any]]:
    found = []
    while data:
        size = int.from_bytes(data[1:5], "little")
        found.append((chr(data[0]), json.loads(data[5 : 5 + size])))
        data = data[5 + size :]
    return found


class TestOverHTTP:
    """One place on the engine."""

    @pytest.fixture
    def serve_settings(self) -> dict[str, Any]:
        return {
            "max_traces": 1,
            "max_user_waiting": 3,
            "restart_backoff": 0.1,
            "stall_timeout": 3.0,
        }

    @pytest.fixture
    def jp_server_config(self, jp_server_config: dict[str, Any]) -> dict[str, Any]:
        jp_server_config["ServerApp"]["identity_provider_class"] = SeveralUsers
        return jp_server_config

    async def test_second_trace_waits_and_both_come_back(
        self, ready: NNsightServe, ask: Ask, record: Record
    ) -> None:
        first = asyncio.ensure_future(ask("/nnsight/generate", "POST", body=b'{"seconds": 0.6}'))
        await wait_for(lambda: ready.admission.running == 1)
        second = asyncio.ensure_future(ask("/nnsight/generate", "POST", body=b"second"))
        await wait_for(lambda: ready.admission.waiting == 1)
        status = json.loads((await ask("/nnsight/status")).body)
        assert [(t["state"], t["place"]) for t in status["traces"]] == [
            ("running", None),
            ("waiting", 1),
        ]
        assert len(record("headers")) == 1
        assert (await first).code == 200
        assert (await second).body == b"got 6 bytes"

    async def test_one_too_many_is_429(self, ready: NNsightServe, ask: Ask, tmp_path: Path) -> None:
        gate = tmp_path / "gate"
        order = json.dumps({"until": str(gate)}).encode()
        others = []
        for count in range(4):
            others.append(
                asyncio.ensure_future(ask("/nnsight/generate", "POST", body=order, key="bob"))
            )
            await wait_for(lambda: ready.admission.running == 1)
            await wait_for(lambda count=count: ready.admission.waiting == count)
        refused = await ask("/nnsight/generate", "POST", body=b"x", key="bob")
        assert (refused.code, refused.headers.get("Retry-After")) == (429, "5"), refused.body
        assert "max_user_waiting" in said(refused)
        ann = asyncio.ensure_future(ask("/nnsight/generate", "POST", body=b"x", key="ann"))
        await wait_for(lambda: ready.admission.waiting == 4)
        places = {(t["owner"], t["place"]) for t in ready.admission.visible_to(ROOT)}
        assert places == {("bob", None), ("bob", 1), ("ann", 2), ("bob", 3), ("bob", 4)}
        gate.touch()
        assert (await ann).body == b"got 1 bytes"
        assert [answer.code for answer in await asyncio.gather(*others)] == [200] * 4

    async def test_framed_answer_tells_the_place_and_its_changes(
        self,
        ready: NNsightServe,
        ask: Ask,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(handlers, "QUIET_SECONDS", 0.01)
        monkeypatch.setattr(handlers.framed, "HEARTBEAT_SECONDS", 0.05)
        first = asyncio.ensure_future(ask("/nnsight/generate", "POST", body=b'{"seconds": 0.5}'))
        await wait_for(lambda: ready.admission.running == 1)
        answer = await ask(
            "/nnsight/generate", "POST", body=b'{"framed": 1}', headers={"Accept": CONTENT_TYPE}
        )
        await first
        assert answer.headers["Content-Type"] == CONTENT_TYPE
        frames = read_frames(answer.body)
        queued = [frame for frame in frames if frame == ("S", {"state": "queued", "place": 1})]
        assert 3 <= len(queued) <= 11
        assert frames[len(queued) :] == [
            ("S", {"state": "running", "tokens": 1}),
            ("Z", {"outcome": "ok", "prompt_tokens": 5, "generated_tokens": 2}),
        ]

    async def test_refusal_after_the_wait_is_a_frame(
        self,
        ready: NNsightServe,
        ask: Ask,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(handlers, "QUIET_SECONDS", 0.01)
        first = asyncio.ensure_future(ask("/nnsight/generate", "POST", body=b'{"seconds": 0.3}'))
        await wait_for(lambda: ready.admission.running == 1)
        answer = await ask(
            "/nnsight/generate", "POST", body=b'{"refuse": 400}', headers={"Accept": CONTENT_TYPE}
        )
        await first
        assert answer.code == 200
        kind, error = read_frames(answer.body)[-1]
        assert (kind, error["status"]) == ("E", 400)
        assert error["detail"] == error["message"] == "the fake engine refuses this trace"

    async def test_engines_death_is_told_to_who_waits_in_either_form(
        self,
        ready: NNsightServe,
        ask: Ask,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(handlers, "QUIET_SECONDS", 0.01)
        first = asyncio.ensure_future(
            ask("/nnsight/generate", "POST", body=b'{"seconds": 0.4, "die": -9}')
        )
        await wait_for(lambda: ready.admission.running == 1)
        plain = asyncio.ensure_future(ask("/nnsight/generate", "POST", body=b"x"))
        framed = asyncio.ensure_future(
            ask("/nnsight/generate", "POST", body=b"x", headers={"Accept": CONTENT_TYPE})
        )
        async with asyncio.timeout(5):
            await first
            assert (await plain).code == 503
            assert "was killed by SIGKILL" in said(await plain)
            kind, error = read_frames((await framed).body)[-1]
        assert (kind, error["status"]) == ("E", 503)
        assert "The engine died" in error["message"] and "restarting" in error["message"]
        await wait_for(lambda: not ready.admission.ids())
        await wait_state(ready, "ready")
        assert (await ask("/nnsight/generate", "POST", body=b"x")).code == 200

    async def test_caller_who_leaves_the_queue_never_reaches_the_engine(
        self, ready: NNsightServe, ask: Ask, raw: RawClient, jp_base_url: str, record: Record
    ) -> None:
        first = asyncio.ensure_future(ask("/nnsight/generate", "POST", body=b'{"seconds": 0.5}'))
        await wait_for(lambda: ready.admission.running == 1)
        async with raw:
            raw.head(
                "POST", jp_base_url + "nnsight/generate", ndif_api_key="nobody", Content_Length=4
            )
            raw.writer.write(b"body")
            await wait_for(lambda: ready.admission.waiting == 1)
        await wait_for(lambda: ready.admission.waiting == 0)
        await first
        await asyncio.sleep(0.1)
        assert len(record("headers")) == 1

    async def test_sender_that_stops_is_told_and_let_go_of(
        self, ready: NNsightServe, raw: RawClient, jp_base_url: str
    ) -> None:
        async with raw:
            raw.head(
                "POST", jp_base_url + "nnsight/generate", ndif_api_key="nobody", Content_Length=4
            )
            raw.writer.write(b"bo")
            status, _, body = await raw.answer(8)
        assert status == 408
        assert b"stall_timeout" in body
        assert ready.admission.ids() == []

    async def test_reader_that_stops_is_let_go_of(
        self, ready: NNsightServe, ask: Ask, raw: RawClient, jp_base_url: str
    ) -> None:
        order = b'{"mib": 60}'
        async with raw:
            raw.head(
                "POST",
                jp_base_url + "nnsight/generate",
                ndif_api_key="nobody",
                Content_Length=len(order),
            )
            raw.writer.write(order)
            await wait_for(lambda: ready.admission.running == 1)
            other = await ask("/nnsight/generate", "POST", body=b"x", key="ann")
            assert other.body == b"got 1 bytes"

    async def test_slow_sender_holds_no_place(
        self, ready: NNsightServe, ask: Ask, raw: RawClient, jp_base_url: str
    ) -> None:
        async with raw:
            raw.head(
                "POST", jp_base_url + "nnsight/generate", ndif_api_key="nobody", Content_Length=4
            )
            raw.writer.write(b"bo")
            await wait_for(lambda: ready.admission.waiting == 1)
            other = await ask("/nnsight/generate", "POST", body=b"x")
            assert other.body == b"got 1 bytes"
            raw.writer.write(b"dy")
            assert (await raw.answer())[0] == 200
