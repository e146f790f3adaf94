"""Opening the pickles of saves: tensors by number, and the notebook's own classes as they are.

An instance of a class that was defined in a notebook travels with the class, which cloudpickle
knows again by an id. Where this process has the class, the copy that came is left aside: cloudpickle
itself would put the copy's methods and attributes in place of the notebook's.

What came with code of another Python cannot run here, and is refused where it is needed.
"""

from __future__ import annotations

import io
import pickle
import platform
from typing import Any

import torch
from cloudpickle import cloudpickle


class ForeignCode(Exception):
    """A save has code that another Python compiled; the text names whose and both versions."""


class Unpickler(pickle.Unpickler):
    """Unpickles a save.

    Parameters
    ----------
    tensors
        What it refers to by number.
    python
        The version of the Python that made it; None where that is not known.
    """

    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor], python: str | None) -> None:
        super().__init__(file)
        self._tensors = tensors
        self._python = python
        self._foreign = python is not None and _minor(python) != _minor(platform.python_version())
        # Names of what has foreign code and is needed, and how many there were when each of the
        # classes that are being made began.
        self._needed: list[str] = []
        self._begun: dict[int, int] = {}
        self._ours: set[int] = set()
        self._made: list[tuple[str, Any]] = []

    def load(self) -> Any:
        """The save.

        Raises
        ------
        ForeignCode
            It needs code that cannot run here.
        """
        made = super().load()
        if self._needed:
            raise ForeignCode(
                f"{' and '.join(dict.fromkeys(self._needed))}, whose code the server's Python "
                f"{self._python} compiled and this Python {platform.python_version()} cannot run"
            )
        for identity, kind in self._made:
            cloudpickle._lookup_class_or_track(identity, kind)
        return made

    def persistent_load(self, pid: Any) -> Any:
        kind, index = pid
        if kind != "tensor":
            raise pickle.UnpicklingError(f"a reference of an unknown kind: {kind}")
        return self._tensors[index]

    def find_class(self, module: str, name: str) -> Any:
        if module in ("cloudpickle.cloudpickle", "cloudpickle"):
            own = getattr(self, f"_own{name}", None)
            if own is not None:
                return own
        return super().find_class(module, name)

    # What cloudpickle's pickles call, by its names there.

    def _own_make_skeleton_class(self, *arguments: Any) -> Any:
        return self._skeleton(cloudpickle._make_skeleton_class, 4, arguments)

    def _own_make_skeleton_enum(self, *arguments: Any) -> Any:
        return self._skeleton(cloudpickle._make_skeleton_enum, 5, arguments)

    def _skeleton(self, make: Any, at: int, arguments: tuple[Any, ...]) -> Any:
        identity = arguments[at]
        kind = cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.get(identity)
        if kind is not None:
            self._ours.add(id(kind))
        else:
            # Known by its id only once it is whole: the next pickle would take half of one for it.
            kind = make(*arguments[:at], None, *arguments[at + 1 :])
            if identity is not None:
                self._made.append((identity, kind))
        self._begun[id(kind)] = len(self._needed)
        return kind

    def _own_class_setstate(self, kind: Any, state: Any) -> Any:
        begun = self._begun.pop(id(kind), len(self._needed))
        foreign = len(self._needed) > begun
        del self._needed[begun:]
        if id(kind) in self._ours:
            return kind
        if foreign:
            self._needed.append(f"the class {kind.__name__}")
            return kind
        return cloudpickle._class_setstate(kind, state)

    def _own_builtin_type(self, name: str) -> Any:
        if name == "CodeType" and self._foreign:
            return _Code
        return cloudpickle._builtin_type(name)

    def _own_make_function(self, code: Any, *arguments: Any) -> Any:
        if not isinstance(code, _Code):
            return cloudpickle._make_function(code, *arguments)
        self._needed.append(f"the function {code.name}")
        return _Function()

    def _own_function_setstate(self, function: Any, state: Any) -> Any:
        if not isinstance(function, _Function):
            return cloudpickle._function_setstate(function, state)
        return None


class _Code:
    """Stands for a code object that must not be made: the interpreter would end on it."""

    def __init__(self, *arguments: Any) -> None:
        # The file's name, the function's, and in newer Pythons its qualified one.
        self.name = next((part for part in reversed(arguments) if isinstance(part, str)), "")


class _Function:
    """Stands for the function of such code."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        raise TypeError("this function's code is of another Python")


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]
