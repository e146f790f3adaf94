"""From a block to the bytes that are sent.

nnsight's own form, with less in it: envoys are references by path, and a tensor that is a view of
a larger one travels as its own elements.
"""

from __future__ import annotations

import io
from typing import Any

import torch
from nnsight.intervention.envoy import Envoy
from nnsight.intervention.serialization import DEFAULT_PROTOCOL, CustomCloudPickler, reduce_block

from .errors import UnsendableError


class _Pickler(CustomCloudPickler):  # type: ignore[misc]
    """nnsight's pickler, for tensors of a notebook.

    Parameters
    ----------
    model
        The model whose envoys the far side knows.
    """

    def __init__(self, buffer: io.BytesIO, model: Any) -> None:
        super().__init__(buffer, protocol=DEFAULT_PROTOCOL)
        self._interleaver = model.interleaver

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, Envoy):
            if obj.interleaver is not self._interleaver:
                # Its path would name a module of the model that the block is sent to.
                raise TypeError("it is part of another model than the one that is traced")
            if "_persistent_id" not in obj.__dict__:
                raise TypeError(f"{obj.path} was added here, and the served model does not have it")
        return super().persistent_id(obj)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and type(obj) in (torch.Tensor, torch.nn.Parameter):
            return _tensor(obj) if obj.layout is torch.strided else NotImplemented
        return super().reducer_override(obj)


def _tensor(tensor: torch.Tensor) -> Any:
    """How a tensor is pickled: from host memory, and with its own elements only."""
    sent = tensor
    if tensor.device.type not in ("cpu", "meta"):
        # The server's process that reads the block has no use for this machine's device.
        sent = tensor.detach().cpu()
    elif tensor.device.type == "cpu" and (
        tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
    ):
        sent = tensor.detach().clone()
    if sent is not tensor:
        sent.requires_grad_(tensor.requires_grad)
        if isinstance(tensor, torch.nn.Parameter):
            sent = torch.nn.Parameter(sent, tensor.requires_grad)
    elif not tensor.is_leaf:
        # torch refuses to pickle what hangs on a graph, and the graph would not travel anyway.
        sent = tensor.detach().requires_grad_(tensor.requires_grad)
    return sent.__reduce_ex__(DEFAULT_PROTOCOL)


def dumps(value: Any, model: Any) -> bytes:
    """``value`` as nnsight's unpickler reads it."""
    buffer = io.BytesIO()
    _Pickler(buffer, model).dump(value)
    return buffer.getvalue()


def trace_body(tracer: Any) -> bytes:
    """A captured trace as the body of a request.

    Raises
    ------
    UnsendableError
        The block reads a name whose value cannot be sent; the text names it.
    """
    frame = tracer.info.frame
    variables = dict(frame.f_locals)
    block = reduce_block(tracer.node, frame.f_globals, variables)
    try:
        return dumps((tracer, block), tracer.envoy)
    except Exception as error:
        raise _unsendable(block, tracer.envoy) or error from None


def edit_body(template: Any, model: Any) -> bytes:
    """A mediator as the body of an edit; raises as `trace_body` does."""
    try:
        return dumps(template, model)
    except Exception as error:
        block = reduce_block(template.node, template.glbls, template.lcls)
        raise _unsendable(block, model) or error from None


def _unsendable(block: tuple[str, dict[str, Any], dict[str, Any]], model: Any) -> Any:
    """Which of the block's names cannot be sent; None when none is at fault."""
    _, glbls, lcls = block
    culprits = {}
    for name, value in {**glbls, **lcls}.items():
        try:
            dumps(value, model)
        except Exception as found:
            culprits[name] = f"{type(found).__name__}: {found}"
    if not culprits:
        return None
    names = " and ".join(f"`{name}`" for name in culprits)
    why = next(iter(culprits.values()))
    it = "it" if len(culprits) == 1 else "them"
    return UnsendableError(
        f"The block reads {names}, which cannot be sent to the server ({why}); take what the "
        f"block needs of {it} into a plain value or a tensor above the trace."
    )
