"""A reverse proxy that cuts connections on which no byte has moved for some time."""

from __future__ import annotations

import asyncio
import contextlib
import threading


class CuttingProxy:
    """Passes bytes on to a port of this machine, on a thread of its own.

    Parameters
    ----------
    target
        The port.
    idle
        Seconds without a byte in either direction after which both ends are closed.

    Attributes
    ----------
    port
        Where it listens.
    """

    def __init__(self, target: int, idle: float) -> None:
        self.target = target
        self.idle = idle
        self.port = 0
        self._loop = asyncio.new_event_loop()
        listening = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(listening,), daemon=True)
        self._thread.start()
        if not listening.wait(10):
            raise RuntimeError("the proxy did not start")

    def stop(self) -> None:
        """Close it and every connection."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _run(self, listening: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(
            asyncio.start_server(self._connection, "127.0.0.1", 0)
        )
        self.port = server.sockets[0].getsockname()[1]
        listening.set()
        self._loop.run_forever()
        server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0.05))
        self._loop.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            upstream, sink = await asyncio.open_connection("127.0.0.1", self.target)
            moved = [self._loop.time()]
            passing = [
                asyncio.ensure_future(self._pass(reader, sink, moved)),
                asyncio.ensure_future(self._pass(upstream, writer, moved)),
            ]
            try:
                while self._loop.time() - moved[0] < self.idle:
                    left = self.idle - (self._loop.time() - moved[0])
                    done, _ = await asyncio.wait(passing, timeout=max(left, 0.01))
                    if len(done) == 2 or passing[1] in done:
                        break
            finally:
                for task in passing:
                    task.cancel()
                sink.close()
        writer.close()

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, moved: list[float]
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(2**16):
                moved[0] = self._loop.time()
                writer.write(data)
                await writer.drain()
            writer.write_eof()
