"""How long sitsopt's own stages take: capture and rewrite, by number of layers and of rules.

    python -m sitsopt.measure.compiletime [--json] [--rounds 5]

Decode graphs of small Llama models (hidden size 64, random weights) of several depths, all shipped rules, and the same
with 500 more rules that match nowhere. The cases run alternately; figures are medians in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from ..pipeline import Plan, rewritten
from ..planning import facts_of
from ..rewrite.order import ordered
from ..rewrite.record import GraphRecord
from ..runtime.machine import detect_target
from ..spec.locate import rule_dirs
from ..spec.rule import Rule, load_rule, load_rules

LAYERS = (30, 32, 96)
# One pattern of each way not to match: an op that the graph lacks, ops that never meet, another constant, another
# dtype, the right ops in another order. `%d` makes each rule another one.
NOWHERE = (
    'inputs: {x: "T[*B]", y: "T[*B]"}\nmatch: return aten.mul(aten.cosh(x), y)\n'
    "replace: return aten.mul(y, aten.cosh(x))\n",
    'inputs: {x: "T[*B]"}\nmatch: return aten.rsqrt(aten.neg(aten.cos(x)))\n'
    "replace: return aten.neg(aten.rsqrt(aten.cos(x)))\n",
    'inputs: {x: "T[*B]"}\nmatch: return aten.mul(x, %d.5)\nreplace: return aten.neg(aten.mul(aten.neg(x), %d.5))\n',
    'inputs: {x: "f64[*B]"}\nmatch: return aten.silu(x)\nreplace: return aten.mul(aten.sigmoid(x), x)\n',
    'inputs: {x: "T[*B]", y: "T[*B]"}\nmatch: return aten.silu(aten.mul(aten.mean(x, [-1], True), y))\n'
    "replace: return aten.silu(aten.mul(y, aten.mean(x, [-1], True)))\n",
)


def without_matches(count: int) -> list[Rule]:
    """Rules that match nowhere in a Llama graph."""
    rules = []
    for i in range(count):
        text = NOWHERE[i % len(NOWHERE)].replace("%d", str(i + 3))
        text = f"summary: Matches nowhere.\n{text}examples:\n  - fires: {{T: f32, B: [2]}}\n"
        text = text.replace("T: f32, ", "") if "f64" in text else text
        rules.append(load_rule(f"nowhere_{i}.yaml", f"fuse/nowhere_{i}", text))
    return rules


def decode_graph(layers: int) -> tuple[GraphModule, Sequence[Any]]:
    """Dynamo's graph of one decode step with a static cache, and its inputs."""
    from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=100, max_position_embeddings=256,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().to(torch.bfloat16)
    cache = StaticCache(config=config, max_cache_len=40)
    cache.early_initialization(1, 2, 16, torch.bfloat16, torch.device("cpu"))
    found: list[tuple[GraphModule, Sequence[Any]]] = []

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Any:
        found.append((gm, list(inputs)))
        return gm.forward

    torch._dynamo.reset()
    call: Any = torch.compile(model, backend=backend, dynamic=False)
    with torch.no_grad():
        call(input_ids=torch.tensor([[5]]), past_key_values=cache)
    (only,) = found
    return only


def measure(layers: Sequence[int] = LAYERS, more: int = 500, rounds: int = 5) -> dict[str, Any]:
    """Medians in milliseconds, and the ratios that matter.

    `graphs` has for each depth `nodes`, `capture_ms`, `rewrite_ms` and `rewrites`; `rewrite_more_ms` is the rewrite
    stage with `more` rules that match nowhere; `growth` is the rewrite time of the deepest graph over that of the one
    before it, `extra` what the rules that match nowhere add to the first.
    """
    target = detect_target()
    plan = Plan(ordered(load_rules(rule_dirs(()))), facts_of(target), target=target)
    wide = Plan(ordered([*plan.rules, *without_matches(more)]), plan.facts, target=target)
    graphs = {n: decode_graph(n) for n in layers}
    taken: dict[Any, list[GraphRecord]] = {}
    for _ in range(rounds + 1):  # the first is not counted: patterns are compiled in it
        for key, record in _round(graphs, plan, wide):
            taken.setdefault(key, []).append(record)
    median = {
        key: statistics.median(r.rewrite_ms for r in records[1:]) for key, records in taken.items()
    }
    first, last, before = layers[0], layers[-1], layers[-2]
    return {
        "rules": len(plan.rules),
        "more_rules": more,
        "graphs": {
            n: {
                "nodes": taken[n][0].nodes_before,
                "rewrites": len(taken[n][0].sites),
                "capture_ms": statistics.median(r.capture_ms for r in taken[n][1:]),
                "rewrite_ms": median[n],
            }
            for n in layers
        },
        "rewrite_more_ms": median["more"],
        "growth": median[last] / median[before],
        "extra": median["more"] / median[first] - 1,
    }


def _round(graphs: dict[int, Any], plan: Plan, wide: Plan) -> Iterator[tuple[Any, GraphRecord]]:
    first = next(iter(graphs))
    for key, n, chosen in [*((n, n, plan) for n in graphs), ("more", first, wide)]:
        record = GraphRecord(str(key))
        with torch.no_grad():
            gm, inputs = graphs[n]
            rewritten(gm, inputs, chosen, record)
        yield key, record


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    result = measure(rounds=given.rounds)
    if given.json:
        print(json.dumps(result, indent=2))
        return
    print(f"{result['rules']} rules; medians of {given.rounds} alternated runs")
    for n, row in result["graphs"].items():
        print(
            f"  {n:3} layers, {row['nodes']:5} ops: capture {row['capture_ms']:7.1f} ms,"
            f" rewrite {row['rewrite_ms']:7.1f} ms, {row['rewrites']} rewrites"
        )
    print(f"  {result['more_rules']} more rules that match nowhere: {result['extra']:+.1%}")
    print(f"  the last over the one before: {result['growth']:.2f} times the rewriting")


if __name__ == "__main__":
    main()
