"""What went wrong with caches elsewhere: K01, K05, K13 and K14 of the cases this project collects."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import Phi3Config, Phi3ForCausalLM

import sitsopt  # noqa: F401  registers the ops
from sitsopt import QuantizedKVCache
from sitsopt.graph.kv.layout import Layout
from sitsopt.runtime.kv.layer import QuantizedLayer

Op = tuple[str, Any]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def values(layer: QuantizedLayer) -> tuple[torch.Tensor, torch.Tensor]:
    length = int(layer.get_seq_length())
    k, v = layer.view().read(length)
    return k[:, :, :length], v[:, :, :length]


def test_k01_every_operation_is_that_of_a_full_cache_of_the_same_values() -> None:
    layer = QuantizedLayer(Layout("f32", 512, 16, 4, 4, 0.75, 0.0))
    for t in range(5):
        layer.update(random(2, 2, 40, 16, seed=t), random(2, 2, 40, 16, seed=50 + t))
    assert layer.view().committed == 2
    ref = values(layer)
    for name, given in [("reorder_cache", torch.tensor([1, 0])), ("crop", -3), ("crop", -80),
                        ("batch_repeat_interleave", 2), ("batch_select_indices", torch.tensor([1, 3]))]:  # fmt: skip
        getattr(layer, name)(given)
        ref = tuple(_same(t, name, given) for t in ref)  # type: ignore[assignment]
        assert int(layer.get_seq_length()) == ref[0].shape[2]
        for got, want in zip(values(layer), ref, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0)


def _same(t: torch.Tensor, name: str, given: Any) -> torch.Tensor:
    if name == "crop":
        return t[:, :, : t.shape[2] + given]
    if name == "batch_repeat_interleave":
        return t.repeat_interleave(given, 0)
    return t[given]


@pytest.mark.parametrize("bits", [4, 8])
def test_k05_a_constant_outlier_channel_costs_the_others_nothing(bits: int) -> None:
    k, q = random(1, 2, 64, 16), random(1, 2, 8, 16, seed=1)
    k[..., 3] += 80.0
    layer = QuantizedLayer(Layout("f32", 128, 0, bits))
    layer.update(k, k)
    layer.update(k[:, :, :1], k[:, :, :1])
    assert layer.view().committed == 1
    packed = values(layer)[0][:, :, :64]
    assert not torch.equal(packed, k)
    weights = [F.softmax(q @ t.mT / 4, -1) for t in (k, packed)]
    assert (weights[0] - weights[1]).abs().max() < 0.1


def test_k13_keys_of_short_factors_are_not_kept_past_the_switch() -> None:
    torch.manual_seed(0)
    config = Phi3Config(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128, max_position_embeddings=256, original_max_position_embeddings=80, pad_token_id=0,
        rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8,
                         "long_factor": [8.0] * 8, "original_max_position_embeddings": 80,
                         "partial_rotary_factor": 1.0},
    )  # fmt: skip
    model = Phi3ForCausalLM(config).eval()
    ids = torch.randint(1, 128, (1, 78), generator=torch.Generator().manual_seed(1))
    for policy in ("none", "int8"):
        cache = QuantizedKVCache(model.config, 256, policy)
        got = model.generate(ids, cache=cache, max_new_tokens=8, do_sample=False)
        want = model.generate(ids, max_new_tokens=8, do_sample=False)
        assert torch.equal(got, want), policy


@pytest.mark.parametrize(("queries", "before"), [(1, 8), (3, 6), (9, 0), (5, 70), (40, 90)])
def test_k14_a_query_sees_what_its_mask_says(queries: int, before: int) -> None:
    dim = 128
    layer = QuantizedLayer(Layout("f32", 192, 16, 4, 0, 0.75, 0.0))
    total = before + queries
    marks = torch.zeros(1, 1, total, dim)
    marks[0, 0, torch.arange(total), torch.arange(total) % dim] = 1.0
    keys = torch.zeros(1, 1, total, dim)
    if before:
        layer.update(keys[:, :, :before], marks[:, :, :before])
    mask = torch.arange(192) <= before + torch.arange(queries).unsqueeze(1)
    layer.update(keys[:, :, :0], marks[:, :, :0])
    out = torch.ops.sits.kv_attention_(
        keys[:, :, :queries], keys[:, :, before:], marks[:, :, before:], layer.state,
        layer.cumulative_length, mask[None, None], layer.layout_text, 1.0,
    )  # fmt: skip
    for row in range(queries):
        seen = before + row + 1
        want = marks[0, 0, :seen].sum(0) / seen
        torch.testing.assert_close(out[0, 0, row], want, rtol=1e-3, atol=1e-4)
