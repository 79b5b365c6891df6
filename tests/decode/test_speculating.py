"""Drafts of real (small) models: greedy and sampled answers are those without, for every draft."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import StaticCache

from sitsopt import QuantizedKVCache
from sitsopt.decode.drafts import Draft, Lookup, OtherModel, OwnLayers
from sitsopt.decode.fitting import argument, lay_out
from sitsopt.decode.loop import Speculation
from sitsopt.decode.runner import Runner
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


@pytest.mark.parametrize(
    "policy, used", [("none", True), ("int4", False), ("hotness-aware", False)]
)
def test_packed_caches_are_not_speculated_on(policy: str, used: bool) -> None:
    plain = build("llama")
    run = looped(plain, Speculation(Lookup(), 8, adapt=False))
    text = torch.cat([IDS, IDS, IDS], 1)
    states = []
    for model in (plain, run):
        cache = QuantizedKVCache(plain.config, 128, policy, window=16)
        cache.prepare(model)
        given = {"max_new_tokens": 12, "do_sample": False, argument(model): cache}
        states.append((model.generate(text, **given), cache.layers[1].state))
    assert torch.equal(states[0][0], states[1][0])
    assert (RECORDS[id(run)].speculation == "prompt-lookup") == used
    if not used:
        torch.testing.assert_close(states[0][1], states[1][1])
