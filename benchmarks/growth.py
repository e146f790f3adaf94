"""How cost grows with the work, on this project's server with its own client's bodies.

Each table changes one thing: bytes saved, layers of the model, clients at once, edits installed.
A trace's cost is its latency at one client, and the CPU of all processes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import shapes, systems
from .lines import Worker
from .systems import System

SIZES = [2**10, 2**14, 2**17, 2**20, 2**23, 2**26, 2**28, 2**30]
LAYERS = [4, 16, 32, 80]
CLIENTS = [1, 4, 16, 64, 256]
EDITS = [0, 1, 5, 20, 50]

# Loads no measurement should be shorter than, in seconds.
ENOUGH = 2.0


class Growth:
    """One server and what is asked of it."""

    def __init__(self, system: System, folder: Path) -> None:
        log = folder / "log"
        data = {"JUPYTER_DATA_DIR": str(folder / "data")}
        self.system = system
        self.folder = folder / "bodies"
        self.client = Worker(
            "benchmarks.clients", "ours", system.url, system.token, log=log, environment=data
        )
        self.load = Worker("benchmarks.load", log=log)
        about = self.client.ask(do="bodies", folder=str(self.folder))
        self.headers = {**about["headers"], "ndif-api-key": system.token}

    def close(self) -> None:
        """End the clients."""
        self.client.close()
        self.load.close()

    def measure(self, work: str, clients: int = 1) -> dict[str, Any]:
        """What a trace takes and costs."""
        order = {
            "url": f"{self.system.url}/nnsight/generate",
            "headers": self.headers,
            "bodies": str(self.folder / work),
            "clients": clients,
        }
        warm: dict[str, Any] = {}
        for _ in range(2):
            warm = self.load.ask(**order, rounds=1)
            if "error" in warm:
                raise SystemExit(warm["error"])
        before = self.system.cpu_seconds()
        rounds = max(1, round(ENOUGH / warm["seconds"]))
        found = self.load.ask(**order, rounds=rounds)
        after = self.system.cpu_seconds()
        traces = found["traces"]
        return {
            "ms": 1000 * found["latency"],
            "rate": traces / found["seconds"],
            "bytes": found["bytes_out"] / traces,
            "cpu_ms": {part: 1000 * (after[part] - before[part]) / traces for part in before},
        }


@contextlib.contextmanager
def growing(shape: systems.Shape, **settings: Any) -> Iterator[Growth]:
    """A server to measure."""
    with (
        tempfile.TemporaryDirectory(prefix="nnsight-bench-") as folder,
        systems.served(shape, Path(folder) / "log", False, **settings) as system,
        contextlib.closing(Growth(system, Path(folder))) as growth,
    ):
        yield growth


def main(device: str, options: argparse.Namespace) -> None:
    """Print the tables and write them."""
    tables: dict[str, list[dict[str, Any]]] = {
        "bytes": [],
        "clients": [],
        "edits": [],
        "layers": [],
    }

    def add(name: str, at: int, found: dict[str, Any]) -> None:
        tables[name].append({"at": at, **found})
        cpu = " ".join(f"{part} {value:.2f}" for part, value in found["cpu_ms"].items())
        print(
            f"{name} {at}: {found['ms']:.1f} ms, {found['rate']:.1f}/s, cpu ms: {cpu}", flush=True
        )
        options.out.with_name("growth.json").write_text(json.dumps(tables, indent=1))

    shape = shapes.cuda() if device == "cuda" else shapes.cpu()
    with growing(shape) as growth:
        for size in SIZES:
            growth.client.ask(do="sized", folder=str(growth.folder), size=size)
            add("bytes", size, growth.measure(f"save {size}"))
        for clients in CLIENTS:
            add("clients", clients, growth.measure("logits", clients))
        for count in EDITS:
            growth.client.ask(do="edits", count=count)
            add("edits", count, growth.measure("logits"))
            growth.client.ask(do="clear")
    for layers in LAYERS:
        with growing(shapes.cpu(layers)) as growth:
            add("layers", layers, growth.measure("logits"))
