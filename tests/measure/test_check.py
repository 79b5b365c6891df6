from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from sitsopt.measure import check as module
from sitsopt.measure.check import CheckOptions, _Sums, apart, check, failures, steps_between
from sitsopt.measure.engines import SitsOptions
from sitsopt.measure.models import Loaded, load

SMALL = CheckOptions(
    prompts=2, new=6, tokens=192, window=64, sits=SitsOptions(extra={"lowering": "eager"})
)


@pytest.fixture
def loaded(tiny_llama: Path) -> Loaded:
    torch._dynamo.reset()
    return load(str(tiny_llama), "f32", device="cpu")


def test_sits_passes_and_every_rewrite_is_told(loaded: Loaded):
    result = check(loaded, SMALL)
    assert result["passed"] and result["failures"] == [] and result["tokens_equal"]
    assert result["max_rel"] < 1e-4 and abs(result["kl"]) < 1e-6
    assert result["ppl_sits"] == pytest.approx(result["ppl_eager"], rel=1e-5)
    assert result["tokens"] == 192 and result["window"] == 64
    for row in result["rewrites"]:
        assert row.keys() == {"id", "site", "key", "max_abs", "scale"}
        assert row["max_abs"] <= 1e-4 * max(1.0, row["scale"])


def test_a_wrong_engine_fails(loaded: Loaded, monkeypatch: pytest.MonkeyPatch):
    def negated(name, loaded, sits):
        def call(**kwargs):
            out = loaded.model(**kwargs)
            out.logits = -out.logits
            return out

        return call, ""

    monkeypatch.setattr(module, "compiled", negated)
    result = check(loaded, CheckOptions(2, 6, 128, 64, rewrites=False))
    assert not result["passed"] and not result["tokens_equal"]
    first = result["tokens_differ"][0]
    assert (first["prompt"], first["at"], first["of"]) == (1, 1, 6) and first["steps"] > 2
    assert len(result["failures"]) == 4 and "rewrites" not in result


def test_what_decides_goes_with_the_dtype():
    same = {"tokens_differ": [], "max_rel": 0.0, "ppl_delta_pct": 0.0}
    moved = {"tokens_differ": [{"prompt": 1, "at": 2, "of": 3}], "max_rel": 0.1}
    f32, bf16 = torch.float32, torch.bfloat16
    assert failures(same, f32) == failures(same, bf16) == []
    assert len(failures({**moved, "ppl_delta_pct": 0.05}, f32)) == 2
    assert failures({**moved, "ppl_delta_pct": 0.05}, bf16) == []
    assert len(failures({**moved, "ppl_delta_pct": -0.2}, bf16)) == 1
    assert failures({**moved, "ppl_delta_pct": 0.8}, f32, ppl_within=1.0) == []
    assert len(failures({**same, "max_rel": math.nan, "ppl_delta_pct": math.nan}, f32)) == 2


def test_sums_are_perplexity_and_divergence():
    torch.manual_seed(0)
    logits, ids = torch.randn(16, 11), torch.randint(0, 11, (16,))
    sums = _Sums()
    sums.add(logits, logits.clone(), ids)
    loss = torch.nn.functional.cross_entropy(logits[:-1], ids[1:])
    assert sums.perplexity(sums.eager) == pytest.approx(math.exp(loss), rel=1e-5)
    assert (sums.max_abs, sums.tokens) == (0.0, 15) and abs(sums.kl) < 1e-6
    other = logits.clone()
    other[3, 2] = math.nan
    sums.add(logits, other, ids)
    assert sums.max_abs == math.inf


class Scripted:
    """A decoder whose logits are given: one row a step."""

    def __init__(self, rows: list[list[float]]) -> None:
        self.rows, self.at, self.token = rows, 0, torch.zeros(1, 1, dtype=torch.long)

    def prefill(self, ids: torch.Tensor, all_logits: bool) -> torch.Tensor:
        return torch.tensor([[self.rows[0]]])

    def step(self, logits: torch.Tensor) -> torch.Tensor:
        self.at += 1
        return torch.tensor([[self.rows[self.at]]])

    def pick(self, logits: torch.Tensor) -> None:
        self.token.copy_(logits[:, -1].argmax(-1, keepdim=True))

    def answer(self, ids: torch.Tensor, new: int, whole: bool) -> tuple[list[int], torch.Tensor]:
        rows = torch.tensor(self.rows)
        return rows.argmax(-1).tolist(), rows


def test_tokens_are_compared_up_to_the_first_that_differs():
    right = [[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]
    near = [[1.0, 0.25], [0.0, 1.5], [1.0, 0.0]]
    other = [[1.0, 0.0], [2.0, 1.0], [9.0, 0.0]]
    ids = torch.zeros(4, dtype=torch.long)
    assert apart(Scripted(right), Scripted(near), ids, 3) == (None, 0.5, 0.0)
    at, gap, steps = apart(Scripted(right), Scripted(other), ids, 3)
    assert (at, gap) == (1, 2.0) and steps == 2**23


def test_steps_of_a_dtype():
    logits = torch.tensor([8.0, 7.9375, -3.0], dtype=torch.bfloat16)
    assert steps_between(logits, 0, 1) == 1.0  # bf16 has 7 bits behind the point: 1/16 from 8 on
    assert steps_between(logits.float(), 0, 1) == 2.0**16
