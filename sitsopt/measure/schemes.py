"""The table of all ways to pack a model's weights: bits, accuracy, speed, memory.

    python -m sitsopt.measure.schemes smollm2 --write docs/schemes.md
    sitsopt bench smollm2 --against sits:auto,int8 --json > bench.json
    python -m sitsopt.measure.schemes smollm2 --write docs/schemes.md --bench bench.json

Accuracy is measured in f32 with each layer's weight replaced by what its packed form stands for, on text that nothing
was calibrated on. Results lie beside the page (`schemes.json`) and stay until they are measured again.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sitsopt.calibrate.choose import apply, form_of, packs
from sitsopt.calibrate.passes import lent, linears, output, put, weight_of
from sitsopt.graph import calibrated
from sitsopt.graph.packed import nearest, unpack
from sitsopt.measure import text
from sitsopt.measure.cachedir import replace_file
from sitsopt.measure.calibrate import head_of
from sitsopt.measure.models import Loaded, load
from sitsopt.planning import class_names
from sitsopt.rewrite.wanted import wanted_weights
from sitsopt.spec.recipe import load_recipe

NEAREST = "weights.*.rounds=null"
ROWS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("int8", "auto,int8", ()),
    ("fp8, nearest", "auto,fp8", (NEAREST,)),
    ("fp8", "auto,fp8", ()),
    ("int4, nearest", "auto,int4", (NEAREST,)),
    ("int4", "auto,int4", ()),
    ("int4, 4.75 bits", "auto,int4", ("weights.*.effective_bits=4.75",)),
)


def measure(
    loaded: Loaded, tokens: int = 16384, window: int = 512, only: str = "",
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Each row's bits and accuracy, by its name; `eager` is the model itself. Perplexity for a model with logits, mean
    cosine to the model's own mean-pooled embeddings for one without."""
    rows = text.windows(loaded.tokenizer, tokens, min(window, _longest(loaded))).to(loaded.device)
    wanted = [row for row in ROWS if not only or row[0] in only.split(";")]
    gauge = _Gauge(loaded.model, rows)
    say("eager")
    found = {"eager": gauge.row(32.0, None)}
    for name, recipe, overrides in wanted:
        say(name)
        weights, bits, how = packed_weights(loaded, recipe, overrides)
        with lent(loaded.model, list(weights)):
            modules = linears(loaded.model)
            for layer, weight in weights.items():
                put(modules[layer], weight)
            found[name] = gauge.row(bits, how)
    return found


def packed_weights(
    loaded: Loaded, recipe: str, overrides: tuple[str, ...] = ()
) -> tuple[dict[str, Tensor], float, str]:
    """What each packed layer's weight stands for, bits a weight over all linear layers, and whether calibrated."""
    model = loaded.model
    parsed = load_recipe(recipe, class_names(model), (), overrides)
    wanted = wanted_weights(model, lambda: model, parsed, [])
    assert wanted is not None
    lines, _ = apply(wanted, model)
    values, bits, total = {}, 0.0, 0
    for name, module in linears(model).items():
        weight, entry = weight_of(module), wanted.entries.get(name)
        total += weight.numel()
        if entry is None or not packs(entry):
            bits += 16 * weight.numel()
            continue
        form, numbers = form_of(entry), wanted.numbers.get(name)
        bits += form.layout.bits(*weight.shape) * weight.numel()
        packed = calibrated.find(numbers, weight) if numbers else None
        values[name] = (
            nearest(weight, form.scheme, form.group, form.low, form.per)
            if packed is None
            else unpack(packed, weight.shape[0], weight.shape[1], form.layout)
        )
    return values, bits / total, "; ".join(line.got for line in lines) or "no"


class _Gauge:
    """The model's own outputs on the rows, against which others are measured."""

    def __init__(self, model: nn.Module, rows: Tensor) -> None:
        self.model, self.rows = model, rows
        self.logits = head_of(model) is not None
        self.own: dict[int, Tensor] = {}
        self.value = math.nan

    @torch.no_grad()
    def row(self, bits: float, how: str | None) -> dict[str, Any]:
        """Perplexity (or cosine) and the divergence from the model itself; the first call is the model itself."""
        first = not self.own
        sums = {"loss": 0.0, "kl": 0.0, "n": 0}
        for number, row in enumerate(self.rows):
            out = output(self.model, row.view(1, -1))[0].float()
            if first:
                self.own[number] = out.to(torch.bfloat16) if self.logits else out.mean(0)
            self._add(sums, out, self.own[number], row)
        mean, kl = sums["loss"] / sums["n"], sums["kl"] / sums["n"]
        value = math.exp(mean) if self.logits else mean
        self.value = value if first else self.value
        return {
            "bits": round(bits, 3),
            "calibrated": how,
            "tokens": self.rows.numel(),
            "measure": "perplexity" if self.logits else "cosine",
            "value": value,
            "delta_pct": 100 * (value / self.value - 1),
            "kl": None if first or not self.logits else kl,
        }

    def _add(self, sums: dict[str, float], out: Tensor, own: Tensor, row: Tensor) -> None:
        if not self.logits:
            sums["loss"] += float(F.cosine_similarity(out.mean(0), own, dim=0))
            sums["n"] += 1
            return
        log_q, log_p = F.log_softmax(out[:-1], -1), F.log_softmax(own[:-1].float(), -1)
        sums["loss"] += float(F.nll_loss(log_q, row[1:], reduction="sum"))
        sums["kl"] += float(F.kl_div(log_q, log_p, reduction="sum", log_target=True))
        sums["n"] += row.numel() - 1


def _longest(loaded: Loaded) -> int:
    return int(getattr(loaded.config, "max_position_embeddings", None) or 512)


def merge_bench(table: dict[str, dict[str, Any]], bench: Mapping[str, Any]) -> None:
    """Speeds and memory of a `bench --json`, into the rows whose recipe its engines ran."""
    by_recipe = {recipe: name for name, recipe, overrides in ROWS if not overrides}
    for engine, figures in bench["engines"].items():
        recipe = engine.partition(":")[2] or (bench.get("recipe", "") if engine == "sits" else "")
        name = "eager" if engine == "eager" else by_recipe.get(str(recipe), "")
        if name in table:
            for key in ("decode_tps", "prefill_tps", "peak_mb"):
                table[name][key] = figures.get(key)


def page(tables: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """All models' tables as Markdown; a figure that nobody has measured is a dash."""
    lines = ["# Weights in few bits", "", __doc__.split("\n\n")[2].strip(), ""]
    for model, table in tables.items():
        lines += [f"## {model}", "", "| weights | " + " | ".join(TITLES) + " |"]
        lines += ["|---" * (len(TITLES) + 1) + "|"]
        lines += [f"| {name} | " + " | ".join(_cells(row)) + " |" for name, row in table.items()]
        lines.append("")
    return "\n".join(lines)


TITLES = (
    "bits", "calibrated", "tokens", "perplexity or cosine", "change", "KL a token", "decode tokens/s", "prefill tokens/s",
    "peak MB",
)  # fmt: skip


def _cells(row: Mapping[str, Any]) -> list[str]:
    def number(key: str, form: str) -> str:
        value = row.get(key)
        return "-" if value is None else format(value, form)

    return [
        number("bits", ".2f"), row.get("calibrated") or "-", number("tokens", "d"), f"{row['value']:.4f}",
        f"{row['delta_pct']:+.2f} %", number("kl", ".4f"), number("decode_tps", ".0f"),
        number("prefill_tps", ".0f"), number("peak_mb", ".0f"),
    ]  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    """Measure what the arguments name and write the page and its figures."""
    parser = argparse.ArgumentParser(prog="python -m sitsopt.measure.schemes", description=__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--write", type=Path, required=True)
    parser.add_argument("--only", default="", help="names of rows, separated by semicolons")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--bench", type=Path, action="append", default=[])
    given = parser.parse_args(arguments)
    data = given.write.with_suffix(".json")
    tables = json.loads(data.read_text()) if data.is_file() else {}
    for model in given.models:
        table = tables.setdefault(model, {})
        if not given.bench:
            loaded = load(model, "f32")
            found = measure(
                loaded, given.tokens, only=given.only, say=lambda t: print(t, file=sys.stderr)
            )
            for name, row in found.items():
                table[name] = {**table.get(name, {}), **row}
        for file in given.bench:
            merge_bench(table, json.loads(file.read_text()))
    for target, content in ((data, json.dumps(tables, indent=1)), (given.write, page(tables))):
        with replace_file(target) as part:
            part.write_text(content + "\n")


if __name__ == "__main__":
    main()
