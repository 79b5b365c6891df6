from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sitsopt.measure import text
from sitsopt.measure.errors import InputError
from sitsopt.measure.models import load


@pytest.fixture(scope="module")
def tokenizer(tiny_llama: Path):
    return load(str(tiny_llama), "f32").tokenizer


def test_the_text_is_the_same_each_time_and_names_itself():
    first, digest = text.corpus(), text.digest()
    text.corpus.cache_clear()
    assert text.corpus() == first
    assert text.digest() == digest and len(digest) == 12


def test_what_is_measured_on_was_not_tuned_on():
    tuned, measured = text.calibration_text(), text.evaluation_text()
    assert tuned + measured == text.corpus()
    assert 0.69 < len(tuned) / len(text.corpus()) < 0.75
    assert measured.startswith("\n\n"), "the cut stands between two topics"


def test_windows_are_whole_rows_of_the_evaluation_text(tokenizer):
    rows = text.windows(tokenizer, n_tokens=200, window=64)
    assert rows.shape == (3, 64)
    assert text.evaluation_text().startswith(tokenizer.decode(rows.flatten().tolist()))
    with pytest.raises(InputError, match="no window"):
        text.windows(tokenizer, n_tokens=10, window=64)
    with pytest.raises(InputError, match="are needed"):
        text.windows(tokenizer, n_tokens=10**6, window=64)


def test_prompts_have_one_length_and_end_in_the_question(tokenizer):
    rows = text.prompts(tokenizer, 8, 128)
    assert rows.shape == (8, 128) and len({tuple(row) for row in rows.tolist()}) == 8
    for row, prompt in zip(rows, text.PROMPTS, strict=True):
        assert tokenizer.decode(row.tolist()).endswith(f"Question: {prompt}\nAnswer:")


def test_a_context_longer_than_the_text_repeats_it(tokenizer):
    class Short:
        def __call__(self, words: str, **_: object) -> dict[str, list[int]]:
            return {"input_ids": [1, 2, 3]}

    assert text.context(tokenizer, 100).shape == (1, 100)
    assert text.context(Short(), 7).tolist() == [[1, 2, 3, 1, 2, 3, 1]]


def test_chat_rows_have_the_same_strides_whatever_their_length(tokenizer):
    rows = [text.chat(tokenizer, prompt) for prompt in ("Hi", "How are you?")]
    assert all(row.stride() == (row.shape[1], 1) and row.dtype == torch.long for row in rows)
