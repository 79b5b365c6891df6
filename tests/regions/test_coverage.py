"""How much of a step is in regions: in `explain`, against what a recipe requires, and before the judge."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from sitsopt.measure.explain import explain as explained
from sitsopt.measure.judge import judged
from sitsopt.options import Options
from sitsopt.planning import ExpectationError
from sitsopt.rewrite.coverage import coverage
from tests.regions.hazards import Planted, line_of

transformers = pytest.importorskip("transformers")

TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 64,
}  # fmt: skip
SMOLLM2 = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192, "rope_theta": 100000,
    "tie_word_embeddings": True,
}  # fmt: skip
RULES = {
    "everything.yaml": "summary: All.\ncapture: [aten.*, sits.*]\nmin_kernels: 1\n",
    "no_relu.yaml": "summary: No relu.\ncapture: [aten.*, sits.*]\nsplit: {aten.relu: this device has none}\nmin_kernels: 1\n",
}


def explain(model: nn.Module, asked: Options, graphs=(), inputs=None):
    """Without compiling the target's kernels: regions do not ask by whom a node is lowered."""
    return explained(model, asked, graphs, inputs, kernel=lambda node: ("inductor", ""))


def llama(device: str, config: dict[str, object]) -> nn.Module:
    torch.manual_seed(0)
    with torch.device(device):
        made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    return made.to(torch.bfloat16).eval()


def options(tmp_path: Path, recipe: dict[str, object], target: str = "h100") -> Options:
    folder = tmp_path / "rules" / "regions"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in RULES.items():
        (folder / name).write_text(text)
    recipe = {"summary": "Here.", "exclude": {"fuse/*": "ops one by one"}, **recipe}
    return Options.parse({"recipe": recipe, "target": target, "path": [str(tmp_path)]})


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_decode_step_is_one_region(device):
    asked = Options.parse(
        {"target": "h100", "set": ["regions.use=[decode]", "regions.require=1.0"]}
    )
    report, unmet = explain(llama(device, TINY), asked, ["decode", "prefill"])
    assert unmet is None
    data = report.json()
    regions = [r for r in data["regions"] if r["graph"] == "decode"]
    assert len(regions) == 1 and regions[0]["kernels"] > 20 and regions[0]["predicted_us"] > 0
    assert regions[0]["pool_bytes"] > 0 and regions[0]["copied_inputs"]
    decode, prefill = data["coverage"]
    assert (decode["step"], decode["share"], decode["time_share"]) == ("decode", 1.0, 1.0)
    assert decode["outside"] == [] and decode["meant"]
    assert not prefill["meant"] and "at most 16 tokens" in prefill["refused"]
    assert "(100.0%)" in str(report) and "rule decode" in str(report)


@pytest.mark.parametrize("kind", ["", "item", "nonzero"])
def test_what_is_outside_is_told_with_file_and_line(tmp_path, kind):
    asked = options(tmp_path, {"regions": {"use": ["everything"], "require": 0.95}})
    report, unmet = explain(Planted(kind), asked, inputs=torch.randn(4, 8))
    told = coverage(report.record.graphs)[0]
    if not kind:
        assert unmet is None and told.share == 1.0
        return
    assert isinstance(unmet, ExpectationError) and told.share < 0.95
    assert line_of(kind.upper()) in str(unmet) and "graph break" in str(unmet)
    assert any(
        r["source"] == line_of(kind.upper()) for r in report.json()["coverage"][0]["outside"]
    )


def test_a_rule_that_splits(tmp_path):
    asked = options(tmp_path, {"regions": {"use": ["no_relu"], "require": 0.5}})
    report, unmet = explain(Planted(), asked, inputs=torch.randn(4, 8))
    assert unmet is None
    data = report.json()
    assert [r["kernels"] for r in data["regions"]] == [1, 1]
    outside = data["coverage"][0]["outside"]
    assert [(o["op"], o["reason"]) for o in outside] == [("aten.relu", "this device has none")]
    assert outside[0]["source"].startswith(line_of("ITEM").split(":")[0])


def test_a_cpu_has_no_graphs_to_capture(tmp_path):
    asked = options(tmp_path, {"regions": {"use": ["everything"], "require": 1.0}}, target="cpu")
    report, unmet = explain(Planted(), asked, inputs=torch.randn(4, 8))
    assert unmet is None and report.json()["regions"] == []
    assert {e.got for e in report.record.effective if e.asked.startswith("regions")} == {"nothing"}


def test_a_decode_step_before_the_judge():
    decode, prefill = judged(llama("cpu", TINY), Options.parse({"target": "h100"}))
    assert decode.problems == [] and decode.verdict.hazards == [] and decode.max_abs == 0.0
    assert decode.plan.kernels[0] == decode.plan.kernels[1] > 20
    assert decode.verdict.spans["region0"] > decode.plan.kernels[0]
    assert not prefill.plan.regions


@pytest.mark.slow
def test_a_decode_step_of_smollm2_before_the_judge():
    (decode,) = judged(llama("cpu", SMOLLM2), Options.parse({"target": "h100"}), ["decode"])
    assert decode.problems == [] and decode.verdict.hazards == [] and decode.max_abs == 0.0
    assert decode.plan.kernels[0] == decode.plan.kernels[1] > 300
