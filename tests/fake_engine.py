"""A process that speaks the engine's protocol and holds no model.

Tests choose it with `c.NNsightServe.engine_command`, and what it does with arguments behind it.
A trace's body is a JSON object that says what to do with it, or anything at all, which is counted:

    {"seconds": 1.5}     answer after that time
    {"mib": 200}         answer with that many MiB
    {"never": true}      never answer
    {"until": "/path"}   answer once there is such a file
    {"die": 3}           end the process with that exit code
    {"die": -9}          be killed by that signal
    {"refuse": 400}      answer with a JSON error of that status
    {"die_midway": true} announce 1 MiB, send half of it, and be killed
    {"raise": true}      answer as if the block had raised
    {"framed": true}     answer in frames

What it saw is written to the file `--record`, a JSON object a line.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from tornado import web
from tornado.httpserver import HTTPServer
from tornado.iostream import StreamClosedError
from tornado.netutil import bind_unix_socket

MIB = 2**20

# What this process was started with; the folder's own is the one that listing it opens.
FDS = [int(fd) for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]

# The largest body that is looked into for an order.
ORDER_BYTES = 4096


def parse() -> argparse.Namespace:
    """The arguments that choose what it does."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--load-seconds", type=float, default=0.0)
    parser.add_argument("--fail", help="fail with this reason after loading")
    parser.add_argument("--fail-when", help="fail with the text of this file when it is there")
    parser.add_argument("--exit", type=int, help="end with this code after loading")
    parser.add_argument("--say", action="append", default=[], help="print this line first")
    parser.add_argument("--long-line", type=int, default=0, help="print a line of this many bytes")
    parser.add_argument("--record", help="file that gets a JSON line for what happens")
    parser.add_argument("--ignore-sigterm", action="store_true", help="and the lifeline")
    parser.add_argument("--grandchild", action="store_true", help="start a process that stays")
    parser.add_argument("--unwell", action="store_true", help="answer /health with 503")
    parser.add_argument("--print-ready-lies", action="store_true")
    return parser.parse_args()


class Engine:
    """What the handlers share."""

    def __init__(self, arguments: argparse.Namespace, config: dict[str, Any]) -> None:
        self.arguments = arguments
        self.config = config
        self.running = 0
        self.edits: dict[str, str | None] = {}

    def record(self, **what: Any) -> None:
        """Write down what happened."""
        if self.arguments.record:
            with open(self.arguments.record, "a", encoding="utf-8") as file:
                file.write(json.dumps(what) + "\n")


class Handler(web.RequestHandler):
    """A resource."""

    def initialize(self, engine: Engine) -> None:
        self.engine = engine

    def fail(self, status: int, message: str) -> None:
        self.set_status(status)
        self.finish({"message": message, "reason": "no", "detail": message})


class Health(Handler):
    def get(self) -> None:
        if self.engine.arguments.unwell:
            self.fail(503, "the fake engine is unwell")
        else:
            self.finish({"status": "ok"})


class StatusResource(Handler):
    def get(self) -> None:
        config = self.engine.config
        self.finish(
            {
                "model": {"name": config["model"], "revision": config["revision"]},
                "versions": {"nnsight": "0.8.1", "vllm": "0.0", "torch": "0.0", "python": "3.11"},
                "device": "fake",
                "settings": {"max_model_len": 128, "taps": config["taps"]},
                "running": self.engine.running,
                "waiting": 0,
                "tracked_requests": self.engine.running,
            }
        )


@web.stream_request_body
class Generate(Handler):
    async def prepare(self) -> None:
        self.request.connection.set_max_body_size(sys.maxsize)
        self.size = 0
        self.start = b""
        self.gone = asyncio.Event()
        self.engine.running += 1
        self.engine.record(event="headers", id=self.request.headers.get("Nnsight-Trace-Id"))

    async def data_received(self, chunk: bytes) -> None:
        self.size += len(chunk)
        if len(self.start) < ORDER_BYTES:
            self.start += chunk

    def on_finish(self) -> None:
        self.engine.running -= 1

    def on_connection_close(self) -> None:
        super().on_connection_close()
        self.gone.set()
        self.engine.running -= 1
        self.engine.record(event="aborted", size=self.size)

    async def post(self) -> None:
        order: dict[str, Any] = {}
        if self.size < ORDER_BYTES:
            with contextlib.suppress(ValueError):
                found = json.loads(self.start)
                order = found if isinstance(found, dict) else {}
        self.engine.record(
            event="trace",
            size=self.size,
            compress=self.request.headers.get("nnsight-compress"),
            length=self.request.headers.get("Content-Length"),
            headers=sorted(self.request.headers),
            edits=self.request.headers.get("Nnsight-Edits", ""),
        )
        if "seconds" in order or "never" in order:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(order.get("seconds")):
                    await self.gone.wait()
            if self.gone.is_set():
                return
        while "until" in order and not os.path.exists(order["until"]):
            await asyncio.sleep(0.01)
        if "die" in order:
            die(order["die"])
        if "refuse" in order:
            self.fail(order["refuse"], "the fake engine refuses this trace")
            return
        if "framed" in order:
            self.set_header("Content-Type", "application/vnd.nnsight-serve.frames")
            self.write(frame("S", state="running", tokens=1))
            await self.flush()
            self.finish(frame("Z", outcome="ok", prompt_tokens=5, generated_tokens=2))
            return
        self.set_header("Content-Type", "application/octet-stream")
        self.set_header("Nnsight-Outcome", "error" if order.get("raise") else "ok")
        self.set_header("Nnsight-Prompt-Tokens", "7")
        self.set_header("Nnsight-Generated-Tokens", "1")
        if "mib" in order:
            await self.send(order["mib"])
        elif "die_midway" in order:
            self.set_header("Content-Length", str(MIB))
            self.write(b"x" * (MIB // 2))
            await self.flush()
            await asyncio.sleep(0.2)
            die(-9)
        else:
            self.finish(f"got {self.size} bytes".encode())

    async def send(self, mib: int) -> None:
        self.set_header("Content-Length", str(mib * MIB))
        piece = b"x" * MIB
        try:
            for _ in range(mib):
                self.write(piece)
                await self.flush()
        except StreamClosedError:
            return
        self.finish()


class EditResource(Handler):
    def put(self, edit_id: str) -> None:
        if self.request.body == b"broken":
            self.fail(400, "the block does not load")
            return
        name = self.get_query_argument("name", None)
        known_as = self.get_query_argument("id")
        self.engine.edits[edit_id] = name
        self.engine.record(
            event="edit",
            key=edit_id,
            id=known_as,
            name=name,
            size=len(self.request.body),
            compress=self.request.headers.get("nnsight-compress"),
        )
        self.finish({"status": "ok", "id": known_as, "name": name, "warnings": []})

    def delete(self, edit_id: str) -> None:
        self.engine.record(event="clear", key=edit_id, known=edit_id in self.engine.edits)
        self.engine.edits.pop(edit_id, None)
        self.finish({"status": "ok", "id": edit_id})


class EditsResource(Handler):
    def get(self) -> None:
        told = {key: {"runs": 3, "source": "a source"} for key in self.engine.edits}
        self.finish({"edits": told})


def frame(kind: str, **fields: Any) -> bytes:
    payload = json.dumps(fields).encode()
    return kind.encode() + len(payload).to_bytes(4, "little") + payload


def die(code: int) -> None:
    """End the process, by a signal when `code` is negative."""
    if code < 0:
        os.kill(os.getpid(), -code)
        time.sleep(10)
    os._exit(code)


def say(text: str) -> None:
    print(text, flush=True)


def event(**what: Any) -> None:
    say("@engine " + json.dumps(what))


def end_with_lifeline(socket: str) -> None:
    """Read stdin to its end, then end the process group and what the engine left on disk."""
    while os.read(0, 4096):
        pass
    shutil.rmtree(os.path.dirname(socket), ignore_errors=True)
    os.killpg(os.getpgid(0), signal.SIGKILL)


def read_config() -> dict[str, Any]:
    """The first line of stdin, read without a buffer that would swallow more."""
    line = bytearray()
    while not line.endswith(b"\n"):
        piece = os.read(0, 1)
        if not piece:
            sys.exit(0)
        line += piece
    config: dict[str, Any] = json.loads(bytes(line))
    return config


async def main() -> None:
    arguments = parse()
    config = read_config()
    engine = Engine(arguments, config)
    if arguments.ignore_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        threading.Thread(target=end_with_lifeline, args=(config["socket"],), daemon=True).start()
    if arguments.grandchild:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
        engine.record(event="grandchild", pid=child.pid)
    umask = os.umask(0o077)
    engine.record(
        event="started",
        pid=os.getpid(),
        group=os.getpgrp(),
        cwd=os.getcwd(),
        umask=umask,
        fds=FDS,
        environment=sorted(os.environ),
        config=config,
    )
    for line in arguments.say:
        say(line)
    if arguments.long_line:
        say("y" * arguments.long_line)
    for stage in ("reading config", "loading weights"):
        event(event="stage", stage=stage)
        await asyncio.sleep(arguments.load_seconds / 2)
    fail = arguments.fail
    if arguments.fail_when and os.path.exists(arguments.fail_when):
        with open(arguments.fail_when, encoding="utf-8") as file:
            fail = file.read()
    if fail:
        event(event="failed", reason=fail)
        await asyncio.sleep(60)
    if arguments.exit is not None:
        sys.exit(arguments.exit)
    shared = {"engine": engine}
    server = HTTPServer(
        web.Application(
            [
                (r"/health", Health, shared),
                (r"/status", StatusResource, shared),
                (r"/generate", Generate, shared),
                (r"/edits/([^/]+)", EditResource, shared),
                (r"/edits", EditsResource, shared),
            ]
        )
    )
    server.add_socket(bind_unix_socket(config["socket"], 0o600))
    event(event="ready")
    if arguments.print_ready_lies:
        event(event="failed", reason="a lie")
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
