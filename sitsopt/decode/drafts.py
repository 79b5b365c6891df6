"""What proposes tokens: the text so far, layers of the model itself, another model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from .picker import Picker
from .runner import Runner

LONGEST, SHORTEST = 4, 2  # tokens of a context that must have come before


@dataclass
class Proposal:
    """Tokens, and the processed scores f32 [1, vocabulary] that each was taken from; none where a text was copied."""

    tokens: list[int] = field(default_factory=list)
    scores: list[torch.Tensor] = field(default_factory=list)


class Draft(Protocol):
    """Something that proposes. `start` before an answer; `propose` at most `most` tokens after `tokens`, none if it has
    nothing to say. `ids` [1, tokens] are the same tokens, with room behind them."""

    name: str

    def start(self, target: Runner) -> None: ...

    def propose(
        self, tokens: Sequence[int], ids: torch.Tensor, most: int, picker: Picker
    ) -> Proposal: ...


class Lookup:
    """Continues as the text did after the same last tokens (Saxena, prompt lookup decoding, 2023).

    The index grows with the text, a few entries a token: the last place of each run of 2 to 4 tokens.
    """

    name = "prompt-lookup"

    def __init__(self, longest: int = LONGEST, shortest: int = SHORTEST) -> None:
        self.sizes = range(longest, shortest - 1, -1)
        self._after: dict[tuple[int, ...], int] = {}
        self._known = 0

    def start(self, target: Runner) -> None:
        """Forget the last text."""
        self._after.clear()
        self._known = 0

    def propose(
        self, tokens: Sequence[int], ids: torch.Tensor, most: int, picker: Picker
    ) -> Proposal:
        """Tokens as they followed before; a text that repeats is continued beyond its end."""
        for place in range(self._known, len(tokens)):
            for size in self.sizes:
                if place >= size:
                    self._after[tuple(tokens[place - size : place])] = place
        self._known = len(tokens)
        for size in self.sizes:
            found = self._after.get(tuple(tokens[-size:])) if len(tokens) > size else None
            if found is not None:
                period = len(tokens) - found
                return Proposal([tokens[found + step % period] for step in range(most)])
        return Proposal()


class OwnLayers:
    """The model's first layers, or all of them in fewer bits, on the model's own cache.

    They write the rows of what they propose into the layers of the target's cache that they have; those rows are taken
    back, and the check of the proposal overwrites them. So the draft needs no cache and no prefill of its own.
    call: the compiled draft. layers: how many of the cache's it writes.
    """

    def __init__(self, name: str, call: object, layers: int) -> None:
        self.name, self.call, self.layers = name, call, layers

    def start(self, target: Runner) -> None:
        """Work on the cache of this answer."""
        self.target = target

    def propose(
        self, tokens: Sequence[int], ids: torch.Tensor, most: int, picker: Picker
    ) -> Proposal:
        """Tokens one by one."""
        target = self.target
        runner = Runner(
            self.call, target.cache, target.name,  # type: ignore[arg-type]
            keeps=target.keeps, depth=self.layers,
            mask=target.mask, positions=target.positions,
        )  # fmt: skip
        before = runner.length = target.length
        found = _write(runner, tokens[-1:], len(tokens), ids, most, picker)
        runner.rewind(runner.length - before)
        return found


class OtherModel:
    """A model with the same tokens and a cache of its own. vocabulary: its size: after a token that it does not know it
    proposes nothing any more. Tokens that the target does not know are never proposed."""

    def __init__(self, name: str, runner: Runner, vocabulary: int) -> None:
        self.name, self.runner, self.vocabulary = name, runner, vocabulary
        self._fed: list[int] = []
        self._sure = 0  # tokens of `_fed` that were settled when they were fed

    def start(self, target: Runner) -> None:
        """Forget the last text."""
        self.runner.rewind(self.runner.length)
        self._fed, self._sure = [], 0

    def propose(
        self, tokens: Sequence[int], ids: torch.Tensor, most: int, picker: Picker
    ) -> Proposal:
        """Tokens one by one, after catching up on those that were settled meanwhile."""
        same, end = self._sure, min(len(self._fed), len(tokens) - 1)
        while same < end and self._fed[same] == tokens[same]:
            same += 1
        self.runner.rewind(len(self._fed) - same)
        new = list(tokens[same:])
        most = min(most, self.runner.room - len(tokens))
        if most < 1 or max(new) >= self.vocabulary:
            del self._fed[same:]
            self._sure = same
            return Proposal()
        found = _write(self.runner, new, len(tokens), ids, most, picker)
        self._fed, self._sure = [*tokens, *found.tokens][: self.runner.length], len(tokens)
        return found


def _write(
    runner: Runner, new: Sequence[int], count: int, ids: torch.Tensor, most: int, picker: Picker
) -> Proposal:
    """Feed `new`, the last of `count` tokens, then up to `most` tokens of the draft's own."""
    found = Proposal()
    if len(new) > 2:
        logits = runner.prefill(torch.tensor([new], device=ids.device))
    else:
        for token in new:
            logits = runner.step(torch.tensor([token], device=ids.device))
    for ahead in range(most):
        scores = picker.processed(ids[:, : count + ahead], _fitted(logits, picker.width))
        drawn = picker.proposal(ids, scores, ahead)
        if drawn is None:
            break
        found.tokens.append(drawn)
        found.scores.append(scores)
        ids[0, count + ahead] = drawn
        if ahead + 1 < most:
            logits = runner.step(torch.tensor([drawn], device=ids.device))
    return found


def _fitted(logits: torch.Tensor, width: int) -> torch.Tensor:
    """Logits over the target's tokens: what only the draft knows is left out, what it does not know is impossible."""
    more = width - logits.shape[-1]
    if more <= 0:
        return logits[..., :width]
    return torch.nn.functional.pad(logits, (0, more), value=float("-inf"))
