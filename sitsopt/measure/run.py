"""`run`: answer a prompt with the compiled model, and time it against another engine in the same run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from sitsopt.measure import memory, text
from sitsopt.measure.engines import SitsOptions, TorchEngine, torch_engine
from sitsopt.measure.errors import InputError
from sitsopt.measure.models import Loaded

Say = Callable[[str], None]


@dataclass(frozen=True)
class RunOptions:
    """What to generate and what to time it against; `rounds` alternated timed runs of each engine."""

    prompt: str
    new: int = 128
    against: tuple[str, ...] = ()
    rounds: int = 3
    sits: SitsOptions = field(default_factory=SitsOptions)


class Generation:
    """One prompt on one model. Call `compile`, then `answer`, then `timings`."""

    def __init__(self, loaded: Loaded, options: RunOptions) -> None:
        if loaded.tokenizer is None:
            raise InputError(f"{loaded.name} came without a tokenizer: nothing can be generated")
        if options.new < 1:
            raise InputError(f"--new is {options.new}: at least 1")
        self.loaded, self.options = loaded, options
        self.ids = text.chat(loaded.tokenizer, options.prompt, loaded.device)
        self.max_len = self.ids.shape[1] + options.new + 1
        self.before_mb = memory.rss_mb()
        self.engines: dict[str, TorchEngine] = {}
        self.compile_s: dict[str, float] = {}

    def compile(self, say: Say) -> None:
        """Make every engine ready: its first run compiles a prefill and a decode step."""
        for name in dict.fromkeys(["sits", *self.options.against]):
            say(f"{name}: compiling (prefill and decode step)")
            engine = torch_engine(name, self.loaded, self.max_len, self.options.sits)
            begun = time.perf_counter()
            engine.run(self.ids, 1)
            self.compile_s[name] = time.perf_counter() - begun
            self.engines[name] = engine

    def answer(self) -> Iterator[str]:
        """The answer of `sits`, piece by piece as it is decoded."""
        tokenizer, tokens, shown = self.loaded.tokenizer, [], ""
        assert tokenizer is not None
        for token in self.engines["sits"].decoder.stream(self.ids, stop_tokens(self.loaded)):
            tokens.append(token)
            whole = tokenizer.decode(tokens, skip_special_tokens=True)
            if not whole.endswith("\ufffd"):  # a letter whose last bytes are still to come
                yield whole[len(shown) :]
                shown = whole
            if len(tokens) == self.options.new:
                return

    def timings(self, say: Say) -> dict[str, dict[str, Any]]:
        """Tokens a second of each engine on this prompt: medians of alternated runs."""
        runs: dict[str, list[Any]] = {name: [] for name in self.engines}
        for number in range(self.options.rounds):
            for name, engine in self.engines.items():
                say(f"timing, round {number + 1} of {self.options.rounds}: {name}")
                runs[name].append(engine.run(self.ids, self.options.new))
        return {
            name: {
                "prefill_tps": round(median(self.ids.shape[1] / r.prefill_s for r in done), 2),
                "decode_tps": round(median(self.options.new / r.decode_s for r in done), 2),
                "compile_s": round(self.compile_s[name], 2),
                **self.engines[name].told(),
            }
            for name, done in runs.items()
        }

    def used_mb(self) -> float:
        """Resident memory that compiling and running added to the loaded model, weights included."""
        weights = sum(p.numel() * p.element_size() for p in self.loaded.model.parameters())
        return max(0.0, memory.rss_mb() - self.before_mb) + weights / 1e6


def stop_tokens(loaded: Loaded) -> set[int]:
    """Ids that end an answer."""
    found: set[int | None] = set()
    places = (loaded.tokenizer, getattr(loaded.model, "generation_config", None), loaded.config)
    for place in places:
        value = getattr(place, "eos_token_id", None)
        found |= set(value) if isinstance(value, list | tuple) else {value}
    return {int(one) for one in found if one is not None}


def threads_and_device(loaded: Loaded) -> str:
    """Where it runs, in a few words."""
    if loaded.device.type == "cuda":
        return torch.cuda.get_device_name(loaded.device)
    return f"{torch.get_num_threads()} CPU threads"
