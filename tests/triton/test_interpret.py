"""`lowering: interpret`: whole models whose every emitting site runs its generated text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import sitsopt
from sitsopt.emit.triton import attention, attention_merge, elementwise, matmul, rope, rowwise
from sitsopt.explain.text import as_text
from sitsopt.pipeline import LoweringError
from sitsopt.spec.locate import rule_dirs
from sitsopt.spec.rule import load_rules
from tests.backend.support import ConvNet, raised
from tests.rules.models import build, call

EMITTING = {rule.id for rule in load_rules(rule_dirs(())) if rule.emit}
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def interpreted(model: nn.Module, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, backend="sits", options={"lowering": "interpret", **options})


def logits(model: nn.Module, run: Any, phase: str) -> tuple[torch.Tensor, torch.Tensor]:
    (args, kwargs), (twins, others) = call(model, phase), call(model, phase)
    with torch.no_grad():
        return run(*args, **kwargs).logits, model(*twins, **others).logits


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_a_model_of_texts(name: str) -> None:
    model = build(name)
    run = interpreted(model, strict=True)
    for phase in ("prefill", "decode"):
        got, want = logits(model, run, phase)
        torch.testing.assert_close(got, want, **TOLERANCE)
    report = sitsopt.report(model)
    assert len(report.record.graphs) == 2 and not any(g.fallback for g in report.record.graphs)
    sites = [s for g in report.record.graphs for s in g.sites if s.rule in EMITTING]
    assert {s.lowered for s in sites} == {"interpret"}
    assert all(s.lowered_why.startswith("triton text ") for s in sites)
    assert not any("interpret" in e.asked for e in report.record.effective)
    text = as_text(report)
    assert "interpret: triton text add_" in text and "interpret: triton text matmul_" in text


CORRUPTIONS = [
    ("llama", "prefill", rowwise, "x += tl.load(residual_ptr", "x -= tl.load(residual_ptr"),
    ("llama", "prefill", rope, "b * turn_b + a * sin_b", "b * turn_b - a * sin_b"),
    ("llama", "prefill", elementwise, "(1.0 + tl.exp", "(1.0 - tl.exp"),
    ("llama", "prefill", attention, "total * shrink + tile_total", "total * shrink - tile_total"),
    ("llama", "decode", attention_merge, "total * shrink + tl.sum", "total * shrink - tl.sum"),
    ("gpt2", "decode", matmul, "acc += tl.load(bias_ptr", "acc -= tl.load(bias_ptr"),
]


@pytest.mark.parametrize("name, phase, family, right, wrong", CORRUPTIONS)
def test_a_corrupted_text_is_seen(
    name: str, phase: str, family: Any, right: str, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate, changed = family.source, []

    def corrupted(kernel: Any) -> Any:
        source = generate(kernel)
        changed.append(right in source.text)
        return replace(source, text=source.text.replace(right, wrong))

    monkeypatch.setattr(family, "source", corrupted)
    model = build(name, layers=1)
    got, want = logits(model, interpreted(model), phase)
    assert any(changed)
    assert not torch.allclose(got, want, **TOLERANCE)


def test_a_site_without_a_text_is_reported() -> None:
    model, x = ConvNet().eval(), torch.randn(2, 3, 9, 9)
    with torch.no_grad():
        torch.testing.assert_close(interpreted(model)(x), model(x), rtol=1e-4, atol=1e-5)
    report = sitsopt.report(model)
    (line,) = [e for e in report.record.effective if "interpret" in e.asked]
    assert line.asked == "lowering: interpret at 2 of fuse/conv_bias_relu in graph0"
    assert (line.got, line.reason) == ("eager", "no Triton text for this op")
    sites = {s.rule: s.lowered for g in report.record.graphs for s in g.sites}
    assert sites["fuse/conv_bias_relu"] == "eager" and sites["fuse/linear"] == "interpret"
    with torch.no_grad():
        error = raised(interpreted(model, strict=True), x)
    assert isinstance(error, LoweringError) and "fuse/conv_bias_relu" in str(error)


def test_gradients_are_left_to_eager() -> None:
    model = ConvNet().eval()
    interpreted(model)(torch.randn(2, 3, 9, 9)).sum().backward()
    assert model.body[0].weight.grad is not None
    sites = [s for g in sitsopt.report(model).record.graphs for s in g.sites]
    assert {s.lowered for s in sites} == {"eager"}


def test_sizes_that_change() -> None:
    def body(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return normed * nn.functional.silu(gate) * up

    torch._dynamo.reset()
    run = torch.compile(body, backend="sits", options={"lowering": "interpret"}, dynamic=True)
    with torch.no_grad():
        for rows in (3, 5, 40):
            given = [torch.randn(rows, 24) for _ in range(3)]
            torch.testing.assert_close(run(*given), body(*given), **TOLERANCE)
    graphs = sitsopt.report(body).record.graphs
    assert len(graphs) == 1 and any(s.lowered == "interpret" for s in graphs[0].sites)
