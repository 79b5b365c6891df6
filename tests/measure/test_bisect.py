from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sitsopt.measure.bisect import bisect
from sitsopt.measure.check import CheckOptions
from sitsopt.measure.engines import SitsOptions
from sitsopt.measure.models import Loaded, load

WRONG = """\
summary: Takes the activation for another one, which is wrong.
doc: |
  Stands here to be found.
inputs:
  x: T[*B, H]
match: |
  return aten.silu(x)
replace: |
  return aten.relu(x)
examples:
  - fires: {T: f32, B: [2], H: 4}
"""


@pytest.fixture
def loaded(tiny_llama: Path) -> Loaded:
    torch._dynamo.reset()
    return load(str(tiny_llama), "f32", device="cpu")


def options(*path: str) -> CheckOptions:
    sits = SitsOptions(path=path, extra={"lowering": "eager"})
    return CheckOptions(1, 2, 32, 16, sits=sits)


@pytest.mark.slow
def test_the_wrong_rule_is_named(loaded: Loaded, tmp_path: Path):
    (tmp_path / "rules" / "clean").mkdir(parents=True)
    (tmp_path / "rules" / "clean" / "wrong.yaml").write_text(WRONG)
    result = bisect(loaded, options(str(tmp_path)))
    assert result["breaks"] and result["failures"]
    assert {row["id"] for row in result["sites"]} == {"clean/wrong"}
    assert len(result["sites"]) == 1, "one of the two layers is enough to break the check"
    assert result["sites"][0]["key"]


def test_nothing_to_find(loaded: Loaded):
    result = bisect(loaded, options())
    assert not result["breaks"] and result["sites"] == [] and result["trials"] == 1
