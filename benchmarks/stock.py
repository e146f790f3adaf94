"""nnsight's own server: ``python -m benchmarks.stock MODEL PORT ENGINE_ARGS_JSON [TAP ...]``.

``nnsight-serve`` has no way to give taps, and its worker refuses a CPU, so the server's
application is run here: the same code with an engine that was built with both.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def main(model: str, port: str, arguments: str, *taps: str) -> None:
    """Serve until SIGTERM."""
    import torch
    from nnsight.modeling.vllm import VLLM
    from nnsight.modeling.vllm.serve.server import app, set_model

    if not torch.cuda.is_available():
        torch.accelerator.empty_cache = lambda *args, **kwargs: None
        torch.accelerator.synchronize = lambda *args, **kwargs: None
        VLLM._WORKER_CLS = "benchmarks.stock_cpu.StockCPUWorker"
    settings: dict[str, Any] = json.loads(arguments)
    if taps:
        settings["taps"] = taps
    set_model(VLLM(model, mode="async", dispatch=True, **settings))

    import uvicorn

    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning")


if __name__ == "__main__":
    main(*sys.argv[1:])
