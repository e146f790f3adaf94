"""The environment without vLLM: what is in it, and how quickly a notebook gets going there."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from conftest import ENVIRONMENT, ROOT

# Seconds from `connect()` to a model that takes traces, in a process that has imported nnsight
# and the client's model; the import itself takes some seconds, as torch does everywhere.
QUICK = """
import json, time
import jupyter_nnsight_serve.client.model
from jupyter_nnsight_serve import connect

began = time.monotonic()
model = connect().model
seconds = time.monotonic() - began
print(json.dumps([seconds, len(model.model.layers)]))
"""


def in_environment(
    python: Path, code: str, variables: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, "-c", code], env=variables, capture_output=True, text=True, timeout=300
    )


def test_there_is_no_vllm(python: Path) -> None:
    done = in_environment(python, "import vllm")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'vllm'"


def test_the_client_is_there_with_the_engines_nnsight(python: Path) -> None:
    code = "import jupyter_nnsight_serve.client, nnsight, matplotlib; print(nnsight.__version__)"
    done = in_environment(python, code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1].startswith(metadata.version("nnsight"))


def test_a_made_environment_is_left_alone(python: Path) -> None:
    """The tool is quick where there is nothing to do: a pip would take longer than this."""
    stamp = ENVIRONMENT / ".installed"
    before = stamp.stat().st_mtime_ns
    tool = ROOT / "tools" / "install.py"
    done = subprocess.run(
        [sys.executable, tool, "notebook", ENVIRONMENT], capture_output=True, text=True, check=True
    )
    assert (done.stdout, stamp.stat().st_mtime_ns) == ("", before)


@pytest.mark.engine
def test_connecting_again_takes_less_than_a_second(python: Path, variables: dict[str, str]) -> None:
    """The best of three fresh processes, since other work on the machine is not what is measured."""
    first = in_environment(python, QUICK, variables)
    assert first.returncode == 0, first.stderr
    seconds = []
    for _ in range(3):
        done = in_environment(python, QUICK, variables)
        took, layers = json.loads(done.stdout)
        assert layers == 30
        seconds.append(took)
    assert min(seconds) < 1, seconds
