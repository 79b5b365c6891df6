"""`generate()` of an optimized model: the tokens are those of transformers' own loop."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, StaticCache
from transformers.generation import BaseStreamer, LogitsProcessor, StoppingCriteria

import sitsopt
from sitsopt import fixed_cache
from sitsopt.decode import generating
from sitsopt.decode.loop import Speculation
from sitsopt.rewrite.record import Record
from sitsopt.session import sessions_of
from tests.rules.models import build

IDS = torch.randint(3, 60, (1, 9), generator=torch.Generator().manual_seed(1))
BATCH = torch.randint(3, 60, (3, 7), generator=torch.Generator().manual_seed(2))
LEFT = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7, [0] * 6 + [1]])


RECORDS: dict[int, Record] = {}


def looped(plain: Any, speculation: Speculation | None = None) -> Any:
    """A copy of a model that `generate`s through the loop; its calls run eagerly, one by one, and are counted."""
    model = copy.deepcopy(plain)
    model.rows = []
    inner = model._call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        model.rows.append(kwargs["input_ids"].shape[1])
        return inner(*args, **kwargs)

    model._compiled_call_impl = call
    fixed_cache.install(model)
    RECORDS[id(model)] = Record()
    generating.install(model, RECORDS[id(model)], speculation)
    return model


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    """A model as it is, and with the loop."""
    plain = build("llama")
    return plain, looped(plain)


def loop_of(model: Any) -> str:
    return RECORDS[id(model)].loop


def same(pair: tuple[Any, Any], ids: torch.Tensor = IDS, loop: str = "fast", **kwargs: Any) -> Any:
    """Both give the same, from the same seed, and leave the same random numbers."""
    plain, run = pair
    given = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, **kwargs}
    results = []
    for model, more in ((plain, {"cache_implementation": "static"}), (run, {})):
        torch.manual_seed(5)
        results.append((model.generate(ids, **{**more, **given}), torch.rand(1)))
    (want, then), (found, now) = results
    assert loop_of(run) == loop, RECORDS[id(run)].loop_why
    assert torch.equal(found.sequences, want.sequences) and then == now
    for name in ("scores", "logits"):
        ours, theirs = getattr(found, name, None), getattr(want, name, None)
        assert (ours is None) == (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    return found


SAMPLING: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
    {"min_p": 0.02, "top_k": 0},
    {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
]


@pytest.mark.parametrize("how", SAMPLING)
@pytest.mark.parametrize("ids, more", [
    (IDS, {}), (BATCH, {"attention_mask": LEFT}), (IDS, {"num_return_sequences": 3}),
])  # fmt: skip
def test_tokens_and_scores_are_those_of_transformers(
    pair: Any, how: dict[str, Any], ids: torch.Tensor, more: dict[str, Any]
) -> None:
    wanted = {"output_scores": True, "output_logits": True, "pad_token_id": 0}
    same(pair, ids, do_sample=True, **how, **more, **wanted)
    if "num_return_sequences" not in more:  # transformers refuses it
        penalties = {k: v for k, v in how.items() if "repe" in k}
        same(pair, ids, do_sample=False, **penalties, **more, **wanted)


def test_an_end_and_its_padding(pair: Any) -> None:
    whole = same(pair, BATCH, eos_token_id=None, max_new_tokens=8).sequences[:, 7:]
    for row, place in ((0, 3), (2, 0)):
        end = int(whole[row, place])
        same(pair, BATCH, eos_token_id=end, pad_token_id=0, max_new_tokens=8)
        same(pair, BATCH[row : row + 1], eos_token_id=[end, 66], pad_token_id=0, max_new_tokens=8)
    same(pair, max_new_tokens=1)
    same(pair, max_new_tokens=None, max_length=16, min_new_tokens=5)


def test_criteria_and_processors_of_the_caller(pair: Any) -> None:
    class Third(StoppingCriteria):
        def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            return torch.full((len(ids),), ids.shape[1] % 5 == 0)

    class Even(LogitsProcessor):
        def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            scores[:, 1::2] = -torch.inf  # in place, as some do
            return scores

    found = same(pair, stopping_criteria=[Third()], logits_processor=[Even()])
    assert found.sequences.shape[1] == 10 and found.sequences[0, 9] % 2 == 0


def test_stop_strings_end_an_answer(pair: Any, tiny_llama: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    whole = tokenizer.decode(same(pair, max_new_tokens=8).sequences[0, IDS.shape[1] :])
    given = {"stop_strings": [whole[3:5]], "tokenizer": tokenizer, "max_new_tokens": 8}
    assert same(pair, **given).sequences.shape[1] < IDS.shape[1] + 8


def test_a_streamer_hears_every_token(pair: Any) -> None:
    class Ear(BaseStreamer):
        def __init__(self) -> None:
            self.heard: list[Any] = []

        def put(self, value: torch.Tensor) -> None:
            self.heard.append(value.tolist())

        def end(self) -> None:
            self.heard.append("end")

    ears = [Ear(), Ear()]
    for model, ear in zip(pair, ears, strict=True):
        model.generate(IDS, max_new_tokens=12, do_sample=False, streamer=ear)
    assert ears[0].heard == ears[1].heard and len(ears[0].heard) == 14
    assert loop_of(pair[1]) == "fast"


def test_a_cache_of_the_caller_is_continued(pair: Any) -> None:
    run = pair[1]
    answers = []
    for model in pair:
        cache = StaticCache(config=model.config, max_cache_len=64)
        given = {"max_new_tokens": 6, "do_sample": False, "past_key_values": cache}
        first = model.generate(IDS, **given)
        text = torch.cat([first, BATCH[:1]], 1)
        answers.append((model.generate(text, **given), int(cache.get_seq_length())))
    assert torch.equal(answers[0][0], answers[1][0]) and answers[0][1] == answers[1][1]
    assert loop_of(run) == "fast"


@pytest.mark.parametrize("kwargs", [
    {"num_beams": 2}, {"use_cache": False}, {"cache_implementation": "dynamic"},
    {"output_hidden_states": True}, {"prompt_lookup_num_tokens": 2, "cache_implementation": "dynamic"},
])  # fmt: skip
def test_what_is_not_ours_goes_to_transformers(pair: Any, kwargs: dict[str, Any]) -> None:
    if kwargs.get("use_cache") is False:  # a static cache would contradict it
        kwargs = kwargs | {"cache_implementation": None}
    same(pair, loop="transformers", **kwargs)
    assert RECORDS[id(pair[1])].loop_why
    same(pair)


def test_prompts_come_in_few_sizes_and_the_cache_is_kept(pair: Any) -> None:
    run = pair[1]
    caches = [*generating._CACHES.get(run, {}).values()]
    given = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for length in (2, 5, 8, 20, 33, 40):
        ids = torch.randint(3, 60, (1, length))
        run.rows.clear()
        found = run.generate(ids, **given)
        assert torch.equal(found, pair[0].generate(ids, **given))
        assert run.rows == [32] * (1 + length // 32) + [1] * 7
        kept = [*generating._CACHES[run].values()]
        assert not caches or kept == caches
        caches = kept


def test_a_long_prompt_is_fed_in_pieces() -> None:
    plain = build("llama")
    plain.config.max_position_embeddings = 2048
    run = looped(plain)
    same((plain, run), torch.randint(3, 60, (1, 700)), max_new_tokens=4)
    assert run.rows == [512, 128, 32, 32, 1, 1, 1]


@pytest.mark.parametrize("name", ["mistral", "gemma3", "gpt2", "opt"])
def test_other_models(name: str) -> None:
    """Sliding windows cannot take tokens back: their prompts keep their length."""
    plain = build(name)
    run = looped(plain)
    same((plain, run), max_new_tokens=6)
    slides = any(layer.is_sliding for layer in StaticCache(plain.config, max_cache_len=99).layers)
    assert run.rows[0] == (9 if slides else 32)
    same((plain, run), BATCH, attention_mask=LEFT, max_new_tokens=6, pad_token_id=0)


def test_through_the_compiler() -> None:
    """A new length compiles nothing, and the report says which loop ran."""
    torch._dynamo.reset()
    plain = build("llama", layers=1)
    run = sitsopt.optimize(copy.deepcopy(plain), lowering="eager")
    for length in (9, 3, 30):
        ids = torch.randint(3, 60, (1, length))
        want = plain.generate(ids, max_new_tokens=6, do_sample=False)
        assert torch.equal(run.generate(ids, max_new_tokens=6, do_sample=False), want)
    assert len(sessions_of(run)[-1].record.graphs) == 2
    told = sitsopt.report(run)
    assert told.json()["loop"] == "fast" and "decoding loop: fast" in str(told)
