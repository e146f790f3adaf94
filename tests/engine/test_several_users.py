"""Several users on one real engine: edits are their owner's, and nobody's queue is another's."""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest import Server, running, stock_client
from heard import Heard

USER_TRACES = 4
IN_FLIGHT = 64
ONE = {"temperature": 0.0, "max_tokens": 1}


@pytest.fixture(scope="module")
def shared(tiny_path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server on which every token is the name of its user."""
    settings = {"max_user_traces": USER_TRACES, "max_trace_tokens": 400}
    users = {"identity_provider_class": "several_users.SeveralUsers"}
    with running(tiny_path, tmp_path_factory.mktemp("shared"), settings, users) as server:
        yield server


@pytest.fixture(scope="module")
def client(tiny_path: str) -> Any:
    return stock_client(tiny_path)


def where(server: Server, user: str) -> dict[str, str]:
    return {"serve": server.url, "api_key": user}


def logits_of(client: Any, server: Server, user: str, **options: Any) -> torch.Tensor:
    with client.trace([5, 6, 7], **ONE, **options, **where(server, user)):
        logits = client.logits.save()
    return logits  # type: ignore[no-any-return]


def listed(server: Server, user: str) -> list[dict[str, Any]]:
    _, answer = server.get("/nnsight/register", Authorization=f"token {user}")
    edits: list[dict[str, Any]] = answer["edits"]
    return edits


@pytest.mark.timeout(600)  # Two engines load in it, one after the other.
def test_an_edit_changes_its_owners_traces_and_nobody_elses_also_after_a_restart(
    shared: Server, client: Any
) -> None:
    plain = logits_of(client, shared, "bob")
    with client.edit(**where(shared, "ann")) as (_, forgotten):
        client.model.layers[3].output[0][:] = 0
        nobody_sees_this_source = 1
    with client.edit(name="probe", **where(shared, "bob")) as (_, probe):
        client.model.layers[5].output[0][:] += 3

    changed = logits_of(client, shared, "ann")
    assert not torch.equal(changed, plain)
    assert torch.equal(logits_of(client, shared, "bob", edits=[]), plain)
    probed = logits_of(client, shared, "bob", edits=["probe"])
    assert not torch.equal(probed, plain)
    with pytest.raises(RuntimeError, match="no edit is installed under that name"):
        logits_of(client, shared, "ann", edits=["probe"])

    (of_ann,) = listed(shared, "ann")
    assert of_ann["owner"] == "ann" and of_ann["runs"] == 2
    assert "nobody_sees_this_source = 1" in of_ann["source"]
    (of_bob,) = listed(shared, "bob")
    assert "nobody_sees_this_source" not in of_bob["source"]
    assert {edit["owner"] for edit in listed(shared, "root")} == {"ann", "bob"}
    code, answer = shared.get(
        f"/nnsight/register/{of_ann['id']}", "DELETE", Authorization="token bob"
    )
    assert (code, answer["cleared"]) == (200, False)

    (engine,) = psutil.Process(shared.process.pid).children()
    os.kill(engine.pid, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while shared.status()["state"] == "ready":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with pytest.raises(ConnectionError, match="engine died.*SIGKILL.*restarting"):
        logits_of(client, shared, "bob")
    shared.wait_ready()
    assert torch.equal(logits_of(client, shared, "ann"), changed)
    assert torch.equal(logits_of(client, shared, "bob", edits=["probe"]), probed)
    assert torch.equal(logits_of(client, shared, "carl"), plain)

    forgotten.clear()
    probe.clear()
    assert torch.equal(logits_of(client, shared, "ann"), plain)
    assert torch.equal(logits_of(client, shared, "bob"), plain)


def test_too_many_tokens_are_refused_by_the_limits_name(shared: Server, client: Any) -> None:
    with pytest.raises(RuntimeError, match="max_trace_tokens allows 400"):
        with client.trace([5, 6, 7], max_tokens=201, n=2, **where(shared, "ann")) as tracer:
            result = tracer.result.save()


@pytest.fixture(scope="module")
def long_trace(shared: Server, client: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The body of a trace of 60 tokens."""
    heard = Heard(client, shared)
    heard.api_key = "hog"
    with client.trace([5, 6, 7], max_tokens=60, ignore_eos=True, backend=heard) as tracer:
        result = tracer.result.save()
    file = tmp_path_factory.mktemp("hog") / "body"
    file.write_bytes(heard.body)
    return file


@contextlib.contextmanager
def hog(server: Server, count: int, body: Path) -> Iterator[None]:
    """A user who keeps ``count`` long traces in flight."""
    script = Path(__file__).with_name("hog.py")
    command = [sys.executable, str(script), server.url, "hog", str(count), str(body)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        time.sleep(2)
        yield
        answered, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        assert int(answered) >= count
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def seconds_of_short_traces(client: Any, server: Server) -> float:
    seconds = []
    for _ in range(15):
        begun = time.monotonic()
        logits_of(client, server, "bob")
        seconds.append(time.monotonic() - begun)
    return statistics.median(seconds)


def test_a_users_long_queue_costs_another_user_nothing(
    shared: Server, client: Any, long_trace: Path
) -> None:
    logits_of(client, shared, "bob")
    with hog(shared, USER_TRACES, long_trace):
        beside_the_allowed = seconds_of_short_traces(client, shared)
    with hog(shared, IN_FLIGHT, long_trace):
        _, status = shared.get("/nnsight/status", Authorization="token root")
        beside_a_queue = seconds_of_short_traces(client, shared)
    states = [trace["state"] for trace in status["traces"] if trace["owner"] == "hog"]
    assert states.count("running") == USER_TRACES
    assert len(states) > IN_FLIGHT * 0.8
    print(f"{beside_the_allowed:.3f} s beside 4, {beside_a_queue:.3f} s beside 64")
    assert beside_a_queue <= 1.5 * beside_the_allowed
