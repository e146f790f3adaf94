"""The models that are measured: speed asks for a shape, not for a meaning."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from .lines import ROOT
from .systems import Shape

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def tiny(layers: int = 32) -> Path:
    """A random Llama, 64 wide and ``layers`` deep, in .models; made if it is not there."""
    sys.path.insert(0, str(ROOT / "tools"))
    import models

    path = ROOT / ".models" / ("tiny-llama" if layers == 32 else f"tiny-llama-{layers}")
    models.tiny(path, layers)
    return path


def cpu(layers: int = 32) -> Shape:
    """The random Llama on a CPU."""
    arguments = {
        "max_model_len": 512,
        "kv_cache_memory_bytes": 400_000_000,
        "enforce_eager": True,
        # On a CPU without bfloat16 instructions the multiplications would be nearly all there is.
        "dtype": "float32",
    }
    return Shape(str(tiny(layers)), arguments)


def cuda() -> Shape:
    """A model of Llama-8B's shape with made-up weights, and the tiny model's tokenizer."""
    path = ROOT / ".models" / "llama-8b-shape"
    path.mkdir(parents=True, exist_ok=True)
    for file in tiny().glob("tokenizer*"):
        shutil.copy(file, path)
    (path / "config.json").write_text(json.dumps(LLAMA_8B))
    arguments = {
        "max_model_len": 4096,
        "gpu_memory_utilization": 0.5,
        "load_format": "dummy",
        "enforce_eager": True,
    }
    graphs = {**arguments, "enforce_eager": False}
    return Shape(str(path), arguments, graphs, ["model.layers.16.output"])
