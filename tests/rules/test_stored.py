"""`scheme: stored`: a model computes with the very numbers of the file it came from."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from gguf import GGMLQuantizationType, quants
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from sitsopt.graph.archived import comes_from, open_for
from sitsopt.graph.packed import nearest
from sitsopt.rewrite.wanted import is_linear
from sitsopt.runtime.archive.gguf import archived
from sitsopt.session import sessions_of
from tests.backend.support import Mlp, graphs, raised, sits

IDS = torch.arange(6)[None]
STORED = ["default", {"weights": [{"match": "**", "scheme": "stored"}]}]


@pytest.fixture(autouse=True)
def fresh():
    """Each model of a file has a graph of its own: Dynamo would stop compiling for so many."""
    yield
    torch._dynamo.reset()


def kind_of(name):
    """As llama.cpp mixes formats: the head in eight bits, one layer left plain."""
    if name == "lm_head":
        return "Q8_0"
    return None if name.endswith("layers.1.mlp.up_proj") else "Q4_1"


def from_file(dtype=torch.float32, tied=True):
    """A tiny model whose linear layers hold what blocks of a GGUF file stand for."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 60}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=tied)).eval()
    kept = {}
    for name, module in model.named_modules():
        if is_linear(module) and (kind := kind_of(name)):
            form = GGMLQuantizationType[kind]
            blocks = quants.quantize(module.weight.detach().numpy(), form)
            kept[f"{name}.weight"] = archived(name, kind, blocks, "tiny.gguf")
            module.weight.data = torch.from_numpy(quants.dequantize(blocks, form))
    if tied:
        model.tie_weights()
    comes_from(model, lambda _: kept)
    return model.to(dtype)


def packed_sites(model):
    return [s for g in graphs(model) for s in g.sites if s.rule.startswith("weights/")]


@pytest.mark.parametrize("lowering", ["eager", "auto"])
@pytest.mark.parametrize("tied", [True, False])
@torch.no_grad()
def test_logits_are_the_dequantized_models(lowering, tied):
    model = from_file(tied=tied)
    want = model(IDS).logits
    compiled = sits(model, recipe=STORED, lowering=lowering)
    torch.testing.assert_close(compiled(IDS).logits, want, rtol=1e-5, atol=1e-5)
    sites = packed_sites(model)
    rules = {s.place.module: s.rule for s in sites}
    assert rules.pop("lm_head") == "weights/int8"
    assert set(rules.values()) == {"weights/int4"} and len(rules) == 13
    assert all(s.weight_error == 0 for s in sites)
    said = {e.asked: e.reason for e in sessions_of(model)[0].record.effective}
    assert "no such weight" in said["weights: model.layers.1.mlp.up_proj"]


@pytest.mark.slow
@torch.no_grad()
def test_a_half_precision_copy_is_not_rounded_twice():
    """The packed weight has the file's numbers, not those of its bf16 copy."""
    model = from_file(torch.bfloat16)
    exact = copy.deepcopy(from_file())(IDS).logits
    got = sits(model, recipe=STORED, lowering="auto")(IDS).logits.float()
    assert len(packed_sites(model)) == 14
    assert (got - exact).norm() < 1.2 * (model(IDS).logits.float() - exact).norm()


@torch.no_grad()
def test_a_changed_weight_is_rounded_again(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("sitsopt"), "propagate", True)
    model = from_file()
    compiled = sits(model, recipe=STORED, lowering="eager")
    first = compiled(IDS).logits
    model.model.layers[0].mlp.gate_proj.weight.mul_(1.7)
    want = copy.deepcopy(model)
    changed = want.model.layers[0].mlp.gate_proj
    changed.weight = nn.Parameter(nearest(changed.weight, "int4", 32, True, ""))
    torch.testing.assert_close(compiled(IDS).logits, want(IDS).logits, rtol=1e-5, atol=1e-5)
    assert not torch.equal(compiled(IDS).logits, first)
    assert "has changed since it was read from tiny.gguf" in caplog.text


@torch.no_grad()
def test_a_file_that_holds_something_else_is_not_believed():
    model = from_file()
    model.lm_head.weight.add_(1)
    model.model.layers[0].mlp.down_proj.weight.data = torch.zeros(64, 96)
    found = open_for(model)
    assert "holds other values" in found["lm_head.weight"]
    assert "holds other values" in found["model.layers.0.mlp.down_proj.weight"]
    assert not isinstance(found["model.layers.0.mlp.up_proj.weight"], str)


@torch.no_grad()
def test_without_a_file_the_report_says_so():
    model = copy.deepcopy(from_file())  # a copy comes from no file
    compiled = sits(model, recipe=STORED)
    assert torch.equal(compiled(IDS).logits, sits(model, recipe="default")(IDS).logits)
    said = {e.asked: e.reason for s in sessions_of(model) for e in s.record.effective}
    assert said["weights: stored"] == "the model was read from no file with quantized weights"


def test_settings_beside_stored_are_an_error():
    recipe = ["default", {"weights": [{"match": "**", "scheme": "stored", "group": 64}]}]
    assert "`group` beside `stored`" in str(raised(sits(Mlp(), recipe=recipe), torch.ones(2, 16)))
