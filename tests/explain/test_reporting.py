"""The report of models that were really compiled (by `lowering: eager`, which runs the rewritten graph as it is)."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn.functional import silu

import sitsopt
from sitsopt import session

OPTIONS = {"recipe": {"summary": "A test."}, "target": "h100", "lowering": "eager", "explain": True}


class Gate(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return silu(x) * (x + 1)


class Stack(nn.Module):
    """Two gates with a graph break between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Gate(), Gate()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        torch._dynamo.graph_break()
        return self.layers[1](x)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    session.clear()
    yield
    torch._dynamo.reset()
    session.clear()


def test_import_loads_no_torch() -> None:
    code = "import sitsopt, sys; assert 'torch' not in sys.modules; assert {'report', 'Report'} <= set(dir(sitsopt))"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_public_names_stay_what_they_are_when_modules_are_imported() -> None:
    import sitsopt.reporting

    assert callable(sitsopt.report)
    assert sitsopt.Report is sitsopt.reporting.Report
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = sitsopt.nothing  # type: ignore[attr-defined]


def test_never_compiled() -> None:
    told = sitsopt.report(Gate())
    assert "Nothing here was compiled" in str(told)
    assert told.json()["graphs"] == []
    assert "No graph was compiled yet." in told.why_not("fuse/swiglu").verdict if told.ids else True
    assert "<!doctype html>" in told.html()


def test_compiled_model_and_its_wrapper() -> None:
    model = Gate()
    compiled = torch.compile(model, backend="sits", options=OPTIONS)
    x = torch.randn(4, 64)
    torch.testing.assert_close(compiled(x), Gate()(x))
    for owner in (model, compiled):
        told = sitsopt.report(owner)
        assert told.fired("fuse/swiglu") == 1
        assert told.record.target == "h100"
        assert told.spots["fuse/swiglu"][0].first.lowered == "eager"
        assert told.spots["fuse/swiglu"][0].first.predicted_us is not None
    assert sitsopt.report(Gate()).record.graphs == []


def test_model_compiled_in_place() -> None:
    model = Gate()
    model.compile(backend="sits", options=OPTIONS)
    model(torch.randn(4, 64))
    assert sitsopt.report(model).fired("fuse/swiglu") == 1


def test_function() -> None:
    def gate(x: torch.Tensor) -> torch.Tensor:
        return silu(x) * (x + 1)

    compiled = torch.compile(gate, backend="sits", options=OPTIONS)
    compiled(torch.randn(4, 64))
    assert sitsopt.report(compiled).fired("fuse/swiglu") == 1
    assert sitsopt.report(gate).fired("fuse/swiglu") == 1


def test_parts_of_a_model_are_told_by_their_place_in_it() -> None:
    model = Stack()
    model.layers[1].compile(backend="sits", options=OPTIONS)
    model(torch.randn(4, 64))
    told = sitsopt.report(model)
    assert [s.module for s in told.spots["fuse/swiglu"]] == ["layers.1"]
    model.layers[0].compile(backend="sits", options={**OPTIONS, "target": "a100"})
    torch._dynamo.reset()
    model(torch.randn(4, 64))
    told = sitsopt.report(model)
    assert {s.module for s in told.spots["fuse/swiglu"]} == {"layers.0", "layers.1"}


def test_graph_breaks() -> None:
    model = Stack()
    torch.compile(model, backend="sits", options=OPTIONS)(torch.randn(4, 64))
    told = sitsopt.report(model)
    assert told.fired("fuse/swiglu") == 2
    assert {s.module for s in told.spots["fuse/swiglu"]} == {"layers.0", "layers.1"}
    assert len({g.name for g in told.record.graphs}) == len(told.record.graphs)


def test_two_sessions_of_one_model() -> None:
    model = Gate()
    torch.compile(model, backend="sits", options=OPTIONS)(torch.randn(4, 64))
    torch._dynamo.reset()
    torch.compile(model, backend="sits", options={**OPTIONS, "target": "a100"})(torch.randn(4, 64))
    told = sitsopt.report(model)
    assert told.record.target == "h100; a100"
    assert told.fired("fuse/swiglu") == 1
    assert [g.name for g in told.record.graphs] == ["Gate.graph0", "Gate.graph0 (2)"]


def test_everything_compiled_so_far() -> None:
    kept = Gate()
    torch.compile(kept, backend="sits", options=OPTIONS)(torch.randn(4, 64))
    assert len(sitsopt.report().record.graphs) >= 1


def test_notebooks_show_the_page() -> None:
    assert sitsopt.report(Gate())._repr_html_().startswith("<!doctype html>")
