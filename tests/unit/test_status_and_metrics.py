"""What status, health and metrics tell."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
from jupyter_server.serverapp import ServerApp
from prometheus_client import REGISTRY

from jupyter_nnsight_serve import __version__
from jupyter_nnsight_serve.admission import Admission
from jupyter_nnsight_serve.extension import NNsightServe
from jupyter_nnsight_serve.identity import Caller
from jupyter_nnsight_serve.settings import EngineSettings
from jupyter_nnsight_serve.status import status_model
from jupyter_nnsight_serve.supervisor import Status

from .conftest import Ask, said, wait_for, wait_state


async def test_status_of_a_ready_engine(
    ready: NNsightServe, ask: Ask, record: Callable[[str], list[dict[str, Any]]]
) -> None:
    waiting = asyncio.ensure_future(ask("/v1/nnsight/generate", "POST", body=b'{"seconds": 1.0}'))
    await wait_for(lambda: record("trace"))
    status = json.loads((await ask("/nnsight/status")).body)
    since = status.pop("since")
    assert since == ready.supervisor.status.since
    (trace,) = status.pop("traces")
    assert status == {
        "model": {"name": "fake/model", "revision": None},
        "versions": {
            "package": __version__,
            "nnsight": "0.8.1",
            "vllm": "0.0",
            "torch": "0.0",
            "python": "3.11",
        },
        "device": "fake",
        "settings": {"max_model_len": 128, "taps": []},
        "state": "ready",
        "reason": None,
        "stage": None,
        "running": 1,
        "waiting": 0,
        "requests": {"running": 1, "waiting": 0, "tracked": 1},
        "caller": {"name": "owner", "may": ["admin", "edit", "read", "trace"]},
        "limits": {
            "max_request_bytes": 2**30,
            "max_response_bytes": 4 * 2**30,
            "trace_timeout": 600.0,
            "max_traces": 256,
            "max_user_traces": 64,
            "max_user_waiting": 256,
            "max_trace_tokens": 0,
            "max_edits": 32,
            "edit_lifetime": 604800.0,
        },
    }
    assert trace["id"] == ready.admission.ids()[0]
    assert (trace["owner"], trace["state"], trace["bytes_in"]) == ("owner", "running", 16)
    assert trace["started"] >= since
    response = await waiting
    assert response.headers["Nnsight-Trace-Id"] == trace["id"]
    status = json.loads((await ask("/nnsight/status")).body)
    assert (status["running"], status["traces"]) == (0, [])


class TestWhileLoading:
    """An engine that takes its time."""

    @pytest.fixture
    def engine_arguments(self) -> list[str]:
        return ["--load-seconds", "2"]

    async def test_everything_says_how_far_it_is(self, started: NNsightServe, ask: Ask) -> None:
        assert (await ask("/api/status")).code == 200
        await wait_for(lambda: started.supervisor.status.stage == "reading config")
        for method, path in (
            ("POST", "/v1/nnsight/generate"),
            ("POST", "/v1/nnsight/register/x"),
        ):
            response = await ask(path, method, body=b"x")
            assert response.code == 503, path
            assert response.headers["Retry-After"] == "10"
            assert re.fullmatch(
                r"The engine is still loading fake/model \(reading config, \d s so far\); "
                r"try again in 10 s\.",
                said(response),
            )
        health = await ask("/health", key=None)
        assert (health.code, health.headers["Retry-After"]) == (503, "10")
        assert "the engine is starting" in said(health)
        status = json.loads((await ask("/nnsight/status")).body)
        assert (status["state"], status["stage"]) == ("starting", "reading config")
        assert status["model"] == {"name": "fake/model", "revision": None}
        assert status["since"] > 1e9
        await wait_for(lambda: started.supervisor.status.stage == "loading weights")
        await wait_state(started, "ready")
        assert (await ask("/health", key=None)).code == 200


class TestFailed:
    """An engine that failed."""

    @pytest.fixture
    def engine_arguments(self) -> list[str]:
        return ["--fail", "no memory for /models/secret/x at all"]

    async def test_everything_says_why(self, started: NNsightServe, ask: Ask) -> None:
        await wait_state(started, "failed")
        response = await ask("/v1/nnsight/generate", "POST", body=b"x")
        assert response.code == 503
        assert "Retry-After" not in response.headers
        assert "The engine has failed: no memory for x at all." in said(response)
        assert "admin must look at it" in said(response)
        health = await ask("/nnsight/health", key=None)
        assert health.code == 503
        assert "memory" not in said(health)
        status = json.loads((await ask("/nnsight/status")).body)
        assert status["state"] == "failed"
        assert status["reason"] == "no memory for /models/secret/x at all"


class TestStopped:
    """`autostart` off."""

    @pytest.fixture
    def serve_settings(self) -> dict[str, Any]:
        return {"autostart": False, "revision": "r1", "taps": ["a.b"]}

    async def test_engine_is_not_started(self, started: NNsightServe, ask: Ask) -> None:
        assert started.supervisor.pid is None
        response = await ask("/v1/nnsight/generate", "POST", body=b"x")
        assert response.code == 503
        assert "The engine is stopped" in said(response)
        status = json.loads((await ask("/nnsight/status")).body)
        assert status["state"] == "stopped"
        assert status["model"] == {"name": "fake/model", "revision": "r1"}
        assert status["settings"] == {"taps": ["a.b"]}


class TestUnwell:
    """An engine that is up and says that no trace would run."""

    @pytest.fixture
    def engine_arguments(self) -> list[str]:
        return ["--unwell"]

    async def test_health_is_honest(self, ready: NNsightServe, ask: Ask) -> None:
        response = await ask("/health", key=None)
        assert response.code == 503
        assert "the engine is not answering" in said(response)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"model": ""}, "c.NNsightServe.model is not set"),
        ({"engine_args": 3}, "c.NNsightServe.engine_args: expected a dict"),
        ({"trace_timeot": 3}, "did you mean c.NNsightServe.trace_timeout?"),
        ({"taps": ["x"], "device": "cpu"}, "contradict each other"),
    ],
)
class TestWrongSetting:
    """A wrong setting, in a server that is there for other things too."""

    @pytest.fixture
    def serve_settings(self, settings: dict[str, Any]) -> dict[str, Any]:
        return settings

    async def test_server_runs_on_and_every_endpoint_says_it(
        self, started: NNsightServe, ask: Ask, sentence: str
    ) -> None:
        assert (await ask("/api/status")).code == 200
        for path in ("/v1/nnsight/generate", "/v1/nnsight/register/x"):
            response = await ask(path, "POST", body=b"x")
            assert response.code == 503
            assert sentence in said(response)
        assert (await ask("/health", key=None)).code == 503
        status = json.loads((await ask("/nnsight/status")).body)
        assert status["state"] == "failed"
        assert sentence in status["reason"]
        assert started.supervisor.pid is None


def test_reason_without_paths_for_who_is_no_admin() -> None:

    status = Status("failed", 1.0, reason="no file /models/x/config.json")
    admission = Admission(logging.getLogger())
    settings = EngineSettings(model="m", engine_command=["x"])
    told = [
        status_model(settings, status, admission, Caller("ann", admin), {})["reason"]
        for admin in (True, False)
    ]
    assert told == ["no file /models/x/config.json", "no file config.json"]


def test_status_tells_only_the_callers_traces() -> None:
    admission = Admission(logging.getLogger())
    mine = admission.begin(Caller("ann", admin=False))
    admission.begin(Caller("bob", admin=False))
    assert [t["id"] for t in admission.visible_to(Caller("ann", admin=False))] == [mine.id]
    assert (admission.waiting, admission.running) == (2, 0)


def test_versions_are_known_before_the_engine_is() -> None:
    model = status_model(
        EngineSettings(model="m"),
        Status("starting", 1.0),
        Admission(logging.getLogger()),
        Caller("ann", admin=False),
        {},
    )
    assert model["versions"]["package"] == __version__
    assert re.match(r"0\.8\.", model["versions"]["nnsight"])
    assert model["versions"]["python"].startswith("3.")


def sample(name: str, **labels: str) -> float:
    """A metric's value now."""
    return REGISTRY.get_sample_value(name, labels) or 0.0


async def test_metrics_count_traces_bytes_and_seconds(ready: NNsightServe, ask: Ask) -> None:
    def all_of() -> dict[str, float]:
        return {
            **{
                outcome: sample("nnsight_serve_traces_total", outcome=outcome)
                for outcome in ("ok", "error", "refused")
            },
            "in": sample("nnsight_serve_request_bytes_total"),
            "out": sample("nnsight_serve_response_bytes_total"),
            "queued": sample("nnsight_serve_trace_queued_seconds_count"),
            "ran": sample("nnsight_serve_trace_run_seconds_count"),
            "seconds": sample("nnsight_serve_trace_run_seconds_sum"),
        }

    before = all_of()
    await ask("/v1/nnsight/generate", "POST", body=b"12345")
    await ask("/v1/nnsight/generate", "POST", body=b'{"raise": true, "seconds": 0.2}')
    await ask("/v1/nnsight/generate", "POST", body=b'{"refuse": 400}')
    grown = {name: value - before[name] for name, value in all_of().items()}
    assert 0.2 <= grown.pop("seconds") < 1
    assert grown.pop("out") > 20
    assert grown == {"ok": 1, "error": 1, "refused": 1, "in": 5 + 31 + 15, "queued": 3, "ran": 3}


async def test_metrics_are_on_jupyters_own_page_without_names(
    ready: NNsightServe, ask: Ask
) -> None:
    await ask("/v1/nnsight/register/x?name=an-edit", "POST", body=b"x")
    await ask("/v1/nnsight/generate", "POST", body=b"x")
    page = (await ask("/metrics")).body.decode()
    ours = "\n".join(line for line in page.splitlines() if "nnsight_serve" in line)
    assert 'nnsight_serve_engine_state{nnsight_serve_engine_state="ready"} 1.0' in ours
    assert 'nnsight_serve_engine_state{nnsight_serve_engine_state="failed"} 0.0' in ours
    assert 'nnsight_serve_traces_total{outcome="timeout"}' in ours
    for name in ("owner", "fake/model", "an-edit"):
        assert name not in ours


def test_two_apps_in_one_process(extension: NNsightServe, jp_configurable_serverapp: Any) -> None:
    ServerApp.clear_instance()
    second = jp_configurable_serverapp(http_port=0)
    other = second.extension_manager.extension_points["nnsight-serve"].app
    assert other is not extension
    for name in ("supervisor", "edits", "admission"):
        assert getattr(other, name) is not getattr(extension, name)


async def test_running_traces_are_activity(ready: NNsightServe, ask: Ask) -> None:
    assert ready.current_activity() is None
    waiting = asyncio.ensure_future(ask("/v1/nnsight/generate", "POST", body=b'{"seconds": 0.2}'))
    await wait_for(lambda: ready.admission.running)
    assert ready.current_activity() == ready.admission.ids()
    await waiting
    assert ready.current_activity() is None


def test_status_of_an_engine_that_cannot_be_asked_shows_no_secret() -> None:
    arguments = {"hf_token": "hf_secret", "max_model_len": 512, "download_dir": "/srv/secret"}
    settings = EngineSettings(model="m", engine_args=arguments)
    caller = Caller("ada", False, frozenset({"read"}))
    admission = Admission(logging.getLogger())
    told = status_model(settings, Status("stopped", 0.0), admission, caller, {})
    assert told["settings"] == {"max_model_len": 512, "taps": []}
