"""Where a replacement is built: it must read its inputs when eager would have."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule

from sitsopt.graph import ops as _ops  # noqa: F401  registers the sits:: ops
from sitsopt.graph.build import Builder
from sitsopt.rewrite.engine import Settings, rewrite
from sitsopt.rewrite.record import GraphRecord
from sitsopt.rewrite.view import GraphView
from sitsopt.spec.rule import load_rule

SWIGLU = """
summary: A product with SiLU.
inputs: {gate: "T[*B]", up: "T[*B]"}
match: return aten.mul(aten.silu(gate), up)
replace: return sits.swiglu(gate, up)
examples:
  - fires: {T: f32, B: [2]}
"""
PAIR = """
summary: Two linears of one input.
inputs: {x: "T[*B, K]", a: "T[N, K]", b: "T[N, K]"}
match: |
  p = aten.linear(x, a)
  q = aten.linear(x, b)
  return p, q
replace: return sits.linears(x, [a, b], [None, None])
examples:
  - fires: {T: f32, B: [2], K: 4, N: 3}
"""

LIB = torch.library.Library("sits_insertion", "DEF")
LIB.define("overwrite(Tensor(a!) x) -> Tensor")
LIB.impl("overwrite", lambda x: x.add_(1).sum(), "CompositeExplicitAutograd")


@pytest.fixture
def mode() -> FakeTensorMode:
    return FakeTensorMode()


def placed(graph: Graph, mode: FakeTensorMode, name: str, *shape: int):
    node = graph.placeholder(name)
    node.meta["val"] = mode.from_tensor(torch.randn(*shape))
    return node


def run(text: str, graph: Graph) -> tuple[GraphModule, int]:
    gm = GraphModule({}, graph)
    view = GraphView(gm)
    applied = rewrite(view, [load_rule("r.yaml", "fuse/r", text)], Settings(), GraphRecord("g"))
    view.sweep()
    graph.lint()
    gm.recompile()
    return gm, len(applied)


def test_a_write_before_the_pattern_is_seen(mode):
    graph = Graph()
    gate, up = placed(graph, mode, "gate", 4), placed(graph, mode, "up", 4)
    build = Builder(graph, mode)
    write = build.call("sits_insertion.overwrite", (gate,))
    product = build.call("aten.mul", (build.call("aten.silu", (gate,)), up))
    graph.output((product, write))
    eager = GraphModule({}, graph.__deepcopy__({}))
    gm, count = run(SWIGLU, graph)
    assert count == 1
    x, y = torch.randn(4), torch.randn(4)
    assert torch.equal(gm(x.clone(), y)[0], eager(x.clone(), y)[0])


def test_a_write_between_the_pattern_s_reads_stops_it(mode):
    graph = Graph()
    gate, up = placed(graph, mode, "gate", 4), placed(graph, mode, "up", 4)
    build = Builder(graph, mode)
    act = build.call("aten.silu", (gate,))
    write = build.call("sits_insertion.overwrite", (up,))
    graph.output((build.call("aten.mul", (act, up)), write))
    assert run(SWIGLU, graph)[1] == 0


def test_values_are_made_where_they_were_first_needed(mode):
    graph = Graph()
    x, a, b = (
        placed(graph, mode, "x", 2, 4),
        placed(graph, mode, "a", 3, 4),
        placed(graph, mode, "b", 3, 4),
    )
    build = Builder(graph, mode)
    early = build.call("aten.relu", (x,))
    p = build.call("aten.linear", (x, a))
    q = build.call("aten.linear", (x, b))
    graph.output((early, build.call("aten.add", (p, q))))
    gm, count = run(PAIR, graph)
    order = [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]
    assert count == 1 and order.index("aten.relu.default") < order.index("sits.linears.default")
