"""A look at a pickle before any of it is loaded, for names that no trace needs.

A trace is code, and code can do all of this by other ways: the scan stops accidents, such as a
block that captures `os.system` or an open socket, and the plainest of malicious pickles. It is no
sandbox (docs/security.md).

The names are exact pairs of module and attribute. The same look finds a pickle that numbers an
object beyond its own length: loading it would take memory for all the numbers up to that one.
"""

from __future__ import annotations

import pickletools
from collections.abc import Iterable, Iterator
from typing import Any

Pair = tuple[str, str]


def _pairs(modules: str, names: str) -> Iterator[Pair]:
    return ((module, name) for module in modules.split() for name in names.split())


REFUSED: frozenset[Pair] = frozenset(
    [
        *_pairs(
            "os posix nt",
            "system popen execl execle execlp execv execve execvp execvpe fork forkpty spawnl "
            "spawnle spawnlp spawnv spawnve spawnvp posix_spawn posix_spawnp kill killpg abort "
            "_exit remove unlink rmdir removedirs rename renames replace truncate chmod chown "
            "setuid setgid symlink link mkfifo putenv chroot startfile",
        ),
        *_pairs("subprocess", "Popen run call check_call check_output getoutput getstatusoutput"),
        *_pairs("_posixsubprocess", "fork_exec"),
        *_pairs("shutil", "rmtree move copy copy2 copyfile copytree chown"),
        *_pairs("builtins __builtin__", "eval exec execfile compile open input breakpoint"),
        *_pairs("io _io", "open open_code FileIO"),
        *_pairs("socket _socket", "socket create_connection create_server socketpair"),
        *_pairs("ctypes", "CDLL PyDLL WinDLL OleDLL cdll pydll memmove string_at"),
        *_pairs("_ctypes", "dlopen LoadLibrary"),
        *_pairs("importlib _frozen_importlib importlib._bootstrap", "reload __import__"),
        *_pairs("builtins", "__import__"),
        *_pairs("runpy", "run_path run_module _run_code"),
        *_pairs("pty", "spawn fork"),
        *_pairs("code", "interact InteractiveInterpreter InteractiveConsole"),
        *_pairs("pdb bdb", "run runeval runcall set_trace"),
        *_pairs("cProfile profile trace", "run runctx"),
        *_pairs("timeit", "timeit repeat"),
        *_pairs("webbrowser", "open open_new open_new_tab"),
        *_pairs("multiprocessing.context multiprocessing.process", "Process"),
        *_pairs("asyncio.subprocess", "create_subprocess_exec create_subprocess_shell"),
        *_pairs("pip pip._internal", "main"),
        *_pairs("torch.hub", "load load_state_dict_from_url download_url_to_file"),
        *_pairs("sys", "exit settrace setprofile"),
        *_pairs("signal _signal", "signal alarm raise_signal pthread_kill"),
    ]
)
"""What a trace never needs, by module and name."""

_STRINGS = frozenset({"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE"})


class RefusedGlobalError(Exception):
    """A pickle names something that this server does not load."""

    def __init__(self, pair: Pair) -> None:
        super().__init__(
            f"the trace refers to {'.'.join(pair)}, which this server does not load; leave it out "
            "of the block and of what the block captures"
        )


class DamagedPickleError(Exception):
    """A pickle numbers an object beyond its own length, which only a broken one does."""

    def __init__(self) -> None:
        super().__init__("it is damaged: it numbers more objects than it has bytes")


class Scan:
    """Looks for names in pickles.

    Parameters
    ----------
    more
        Names to refuse besides `REFUSED`, as "module.name".
    """

    def __init__(self, more: Iterable[str] = ()) -> None:
        added = (name.rpartition(".") for name in more)
        self._refused = REFUSED | {(module, name) for module, _, name in added}

    def check(self, body: bytes) -> None:
        """Refuse a pickle that is not to be loaded; what is no pickle passes, and loading tells.

        Raises
        ------
        RefusedGlobalError
            It names what is refused.
        DamagedPickleError
            It numbers an object beyond its own length.
        """
        for pair in _globals(body):
            if pair in self._refused:
                raise RefusedGlobalError(pair)


def _globals(body: bytes) -> Iterator[Pair]:
    """Every module and name that a pickle loads by name."""
    strings: list[str] = []
    memo: dict[int, str] = {}
    try:
        argument: Any
        for opcode, argument, _ in pickletools.genops(body):
            if opcode.name in _STRINGS:
                strings.append(argument)
            elif opcode.name == "MEMOIZE":
                memo[len(memo)] = strings[-1] if strings else ""
            elif opcode.name in ("BINPUT", "LONG_BINPUT", "PUT"):
                if int(argument) > len(body):
                    raise DamagedPickleError
                memo[int(argument)] = strings[-1] if strings else ""
            elif opcode.name in ("BINGET", "LONG_BINGET", "GET"):
                strings.append(memo.get(int(argument), ""))
            elif opcode.name in ("GLOBAL", "INST"):
                module, _, name = argument.partition(" ")
                yield module, name
            elif opcode.name == "STACK_GLOBAL":
                # The two strings pushed last, directly or from the memo.
                yield from zip(strings[-2:-1], strings[-1:], strict=True)
    except DamagedPickleError:
        raise
    except Exception:
        # Loading tells of a malformed pickle, and in what words.
        return
