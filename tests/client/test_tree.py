"""The served tree: it reads like the real one, and it is one that nnsight can work with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_server import TOKEN, TREE, FakeServer, module
from nnsight.modeling.vllm import VLLM

from jupyter_nnsight_serve import connect
from jupyter_nnsight_serve.client import HubError
from jupyter_nnsight_serve.client.tree import build

PRINTED = """\
LlamaForCausalLM(
  (model): LlamaModel(
    (embed_tokens): VocabParallelEmbedding(num_embeddings=512)
    (layers): ModuleList(
      (0-3): 4 x LlamaDecoderLayer(
        (self_attn): LlamaAttention(
          (qkv_proj): QKVParallelLinear(in_features=64, output_features=192)
          (o_proj): RowParallelLinear()
        )
        (mlp): LlamaMLP(
          (gate_up_proj): MergedColumnParallelLinear()
        )
      )
    )
    (norm): RMSNorm(hidden_size=64, eps=1e-05)
  )
  (lm_head): VocabParallelEmbedding(num_embeddings=512)
  (logits_processor): LogitsProcessor(vocab_size=512)
  (logits): pre-sampling logits for this step
  (samples): token ids drawn from logits this step
)"""


def test_it_prints_like_the_real_one(model: Any) -> None:
    assert repr(model) == PRINTED
    assert isinstance(model, VLLM)
    assert model.config.vocab_size == 512 and model.name == "some/model"
    assert not model.dispatched


def test_a_module_in_two_places_is_one(model: Any) -> None:
    assert model.lm_head is model.model.embed_tokens
    assert model.lm_head.path == "model.model.embed_tokens"
    paths = [path for path, _ in model.named_modules()]
    assert len(paths) == len(set(paths))


def test_every_envoy_travels_by_its_path(model: Any) -> None:
    for path, envoy in model.named_modules():
        assert envoy.__dict__["_persistent_id"] == f"Envoy:{path}"


def test_names_that_torch_or_nnsight_have_themselves(server: FakeServer) -> None:
    names = ("output", "type", "forward", "half", "training", "input", "children")
    server.tree = module("Odd", inner=module("Inner", **{n: module("Leaf") for n in names}))
    with pytest.warns(UserWarning, match="E_output"):
        model = connect(server.url, TOKEN).model
    inner = model.inner
    assert inner.E_output.path == "model.inner.output" and inner.half.path == "model.inner.half"
    assert inner._module._modules.keys() == set(names)
    assert "(E_output/output): Leaf()" in repr(model)


def test_what_is_measured_and_indexed() -> None:
    leaves = {str(index): module("Leaf") for index in range(3)}
    root = build(
        module(
            "Root",
            a={**module("ModuleList"), "children": leaves},
            b={**module("Sequential"), "children": leaves},
            c={**module("LayerList"), "children": leaves},
            d=module("ModuleDict", x=module("Leaf")),
            e=module("ModuleList"),
            f=module("Plain", **leaves),
        )
    )
    parts = dict(root.named_children())
    assert len(parts["a"]) == len(parts["b"]) == len(parts["c"]) == 3
    assert isinstance(parts["c"], torch.nn.ModuleList) and len(parts["e"]) == 0
    assert type(parts["c"]).__name__ == "LayerList" and "x" in parts["d"]
    assert not hasattr(parts["f"], "__len__")


def test_classes_of_one_name_are_one_and_say_where_they_are_from() -> None:
    root = build(TREE)
    layers = root._modules["model"]._modules["layers"]
    assert type(layers[0]) is type(layers[1])
    assert type(layers[0]).__module__ == "vllm.models"


def test_parameters_where_the_server_tells_them() -> None:
    node = {**module("Linear"), "parameters": {"weight": ["bfloat16", [4, 8]]}}
    weight = build(node).weight
    assert weight.shape == (4, 8) and weight.dtype == torch.bfloat16 and weight.is_meta


@pytest.mark.parametrize("tree", [{}, {"class": 3}, {"class": "A", "children": {"b": None}}])
def test_nonsense(tree: Any) -> None:
    with pytest.raises(HubError, match="same version"):
        build(tree)


def test_a_deep_tree_is_there_at_once(server: FakeServer) -> None:
    import time

    layers = {str(index): TREE["children"]["model"]["children"]["layers"] for index in range(20)}
    server.tree = module("Deep", layers={**module("ModuleList"), "children": layers})
    hub = connect(server.url, TOKEN)
    began = time.monotonic()
    model = hub.model
    assert len(model.modules()) > 500 and time.monotonic() - began < 1
