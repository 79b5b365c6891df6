"""Refusals and what is recorded of them; undoing; overlapping rules; sites."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.fx import GraphModule

from tests.rewrite.support import Sample, rule, sample
from tests.rewrite.test_matcher import GATE, PAIR, WEIGHTS

PROGRAM = "return aten.mul(aten.silu(x), y)"


def shape(gm: GraphModule) -> list[tuple[str, str, object, object, object]]:
    """A graph as plain data: order, names, ops, arguments, and what is known of the values."""
    return [
        (
            n.op,
            n.name,
            str(n.target),
            str((n.args, n.kwargs)),
            str(getattr(n.meta.get("val"), "stride", str)()),
        )
        for n in gm.graph.nodes
    ]


# -- refusals -----------------------------------------------------------------------------------------------


def test_uses() -> None:
    s = sample("s = aten.silu(x)\nreturn aten.mul(s, y), aten.sum(s)", x=(2, 4), y=(2, 4)).rewrite(
        GATE
    )
    miss = s.miss()
    assert (miss.reason, miss.rule) == ("uses", "fuse/inline")
    assert "silu" in miss.condition and "sum" in miss.found and miss.place.node == "mul_tensor"
    assert miss.matched == miss.of > 1


def test_uses_by_the_output_alone() -> None:
    s = sample("s = aten.silu(x)\nreturn aten.mul(s, y), s", x=(2, 4), y=(2, 4)).rewrite(GATE)
    assert s.fired == 0 and s.miss().reason == "uses"


def test_a_condition_of_a_rule() -> None:
    r = rule("""
inputs: {g: "T[*B, H]", u: "T[*B, H]"}
match: return aten.mul(aten.silu(g), u)
where:
  H % 8 == 0: the kernel reads eight at once
replace: return sits.swiglu(g, u)
examples:
  - fires: {T: f32, B: [2], H: 8}
  - skips: {T: f32, B: [2], H: 4}
    because: H % 8 == 0
""")
    s = sample(PROGRAM, x=(2, 12), y=(2, 12)).rewrite(r)
    miss = s.miss()
    assert (miss.reason, miss.condition) == ("condition", "H % 8 == 0")
    assert miss.explanation == "the kernel reads eight at once" and "12" in miss.found
    assert sample(PROGRAM, x=(2, 16), y=(2, 16)).rewrite(r).fired == 1


def test_gradients() -> None:
    s = sample(PROGRAM, x=(2, 4), y=(2, 4)).rewrite(GATE, grad=True)
    assert s.fired == 0 and s.miss().reason == "grad"
    safe = rule(GATE.text.split("\n", 1)[1] + "grad: safe\n")
    assert sample(PROGRAM, x=(2, 4), y=(2, 4)).rewrite(safe, grad=True).fired == 1


def test_order() -> None:
    """An input of the replacement is computed from one of its outputs."""
    r = rule("""
inputs: {x: "T[*B]", y: "T[*B]"}
match: |
  a = aten.sin(x)
  b = aten.mul(x, y)
  return a, b
replace: return aten.sin(x), aten.mul(y, x)
examples:
  - fires: {T: f32, B: [2]}
""")
    s = sample("a = aten.sin(x)\nreturn aten.mul(x, aten.exp(a))", x=(3,)).rewrite(r)
    assert s.fired == 0 and s.reasons() == {"order"} and s.right()
    s = sample(
        "a = aten.sin(x)\nc = aten.exp(a)\nreturn aten.mul(x, y), c", x=(3,), y=(3,)
    ).rewrite(r)
    assert s.right()


def test_mutation() -> None:
    between = "s = aten.silu(x)\nw = aten.add_(y, 1.0)\nreturn aten.mul(s, w)"
    s = sample(between, x=(2, 4), y=(2, 4)).rewrite(GATE)
    assert s.fired == 0 and s.miss().reason == "mutation" and "add_" in s.miss().condition
    before = "w = aten.add_(x, 1.0)\nreturn aten.mul(aten.silu(w), y)"
    assert sample(before, x=(2, 4), y=(2, 4)).rewrite(GATE).right()


def test_alias() -> None:
    """A result that is a fresh tensor must not become an input, or a view of one."""
    one = rule("""
inputs: {x: "T[*B]"}
match: return aten.mul(x, 1.0)
replace: return x
examples:
  - fires: {T: f32, B: [2]}
""")
    s = sample("return aten.mul(x, 1.0)", x=(3,)).rewrite(one)
    assert s.fired == 0 and s.miss().reason == "alias"
    s = sample("return aten.reshape(aten.mul(x, 1.0), [3, 1])", x=(3,)).rewrite(one)
    assert s.fired == 0
    s = sample("return aten.sin(aten.mul(x, 1.0))", x=(3,)).rewrite(one)
    assert s.fired == 1 and s.right()


@pytest.mark.parametrize("replace, reason", [
    ("return cast(aten.mul(g, u), bf16)", "dtype"), ("return aten.unsqueeze(aten.mul(g, u), 0)", "shape"),
    ("return aten.sum(aten.mul(g, u), [0])", "shape"), ("return aten.matmul(g, u)", "shape"),
])  # fmt: skip
def test_a_replacement_of_another_kind(replace: str, reason: str) -> None:
    r = rule(f"""
inputs: {{g: "T[*B, H]", u: "T[*B, H]"}}
match: return aten.mul(aten.silu(g), u)
replace: {replace}
examples:
  - fires: {{T: f32, B: [2], H: 4}}
""")
    s = sample(PROGRAM, x=(2, 4), y=(2, 4))
    before = shape(s.gm)
    s.rewrite(r)
    assert s.fired == 0 and s.miss().reason == reason
    assert shape(s.gm) == before and s.right()


def test_a_state_is_what_the_graph_writes() -> None:
    r = rule("""
inputs: {cache: "State T[S, D]", new: "T[N, D]", at: "i64[N]"}
match: return aten.index_copy(cache, 0, at, new)
replace: return aten.index_copy(cache, 0, at, new)
examples:
  - fires: {T: f32, S: 4, D: 3, N: 2}
""")
    inputs = {"c": torch.zeros(4, 3), "n": torch.randn(2, 3), "i": torch.tensor([1, 3])}
    assert (
        sample("return aten.index_copy(c, 0, i, n)", states=("c",), **inputs).rewrite(r).fired == 1
    )
    s = sample("return aten.index_copy(c, 0, i, n)", **inputs).rewrite(r)
    assert s.fired == 0 and "updates" in s.miss().expected


# -- what is recorded ---------------------------------------------------------------------------------------


def test_a_miss_names_the_place_in_the_model() -> None:
    from torch import nn

    from tests.cases.harness import compiled

    class Block(nn.Module):
        def forward(self, x, y):
            s = nn.functional.silu(x)
            return s * y, s.sum()  # line of the miss

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Block(), Block()])

        def forward(self, x, y):
            return [layer(x, y) for layer in self.layers]

    model = Model()
    code = compiled(model, [GATE])
    code.call(torch.randn(2, 4), torch.randn(2, 4))
    misses = [m for r in code.records for m in r.misses]
    assert [m.place.module for m in misses] == ["layers.0", "layers.1"]
    import inspect

    lines, first = inspect.getsourcelines(Block)
    line = first + next(i for i, text in enumerate(lines) if "line of the miss" in text)
    assert {m.place.source for m in misses} == {f"{__file__}:{line}"}


def test_sites() -> None:
    s = sample(
        "return aten.mul(aten.silu(x), y), aten.mul(aten.silu(y), x)", x=(2, 4), y=(2, 4)
    ).rewrite(GATE)
    keys = [a.key for a in s.applied]
    assert keys == ["fuse/inline@#0", "fuse/inline@#1"] == [site.key for site in s.record.sites]
    site = s.record.sites[0]
    assert (site.nodes, set(site.took)) == (2, {"mul_tensor", "silu_default"})
    assert site.bytes_saved == 64 and site.binding["g"] == "x"
    assert s.record.stages[0][:2] == ("fuse", 2)


def test_sites_that_are_switched_off() -> None:
    s = sample("return aten.mul(aten.silu(x), y), aten.mul(aten.silu(y), x)", x=(2, 4), y=(2, 4))
    s.rewrite(GATE, allow=lambda key: key.endswith("#1"))
    assert [a.key for a in s.applied] == ["fuse/inline@#1"]
    assert s.miss().reason == "order" and "switched off" in s.miss().condition
    assert s.right()


def test_without_misses_the_same_fires() -> None:
    programs = [PROGRAM, "return aten.mul(y, aten.silu(x))", "return aten.silu(aten.mul(x, y))"]
    for program, misses in itertools.product(programs, (True, False)):
        s = sample(program, x=(2, 4), y=(2, 4)).rewrite(GATE, misses=misses)
        assert s.fired == (program != programs[2])
        assert misses or not s.record.misses


# -- several rules ------------------------------------------------------------------------------------------

DOUBLE = rule("""
inputs: {u: "T[*B, H]", g: "T[*B, H]"}
match: return aten.neg(aten.mul(aten.silu(g), u))
replace: return aten.neg(sits.swiglu(g, u))
examples:
  - fires: {T: f32, B: [2], H: 4}
""", "fuse/double")  # fmt: skip
CLAIM = rule("""
inputs: {g: "T[*B, H]", u: "T[*B, H]"}
match: return aten.mul(aten.silu(g), u)
emit: elementwise
examples:
  - fires: {T: f32, B: [2], H: 4}
""", "fuse/claim")  # fmt: skip
CLAIM_TOO = rule("""
inputs: {g: "T[*B, H]"}
match: return aten.silu(g)
emit: elementwise
examples:
  - fires: {T: f32, B: [2], H: 4}
""", "fuse/claim_too")  # fmt: skip


def test_the_first_of_two_rules_takes_the_nodes() -> None:
    program = "return aten.neg(aten.mul(aten.silu(x), y))"
    s = sample(program, x=(2, 4), y=(2, 4)).rewrite(GATE, DOUBLE)
    assert [a.site.rule for a in s.applied] == ["fuse/inline"] and s.right()
    misses = [m for m in s.record.misses if m.rule == "fuse/double"]
    assert [m.reason for m in misses] in ([], ["pattern"])  # its product is gone
    s = sample(program, x=(2, 4), y=(2, 4)).rewrite(DOUBLE, GATE)
    assert [a.site.rule for a in s.applied] == ["fuse/double"] and s.right()


def test_a_claim_leaves_the_graph_and_keeps_its_nodes() -> None:
    s = sample(PROGRAM, x=(2, 4), y=(2, 4))
    before = shape(s.gm)
    s.rewrite(CLAIM, CLAIM_TOO)
    assert [a.site.rule for a in s.applied] == ["fuse/claim"]
    assert {n.name for n in s.applied[0].claimed} == {"mul_tensor", "silu_default"}
    assert shape(s.gm) == before
    assert any(
        m.rule == "fuse/claim_too" and "taken by fuse/claim" in m.condition for m in s.record.misses
    )


def test_a_replacement_is_matched_by_later_rules() -> None:
    second = rule("""
inputs: {g: "T[*B, H]", u: "T[*B, H]"}
match: return aten.neg(sits.swiglu(g, u))
replace: return sits.swiglu(g, aten.neg(u))
examples:
  - fires: {T: f32, B: [2], H: 4}
""", "fuse/second")  # fmt: skip
    s = sample("return aten.neg(aten.mul(aten.silu(x), y))", x=(2, 4), y=(2, 4)).rewrite(
        GATE, second
    )
    assert [a.site.rule for a in s.applied] == ["fuse/inline", "fuse/second"] and s.right()


# -- undoing ------------------------------------------------------------------------------------------------


def rewritten() -> tuple[Sample, list[object]]:
    program = """\
a = aten.mul(aten.silu(x), y)
b = aten.mul(y, aten.silu(a))
p = aten.linear(b, v)
q = aten.linear(b, w)
c = aten.mul(aten.silu(aten.neg(y)), x)
return p, aten.exp(q), aten.reshape(c, [8]), aten.sum(a)
"""
    s = sample(program, params=("v", "w"), x=(2, 4), y=(2, 4), v=(3, 4), w=(5, 4))
    before = shape(s.gm)
    s.rewrite(GATE, PAIR)
    assert s.fired == 4
    return s, before


def test_undoing_all_restores_the_graph_exactly() -> None:
    s, before = rewritten()
    for item in reversed(s.applied):
        item.edit.undo(s.view)
    assert shape(s.gm) == before and not s.view.dead and s.right()


@pytest.mark.parametrize("order", [(3, 2, 1, 0), (2, 3, 1, 0), (3, 1, 2, 0), (3, 1, 0, 2)])
def test_undoing_one_by_one(order: tuple[int, ...]) -> None:
    """What builds on an edit first, what does not at any time: each step leaves a graph that is right."""
    s, before = rewritten()
    for index in order:
        s.applied[index].edit.undo(s.view)
        live = [n for n in s.gm.graph.nodes if n not in s.view.dead]
        assert all(not (set(n.all_input_nodes) & s.view.dead) for n in live)
        s.gm.graph.lint()
    assert shape(s.gm) == before and s.right()


@pytest.mark.parametrize("undone", [(3,), (2,), (3, 1), (3, 2), (3, 1, 0), (3, 2, 1)])
def test_what_is_left_after_undoing_some_is_right(undone: tuple[int, ...]) -> None:
    s, _ = rewritten()
    for index in undone:
        s.applied[index].edit.undo(s.view)
    assert s.right()


def test_undoing_a_value_that_becomes_an_existing_one() -> None:
    one = rule("""
inputs: {x: "T[*B]"}
match: return aten.mul(x, 1.0)
replace: return x
examples:
  - fires: {T: f32, B: [2]}
""", "clean/one")  # fmt: skip
    s = sample("return aten.add(aten.mul(x, 1.0), x), aten.add(x, aten.mul(x, 1.0))", x=(3,))
    before = shape(s.gm)
    s.rewrite(one)
    assert s.fired == 2
    for item in s.applied:
        item.edit.undo(s.view)
    assert shape(s.gm) == before and s.right()


def test_a_refused_replacement_leaves_nothing_behind() -> None:
    broken = rule("""
inputs: {x: "Param T[*B, K]", a: "Param T[N, K]", b: "Param T[M, K]"}
match: |
  p = aten.linear(x, a)
  q = aten.linear(x, b)
  return p, q
replace: |
  w = aten.cat([a, b], 1)
  p, q = aten.split(aten.linear(x, w), N, -1)
  return p, q
examples:
  - fires: {T: f32, B: [2], K: 3, N: 4, M: 4}
""")
    s = sample("return aten.linear(x, v), aten.linear(x, w)", params=("x", "v", "w"), **WEIGHTS)
    before, known = shape(s.gm), {k: list(v) for k, v in s.view.by_key.items() if v}
    s.rewrite(broken)
    assert s.fired == 0
    assert shape(s.gm) == before and not s.view.dead
    assert {k: list(v) for k, v in s.view.by_key.items() if v} == known


def test_an_input_that_is_returned_stays_the_input() -> None:
    """A rewrite makes another reader see its strides; what was returned before is returned as it was."""
    one = rule("""
inputs: {x: "T[*B]"}
match: return aten.mul(x, 1.0)
replace: return x
examples:
  - fires: {T: f32, B: [2]}
""", "clean/one")  # fmt: skip
    s = sample("return aten.neg(aten.mul(x, 1.0)), x", x=torch.randn(2, 6)[:, ::2]).rewrite(one)
    assert s.fired == 1 and s.right()
    assert s.gm.graph.output_node().args[0][1] is s.node("x")
