"""What a compile says while it runs, and which layers it takes for one."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from sitsopt.measure.explain import rewrite_one
from sitsopt.options import Options
from sitsopt.planning import make_session
from sitsopt.reporting import Report
from sitsopt.rewrite.record import GraphRecord, Record
from sitsopt.stages import Stage, on_stage


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.gate, self.down = (
            nn.Linear(8, hidden),
            nn.Linear(8, hidden),
            nn.Linear(hidden, 8),
        )

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Model(nn.Module):
    def __init__(self, *hidden: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(h) for h in hidden)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def run(model: nn.Module, **options: object) -> list[Stage]:
    torch._dynamo.reset()
    heard: list[Stage] = []
    with torch.no_grad(), on_stage(heard.append):
        torch.compile(model.eval(), backend="sits", options=options)(torch.randn(2, 8))
    return heard


def test_each_stage_is_told_in_order_with_what_there_is_to_do() -> None:
    heard = run(Model(16, 16, 16), lowering="eager")
    assert [s.name for s in heard] == ["capture", "rewrite", "compile", "ready"]
    assert {s.graph for s in heard} == {"graph0"} and not any(s.cached for s in heard)
    assert str(heard[1]) == "graph0: rewrite, 18 ops"
    assert "rewrites" in heard[2].detail


def test_equal_layers_are_counted_as_one() -> None:
    heard = run(Model(16, 16, 16, 24), lowering="inductor")
    assert next(s.detail for s in heard if s.name == "compile").endswith("3 layers as one")


def test_a_listener_hears_nothing_afterwards_and_nothing_is_printed(capfd, caplog) -> None:
    heard = run(Model(16), lowering="eager")
    count = len(heard)
    torch._dynamo.reset()
    with torch.no_grad(), caplog.at_level(logging.INFO, logger="sitsopt"):
        torch.compile(Model(16).eval(), backend="sits", options={"lowering": "eager"})(
            torch.randn(2, 8)
        )
    assert len(heard) == count
    assert [r.getMessage().split(",")[0] for r in caplog.records if r.name == "sitsopt"] == [
        "graph0: capture", "graph0: rewrite", "graph0: compile", "graph0: ready",
    ]  # fmt: skip
    assert capfd.readouterr() == ("", "")


def test_a_graph_that_is_left_alone_says_why() -> None:
    class Recomputed(nn.Module):
        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return x @ x.t()

    heard = run(Recomputed(), lowering="eager")
    assert [s.name for s in heard] == ["capture", "fallback"]
    assert "autocast" in heard[1].detail


@pytest.mark.parametrize(("hidden", "groups"), [
    ((16, 16, 16), [["layers.0", "layers.1", "layers.2"]]),
    ((16, 24, 16, 24), [["layers.0", "layers.2"], ["layers.1", "layers.3"]]),
    ((16, 24), []),
])  # fmt: skip
def test_explain_says_which_layers_are_one(hidden, groups) -> None:
    model = Model(*hidden).eval()
    session = make_session(model, Options.parse({}))
    graph = GraphRecord("decode")

    def backend(gm, inputs):
        rewrite_one(gm, inputs, session, graph)
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, backend=backend)(torch.randn(2, 8))
    assert graph.repeated == groups
    report = Report(Record("cpu", "auto", [graph]))
    assert report.json()["graphs"][0]["repeated"] == groups
    html = " ".join(report.html().split())
    for group in groups:
        assert f"{len(group)} layers share one piece of code" in str(report)
        assert f"{len(group)} layers share one piece of code" in html
    if not groups:
        assert "share one piece of code" not in html
