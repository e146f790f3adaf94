"""What passes between a block and the model: rows lent to be read, rows given back.

What a block reads stays what it was when it was read. vLLM's fused kernels overwrite activation
buffers in place, so a view of one that is kept holds a later layer's numbers. A block is therefore
lent a private copy of its rows, and what it did to the copy goes back into the buffer when the
block moves on, before the model or any other block runs: a read is what was read, and an in-place
edit still reaches the model.

nnsight's own switch for the first half, ``NNSIGHT_VLLM_CLONE_READS``, loses in-place edits.
"""

from __future__ import annotations

from typing import Any

import torch
from nnsight.intervention.batching import BatchGroup
from nnsight.modeling.vllm.batching import VLLMBatcher
from nnsight.util import apply


class LendingBatcher(VLLMBatcher):
    """nnsight's batcher over vLLM's token axis, which lends copies and takes them back."""

    def __init__(self, envoy: Any, kwargs: dict[str, Any] | None = None) -> None:
        super().__init__(envoy, kwargs)
        self.clone_reads = False
        # What the block that runs now was lent: rows of the model's buffer, and the copy of them.
        self.lent: list[tuple[torch.Tensor, torch.Tensor]] = []
        # How many blocks are being served now; one can be served from inside another.
        self.serving = 0

    def narrow(self, value: Any, group: BatchGroup) -> Any:
        self.settle()
        rows = super().narrow(value, group)
        if not self.serving:
            # A cache is looking, once the blocks are through: it keeps a copy and gives nothing
            # back, since by the time of the next visit the model has moved on in this buffer.
            return apply(rows, torch.clone, torch.Tensor)
        return apply(rows, self._lend, torch.Tensor)

    def widen(self, value: Any, group: BatchGroup, edited: Any) -> Any:
        """Put what a block assigned in the place of its rows.

        Raises
        ------
        ValueError, TypeError
            It does not have the structure or the shape of the rows it is to replace. The model's
            forward is shared, so a wrong shape would fail everybody's step.
        """
        self.settle()
        return super().widen(value, group, _fitted(super().narrow(value, group), edited))

    def assemble_skip(self, value: Any) -> Any:
        # The interleaver's last step of a visit, whether or not anything was skipped.
        self.settle()
        return super().assemble_skip(value)

    def settle(self) -> None:
        """Write lent copies back into the model's buffers."""
        if not self.lent:
            return
        lent, self.lent = self.lent, []
        for rows, copy in lent:
            if copy.shape != rows.shape:
                raise ValueError(
                    f"a tensor that was read with shape {tuple(rows.shape)} was given the shape "
                    f"{tuple(copy.shape)} in place; work on a copy of it: `.clone()`"
                )
            rows.copy_(copy)

    def _lend(self, rows: torch.Tensor) -> torch.Tensor:
        copy = rows.clone()
        if rows.numel() and 0 not in rows.stride():
            self.lent.append((rows, copy))
        return copy


def _fitted(rows: Any, edited: Any, where: str = "the value assigned") -> Any:
    """``edited``, checked to have the structure and shapes of ``rows``, in their dtype and device.

    An assignment converts as ``rows[:] = edited`` would.
    """
    if isinstance(rows, torch.Tensor):
        if not isinstance(edited, torch.Tensor):
            raise TypeError(
                f"{where} is a {type(edited).__name__}, and the model takes a tensor of shape "
                f"{tuple(rows.shape)} there"
            )
        if edited.shape != rows.shape:
            raise ValueError(
                f"{where} has shape {tuple(edited.shape)}, and the model takes "
                f"{tuple(rows.shape)} there; a served request cannot change its number of tokens "
                "or the width of a layer"
            )
        return edited.to(device=rows.device, dtype=rows.dtype)
    if isinstance(rows, (list, tuple)):
        if not isinstance(edited, (list, tuple)) or len(edited) != len(rows):
            got = f"a {type(edited).__name__}" + (
                f" of {len(edited)}" if isinstance(edited, (list, tuple)) else ""
            )
            raise TypeError(
                f"{where} is {got}, and the model takes a {type(rows).__name__} of {len(rows)} "
                "there, such as a decoder layer's (sub-block, residual) pair"
            )
        return [
            _fitted(row, part, f"part {index} of {where}")
            for index, (row, part) in enumerate(zip(rows, edited, strict=True))
        ]
    if isinstance(rows, dict):
        if not isinstance(edited, dict) or edited.keys() != rows.keys():
            raise TypeError(f"{where} must be a dict with the keys {sorted(map(str, rows))}")
        return {key: _fitted(row, edited[key], f"{where}[{key!r}]") for key, row in rows.items()}
    return edited
