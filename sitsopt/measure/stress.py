"""The stress report of speculation: acceptance and worth by draft, draft length, temperature and kind of text.

For each cell the same answer is decoded plainly and with proposals of a fixed length, in turns; the same noise gives both
the same tokens, so times compare. Another run that is not timed measures the divergence of draft and model. Last, each
draft runs as it does in use: with a length that adapts, and pauses while it does not pay.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from sitsopt.decode.drafts import Draft
from sitsopt.decode.fitting import runner_of, why_plain
from sitsopt.decode.loop import Loop, Speculation, Tally
from sitsopt.decode.picker import Picker
from sitsopt.decode.sizes import SPARE
from sitsopt.measure import text
from sitsopt.measure.decode import static_cache, wanted_cache
from sitsopt.measure.engines import SitsOptions, compiled
from sitsopt.measure.errors import InputError
from sitsopt.measure.models import Loaded
from sitsopt.speculating import NoDraft, draft_of
from sitsopt.whole import compiled_call

Say = Callable[[str], None]
ADAPTIVE = "adaptive"  # in place of a length: as it runs in use
SEED = 7


@dataclass(frozen=True)
class StressOptions:
    """What is tried. texts: `copy`, `code`, `open`, or a file's path. drafts: as a recipe names them; the recipe's own if
    none is named. lengths: tokens of a proposal, at most `most`. context, new: tokens of the prompt and the answer."""

    texts: tuple[str, ...]
    drafts: tuple[str, ...] = ()
    lengths: tuple[int, ...] = (1, 2, 4, 8, 12, 16)
    temperatures: tuple[float, ...] = (0.0, 0.4, 0.8, 1.2)
    context: int = 256
    new: int = 64
    rounds: int = 3
    sits: SitsOptions = field(default_factory=SitsOptions)

    @staticmethod
    def quick(texts: tuple[str, ...], drafts: tuple[str, ...], sits: SitsOptions) -> StressOptions:
        """Two lengths, two temperatures, short answers."""
        return StressOptions(texts, drafts, (2, 8), (0.0, 0.8), 128, 32, 1, sits)

    def check(self) -> None:
        """Raise for what cannot be measured."""
        for one in self.texts:
            if one not in text.KINDS and not Path(one).is_file():
                raise InputError(f"--text {one}: {', '.join(text.KINDS)}, or a file")
        if not all(1 <= n <= 64 for n in self.lengths):
            raise InputError("a draft's length is 1 to 64 tokens")
        if not all(0 <= t <= 5 for t in self.temperatures):
            raise InputError("a temperature is 0 to 5")


@dataclass
class Bed:
    """One model, compiled, with a cache for every answer."""

    loaded: Loaded
    call: Any
    cache: Any

    def answer(
        self, ids: torch.Tensor, new: int, temperature: float, spec: Speculation | None = None
    ) -> tuple[float, list[int]]:
        """Seconds of the answer behind its prompt, and its tokens."""
        torch.manual_seed(SEED)
        self.cache.reset()
        with torch.no_grad():
            longest = 0 if spec is None else spec.most if spec.adapt else _block(spec.most)
            runner = runner_of(self.loaded.model, self.call, self.cache, longest)
            buffer = ids.new_empty(1, ids.shape[1] + new)
            buffer[:, : ids.shape[1]] = ids
            picker = Picker(_processors(temperature), temperature > 0, ahead=True)
            most = buffer.shape[1]
            answers = torch.tensor([False]).to(ids.device), torch.tensor([True]).to(ids.device)
            loop = Loop(
                runner, buffer, ids.shape[1], picker, lambda ids, scores: answers[ids.shape[1] >= most],
                speculation=spec,
            )  # fmt: skip
            loop.begin(runner.prefill(ids))
            begun = time.perf_counter()
            while not loop.finished:
                loop.advance()
            taken = time.perf_counter() - begun
        picker.finish()
        return taken, buffer[0, ids.shape[1] :].tolist()


def stress(loaded: Loaded, options: StressOptions, say: Say = lambda text: None) -> dict[str, Any]:
    """The rows of the report: `speculation` by fixed length, `adaptive` as in use; what could not be tried is under `skipped`."""
    options.check()
    call: Any = compiled("sits", loaded, options.sits)[0]
    wanted = call.session.recipe.speculate
    if wanted is None:
        raise InputError(f"--text needs a recipe that speculates: --recipe {options.sits.recipe},speculate")  # fmt: skip
    ratio = wanted.entropy_ratio if wanted.acceptance == ADAPTIVE else None
    drafts, skipped = _drafts(loaded, options, wanted.draft, say)
    room = options.context + options.new + SPARE
    bed = Bed(loaded, call, static_cache(loaded.model, room, wanted_cache(call)))
    if why := why_plain(bed.cache, 1):
        raise InputError(f"nothing can be proposed: {why}")
    fixed: list[dict[str, Any]] = []
    adaptive = []
    for kind in options.texts:
        ids = text.of_kind(loaded, kind, options.context)
        for temperature in options.temperatures:
            for draft in drafts:
                fixed += _fixed(bed, ids, draft, temperature, ratio, options, kind, say)
                in_use = Speculation(draft, wanted.max_tokens, ratio)
                say(f"{kind}, {draft.name}, temperature {temperature:g}, adaptive")
                adaptive.append(_adaptive(bed, ids, in_use, temperature, options, kind))
    return {
        "acceptance": wanted.acceptance,
        "context": options.context,
        "new_tokens": options.new,
        "speculation": fixed,
        ADAPTIVE: adaptive,
        "skipped": skipped,
    }


def _drafts(
    loaded: Loaded, options: StressOptions, own: str, say: Say
) -> tuple[list[Draft], dict[str, str]]:
    found, skipped = [], {}
    for name in options.drafts or (own,):
        say(f"draft {name}: making ready")
        try:
            found.append(draft_of(loaded.model, name, options.sits.as_options(), compiled_call))
        except NoDraft as error:
            skipped[name] = str(error)
    if not found:
        raise InputError("; ".join(skipped.values()))
    return found, skipped


def _fixed(
    bed: Bed, ids: torch.Tensor, draft: Draft, temperature: float, ratio: float | None,
    options: StressOptions, kind: str, say: Say,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """A row for each length."""
    for length in options.lengths:
        say(f"{kind}, {draft.name}, temperature {temperature:g}, {length} tokens")
        made = [Speculation(draft, length, ratio, False, measure=m) for m in (True, False)]
        looked, timed = made
        bed.answer(ids, options.new, temperature, looked)
        yield {
            "draft": draft.name, "length": length, "temperature": temperature, "text": kind,
            **_counts(looked), **_ratio(bed, ids, temperature, timed, options, 1),
        }  # fmt: skip


def _adaptive(
    bed: Bed, ids: torch.Tensor, spec: Speculation, temperature: float, options: StressOptions, kind: str
) -> dict[str, Any]:  # fmt: skip
    """As in use; a first answer tells what calls cost, as the first of a process does."""
    bed.answer(ids, options.new, temperature, spec)
    spec.tally = Tally()
    timed = _ratio(bed, ids, temperature, spec, options, 0)
    counts = _counts(spec)
    del counts["kl"]
    return {"draft": spec.draft.name, "temperature": temperature, "text": kind, **counts, **timed}


def _block(length: int) -> int:
    """The longest proposal of the blocks that one of this length is checked in: few sizes serve all lengths."""
    return 15 if length < 16 else (length + 16) // 16 * 16 - 1


def _counts(spec: Speculation) -> dict[str, Any]:
    """What was proposed and accepted; `kl` in nats a proposed token; `drafted` is the share of steps with a proposal."""
    tally = spec.tally
    return {
        "proposed": tally.proposed,
        "accepted": tally.accepted,
        "kl": sum(tally.kl) / len(tally.kl) if tally.kl else None,
        "steps": tally.steps,
        "drafted": tally.blocks / tally.steps if tally.steps else 0.0,
    }


def _ratio(
    bed: Bed, ids: torch.Tensor, temperature: float, spec: Speculation, options: StressOptions, warm: int
) -> dict[str, Any]:  # fmt: skip
    """Plain seconds over those with proposals, in turns; and whether the tokens are the same."""
    plain, ours, same = [], [], True
    for number in range(options.rounds + warm):
        a, want = bed.answer(ids, options.new, temperature)
        b, found = bed.answer(ids, options.new, temperature, spec)
        same = same and want == found
        if number >= warm:
            plain.append(a)
            ours.append(b)
    return {
        "ratio": round(median(plain) / median(ours), 3),
        "plain_tps": round(options.new / median(plain), 2),
        "same_tokens": same,
    }


def _processors(temperature: float) -> Any:
    from transformers import LogitsProcessorList
    from transformers.generation import TemperatureLogitsWarper

    warpers: Sequence[Any] = [TemperatureLogitsWarper(temperature)] if temperature not in (0, 1) else []  # fmt: skip
    return LogitsProcessorList(warpers)
