"""Perplexity of a text that is read through a quantized cache, in steps of few tokens.

A long forward pass attends its own keys as they came and never reads a packed tile. So the text is forced through the
cache in steps of 16 tokens, and its last part is scored; once more with every packed tile zeroed where scoring begins,
which shows that those tiles were what was read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from sitsopt.measure.decode import Decoder
from sitsopt.runtime.kv.layer import QuantizedLayer
from sitsopt.spec.recipe_form import KVCache

STEP = 16  # tokens a step; what is longer is attended as it came
Say = Callable[[str], None]


@dataclass(frozen=True)
class Length:
    """Tokens of the text, and how many of the last ones are scored; whole steps."""

    tokens: int
    scored: int

    @staticmethod
    def within(tokens: int, scored: int, limit: int) -> Length:
        """At most `limit` tokens; a shorter text is scored in the same proportion."""
        whole = min(tokens, limit) // STEP * STEP
        return Length(whole, max(STEP, scored * whole // tokens // STEP * STEP))


@dataclass(frozen=True)
class Scored:
    """Perplexity of the scored part; the share of its key reads that hit packed tiles; and the perplexity with
    those tiles zeroed (None for a cache that packs nothing)."""

    perplexity: float
    packed_reads: float = 0.0
    zeroed: float | None = None


def score(decoder: Decoder, ids: torch.Tensor, length: Length, say: Say = lambda text: None) -> Scored:  # fmt: skip
    """Force ids [1, tokens] through the decoder's cache. Its cache is full afterwards."""
    decoder.cache.reset()
    start = length.tokens - length.scored
    previous = None
    for at, logits in _forced(decoder, ids, 0, start):
        previous = logits[:, -1:]
        if at % 1024 < STEP:
            say(f"text through the cache: token {at:,} of {length.tokens:,}")
    layers = [one for one in decoder.cache.layers if isinstance(one, QuantizedLayer)]
    kept = [(one.state.clone(), one.cumulative_length.clone()) for one in layers]  # type: ignore[union-attr]
    say("text through the cache: the part that is scored")
    found, reads = _scored(decoder, ids, start, length.tokens, previous, layers)
    if not any(one.view().committed for one in layers):
        return Scored(found)
    for one, (state, count) in zip(layers, kept, strict=True):
        one.state.copy_(state)  # type: ignore[union-attr]
        one.cumulative_length.copy_(count)
        _zero(one)
    say("text through the cache: again, with the packed tiles zeroed")
    zeroed, _ = _scored(decoder, ids, start, length.tokens, previous, layers)
    return Scored(found, reads, zeroed)


def compare(
    call: Any, model: Any, ids: torch.Tensor, length: Length, kv: KVCache, say: Say
) -> dict[str, Any]:
    """The cache that `kv` describes under `call`, against the model's own static cache in eager mode."""
    eager = score(Decoder(model, model, length.tokens), ids, length, say)
    ours = score(Decoder(model, call, length.tokens, kv), ids, length, say)
    return {
        "policy": kv.policy,
        "tokens": length.tokens,
        "scored": length.scored,
        "step": STEP,
        "ppl_eager": eager.perplexity,
        "ppl_sits": ours.perplexity,
        "ppl_delta_pct": 100 * (ours.perplexity / eager.perplexity - 1),
        "packed_reads": ours.packed_reads,
        "ppl_zeroed": ours.zeroed,
    }


def _forced(decoder: Decoder, ids: torch.Tensor, first: int, end: int) -> Iterator[tuple[int, torch.Tensor]]:  # fmt: skip
    # One buffer for every step: a new tensor each time may look new to the guards.
    step = torch.empty(1, STEP, dtype=ids.dtype, device=ids.device)
    for at in range(first, end, STEP):
        step.copy_(ids[:, at : at + STEP])
        with torch.no_grad():
            yield at, decoder.logits(step)


def _scored(
    decoder: Decoder,
    ids: torch.Tensor,
    start: int,
    end: int,
    previous: torch.Tensor | None,
    layers: list[QuantizedLayer],
) -> tuple[float, float]:
    """Perplexity of tokens [start, end), and the share of reads. previous: logits of the token before."""
    loss, count, packed, every = 0.0, 0, 0, 0
    for at, logits in _forced(decoder, ids, start, end):
        before = logits[:, :0] if previous is None else previous
        told = torch.cat([before, logits[:, :-1]], 1)[0].float()
        wanted = ids[0, at + (previous is None) : at + STEP]
        loss += float(F.cross_entropy(told, wanted, reduction="sum"))
        count += len(wanted)
        previous = logits[:, -1:].clone()
        for layer in layers:
            p, n = _reads(layer, at + STEP)
            packed, every = packed + p, every + n
    return math.exp(min(loss / max(count, 1), 700)), packed / every if every else 0.0


def _reads(layer: QuantizedLayer, length: int) -> tuple[int, int]:
    """Keys in packed tiles, and all keys, that a step behind `length` tokens reads of a layer."""
    state = layer.view()
    old, heads = state.committed, layer.num_heads
    hot = int((state.parts["hot"][:, :, :old] > 0).sum())
    exact = min(layer.layout.sinks, old * 64) * heads
    return max(0, (old * heads - hot) * 64 - exact), length * heads


def _zero(layer: QuantizedLayer) -> None:
    parts = layer.view().parts
    for name in ("k", "k_scale", "k_low", "v", "v_scale", "v_low"):
        if name in parts:
            parts[name].zero_()
