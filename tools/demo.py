"""Start a Jupyter server with the extension on the CPU, and show that it works.

    python tools/demo.py notebook MODEL_DIR   run the quick-start notebook against it, then stop it
    python tools/demo.py serve MODEL_DIR      leave it running until Ctrl-C

The server listens on this machine only, on a free port, with a token made for this run, and with
directories of its own for Jupyter's configuration and runtime files: nothing of the user's Jupyter
is read or changed. However this program ends, the server and all that it started end first.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import httpx
import psutil

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "examples" / "cpu_config.py"
NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"
LOG = ROOT / ".logs" / "demo.log"

# Seconds: the engine's load, one cell of the notebook, the server's stop before it is killed.
LOAD_SECONDS = 600
CELL_SECONDS = 300
STOP_SECONDS = 20

# Appended to the notebook for this run: brings its results here as JSON.
REPORT = """
import json
print(json.dumps({
    "next_token": next_token, "layer": layer, "shape": list(hidden.shape), "norm": norm,
    "before": before, "after": after,
}))
"""


class DemoError(Exception):
    """The demo cannot go on; the message says why."""


class Server:
    """A Jupyter server with the extension, in a process group of its own.

    Parameters
    ----------
    model
        The directory of the model to serve.
    state
        An empty directory for Jupyter's configuration and runtime files.
    log
        Where the server's log goes; None for this program's own standard error.
    """

    def __init__(self, model: Path, state: Path, log: IO[bytes] | None) -> None:
        self.model = model.resolve()
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.token = os.environ.get("JUPYTER_TOKEN") or secrets.token_hex(24)
        self.environment = {
            **os.environ,
            "JUPYTER_CONFIG_DIR": str(state / "config"),
            "JUPYTER_RUNTIME_DIR": str(state / "runtime"),
            # The client keeps the model's tree and tokenizer there.
            "JUPYTER_DATA_DIR": str(state / "data"),
            # In the environment it is not seen in the list of processes.
            "JUPYTER_TOKEN": self.token,
            # A proxy for the outer world has no part in this.
            "NO_PROXY": ",".join(filter(None, [os.environ.get("NO_PROXY"), "127.0.0.1"])),
        }
        command = [
            *(sys.executable, "-m", "jupyter", "nnsight-serve"),
            f"--config={CONFIG}",
            f"--NNsightServe.model={self.model}",
            "--ServerApp.ip=127.0.0.1",
            f"--ServerApp.port={self.port}",
            "--ServerApp.port_retries=0",
            "--ServerApp.open_browser=False",
            f"--ServerApp.root_dir={NOTEBOOK.parent}",
        ]
        if os.geteuid() == 0:
            command.append("--allow-root")
        self.process = subprocess.Popen(
            command,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT if log else None,
            start_new_session=True,
        )

    def status(self) -> dict[str, Any] | None:
        """What GET /nnsight/status says; None while the server does not answer."""
        headers = {"Authorization": f"token {self.token}"}
        try:
            answer = httpx.get(f"{self.url}/nnsight/status", headers=headers, trust_env=False)
        except httpx.TransportError:
            return None
        if answer.status_code != 200:
            raise DemoError(f"the server answers {answer.status_code}: {answer.text}")
        content: dict[str, Any] = answer.json()
        return content

    def wait_until_ready(self) -> float:
        """Wait for the engine, telling how far it is; the seconds it took."""
        started = time.monotonic()
        progress = Progress()
        while (seconds := time.monotonic() - started) < LOAD_SECONDS:
            if self.process.poll() is not None:
                raise DemoError(f"Jupyter ended with exit code {self.process.returncode}")
            status = self.status()
            if status is None:
                progress.show("Jupyter is starting", seconds)
            elif status["state"] == "ready":
                progress.end()
                return seconds
            elif status["state"] == "starting":
                progress.show(f"engine: {status.get('stage') or 'starting'}", seconds)
            else:
                raise DemoError(f"the engine has {status['state']}: {status.get('reason')}")
            time.sleep(0.5)
        raise DemoError(f"the engine was not ready within {LOAD_SECONDS} s")

    def stop(self) -> None:
        """Stop the server, and see to it that nothing it started is left."""
        if self.process.poll() is not None:
            return
        # The engine and its workers are in process groups of their own.
        family = psutil.Process(self.process.pid).children(recursive=True)
        self.process.terminate()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        _, left = psutil.wait_procs(family, timeout=STOP_SECONDS)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if left:
            raise DemoError(f"{len(left)} processes outlived the server and were killed")


class Progress:
    """A line that is rewritten on a terminal, and written anew in a log when there is news."""

    def __init__(self) -> None:
        self.terminal = sys.stdout.isatty()
        self.stage = ""
        self.shown = 0.0

    def show(self, stage: str, seconds: float) -> None:
        """Tell the stage and the seconds since the start."""
        if self.terminal:
            print(f"\r\x1b[K  {stage}, {seconds:.0f} s", end="", flush=True)
        elif stage != self.stage or seconds - self.shown >= 10:
            print(f"  {stage}, {seconds:.0f} s", flush=True)
            self.shown = seconds
        self.stage = stage

    def end(self) -> None:
        """Leave the line."""
        if self.terminal and self.stage:
            print("\r\x1b[K", end="", flush=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@contextlib.contextmanager
def served(model: Path, log: IO[bytes] | None) -> Iterator[Server]:
    """A server that is ready, and gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="nnsight-demo-") as state:
        print(f"demo: starting Jupyter with {model} on the CPU", flush=True)
        server = Server(model, Path(state), log)
        try:
            seconds = server.wait_until_ready()
            print(f"demo: ready after {seconds:.0f} s", flush=True)
            yield server
        finally:
            # A second Ctrl-C would leave processes behind; this takes seconds.
            before = signal.signal(signal.SIGINT, signal.SIG_IGN)
            print("demo: stopping the server", flush=True)
            try:
                server.stop()
            finally:
                signal.signal(signal.SIGINT, before)


def run_notebook(server: Server) -> dict[str, Any]:
    """Run the quick-start notebook in a kernel against `server`; what it found."""
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError
    from traitlets.config import Config

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(REPORT))
    # The kernel is on this machine: a socket of the file system needs no port and no encryption.
    config = Config({"KernelManager": {"transport": "ipc"}})
    client = NotebookClient(notebook, timeout=CELL_SECONDS, kernel_name="python3", config=config)
    environment = {
        **server.environment,
        "NNSIGHT_SERVE_URL": server.url,
        "NNSIGHT_SERVE_TOKEN": server.token,
    }
    try:
        client.execute(env=environment)
    except CellExecutionError as error:
        raise DemoError(f"a cell of {NOTEBOOK.name} failed:\n{error}") from None
    output = notebook.cells[-1].outputs[-1].text
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


def demo(model: Path) -> None:
    """Run the notebook, print what came back, and judge it."""
    LOG.parent.mkdir(exist_ok=True)
    print(f"demo: the server's log is in {LOG.relative_to(ROOT)}")
    with LOG.open("wb") as log:
        try:
            with served(model, log) as server:
                print(f"demo: running {NOTEBOOK.relative_to(ROOT)} in a kernel", flush=True)
                result = run_notebook(server)
        except DemoError:
            print("\n".join(["demo: from the server's log:", *causes(LOG)]))
            raise
    print(f"""
  next token       {result["next_token"]!r}
  hidden state     after layer {result["layer"]}: shape {tuple(result["shape"])}, \
norm at the last token {result["norm"]:.1f}
  before steering  {result["before"]!r}
  after steering   {result["after"]!r}
""")
    if result["next_token"] != " Paris":
        raise DemoError(
            "the next token is not ' Paris': the engine does not compute what it should"
        )
    if result["before"] == result["after"]:
        raise DemoError("steering changed nothing: the edit did not reach the engine")
    print("demo: done, everything is stopped")


def causes(log: Path) -> list[str]:
    """The lines of `log` that name an exception, or its last lines where none does.

    What fails in a worker is told again by EngineCore and by the engine, each time with less of
    the cause and with a traceback; the first of these lines is the one that matters.
    """
    lines = log.read_text(errors="replace").splitlines()
    named = [line for line in lines if re.search(r"(?:Error|Exception): \S", line)]
    return named[:5] or lines[-10:]


def serve(model: Path) -> None:
    """Leave the server running, and say how to reach it."""
    with served(model, None) as server:
        print(f"""
For the notebooks of examples/, or any other, before Jupyter is started:

    export NNSIGHT_SERVE_URL={server.url}
    export NNSIGHT_SERVE_TOKEN={server.token}

A kernel of .venv-notebook has what they need (`make notebook`). In Python, there or here:

    from jupyter_nnsight_serve import connect

    model = connect("{server.url}", "{server.token}").model
    with model.trace("The Eiffel Tower is located in the city of", max_tokens=1):
        logits = model.logits.save()
    print(model.tokenizer.decode(logits.argmax(dim=-1)))

nnsight's own client takes the same two as `serve=` and `api_key=`.

Ctrl-C stops it.
""")
        code = server.process.wait()
        raise DemoError(f"Jupyter ended with exit code {code}")


def main() -> None:
    """Run one of the two, and end with an exit code that says how it went."""
    parser = argparse.ArgumentParser(description="Show jupyter-nnsight-serve at work on a CPU.")
    parser.add_argument("action", choices=["notebook", "serve"])
    parser.add_argument("model", type=Path)
    arguments = parser.parse_args()
    # Ended by a signal, a program skips its `finally`; as an exception it does not.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    try:
        {"notebook": demo, "serve": serve}[arguments.action](arguments.model)
    except DemoError as error:
        sys.exit(f"demo: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
