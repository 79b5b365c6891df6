"""Reading: every value knows its place, nothing is coerced, nothing is executed, nothing explodes."""

from __future__ import annotations

import math
import pickle
from typing import Literal

import pytest
from pydantic import Field

from sitsopt.spec.errors import Pos, SpecError, SpecErrors, nearest
from sitsopt.spec.source import MAX_BYTES, Document, Spec, build, dotted, read
from sitsopt.spec.yamltree import MAX_ALIASES, MAX_DEPTH

TEXT = """\
summary: one   # a comment
'quoted key': "two"
map: {a: 1, b: [x, 2.5]}
block: |
  first
    second

  third
indented:
    deep: |2

        text
folded: >
  a
  b
"""


@pytest.mark.parametrize(
    ("path", "value", "key"),
    [
        (("summary",), (1, 10), (1, 1)),
        (("quoted key",), (2, 15), (2, 1)),
        (("map",), (3, 6), (3, 1)),
        (("map", "b"), (3, 16), (3, 13)),
        (("map", "b", 1), (3, 20), (3, 20)),
        (("indented", "deep"), (10, 11), (10, 5)),
        (("missing",), (1, 1), (1, 1)),
        (("map", "b", 7), (3, 16), (3, 13)),
    ],
)
def test_every_value_and_key_has_a_place(path, value, key):
    doc = read("f.yaml", TEXT)
    assert doc.at(path) == Pos("f.yaml", *value)
    assert doc.at(path, key=True) == Pos("f.yaml", *key)


@pytest.mark.parametrize(
    ("path", "place", "found"),
    [
        (("block",), (0, 0), (5, 3)),
        (("block",), (1, 2), (6, 5)),
        (("block",), (3, 4), (8, 7)),
        (("indented", "deep"), (1, 4), (12, 11)),
        (("summary",), (0, 2), (1, 12)),
        (("quoted key",), (0, 1), (2, 17)),
        (("folded",), (0, 2), (13, 9)),  # its lines no longer correspond
    ],
)
def test_a_place_inside_text(path, place, found):
    assert read("f.yaml", TEXT).inside(path, *place) == Pos("f.yaml", *found)


def test_a_place_inside_a_key():
    assert read("f", "a: {H % 8: x}").inside(("a", "H % 8"), 0, 2, key=True) == Pos("f", 1, 7)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1), ("-0", 0), ("0x1F", 31), ("0o17", 15), ("017", 17), ("+3", 3),
        ("1e-3", 1e-3), ("1.0e-5", 1e-5), (".5", 0.5), ("-.inf", -math.inf), ("5.", 5.0),
        ("true", True), ("False", False), ("yes", "yes"), ("on", "on"), ("no", "no"),
        ("null", None), ("~", None), ("''", ""), ("'1'", "1"), ('"true"', "true"),
        ("1_000", "1_000"), ("2026-01-01", "2026-01-01"), ("1:30", "1:30"), ("0b1", "0b1"),
        ("!!str 1", "1"), ("!!int 7", 7), ("!!float 1", 1.0), ("! 1", "1"),
        ("T in {f16, bf16}", "T in {f16, bf16}"), ("*B", None),
    ],
)  # fmt: skip
def test_values_are_those_of_yaml_1_2(text, value):
    if text == "*B":
        with pytest.raises(SpecError, match="names no anchor"):
            read("f", f"a: {text}")
        return
    found = read("f", f"a: {text}").data["a"]
    assert found == value
    assert type(found) is type(value)


def test_not_a_number():
    assert math.isnan(read("f", "a: .nan").data["a"])


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("a: 1\nb: 2\na: 3", (1, 3)),
        ("x:\n  - {}\n  - a: 1\n    'a': 2", (3, 4)),
        ("1: a\n0x1: b", (1, 2)),
        ("a: 1\n!!str a: 2", (1, 2)),
    ],
)
def test_duplicate_keys_name_both_lines(text, lines):
    with pytest.raises(SpecError, match="twice in this map") as caught:
        read("f", text)
    assert caught.value.line == lines[1]
    assert f"lines {lines[0]} and {lines[1]}" in caught.value.problem


def test_keys_of_different_types_are_different_keys():
    assert read("f", "on: 1\n'true': 2\n1: 3\n'1': 4").data == {"on": 1, "true": 2, 1: 3, "1": 4}


def test_a_merge_is_no_duplicate_and_yields_to_the_map_itself():
    doc = read("f", "base: &b {x: 1, y: 2}\nuse: {<<: *b, x: 3}\nmany:\n  <<: [{z: 1}, *b]\n  w: 0")
    assert doc.data["use"] == {"x": 3, "y": 2}
    assert doc.data["many"] == {"w": 0, "z": 1, "x": 1, "y": 2}
    assert doc.at(("use", "y")) == Pos("f", 1, 20)  # where it is written
    assert read("f", "a: {'<<': 1}").data == {"a": {"<<": 1}}


@pytest.mark.parametrize(
    ("text", "problem", "place"),
    [
        ("", "the file is empty", (1, 1)),
        ("# only this", "the file is empty", (1, 1)),
        ("a: !!python/name:os.system x", "tag", (1, 4)),
        ("a: !!binary aGk=", "tag", (1, 4)),
        ("a: !!set {x}", "tag", (1, 4)),
        ("a: !!int wide", "not of the type", (1, 4)),
        ("a: [1, 2", "not valid YAML", (1, 9)),
        ("a: b: c", "not valid YAML", (1, 5)),
        ("a:\n\t- b", "a tab", (2, 1)),
        ("a: 1\n---\nb: 2", "a second document", (2, 1)),
        ("%YAML 1.1\n---\na: 1", "YAML 1.1", (2, 1)),
        ("a: &x [*x]", "contains itself", (1, 8)),
        ("a: *x", "names no anchor", (1, 4)),
        ("? [a]\n: b", "a list as a key", (1, 3)),
        ("null: b", "`null` as a key", (1, 1)),
        ("1.5: b", "`1.5` as a key", (1, 1)),
        ("<<: 3", "merges maps", (1, 5)),
        ("a: 1e999", "too large", (1, 4)),
        ('a: "\\ud800"', "surrogate", (1, 4)),
        ('a: "\\UFFFFFFFF"', "not valid YAML", (1, 1)),
        ("a: \x01", "does not allow", (1, 4)),
        ("x: " + "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "levels deep", None),
        ("x: &a 1\ny: [" + "*a, " * (MAX_ALIASES + 1) + "]", "aliases", None),
        ("[" * 100_000, "levels deep", None),
    ],
)  # fmt: skip
def test_what_is_refused(text, problem, place):
    with pytest.raises(SpecError) as caught:
        read("f", text)
    assert problem in str(caught.value)
    if place:
        assert (caught.value.line, caught.value.column) == place


def test_aliases_do_not_explode():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    with pytest.raises(SpecError, match="once aliases are expanded"):
        read("f", "\n".join(lines))


def test_files_that_cannot_be_read(tmp_path):
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"a: 1\nb: caf\xe9\n")
    large = tmp_path / "large.yaml"
    large.write_bytes(b"#" * (MAX_BYTES + 1))
    cases = [
        (tmp_path / "none.yaml", "no such file", 1),
        (tmp_path, "a directory", 1),
        (latin, "not UTF-8", 2),
        (large, "larger than", 1),
        (tmp_path / "a\0b", "cannot be read", 1),
    ]
    for path, problem, line in cases:
        with pytest.raises(SpecError, match=problem) as caught:
            read(path)
        assert caught.value.line == line


def test_a_byte_order_mark_and_dos_lines_change_nothing(tmp_path):
    path = tmp_path / "dos.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: |\r\n  x\r\n  yy\r\nb: 2\r\n")
    doc = read(path)
    assert doc.data == {"a": "x\nyy\n", "b": 2}
    assert doc.inside(("a",), 1, 1) == Pos(str(path), 3, 4)


class Weight(Spec):
    match: str
    scheme: Literal["int4", "int8"] = "int4"
    config_groups: dict[str, Group] = Field(default={})


class Group(Spec):
    bits: int = Field(4, ge=1, le=8)
    clip: bool = False


class Skip(Spec):
    match: str
    skip: str


class Recipe(Spec):
    summary: str
    for_: list[str] = Field(default=[], alias="for")
    weights: tuple[Weight | Skip, ...] = ()
    eps: float = Field(1e-5, gt=0)
    limit: int | Literal["auto"] | None = None


class Err:
    def __init__(self, path, line, has, column=None):
        self.path, self.line, self.has, self.column = path, line, has, column


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("summary: a", Recipe(summary="a")),
        ("summary: a\nfor: [b]\nlimit: auto", Recipe(summary="a", **{"for": ["b"], "limit": "auto"})),
        ("summary: a\nlimit: 3\neps: 1", Recipe(summary="a", limit=3, eps=1.0)),
        ("summary: a\nweights: [{match: x, skip: y}]", Recipe(summary="a", weights=(Skip(match="x", skip="y"),))),
        ("for: [b]", Err("summary", 1, "the key `summary` is missing")),
        ("sumary: a", Err("sumary", 1, "did you mean `summary`?", 1)),
        ("summary: a\nfor_: [b]", Err("for_", 2, "did you mean `for`?")),
        ("summary: 3", Err("summary", 1, "expected: text", 10)),
        ("summary: a\neps: '1.0e-5'", Err("eps", 2, "without quotes it is a number")),
        ("summary: a\neps: 0", Err("eps", 2, "expected: a number above 0")),
        ("summary: a\neps: yes", Err("eps", 2, "expected: a number")),
        ("summary: a\neps: true", Err("eps", 2, "`eps` is true")),
        ("summary: a\nfor: b", Err("for", 2, "expected: a list")),
        ("summary: a\nfor: [b, 2]", Err("for[1]", 2, "item 2 is 2", 10)),
        ("summary: a\nlimit: atuo", Err("limit", 2, "did you mean `auto`?")),
        ("summary: a\nlimit: []", Err("limit", 2, "expected: a whole number or auto")),
        ("summary: a\nweights:\n- {match: x}\n- {match: y, scheme: int5}",
         Err("weights[1].scheme", 4, "expected: one of int4, int8", 22)),
        ("summary: a\nweights:\n- {match: x, config_groups: {g: {bits: 9}}}",
         Err("weights[0].config_groups.g.bits", 3, "expected: 8 or less")),
        ("summary: a\nweights:\n- {match: x, config_groups: {g: {clip: on}}}",
         Err("weights[0].config_groups.g.clip", 3, "write true or false")),
        ("summary: a\nweights:\n- {match: x, bits: 4}",
         Err("weights[0].bits", 3, "this key belongs under `weights[].config_groups.*`")),
        ("summary: a\nweights:\n- {match: x}\n- {match: x, config_groups: {}, group_0: {bits: 4}}",
         Err("weights[1].group_0", 4, "unknown key `group_0`", 33)),
        ("- a", Err("", 1, "the file is a list")),
    ],
)  # fmt: skip
def test_the_table(text, outcome):
    doc = read("recipe.yaml", text)
    if not isinstance(outcome, Err):
        assert build(Recipe, doc) == outcome
        return
    with pytest.raises(SpecError) as caught:
        build(Recipe, doc)
    assert not isinstance(caught.value, SpecErrors), caught.value
    assert (caught.value.path, caught.value.line) == (outcome.path, outcome.line)
    assert outcome.column in (None, caught.value.column)
    assert outcome.has in str(caught.value)


def test_all_mistakes_are_told_in_the_order_of_the_file():
    text = "eps: 0\nfor: 1\nlimit: []\nsumary: a\n"
    with pytest.raises(SpecErrors) as caught:
        build(Recipe, read("f", text))
    assert [error.line for error in caught.value.errors] == [1, 2, 3, 4]
    assert str(caught.value).count("\nf:") == 3
    assert caught.value.path == "eps"


def test_a_part_and_data_from_python():
    doc = read("f", "summary: a\nweights:\n- {match: x, skip: 3}\n")
    with pytest.raises(SpecError) as caught:
        build(Skip, doc, path=("weights", 0))
    assert (caught.value.line, caught.value.path) == (3, "weights[0].skip")
    with pytest.raises(SpecError, match="option recipe:1:1: unknown key `sumary`"):
        build(Recipe, Document.of({"sumary": "a"}, "option recipe"))
    with pytest.raises(SpecError, match="not plain data"):
        build(Recipe, Document.of({"summary": object()}, "option recipe"))


def test_models_that_would_swallow_a_typo_are_refused():
    from pydantic import BaseModel

    class Loose(BaseModel):
        inner: int = 0

    class Outer(Spec):
        parts: list[Loose] = Field(default=[])

    with pytest.raises(TypeError, match="Loose must forbid unknown keys"):
        build(Outer, read("f", "parts: []"))


def test_errors_survive_a_process_boundary():
    one = SpecError(Pos("f", 2, 3), "wrong", expected="right", hint="do", path="a.b")
    both = SpecErrors([SpecError(Pos("g"), "later"), one])
    assert str(pickle.loads(pickle.dumps(one))) == str(one)
    assert str(pickle.loads(pickle.dumps(both))) == str(both)
    assert both.as_dict()["line"] == 2


def test_paths_as_text():
    assert dotted(("rules", 2, "weights", "group_0")) == "rules[2].weights.group_0"
    assert dotted(()) == ""


@pytest.mark.parametrize(
    ("name", "close"),
    [("pu", "up"), ("u", "up"), ("upp", "up"), ("gaet", "gate"), ("zzz", ""), ("up", "")],
)
def test_the_nearest_name(name, close):
    assert nearest(name, ["up", "gate"]) == close
