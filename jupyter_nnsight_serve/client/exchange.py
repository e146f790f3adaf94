"""One trace's exchange with the server, on a thread of its own.

The thread blocks on the socket, so that whoever waits for it can be interrupted at once, on every
platform and whether or not there is an event loop. It reports to one callable, in order: the
frames' states and tokens, and one end. A trace is sent once, whatever happens.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from . import frames
from .errors import HubError, TraceCut
from .link import Link, sentence_of
from .wire import Outcome, ResultDecoder, WireError

CHUNK_BYTES = 2**20
_TELL_SECONDS = 0.1


@dataclass(frozen=True)
class Event:
    """Something the exchange reports.

    Attributes
    ----------
    kind
        ``state``, ``token`` or ``receiving``, then once ``done`` (with an `Outcome`) or ``failed``
        (with an exception).
    value
        What goes with it.
    """

    kind: str
    value: Any


class Exchange:
    """Sends a trace and receives what it comes to.

    Parameters
    ----------
    report
        Called on the exchange's thread with each `Event`.
    """

    def __init__(
        self,
        link: Link,
        headers: dict[str, str],
        body: memoryview,
        allow_pickle: bool,
        report: Callable[[Event], None],
    ) -> None:
        self._link = link
        self._headers = {
            **headers,
            "Accept": frames.MEDIA_TYPE,
            "Content-Type": "application/octet-stream",
            "Content-Length": str(len(body)),
            "nnsight-compress": "False",
        }
        self._body = body
        self._allow_pickle = allow_pickle
        self._report = report
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._closed = False
        self._answered = False
        self._told = 0.0
        self._thread = threading.Thread(target=self._run, name="nnsight-serve trace", daemon=True)

    def start(self) -> None:
        """Send the trace."""
        self._thread.start()

    def close(self) -> None:
        """End the exchange now; the server then stops the trace. Safe to call at any time."""
        with self._lock:
            self._closed = True
            if self._socket is not None:
                # A close would not wake a thread that reads from it.
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)

    def _connected(self, event: str, info: dict[str, Any]) -> None:
        """httpcore tells of its steps; the newest socket is the one to shut down."""
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            found = info["return_value"].get_extra_info("socket")
            with self._lock:
                self._socket = found
            if self._closed:
                self.close()

    def _chunks(self) -> Iterator[memoryview]:
        for start in range(0, len(self._body), CHUNK_BYTES):
            yield self._body[start : start + CHUNK_BYTES]

    def _run(self) -> None:
        try:
            event = Event("done", self._exchange())
        except HubError as error:
            event = Event("failed", error)
        except httpx.HTTPError as error:
            event = Event("failed", self._meaning(error))
        except (WireError, frames.FrameError, ValueError, KeyError, TypeError) as error:
            event = Event(
                "failed",
                HubError(
                    f"The server's answer is not one this client can read ({error}); install the "
                    "same version of jupyter-nnsight-serve here and there. The trace has run."
                ),
            )
        except BaseException as error:
            event = Event("failed", error)
        with self._lock:
            self._socket = None
        self._body = memoryview(b"")
        with contextlib.suppress(RuntimeError):
            # The event loop of whoever waited may be gone.
            self._report(event)

    def _meaning(self, error: httpx.HTTPError) -> HubError:
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return self._link.unreached(error)
        silent = isinstance(error, httpx.ReadTimeout)
        what = (
            f"nothing was heard from it for {self._link.timeout:g} s (connect's timeout)"
            if silent
            else "the connection ended before the result was complete"
        )
        return TraceCut(
            f"The answer to this trace was lost: {what}. A proxy between that cuts idle or long "
            "connections, or the server's end, is the likely cause. The trace may have run; it is "
            "not sent again by itself."
        )

    def _exchange(self) -> Outcome:
        decoder = ResultDecoder(self._allow_pickle)
        reader = frames.FrameReader(decoder.feed)
        content = self._chunks() if len(self._body) > CHUNK_BYTES else bytes(self._body)
        with self._link.send(
            "/nnsight/generate", self._headers, content, {"trace": self._connected}
        ) as response:
            self._answered = True
            if response.status_code != 200:
                response.read()
                raise self._link.refusal(response)
            kind = response.headers.get("Content-Type", "").partition(";")[0].strip()
            if kind != frames.MEDIA_TYPE:
                raise self._not_frames(kind)
            for data in response.iter_raw():
                for name, payload in reader.feed(data):
                    if name == "Z":
                        return decoder.outcome()
                    if name == "E":
                        raise sentence_of(payload)
                    self._tell("state" if name == "S" else "token", json.loads(payload))
                if decoder.received:
                    self._tell_received(decoder)
        raise self._meaning(httpx.RemoteProtocolError("cut"))

    def _not_frames(self, kind: str) -> HubError:
        if kind == "text/html":
            return self._link.not_an_api()
        return HubError(
            f"The server at {self._link.url} has an older jupyter-nnsight-serve than this "
            "notebook; ask its admin to update it, or install its version here."
        )

    def _tell(self, kind: str, value: Any) -> None:
        self._report(Event(kind, value))

    def _tell_received(self, decoder: ResultDecoder) -> None:
        now = time.monotonic()
        if now - self._told >= _TELL_SECONDS:
            self._told = now
            self._tell("receiving", (decoder.received, decoder.total))
