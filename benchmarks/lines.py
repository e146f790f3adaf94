"""Processes that take orders and answer, one JSON object a line each way.

Whatever a measured process says besides goes to its standard error.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

Order = dict[str, Any]


class Answers:
    """Standard output for answers alone: what libraries print goes to standard error from now on."""

    def __init__(self) -> None:
        self._file = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def serve(self, do: Callable[[Order], Order]) -> None:
        """Answer each line of standard input, until its end."""
        self._write({"ready": True})
        for line in sys.stdin:
            self._write(do(json.loads(line)))

    def _write(self, answer: Order) -> None:
        print(json.dumps(answer), file=self._file, flush=True)


class Worker:
    """A process that answers orders.

    Parameters
    ----------
    module
        What it runs, as ``python -m``.
    arguments
        Its command line.
    log
        Where its standard error goes.
    """

    def __init__(
        self, module: str, *arguments: str, log: Path, environment: dict[str, str] | None = None
    ) -> None:
        self.log = log
        self.module = module
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                cwd=ROOT,
                env={**os.environ, **(environment or {})},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )
        self._read()

    def _read(self) -> Order:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            raise RuntimeError(f"{self.module} ended with {code}; see {self.log}")
        found: Order = json.loads(line)
        return found

    def send(self, **order: Any) -> None:
        """Give an order, and leave its answer for `receive`."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def receive(self) -> Order:
        """The answer to the last order."""
        return self._read()

    def ask(self, **order: Any) -> Order:
        """Give an order and wait for its answer."""
        self.send(**order)
        return self.receive()

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
