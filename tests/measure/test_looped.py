"""`run`, `bench` and `check` decode as `generate()` does, with proposals where the recipe asks for them."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from sitsopt.measure import text
from sitsopt.measure.check import CheckOptions, check
from sitsopt.measure.decode import Decoder
from sitsopt.measure.engines import SitsOptions, torch_engine
from sitsopt.measure.errors import InputError
from sitsopt.measure.looped import Looped
from sitsopt.measure.models import Loaded, load
from sitsopt.measure.stress import StressOptions, stress
from sitsopt.measure.stress_plot import svg

EAGER = {"lowering": "eager"}
SPECULATES = SitsOptions("auto,speculate", extra=EAGER)


@pytest.fixture
def loaded(tiny_llama: Path) -> Loaded:
    torch._dynamo.reset()
    return load(str(tiny_llama), "f32", device="cpu")


@pytest.mark.parametrize("recipe", ["auto", "auto,speculate", "auto,speculate,int4-kv"])
def test_answers_are_those_of_the_plain_loop(loaded: Loaded, recipe: str) -> None:
    ids, new = text.of_kind(loaded, "copy", 80), 32
    window = ("kv_cache.window=16",) if "kv" in recipe else ()
    sits = SitsOptions(recipe, set=window, extra=EAGER)
    engine = torch_engine("sits", loaded, 80 + new + 1, sits)
    looped = engine.decoder
    assert isinstance(looped, Looped)
    plain = Decoder(loaded.model, loaded.model, looped.max_len, looped.kv)
    want = plain.run(ids, new).tokens
    for _ in range(2):
        assert engine.run(ids, new).tokens == want
    assert [*looped.stream(ids, set())][: new + 1] == want
    assert [*looped.stream(ids, {want[9]})] == want[: want.index(want[9])]
    tokens, logits = looped.answer(ids, new + 1)
    assert tokens == want == logits.argmax(-1).tolist()
    told = engine.told()
    assert told["loop"] == "fast" and told["loop_why"]
    if recipe == "auto":
        assert told["speculation"] is None and told["speculated"] is None
    elif recipe == "auto,speculate":
        assert told["speculation"] == "prompt-lookup" and told["speculated"]["steps"] > 0
    else:
        assert told["speculation"].startswith("not used: ")
    assert "nothing" not in {e.got for e in looped.record.effective if "speculate" in e.asked}


def test_check_reads_what_was_proposed(loaded: Loaded) -> None:
    small = CheckOptions(prompts=2, new=24, tokens=128, window=64, rewrites=False, sits=SPECULATES)
    result = check(loaded, small)
    assert result["passed"] and result["tokens_equal"] and result["speculation"] == "prompt-lookup"
    assert result["speculated"]["steps"] > 0


def test_the_stress_report(loaded: Loaded) -> None:
    options = StressOptions(
        ("copy",), ("prompt-lookup", "layer-skip"), (1, 16), (0.0, 1.2), 60, 20, 1, SPECULATES
    )
    result = stress(loaded, options)
    rows = result["speculation"]
    assert len(rows) == 2 * 2 * 2 and len(result["adaptive"]) == 2 * 2
    for row in rows:
        assert row.keys() >= {"draft", "length", "temperature", "text", "proposed", "accepted", "kl", "ratio"}  # fmt: skip
        assert row["same_tokens"] and 0 <= row["accepted"] <= row["proposed"] and row["ratio"] > 0
        assert row["kl"] is None if row["proposed"] == 0 else row["kl"] > -1e-6
        if row["draft"] == "layer-skip":  # it proposes wherever there is room for a token
            assert row["drafted"] >= 0.9 or row["length"] > 1
    picture = svg(rows)
    ElementTree.fromstring(picture)
    assert picture.count("<circle") > len(rows) and "layer-skip" in picture


def test_kinds_of_text(loaded: Loaded, tmp_path: Path) -> None:
    page = tmp_path / "page.txt"
    page.write_text("some text of the user's own, " * 9)
    for kind in (*text.KINDS, str(page)):
        ids = text.of_kind(loaded, kind, 90)
        assert ids.shape[0] == 1 and 0 < ids.shape[1] <= 90
    copied = text.of_kind(loaded, "copy", 90)[0].tolist()
    assert copied[:40] == copied[40:80] and copied[80:] == copied[:10]
    page.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(InputError, match=r"page\.txt"):
        text.of_kind(loaded, str(page), 90)


def test_what_cannot_be_stressed_is_said(loaded: Loaded) -> None:
    with pytest.raises(InputError, match="copy, code, open, or a file"):
        StressOptions(("poem",)).check()
    with pytest.raises(InputError, match="--recipe auto,speculate"):
        stress(loaded, StressOptions(("copy",), sits=SitsOptions("auto", extra=EAGER)))
