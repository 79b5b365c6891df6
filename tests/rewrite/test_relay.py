"""A layout that changes inside the graph: outputs keep values and strides, and undoing restores all."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from sitsopt.graph.build import Builder
from sitsopt.rewrite.engine import Settings, rewrite
from sitsopt.rewrite.record import GraphRecord
from sitsopt.rewrite.view import GraphView
from sitsopt.spec.locate import rule_dirs
from sitsopt.spec.rule import Rule, load_rules


@pytest.fixture(scope="module")
def rule() -> Rule:
    return next(r for r in load_rules(rule_dirs(())) if r.id == "layout/channels_last")


class Case:
    """conv2d(x, w), then what `body` makes of it."""

    def __init__(self, body):
        mode, graph = FakeTensorMode(), Graph()
        self.inputs = [torch.randn(2, 3, 6, 7), torch.randn(4, 3, 3, 3)]
        x, w = (self._placed(graph, mode, n, t) for n, t in zip("xw", self.inputs, strict=True))
        self.build = Builder(graph, mode)
        graph.output(body(self.build, self.build.call("aten.conv2d", (x, w))))
        self.gm = GraphModule({}, graph)
        self.eager = self.gm(*self.inputs)
        self.view = GraphView(self.gm, [w])

    @staticmethod
    def _placed(graph: Graph, mode: FakeTensorMode, name: str, real: torch.Tensor) -> Node:
        node = graph.placeholder(name)
        node.meta["val"] = mode.from_tensor(real)
        return node

    def rewrite(self, rule: Rule):
        settings = Settings(facts={"channels_last": True})
        return rewrite(self.view, [rule], settings, GraphRecord("g"))

    def run(self):
        self.gm.graph.lint()
        self.gm.recompile()
        return self.gm(*self.inputs)


def test_outputs_keep_their_strides(rule):
    case = Case(lambda b, y: (b.call("aten.relu", (y,)), b.call("aten.add", (y, y))))
    assert len(case.rewrite(rule)) == 1
    case.view.sweep()
    for old, new in zip(case.eager, case.run(), strict=True):
        assert torch.equal(old, new) and old.stride() == new.stride()


def test_a_view_that_no_longer_fits_becomes_a_reshape(rule):
    case = Case(lambda b, y: (b.call("aten.neg", (b.call("aten.view", (y, [2, 80])),)),))
    assert len(case.rewrite(rule)) == 1
    case.view.sweep()
    assert torch.equal(case.eager[0], case.run()[0])


def test_outputs_that_share_memory_stay_so(rule):
    def two(b, y):
        act = b.call("aten.relu", (y,))
        return act, b.call("aten.permute", (act, [0, 2, 3, 1]))

    case = Case(two)
    assert case.rewrite(rule) == []
    first, second = case.run()
    assert first.data_ptr() == second.data_ptr()


def test_undoing_restores_values_views_and_outputs(rule):
    case = Case(
        lambda b, y: (
            b.call("aten.neg", (b.call("aten.view", (y, [2, 80])),)),
            b.call("aten.relu", (y,)),
        )
    )
    before = [
        (n.name, n.target, n.args, getattr(n.meta.get("val"), "stride", tuple)())
        for n in case.gm.graph.nodes
    ]
    (applied,) = case.rewrite(rule)
    applied.edit.undo(case.view)
    after = [
        (n.name, n.target, n.args, getattr(n.meta.get("val"), "stride", tuple)())
        for n in case.gm.graph.nodes
    ]
    assert before == after
    for old, new in zip(case.eager, case.run(), strict=True):
        assert torch.equal(old, new) and old.stride() == new.stride()
