"""The engine inside bubblewrap, as docs/security.md shows it: what a block can no longer do."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import ROOT, Server, stock_client
from test_lifecycle import GONE_SECONDS, engine_processes

TRIAL = [
    "bwrap",
    "--unshare-all",
    "--ro-bind",
    "/",
    "/",
    "--proc",
    "/proc",
    "--dev",
    "/dev",
    "true",
]


def reason() -> str | None:
    """Why there is no bubblewrap here, or None."""
    if shutil.which("bwrap") is None:
        return "bubblewrap is not installed (Debian: apt-get install bubblewrap)"
    done = subprocess.run(TRIAL, capture_output=True, text=True)
    return None if done.returncode == 0 else f"bubblewrap cannot run here: {done.stderr.strip()}"


def settings(model: str) -> dict[str, Any]:
    """The settings of the documentation's example, for this Python and this model."""
    text = (ROOT / "docs" / "security.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    block = block.replace("/srv/models", str(Path(model).parent))

    class Config:
        class NNsightServe:
            engine_command_prefix: list[str]
            engine_environment: dict[str, str]

    exec(block, {"c": Config})
    return {
        "engine_command_prefix": [
            *Config.NNsightServe.engine_command_prefix,
            # This package is not in the environment but in a checkout.
            *("--ro-bind", str(ROOT), str(ROOT)),
        ],
        "engine_environment": Config.NNsightServe.engine_environment,
    }


@pytest.fixture(scope="module")
def confined(tiny_path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    missing = reason()
    if missing is not None:
        if os.environ.get("CI") == "true":
            pytest.fail(missing)
        pytest.skip(missing)
    # Not below /tmp, which bubblewrap replaces before it binds the engine's directory.
    folder = tmp_path_factory.mktemp("confined")
    server = Server(tiny_path, folder, settings(tiny_path))
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()


def test_a_block_has_no_network_no_homes_no_writes_and_no_other_processes(
    confined: Server, tiny_path: str, tmp_path: Path
) -> None:
    mark = ROOT / "a-block-was-here"
    (tmp_path / "secret").write_text("x")
    in_home = tempfile.NamedTemporaryFile(dir=Path.home())
    attempts = {
        "network": "import socket; socket.create_connection(('1.1.1.1', 53), 2)",
        "jupyter": f"import urllib.request as u; u.urlopen({confined.root!r}, timeout=2)",
        "write": f"open({str(mark)!r}, 'w')",
        "etc": "open('/etc/a-block-was-here', 'w')",
        "homes": f"open({in_home.name!r})",
        "temporary": f"open({str(tmp_path / 'secret')!r})",
        "kill": f"import os; os.kill({confined.process.pid}, 0)",
        "own": "open('own', 'w').write('x')",
    }

    def attempt(command: str) -> str:
        """What comes of a statement, where it runs."""
        try:
            exec(command, {})
        except Exception as error:
            return type(error).__name__
        return "done"

    model = stock_client(tiny_path)
    with model.trace([5, 6, 7], max_tokens=1, **confined.where):
        logits = model.logits.save()
        found = {name: attempt(command) for name, command in attempts.items()}
        nothing_new = open("/proc/self/status").read().split("NoNewPrivs:")[1].split()[0]
        found = found.save()
        nothing_new = nothing_new.save()
    in_home.close()
    assert logits.shape[0] == 1
    assert not mark.exists()
    assert found == {
        "network": "OSError",
        "jupyter": "URLError",
        "write": "OSError",
        "etc": "OSError",
        "homes": "FileNotFoundError",
        "temporary": "FileNotFoundError",
        "kill": "ProcessLookupError",
        "own": "done",
    }
    assert nothing_new == "1"


def test_a_confined_engine_ends_with_its_server(confined: Server) -> None:
    processes = engine_processes(confined)
    assert len(processes) >= 3
    confined.process.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(processes, timeout=GONE_SECONDS)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
