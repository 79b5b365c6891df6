"""A tiny Llama explained, with weights and without, under rules of the test's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from sitsopt import planning
from sitsopt.cli._status import status
from sitsopt.cli.app import app
from sitsopt.cli.explain import explain as command
from sitsopt.measure.explain import explain
from sitsopt.measure.steps import steps
from sitsopt.options import Options
from sitsopt.planning import fired
from sitsopt.reporting import Report
from sitsopt.spec.errors import SpecError

transformers = pytest.importorskip("transformers")

LAYERS = 2
TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 256,
}  # fmt: skip
SWIGLU = """
summary: Multiply by SiLU in one kernel.
doc: One pass over memory.
inputs: {gate: "T[*B, H]", up: "T[*B, H]"}
match: return aten.mul(aten.silu(gate), up)
where:
  T in {bf16, f32}: rounds once
  H % SIZE == 0: whole vectors only
replace: return sits.swiglu(gate, up)
tolerance:
  bf16: {rtol: 8.0e-3, atol: 1.0e-5}
  f32: {rtol: 2.0e-6, atol: 1.0e-6}
examples:
  - fires: {T: bf16, B: [2], H: SIZE}
  - skips: {T: f64, B: [2], H: SIZE}
    because: T in {bf16, f32}
  - skips: {T: bf16, B: [2], H: 97}
    because: H % SIZE == 0
"""
SOFTCAP = """
summary: Uses an op that only another rule makes.
doc: It never starts.
inputs: {x: "T[*B]", cap: const float}
match: return aten.neg(sits.softcap(x, cap))
replace: return sits.softcap(x, -cap)
examples:
  - fires: {T: f32, B: [2], cap: 2.0}
tolerance:
  f32: {rtol: 2.0e-6, atol: 1.0e-6}
"""
PLAIN = {"summary": "Nothing but the rules."}


@pytest.fixture
def rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "rules"
    (folder / "fuse").mkdir(parents=True)
    (folder / "fuse/fits.yaml").write_text(SWIGLU.replace("SIZE", "32"))
    (folder / "fuse/planted.yaml").write_text(SWIGLU.replace("SIZE", "96"))
    (folder / "fuse/quiet.yaml").write_text(SOFTCAP)
    monkeypatch.setattr(planning, "rule_dirs", lambda path: [folder])
    monkeypatch.setattr("sitsopt.cli.explain.files", lambda kind, path: names(folder))
    monkeypatch.setattr("sitsopt.reporting.files", lambda kind, path: names(folder))
    return folder


def names(folder: Path) -> dict[str, Path]:
    return {p.relative_to(folder).with_suffix("").as_posix(): p for p in folder.rglob("*.yaml")}


def llama(device: str) -> nn.Module:
    with torch.device(device):
        made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY))
    return made.to(torch.bfloat16).eval().requires_grad_(False)


def told(model: nn.Module, graphs: tuple[str, ...] = ("decode",), **options: object) -> Report:
    options = {"recipe": PLAIN, "target": "h100", **options}
    return explain(model, Options.parse(options), graphs)[0]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_decode_and_prefill(rules: Path, device: str) -> None:
    report = told(llama(device), ())
    assert [g.name for g in report.record.graphs] == ["decode", "prefill"]
    assert [len(g.sites) for g in report.record.graphs] == [LAYERS, LAYERS]
    assert report.fired("fuse/fits") == LAYERS == fired(report.record.graphs)["fuse/fits"]
    spot = report.spots["fuse/fits"][1]
    assert spot.module == "model.layers.1.mlp"
    assert spot.first.place.source.split(":")[0].endswith("models/llama/modeling_llama.py")
    assert (spot.first.lowered, spot.first.unfused_us is None) == ("triton", False)
    decode, prefill = spot.graphs["decode"], spot.graphs["prefill"]
    assert decode.bytes_saved == 2 * 128 * 2  # silu(gate) is written and read no more
    assert (
        prefill.bytes_saved == 256 * decode.bytes_saved
    )  # a prefill as long as this model's context
    assert decode.unfused_us > decode.predicted_us > 0


def test_a_model_is_left_as_it_was(rules: Path) -> None:
    model = llama("cpu")
    ids = torch.arange(5)[None]
    before = model(ids).logits
    told(model)
    assert torch.equal(before, model(ids).logits)
    assert all(p.device.type == "cpu" for p in model.parameters())


def test_why_not_on_a_planted_miss(rules: Path) -> None:
    report = told(llama("meta"), recipe={**PLAIN, "exclude": {"fuse/fits": "to plant a miss"}})
    answer = report.why_not("fuse/planted")
    closest = "closest at 2 places, where the whole pattern fits; stopped by condition: H % 96 == 0"
    assert closest in answer.verdict
    text = str(answer)
    for part in ("model.layers.{0,1}.mlp", "H % 96 == 0 — whole vectors only", "H = 128",
                 "transformers/models/llama/modeling_llama.py:"):  # fmt: skip
        assert part in text, text
    assert "leaves it out: to plant a miss." in report.why_not("fuse/fits").verdict
    needs = "It fired nowhere: its pattern needs sits.softcap, which decode does not have."
    assert report.why_not("fuse/quiet").verdict == needs


def test_why_not_of_a_rule_that_comes_second(rules: Path) -> None:
    (rules / "fuse/planted.yaml").write_text(SWIGLU.replace("SIZE", "16"))
    report = told(llama("meta"))
    assert not report.fired("fuse/planted")
    verdict = report.why_not("fuse/planted").verdict
    assert (
        verdict
        == "It fired nowhere. At 2 places its pattern fits, but the nodes went to fuse/fits (2)."
    )


def test_steps_by_name() -> None:
    model = llama("meta")
    assert [s.name for s in steps(model, ["prefill"])] == ["prefill"]
    with pytest.raises(SpecError, match="did you mean `decode`"):
        steps(model, ["decod"])
    with pytest.raises(SpecError, match="nothing says what this model takes"):
        steps(nn.Linear(2, 2))


def test_a_plain_module_with_inputs(rules: Path) -> None:
    class Gate(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.silu(x) * (x + 1)

    options = Options.parse({"recipe": PLAIN, "target": "h100"})
    report, unmet = explain(Gate(), options, inputs=torch.randn(4, 64))
    assert unmet is None
    assert [g.name for g in report.record.graphs] == ["forward"]
    assert report.fired("fuse/fits") == 1
    assert report.spots["fuse/fits"][0].first.place.source.startswith(__file__)


def test_graph_breaks_are_followed(rules: Path) -> None:
    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = nn.functional.silu(x) * (x + 1)
            torch._dynamo.graph_break()
            return nn.functional.silu(x) * (x + 2)

    options = Options.parse({"recipe": PLAIN, "target": "h100"})
    report, _ = explain(Broken(), options, inputs=(torch.randn(4, 64),))
    assert [g.name for g in report.record.graphs] == ["forward", "forward/1"]
    assert sum(len(g.sites) for g in report.record.graphs) == 2


def test_what_cannot_be_captured_is_told(rules: Path) -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return nn.functional.silu(x) * x

    options = Options.parse({"recipe": PLAIN, "target": "h100"})
    report, _ = explain(Odd(), options, inputs=(torch.randn(4, 64),))
    assert "autocast" in report.record.graphs[0].fallback
    assert "was not rewritten: an autocast region" in str(report)
    assert "No graph was rewritten: an autocast" in report.why_not("fuse/fits").verdict


@pytest.fixture
def config(tmp_path: Path) -> str:
    file = tmp_path / "tiny.json"
    file.write_text(
        json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], **TINY})
    )
    return str(file)


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    file = tmp_path / "strict.yaml"
    file.write_text("summary: A test.\nexpect: {fuse/planted: num_hidden_layers}\n")
    return str(file)


def test_command_json(rules: Path, config: str, tmp_path: Path, capsys) -> None:
    page = tmp_path / "page.html"
    ended = command(
        config=config, recipe=str(_write(tmp_path)), target="h100", as_json=True, html=str(page)
    )
    data = json.loads(capsys.readouterr().out)
    assert ended == 0
    assert {"target", "recipe", "graphs", "rules", "effective"} <= data.keys()
    assert [
        set(g) >= {"name", "nodes_before", "nodes_after", "rewrite_ms"} for g in data["graphs"]
    ] == [True] * 2
    by_id = {r["id"]: r for r in data["rules"]}
    assert by_id["fuse/fits"]["fired"] == LAYERS
    assert {"module", "source", "bytes_saved", "lowered"} <= by_id["fuse/fits"]["sites"][0].keys()
    assert page.read_text().startswith("<!doctype html>")


def _write(folder: Path, name: str = "plain") -> Path:
    file = folder / f"{name}.yaml"
    file.write_text("summary: A test.\n")
    return file


def test_command_with_an_unmet_expectation(rules: Path, config: str, recipe: str, capsys) -> None:
    ended = command(config=config, recipe=recipe, target="h100", graphs="decode")
    out = capsys.readouterr()
    assert ended == 1
    assert "fuse/planted fired 0 times, expected 2" in out.err
    assert "decode" in out.out
    assert "prefill" not in out.out


@pytest.mark.parametrize(
    ("given", "part"),
    [
        (["--why-not", "fuse/plantd"], "did you mean `fuse/planted`?"),
        (["--target", "h1000"], "did you mean `h100`?"),
        (["--graphs", "prefil"], "did you mean `prefill`?"),
        (["--set", "exclud={}"], "did you mean `exclude`?"),
        (["--config", "/nowhere/config.json"], "no config file"),
        (["--html", "/nowhere/page.html"], "cannot write /nowhere/page.html"),
    ],
)
def test_bad_input(
    rules: Path, config: str, tmp_path: Path, capsys, given: list[str], part: str
) -> None:
    words = ["explain", "--config", config, "--recipe", str(_write(tmp_path)), *given]
    assert status(app, words) == 2
    assert part in capsys.readouterr().err
    assert status(app, [*words, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["errors"]


def test_command_why_not(rules: Path, config: str, tmp_path: Path, capsys) -> None:
    given = {
        "config": config,
        "recipe": str(_write(tmp_path)),
        "target": "h100",
        "graphs": "decode",
    }
    assert command(**given, why_not="fuse/quiet", as_json=True) == 0
    data = json.loads(capsys.readouterr().out)
    assert [r["id"] for r in data["rules"]] == ["fuse/quiet"]
    assert data["why_not"]["fired"] == 0
    assert command(**given, why_not="fuse/quiet") == 0
    assert capsys.readouterr().out.startswith(
        "fuse/quiet: Uses an op that only another rule makes."
    )
