"""sitsopt.optimize: the whole recipe in one call, on a model that stays a model."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    StaticCache,
)

import sitsopt
from sitsopt.session import sessions_of
from sitsopt.spec.errors import SpecError

IDS = torch.tensor([[5, 6, 7, 8]])
GREEDY = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture
def model() -> LlamaForCausalLM:
    torch._dynamo.reset()
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=100, max_position_embeddings=64,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def records(model: torch.nn.Module) -> list:
    return [graph for session in sessions_of(model) for graph in session.record.graphs]


def test_generate_is_compiled_and_equal(model: LlamaForCausalLM) -> None:
    keys, want = list(model.state_dict()), model.generate(IDS, **GREEDY)
    assert sitsopt.optimize(model) is model
    assert torch.equal(model.generate(IDS, **GREEDY), want)
    assert list(model.state_dict()) == keys
    assert {site.rule for graph in records(model) for site in graph.sites} >= {
        "fuse/qkv", "fuse/gate_up", "attention/gqa",
    }  # fmt: skip
    assert "fuse/qkv" in str(sitsopt.report(model))


def test_equal_layers_share_their_code(model: LlamaForCausalLM) -> None:
    sitsopt.optimize(model)
    with torch.no_grad():
        model(IDS, use_cache=False)
    (graph,) = records(model)
    assert graph.fallback == "" and graph.repeat_failed == ""
    assert any({"model.layers.1", "model.layers.2"} <= set(group) for group in graph.repeated)


def test_a_copy_is_not_compiled_and_the_model_saves(model: LlamaForCausalLM, tmp_path) -> None:
    sitsopt.optimize(model)
    with torch.no_grad():
        want = model(IDS, use_cache=False).logits
        other = copy.deepcopy(model)
        assert other._compiled_call_impl is None
        assert (other(IDS, use_cache=False).logits - want).abs().max() < 1e-5
    model.save_pretrained(tmp_path)
    again = LlamaForCausalLM.from_pretrained(tmp_path).eval()
    assert all(
        torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True)
    )


def test_the_static_cache_stays_out_of_the_models_settings(
    model: LlamaForCausalLM, tmp_path
) -> None:
    before = model.generation_config.to_dict()
    sitsopt.optimize(model, lowering="eager")
    sitsopt.optimize(model, lowering="eager")
    found = model.generate(IDS, **GREEDY, return_dict_in_generate=True)
    assert isinstance(found.past_key_values, StaticCache)
    assert model.generation_config.to_dict() == before
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "generation_config.json").read_text())
    assert "cache_implementation" not in saved
    other = copy.deepcopy(model)
    assert other.generate.__self__ is other
    plain = other.generate(IDS, **GREEDY, return_dict_in_generate=True)
    assert isinstance(plain.past_key_values, DynamicCache)
    assert torch.equal(plain.sequences, found.sequences)


@pytest.mark.slow
def test_a_cache_that_the_caller_brings_is_used(model: LlamaForCausalLM) -> None:
    want = model.generate(IDS, **GREEDY)
    sitsopt.optimize(model, lowering="eager")
    mine = DynamicCache(config=model.config)
    assert torch.equal(model.generate(IDS, **GREEDY, past_key_values=mine), want)
    assert mine.get_seq_length() == IDS.shape[1] + GREEDY["max_new_tokens"] - 1
    assert torch.equal(model.generate(IDS, **GREEDY, prompt_lookup_num_tokens=2), want)
    without = model.generate(IDS, **GREEDY, use_cache=False, return_dict_in_generate=True)
    assert without.past_key_values is None and torch.equal(without.sequences, want)
    settings = GenerationConfig(cache_implementation="dynamic", **GREEDY)
    chosen = model.generate(IDS, settings, return_dict_in_generate=True)
    assert isinstance(chosen.past_key_values, DynamicCache)
    assert not isinstance(chosen.past_key_values, StaticCache)


def test_a_lost_rewrite_is_an_error_with_its_near_misses(model: LlamaForCausalLM) -> None:
    sitsopt.optimize(model, expect={"fuse/qkv": "num_hidden_layers + 1"}, lowering="eager")
    wanted = r"fuse/qkv fired 3 times, expected 4"
    with torch.no_grad(), pytest.raises(sitsopt.ExpectationError, match=wanted):
        model(IDS, use_cache=False)


def test_an_excluded_rule_does_not_fire_and_is_told(model: LlamaForCausalLM) -> None:
    sitsopt.optimize(
        model, exclude={"fuse/swiglu": "to see it"}, expect={"fuse/swiglu": None}, lowering="eager"
    )
    with torch.no_grad():
        model(IDS, use_cache=False)
    assert all(site.rule != "fuse/swiglu" for graph in records(model) for site in graph.sites)
    (session,) = sessions_of(model)
    assert any(
        "fuse/swiglu" in e.asked and e.reason == "to see it" for e in session.record.effective
    )


def test_speculation_is_told_and_strict_refuses_it_to_torch_compile(
    model: LlamaForCausalLM,
) -> None:
    want = model.generate(IDS, **GREEDY)
    sitsopt.optimize(model, "auto,speculate", lowering="eager", strict=True)
    assert torch.equal(model.generate(IDS, **GREEDY), want)
    (session,) = sessions_of(model)
    assert any("speculate" in e.asked and e.got == "exact" for e in session.record.effective)
    assert session.record.speculation == "prompt-lookup"
    torch._dynamo.reset()
    alone = torch.compile(
        model, backend="sits", options={"recipe": "auto,speculate", "strict": True}
    )
    with pytest.raises(Exception, match="speculate"):
        alone(IDS, use_cache=False)


def test_a_wrong_option_is_named(model: LlamaForCausalLM) -> None:
    with pytest.raises(SpecError, match="kv_cach"):
        sitsopt.optimize(model, kv_cach={"policy": "recency"})
