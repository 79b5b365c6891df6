"""A compiled model reads and writes the cache as eager does, in place, by one op a layer."""

from __future__ import annotations

import pytest
import torch

import sitsopt
from sitsopt import QuantizedKVCache
from sitsopt.measure.explain import explain
from sitsopt.options import Options

from .test_cache import llama, prompt


def test_an_optimized_model_does_to_a_cache_what_eager_does() -> None:
    torch._dynamo.reset()
    model, plain = llama(), llama()
    sitsopt.optimize(model, "auto", lowering="eager")
    caches = [QuantizedKVCache(model.config, 256, window=40, hot_budget=0.3) for _ in range(2)]
    place = None
    kwargs = {"max_new_tokens": 6, "do_sample": False}
    caches[0].prepare(model, 2)
    place = caches[0].layers[0].state.data_ptr()
    got = model.generate(**prompt(), cache=caches[0], **kwargs)
    assert torch.equal(got, plain.generate(**prompt(), cache=caches[1], **kwargs))
    assert caches[0].layers[0].state.data_ptr() == place
    for a, b in zip(*(c.layers for c in caches), strict=True):
        assert int((a.view().parts["hot"] > 0).sum()) > 0
        for name, part in a.view().parts.items():
            torch.testing.assert_close(part, b.view().parts[name], rtol=1e-4, atol=1e-4)
    report = sitsopt.report(model).json()
    assert {r["id"]: r["fired"] for r in report["rules"]}["attention/int4_kv"] == 2


def test_the_recipe_puts_the_cache_in() -> None:
    torch._dynamo.reset()
    model, plain = llama(), llama()
    sitsopt.optimize(model, "auto,int4-kv", lowering="eager", kv_cache={"max_seq_len": 256, "window": 40})  # fmt: skip
    kwargs = {"max_new_tokens": 4, "do_sample": False}
    got = model.generate(**prompt(), **kwargs)
    cache = QuantizedKVCache(model.config, 256, window=40)
    assert torch.equal(got, plain.generate(**prompt(), cache=cache, **kwargs))
    asked = {e.asked: e.got for e in sitsopt.report(model).record.effective}
    assert asked["generate()"] == "a QuantizedKVCache, hotness-aware"
    assert not any(name.startswith("kv_cache") for name in asked)


@pytest.mark.parametrize("lowering", ["eager", pytest.param("auto", marks=pytest.mark.slow)])
def test_compiled_tokens_stay_those_of_eager_as_tiles_are_packed(lowering: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, plain = llama(), llama()
    sitsopt.optimize(model, lowering=lowering)
    caches = [QuantizedKVCache(model.config, 256, window=40, hot_budget=0.3) for _ in range(2)]
    kwargs = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    caches[0].prepare(model, 2)
    stats = torch._dynamo.utils.counters["stats"]
    got = model.generate(**prompt(), cache=caches[0], max_new_tokens=3, **kwargs)
    graphs = stats["unique_graphs"]
    assert not torch._dynamo.utils.counters["graph_break"]
    before = caches[0].layers[0].view().committed
    caches[0].reset()
    got = model.generate(**prompt(), cache=caches[0], max_new_tokens=40, **kwargs)
    assert caches[0].layers[0].view().committed == before + 1
    assert stats["unique_graphs"] == graphs
    want = plain.generate(**prompt(), cache=caches[1], max_new_tokens=40, **kwargs)
    assert torch.equal(got.sequences, want.sequences)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(want.logits), rtol=1e-4, atol=1e-4)  # fmt: skip


def test_explain_says_what_a_token_costs_in_each_layer() -> None:
    options = Options.parse({"recipe": "auto,int4-kv"})
    report, _ = explain(llama(), options, ["decode"])
    [rule] = [r for r in report.json()["rules"] if r["id"] == "attention/int4_kv"]
    assert [s["module"] for s in rule["sites"]] == [f"model.layers.{i}.self_attn" for i in (0, 1)]
    tile = 2 * (
        64 * 16 + (16 + 64) * 2 * 2
    )  # of both heads: keys and values by halves, f16 scales and lows
    for site in rule["sites"]:
        assert site["kv_bytes"]["before"] == 2 * (16 + 16) * 4
        assert site["kv_bytes"]["after"] == tile / 64
        assert site["kv_bytes"]["whole_after"] < site["kv_bytes"]["whole_before"]
    assert f"an old token takes {tile / 64:g} bytes a layer instead of 256" in str(report).replace("\n", " ")  # fmt: skip
