"""Events on Jupyter's bus, and each user's totals."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from jupyter_server.serverapp import ServerApp
from several_users import SeveralUsers

from jupyter_nnsight_serve.extension import NNsightServe

from .conftest import Ask, said, wait_state

ID = "https://events.jupyter.org/jupyter_nnsight_serve/{}/v1"


@pytest.fixture
def jp_server_config(jp_server_config: dict[str, Any]) -> dict[str, Any]:
    jp_server_config["ServerApp"]["identity_provider_class"] = SeveralUsers
    return jp_server_config


@pytest.fixture
def serve_settings() -> dict[str, Any]:
    return {
        "engine_args": {"tensor_parallel_size": 2},
        "max_edits": 1,
        "restart_backoff": 0.1,
        "admins": ["user:root"],
    }


@pytest.fixture
def events(jp_serverapp: ServerApp, extension: NNsightServe) -> list[dict[str, Any]]:
    """The events of this extension, as a listener gets them."""
    heard: list[dict[str, Any]] = []

    async def listen(logger: Any, schema_id: str, data: dict[str, Any]) -> None:
        heard.append({"event": schema_id.split("/")[-2], **data})

    for name in ("trace_finished", "edit_changed", "engine_state_changed"):
        jp_serverapp.event_logger.add_listener(schema_id=ID.format(name), listener=listen)
    return heard


def of(events: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == name]


async def test_events_tell_who_did_what_and_validate(
    events: list[dict[str, Any]], ready: NNsightServe, ask: Ask
) -> None:
    ann = {"key": "ann"}
    await ask("/nnsight/generate", "POST", body=b"four", **ann)
    for edit_id in ("1", "2"):
        await ask(f"/nnsight/register/{edit_id}?name=n{edit_id}", "POST", body=b"b", **ann)
    await ask("/nnsight/register/2", "DELETE", **ann)
    died = await ask("/nnsight/generate", "POST", body=b'{"die": 3}', **ann)
    await wait_state(ready, "ready")
    await asyncio.sleep(0.1)

    first, lost = of(events, "trace_finished")
    assert (first["user"], first["outcome"]) == ("ann", "ok")
    assert (first["prompt_tokens"], first["generated_tokens"]) == (7, 1)
    assert (first["bytes_in"], first["bytes_out"]) == (4, 11)
    assert 0 < first["engine_seconds"] <= first["run_seconds"]
    assert (lost["outcome"], lost["id"]) == (
        "lost",
        died.headers.get("Nnsight-Trace-Id", lost["id"]),
    )

    told = [(e["action"], e["id"], e["name"], e["user"]) for e in of(events, "edit_changed")]
    assert told == [
        ("installed", "1", "n1", "ann"),
        ("installed", "2", "n2", "ann"),
        ("removed", "1", "n1", "ann"),
        ("cleared", "2", "n2", "ann"),
    ]
    assert "max_edits" in of(events, "edit_changed")[2]["reason"]

    states = [(e["before"], e["state"]) for e in of(events, "engine_state_changed")]
    assert states == [
        ("stopped", "starting"),
        ("starting", "ready"),
        ("ready", "starting"),
        ("starting", "ready"),
    ]
    assert "exit code 3" in of(events, "engine_state_changed")[2]["reason"]


async def test_handler_of_events_that_fails_loses_no_trace(
    jp_serverapp: ServerApp, ready: NNsightServe, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**event: Any) -> None:
        raise RuntimeError("no disk")

    monkeypatch.setattr(jp_serverapp.event_logger, "emit", fail)
    for _ in range(2):
        assert (await ask("/nnsight/generate", "POST", body=b"x", key="ann")).code == 200
    assert ready.admission.running == 0


async def test_usage_is_each_users_and_for_admins(ready: NNsightServe, ask: Ask) -> None:
    for user, body in (("ann", b'{"seconds": 0.2}'), ("ann", b'{"raise": true}'), ("bob", b"x")):
        await ask("/nnsight/generate", "POST", body=body, key=user)
    refused = await ask("/nnsight/usage", key="ann")
    assert refused.code == 403
    assert "admin" in said(refused)
    usage = json.loads((await ask("/nnsight/usage", key="root")).body)
    assert (usage["devices"], list(usage["users"])) == (2, ["ann", "bob"])
    ann = usage["users"]["ann"]
    assert ann["traces"] == {"ok": 1, "error": 1}
    assert 0.2 <= ann["engine_seconds"] < 5
    assert ann["gpu_seconds"] == pytest.approx(2 * ann["engine_seconds"])
    assert (ann["prompt_tokens"], ann["generated_tokens"]) == (14, 2)
    assert usage["users"]["bob"]["bytes_in"] == 1


async def test_admins_start_stop_and_restart_the_engine(ready: NNsightServe, ask: Ask) -> None:
    first = ready.supervisor.pid
    for order in ("start", "stop", "restart"):
        refused = await ask(f"/nnsight/engine/{order}", "POST", key="ann")
        assert refused.code == 403
    assert ready.supervisor.pid == first

    answer = await ask("/nnsight/engine/start", "POST", key="root")
    assert json.loads(answer.body) == {"state": "ready", "reason": None}
    answer = await ask("/nnsight/engine/stop", "POST", key="root")
    assert json.loads(answer.body) == {"state": "stopped", "reason": "it was stopped"}
    assert ready.supervisor.pid is None
    trace = await ask("/nnsight/generate", "POST", body=b"x", key="ann")
    assert trace.code == 503 and "is stopped" in said(trace)
    answer = await ask("/nnsight/engine/start", "POST", key="root")
    assert json.loads(answer.body)["state"] == "starting"
    await wait_state(ready, "ready")
    second = ready.supervisor.pid
    answer = await ask("/nnsight/engine/restart", "POST", key="root")
    assert json.loads(answer.body)["state"] == "starting"
    await wait_state(ready, "ready")
    assert len({first, second, ready.supervisor.pid}) == 3
    assert (await ask("/nnsight/generate", "POST", body=b"x", key="ann")).code == 200
    assert (await ask("/nnsight/engine/sleep", "POST", key="root")).code == 404
