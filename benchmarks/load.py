"""The clients, in a process of their own: ``python -m benchmarks.load``.

An order names a server, a folder of bodies, how many clients there are and how many traces each
sends, one after another on a connection of its own. HTTP is written out here, because a client
library would take as long as the server.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from .lines import Answers, Order


class Refused(Exception):
    """The server did not run a trace."""


class Client:
    """One connection."""

    def __init__(self, url: str, headers: dict[str, str]) -> None:
        self.address = urlsplit(url)
        lines = [
            f"POST {self.address.path} HTTP/1.1",
            f"Host: {self.address.netloc}",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        self.head = "\r\n".join(lines).encode()

    async def __aenter__(self) -> Client:
        host, port = self.address.hostname, self.address.port
        self.reader, self.writer = await asyncio.open_connection(host, port, limit=2**20)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.writer.close()

    async def post(self, body: bytes) -> int:
        """Send a body and read its answer; the answer's bytes."""
        self.writer.write(self.head + b"\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        head = (await self.reader.readuntil(b"\r\n\r\n")).lower()
        if b"transfer-encoding: chunked" in head:
            received, end = 0, b""
            while size := int(await self.reader.readline(), 16):
                received += size
                end = await self._read(size)
                await self.reader.readexactly(2)
            await self.reader.readexactly(2)
            if end[:1] == b"E":
                raise Refused(end[5:500].decode())
        else:
            length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
            received, end = length, await self._read(length)
        if not head.startswith(b"http/1.1 200"):
            raise Refused(f"{head[:40]!r} {end[:500]!r}")
        return received

    async def _read(self, size: int) -> bytes:
        """Read so many bytes; the last piece of them."""
        piece = b""
        while size:
            piece = await self.reader.read(min(size, 2**20))
            if not piece:
                raise Refused("the connection ended in the middle of an answer")
            size -= len(piece)
        return piece


async def run(order: Order) -> Order:
    """Send ``order["rounds"]`` traces from each of ``order["clients"]`` clients."""
    folder = Path(order["bodies"])
    bodies = [file.read_bytes() for file in sorted(folder.iterdir(), key=lambda f: int(f.name))]
    taken: list[float] = []
    received = 0

    async def client(number: int) -> None:
        nonlocal received
        async with Client(order["url"], order["headers"]) as connection:
            for turn in range(order["rounds"]):
                body = bodies[(number + turn * order["clients"]) % len(bodies)]
                begun = time.perf_counter()
                received += await connection.post(body)
                taken.append(time.perf_counter() - begun)

    begun = time.perf_counter()
    await asyncio.gather(*map(client, range(order["clients"])))
    seconds = time.perf_counter() - begun
    return {
        "traces": len(taken),
        "seconds": seconds,
        "latency": statistics.median(taken),
        "bytes_out": received,
    }


def answer(order: Order) -> dict[str, Any]:
    """Carry out one order; what went wrong is part of the answer."""
    try:
        return asyncio.run(run(order))
    except (Refused, OSError, asyncio.IncompleteReadError) as error:
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    Answers().serve(answer)
