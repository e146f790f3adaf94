"""Programs with a LoRA adapter on the request.

The adapter is made here, random with a fixed seed: adapters as trained begin as a no-op, and a
no-op would pass a test that never applied it.
"""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from .registry import HIDDEN, OTHER, PROMPT, QKV, Split, home, program

LAYERS = 32
RANK = 8
SCALE = 0.2
ONE = {"temperature": 0.0, "max_tokens": 1}


@functools.cache
def adapter() -> Path:
    """The directory of the adapter, made once in a process and removed at its end."""
    from safetensors.torch import save_file

    directory = Path(tempfile.mkdtemp(prefix="adapter-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for layer in range(LAYERS):
        for name in ("q_proj", "v_proj"):
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{stem}.lora_A.weight"] = (
                torch.randn(RANK, HIDDEN, generator=generator) * SCALE
            )
            weights[f"{stem}.lora_B.weight"] = (
                torch.randn(HIDDEN, RANK, generator=generator) * SCALE
            )
    save_file(weights, str(directory / "adapter_model.safetensors"))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj", "v_proj"],
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def lora_request() -> Any:
    """A request for the adapter."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("adapter", 1, str(adapter()))


@program(adapter=True, split={"qkv": Split(QKV)})
def an_adapter(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    request = lora_request()
    with model.trace(PROMPT, lora_request=request, **ONE, **where):
        qkv = model.model.layers[5].self_attn.qkv_proj.output[0].save()
        adapted = model.logits.save()
    with model.trace(PROMPT, **ONE, **where):
        plain = model.logits.save()
    return home(qkv=qkv, adapted=adapted, plain=plain, differ=not torch.equal(adapted, plain))


@program(adapter=True, batched=True)
def an_adapter_on_one_of_two_invokes(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    request = lora_request()
    with model.trace(**ONE, **where) as tracer:
        with tracer.invoke(PROMPT, lora_request=request):
            adapted = model.model.layers[5].output[0].save()
        with tracer.invoke(OTHER):
            plain = model.model.layers[5].output[0].save()
    return home(adapted=adapted, plain=plain)


@program(adapter=True)
def an_edit_on_an_adapted_module(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    request = lora_request()
    with model.trace(PROMPT, lora_request=request, **ONE, **where):
        model.model.layers[5].self_attn.qkv_proj.output[0][:] *= 0.5
        attention = model.model.layers[5].self_attn.output.save()
    return home(attention=attention)
