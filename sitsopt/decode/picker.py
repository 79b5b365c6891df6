"""Logits to tokens, as transformers does it: processors, softmax, one draw.

torch.multinomial draws one token as argmax(p / e) with e exponential noise (ATen/native/Distributions.cpp). With
speculation that noise is drawn here, once for each place of the answer, in order, and kept until its place is
settled. So a token depends on its place's noise and on the model alone: never on what was proposed, how many tokens
were proposed at once or how long that took. The law is the model's own, and a seed gives the tokens that
transformers' loop gives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

Instead = Callable[[torch.Tensor], int | None]
Processors = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Picker:
    """processors: of transformers, applied to (ids [batch, tokens], logits [batch, vocabulary] f32). ahead: whether
    places are looked at before the ones in front of them are settled. `scores` and `logits` of every settled place are
    kept on request."""

    def __init__(
        self,
        processors: Any = (),
        sample: bool = False,
        ahead: bool = False,
        scores: bool = False,
        logits: bool = False,
    ) -> None:
        self.processors, self.sample, self.ahead = processors, sample, ahead
        self.scores: list[torch.Tensor] | None = [] if scores else None
        self.logits: list[torch.Tensor] | None = [] if logits else None
        self._noise: deque[tuple[torch.Tensor, Any]] = deque()
        self.width = 0  # of the model's logits
        self.plain = not processors and not sample and not scores and not logits

    def processed(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Scores f32 [batch, vocabulary]; `logits` is left as it is."""
        raw = logits.to(copy=bool(self.processors), dtype=torch.float32)
        return self.processors(ids, raw) if self.processors else raw

    def next(
        self, ids: torch.Tensor, logits: torch.Tensor, instead: Instead | None = None
    ) -> torch.Tensor:
        """The tokens [batch] after `ids`, and their place settled; `instead` may take another one by the scores."""
        self.width = logits.shape[-1]
        scores = self.processed(ids, logits)
        if self.logits is not None:
            self.logits.append(logits.to(copy=True, dtype=torch.float32))
        if self.scores is not None:
            self.scores.append(scores)
        if instead is not None and (other := instead(scores)) is not None:
            if self._noise:
                self._noise.popleft()
            return torch.tensor([other], device=scores.device)
        if not self.sample:
            return scores.argmax(-1)
        probabilities = scores.softmax(-1)
        if not self.ahead:
            return torch.multinomial(probabilities, 1)[:, 0]
        found = self._draw(probabilities, 0)
        self._noise.popleft()
        return found

    def proposal(self, ids: torch.Tensor, scores: torch.Tensor, ahead: int) -> int | None:
        """What a draft with these processed scores [1, vocabulary] takes `ahead` places on; None where they mean nothing."""
        scores = scores[0]
        if bool(torch.isnan(scores).any()):
            return None
        if not self.sample:
            return int(scores.argmax(-1))
        return int(self._draw(scores.softmax(-1)[None], ahead)[0])

    def _draw(self, probabilities: torch.Tensor, ahead: int) -> torch.Tensor:
        """Tokens [batch] drawn with the noise of the place `ahead`. Raises RuntimeError for what is no probability."""
        if not bool(torch.isfinite(probabilities).all()):
            raise RuntimeError("the probabilities of the next token contain inf or nan")
        while len(self._noise) <= ahead:
            state = torch.random.get_rng_state() if probabilities.is_cpu else None
            self._noise.append((torch.empty_like(probabilities).exponential_(1), state))
        return (probabilities / self._noise[ahead][0]).argmax(-1)

    def finish(self) -> None:
        """Give back what was drawn for places that are not used: the generator stands where one by one it would."""
        if self._noise and self._noise[0][1] is not None:
            torch.random.set_rng_state(self._noise[0][1])
        self._noise.clear()
