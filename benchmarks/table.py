"""A run as a table: ``python -m benchmarks.table FILE`` prints one that was written before."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

# A column, and what its rate is divided by.
RATIOS = (
    ("stock", "alone"),
    ("served stock", "alone"),
    ("ours", "alone"),
    ("ours", "stock"),
    ("stock, tapped", "alone, graphs"),
    ("served stock, tapped", "alone, graphs"),
    ("ours, tapped", "alone, graphs"),
)


def text(run: dict[str, Any]) -> str:
    """The tables of a run, as Markdown."""
    rows = run["rows"]
    cells = {(row["work"], row["clients"], row["system"]): row for row in rows}
    systems = list(dict.fromkeys(row["system"] for row in rows))
    ratios = [pair for pair in RATIOS if set(pair) <= set(systems)]
    head = ["work", "clients", *systems, *(f"{a} / {b}" for a, b in ratios)]
    lines = [
        f"{json.dumps(run['machine'])}\n",
        "Traces a second, and their ratios.\n",
        *_head(head),
    ]
    for work, clients in dict.fromkeys((row["work"], row["clients"]) for row in rows):
        found = {system: cells.get((work, clients, system)) for system in systems}
        line = [work, str(clients)]
        line += [f"{row['rate']:.1f}" if row else "" for row in found.values()]
        for above, below in ratios:
            over, under = found[above], found[below]
            line.append(f"{over['rate'] / under['rate']:.2f}" if over and under else "")
        lines.append(_line(line))
    lines += ["", "What a trace costs: CPU in ms by process, and Jupyter's answer meanwhile.\n"]
    head = ["system", "work", "clients", "http", "engine", "worker", "GB/s"]
    lines += _head([*head, "median ms", "status p99 ms", "worst ms", "idle p99 ms"])
    for row in rows:
        if not row["cpu_ms"]:
            continue
        cpu = (f"{row['cpu_ms'][part]:.2f}" for part in ("http", "engine", "worker"))
        gigabytes = f"{row['bytes_a_trace'] * row['rate'] / 1e9:.3f}"
        times = (row["latency_s"], row["status_p99_s"], row["status_worst_s"], row["idle"]["p99"])
        milliseconds = (f"{1000 * seconds:.1f}" for seconds in times)
        line = [row["system"], row["work"], str(row["clients"]), *cpu, gigabytes, *milliseconds]
        lines.append(_line(line))
    lines += ["", "Bodies.\n", *_head(["client", "work", "bytes", "ms to write"])]
    for kind, about in run["bodies"].items():
        for work, size in about["bytes"].items():
            lines.append(_line([kind, work, f"{size:.0f}", f"{1000 * about['seconds'][work]:.2f}"]))
    return "\n".join(lines)


def _head(names: list[str]) -> list[str]:
    return [_line(names), _line(["---"] * len(names))]


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(text(json.loads(Path(sys.argv[1]).read_text())))
