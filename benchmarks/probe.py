"""Asks a server for /api/status again and again, in a process of its own.

    python -m benchmarks.probe URL TOKEN

"start" begins; "stop" ends and answers with the latencies' p99 and worst, in seconds.
"""

from __future__ import annotations

import http.client
import math
import sys
import threading
import time
from urllib.parse import urlsplit

from .lines import Answers, Order

PAUSE_SECONDS = 0.02


class Probe:
    """Asks on a thread, on one connection from each start on."""

    def __init__(self, url: str, token: str) -> None:
        address = urlsplit(url)
        self.path = address.path
        self.headers = {"Authorization": f"token {token}"}
        self.host, self.port = address.hostname or "", address.port
        self.taken: list[float] = []
        self.stop = threading.Event()

    def run(self) -> None:
        """Ask until told to stop."""
        connection = http.client.HTTPConnection(self.host, self.port)
        while not (self.stop.is_set() and self.taken):
            begun = time.perf_counter()
            connection.request("GET", self.path, headers=self.headers)
            answer = connection.getresponse()
            answer.read()
            assert answer.status == 200, answer.status
            self.taken.append(time.perf_counter() - begun)
            time.sleep(PAUSE_SECONDS)
        connection.close()

    def __call__(self, order: Order) -> Order:
        if order["do"] == "start":
            self.taken, self.stop = [], threading.Event()
            self.thread = threading.Thread(target=self.run)
            self.thread.start()
            return {}
        self.stop.set()
        self.thread.join()
        ranked = sorted(self.taken)
        # Of fewer than a hundred the worst.
        p99 = ranked[math.ceil(0.99 * len(ranked)) - 1]
        return {"asked": len(ranked), "p99": p99, "worst": ranked[-1]}


if __name__ == "__main__":
    Answers().serve(Probe(*sys.argv[1:]))
