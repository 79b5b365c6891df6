"""`sitsopt kernels MODEL`: the kernels that a model's own graphs need, at their own shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sitsopt.cli import kernels as verb
from sitsopt.measure.kernels import needed
from sitsopt.options import Options
from sitsopt.runtime.triton.compile import Facts
from sitsopt.runtime.triton.fit import Fitted
from sitsopt.spec.target import load_target
from tests.rules.models import HIDDEN, LM, MLP, build

H100 = load_target("h100")


def test_what_a_model_needs() -> None:
    model = build("llama", dtype=torch.bfloat16).to("meta")
    found = needed(model, Options.parse({"target": "h100"}), H100)
    by_name: dict[str, list[Any]] = {}
    for one in found:
        by_name.setdefault(one.source.name, []).append(one)
    down = by_name[f"matmul_skinny_bf16_{HIDDEN}x{MLP}"]
    assert [one.sites for one in down] == [2]
    weight = 2 * HIDDEN * MLP
    assert weight < down[0].cost.least < 1.2 * weight + 4096
    assert down[0].cost.flops == 2 * HIDDEN * MLP
    norms = by_name[f"add_rms_norm_bf16_{HIDDEN}"]
    assert [one.sites for one in norms] == [4, 4]  # a decode step and a prefill
    assert norms[0].cost.moved == norms[0].cost.least == 2 * (4 * HIDDEN + HIDDEN)
    assert norms[1].cost.moved > 40 * norms[0].cost.moved
    decode = next(one for name, (one, *_) in by_name.items() if name.startswith("attention_decode"))
    assert decode.cost.moved > decode.cost.least  # the parts of the split keys


def test_the_verb_with_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fit(sources: Any, target: Any, jobs: int, done: Any) -> list[Fitted]:
        return [Fitted(source, Facts(40, 0, 1024, 128)) for source in sources]

    monkeypatch.setattr(verb, "fit", fit)
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama", **LM})
    )
    assert verb.kernels("h100", config=str(config), as_json=True, dtype="bf16") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["target"] == "h100"
    rows = {row["name"]: row for row in told["kernels"]}
    assert rows["swiglu_bf16"]["sites"] == 2 and rows["swiglu_bf16"]["registers"] == 40
    assert 0 < rows["swiglu_bf16"]["roofline"] <= 1
    assert verb.kernels("h100", config=str(config), show="swiglu_bf16") == 0
    assert "def swiglu_bf16(" in capsys.readouterr().out
    assert verb.kernels("h100", config=str(config)) == 0
    table = capsys.readouterr().out
    assert "sites" in table and "not measured" in table
    assert verb.kernels("cpu", config=str(config)) == 2


def test_all_architectures_in_one_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fit(sources: Any, target: Any, jobs: int, done: Any) -> list[Fitted]:
        wrong = "8 bytes of spilled registers" if target.arch == "sm_120" else ""
        return [Fitted(source, Facts(40, 0, 1024, 128), wrong) for source in sources]

    monkeypatch.setattr(verb, "fit", fit)
    assert verb.kernels(everything=True, family="matmul") == 1
    told = capsys.readouterr().out
    for arch in ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942"):
        assert f"({arch})" in told
    assert told.count("spilled registers") == told.count("matmul_") - told.count("no e4m3 product")
    assert "no e4m3 product in hardware" in told
