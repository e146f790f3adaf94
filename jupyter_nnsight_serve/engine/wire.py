"""The encoding of a trace's results.

The stock client reads ``torch.load`` of ``{"saves": {name: value}, "error": deferred or None}``
and leaves further keys alone; ``said`` holds pairs of stream name and text that the blocks wrote.
"""

from __future__ import annotations

import io
import pickle

import cloudpickle
import torch

from .run import Outcome


def encode(outcome: Outcome) -> memoryview:
    """An outcome as the bytes the stock client reads.

    Tensors keep their shape and dtype; a tensor that views a larger one carries its own elements
    only.
    """
    error = outcome.error
    if error is not None and outcome.said:
        # The stock client shows an error's text and nothing else of the response.
        text = "".join(text for _, text in outcome.said)
        heard = f"{error['traceback'].rstrip()}\n\nOutput of the block:\n{text}"
        error = {**error, "traceback": heard}
    result = {"saves": outcome.saves, "error": error, "said": outcome.said}
    buffer = io.BytesIO()
    try:
        torch.save(result, buffer)
    except (pickle.PicklingError, AttributeError, TypeError, ImportError):
        # An instance of a class that exists only in the caller's notebook travels with its class.
        buffer = io.BytesIO()
        torch.save(result, buffer, pickle_module=cloudpickle)
    return buffer.getbuffer()
