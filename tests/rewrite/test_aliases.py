"""A value that becomes an existing one: outputs must share storage with what they shared it with before."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule

from sitsopt.graph.build import Builder
from sitsopt.graph.facts import val
from sitsopt.rewrite.engine import Settings, rewrite
from sitsopt.rewrite.record import GraphRecord
from sitsopt.rewrite.view import GraphView
from sitsopt.spec.rule import load_rule

MUL_ONE = """
summary: A product with one.
inputs: {x: "T[*B]"}
match: return aten.mul(x, 1.0)
replace: return x
examples:
  - fires: {T: f32, B: [2]}
"""
ALIAS = MUL_ONE.replace("aten.mul(x, 1.0)", "aten.alias(x)")
SAME_CAST = """
summary: A cast that changes nothing.
inputs: {x: "T[*B]"}
match: return cast(x, T)
replace: return x
examples:
  - fires: {T: f32, B: [2]}
"""
KEY = """
summary: Scores with keys that are transposed already.
inputs: {q: "T[*B]", kt: "T[*C]"}
match: return aten.matmul(q, kt)
replace: return aten.matmul(q, aten.transpose(kt, 0, 1))
examples:
  - fires: {T: f32, B: [3, 3], C: [3, 3]}
"""
WRAPPED = """
summary: A reshape to the size a value has.
inputs: {x: "T[*B, H]"}
match: return aten.neg(aten.reshape(x, [*B, H]))
replace: return aten.neg(x)
examples:
  - fires: {T: f32, B: [2, 3], H: 4}
"""

LIB = torch.library.Library("sits_aliases", "DEF")
LIB.define("overwrite(Tensor(a!) x) -> Tensor")
LIB.impl("overwrite", lambda x: x.add_(1).sum(), "CompositeExplicitAutograd")


class Case:
    """A graph over one placeholder `x` and a builder for it."""

    def __init__(self, *shape: int) -> None:
        self.graph, mode = Graph(), FakeTensorMode()
        self.x = self.graph.placeholder("x")
        self.x.meta["val"] = mode.from_tensor(torch.randn(*shape))
        self.b = Builder(self.graph, mode)

    def fires(self, text: str, *outputs) -> tuple[GraphModule, int, GraphRecord]:
        self.graph.output(outputs)
        gm = GraphModule({}, self.graph)
        view, record = GraphView(gm), GraphRecord("g")
        rule = load_rule("r.yaml", "clean/r", text)
        applied = rewrite(view, [rule], Settings(misses=True), record)
        view.sweep()
        self.graph.lint()
        gm.recompile()
        return gm, len(applied), record


def test_a_copy_in_the_middle_goes():
    case = Case(3)
    y = case.b.call("aten.neg", (case.b.call("aten.mul", (case.x, 1.0)),))
    _, fired, _ = case.fires(MUL_ONE, y)
    assert fired == 1


def test_an_output_that_is_a_copy_of_an_input_stays_a_copy():
    case = Case(3)
    gm, fired, record = case.fires(MUL_ONE, case.b.call("aten.mul", (case.x, 1.0)))
    assert not fired and record.misses[0].reason == "alias"
    x = torch.randn(3)
    assert gm(x)[0].data_ptr() != x.data_ptr()


def test_two_outputs_do_not_become_one_tensor():
    case = Case(3)
    y = case.b.call("aten.neg", (case.x,))
    gm, fired, record = case.fires(MUL_ONE, y, case.b.call("aten.mul", (y, 1.0)))
    assert not fired and record.misses[0].reason == "alias"
    a, b = gm(torch.randn(3))
    assert a.data_ptr() != b.data_ptr()


def test_an_output_view_of_a_copy_keeps_the_copy():
    case = Case(3, 4)
    y = case.b.call("aten.neg", (case.x,))
    copy = case.b.call("aten.mul", (y, 1.0))
    gm, fired, _ = case.fires(MUL_ONE, y, case.b.call("aten.transpose", (copy, 0, 1)))
    a, b = gm(torch.randn(3, 4))
    assert not fired and a.data_ptr() != b.data_ptr()


def test_the_copy_of_a_value_that_is_no_output_goes():
    case = Case(3)
    y = case.b.call("aten.neg", (case.x,))
    _, fired, _ = case.fires(MUL_ONE, case.b.call("aten.mul", (y, 1.0)))
    assert fired == 1


def test_an_input_is_not_returned_in_place_of_its_view():
    case = Case(3)
    gm, fired, _ = case.fires(ALIAS, case.b.call("aten.alias", (case.x,)))
    x = torch.randn(3)
    assert not fired and gm(x)[0] is not x


def test_one_tensor_is_not_returned_twice_in_place_of_its_view():
    case = Case(3)
    y = case.b.call("aten.neg", (case.x,))
    gm, fired, _ = case.fires(ALIAS, y, case.b.call("aten.alias", (y,)))
    a, b = gm(torch.randn(3))
    assert not fired and a is not b


def test_a_copy_taken_before_a_write_stays():
    case = Case(3)
    y = case.b.call("aten.neg", (case.x,))
    copy = case.b.call("aten.mul", (y, 1.0))
    written = case.b.call("sits_aliases.overwrite", (y,))
    gm, fired, record = case.fires(MUL_ONE, case.b.call("aten.add", (copy, written)))
    assert not fired and record.misses[0].reason == "mutation"
    x = torch.ones(3)
    assert torch.equal(gm(x)[0], torch.full((3,), -1.0))


def test_a_cast_that_is_no_node_is_no_match():
    case = Case(3)
    y = case.b.call("prim.cast", (case.x, torch.float64))
    _, fired, _ = case.fires(SAME_CAST, case.b.call("aten.neg", (y,)))
    assert not fired


def test_type_as_is_a_cast():
    case = Case(3)
    wide = case.b.call("prim.cast", (case.x, torch.float64))
    back = case.b.call("aten.type_as", (wide, case.x))
    text = SAME_CAST.replace("cast(x, T)", "cast(cast(x, f64), T)")
    _, fired, _ = case.fires(text, case.b.call("aten.neg", (back,)))
    assert fired == 1


def test_a_transpose_of_a_transpose_is_not_built():
    case = Case(4, 4)
    t = case.b.call("aten.permute", (case.x, [1, 0]))
    gm, fired, _ = case.fires(KEY, case.b.call("aten.matmul", (case.x, t)))
    new = next(n for n in gm.graph.nodes if n.target is torch.ops.aten.matmul.default)
    assert fired == 1 and new.args[1] is case.x


def test_a_pack_inside_a_list_of_sizes():
    case = Case(2, 3, 4)
    flat = case.b.call("aten.reshape", (case.x, [6, 4]))
    back = case.b.call("aten.reshape", (flat, [2, 3, 4]))
    _, fired, _ = case.fires(WRAPPED, case.b.call("aten.neg", (back,)))
    assert not fired  # `flat` has another shape
    case = Case(2, 3, 4)
    same = case.b.call("aten.reshape", (case.x, [2, 3, 4]))
    y = case.b.call("aten.neg", (same,))
    gm, fired, _ = case.fires(WRAPPED, y)
    assert fired == 1 and tuple(val(next(iter(gm.graph.nodes))).shape) == (2, 3, 4)


def test_what_only_replaced_nodes_read_is_no_reader_any_more():
    """The transposed key is left over when attention takes the key itself; it must not block a later rule on it."""
    case = Case(4, 4)
    y = case.b.call("aten.neg", (case.x,))
    t = case.b.call("aten.permute", (y, [1, 0]))
    case.graph.output((case.b.call("aten.matmul", (case.x, t)),))
    gm = GraphModule({}, case.graph)
    view = GraphView(gm)
    applied = rewrite(view, [load_rule("r.yaml", "clean/r", KEY)], Settings(), GraphRecord("g"))
    assert t in view.dead and y not in view.dead
    assert [u.target for u in view.users(y)] == [torch.ops.aten.matmul.default]
    applied[0].edit.undo(view)
    assert not view.dead and view.users(y) == [t]
