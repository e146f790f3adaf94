"""An idle culler leaves a server alone while it runs a trace, and stops it afterwards."""

from __future__ import annotations

import json
import os
import sys
import threading
import time

import httpx
import psutil

from .hub import JOSE, Client, Hub, Process, wait_until

IDLE_SECONDS = 6
TRACE_SECONDS = 15


def engines(hub: Hub) -> list[int]:
    """The engines of users' own servers that run."""
    record = hub.folder / "own.jsonl"
    if not record.exists():
        return []
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    return [
        line["pid"]
        for line in lines
        if line["event"] == "started" and psutil.pid_exists(line["pid"])
    ]


def test_running_trace_is_activity_for_the_culler(hub: Hub) -> None:
    url = hub.start_server(JOSE, "traced")
    client = Client(url, hub.user_token(JOSE)["token"])
    client.wait_ready(hub.process.tail)
    assert len(engines(hub)) == 1
    answers: list[httpx.Response] = []
    order = {"seconds": TRACE_SECONDS}
    trace = threading.Thread(
        target=lambda: answers.append(client.ask("POST", "/v1/nnsight/generate", order))
    )
    begun = time.monotonic()
    trace.start()
    # The server tells the Hub of its activity every second.
    time.sleep(3)
    culler = Process(
        [
            *(sys.executable, "-m", "jupyterhub_idle_culler", f"--url={hub.api_url}"),
            *(f"--timeout={IDLE_SECONDS}", "--cull-every=1"),
        ],
        hub.folder / "culler.log",
        {**os.environ, "JUPYTERHUB_API_TOKEN": hub.token},
        hub.folder,
    )
    try:
        while time.monotonic() - begun < TRACE_SECONDS - 1:
            assert "traced" in hub.servers(JOSE), culler.tail()
            time.sleep(0.5)
        trace.join(30)
        assert [answer.status_code for answer in answers] == [200]
        wait_until(lambda: "traced" not in hub.servers(JOSE), 40, culler.tail)
    finally:
        culler.stop()
    assert "Culling server" in culler.log
    # An idle server's engine goes with it, and so does its memory.
    wait_until(lambda: not engines(hub), 20, hub.process.tail)
