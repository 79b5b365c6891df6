"""A text forced through a cache is scored as one pass over it is; zeroed tiles show in the score."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from sitsopt.measure.check import CheckOptions, _kv_failures, check
from sitsopt.measure.decode import Decoder
from sitsopt.measure.engines import SitsOptions
from sitsopt.measure.models import Loaded, load
from sitsopt.measure.through_cache import Length, score
from sitsopt.spec.recipe_form import KVCache


@pytest.fixture
def loaded(tiny_llama: Path) -> Loaded:
    torch._dynamo.reset()
    return load(str(tiny_llama), "f32", device="cpu")


def ids_for(loaded: Loaded, tokens: int) -> torch.Tensor:
    vocabulary = loaded.model.config.vocab_size
    return torch.randint(1, vocabulary, (1, tokens), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("scored", [64, 208])
def test_it_is_the_perplexity_of_one_pass(loaded: Loaded, scored: int) -> None:
    ids = ids_for(loaded, 208)
    found = score(Decoder(loaded.model, loaded.model, 208), ids, Length(208, scored))
    with torch.no_grad():
        logits = loaded.model(input_ids=ids).logits[0].float()
    first = max(208 - scored, 1)
    want = F.cross_entropy(logits[first - 1 : -1], ids[0, first:]).exp()
    assert found.perplexity == pytest.approx(float(want), rel=1e-5)
    assert (found.packed_reads, found.zeroed) == (0.0, None)


def test_packed_tiles_are_what_is_read(loaded: Loaded) -> None:
    kv = KVCache(policy="recency", window=32, sinks=4, bits=8)
    ids = ids_for(loaded, 256)
    full = score(Decoder(loaded.model, loaded.model, 256), ids, Length(256, 16))
    found = score(Decoder(loaded.model, loaded.model, 256, kv), ids, Length(256, 16))
    # One step of 16: (256 - 32) // 64 = 3 tiles are packed, all of them but the four sinks.
    assert found.packed_reads == pytest.approx((3 * 64 - 4) / 256)
    assert found.perplexity == pytest.approx(full.perplexity, rel=1e-2)
    assert found.zeroed is not None
    lost = abs(found.zeroed / full.perplexity - 1)
    assert lost > 10 * abs(found.perplexity / full.perplexity - 1)


def test_a_short_model_gets_a_short_text() -> None:
    assert Length.within(7000, 2000, 10**6) == Length(6992, 1984)
    assert Length.within(7000, 2000, 1024) == Length(1024, 288)


def test_check_reads_a_text_through_the_cache_of_its_recipe(loaded: Loaded) -> None:
    sits = SitsOptions("auto,int4-kv", set=("kv_cache.window=32",), extra={"lowering": "eager"})
    options = CheckOptions(1, 2, 64, 64, False, 50.0, sits, kv_tokens=160, kv_scored=32)
    one = check(loaded, options)["kv_cache"]
    assert (one["policy"], one["tokens"], one["scored"]) == ("hotness-aware", 160, 32)
    assert 0.3 < one["packed_reads"] < 0.8
    assert one["ppl_sits"] == pytest.approx(one["ppl_eager"], rel=0.1)
    assert one["ppl_zeroed"] != one["ppl_sits"]


@pytest.mark.parametrize(
    ("delta", "zeroed", "said"),
    [
        (0.2, 90.0, []),
        (-2.0, 90.0, []),
        (0.4, 90.0, ["moved by +0.400 %"]),
        (float("nan"), 90.0, ["moved by"]),
        (0.2, 10.1, ["they are not read"]),
        (0.2, None, ["packed no tile"]),
    ],
)
def test_when_it_fails(delta: float, zeroed: float | None, said: list[str]) -> None:
    one = {"ppl_delta_pct": delta, "ppl_sits": 10.0, "ppl_zeroed": zeroed, "tokens": 160}
    found = _kv_failures(one, 0.3)
    assert len(found) == len(said)
    assert all(word in line for word, line in zip(said, found, strict=True))
