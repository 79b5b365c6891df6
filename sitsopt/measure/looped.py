"""The loop that `generate()` decodes with, for `run`, `bench` and `check`: calls of few sizes, and proposals where the
recipe asks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from sitsopt.decode.fitting import FAST, runner_of, why_plain, windows
from sitsopt.decode.loop import Loop, Speculation, Stop
from sitsopt.decode.picker import Picker
from sitsopt.decode.runner import Runner
from sitsopt.decode.sizes import SPARE
from sitsopt.measure.decode import Decoder, Run, text_config
from sitsopt.rewrite.record import Record
from sitsopt.spec.recipe_form import KVCache

Hear = Callable[[torch.Tensor], Any]


class Looped(Decoder):
    """A `Decoder` whose answers come from the loop. call: of `whole.compiled_call`; what its recipe proposes with is
    used if the cache allows it, and `record` says so. `prefill`, `logits` and `step` are those of any decoder."""

    def __init__(
        self, model: nn.Module, call: Any, max_len: int, kv: KVCache | None = None
    ) -> None:
        session = getattr(call, "session", None)  # anything else that runs a model has none
        spec: Speculation | None = session.extra.get("speculation") if session else None
        limit = getattr(text_config(model), "max_position_embeddings", None) or max_len + SPARE
        room = max_len if spec is None else max(max_len, min(max_len + SPARE, limit))
        super().__init__(model, call, room, kv)
        self.record: Record = session.record if session else Record()
        self.record.loop, self.record.loop_why = "fast", FAST
        why = why_plain(self.cache, 1)
        if spec is not None:
            self.record.speculation = f"not used: {why}" if why else spec.draft.name
        self.speculation = None if why else spec

    def run(self, ids: torch.Tensor, new: int) -> Run:
        """As any decoder does; where tokens are proposed, they come in blocks."""
        with torch.no_grad():
            start = self._now()
            logits = self._begin(ids)
            loop = self._loop(ids, new + 1, _long(ids.shape[1] + new + 1))
            loop.begin(logits)
            middle = self._now()
            while not loop.finished:
                loop.advance()
            end = self._now()
        tokens = loop.ids[0, ids.shape[1] : loop.count].tolist()
        return Run(middle - start, end - middle, tokens)

    def stream(self, ids: torch.Tensor, stop: set[int]) -> Iterator[int]:
        """Greedy tokens one by one, up to one of `stop` or to the end of the cache."""
        heard: list[torch.Tensor] = []
        with torch.no_grad():
            logits = self._begin(ids)
            long = _long(self.max_len)

            def done(ids: torch.Tensor, scores: Any) -> torch.Tensor:
                return torch.tensor([int(ids[0, -1]) in stop]) | long(ids, scores)

            loop = self._loop(ids, self.max_len - ids.shape[1], done, put=heard.append)
            loop.begin(logits)
        while True:
            for token in map(int, heard):
                if token in stop:
                    return
                yield token
            heard.clear()
            if loop.finished:
                return
            with torch.no_grad():
                loop.advance()

    @torch.no_grad()
    def answer(self, ids: torch.Tensor, new: int, whole: bool = False) -> tuple[list[int], torch.Tensor]:  # fmt: skip
        """`new` greedy tokens, and the logits f32 [new, vocabulary] that they were taken from. whole: compute the logits of
        the whole prompt, as one call that also serves a perplexity."""
        picker = Picker(ahead=self.speculation is not None, logits=True)
        logits = self.prefill(ids, all_logits=True)[:, -1] if whole else self._begin(ids)
        loop = self._loop(ids, new, _long(ids.shape[1] + new), picker)
        loop.run(logits)
        assert picker.logits is not None
        return loop.ids[0, ids.shape[1] : loop.count].tolist(), torch.cat(picker.logits)

    def told(self) -> dict[str, Any]:
        """Which loop ran and why, what proposed tokens or why nothing did, and how much came of it."""
        spec = self.speculation
        return {
            "loop": self.record.loop,
            "loop_why": self.record.loop_why,
            "speculation": self.record.speculation or None,
            "speculated": None if spec is None else spec.tally.as_dict(),
        }

    def runner(self, ids: torch.Tensor) -> Runner:
        """What runs calls of it, behind what the cache holds; `ids` are the prompt."""
        most = 0 if self.speculation is None else self.speculation.most
        mask = positions = None
        if windows(
            self.cache
        ):  # these count in Python: told where they are, graphs do not depend on it
            mask = ids.new_ones(1, self.max_len)
            positions = ids.new_full((1, 1), int(self.cache.get_seq_length()))
        return runner_of(self.model, self.call, self.cache, most, mask, positions)

    def _begin(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits [1, vocabulary] after the prompt, from an empty cache."""
        self.cache.reset()
        runner = self.runner(ids)
        places = None
        if runner.positions is not None:
            places = torch.arange(ids.shape[1], device=ids.device)[None]
        return runner.prefill(ids, places)

    def _loop(
        self, ids: torch.Tensor, new: int, done: Stop, picker: Picker | None = None, put: Hear | None = None
    ) -> Loop:  # fmt: skip
        count = ids.shape[1]
        buffer = ids.new_empty(1, count + new)
        buffer[:, :count] = ids
        spec = self.speculation
        picker = picker or Picker(ahead=spec is not None)
        return Loop(self.runner(ids), buffer, count, picker, done, put=put, speculation=spec)


def _long(most: int) -> Stop:
    """Stop at so many tokens."""
    answers = torch.tensor([False]), torch.tensor([True])
    return lambda ids, scores: answers[ids.shape[1] >= most].to(ids.device)
