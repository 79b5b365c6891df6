"""`QuantizedKVCache` as transformers uses it: generate(), beams, padding, chunks, what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from sitsopt import QuantizedKVCache
from sitsopt.graph.kv.state import CacheFull

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128, "max_position_embeddings": 1024,
    "pad_token_id": 0,
}  # fmt: skip


def llama(implementation: str = "sdpa") -> Any:
    """A small model with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, attn_implementation=implementation)
    return LlamaForCausalLM(config).eval()


def prompt(batch: int = 2, tokens: int = 150, padding: int = 20) -> dict[str, torch.Tensor]:
    """Ids, the first row padded on the left."""
    ids = torch.randint(1, 128, (batch, tokens), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_cache_in_full_generates_what_the_models_own_does(implementation: str) -> None:
    model = llama(implementation)
    cache = QuantizedKVCache(model.config, 256, "none")
    got = model.generate(**prompt(), cache=cache, max_new_tokens=10, do_sample=False)
    assert torch.equal(got, model.generate(**prompt(), max_new_tokens=10, do_sample=False))


@pytest.mark.parametrize("policy", ["hotness-aware", "recency", "int4", "int8"])
def test_old_tokens_are_close_and_recent_ones_exact(policy: str) -> None:
    model = llama()
    exact = QuantizedKVCache(model.config, 256, "none")
    cache = QuantizedKVCache(model.config, 256, policy, window=40, hot_budget=0.3)
    with torch.no_grad():
        for one in (exact, cache):
            model(**prompt(), cache=one)
    length = int(cache.get_seq_length())
    for a, b in zip(cache.layers, exact.layers, strict=True):
        old = a.view().committed * 64
        assert old >= 64
        for x, y in zip(a.view().read(length), b.view().read(length), strict=True):
            gap = (x - y).abs()[:, :, :length]
            assert gap[:, :, old:].max() == 0
            assert 0 < gap[:, :, :old].max() < 0.2 * y.abs().max()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_both_attentions_of_transformers_are_observed_alike(implementation: str) -> None:
    cache = QuantizedKVCache(llama().config, 256, window=40, hot_budget=0.3)
    model = llama(implementation)
    with torch.no_grad():
        model(**prompt(), cache=cache)
        model(input_ids=torch.ones(2, 1, dtype=torch.long), cache=cache,
              attention_mask=torch.nn.functional.pad(prompt()["attention_mask"], (0, 1), value=1))  # fmt: skip
    state = cache.layers[0].view()
    # 64 queries of the prompt, the 20 padding positions of the first row among them, and one more.
    assert state.parts["seen"][1].tolist()[:2] == [65.0, 37.0 + 1.0]
    total = state.parts["mass"][1].sum()
    assert 0.85 * 65 * 4 < total < 65 * 4  # of 4 heads, without what falls to the sinks
    assert state.meta[:, 2].tolist() == [20, 0]


def test_beams_reorder_it() -> None:
    model = llama()
    cache = QuantizedKVCache(model.config, 256, "none")
    kwargs = {"max_new_tokens": 8, "num_beams": 3, "do_sample": False}
    got = model.generate(**prompt(), cache=cache, **kwargs)
    assert torch.equal(got, model.generate(**prompt(), **kwargs))


def test_a_prompt_in_chunks_is_the_same_prompt() -> None:
    model, whole, parts = llama(), *(QuantizedKVCache(llama().config, 256, "none") for _ in range(2))  # fmt: skip
    ids = prompt(1, padding=0)["input_ids"]
    with torch.no_grad():
        want = model(input_ids=ids, cache=whole).logits[:, -1]
        for chunk in ids.split(37, 1):
            got = model(input_ids=chunk, cache=parts).logits[:, -1]
    torch.testing.assert_close(got, want)


def test_layers_with_a_window_keep_the_window() -> None:
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        **SIZES, sliding_window=32, layer_types=["sliding_attention", "full_attention"],
        query_pre_attn_scalar=16,
    )  # fmt: skip
    model = Gemma3ForCausalLM(config).eval()
    cache = QuantizedKVCache(model.config, 256, "none")
    got = model.generate(**prompt(), cache=cache, max_new_tokens=10, do_sample=False)
    assert torch.equal(got, model.generate(**prompt(), max_new_tokens=10, do_sample=False))
    sliding, full = cache.layers
    assert sliding.state.numel() < 0.6 * full.state.numel()
    with pytest.raises(ValueError, match="at most"):
        cache.crop(-150)


def test_what_does_not_fit_is_refused_and_nothing_changes() -> None:
    model = llama()
    cache = QuantizedKVCache(model.config, 160, window=16)
    with torch.no_grad():
        model(**prompt(), cache=cache)
        before = [layer.state.clone() for layer in cache.layers]
        with pytest.raises(CacheFull, match="max_seq_len of 160"):
            model(input_ids=torch.ones(2, 11, dtype=torch.long), cache=cache)
    assert int(cache.get_seq_length()) == 150
    assert all(torch.equal(a, b.state) for a, b in zip(before, cache.layers, strict=True))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"quantization_policy": "hot"}, "hotness-aware"),
        ({"bits": 3}, "4 or 8"),
        ({"window": -1}, "window"),
        ({"hot_budget": 1.5}, "hot_budget"),
        ({"fallback_threshold": float("nan")}, "fallback_threshold"),
        ({"max_seq_len": 0}, "max_seq_len"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        QuantizedKVCache(llama().config, **wrong)
