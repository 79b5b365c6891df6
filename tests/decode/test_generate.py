"""`generate()` of an optimized model: the tokens are those of transformers' own loop."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import StaticCache, TextIteratorStreamer
from transformers.generation import LogitsProcessor, StoppingCriteria

import sitsopt
from sitsopt.session import sessions_of
from tests.rules.models import build

IDS = torch.randint(3, 60, (1, 9), generator=torch.Generator().manual_seed(1))
BATCH = torch.randint(3, 60, (3, 7), generator=torch.Generator().manual_seed(2))
LEFT = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7, [0] * 6 + [1]])


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    """A model as it is, and optimized."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = build("llama")
    return plain, sitsopt.optimize(copy.deepcopy(plain), lowering="eager")


def loop_of(model: Any) -> str:
    return sessions_of(model)[-1].record.loop


def same(pair: tuple[Any, Any], ids: torch.Tensor = IDS, loop: str = "fast", **kwargs: Any) -> Any:
    """Both give the same, from the same seed, and leave the same random numbers."""
    plain, run = pair
    given = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True, **kwargs}
    results = []
    for model, more in ((plain, {"cache_implementation": "static"}), (run, {})):
        torch.manual_seed(5)
        results.append((model.generate(ids, **{**more, **given}), torch.rand(1)))
    (want, then), (found, now) = results
    assert loop_of(run) == loop, sessions_of(run)[-1].record.loop_why
    assert torch.equal(found.sequences, want.sequences) and then == now
    for name in ("scores", "logits"):
        ours, theirs = getattr(found, name), getattr(want, name)
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


@pytest.mark.parametrize("how", [{"do_sample": False}, *({"do_sample": True, **s} for s in SAMPLING)])
@pytest.mark.parametrize("ids, more", [
    (IDS, {}), (BATCH, {}), (BATCH, {"attention_mask": LEFT}), (IDS, {"num_return_sequences": 3}),
])  # fmt: skip
def test_tokens_and_scores_are_those_of_transformers(
    pair: Any, how: dict[str, Any], ids: torch.Tensor, more: dict[str, Any]
) -> None:
    if how == {"do_sample": False} and "num_return_sequences" in more:
        return  # transformers refuses it
    wanted = {"output_scores": True, "output_logits": True, "pad_token_id": 0}
    same(pair, ids, **how, **more, **wanted)


def test_an_end_and_its_padding(pair: Any) -> None:
    whole = same(pair, BATCH, eos_token_id=None, max_new_tokens=20).sequences[:, 7:]
    for row, place in ((0, 3), (1, 6), (2, 0)):
        end = int(whole[row, place])
        same(pair, BATCH, eos_token_id=end, pad_token_id=0, max_new_tokens=20)
        same(pair, BATCH[row : row + 1], eos_token_id=[end, 66], pad_token_id=0, max_new_tokens=20)
    same(pair, max_new_tokens=1)
    same(pair, max_new_tokens=None, max_length=30, min_new_tokens=5)


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


def test_a_streamer_hears_every_token(pair: Any) -> None:
    class Tokenizer:
        def decode(self, ids: Any, **_: Any) -> str:
            return "".join(f"{int(i)} \n" for i in ids)

    texts = []
    for model in pair:
        streamer = TextIteratorStreamer(Tokenizer(), timeout=10)
        model.generate(IDS, max_new_tokens=12, do_sample=False, streamer=streamer)
        texts.append("".join(streamer))
    assert texts[0] == texts[1] and loop_of(pair[1]) == "fast"


def test_a_cache_of_the_caller_is_continued(pair: Any) -> None:
    plain, run = pair
    answers = []
    for model in pair:
        cache = StaticCache(config=model.config, max_cache_len=64)
        given = {"max_new_tokens": 6, "do_sample": False, "past_key_values": cache}
        first = model.generate(IDS, **given)
        text = torch.cat([first, BATCH[:1]], 1)
        answers.append((model.generate(text, **given), int(cache.get_seq_length())))
    assert torch.equal(answers[0][0], answers[1][0]) and answers[0][1] == answers[1][1]
    assert loop_of(run) == "fast"


def test_what_is_not_ours_goes_to_transformers(pair: Any) -> None:
    for kwargs in (
        {"num_beams": 2}, {"use_cache": False}, {"cache_implementation": "dynamic"},
        {"output_hidden_states": True}, {"prompt_lookup_num_tokens": 2},
    ):  # fmt: skip
        same(pair, loop="transformers", **kwargs)
        assert sessions_of(pair[1])[-1].record.loop_why
    same(pair)
    told = sitsopt.report(pair[1])
    assert told.json()["loop"] == "fast" and "loop: fast" in str(told)


def test_prompts_of_new_lengths_compile_nothing(pair: Any) -> None:
    same(pair)
    count = len(sessions_of(pair[1])[-1].record.graphs)
    for length in (2, 5, 8, 20):
        same(pair, torch.randint(3, 60, (1, length)))
    assert len(sessions_of(pair[1])[-1].record.graphs) == count


def test_a_long_prompt_is_fed_in_pieces() -> None:
    torch._dynamo.reset()
    plain = build("llama", max_position_embeddings=1024)
    run = sitsopt.optimize(copy.deepcopy(plain), lowering="eager")
    same((plain, run), torch.randint(3, 60, (1, 700)), max_new_tokens=4)


@pytest.mark.parametrize("name", ["gemma3", "gpt2", "mistral"])
def test_other_models(name: str) -> None:
    """Sliding windows cannot take tokens back: their prompts keep their length."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = build(name)
    same((plain, sitsopt.optimize(copy.deepcopy(plain), lowering="eager")), max_new_tokens=8)
