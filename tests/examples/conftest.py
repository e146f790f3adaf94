"""The environment of a notebook, which has no vLLM, and a real server with a real engine for it.

Neither nnsight nor torch is imported into the test process: what uses the client runs in kernels
and processes of `.venv-notebook`. One engine serves the whole run.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode
from traitlets.config import Config

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / ".venv-notebook"
MODEL = ROOT / ".models" / "smollm2-135m-instruct"
CELL_SECONDS = 240
KERNEL = "notebook-environment"

# What would lead a kernel to another server than the tests'.
ELSEWHERE = ("JPY_PARENT_PID", "JUPYTERHUB_API_TOKEN", "JUPYTERHUB_API_URL", "PYTHONPATH")

Run = Callable[..., dict[str, Any]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the first test the time in which the environment is made and the engine loads."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(1500))
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session")
def python() -> Path:
    """The Python of the notebook's environment, made anew where pyproject.toml is newer."""
    tool = ROOT / "tools" / "install.py"
    subprocess.run([sys.executable, tool, "notebook", ENVIRONMENT], check=True)
    return ENVIRONMENT / "bin" / "python"


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The server of the engine tests, whose conftest has the name of this one."""
    if not MODEL.is_dir():
        pytest.fail(f"{MODEL} is not there: make models")
    spec = importlib.util.spec_from_file_location(
        "engine_conftest", ROOT / "tests" / "engine" / "conftest.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with module.running(str(MODEL), tmp_path_factory.mktemp("served")) as server:
        yield server


@pytest.fixture(scope="session")
def variables(served: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment variables of a notebook's process, which name the server and its token."""
    folder = tmp_path_factory.mktemp("notebook")
    return {
        **{name: value for name, value in os.environ.items() if name not in ELSEWHERE},
        "NNSIGHT_SERVE_URL": served.url,
        "NNSIGHT_SERVE_TOKEN": served.token,
        "JUPYTER_DATA_DIR": str(folder / "data"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        "JUPYTER_CONFIG_DIR": str(folder / "config"),
        "IPYTHONDIR": str(folder / "ipython"),
        "MPLCONFIGDIR": str(folder / "matplotlib"),
    }


@pytest.fixture(scope="session")
def run(
    python: Path, served: Any, variables: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Run]:
    """Execute a notebook in a kernel of the notebook's environment.

    ``run(notebook, name=expression, ...)`` returns what the expressions are afterwards, which has
    to be what JSON can say. The notebook holds its outputs then, and not the server's token.
    """
    folder = tmp_path_factory.mktemp("kernels")
    kernel = folder / "kernels" / KERNEL
    kernel.mkdir(parents=True)
    command = [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(
        json.dumps({"argv": command, "display_name": KERNEL, "language": "python"})
    )
    # A socket of the file system needs no port and no encryption.
    config = Config({"KernelManager": {"transport": "ipc"}})

    def execute(notebook: NotebookNode, **expressions: str) -> dict[str, Any]:
        pairs = ", ".join(f"{name!r}: {text}" for name, text in expressions.items())
        report = nbformat.v4.new_code_cell(f"import json\nprint(json.dumps({{{pairs}}}))")
        notebook.cells.append(report)
        client = NotebookClient(notebook, timeout=CELL_SECONDS, kernel_name=KERNEL, config=config)
        client.execute(env=variables)
        assert served.token not in nbformat.writes(notebook)
        del notebook.cells[-1]
        values: dict[str, Any] = json.loads(report.outputs[-1].text.splitlines()[-1])
        return values

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", str(folder))
        yield execute


def printed(notebook: NotebookNode) -> str:
    """All that the cells of an executed notebook printed."""
    return "".join(
        output.text
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if output.output_type == "stream" and output.name == "stdout"
    )


def plots(notebook: NotebookNode) -> int:
    """How many plots an executed notebook shows."""
    return sum(
        "image/png" in output.get("data", {})
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
    )
