"""Rules: what a file means, and files against each other."""

from __future__ import annotations

import dataclasses
import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from sitsopt.spec.errors import Pos, SpecError, SpecErrors
from sitsopt.spec.program import Call, DType, Let, Lit, Ref
from sitsopt.spec.rule import Dim, load_rule, load_rules, rule_files
from sitsopt.spec.rule_inputs import const_value, parse_input

GOOD = Path(__file__).parent / "good"
SWIGLU, FULL = ((GOOD / name).read_text() for name in ("swiglu.yaml", "full.yaml"))


def rule(text, rule_id="fuse/swiglu"):
    return load_rule("rule.yaml", rule_id, text)


def edited(*pairs, text=SWIGLU):
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new, 1)
    return text


def test_the_rule_of_the_handbook():
    read = rule(SWIGLU)
    assert (read.id, read.stage, read.emit, read.replace) == (
        "fuse/swiglu",
        "fuse",
        "elementwise",
        None,
    )
    assert read.doc.startswith("Eager code writes")
    assert read.inputs["gate"].dims == (Dim("B", pack=True), Dim("H"))
    assert (read.sizes, read.packs, read.dtypes, read.outputs) == (["H"], ["B"], ["T"], 1)
    (spelling,) = read.spellings
    assert spelling.program.lets == (
        Let(("%1",), Call("aten.silu", (Ref("gate"),))),
        Let(("%2",), Call("aten.mul", (Ref("%1"), Ref("up")))),
    )
    assert spelling.program.lets[0].call.pos == Pos("rule.yaml", 8, 19)
    (condition,) = read.where
    assert condition.text == "T in {f16, bf16, f32}"
    assert condition.reason == "the kernel computes in f32 and rounds once"
    assert condition.pos == Pos("rule.yaml", 10, 3)
    assert read.tolerance["bf16"].rtol == 8e-3
    fires, skips, uses = read.examples
    assert fires.fires and fires.binding == {"T": "bf16", "B": (2, 16), "H": 11008}
    assert not skips.fires and skips.because == condition.text
    assert uses.given.returns == ("%1", "s")
    assert read.grad == "inference" and read.after == read.overrides == ()
    assert read.digest == hashlib.sha256(SWIGLU.encode()).hexdigest()
    assert read.text == SWIGLU


def test_every_key():
    read = rule(FULL, "fuse/full")
    kinds = {name: one.kind for name, one in read.inputs.items()}
    assert kinds == {"x": "tensor", "weight": "param", "w": "param", "bias": "tensor", "cache": "state",
                     "eps": "const", "offset": "const", "style": "const"}  # fmt: skip
    assert read.inputs["bias"].optional and not read.inputs["w"].optional
    assert (read.inputs["offset"].default, read.inputs["offset"].const_type) == (0.5, "float")
    plain, swapped = read.spellings
    assert (plain.fixed, swapped.fixed) == ({"style": "plain"}, {"style": "swapped", "offset": 0.0})
    assert [one.text for one in swapped.where] == ["K > 1"]
    assert plain.replace is None and swapped.replace is not None
    assert list(read.conditions) == ["N % 8 == 0", "K > 1"]
    assert read.through == {"x": frozenset({"cast", "view"})}
    assert read.fold["both"].lets[0].call.op == "aten.mul"
    assert (read.grad, read.after, read.overrides) == (
        "safe",
        ("recompose/linear",),
        ("fuse/other",),
    )
    one, two, three = read.examples
    assert one.spelling == 0 and one.absent == {"bias"} and one.symbolic == {"B"} and one.grad
    assert (one.values, one.layout) == ({"x": "large"}, {"x": "strided"})
    assert two.binding["eps"] == 1.0 and type(two.binding["eps"]) is float
    assert two.given.lets[0].call.op == "aten.add_"
    assert three.shapes == {"x": (2, 1)} and three.dtypes == {"x": "f64"}
    assert one.spellings(read) == two.spellings(read) == [0]
    assert three.spellings(read) == [0, 1]
    with pytest.raises(dataclasses.FrozenInstanceError):
        read.id = "other"


@pytest.mark.parametrize(
    ("text", "kind", "dtype", "dims", "optional"),
    [
        ("T[*B, H]", "tensor", "T", "*B H", False), ("f32[N]", "tensor", "f32", "N", False),
        ("[N, K]", "tensor", None, "N K", False), ("Tensor", "tensor", None, None, False),
        ("T[]", "tensor", "T", "", False), ("[H, *B, 4]", "tensor", None, "H *B 4", False),
        ("Param[N, K]", "param", None, "N K", False), ("Param T[N]", "param", "T", "N", False),
        ("Param", "param", None, None, False), ("Param Tensor", "param", None, None, False),
        ("State T[B, Hk, S, D]", "state", "T", "B Hk S D", False),
        ("optional T[N]", "tensor", "T", "N", True), ("optional Param bool[1]", "param", "bool", "1", True),
        ("  T [ *B ,H ] ", "tensor", "T", "*B H", False),
    ],
)  # fmt: skip
def test_types_of_tensors(text, kind, dtype, dims, optional):
    one = parse_input("x", text, lambda line, column: Pos("f", 1, column + 1), Pos("f"))
    assert (one.kind, one.dtype, one.optional) == (kind, dtype, optional)
    assert (None if one.dims is None else " ".join(map(str, one.dims))) == dims


@pytest.mark.parametrize(
    ("text", "const_type", "default"),
    [
        ("const float", "float", None), ("optional const float = 0.0", "float", 0.0),
        ("optional const float = 1e-6", "float", 1e-6), ("optional const int = -1", "int", -1),
        ("optional const bool = true", "bool", True), ("optional const str = half", "str", "half"),
        ("optional const ints = [1, 1]", "ints", (1, 1)), ("optional const dtype = f32", "dtype", DType("f32")),
        ("optional const float=.inf", "float", float("inf")),
    ],
)  # fmt: skip
def test_types_of_constants(text, const_type, default):
    one = parse_input("c", text, lambda line, column: Pos("f", 1, column + 1), Pos("f"))
    assert (one.kind, one.const_type, one.default) == ("const", const_type, default)
    assert one.optional == text.startswith("optional")


@pytest.mark.parametrize(
    ("text", "column"),
    [
        ("", 1), ("T", 1), ("t[N]", 1), ("T[n]", 3), ("T[N", 1), ("T[N]]", 1), ("T[N,]", 5), ("T[*]", 3),
        ("T[**B]", 3), ("T[*B, *C]", 7), ("T[-1]", 3), ("T[N + 1]", 3), ("T[f32]", 3), ("Tensors", 1),
        ("Parm T[N]", 1), ("const", 6), ("const tensor", 7), ("const float = 1.0", 7),
        ("optional const float", 16), ("optional const int = 1.5", 22), ("optional const float = [1", 24),
        ("optional", 9), ("optional optional T[N]", 10), ("State const float", 7),
    ],
)  # fmt: skip
def test_types_that_are_none(text, column):
    with pytest.raises(SpecError) as caught:
        parse_input("x", text, lambda line, column: Pos("f", 1, column + 1), Pos("f"))
    assert caught.value.column == column
    assert caught.value.expected


@pytest.mark.parametrize(
    ("kind", "value"),
    [("float", True), ("float", "1"), ("int", 1.0), ("int", True), ("bool", 0), ("str", 1), ("dtype", "f33"),
     ("ints", [1.0]), ("ints", [True]), ("ints", 1), ("float", None)],
)  # fmt: skip
def test_constants_are_not_coerced(kind, value):
    with pytest.raises(ValueError):
        const_value(kind, value)


def test_folds_short_and_long_are_one():
    text = edited(
        ("up:   T[*B, H]", "up: Param T[*B, H]"),
        ("emit: elementwise                # or replace: in the notation of match", "FOLD"),
    )
    short = rule(text.replace("FOLD", "fold: u = aten.neg(up)\nreplace: return swiglu(gate, u)"))
    long = rule(text.replace("FOLD", "fold:\n  u: |\n    v = aten.neg(up)\n    return v\n"
                                     "replace: return swiglu(gate, u)"))  # fmt: skip
    assert short.fold["u"].lets[0].call.op == long.fold["u"].lets[0].call.op == "aten.neg"
    assert short.fold["u"].lets[0].call.pos == Pos("rule.yaml", 11, 11)
    assert long.fold["u"].lets[0].call.pos == Pos("rule.yaml", 13, 9)


def test_a_fold_may_read_an_earlier_one():
    text = edited(
        ("up:   T[*B, H]", "up: Param T[*B, H]"),
        (
            "emit: elementwise",
            "fold: {u: aten.neg(up), v: aten.relu(u)}\nreplace: return swiglu(gate, v)",
        ),
        ("  return aten.mul(aten.silu(gate), up)", "  return aten.mul(aten.silu(gate), up)"),
    )
    with pytest.raises(SpecError, match="does not read `u`"):
        rule(text)  # only through `v`, which the check does not follow: say `v` alone


def test_a_replacement_may_be_an_input():
    text = edited(("emit: elementwise", "replace: return up"))
    assert rule(text).replace.returns == ("up",)


def test_constants_fixed_by_spellings_need_no_value_in_examples():
    text = edited(
        ("  up:   T[*B, H]", "  up: T[*B, H]\n  act: const str\n  n: const ints"),
        ("match: |\n  return aten.mul(aten.silu(gate), up)",
         "match:\n  - {code: 'return aten.mul(aten.silu(gate), up)', with: {act: silu, n: [1]}}\n"
         "  - {code: 'return aten.mul(aten.relu(gate), up)', with: {act: relu, n: [2]}}"),
        ("H: 11008}", "H: 11008, act: relu}"),
    )  # fmt: skip
    read = rule(text)
    assert read.spellings[0].fixed == {"act": "silu", "n": (1,)}
    assert read.examples[0].spellings(read) == [1]
    assert read.examples[1].spellings(read) == [0, 1]


@pytest.fixture
def folders(tmp_path):
    """Writes rules into two folders, the first of which wins."""

    def write(first=(), second=()):
        for name, files in (("a", first), ("b", second)):
            for rule_id, text in dict(files).items():
                path = tmp_path / name / "rules" / rule_id
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
        return [tmp_path / "a" / "rules", tmp_path / "b" / "rules"]

    return write


def test_ids_are_paths(folders):
    dirs = folders({"fuse/a.yaml": SWIGLU, "fuse/deep/b.yaml": SWIGLU}, {"fold/c.yaml": SWIGLU})
    read = load_rules(dirs)
    assert [one.id for one in read] == ["fold/c", "fuse/a", "fuse/deep/b"]
    assert [one.stage for one in read] == ["fold", "fuse", "fuse"]
    assert load_rules([]) == []


def test_other_folders_and_hidden_files_are_no_rules(folders):
    dirs = folders({"regions/x.yaml": "no rule", "fuse/.a.yaml": "no", ".git/x.yaml": "no"})
    assert rule_files(dirs) == {}


@pytest.mark.parametrize(
    ("name", "has"), [("fuse/a.yml", "ends in `.yml`"), ("a.yaml", "outside the folder of a stage")]
)
def test_files_in_the_wrong_place(folders, name, has):
    with pytest.raises(SpecError, match=has):
        load_rules(folders({name: SWIGLU}))


def test_two_files_with_one_id(folders):
    dirs = folders({"fuse/a.yaml": SWIGLU}, {"fuse/a.yaml": SWIGLU})
    with pytest.raises(SpecError) as caught:
        load_rules(dirs)
    assert str(dirs[0]) in str(caught.value.pos) and str(dirs[1]) in caught.value.problem
    assert (
        caught.value.hint.endswith("`replaces: fuse/a`") or "replaces: fuse/a" in caught.value.hint
    )


def test_a_rule_may_say_that_it_replaces_another(folders):
    mine = SWIGLU.replace("summary:", "replaces: fuse/a\nsummary:").replace("Multiply", "Mine")
    (read,) = load_rules(folders({"fuse/a.yaml": mine}, {"fuse/a.yaml": SWIGLU}))
    assert read.summary.startswith("Mine")


@pytest.mark.parametrize(
    ("other", "has"), [("fuse/a", "no other rule"), ("fuse/b", "cannot replace")]
)
def test_replaces_names_its_own_id_and_another_file(folders, other, has):
    mine = SWIGLU.replace("summary:", f"replaces: {other}\nsummary:")
    with pytest.raises(SpecError, match=has) as caught:
        load_rules(folders({"fuse/a.yaml": mine}))
    assert (caught.value.line, caught.value.column) == (1, 11)


@pytest.mark.parametrize("key", ["after", "overrides"])
@pytest.mark.parametrize("form", ["[fuse/b, {0}]", "{0}"])
def test_names_of_other_rules(folders, key, form):
    def load(name):
        value = form.format(name)
        if key == "after" and not value.startswith("["):
            value = f"[{value}]"
        text = f"{key}: {value}\n{SWIGLU}"
        return load_rules(
            folders({"fuse/a.yaml": text}, {"fuse/b.yaml": SWIGLU, "fold/c.yaml": SWIGLU})
        )

    assert len(load("fold/c")) == 3
    with pytest.raises(SpecError, match="did you mean `fold/c`") as caught:
        load("fold/d")
    assert caught.value.line == 1
    with pytest.raises(SpecError, match="cannot name itself"):
        load("fuse/a")


def test_after_in_a_circle(folders):
    texts = {
        f"fuse/{a}.yaml": f"after: [fuse/{b}]\n{SWIGLU}" for a, b in ("ab", "bc", "cb", "dd")[:3]
    }
    with pytest.raises(SpecError) as caught:
        load_rules(folders(texts))
    assert "fuse/b > fuse/c > fuse/b" in caught.value.problem
    assert caught.value.line == 1 and caught.value.path == "after[0]"


def test_the_mistakes_of_all_files_are_told_at_once(folders):
    dirs = folders({"fuse/a.yaml": "sumary: x", "fuse/b.yaml": SWIGLU.replace("silu", "sliu")})
    with pytest.raises(SpecErrors) as caught:
        load_rules(dirs)
    assert {error.pos.file.rpartition("/")[2] for error in caught.value.errors} == {
        "a.yaml",
        "b.yaml",
    }


def test_reading_rules_loads_no_torch(folders):
    (folder, _) = folders({"fuse/swiglu.yaml": SWIGLU})
    code = (
        "import sys\nfrom sitsopt.spec.rule import load_rules\n"
        f"assert load_rules([{str(folder)!r}])\n"
        "print([m for m in ('torch', 'triton', 'numpy', 'sympy', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_literals_keep_their_type():
    read = rule(edited(("up)\n", "2)\n"), ("  up:   T[*B, H]\n", ""), ("s, up), s", "s, gate), s")))
    literal = read.spellings[0].program.lets[1].call.args[1]
    assert literal == Lit(2) and type(literal.value) is int
