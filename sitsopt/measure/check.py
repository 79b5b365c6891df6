"""`check`: the whole model against eager - tokens, logits, perplexity - and every rewrite on its own.

When it fails. In f32 and f64 a rewrite may only change the order of a sum: the greedy tokens must be
equal, and no logit may move by more than 1e-4 of the largest eager logit. In bf16 and f16 two correct
programs already round to different tokens, so perplexity decides: within 0.1 %. A recipe that
quantizes changes the weights on purpose: give `ppl_within`, and perplexity alone decides. A recipe with a quantized
cache is also read through that cache (`through_cache`): within 0.3 % of the model's own, and with its packed tiles
zeroed perplexity must rise by ten times as much at least, or they were not what was read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from sitsopt.measure import text, through_cache
from sitsopt.measure.decode import Decoder, text_config, wanted_cache
from sitsopt.measure.engines import SitsOptions, compiled
from sitsopt.measure.errors import InputError
from sitsopt.measure.looped import Looped
from sitsopt.measure.models import Loaded
from sitsopt.spec.recipe_form import KVCache

Say = Callable[[str], None]

MAX_REL = 1e-4
PPL_WITHIN_PCT = 0.1
KV_WITHIN_PCT = 0.3
KV_RUINED = 10  # times that
EXACT = (torch.float32, torch.float64)


@dataclass(frozen=True)
class CheckOptions:
    """How much to compare. `ppl_within` (percent) replaces the rule that goes with the dtype."""

    prompts: int = len(text.PROMPTS)
    new: int = 128
    tokens: int = 16384
    window: int = 512
    rewrites: bool = True
    ppl_within: float | None = None
    sits: SitsOptions = field(default_factory=SitsOptions)
    kv_tokens: int = 7000
    kv_scored: int = 2000

    @staticmethod
    def quick(sits: SitsOptions, ppl_within: float | None = None) -> CheckOptions:
        """A tenth of the work: two prompts, four windows."""
        return CheckOptions(2, 32, 2048, 512, True, ppl_within, sits, 1400, 400)


@dataclass
class _Sums:
    """What the windows add up to."""

    tokens: int = 0
    eager: float = 0.0
    sits: float = 0.0
    kl: float = 0.0
    max_abs: float = 0.0
    scale: float = 0.0

    def add(self, a: torch.Tensor, b: torch.Tensor, ids: torch.Tensor) -> None:
        """Logits of both engines for one row of ids; the last token has no successor to predict."""
        self.scale = max(self.scale, float(a.abs().max()))
        gap = float((a.double() - b.double()).abs().max()) if a.numel() else 0.0
        self.max_abs = max(self.max_abs, math.inf if math.isnan(gap) else gap)
        log_a, log_b = (F.log_softmax(x[:-1].float(), -1) for x in (a, b))
        self.eager += float(F.nll_loss(log_a, ids[1:], reduction="sum"))
        self.sits += float(F.nll_loss(log_b, ids[1:], reduction="sum"))
        self.kl += float(F.kl_div(log_b, log_a, reduction="sum", log_target=True))
        self.tokens += ids.numel() - 1

    def perplexity(self, total: float) -> float:
        """Of a summed negative log likelihood."""
        mean = total / self.tokens
        return math.exp(mean) if mean < 700 else math.inf


def check(loaded: Loaded, options: CheckOptions, say: Say = lambda text: None) -> dict[str, Any]:
    """Compare `sits` with eager on one model; the contract's JSON with `passed` and `failures`."""
    window = _window(loaded, options)
    if loaded.tokenizer is None:
        raise InputError(f"{loaded.name} came without a tokenizer: check reads text")
    call, _ = compiled("sits", loaded, options.sits)
    eager = Decoder(loaded.model, loaded.model, window + options.new)
    sits = Looped(loaded.model, call, window + options.new)
    rows = text.windows(loaded.tokenizer, options.tokens, window).to(loaded.device)
    sums = _perplexity(eager, sits, rows, say)
    prompts = text.prompts(loaded.tokenizer, options.prompts, window).to(loaded.device)
    differing, furthest = _tokens(eager, sits, prompts, options.new, say)
    result: dict[str, Any] = {
        "model": loaded.name,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "recipe": options.sits.recipe,
        "tokens_equal": not differing,
        "tokens_differ": differing,
        "tokens_max_abs": furthest,
        **sits.told(),
        "max_abs": sums.max_abs,
        "max_rel": sums.max_abs / sums.scale if sums.scale else sums.max_abs,
        "kl": sums.kl / sums.tokens,
        **_deltas(sums),
        "tokens": rows.numel(),
        "window": window,
        "text": text.digest(),
    }
    kv = wanted_cache(call)
    if kv is not None and kv.policy != "none":
        result["kv_cache"] = _through(loaded, call, kv, options, say)
    if options.rewrites:
        say("comparing each rewrite with what it replaced")
        result["rewrites"] = per_rewrite_errors(loaded, prompts[:1], options.sits)
    result["failures"] = failures(result, loaded.dtype, options.ppl_within)
    result["passed"] = not result["failures"]
    return result


def failures(
    result: dict[str, Any], dtype: torch.dtype, ppl_within: float | None = None
) -> list[str]:
    """Why the check fails, in words; nothing when it passes."""
    found = []
    if ppl_within is None and dtype in EXACT:
        for row in result["tokens_differ"]:
            found.append(f"prompt {row['prompt']}: token {row['at']} of {row['of']} differs")
        if not result["max_rel"] <= MAX_REL:
            found.append(f"logits differ by {result['max_rel']:.2e} of the largest (at most 1e-4)")
    limit = PPL_WITHIN_PCT if ppl_within is None else ppl_within
    if not abs(result["ppl_delta_pct"]) <= limit:
        found.append(f"perplexity moved by {result['ppl_delta_pct']:+.3f} % (at most {limit:g} %)")
    if "kv_cache" in result:
        found += _kv_failures(
            result["kv_cache"], KV_WITHIN_PCT if ppl_within is None else ppl_within
        )
    return found


def _kv_failures(one: dict[str, Any], limit: float) -> list[str]:
    found = []
    if not one["ppl_delta_pct"] <= limit:
        found.append(
            f"perplexity through the cache moved by {one['ppl_delta_pct']:+.3f} % (at most {limit:g} %)"
        )
    if one["ppl_zeroed"] is None:
        found.append(f"{one['tokens']} tokens through the cache packed no tile: nothing was tested")
    elif not 100 * (one["ppl_zeroed"] / one["ppl_sits"] - 1) >= KV_RUINED * KV_WITHIN_PCT:
        found.append("perplexity hardly changes when packed tiles are zeroed: they are not read")
    return found


def _through(
    loaded: Loaded, call: Any, kv: KVCache, options: CheckOptions, say: Say
) -> dict[str, Any]:
    most = getattr(text_config(loaded.model), "max_position_embeddings", None) or options.kv_tokens
    length = through_cache.Length.within(options.kv_tokens, options.kv_scored, most)
    ids = text.windows(loaded.tokenizer, length.tokens, length.tokens).to(loaded.device)
    return through_cache.compare(call, loaded.model, ids, length, kv, say)


def per_rewrite_errors(
    loaded: Loaded, ids: torch.Tensor, sits: SitsOptions
) -> list[dict[str, Any]]:
    """The largest error of every applied rewrite, each fed with the same values as what it replaced:
    over a prefill of `ids` and one decode step. The worst come first."""
    from sitsopt.audit import auditing

    with auditing(loaded.model, **sits.as_options()) as (run, audit):
        decoder = Decoder(loaded.model, run, ids.shape[1] + 1)
        decoder.step(decoder.prefill(ids))
    return [
        {"id": r.id, "site": r.site, "key": r.key, "max_abs": r.max_abs, "scale": r.scale}
        for r in audit.rows()
    ]


def _window(loaded: Loaded, options: CheckOptions) -> int:
    limit = getattr(text_config(loaded.model), "max_position_embeddings", None)
    window = min(options.window, (limit or options.window + options.new) - options.new)
    if window < 8:
        raise InputError(f"{loaded.name} takes {limit} tokens: too few for {options.new} new ones")
    return window


def _perplexity(eager: Decoder, sits: Decoder, rows: torch.Tensor, say: Say) -> _Sums:
    sums = _Sums()
    for number, row in enumerate(rows):
        say(f"perplexity: window {number + 1} of {len(rows)}")
        ids = row.view(1, -1).contiguous()
        a = eager.prefill(ids, all_logits=True)[0]
        sums.add(a, sits.prefill(ids, all_logits=True)[0], row)
    return sums


def _tokens(
    eager: Decoder, sits: Looped, prompts: torch.Tensor, new: int, say: Say
) -> tuple[list[dict[str, Any]], float]:
    """Prompts whose greedy tokens differ, where first and by how much the two were apart there; and how far the logits
    were apart up to there."""
    found, furthest = [], 0.0
    for number, prompt in enumerate(prompts):
        say(f"tokens: prompt {number + 1} of {len(prompts)}")
        at, gap, steps = apart(eager, sits, prompt, new)
        furthest = max(furthest, gap)
        if at is not None:
            found.append({"prompt": number + 1, "at": at + 1, "of": new, "steps": steps})
    return found, furthest


def apart(
    eager: Decoder, sits: Looped, prompt: torch.Tensor, new: int
) -> tuple[int | None, float, float]:
    """The first of `new` greedy tokens in which two decoders differ, or None; the largest difference of a logit that
    both computed from the same tokens; and how many steps of the model's dtype eager's logit of its own token there is
    above that of the other one."""
    # All logits, as for perplexity: one prefill graph serves both.
    ids = prompt.view(1, -1).contiguous()
    tokens, logits = sits.answer(ids, new, whole=True)
    a, furthest = eager.prefill(ids, all_logits=True), 0.0
    for place, token in enumerate(tokens):
        gap = float((a[0, -1].double() - logits[place].double()).abs().max())
        furthest = max(furthest, math.inf if math.isnan(gap) else gap)
        eager.pick(a)
        if int(eager.token) != token:
            return place, furthest, steps_between(a[0, -1], int(eager.token), token)
        if place + 1 < new:
            a = eager.step(a)
    return None, furthest, 0.0


def steps_between(logits: torch.Tensor, best: int, other: int) -> float:
    """How far two of `logits` [vocabulary] are apart, in steps of their dtype at the larger one."""
    high, low = float(logits[best]), float(logits[other])
    _, exponent = math.frexp(max(abs(high), abs(low)))
    return (high - low) / (torch.finfo(logits.dtype).eps * 2.0 ** (exponent - 1))


def _deltas(sums: _Sums) -> dict[str, float]:
    eager, sits = sums.perplexity(sums.eager), sums.perplexity(sums.sits)
    return {"ppl_eager": eager, "ppl_sits": sits, "ppl_delta_pct": 100 * (sits / eager - 1)}
