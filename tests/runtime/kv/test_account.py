"""What a cache says it holds is what lies in its tensors."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import Any

import pytest
import torch

import sitsopt
from sitsopt import QuantizedKVCache
from sitsopt.graph.kv.layout import spans
from sitsopt.graph.kv.sizes import cost

from .test_cache import llama, prompt


def filled(policy: str = "hotness-aware", **more: Any) -> QuantizedKVCache:
    model = llama()
    given = {"window": 40, "hot_budget": 0.3} | more
    cache = QuantizedKVCache(model.config, 256, policy, **given)
    with torch.no_grad():
        model(**prompt(tokens=200), cache=cache)
    return cache


def test_bytes_by_tier_add_up() -> None:
    cache = filled()
    for number, one in cache.account().layers.items():
        layer = cache.layers[number]
        state, shapes = layer.view(), spans(layer.shape)
        token = 2 * (16 + 16) * 4  # two heads, keys and values, f32
        assert state.committed == 2
        packed = sum(s.bytes for name, s in shapes.items() if name.split("_")[0] in "kv")
        assert one.in_use["packed"] == 2 * packed * 2 // layer.layout.old
        slots = int((state.parts["hot"] > 0).sum())
        assert slots > 0 and one.in_use["hot"] == slots * 64 * (16 + 16) * 4
        assert one.in_use["recent"] == 2 * (200 - 128) * token
        assert one.in_use["sinks"] == 2 * 4 * token
        assert one.full == 2 * 200 * token and one.allocated == layer.state.numel()
        assert sum(one.in_use.values()) < one.allocated
        assert one.promoted == slots and one.promoted + one.demoted == 2 * 2 * 2
        assert one.bits == pytest.approx(32 * sum(one.in_use.values()) / one.full)


def test_the_hottest_tiles_are_those_that_got_most() -> None:
    cache = filled()
    parts = cache.layers[1].view().parts
    row, head, tile, rate = cache.account().layers[1].hottest[0]
    every = parts["mass"][:, :, :2] / parts["seen"][:, None, :2]
    assert rate == pytest.approx(float(every.max()), rel=1e-3)
    assert float(every[row, head, tile]) == pytest.approx(rate, rel=1e-3)


@pytest.mark.parametrize(
    ("policy", "map_"), [("recency", "sprr"), ("int8", "pprr"), ("none", "rrrr")]
)
def test_the_map_says_how_a_tile_is_kept(policy: str, map_: str) -> None:
    found = filled(policy, sinks=4).account()
    # The second sequence starts at 0; the first, whose sinks lie behind its padding of 20, too in tile 0.
    assert [one.map for one in found.layers.values()] == [map_] * 2
    assert found.json()["in_use"]["hot"] == 0


def test_the_report_has_it_and_the_picture_is_whole() -> None:
    torch._dynamo.reset()
    model = llama()
    more = {"max_seq_len": 256, "window": 40, "hot_budget": 0.3}
    sitsopt.optimize(model, "auto,int4-kv", lowering="eager", kv_cache=more)
    model.generate(**prompt(), max_new_tokens=30, do_sample=False)
    report = sitsopt.report(model)
    told = report.json()["cache"]
    assert told["tokens"] == 179 and sorted(told["layers"]) == [0, 1]
    assert "cache, hotness-aware: 179 tokens take" in str(report)
    svg = report.cache.svg()  # type: ignore[union-attr]
    cells = ET.fromstring(svg).findall(".//{*}rect/{*}title")
    assert len(cells) == 2 * 3  # 179 tokens are three tiles, in each of two layers
    assert svg in report.html()


def test_a_sequence_in_8_bits_is_a_little_over_half() -> None:
    shape = filled("int8", hold=16).layers[0].shape
    one = cost(shape)
    assert one.after / one.before == pytest.approx((16 + 2 * 16 / 64 + 16 + 2) / (2 * 16 * 4))
