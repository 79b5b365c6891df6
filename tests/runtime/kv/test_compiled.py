"""A compiled model reads and writes the cache as eager does, in place, by one op a layer."""

from __future__ import annotations

import torch

import sitsopt
from sitsopt import QuantizedKVCache

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
