"""Ends the engine's processes when whoever they serve is gone.

Three processes or more make an engine: this one, vLLM's EngineCore and its workers. Each end of
the chain is watched by the next: the engine process watches its standard input, which its starter
holds open, and every worker watches the engine process. They share one process group, so the last
act is always one ``killpg``, which no process of the group can outlive or ignore.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time

ENGINE_PID = "JUPYTER_NNSIGHT_SERVE_ENGINE_PID"
"""Environment variable through which workers learn the engine process's pid."""

STARTER_PID = "JUPYTER_NNSIGHT_SERVE_STARTER_PID"
"""The same for the process that started the engine and holds its lifeline."""

GRACE_SECONDS = 8.0
"""Seconds a stopping engine gets to shut vLLM down before its process group is killed."""


class Stopped(SystemExit):
    """Unwinds the main thread of an engine that was told to stop."""


def lead_group() -> None:
    """Make this process lead a process group of its own and tell its children who it is."""
    if os.getpgrp() != os.getpid():
        os.setpgrp()
    os.environ[ENGINE_PID] = str(os.getpid())
    os.environ[STARTER_PID] = str(os.getppid())


def watch_starter(fd: int, socket: str) -> None:
    """End this process, then its group, once ``fd`` reaches its end or SIGTERM arrives.

    Parameters
    ----------
    fd
        The reading end of a pipe whose writing end only the starter holds.
    socket
        Path of the socket in a directory of its own, both of which go with this process.
    """

    def stop(signum: int, frame: object) -> None:
        """Unwind the main thread, and end the group even if unwinding never does."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        threading.Thread(target=last_act, name="last-act", daemon=True).start()
        raise Stopped(0)

    def last_act() -> None:
        time.sleep(GRACE_SECONDS)
        remove_socket(socket)
        end_group()

    def wait() -> None:
        with contextlib.suppress(OSError):
            while os.read(fd, 4096):
                pass
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    threading.Thread(target=wait, name="lifeline", daemon=True).start()


def remove_socket(path: str) -> None:
    """Remove the socket at ``path`` and its directory, when nothing else is in there."""
    with contextlib.suppress(OSError):
        os.unlink(path)
    with contextlib.suppress(OSError):
        os.rmdir(os.path.dirname(path))


def end_group() -> None:
    """Kill every process of this process's group, itself included."""
    os.killpg(os.getpgrp(), signal.SIGKILL)


def watch_engine() -> None:
    """In a worker: kill the process group once the engine process is gone.

    The starter is watched too: an engine process that cannot run its own threads, because a
    caller's code holds the interpreter, does not see the end of its lifeline.
    """
    engine = int(os.environ.get(ENGINE_PID, "0"))
    if engine and engine != os.getpid():
        _when_gone(engine, 0.0)
        _when_gone(int(os.environ[STARTER_PID]), GRACE_SECONDS + 1.0)


def _when_gone(pid: int, grace: float) -> None:
    """Kill the process group ``grace`` seconds after the end of process ``pid``."""
    if pid == 0:
        # In a process namespace of its own the starter is outside; the namespace ends with it.
        return
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        end_group()
        return

    def wait() -> None:
        select.select([pidfd], [], [])
        time.sleep(grace)
        end_group()

    threading.Thread(target=wait, name="lifeline", daemon=True).start()
