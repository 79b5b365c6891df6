"""The loop: tokens one after the other, or in blocks that are proposed and checked."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from .drafts import Draft, Proposal
from .pace import Pace, Speeds, rows_of
from .picker import Picker
from .runner import Runner

Stop = Callable[[torch.Tensor, Any], torch.Tensor]


@dataclass
class Tally:
    """What speculation did in one answer, or several. `steps` are calls of the model after the prefill, `blocks` those
    that checked a proposal."""

    steps: int = 0
    blocks: int = 0
    proposed: int = 0
    accepted: int = 0
    kl: list[float] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Numbers and the mean divergence, in nats, where it was looked at."""
        return {
            "steps": self.steps,
            "blocks": self.blocks,
            "proposed": self.proposed,
            "accepted": self.accepted,
            "kl": sum(self.kl) / len(self.kl) if self.kl else None,
        }


class Speculation:
    """A draft, how it is accepted, and what is known about its worth. ratio: None for exact acceptance, else the share
    of the model's entropy (nats) up to which a proposal's divergence is let pass.

    `adaptive` takes a proposed token d where KL(draft, model) <= ratio * H(model). For a copied token the draft is
    certain and that is -log p(d) <= ratio * H: a token is at most 1 - exp(-ratio * H) away from the model's law in
    total variation; for a draft with a law of its own at most sqrt(ratio * H / 2) (Pinsker's inequality).
    """

    def __init__(
        self,
        draft: Draft,
        most: int,
        ratio: float | None = None,
        adapt: bool = True,
        measure: bool = False,
    ) -> None:
        self.draft, self.most, self.ratio, self.adapt = draft, most, ratio, adapt
        self.measure = measure  # the divergence of every checked proposal, for a report
        self.speeds = Speeds()
        self.tally = Tally()

    def start(self, target: Runner) -> None:
        """Before an answer."""
        self.draft.start(target)
        self.pace = Pace(min(self.most, target.blocks[-1] - 1), self.speeds, self.adapt)

    def instead(self, found: Proposal, place: int) -> Callable[[torch.Tensor], int | None] | None:
        """What takes a proposed token in place of the model's own; None where nothing may."""
        if self.ratio is None and not self.measure:
            return None

        def look(scores: torch.Tensor) -> int | None:
            law = scores[0].log_softmax(-1)
            kl = _divergence(law, found, place)
            if self.measure:
                self.tally.kl.append(kl)
            if self.ratio is None:
                return None
            weights = law.exp()
            entropy = -float(torch.where(weights > 0, weights * law, 0.0).sum())
            return found.tokens[place] if kl <= self.ratio * entropy else None

        return look


def _divergence(law: torch.Tensor, found: Proposal, place: int) -> float:
    """KL(draft, model), nats; `law` [vocabulary] holds logarithms."""
    if not found.scores:
        return -float(law[found.tokens[place]])
    own = found.scores[place][0].log_softmax(-1)
    weights = own.exp()
    return float(torch.where(weights > 0, weights * (own - law), 0.0).sum())


class Loop:
    """One answer. ids [batch, room]: the prompt in its first `count` columns. most: columns to fill at most.
    done: of each row, given ids [batch, tokens] and scores -> bool [batch]. pad: what a finished row gets. put: hears
    the tokens [batch] of each step."""

    def __init__(
        self,
        target: Runner,
        ids: torch.Tensor,
        count: int,
        picker: Picker,
        done: Stop,
        *,
        pad: torch.Tensor | None = None,
        put: Callable[[torch.Tensor], Any] | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        self.target, self.ids, self.count, self.picker, self.done = target, ids, count, picker, done
        self.pad, self.put, self.speculation = pad, put, speculation
        self.open = torch.ones(len(ids), dtype=torch.long, device=ids.device)
        self.finished = False
        self.tokens: list[int] = []

    def run(self, logits: torch.Tensor) -> torch.Tensor:
        """From the prompt's logits [batch, vocabulary] to all tokens [batch, tokens]."""
        self.begin(logits)
        while not self.finished:
            self.advance()
        self.picker.finish()
        return self.ids[:, : self.count]

    def begin(self, logits: torch.Tensor) -> None:
        """The first token, from the prompt's logits."""
        if self.speculation is not None:
            self.tokens = self.ids[0, : self.count].tolist()
            self.speculation.start(self.target)
        self._take(logits)

    def advance(self) -> None:
        """One call of the model, and the tokens that come of it; unless it is `finished`."""
        if self.speculation is None:
            self._take(self.target.step(self.ids[:, self.count - 1]))
            return
        spec, begun = self.speculation, time.perf_counter()
        spec.tally.steps += 1
        # The last token of the answer is never fed.
        room = self.ids.shape[1] - self.count - 1
        most = min(spec.pace.length(), room, self.target.most)
        found = Proposal()
        if most > 0:
            found = spec.draft.propose(self.tokens, self.ids, most, self.picker)
        if not found.tokens:
            self._take(self.target.step(self.ids[:, self.count - 1]))
            if most <= 0:
                spec.pace.step(time.perf_counter() - begun)
            return
        accepted = self._check(found, spec)
        rows = rows_of(len(found.tokens) + 1, self.target.blocks)
        spec.tally.blocks += 1
        spec.tally.proposed += len(found.tokens)
        spec.tally.accepted += accepted
        spec.pace.block(rows, len(found.tokens), accepted, time.perf_counter() - begun)

    def _check(self, found: Proposal, spec: Speculation) -> int:
        """Check a proposal in one call; how many of its tokens were right."""
        proposed = found.tokens
        logits = self.target.check([self.tokens[-1], *proposed], self.ids.device)
        likeliest = None
        if self.picker.plain and spec.ratio is None and not spec.measure:
            self.picker.width = logits.shape[-1]
            likeliest = logits.to(torch.float32).argmax(-1).tolist()
        accepted = 0
        for place in range(len(proposed) + 1):
            last = place == len(proposed)
            if likeliest is not None:
                self._settle(torch.tensor([likeliest[place]], device=self.ids.device))
            else:
                look = None if last else spec.instead(found, place)
                self._take(logits[place : place + 1], look)
            if last or self.tokens[-1] != proposed[place]:
                break
            accepted += 1
            if self.finished:
                break
        self.target.rewind(self.target.length - (self.count - 1))
        return accepted

    def _take(self, logits: torch.Tensor, instead: Any = None) -> None:
        self._settle(self.picker.next(self.ids[:, : self.count], logits, instead))

    def _settle(self, tokens: torch.Tensor) -> None:
        """One more column, and whether it was the last."""
        if self.pad is not None:
            tokens = tokens * self.open + self.pad * (1 - self.open)
        self.ids[:, self.count] = tokens
        self.count += 1
        if self.speculation is not None:
            self.tokens.append(int(tokens[0]))
        ids = self.ids[:, : self.count]
        scores = None if self.picker.scores is None else tuple(self.picker.scores)
        self.open &= ~self.done(ids, scores)
        if self.put is not None:
            self.put(tokens)
        self.finished = not bool(self.open.any())
