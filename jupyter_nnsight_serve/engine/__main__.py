"""Entry point of the engine process: ``python -m jupyter_nnsight_serve.engine``.

The first line of standard input is the configuration as JSON; the rest of it is the lifeline,
which ends this process when it ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import traceback
from typing import Any

from . import events, lifeline
from .confine import confine

HEALTH_SECONDS = 0.5
"""Seconds between two looks at whether vLLM's engine core is still alive."""


def read_config(fd: int) -> dict[str, Any]:
    """Read the configuration line from ``fd``, byte by byte so that nothing after it is taken."""
    line = bytearray()
    while (byte := os.read(fd, 1)) not in (b"", b"\n"):
        line += byte
    config: dict[str, Any] = json.loads(line)
    return config


def failure(error: BaseException) -> str:
    """One line that tells why the engine did not start."""
    text = " ".join(str(error).split())
    return text if type(error).__name__ == "ConfigError" else f"{type(error).__name__}: {text}"


async def serve(model: Any, config: dict[str, Any]) -> None:
    """Serve ``model`` until vLLM's engine core dies."""
    from .scan import Scan
    from .server import listen
    from .service import Engine

    engine = Engine(
        model,
        config["max_request_bytes"],
        config["max_response_bytes"],
        config["max_trace_tokens"],
        Scan(config["refused_globals"]),
    )
    server = listen(engine, config["socket"])
    events.emit("ready", **engine.description)
    try:
        while not engine.llm.errored:
            await asyncio.sleep(HEALTH_SECONDS)
        # Those who wait for an answer are told before the process goes.
        await asyncio.sleep(HEALTH_SECONDS)
    finally:
        server.stop()
    raise RuntimeError("vLLM's engine core died; see the log")


def main() -> None:
    """Load the configured model, serve it, and leave no process behind."""
    lifeline.lead_group()
    confine()
    config = read_config(0)
    lifeline.watch_starter(0, config["socket"])
    code = 0
    try:
        run(config)
    except SystemExit:
        pass
    except BaseException as error:
        if type(error).__name__ != "ConfigError":
            traceback.print_exc()
        events.emit("failed", reason=failure(error))
        code = 1
    lifeline.remove_socket(config["socket"])
    # vLLM and torch leave threads whose end an ordinary exit would wait for.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(config: dict[str, Any]) -> None:
    """Serve the model of ``config`` until this process is told to stop."""
    from .model import load

    model = load(config)
    try:
        asyncio.run(serve(model, config))
    finally:
        model.vllm_entrypoint.shutdown()


if __name__ == "__main__":
    main()
