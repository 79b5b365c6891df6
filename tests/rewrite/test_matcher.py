"""What matches and what does not: arguments, constants, sizes, look-through, siblings."""

from __future__ import annotations

import pytest
import torch

from tests.rewrite.support import rule, sample

GATE = rule("""
inputs: {g: "T[*B, H]", u: "T[*B, H]"}
match: return aten.mul(aten.silu(g), u)
replace: return sits.swiglu(g, u)
examples:
  - fires: {T: f32, B: [2], H: 4}
""")
SQUARE = rule("""
inputs: {x: "T[*B]"}
match: return aten.mul(x, aten.sin(x))
replace: return aten.mul(aten.sin(x), x)
examples:
  - fires: {T: f32, B: [2]}
""")


def constant(kind: str, pattern: str, example: str) -> object:
    return rule(f"""
inputs: {{x: "T[*B]", c: const {kind}}}
match: return {pattern}
replace: return aten.neg(aten.neg({pattern}))
examples:
  - fires: {{T: f32, B: [2], c: {example}}}
""")


def literal(pattern: str) -> object:
    return rule(f"""
inputs: {{x: "T[*B]"}}
match: return {pattern}
replace: return aten.neg(aten.neg({pattern}))
examples:
  - fires: {{T: f32, B: [2]}}
""")


# -- commutation and repetition -------------------------------------------------------------------------


@pytest.mark.parametrize("program", [
    "return aten.mul(aten.silu(x), y)", "return aten.mul(y, aten.silu(x))",
    "s = aten.silu(x)\nreturn aten.mul(y, s)", "return aten.mul(aten.silu(x), x)",
])  # fmt: skip
def test_both_orders_of_a_product(program: str) -> None:
    s = sample(program, x=(2, 4), y=(2, 4)).rewrite(GATE)
    assert s.fired == 1 and s.right()


@pytest.mark.parametrize("program", [
    "return aten.div(aten.silu(x), y)", "return aten.mul(aten.sigmoid(x), y)",
    "return aten.mul(aten.silu(x), 2.0)", "return aten.mul(aten.silu(aten.silu(x)), aten.sin(y))",
])  # fmt: skip
def test_other_ops(program: str) -> None:
    s = sample(program, x=(2, 4), y=(2, 4)).rewrite(GATE)
    assert s.fired == (1 if "sin" in program else 0) and s.right()


def test_a_difference_does_not_commute() -> None:
    minus = rule("""
inputs: {x: "T[*B]", y: "T[*B]"}
match: return aten.sub(aten.silu(x), y)
replace: return aten.neg(aten.sub(y, aten.silu(x)))
examples:
  - fires: {T: f32, B: [2]}
""")
    assert sample("return aten.sub(aten.silu(x), y)", x=(3,), y=(3,)).rewrite(minus).right()
    s = sample("return aten.sub(y, aten.silu(x))", x=(3,), y=(3,)).rewrite(minus)
    assert s.fired == 0
    s = sample("return aten.sub(aten.silu(x), y, alpha=2)", x=(3,), y=(3,)).rewrite(minus)
    assert s.fired == 0


def test_a_weighted_sum_does_not_commute() -> None:
    plus = rule("""
inputs: {x: "T[*B]", y: "T[*B]"}
match: return aten.add(aten.silu(x), y, alpha=2)
replace: return aten.add(aten.mul(y, 2), aten.silu(x))
examples:
  - fires: {T: f32, B: [2]}
""")
    s = sample("return aten.add(aten.silu(x), y, alpha=2)", x=(3,), y=(3,)).rewrite(plus)
    assert s.fired == 1 and s.right()
    s = sample("return aten.add(y, aten.silu(x), alpha=2)", x=(3,), y=(3,)).rewrite(plus)
    assert s.fired == 0
    assert sample("return aten.add(aten.silu(x), y)", x=(3,), y=(3,)).rewrite(plus).fired == 0


def test_an_input_used_twice_is_one_value() -> None:
    assert sample("return aten.mul(x, aten.sin(x))", x=(3,), y=(3,)).rewrite(SQUARE).fired == 1
    assert sample("return aten.mul(aten.sin(x), x)", x=(3,), y=(3,)).rewrite(SQUARE).fired == 1
    s = sample("return aten.mul(x, aten.sin(y))", x=(3,), y=(3,)).rewrite(SQUARE)
    assert s.fired == 0 and s.miss().reason == "pattern"


def test_the_other_order_is_tried_when_the_first_fails_deeper() -> None:
    s = sample("return aten.mul(aten.silu(x), aten.silu(y))", x=(3,), y=(3,)).rewrite(GATE)
    assert s.fired == 1 and s.right()
    nested = rule("""
inputs: {x: "T[*B]", y: "T[*B]"}
match: return aten.mul(aten.silu(x), aten.silu(aten.sin(y)))
replace: return aten.mul(aten.silu(aten.sin(y)), aten.silu(x))
examples:
  - fires: {T: f32, B: [2]}
""")
    s = sample("return aten.mul(aten.silu(aten.sin(x)), aten.silu(y))", x=(3,), y=(3,)).rewrite(
        nested
    )
    assert s.fired == 1 and s.right()


def test_one_node_is_not_two() -> None:
    """Two calls of the pattern need two nodes, even where both would fit one."""
    both = rule("""
inputs: {x: "T[*B]"}
match: |
  a = aten.sin(x)
  b = aten.sin(x)
  return aten.mul(a, b)
replace: return aten.mul(aten.sin(x), aten.sin(x))
examples:
  - fires: {T: f32, B: [2]}
""")
    twice = "a = aten.sin(x)\nb = aten.sin(x)\nreturn aten.mul(a, b)"
    assert sample(twice, x=(3,)).rewrite(both).right()
    s = sample("a = aten.sin(x)\nreturn aten.mul(a, a)", x=(3,)).rewrite(both)
    assert s.fired == 0 and s.right()


# -- constants -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern, given, fires", [
    ("aten.mul(x, 1.0)", "1.0", True), ("aten.mul(x, 1.0)", "1", True), ("aten.mul(x, 1)", "1.0", True),
    ("aten.mul(x, 1.0)", "True", False), ("aten.mul(x, 1)", "True", False),
    ("aten.mul(x, 1.0)", "1.0000001", False), ("aten.mul(x, 1.0)", "-1.0", False),
    ("aten.add(x, 0.0)", "0.0", True), ("aten.add(x, 0.0)", "-0.0", False), ("aten.add(x, -0.0)", "0.0", False),
    ("aten.add(x, -0.0)", "-0.0", True), ("aten.mul(x, 0.1)", "0.1", True),
    ("aten.mul(x, 1e-6)", "1e-5", False), ("aten.mul(x, -1.5)", "-1.5", True),
])  # fmt: skip
def test_literals(pattern: str, given: str, fires: bool) -> None:
    head = pattern[: pattern.index("x, ")]
    s = sample(f"return {head}x, {given})", x=(3,)).rewrite(literal(pattern))
    assert s.fired == fires, s.record.misses


def test_infinities_and_nan() -> None:
    from dataclasses import replace

    from sitsopt.rewrite.values import same_constant

    nan, inf = float("nan"), float("inf")
    assert same_constant(nan, nan) and not same_constant(nan, 0.0) and not same_constant(1.0, nan)
    assert same_constant(inf, inf) and not same_constant(inf, -inf)
    assert not same_constant(0, False) and not same_constant(1, True) and not same_constant("1", 1)
    assert same_constant(0.0, 0) and not same_constant(-0.0, 0) and not same_constant(0.0, -0.0)
    assert same_constant([1, 2], (1, 2)) and not same_constant([1, 2], [1, 2, 3])
    assert not same_constant(None, 0) and same_constant(None, None)
    assert same_constant(torch.float32, torch.float32) and not same_constant(
        torch.float32, torch.float64
    )
    assert replace  # the notation has no nan: only graphs do


@pytest.mark.parametrize("kind, program, fires", [
    ("float", "aten.mul(x, 0.5)", True), ("float", "aten.mul(x, 2)", True), ("float", "aten.mul(x, True)", False),
    ("float", "aten.mul(x, y)", False), ("int", "aten.mul(x, 2)", True), ("int", "aten.mul(x, 2.5)", False),
    ("int", "aten.mul(x, True)", False),
])  # fmt: skip
def test_bound_constants(kind: str, program: str, fires: bool) -> None:
    r = constant(kind, "aten.mul(x, c)", "3" if kind == "int" else "0.5")
    s = sample(f"return {program}", x=(3,), y=(3,)).rewrite(r)
    assert s.fired == fires and s.right()
    if fires:
        assert s.applied[0].match.bound["c"] == s.before.graph.output_node().args[0][0].args[1]


def test_one_constant_in_two_places() -> None:
    r = rule("""
inputs: {x: "T[*B]", c: const float}
match: return aten.div(aten.tanh(aten.mul(x, c)), c)
replace: return aten.mul(aten.tanh(aten.mul(x, c)), 1 / c)
examples:
  - fires: {T: f32, B: [2], c: 0.5}
""")
    assert sample("return aten.div(aten.tanh(aten.mul(x, 2.0)), 2.0)", x=(3,)).rewrite(r).right()
    s = sample("return aten.div(aten.tanh(aten.mul(x, 2.0)), 2.5)", x=(3,)).rewrite(r)
    assert s.fired == 0
    for sign in ("-0.0", "0.0"):  # the same number, another bit
        other = "0.0" if sign == "-0.0" else "-0.0"
        s = sample(f"return aten.div(aten.tanh(aten.mul(x, {sign})), {other})", x=(3,)).rewrite(r)
        assert s.fired == 0


def test_equations_over_sizes() -> None:
    r = rule("""
inputs: {q: "T[*B, M, D]", k: "T[*B, D, N]"}
match: return aten.mul(aten.matmul(q, k), D ** -0.5)
replace: return aten.matmul(aten.mul(q, D ** -0.5), k)
tolerance: {f32: {rtol: 1.0e-5, atol: 1.0e-5}}
examples:
  - fires: {T: f32, B: [2], M: 3, D: 4, N: 5}
""")
    shapes = {"x": (2, 3, 16), "y": (2, 16, 5)}
    assert sample("return aten.mul(aten.matmul(x, y), 0.25)", **shapes).rewrite(r).right()
    s = sample("return aten.mul(aten.matmul(x, y), 0.125)", **shapes).rewrite(r)
    assert s.fired == 0 and s.miss().reason == "pattern"


def test_an_argument_left_out_has_its_default() -> None:
    r = rule("""
inputs: {x: "T[*B, H]"}
match: return aten.softmax(x, -1)
replace: return aten.softmax(x, -1)
examples:
  - fires: {T: f32, B: [2], H: 4}
""")
    assert sample("return aten.softmax(x, -1)", x=(2, 4)).rewrite(r).fired == 1
    assert sample("return aten.softmax(x, 1)", x=(2, 4)).rewrite(r).fired == 1
    assert sample("return aten.softmax(x, 0)", x=(2, 4)).rewrite(r).fired == 0
    assert sample("return aten.softmax(x, -1, f64)", x=(2, 4)).rewrite(r).fired == 0


# -- permutations, views and dims -------------------------------------------------------------------------

TRANSPOSED = rule("""
inputs: {q: "T[*B, M, D]", k: "T[*B, N, D]"}
match: return aten.matmul(q, aten.transpose(k, -2, -1))
replace: return aten.matmul(q, aten.transpose(k, -1, -2))
examples:
  - fires: {T: f32, B: [2], M: 3, D: 4, N: 5}
""")


@pytest.mark.parametrize("call, fires", [
    ("aten.transpose(y, -2, -1)", True), ("aten.transpose(y, 2, 3)", True), ("aten.transpose(y, -1, 2)", True),
    ("aten.permute(y, [0, 1, 3, 2])", True), ("aten.permute(y, [0, 1, -1, -2])", True), ("aten.mT(y)", True),
    ("aten.permute(y, [0, 2, 3, 1])", False), ("aten.permute(y, [1, 0, 3, 2])", False),
    ("aten.transpose(y, 1, 2)", False), ("aten.reshape(y, [4, 4, 4, 4])", False), ("y", False),
])  # fmt: skip
def test_a_permutation_is_matched_exactly(call: str, fires: bool) -> None:
    s = sample(f"return aten.matmul(x, {call})", x=(4, 4, 4, 4), y=(4, 4, 4, 4)).rewrite(TRANSPOSED)
    assert s.fired == fires and s.right()


def test_dims_count_from_either_end() -> None:
    r = rule("""
inputs: {x: "T[*B, H]"}
match: return aten.mean(x, [-1], True)
replace: return aten.div(aten.sum(x, [-1], True), H)
tolerance: {f32: {rtol: 1.0e-5, atol: 1.0e-5}}
examples:
  - fires: {T: f32, B: [2], H: 4}
""")
    assert sample("return aten.mean(x, [2], True)", x=(2, 3, 4)).rewrite(r).right()
    for other in ("[1], True", "[-1], False", "[-1, -2], True", "[], True"):
        assert sample(f"return aten.mean(x, {other})", x=(2, 3, 4)).rewrite(r).fired == 0, other


THROUGH = rule("""
inputs: {x: "T[*B]"}
match: |
  s = aten.sin(x)
  return aten.exp(s)
through: {s: [cast]}
where:
  T in {f32, bf16}: what the examples show
replace: return cast(aten.exp(cast(aten.sin(x), f32)), f32)
tolerance: {f32: {rtol: 1.0e-5, atol: 1.0e-5}}
examples:
  - fires: {T: f32, B: [2]}
  - skips: {T: f64, B: [2]}
    because: T in {f32, bf16}
""")


def test_through_a_cast_only_where_the_rule_says() -> None:
    low = torch.randn(3).bfloat16()
    assert sample("return aten.exp(aten.sin(x))", x=(3,)).rewrite(THROUGH).fired == 1
    s = sample("return aten.exp(cast(aten.sin(x), f32))", x=low).rewrite(THROUGH)
    assert s.fired == 1 and s.right()
    s = sample("return aten.exp(aten.reshape(aten.sin(x), [3, 1]))", x=(3,)).rewrite(THROUGH)
    assert s.fired == 0
    plain = rule("""
inputs: {x: "T[*B]"}
match: return aten.exp(aten.sin(x))
replace: return aten.exp(aten.sin(x))
examples:
  - fires: {T: f32, B: [2]}
""")
    assert sample("return aten.exp(cast(aten.sin(x), f32))", x=low).rewrite(plain).fired == 0


def test_a_cast_that_is_no_node() -> None:
    wide = rule("""
inputs: {x: "T[*B]"}
match: return cast(aten.sin(cast(x, f32)), T)
replace: return cast(aten.neg(aten.sin(aten.neg(cast(x, f32)))), T)
examples:
  - fires: {T: f32, B: [2]}
""")
    assert sample("return aten.sin(x)", x=(3,)).rewrite(wide).right()
    low = torch.randn(3).bfloat16()
    s = sample("return cast(aten.sin(cast(x, f32)), bf16)", x=low).rewrite(wide)
    assert s.fired == 1 and s.right()
    assert sample("return aten.sin(x)", x=low).rewrite(wide).fired == 0
    s = sample("return aten.sin(cast(x, f32))", x=low).rewrite(wide)  # T is f32 here
    assert s.fired == 1 and s.applied[0].match.bound["T"] == torch.float32 and s.right()


# -- optional inputs, packs, sizes, dtypes -----------------------------------------------------------------

BIASED = rule("""
inputs: {x: "T[*B, K]", w: "Param T[N, K]", b: "optional T[N]"}
match: return aten.relu(aten.linear(x, w, b))
replace: return sits.linear_act(x, w, b, "relu")
examples:
  - fires: {T: f32, B: [2], K: 3, N: 4}
""")


def test_optional_inputs() -> None:
    shapes = {"x": (2, 3), "w": (4, 3), "b": (4,)}
    s = sample("return aten.relu(aten.linear(x, w, b))", params=("w", "b"), **shapes).rewrite(
        BIASED
    )
    assert s.fired == 1 and s.right()
    s = sample(
        "return aten.relu(aten.linear(x, w)), aten.neg(b)", params=("w", "b"), **shapes
    ).rewrite(BIASED)
    assert s.fired == 1 and s.right()
    assert s.applied[0].match.bound["b"] is None


def test_a_parameter_is_no_other_tensor() -> None:
    shapes = {"x": (2, 3), "w": (4, 3), "b": (4,)}
    s = sample("return aten.relu(aten.linear(x, w, b))", **shapes).rewrite(BIASED)
    assert s.fired == 0 and "parameter" in s.miss().expected
    s = sample(
        "return aten.relu(aten.linear(x, aten.neg(w), b))", params=("w", "b"), **shapes
    ).rewrite(BIASED)
    assert s.fired == 0


def test_packs_are_any_number_of_dims() -> None:
    for shape in ((4,), (2, 4), (2, 3, 4), (1, 1, 1, 4), (0, 4)):
        s = sample("return aten.mul(aten.silu(x), y)", x=shape, y=shape).rewrite(GATE)
        assert s.fired == 1 and s.right(), shape
    s = sample("return aten.mul(aten.silu(x), y)", x=(), y=()).rewrite(GATE)
    assert s.fired == 0 and s.reasons() <= {"shape"}


@pytest.mark.parametrize("other", [(4,), (1, 4), (2, 1), (1, 1)])
def test_broadcasting_is_no_match(other: tuple[int, ...]) -> None:
    s = sample("return aten.mul(aten.silu(x), y)", x=(2, 4), y=other).rewrite(GATE)
    assert s.fired == 0 and s.reasons() == {"shape"} and s.right()


def test_dtypes_are_one_variable() -> None:
    s = sample(
        "return aten.mul(aten.silu(x), y)", x=(2, 4), y=torch.randn(2, 4).bfloat16()
    ).rewrite(GATE)
    assert s.fired == 0
    miss = s.miss()
    assert miss.reason == "dtype" and "bfloat16" in miss.found and "float32" in miss.expected


def test_symbolic_sizes() -> None:
    long = rule("""
inputs: {g: "T[B, H]", u: "T[B, H]"}
match: return aten.mul(aten.silu(g), u)
where:
  B >= 4: a guard
  H % 8 == 0: another
replace: return sits.swiglu(g, u)
examples:
  - fires: {T: f32, B: 4, H: 8}
  - skips: {T: f32, B: 3, H: 8}
    because: B >= 4
  - skips: {T: f32, B: 4, H: 9}
    because: H % 8 == 0
""")
    same = "return aten.mul(aten.silu(x), aten.sin(x))"
    s = sample(same, dynamic={"x": (0,)}, x=(5, 8)).rewrite(long)
    assert s.fired == 1  # guarded: it holds today
    env = s.node("x").meta["val"].fake_mode.shape_env
    assert env.guards and "4" in str(env.guards[-1].expr)
    s = sample(same, dynamic={"x": (0,)}, x=(3, 8)).rewrite(long)
    assert s.fired == 0 and s.miss().condition == "B >= 4"
    s = sample(same, dynamic={"x": (1,)}, x=(5, 16)).rewrite(long)
    assert s.fired == 1
    equal = rule("""
inputs: {g: "T[B, H]", u: "T[B, H]"}
match: return aten.mul(aten.silu(g), u)
where:
  B == 5: an equality is never guarded
replace: return sits.swiglu(g, u)
examples:
  - fires: {T: f32, B: 5, H: 8}
  - skips: {T: f32, B: 3, H: 8}
    because: B == 5
""")
    s = sample(same, dynamic={"x": (0,)}, x=(5, 8)).rewrite(equal)
    assert s.fired == 0 and s.miss().reason == "symbolic"
    assert not s.node("x").meta["val"].fake_mode.shape_env.guards
    assert sample(same, dynamic={"x": (1,)}, x=(5, 8)).rewrite(equal).fired == 1  # B is a number


# -- several outputs, siblings -----------------------------------------------------------------------------

PAIR = rule("""
inputs: {x: "T[*B, K]", a: "Param T[N, K]", b: "Param T[M, K]"}
match: |
  p = aten.linear(x, a)
  q = aten.linear(x, b)
  return p, q
replace: |
  p, q = sits.linears(x, [a, b], [None, None])
  return p, q
examples:
  - fires: {T: f32, B: [2], K: 3, N: 4, M: 5}
""")
WEIGHTS = {"x": (2, 3), "v": (4, 3), "w": (5, 3)}


def test_siblings() -> None:
    for program in (
        "return aten.linear(x, v), aten.linear(x, w)", "return aten.linear(x, w), aten.linear(x, v)",
        "p = aten.linear(x, v)\ns = aten.sin(p)\nreturn aten.linear(x, w), s",
    ):  # fmt: skip
        s = sample(program, params=("v", "w"), **WEIGHTS).rewrite(PAIR)
        assert s.fired == 1 and s.right(), program


def test_no_siblings() -> None:
    for program in (
        "return aten.linear(x, v), aten.linear(aten.sin(x), w)", "return aten.linear(x, v)",
        "return aten.linear(x, v), aten.linear(x, w, aten.sum(aten.linear(x, w), [0]))",
    ):  # fmt: skip
        s = sample(program, params=("v", "w"), **WEIGHTS).rewrite(PAIR)
        assert s.right()
    assert sample("return aten.linear(x, v)", params=("v", "w"), **WEIGHTS).rewrite(PAIR).fired == 0


def test_a_sibling_that_needs_the_other() -> None:
    """`q` reads what is computed from `p`: they cannot be one op."""
    chain = rule("""
inputs: {x: "T[K, K]", a: "T[K, K]", b: "T[K, K]"}
match: |
  p = aten.matmul(x, a)
  q = aten.matmul(x, b)
  return p, q
replace: |
  p = aten.matmul(x, a)
  q = aten.matmul(x, b)
  return p, q
examples:
  - fires: {T: f32, K: 3}
""")
    s = sample(
        "p = aten.matmul(x, y)\nreturn aten.matmul(x, aten.sin(p))", x=(3, 3), y=(3, 3)
    ).rewrite(chain)
    assert s.fired == 0 and s.right() and s.reasons() <= {"order", "pattern"}


def test_outputs_of_one_op() -> None:
    r = rule("""
inputs: {x: "T[*B, H]"}
match: |
  value, place = aten.max(x, -1)
  return value, place
replace: |
  value, place = aten.max(aten.neg(aten.neg(x)), -1)
  return value, place
examples:
  - fires: {T: f32, B: [2], H: 4}
""")
    for program in ("v, p = aten.max(x, -1)\nreturn v, p", "_, p = aten.max(x, -1)\nreturn p",
                    "v, p = aten.max(x, 1)\nreturn aten.sin(v), p, v"):  # fmt: skip
        s = sample(program, x=(2, 4)).rewrite(r)
        assert s.fired == 1 and s.right(), program
    assert sample("v, p = aten.max(x, 0)\nreturn v, p", x=(2, 4)).rewrite(r).fired == 0


def test_spellings_are_tried_in_order() -> None:
    r = rule("""
inputs: {x: "T[*B]", kind: const str}
match:
  - code: return aten.neg(aten.sin(x))
    with: {kind: "none"}
  - code: return aten.mul(aten.sin(x), -1)
    with: {kind: "tanh"}
replace: return aten.mul(aten.gelu(x, approximate=kind), 1)
tolerance: {f32: {rtol: 10.0, atol: 10.0}}
examples:
  - fires: {T: f32, B: [2], kind: "none"}
  - fires: {T: f32, B: [2], kind: "tanh"}
""")
    s = sample("return aten.neg(aten.sin(x)), aten.mul(aten.sin(x), -1)", x=(3,)).rewrite(r)
    assert {a.match.bound["kind"] for a in s.applied} == {"none", "tanh"}
    assert [a.site.spelling for a in s.applied] == [0, 1]
