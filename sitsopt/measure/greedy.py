"""Greedy answers of the loop against transformers' own loop on the same kind of cache, for each policy and each draft.

    python -m sitsopt.measure.greedy [MODEL] [--dtype f32] [--prompts 50] [--new 128] [--policies ...] [--drafts ...] [--json]

The model is lowered to eager ops, so that the same sums are taken; blocks of several rows still add in another order.
In f32 no token may differ. In a narrower dtype an answer may part where the two best logits of transformers' loop lie
within two steps of the dtype. Caches are compared too, up to where tokens are equal.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sitsopt.decode.fitting import argument
from sitsopt.measure import text
from sitsopt.measure.check import EXACT, steps_between
from sitsopt.measure.models import Loaded, load
from sitsopt.runtime.kv.cache import QuantizedKVCache

Say = Callable[[str], None]
POLICIES = ("static", "none", "hotness-aware", "recency", "int4", "int8")
DRAFTS = ("none", "prompt-lookup", "layer-skip", "int4", "int8")
LENGTHS = (64, 128)  # tokens of a prompt: few, as a prompt for a packed cache keeps its length
WINDOW = 32  # tokens: older ones are packed, and an answer is long enough for that
STEPS = 2.0


@dataclass
class Answer:
    """Tokens of one prompt; of transformers' loop also the steps that its two best logits are apart at each."""

    tokens: list[int]
    cache: list[torch.Tensor]
    steps: list[float] = field(default_factory=list)


def measure(
    loaded: Loaded,
    prompts: int = 50,
    new: int = 128,
    policies: Sequence[str] = POLICIES,
    drafts: Sequence[str] = DRAFTS,
    say: Say = lambda text: None,
) -> Iterator[dict[str, Any]]:
    """A row for each policy and draft, as soon as it is known: answers that are equal, where the others part and whether they may, and how
    far values of the caches are apart, as a share of the largest."""
    ids = [*questions(loaded, prompts)]
    want: dict[str, list[Answer]] = {}
    for policy in policies:
        say(f"transformers' loop, {policy}")
        cache = cache_of(loaded.model, policy, LENGTHS[-1] + new)
        want[policy] = [_answer(loaded.model, cache, one, new, steps=True) for one in ids]
    for draft in drafts:
        import sitsopt

        sections: dict[str, Any] = {} if draft == "none" else {"speculate": {"draft": draft}}
        model = sitsopt.optimize(copy.deepcopy(loaded.model), lowering="eager", **sections)
        for policy in policies:
            cache = cache_of(model, policy, LENGTHS[-1] + new)
            found = []
            for number, one in enumerate(ids):
                say(f"{policy}, {draft}: prompt {number + 1} of {len(ids)}")
                found.append(_answer(model, cache, one, new))
            yield {"policy": policy, "draft": draft, **_told(model), **_compare(want[policy], found, loaded.dtype)}  # fmt: skip


def questions(loaded: Loaded, count: int) -> Iterator[torch.Tensor]:
    """Pieces of the evaluation text [1, tokens]; every second one says itself twice, so that there is something to copy."""
    rows = text.windows(loaded.tokenizer, count * LENGTHS[-1], LENGTHS[-1]).to(loaded.device)
    for number, row in enumerate(rows):
        length = LENGTHS[number // 2 % len(LENGTHS)]
        part = row[:length] if number % 2 else row[: length // 2].repeat(2)
        yield part.view(1, -1).contiguous()


def cache_of(model: Any, policy: str, tokens: int) -> Any:
    """A cache of a policy, laid out."""
    if policy == "static":
        from sitsopt.measure.decode import static_cache

        return static_cache(model, tokens + 32)
    window = WINDOW if policy in ("hotness-aware", "recency") else 0
    cache = QuantizedKVCache(model.config, tokens + 32, policy, window=window, hot_budget=0.1)
    cache.prepare(model)
    return cache


def _answer(model: Any, cache: Any, ids: torch.Tensor, new: int, steps: bool = False) -> Answer:
    cache.reset()
    done = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, return_dict_in_generate=True,
        output_logits=steps, **{argument(model): cache},
    )  # fmt: skip
    tokens = done.sequences[0, ids.shape[1] :].tolist()
    apart = []
    for logits in done.logits if steps else ():
        best, second = logits[0].topk(2).indices.tolist()
        apart.append(steps_between(logits[0].to(model.dtype), best, second))
    return Answer(tokens, [*_contents(cache)], apart)


def _contents(cache: Any) -> Iterator[torch.Tensor]:
    """Keys and values of each layer as they are read, up to the last token."""
    length = int(cache.get_seq_length())
    for layer in cache.layers:
        if isinstance(cache, QuantizedKVCache):
            pair = layer.view().read(length)
        else:
            pair = layer.keys, layer.values
        for one in pair:
            yield one[:, :, :length].float().cpu().clone()


def _compare(want: list[Answer], found: list[Answer], dtype: torch.dtype) -> dict[str, Any]:
    parted, furthest = [], 0.0
    for number, (a, b) in enumerate(zip(want, found, strict=True)):
        if a.tokens != b.tokens:
            at = next(
                (i for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=False)) if x != y),
                min(len(a.tokens), len(b.tokens)),
            )
            steps = a.steps[at] if at < len(a.steps) else float("inf")
            allowed = dtype not in EXACT and steps <= STEPS
            parted.append({"prompt": number + 1, "at": at + 1, "steps": steps, "allowed": allowed})
            continue
        for x, y in zip(a.cache, b.cache, strict=True):
            scale = float(x.abs().max()) or 1.0
            furthest = max(furthest, float((x - y).abs().max()) / scale)
    return {
        "prompts": len(want),
        "tokens": sum(len(a.tokens) for a in want),
        "equal": len(want) - len(parted),
        "parted": parted,
        "passed": all(one["allowed"] for one in parted),
        "cache_rel": furthest,
    }


def _told(model: Any) -> dict[str, Any]:
    import sitsopt

    record = sitsopt.report(model).json()
    return {"loop": record["loop"], "speculation": record["speculation"]}


def main() -> int:
    """Measure and print; 1 where an answer parts that may not."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--dtype", default="f32")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--drafts", default=",".join(DRAFTS))
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    loaded = load(given.model, given.dtype)
    rows, lists = [], (given.policies.split(","), given.drafts.split(","))
    for row in measure(loaded, given.prompts, given.new, *lists, say=lambda t: print(f"  {t}", file=sys.stderr, flush=True)):  # fmt: skip
        rows.append(row)
        if not given.json:
            print(
                f"{row['policy']:14} {row['draft']:14} {row['equal']} of {row['prompts']} equal, caches {row['cache_rel']:.1e}"
                f" apart, {row['loop']}, {row['speculation']}, {row['parted'] or ''}",
                flush=True,
            )
    if given.json:
        print(json.dumps({"model": loaded.name, "dtype": given.dtype, "rows": rows}, indent=2))
    return 0 if all(row["passed"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
