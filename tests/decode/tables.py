"""Language models that are tables: the law of every answer is known exactly, and so is what a cache must hold."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import torch

from sitsopt.decode.loop import Loop, Speculation
from sitsopt.decode.picker import Picker
from sitsopt.decode.runner import Runner
from sitsopt.decode.sizes import block_rows

ROOM = 256


class Layer:
    is_sliding, is_croppable = False, True

    def __init__(self, room: int) -> None:
        self.room, self.ids = room, list[int]()

    def get_max_length(self) -> int:
        return self.room

    def crop(self, tokens_to_remove: int) -> None:
        assert tokens_to_remove < 0 and -tokens_to_remove <= len(self.ids)
        del self.ids[tokens_to_remove:]


class Cache:
    """Its one layer remembers the tokens that were fed and not taken back."""

    def __init__(self, room: int = ROOM) -> None:
        self.layers = [Layer(room)]

    @property
    def ids(self) -> list[int]:
        return self.layers[0].ids

    def get_seq_length(self) -> int:
        return len(self.ids)


class Table:
    """Next-token probabilities [V, V, V'] given the last two tokens; the one before the first token is 0."""

    def __init__(self, law: torch.Tensor) -> None:
        self.law, self.rows = law, list[int]()

    def __call__(self, input_ids: torch.Tensor, cache: Cache, logits_to_keep: Any, **_: Any) -> Any:
        self.rows.append(input_ids.shape[1])
        found = []
        for token in input_ids[0].tolist():
            before = cache.ids[-1] if cache.ids else 0
            cache.ids.append(token)
            assert len(cache.ids) <= cache.layers[0].room
            found.append(self.law[before, token])
        logits = torch.stack(found)[None].log()
        if isinstance(logits_to_keep, int):
            return SimpleNamespace(logits=logits[:, -logits_to_keep:])
        return SimpleNamespace(logits=logits[:, logits_to_keep])


def table(seed: int, size: int = 5, sharp: float = 1.5, wide: int = 0) -> torch.Tensor:
    """A random law of `size` tokens, and `wide` more that it knows as next tokens only."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randn(size, size, size + wide, generator=generator, dtype=torch.float64)
    return (sharp * raw).softmax(-1).float()


def answer(
    law: torch.Tensor, prompt: list[int], new: int, picker: Picker, speculation: Speculation | None = None,
    ends: set[int] = frozenset(), room: int = ROOM,
) -> tuple[list[int], Cache, Table]:  # fmt: skip
    """The new tokens, the cache afterwards, and the model that ran."""
    model, cache = Table(law), Cache(room)
    blocks = () if speculation is None else block_rows(speculation.most)
    runner = Runner(model, cache, "cache", blocks=blocks)
    ids = torch.zeros(1, len(prompt) + new, dtype=torch.long)
    ids[0, : len(prompt)] = torch.tensor(prompt)

    def done(ids: torch.Tensor, scores: Any) -> torch.Tensor:
        return torch.tensor([ids.shape[1] >= len(prompt) + new or int(ids[0, -1]) in ends])

    loop = Loop(runner, ids, len(prompt), picker, done, speculation=speculation)
    found = loop.run(runner.prefill(ids[:, : len(prompt)]))
    return found[0, len(prompt) :].tolist(), cache, model


def exact_law(law: torch.Tensor, prompt: list[int], new: int, processors: Any) -> torch.Tensor:
    """Probabilities f64 [V, ...] of all answers of `new` tokens."""
    size = law.shape[-1]
    found = torch.zeros([size] * new, dtype=torch.float64)
    for tokens in itertools.product(range(size), repeat=new):
        chance = torch.tensor(1.0, dtype=torch.float64)
        text = [0, *prompt]
        for token in tokens:
            ids = torch.tensor([text[1:]])
            scores = processors(ids, law[text[-2], text[-1]].log()[None].clone())
            chance = chance * scores.double().softmax(-1)[0, token]
            text.append(token)
        found[tokens] = chance
    return found


def p_value(counts: torch.Tensor, law: torch.Tensor) -> float:
    """Pearson's chi-squared test; rare answers are one class."""
    expected = law.flatten() * counts.sum()
    rare = expected < 5
    classes = [(counts.flatten()[~rare], expected[~rare])]
    if float(expected[rare].sum()) >= 5:
        classes.append((counts.flatten()[rare].sum()[None], expected[rare].sum()[None]))
    seen, wanted = (torch.cat(parts) for parts in zip(*classes, strict=True))
    statistic = ((seen - wanted) ** 2 / wanted).sum()
    free = torch.tensor((len(seen) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(free, statistic / 2))


def p_of_rows(counts: torch.Tensor, law: torch.Tensor) -> float:
    """Pearson's test of rows [n, V] that are each a law of their own; in each row rare tokens are one class, or belong to
    the likeliest one."""
    statistic, free = torch.tensor(0.0, dtype=torch.float64), 0
    for seen, chances in zip(counts, law, strict=True):
        wanted = chances * seen.sum()
        often = wanted >= 5
        rest = torch.stack([seen[~often].sum(), wanted[~often].sum()])
        pairs = torch.stack([seen[often], wanted[often]], 1)
        if float(rest[1]) >= 5:
            pairs = torch.cat([pairs, rest[None]])
        elif len(pairs):
            pairs[pairs[:, 1].argmax()] += rest
        if len(pairs) > 1:
            statistic += ((pairs[:, 0] - pairs[:, 1]) ** 2 / pairs[:, 1]).sum()
            free += len(pairs) - 1
    return float(
        torch.special.gammaincc(torch.tensor(free / 2, dtype=torch.float64), statistic / 2)
    )
