"""Programs that bring code and objects of a notebook into the block."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

import cloudpickle
import nnsight
import numpy
import torch

from .registry import HIDDEN, PROMPT, home, program

ONE = {"temperature": 0.0, "max_tokens": 1}


def scaled(hidden: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
    """A helper at the top of a module of the caller's own."""
    return hidden * factor


@program()
def a_helper_of_a_registered_module(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    mine = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(mine)
    try:
        with model.trace(PROMPT, **ONE, **where):
            hidden = scaled(model.model.layers[3].output[0], factor=3.0).save()
    finally:
        cloudpickle.unregister_pickle_by_value(mine)
    return home(hidden=hidden)


@program()
def a_helper_function(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    def normalised(hidden: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
        """Rows of unit length."""
        return hidden / (hidden.norm(dim=-1, keepdim=True) + eps)

    with model.trace(PROMPT, **ONE, **where):
        hidden = normalised(model.model.layers[3].output[0]).save()
    return home(hidden=hidden)


@program()
def a_lambda(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    double, square = lambda x: x * 2, lambda x: x * x  # noqa: E731
    with model.trace(PROMPT, **ONE, **where):
        hidden = model.model.layers[3].output[0]
        doubled = double(hidden).save()
        squared = square(hidden).save()
        inner = (lambda x: x + hidden)(hidden).save()
    return home(doubled=doubled, squared=squared, inner=inner)


@program()
def a_closure(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    def steering(strength: float) -> Any:
        def steer(hidden: torch.Tensor) -> torch.Tensor:
            return hidden + strength * offset

        return steer

    offset = torch.arange(HIDDEN).to(torch.bfloat16)
    by_two = steering(2.0)
    with model.trace(PROMPT, **ONE, **where):
        hidden = by_two(model.model.layers[3].output[0]).save()
    return home(hidden=hidden)


@program()
def a_recursive_function(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    def halved(hidden: torch.Tensor, times: int) -> torch.Tensor:
        return hidden if times == 0 else halved(hidden / 2, times - 1)

    with model.trace(PROMPT, **ONE, **where):
        hidden = halved(model.model.layers[3].output[0], 3).save()
    return home(hidden=hidden)


@program()
def a_function_defined_in_the_block(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, **ONE, **where):

        def norms(hidden: torch.Tensor) -> list[float]:
            return [row.float().norm().item() for row in hidden]

        found = nnsight.save(norms(model.model.layers[3].output[0]))
        squares = nnsight.save({n: n * n for n in range(3)})
    return home(found=found, squares=squares)


@program()
def a_dataclass_built_in_the_block(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    @dataclass
    class Finding:
        layer: int
        hidden: torch.Tensor
        note: str = "none"

        def doubled(self) -> torch.Tensor:
            return self.hidden * 2

    with model.trace(PROMPT, **ONE, **where):
        finding = nnsight.save(Finding(3, model.model.layers[3].output[0][-1]))
        doubled = finding.doubled().save()
    return home(
        finding=finding, doubled=doubled, same=isinstance(finding, Finding), equal=finding.note
    )


@program()
def a_class_defined_in_the_block(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, **ONE, **where):

        class Box:
            def __init__(self, inside: Any) -> None:
                self.inside = inside

        box = nnsight.save(Box(model.model.layers[3].output[0].shape[0]))
    return home(inside=box.inside, kind=type(box).__name__)


@program()
def a_named_tuple(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    class Pair(NamedTuple):
        block: torch.Tensor
        residual: torch.Tensor

    with model.trace(PROMPT, **ONE, **where):
        pair = nnsight.save(Pair(*(part.clone() for part in model.model.layers[3].output)))
    return home(pair=pair, same=isinstance(pair, Pair))


@program()
def an_object_with_state(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    class Meter:
        def __init__(self) -> None:
            self.seen: list[float] = []

        def __call__(self, hidden: torch.Tensor) -> None:
            self.seen.append(hidden.float().mean().item())

    meter = Meter()
    with model.trace(PROMPT, **ONE, **where):
        measured = nnsight.save(meter)
        measured(model.model.layers[3].output[0])
        measured(model.model.layers[4].output[0])
    return home(inside=measured.seen, outside=meter.seen)


@program()
def a_linear_probe(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(1)
    probe = torch.nn.Linear(HIDDEN, 1)
    with model.trace(PROMPT, **ONE, **where):
        hidden = model.model.layers[3].output[0].save()
        score = probe.to(hidden.device)(hidden.float()).detach().save()
    here = probe(hidden.float()).detach()
    return home(hidden=hidden, score=score, close=torch.allclose(score, here, rtol=1e-4, atol=1e-4))


@program()
def a_module_of_a_class_of_the_notebook(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    class Autoencoder(torch.nn.Module):
        def __init__(self, width: int, features: int) -> None:
            super().__init__()
            self.encoder = torch.nn.Linear(width, features)
            self.decoder = torch.nn.Linear(features, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.decoder(torch.relu(self.encoder(x)))

    torch.manual_seed(2)
    sae = Autoencoder(HIDDEN, 16).to(torch.bfloat16).requires_grad_(False)
    with model.trace(PROMPT, **ONE, **where):
        block, residual = model.model.layers[3].output
        model.model.layers[3].output = (sae(block), residual)
        pair = nnsight.save(model.model.layers[3].output)
        logits = model.logits.save()
    return home(pair=pair, logits=logits)


@program()
def a_module_saved(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(3)
    probe = torch.nn.Linear(4, 2)
    with model.trace(PROMPT, **ONE, **where):
        logits = model.logits.save()
        copied = nnsight.save(probe)
    return home(logits=logits, copied=copied)


@program()
def a_numpy_array(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    weights = numpy.eye(HIDDEN)[:, ::2]
    with model.trace(PROMPT, **ONE, **where):
        hidden = model.model.layers[3].output[0].float().cpu().numpy()
        weighted = nnsight.save(hidden @ weights.astype("float32"))
        scalar = nnsight.save(hidden.max())
    return home(weighted=weighted, scalar=scalar)


@program()
def an_import_in_the_block(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, **ONE, **where):
        import math

        import torch.nn.functional as functional

        rectified = functional.relu(model.model.layers[3].output[0]).save()
        root = nnsight.save(math.sqrt(2))
    return home(rectified=rectified, root=root)


@program()
def try_and_with_in_the_block(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, **ONE, **where):
        caught = nnsight.save([])
        try:
            model.model.layers[3].output[0][:, :, 0]
        except IndexError as error:
            caught.append(type(error).__name__)
        finally:
            caught.append("finally")
        with torch.no_grad():
            total = model.model.layers[4].output[0].sum().save()
        index = 0
        while index < 3:
            index += 1
        caught.append(index)
    return home(caught=caught, total=total)


@program()
def print_and_warn_in_the_block(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, **ONE, **where):
        import sys
        import warnings

        print("rows", model.model.layers[3].output[0].shape[0])
        print("to stderr", file=sys.stderr)
        warnings.warn("be careful", stacklevel=1)
        logits = model.logits.save()
    return home(logits=logits)


@program()
def what_is_around_the_block_does_not_travel(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    import threading

    lock = threading.Lock()
    with lock:
        with model.trace(PROMPT, **ONE, **where):
            logits = model.logits.save()
    return home(logits=logits)


@program()
def an_outer_name_is_bound_again(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    value, kept = 1, [1]
    with model.trace(PROMPT, **ONE, **where):
        logits = model.logits.save()
        value = value + 1
        saved = nnsight.save(value)
        kept.append(2)
    return home(logits=logits, value=value, saved=saved, kept=kept)
