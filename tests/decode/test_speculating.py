"""Drafts of real (small) models: greedy and sampled answers are those without, for every draft."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import StaticCache

from sitsopt import QuantizedKVCache
from sitsopt.decode.drafts import Draft, Lookup, OtherModel, OwnLayers
from sitsopt.decode.fitting import argument, lay_out, rows_before_packing
from sitsopt.decode.loop import Speculation
from sitsopt.decode.runner import Runner
from sitsopt.graph.kv.layout import Layout, Shape
from sitsopt.graph.kv.state import State, empty
from sitsopt.speculating import NoDraft, first_layers
from tests.decode.test_generate import BATCH, IDS, RECORDS, looped, same
from tests.rules.models import build


def other(model: Any) -> Draft:
    cache = StaticCache(config=model.config, max_cache_len=48)  # smaller than some answers need
    lay_out(model, cache, 1)
    return OtherModel("other", Runner(model, cache, argument(model)), 67)


def drafts(plain: Any) -> dict[str, Draft]:
    short, count = first_layers(plain)
    stirred = build("llama")
    with torch.no_grad():
        for p in stirred.parameters():
            p.add_(torch.randn_like(p) * 0.02)
    return {
        "lookup": Lookup(),
        "layer-skip": OwnLayers("layer-skip", short, count),
        "near": OwnLayers("near", stirred.forward, 2),
        "other": other(build("llama", layers=1)),
    }


@pytest.mark.parametrize("name", ["lookup", "layer-skip", "near", "other"])
def test_answers_are_those_without(name: str) -> None:
    plain = build("llama")
    speculation = Speculation(drafts(plain)[name], 8, adapt=False)
    run = looped(plain, speculation)
    text = torch.cat([IDS, IDS, IDS], 1)
    for kwargs in ({}, {"do_sample": True}, {"repetition_penalty": 1.2, "output_scores": True}):
        same((plain, run), text, max_new_tokens=16, **kwargs)
    assert RECORDS[id(run)].speculation == speculation.draft.name
    assert speculation.tally.blocks > 0 and set(run.rows) <= {32, 1, 4, 9}
    if name == "near":
        assert speculation.tally.accepted > 0
    same((plain, run), BATCH, max_new_tokens=4)
    assert RECORDS[id(run)].speculation.startswith("not used: several")


def test_the_first_layers_are_the_models_own() -> None:
    plain = build("llama", layers=3)
    short, count = first_layers(plain)
    assert count == 2 and len(short.model.layers) == 2 and len(plain.model.layers) == 3
    assert plain.config.num_hidden_layers == 3 and short.config.num_hidden_layers == 2
    assert {id(p) for p in short.parameters()} < {id(p) for p in plain.parameters()}
    with pytest.raises(NoDraft, match="GPT2"):
        first_layers(build("gpt2"))


def long(plain: Any, policy: str, speculation: Speculation | None) -> tuple[Any, Any, Any]:
    """An answer in the course of which tiles are packed, the cache after it, and the model."""
    run = looped(plain, speculation)
    cache = QuantizedKVCache(plain.config, 192, policy, window=16)
    cache.prepare(run)
    text = torch.cat([IDS, IDS, IDS], 1)
    given = {"max_new_tokens": 120, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return run.generate(text, **given, **{argument(run): cache}), cache, run


@pytest.mark.parametrize("policy", ["none", "int4", "int8", "recency"])
@pytest.mark.parametrize("draft", ["lookup", "layer-skip"])
def test_a_packed_cache_is_the_same_with_proposals(policy: str, draft: str) -> None:
    """A tile is packed by a plain step alone, so every token in it is certain, and it is packed when it would be."""
    plain = build("llama")
    want, without, _ = long(plain, policy, None)
    speculation = Speculation(drafts(plain)[draft], 8, adapt=False)
    found, cache, run = long(plain, policy, speculation)
    assert torch.equal(found, want)
    assert RECORDS[id(run)].speculation == speculation.draft.name
    assert speculation.tally.proposed > speculation.tally.accepted  # some were taken back
    for ours, theirs in zip(cache.layers, without.layers, strict=True):
        length = int(theirs.cumulative_length)
        assert int(ours.cumulative_length) == length
        assert ours.view().committed == theirs.view().committed == (policy != "none") * 2
        for one, other in zip(ours.view().read(length), theirs.view().read(length), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_a_cache_that_rates_its_tiles_is_not_speculated_on() -> None:
    plain = build("llama")
    want, without, _ = long(plain, "hotness-aware", None)
    found, cache, run = long(plain, "hotness-aware", Speculation(Lookup(), 8, adapt=False))
    assert torch.equal(found, want)
    assert "most attention" in RECORDS[id(run)].speculation
    assert torch.equal(cache.layers[1].state, without.layers[1].state)


@pytest.mark.parametrize("recent", [0, 16, 40])
def test_rows_before_a_tile_is_packed(recent: int) -> None:
    """Held against what the cache does: one row more packs, that many do not."""
    layout = Layout("f32", 400, recent)
    shape = Shape(layout, 1, 2, 2)
    for length in range(0, 300, 7):
        rows = rows_before_packing({layout}, length)
        for more in (rows, rows + 1):
            state = State(empty(shape, 1, torch.device("cpu")), shape)
            if length:
                state.append(0, torch.ones(1, 1, length, 2), torch.ones(1, 1, length, 2))
            before = state.committed
            state.append(length, torch.ones(1, 1, more, 2), torch.ones(1, 1, more, 2))
            assert (state.committed > before) == (more > rows)
