"""jupyter-nnsight-serve: a Jupyter Server extension that serves nnsight traces on one vLLM engine.

Importing this package is cheap and imports neither torch, vllm nor nnsight, because every Jupyter
server of an environment imports it to look for extensions. `connect`, the notebook's side of it,
is imported when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from .client import connect as connect

__all__ = ["__version__", "connect"]


def __getattr__(name: str) -> Any:
    """Import the notebook client on first use."""
    if name == "connect":
        from .client import connect

        return connect
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _jupyter_server_extension_points() -> list[dict[str, Any]]:
    """Tell Jupyter Server which application to load."""
    from .extension import NNsightServe

    return [{"module": "jupyter_nnsight_serve.extension", "app": NNsightServe}]
