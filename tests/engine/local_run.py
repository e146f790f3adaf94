"""Runs the programs on an in-process synchronous engine and writes down what came home.

The worker class is the served engine's own, so that what differs between the two runs is how a
trace gets to it and back.

    python local_run.py MODEL OUTPUT [ENGINE_ARGS_AS_JSON [PROGRAM ...]]
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def build(model: str, arguments: dict[str, Any]) -> Any:
    """A synchronous engine on the CPU."""
    from jupyter_nnsight_serve.engine import compat

    compat.apply()
    from nnsight.modeling.vllm import VLLM

    VLLM._WORKER_CLS = "jupyter_nnsight_serve.engine.worker_cpu.ServeCPUWorker"
    return VLLM(model, dispatch=True, **arguments)


def main(model: str, output: str, arguments: str = "{}", *names: str) -> None:
    """Run the programs named, or all."""
    import torch
    from canonical import outcome
    from programs import PROGRAMS

    engine = build(model, json.loads(arguments))
    outcomes = {}
    for name in names or PROGRAMS:
        begun = time.monotonic()
        outcomes[name] = outcome(lambda run=PROGRAMS[name].run: run(engine, {}))
        print(f"{time.monotonic() - begun:6.2f} s  {name}", flush=True)
    torch.save(outcomes, output)


# vLLM starts its workers with spawn, which imports this module again.
if __name__ == "__main__":
    main(*sys.argv[1:])
