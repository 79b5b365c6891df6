"""Where every shipped rule fires on unmodified models, against docs/rules-fired.md; values equal to eager.

UPDATE_GOLDENS=1 python -m pytest tests/rules/test_fire_table.py      # all models; writes the table
"""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from sitsopt.pipeline import Plan, process
from sitsopt.rewrite.order import STAGES, ordered
from sitsopt.rewrite.record import GraphRecord
from sitsopt.runtime.lower import Lowering
from sitsopt.spec.locate import rule_dirs
from sitsopt.spec.rule import load_rules
from tests.rules.models import MODELS, build, call

TABLE = Path(__file__).parents[2] / "docs" / "rules-fired.md"
UPDATE = bool(os.environ.get("UPDATE_GOLDENS"))

# Weights are swapped where a recipe says so, not wherever a rule fits.
ALL = ordered(r for r in load_rules(rule_dirs(())) if r.stage != "weights")

# MODEL, then what differs from one forward pass in f32 with torch's own attention.
VARIANTS = [
    *[f"{name} eager" for name in ("llama", "gemma3", "gpt2", "bert", "t5", "phi")],
    *[f"{name} bf16" for name in ("llama", "gemma3", "cohere", "levit", "t5")],
    *[f"{name} decode" for name in ("llama", "qwen3", "gemma3", "gpt2")],
    "llama prefill",
    "llama quantized",
]
CASES = [*MODELS, *VARIANTS]
# Few enough for every run; test_the_sample_shows_every_rule says when a new rule needs another.
SAMPLE = [
    "llama decode",
    "llama bf16",
    "llama quantized",
    "gemma2",
    "phi3",
    "gpt2",
    "cohere",
    "flan_t5",
    "whisper",
    "vit",
    "levit",
    "resnet",
]


def run(case: str) -> tuple[Counter[str], Any, Any]:
    """Distinct sites by rule, and what eager and the rewritten graphs (run without a compiler) return."""
    name, *how = case.split()
    attn = "eager" if "eager" in how else "sdpa"
    phase = next((p for p in ("decode", "prefill", "quantized") if p in how), "forward")
    model = build(name, attn, torch.bfloat16 if "bf16" in how else torch.float32)
    plan = Plan(ALL, {"channels_last": True}, Lowering("eager", repeat=False), strict=True)
    records: list[GraphRecord] = []

    def backend(gm: Any, inputs: Any, **_: Any) -> Any:
        records.append(GraphRecord(f"graph{len(records)}"))
        return process(gm, inputs, plan, records[-1]).call()

    torch._dynamo.reset()
    with torch.no_grad():
        eager = _results(model, *call(model, phase))
        ours = _results(torch.compile(model, backend=backend), *call(model, phase))
    assert records
    return Counter(s.rule for r in records for s in r.sites), eager, ours


def _results(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that a call returns, and those that it writes to a cache."""
    out = model(*args, **kwargs)
    cache = kwargs.get("past_key_values")
    written = [t for layer in cache.layers for t in _held(layer)] if cache else []
    values = [value for key, value in out.items() if key != "past_key_values"]
    return [t for t in (*tree_leaves(values), *written) if isinstance(t, torch.Tensor)]


def _held(layer: Any) -> list[torch.Tensor]:
    quantized = hasattr(layer, "view")
    return [*layer.view().parts.values()] if quantized else [layer.keys, layer.values]


@pytest.mark.parametrize(
    "case", [c if c in SAMPLE else pytest.param(c, marks=pytest.mark.slow) for c in CASES]
)
def test_rules_fire_as_recorded_and_change_no_value(case: str) -> None:
    counts, eager, ours = run(case)
    bound = 5e-2 if "bf16" in case else 1e-4
    for old, new in zip(eager, ours, strict=True):
        torch.testing.assert_close(new, old, rtol=bound, atol=bound)
        assert new.stride() == old.stride()
    if UPDATE:
        table = {c: t for c, t in read().items() if c in CASES} | {case: counts}
        TABLE.write_text(written(table))
    assert dict(counts) == dict(read()[case])


def test_every_shipped_rule_fires_on_an_unmodified_model() -> None:
    fired = {rule for counts in read().values() for rule in counts}
    shipped = {rule.id for rule in ALL}
    assert shipped - fired == set(), "these fire nowhere"
    assert fired - {rule.id for rule in ALL} == set(), "these are shipped no longer"


def test_the_sample_shows_every_rule() -> None:
    """Of the stages that change what runs; spellings have tests of their own, in test_recompose."""
    table = read()
    shown = {rule for case in SAMPLE for rule in table[case]}
    fired = {rule for counts in table.values() for rule in counts}
    assert {r for r in fired if not r.startswith(("clean/", "recompose/"))} - shown == set()


# -- the table ------------------------------------------------------------------------------------------

HEAD = """# Where the rules fire

How often each rule fires on the unmodified classes of transformers, two layers each (`tests/rules/models.py`), in
one forward pass; every rule is on, those that recipes leave out as well. `eager`: attention spelled out;
`decode`, `prefill`: on a static cache; `quantized`: a step on a quantized one. Written by `UPDATE_GOLDENS=1 python -m pytest tests/rules/test_fire_table.py`,
and compared with what fires by the same test.
"""


def written(table: dict[str, Counter[str]]) -> str:
    lines = [HEAD.rstrip(), ""]
    for stage in STAGES:
        rules = [rule.id for rule in ALL if rule.stage == stage]
        if not rules:
            continue
        lines += [f"## {stage}", "", "| rule | fires |", "|---|---|"]
        for rule in sorted(rules):
            places = [
                f"{case} {table[case][rule]}" for case in CASES if table.get(case, {}).get(rule)
            ]
            lines.append(f"| `{rule}` | {', '.join(places)} |")
        lines.append("")
    quiet = [case for case in CASES if case in table and not table[case]]
    return "\n".join([*lines, *([f"Nothing fires on: {', '.join(quiet)}.", ""] if quiet else [])])


def read() -> dict[str, Counter[str]]:
    table: dict[str, Counter[str]] = {case: Counter() for case in CASES}
    text = TABLE.read_text() if TABLE.exists() else ""
    for rule, places in re.findall(r"^\| `([^`]+)` \| (.*) \|$", text, re.MULTILINE):
        for place in filter(None, places.split(", ")):
            case, _, count = place.rpartition(" ")
            table.setdefault(case, Counter())[rule] = int(count)
    return table
