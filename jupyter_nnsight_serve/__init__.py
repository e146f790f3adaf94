"""jupyter-nnsight-serve: a Jupyter Server extension that serves nnsight traces on one vLLM engine.

Importing this package is cheap and imports neither torch, vllm nor nnsight, because every Jupyter
server of an environment imports it to look for extensions.
"""

from __future__ import annotations

from typing import Any

from ._version import __version__

__all__ = ["__version__"]


def _jupyter_server_extension_points() -> list[dict[str, Any]]:
    """Tell Jupyter Server which application to load."""
    from .extension import NNsightServe

    return [{"module": "jupyter_nnsight_serve.extension", "app": NNsightServe}]
