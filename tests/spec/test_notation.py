"""The notation: what it means, and where it ends."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sitsopt.spec.errors import Pos, SpecError
from sitsopt.spec.notation import parse_program
from sitsopt.spec.program import Arith, Call, DType, Let, Lit, Program, Ref, Seq

INPUTS = {"x", "y", "w", "bias"}
NAMES = {"H", "Nq", "Nk", "T", "eps", "scale"}


def parse(text, **options):
    def pos_of(line, column):
        return Pos("f", line + 1, column + 1)

    return parse_program(text, pos_of, INPUTS, NAMES, packs={"B"}, **options)


def call(op, *args, **kwargs):
    return Call(op, args, tuple(kwargs.items()))


def test_nested_calls_become_lets():
    assert parse("return aten.mul(aten.silu(x), y)") == Program(
        (
            Let(("%1",), call("aten.silu", Ref("x"))),
            Let(("%2",), call("aten.mul", Ref("%1"), Ref("y"))),
        ),
        ("%2",),
    )


def test_names_stay_and_temps_count_inside_out():
    program = parse("s = aten.silu(aten.neg(x))\nreturn aten.mul(s, aten.relu(y)), s")
    assert [let.names for let in program.lets] == [("%1",), ("s",), ("%2",), ("%3",)]
    assert program.returns == ("%3", "s")
    assert program.text.startswith("s = aten.silu")


def test_several_results():
    program = parse("q, _ = split(linear(x, w), [Nq, Nk], -1)\nreturn q")
    assert program.lets[1] == Let(
        ("q", "_"), call("aten.split", Ref("%1"), Seq((Ref("Nq"), Ref("Nk"))), Lit(-1))
    )
    both = parse("return add_rms_norm(x, y, w, eps)")
    assert both.lets[0].names == both.returns == ("%1", "%2")


def test_a_returned_list_is_taken_apart_when_the_count_is_known():
    program = parse("return linears(x, [w, w], [None, bias])", outputs=2)
    assert program.lets[0].names == program.returns == ("%1", "%2")
    assert parse("return split(x, [H], -1)", outputs=1).returns == ("%1",)


@pytest.mark.parametrize(
    ("text", "op"),
    [
        ("cast(x, f32)", "prim.cast"), ("rms_norm(x, w, eps)", "sits.rms_norm"),
        ("silu(x)", "aten.silu"), ("aten.mul.Tensor(x, y)", "aten.mul.Tensor"),
        ("sits.rope(x, y, w)", "sits.rope"), ("aten.rms_norm(x, [H], w, eps)", "aten.rms_norm"),
    ],
)  # fmt: skip
def test_bare_names_mean_cast_then_sits_then_aten(text, op):
    assert parse(f"return {text}").lets[-1].call.op == op


@pytest.mark.parametrize(
    ("text", "term"),
    [
        ("2", Lit(2)), ("-2", Lit(-2)), ("+2", Lit(2)), ("2.5e-3", Lit(2.5e-3)), ("inf", Lit(math.inf)),
        ("-inf", Lit(-math.inf)), ("True", Lit(True)), ("scale", Ref("scale")),
        ("-eps", Arith("neg", (Ref("eps"),))), ("- -eps", Arith("neg", (Arith("neg", (Ref("eps"),)),))),
        ("H ** -0.5", Arith("**", (Ref("H"), Lit(-0.5)))),
        ("(H + 1) // 2 * 3 % Nq", Arith("%", (Arith("*", (Arith("//", (Arith(
            "+", (Ref("H"), Lit(1))), Lit(2))), Lit(3))), Ref("Nq")))),
        ("min(H, 8)", Arith("min", (Ref("H"), Lit(8)))),
        ("max(H, Nq, 1) - 1", Arith("-", (Arith("max", (Ref("H"), Ref("Nq"), Lit(1))), Lit(1)))),
    ],
)  # fmt: skip
def test_terms(text, term):
    assert parse(f"return aten.mul(x, {text})").lets[0].call.args[1] == term


@pytest.mark.parametrize(
    ("text", "term"),
    [
        ("view(x, [*B, H // 2, -1])", Seq((Ref("B"), Arith("//", (Ref("H"), Lit(2))), Lit(-1)))),
        ("cast(x, bf16)", Lit(DType("bf16"))),
        ("cast(x, T)", Ref("T")),
        ("index(x, [None, y])", Seq((Lit(None), Ref("y")))),
        ("sum(x, None)", Lit(None)),
        ("sum(x, [])", Seq(())),
    ],
)
def test_lists_dtypes_and_none(text, term):
    assert parse(f"return aten.{text}".replace("aten.cast", "cast")).lets[0].call.args[1] == term


def test_nan_is_a_constant():
    assert math.isnan(parse("return aten.mul(x, nan)").lets[0].call.args[1].value)


@pytest.mark.parametrize(
    ("text", "place", "has"),
    [
        ("", (1, 1), "returns nothing"),
        ("return", (1, 1), "returns nothing"),
        ("s = aten.silu(x)", (1, 1), "returns nothing"),
        ("return x\nreturn y", (1, 1), "nothing may follow"),
        ("a = x\nreturn a", (1, 5), "`x` is no call"),
        ("a = b = aten.silu(x)\nreturn a", (1, 1), "no statement"),
        ("a.b = aten.silu(x)\nreturn x", (1, 1), "`a.b` is no name"),
        ("a: int = aten.silu(x)\nreturn a", (1, 1), "no statement"),
        ("a, *b = split(x, [H], 0)\nreturn a", (1, 4), "`*b` is no name"),
        ("_, _ = split(x, [H], 0)\nreturn x", (1, 1), "no result of this call is named"),
        ("_ = aten.silu(x)\nreturn x", (1, 1), "meaning of its own"),
        ("x = aten.silu(y)\nreturn x", (1, 1), "declared in `inputs`"),
        ("H = aten.silu(y)\nreturn H", (1, 1), "declared in `inputs`"),
        ("f32 = aten.silu(y)\nreturn f32", (1, 1), "meaning of its own"),
        ("a = aten.silu(x)\na = aten.silu(a)\nreturn a", (2, 1), "assigned twice"),
        ("a, a = split(x, [H], 0)\nreturn a", (1, 4), "assigned twice"),
        ("a = aten.silu(a)\nreturn a", (1, 15), "`a` is not bound"),
        ("a = aten.silu(x)\nreturn y", (1, 1), "never used"),
        ("a, b = split(x, [H], 0)\nreturn a", (1, 4), "write `_`"),
        ("a, b = aten.silu(x)\nreturn a, b", (1, 1), "aten.silu has 1 result, not 2"),
        ("a = add_rms_norm(x, y, w, eps)\nreturn a", (1, 1), "2 names before"),
        ("return split(x, [H], 0)", (1, 8), "a list of values"),
        ("a = split(x, [H], 0)\nreturn a", (2, 8), "a list of values"),
        ("return H", (1, 8), "`H` is no value of the graph"),
        ("return 3", (1, 8), "no value of the graph"),
        ("return [x]", (1, 8), "no value of the graph"),
        ("return aten.silu(z)", (1, 18), "`z` is not bound"),
        ("return aten.mul(x, scal)", (1, 20), "did you mean `scale`?"),
        ("return aten.mul(x, biass)", (1, 20), "did you mean `bias`?"),
        ("return aten.silluu(x)", (1, 8), "did you mean `aten.silu`?"),
        ("return rms_nrom(x, w, eps)", (1, 8), "did you mean `rms_norm`?"),
        ("return aten.mul.Tensr(x, y)", (1, 8), "did you mean `aten.mul.Tensor`?"),
        ("return torch.silu(x)", (1, 8), "there is no op `torch.silu`"),
        ("return x.silu()", (1, 8), "did you mean `aten.silu(x, ...)`?"),
        ("return aten.add_(x, y)", (1, 8), "match aten.add:"),
        ("return aten.copy_(x, y)", (1, 8), "writes its input"),
        ("return (lambda: x)()", (1, 9), "is no op"),
        ("return aten.silu(x)()", (1, 8), "is no op"),
        ("return aten.silu(*x)", (1, 18), "not allowed here"),
        ("return aten.silu(**x)", (1, 20), "not part of this notation"),
        ("return aten.silu(x[0])", (1, 18), "takes a part of a value"),
        ("return aten.silu((x, y))", (1, 18), "a tuple"),
        ("return aten.silu(x if y else w)", (1, 18), "not allowed here"),
        ("return aten.silu(f'{x}')", (1, 18), "not allowed here"),
        ("return aten.silu(a := x)", (1, 18), "not allowed here"),
        ("return aten.silu([x for x in y])", (1, 18), "not allowed here"),
        ("return aten.mul(x, 1j)", (1, 20), "not allowed here"),
        ("return aten.mul(x, b'a')", (1, 20), "not allowed here"),
        ("return aten.mul(x, y * 2)", (1, 20), "`y` is a tensor"),
        ("return aten.mul(x, H @ 2)", (1, 20), "not allowed here"),
        ("return aten.mul(x, H + 'a')", (1, 24), "is no number"),
        ("return aten.mul(x, H + f32)", (1, 24), "is no number"),
        ("return aten.mul(x, H + True)", (1, 24), "is no number"),
        ("return aten.mul(x, not H)", (1, 20), "not allowed here"),
        ("return aten.view(x, [B, H])", (1, 22), "`B` is several sizes"),
        ("return aten.view(x, [*H])", (1, 22), "no pack of sizes"),
        ("return aten.view(x, B)", (1, 21), "`B` is several sizes"),
        ("return aten.mul(x)", (1, 8), "misses its argument `other`"),
        ("return aten.mul(x, y, w)", (1, 23), "takes 2 arguments by position, not 3"),
        ("return aten.silu(self=x, self=y)", (1, 26), "`self` is given twice"),
        ("return aten.silu(x, self=y)", (1, 21), "by position and by name"),
        ("return aten.gelu(x, aproximate='tanh')", (1, 21), "did you mean `approximate`?"),
        ("return aten.gelu(x, 'tanh')", (1, 21), "takes 1 argument by position"),
        ("return aten.gelu(x, approximate=tanh)", (1, 33), "`tanh` is not bound"),
        ("return aten.gelu(x, approximate=3)", (1, 33), "cannot be a whole number"),
        ("return cast(x, 'f32')", (1, 16), "cannot be text"),
        ("return aten.cat(x, 0)", (1, 17), "cannot be a tensor"),
        ("return aten.cat([x, 1], 0)", (1, 17), "cannot be a list"),
        ("return aten.linear(x, 3)", (1, 23), "cannot be a whole number"),
        ("return aten.linear(x, H)", (1, 23), "cannot be a constant"),
        ("return aten.linear(None, w)", (1, 20), "cannot be None"),
        ("return aten.softmax(x, y)", (1, 24), "cannot be a tensor"),
        ("l = split(x, [H], 0)\nreturn aten.silu(l)", (2, 18), "cannot be a list"),
        ("é = aten.mul('é', q)\nreturn é", (1, 19), "`q` is not bound"),
        ("return " + "aten.silu(" * 70 + "x" + ")" * 70, (1, 1), "levels deep"),
        ("return x" + " " * 30_000, (1, 1), "characters"),
        ("return aten.silu(x", None, "not valid syntax"),
        ("return aten.silu(x))", None, "not valid syntax"),
        ("  return x", None, "not valid syntax"),
        ("return x\0", None, ""),
        ("return " + "-" * 10_000 + "1", None, ""),
    ],
)  # fmt: skip
def test_mistakes_stand_where_they_are(text, place, has):
    with pytest.raises(SpecError) as caught:
        parse(text)
    assert has in str(caught.value)
    if place:
        assert (caught.value.line, caught.value.column) == place


def test_ops_that_write_are_for_examples_only():
    program = parse("y2 = aten.add_(x, y)\nreturn aten.mul(y2, x)", in_place=True)
    assert program.lets[0].call.op == "aten.add_"
    with pytest.raises(SpecError, match="misses its argument"):
        parse("return aten.add_(x)", in_place=True)


def test_numbers_stand_for_tensors_only_where_graphs_pass_them():
    for text in ("aten.mul.Tensor(x, 2.0)", "aten.mul.Tensor(x, eps)", "aten.add.Tensor(x, H - 1)"):
        parse(f"return {text}")
    with pytest.raises(SpecError, match="cannot be a number"):
        parse("return aten.matmul(x, 2.0)")


PIECES = ["return ", "x", "y", "aten.silu(", "aten.mul(", ")", ", ", "s = ", "\n", "[", "]", "*B", "H", "-1",
          "split(", " // ", "'a'", "f32", "cast(", "(", "None", ".", "lambda: ", "=", "_", "%", "\t", "é"]  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.one_of(st.lists(st.sampled_from(PIECES), max_size=14).map("".join), st.text(max_size=40)))
def test_any_text_parses_or_is_a_spec_error(text):
    try:
        program = parse(text)
    except SpecError as error:
        assert 1 <= error.line <= text.count("\n") + 1
        return
    bound = {name for let in program.lets for name in let.names}
    assert set(program.returns) <= bound | INPUTS
    assert parse(program.text) == program


@st.composite
def programs(draw):
    """Well-formed text: each line uses earlier names, and the last line returns all that nobody read."""
    names, unread, lines = sorted(INPUTS), [], []
    for index in range(draw(st.integers(1, 5))):
        a, b = draw(st.sampled_from(names)), draw(st.sampled_from(names))
        form = draw(
            st.sampled_from(
                ["aten.silu({a})", "aten.mul(aten.neg({a}), {b})", "aten.add({a}, H * 2)"]
            )
        )
        unread = [name for name in unread if name not in (a, b if "{b}" in form else a)]
        lines.append(f"t{index} = {form.format(a=a, b=b)}")
        names.append(f"t{index}")
        unread.append(f"t{index}")
    return "\n".join([*lines, "return " + ", ".join(unread)]), lines


@settings(max_examples=100, deadline=None)
@given(programs())
def test_a_program_names_each_value_once_and_before_its_use(case):
    text, lines = case
    program = parse(text)
    seen = set(INPUTS) | NAMES
    for let in program.lets:
        for term in let.call.args:
            assert not isinstance(term, Ref) or term.name in seen
        assert not seen & set(let.names)
        seen |= set(let.names)
    assert len([name for name in seen if name.startswith("t")]) == len(lines)
