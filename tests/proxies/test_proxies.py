"""Traces through proxies: configurable-http-proxy, and one that cuts what it takes for idle.

The long traces run at the same time, each at its own pace: what takes their seconds is the sleep of
every block at every token, one after the other on the engine's one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import BASE, IDLE_SECONDS, cutting_after

from jupyter_nnsight_serve import connect
from jupyter_nnsight_serve.client import Hub, HubError, TraceCut

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

STEPS = 70
NAP_SECONDS = 0.3
LONG: dict[str, Any] = {"max_tokens": STEPS, "ignore_eos": True, "temperature": 0.0}


def long_trace(model: Any, where: dict[str, str], marks: Path) -> Any:
    """A trace that writes a line at every token, and the ids of what it generated."""
    file, nap = str(marks), NAP_SECONDS
    with model.trace("Hello world!", **LONG, **where) as tracer:
        for step in tracer.iter[:STEPS]:
            model.samples  # noqa: B018
            with open(file, "a") as stream:
                stream.write(f"{step}\n")
            time.sleep(nap)
        result = tracer.result.save()
    return list(result.outputs[0].token_ids)


def steps(marks: Path) -> list[str]:
    return marks.read_text().split()


def outcome(run: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    """What a call returned or raised, and how many seconds it took."""
    began = time.monotonic()
    try:
        found = run(*arguments)
    except Exception as error:
        found = error
    return found, time.monotonic() - began


def idle(hub: Hub, seconds: float = 10.0) -> bool:
    """Whether the engine is without a request within ``seconds``."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        status = hub.status()
        if not status["running"] and not status["requests"]["tracked"]:
            return True
        time.sleep(0.2)
    return False


@pytest.fixture(scope="module")
def long(
    server: Any,
    stock: Any,
    cutting: str,
    hub_proxy: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    """Every long trace's outcome, seconds and marks, by client and proxy."""
    folder = tmp_path_factory.mktemp("marks")
    urls = {"cutting": cutting, "hub": hub_proxy + BASE}
    runs: dict[str, Any] = {}
    with ThreadPoolExecutor(4) as pool:
        for proxy, url in urls.items():
            own = connect(url, server.token).model
            where = {"serve": url, "api_key": server.token}
            for client, arguments in (("own", (own, {})), ("stock", (stock, where))):
                marks = folder / f"{client}-{proxy}"
                runs[f"{client} {proxy}"] = (
                    pool.submit(outcome, long_trace, *arguments, marks),
                    marks,
                )
    return {name: (*future.result(), marks) for name, (future, marks) in runs.items()}


@pytest.mark.parametrize("proxy", ["hub", "cutting"])
def test_a_trace_that_outlasts_the_proxys_patience_survives(
    proxy: str, long: dict[str, Any]
) -> None:
    tokens, seconds, marks = long[f"own {proxy}"]
    assert isinstance(tokens, list), tokens
    assert seconds > 2 * IDLE_SECONDS and len(tokens) == STEPS
    assert steps(marks) == [str(step) for step in range(STEPS)]


@pytest.mark.parametrize("proxy", ["hub", "cutting"])
def test_the_stock_client_is_cut_and_its_trace_is_stopped_and_not_run_again(
    proxy: str, long: dict[str, Any], server: Any
) -> None:
    error, seconds, marks = long[f"stock {proxy}"]
    assert isinstance(error, Exception), error
    assert IDLE_SECONDS - 1 < seconds < 2 * IDLE_SECONDS, (seconds, error)
    assert "502" in str(error) or "504" in str(error) or "disconnected" in str(error), error
    done = steps(marks)
    assert done == [str(step) for step in range(len(done))] and len(done) < STEPS


def test_a_cut_names_the_proxy_and_the_engines_work_ends(server: Any, tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    direct = connect(server.url, server.token)
    with cutting_after(server, 2) as url:
        error, seconds = outcome(long_trace, connect(url, server.token).model, {}, marks)
        assert isinstance(error, TraceCut) and seconds < 6, (error, seconds)
        assert "A proxy between that cuts idle" in str(error) and "may have run" in str(error)
        assert idle(direct)
        done = steps(marks)
        time.sleep(3 * NAP_SECONDS)
        assert steps(marks) == done == [str(step) for step in range(len(done))]
        assert 0 < len(done) < STEPS


def test_a_name_with_an_at_sign_below_a_prefix(hub_proxy: str, server: Any) -> None:
    for page in ("", "/", "/lab/tree/a.ipynb?token=x"):
        hub = connect(hub_proxy + BASE + page, server.token)
        model = hub.model
        assert hub.url == hub_proxy + BASE
        with hub.edit(name="an edit/of anna's") as (_, edit):
            model.model.layers[3].output[0][:] = 0
        assert [found.name for found in hub.edits()] == ["an edit/of anna's"]
        with model.trace("Hello", max_tokens=1, edits=["an edit/of anna's"]):
            hidden = model.model.layers[3].output[0].save()
        edit.clear()
        assert not hidden.any() and not hub.edits()


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("/jhub/user/gone", "is not running"),
        ("/jhub/user/nobody", "no Jupyter server at"),
        ("/jhub/hub/home", "is JupyterHub's own page"),
        ("", "no Jupyter server at"),
    ],
)
def test_a_wrong_address_behind_the_proxy_is_told_as_one(
    path: str, sentence: str, hub_proxy: str, server: Any
) -> None:
    with pytest.raises(HubError, match=sentence):
        connect(hub_proxy + path, server.token)


def test_a_token_that_is_none_is_told_through_the_proxy(hub_proxy: str) -> None:
    with pytest.raises(HubError, match="does not accept this token"):
        connect(hub_proxy + BASE, "expired")
