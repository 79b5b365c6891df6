"""Speculation on models that are tables: the law, the tokens of a seed, and the cache are those without it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from sitsopt.decode.drafts import Draft, Lookup, OtherModel, OwnLayers, Proposal
from sitsopt.decode.loop import Speculation
from sitsopt.decode.picker import Picker
from sitsopt.decode.runner import Runner
from tests.decode.tables import (
    Cache,
    Table,
    answer,
    exact_law,
    p_of_rows,
    p_value,
    table,
)

LAW, OTHER = table(1), table(2)
PROMPT = [1, 2, 3, 1, 2]


class Fixed:
    """Proposes one token again and again, whatever the text is."""

    name = "fixed"

    def __init__(self, token: int = 3) -> None:
        self.token = token

    def start(self, target: Runner) -> None: ...

    def propose(self, tokens: Any, ids: Any, most: int, picker: Any) -> Proposal:
        return Proposal([self.token] * most)


class Nothing(Fixed):
    def propose(self, tokens: Any, ids: Any, most: int, picker: Any) -> Proposal:
        return Proposal()


def other(law: torch.Tensor) -> OtherModel:
    return OtherModel("other", Runner(Table(law), Cache(), "cache"), law.shape[0])


def nan_rows() -> torch.Tensor:
    law = OTHER.clone()
    law[:, 3] = float("nan")
    return law


def bf16(law: torch.Tensor) -> torch.Tensor:
    """Logits in bf16, many of them equal."""
    return law.log().bfloat16().float().exp()


DRAFTS: dict[str, Callable[[], Draft]] = {
    "lookup": Lookup,
    "wrong": Fixed,
    "nothing": Nothing,
    "other": lambda: other(OTHER),
    "other, bf16": lambda: other(bf16(OTHER)),
    "other, equal": lambda: other(LAW),
    "other, uniform": lambda: other(torch.full_like(LAW, 0.2)),
    "other, nan": lambda: other(nan_rows()),
    "other, fewer tokens": lambda: other(table(4, size=4)),
    "other, more tokens": lambda: other(table(5, wide=2)),
    "own layers": lambda: OwnLayers("layer-skip", Table(OTHER), 1),
}
WARPERS: dict[str, list[Any]] = {
    "plain": [],
    "cold": [TemperatureLogitsWarper(0.3)],
    "warm, top-p": [TemperatureLogitsWarper(1.5), TopPLogitsWarper(0.8)],
    "top-k": [TopKLogitsWarper(2)],
    "penalty": [RepetitionPenaltyLogitsProcessor(1.7)],
}


def spoken(draft: str, most: int = 4, **kwargs: Any) -> Speculation:
    return Speculation(DRAFTS[draft](), most, adapt=False, **kwargs)


def counted(
    law: torch.Tensor, processors: Any, draws: int, make: Callable[[], Any]
) -> torch.Tensor:
    counts = torch.zeros([law.shape[-1]] * 3, dtype=torch.float64)
    speculation = make()
    for seed in range(draws):
        torch.manual_seed(seed)
        found, _, _ = answer(law, PROMPT, 3, Picker(processors, True, True), speculation)
        counts[tuple(found)] += 1
    return counts


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("most", [1, 3, 16])
def test_greedy_tokens_and_cache_are_those_without(draft: str, most: int) -> None:
    want, plain, _ = answer(LAW, PROMPT, 40, Picker())
    speculation = spoken(draft, most)
    for _ in range(2):  # a draft begins anew
        found, cache, _ = answer(LAW, PROMPT, 40, Picker(), speculation)
        assert found == want and cache.ids == plain.ids == [*PROMPT, *want[:-1]]
    tally = speculation.tally
    assert tally.accepted <= tally.proposed and (tally.proposed > 0) == (draft != "nothing")
    if draft == "other, equal":
        assert tally.accepted == tally.proposed and tally.steps < 80 / (1 + most) + 4


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("warpers", WARPERS)
def test_a_seed_gives_the_tokens_and_the_state_that_it_gives_without(
    draft: str, warpers: str
) -> None:
    processors = LogitsProcessorList(WARPERS[warpers])
    for seed in range(8):
        torch.manual_seed(seed)
        want, _, _ = answer(LAW, PROMPT, 12, Picker(processors, True))
        after = torch.rand(1)
        torch.manual_seed(seed)
        found, cache, _ = answer(LAW, PROMPT, 12, Picker(processors, True, True), spoken(draft))
        assert found == want and torch.rand(1) == after
        assert cache.ids == [*PROMPT, *want[:-1]]


def test_an_end_inside_a_block() -> None:
    want, _, _ = answer(LAW, PROMPT, 40, Picker())
    for end in range(5):
        length = want.index(end) + 1 if end in want else 40
        for draft in DRAFTS:
            found, cache, _ = answer(LAW, PROMPT, 40, Picker(), spoken(draft, 16), {end})
            assert found == want[:length] and cache.ids == [*PROMPT, *want[: length - 1]]


def test_a_block_ends_inside_the_cache() -> None:
    want, _, _ = answer(LAW, PROMPT, 40, Picker())
    room = len(PROMPT) + 39  # the last token is never fed
    for draft in DRAFTS:
        found, _, _ = answer(LAW, PROMPT, 40, Picker(), spoken(draft, 16), room=room)
        assert found == want


def test_calls_come_in_few_sizes() -> None:
    _, _, model = answer(LAW, PROMPT, 60, Picker(), spoken("wrong", 16))
    assert set(model.rows) <= {32, 1, 16, *range(1, 16)} and {32, 16} <= set(model.rows)
    adapting = Speculation(DRAFTS["other, equal"](), 16)
    _, _, model = answer(LAW, PROMPT, 120, Picker(), adapting)
    assert {4, 16} & set(model.rows)


def test_a_law_that_is_nan_is_an_error() -> None:
    law = LAW.clone()
    law[:, 3] = float("nan")
    with pytest.raises(RuntimeError, match="nan"):
        for seed in range(20):
            torch.manual_seed(seed)
            answer(law, PROMPT, 40, Picker((), True, True), spoken("other"))


def chi_squared(draft: str, most: int, warpers: str, draws: int) -> None:
    processors = LogitsProcessorList(WARPERS[warpers])
    law = exact_law(LAW, PROMPT, 3, processors)
    assert abs(float(law.sum()) - 1) < 1e-6
    counts = counted(LAW, processors, draws, lambda: spoken(draft, most))
    assert bool((law[counts > 0] > 0).all())
    assert p_value(counts, law) > 1e-5


SOME: Sequence[tuple[str, int, str]] = [
    ("lookup", 2, "warm, top-p"), ("other, bf16", 2, "plain"), ("own layers", 1, "top-k"),
]  # fmt: skip


@pytest.mark.parametrize("draft, most, warpers", SOME)
def test_the_law_of_three_tokens(draft: str, most: int, warpers: str) -> None:
    chi_squared(draft, most, warpers, 1500)


def chain(draft: str, most: int, warpers: str, draws: int) -> tuple[float, int]:
    """p of long answers, and how many proposals there were. A table's next token depends on the two before it, so each
    token is a draw from a row that is known: [V, V, V] counts, tested row by row in one sum."""
    processors = LogitsProcessorList(WARPERS[warpers])
    size, length = LAW.shape[0], min(draws, 2000)
    counts = torch.zeros(size, size, size, dtype=torch.float64)
    speculation = spoken(draft, most)
    for seed in range(draws // length):
        torch.manual_seed(seed)
        picker = Picker(processors, True, True)
        found, _, _ = answer(LAW, PROMPT, length, picker, speculation, room=length + 64)
        text = torch.tensor([*PROMPT[-2:], *found])
        places = (text[:-2] * size + text[1:-1]) * size + text[2:]
        counts += places.bincount(minlength=size**3).view(size, size, size)
    rows = LAW.log().view(-1, size)
    law = processors(torch.zeros(len(rows), 1, dtype=torch.long), rows.clone()).double()
    law = law.softmax(-1).view(size, size, size)
    assert bool((law[counts > 0] > 0).all())
    return p_of_rows(counts.flatten(0, 1), law.flatten(0, 1)), speculation.tally.proposed


@pytest.mark.parametrize("draft", DRAFTS)
def test_the_law_of_long_answers(draft: str) -> None:
    p, proposed = chain(draft, 3, "plain", 2000)
    assert p > 1e-5 and (proposed > 0) == (draft != "nothing")


@pytest.mark.slow
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("most, warpers", [
    (1, "plain"), (2, "warm, top-p"), (4, "cold"), (8, "top-k"), (16, "plain"),
])  # fmt: skip
def test_the_law_of_long_answers_in_full(draft: str, most: int, warpers: str) -> None:
    assert chain(draft, most, warpers, 60_000)[0] > 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["lookup", "other, bf16", "own layers"])
def test_the_law_under_a_penalty_in_full(draft: str) -> None:
    """What a processor makes of the tokens before it: no chain, so whole answers are counted."""
    chi_squared(draft, 2, "penalty", 60_000)


def test_the_test_of_the_law_sees_a_wrong_law() -> None:
    """The known mistake: a proposal that is accepted because it is likely, whatever was drawn."""

    class Biased(Speculation):
        def instead(self, found: Proposal, place: int) -> Any:
            token = found.tokens[place]
            return lambda scores: token if float(scores.softmax(-1)[0, token]) > 0.05 else None

    processors = LogitsProcessorList()
    counts = counted(LAW, processors, 1000, lambda: Biased(Fixed(4), 2, adapt=False))
    assert p_value(counts, exact_law(LAW, PROMPT, 3, processors)) < 1e-5
    DRAFTS["biased"] = lambda: Fixed(4)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(f"{__name__}.Speculation", Biased)
            assert chain("biased", 2, "plain", 2000)[0] < 1e-5
    finally:
        del DRAFTS["biased"]


@pytest.mark.parametrize("ratio", [0.05, 0.3])
def test_adaptive_changes_the_law_by_no_more_than_it_says(ratio: float) -> None:
    """One copied token: total variation at most 1 - exp(-ratio * H)."""
    moved = False
    for token in range(5):
        draws = 1500
        counts = torch.zeros(5, dtype=torch.float64)
        speculation = Speculation(Fixed(token), 1, ratio=ratio, adapt=False)
        law = LAW[PROMPT[-2], PROMPT[-1]].double()
        for seed in range(draws):
            torch.manual_seed(seed)
            # The first token comes with the prompt: look at the second, after one that is certain.
            found, _, _ = answer(_certain(LAW), PROMPT, 3, Picker((), True, True), speculation)
            counts[found[1]] += 1
        law = _certain(LAW)[PROMPT[-1], 0].double()
        entropy = float(-(law * law.log()).sum())
        distance = 0.5 * float((counts / draws - law).abs().sum())
        assert distance <= 1 - float(torch.tensor(-ratio * entropy).exp()) + 0.04
        moved |= distance > 0.05
    assert moved == (ratio == 0.3)


def _certain(law: torch.Tensor) -> torch.Tensor:
    """The first new token is 0 always, so that the place after it can be looked at alone."""
    found = law.clone()
    found[PROMPT[-2], PROMPT[-1]] = torch.tensor([1.0, 0, 0, 0, 0])
    found[PROMPT[-1], 0] = torch.tensor([0.82, 0.09, 0.04, 0.03, 0.02])
    return found
