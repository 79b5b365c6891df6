"""A typo of one letter, in any key or name that the format fixes, gives an error with the right name."""

from __future__ import annotations

import copy
import io
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from sitsopt.spec.errors import SpecError
from sitsopt.spec.rule import load_rule
from sitsopt.spec.rule_file import ExampleFile, RuleFile, SpellingFile, ToleranceFile
from sitsopt.spec.source import Document, build, read

GOOD = Path(__file__).parent / "good"
SWIGLU, FULL = ((GOOD / name).read_text() for name in ("swiglu.yaml", "full.yaml"))

MODELS = {"": RuleFile, "match": SpellingFile, "tolerance": ToleranceFile, "examples": ExampleFile}
KEYS = {
    info.alias or name for model in MODELS.values() for name, info in model.model_fields.items()
}


def walk(data, path=()):
    """Every key of the data that the format fixes, with its path."""
    for key, value in data.items() if isinstance(data, dict) else enumerate(data):
        here = (*path, key)
        if isinstance(data, dict) and key in KEYS and _fixed(path):
            yield here
        if isinstance(value, dict | list):
            yield from walk(value, here)


def _fixed(path):
    """Maps whose keys are names of the rule's own: inputs, bindings, conditions."""
    return not any(part in path for part in ("inputs", "where", "fires", "skips", "with", "fold", "values",
                                             "layout", "shapes", "dtypes", "modules", "target")
                   ) and path != ("tolerance",) and path != ("through",)  # fmt: skip


def renamed(data, path, name):
    changed = copy.deepcopy(data)
    at = changed
    for part in path[:-1]:
        at = at[part]
    at[name] = at.pop(path[-1])
    return changed


def typos(word):
    for index in range(len(word)):
        yield word[:index] + word[index + 1 :]
        yield word[:index] + "q" + word[index:]
        yield word[:index] + "q" + word[index + 1 :]
        if index + 1 < len(word) and word[index] != word[index + 1]:
            yield word[:index] + word[index + 1] + word[index] + word[index + 2 :]


def dump(data):
    stream = io.StringIO()
    YAML(typ="safe", pure=True).dump(data, stream)
    return stream.getvalue()


DATA = read("full.yaml", FULL).data
PATHS = list(walk(DATA))


def test_the_example_has_every_key():
    assert {path[-1] for path in PATHS} == KEYS
    load_rule("full.yaml", "fuse/full", dump(DATA))


@pytest.mark.parametrize("path", PATHS, ids=lambda path: ".".join(map(str, path)))
def test_every_typo_of_a_key_names_the_key(path):
    key = path[-1]
    for typo in dict.fromkeys(typos(key)):
        if typo in KEYS or not typo:
            continue
        with pytest.raises(SpecError) as caught:
            build(RuleFile, Document.of(renamed(DATA, path, typo), "full.yaml"))
        told = getattr(caught.value, "errors", [caught.value])
        unknown = [error for error in told if f"`{typo}`" in error.problem]
        assert unknown, (typo, str(caught.value))
        assert f"`{key}`" in unknown[0].hint, (typo, str(unknown[0]))


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("silu(gate), up", "gate"),
        ("  up:   T[", "up"),
        ("aten.silu(gate), up", "silu"),
        ("return aten.mul(a", "return"),
        ("aten.mul(aten.silu", "aten"),
        ("bf16: {rtol", "bf16"),
        ("because: uses", "uses"),
        ("because: T in {f16, bf16, f32}", "f32"),
        ("T: f64, B", "f64"),
        ("H: 11008", "H"),
    ],
)
def test_every_typo_of_a_name_is_an_error(line, name):
    assert SWIGLU.count(line) >= 1
    for typo in dict.fromkeys(typos(name)):
        if typo in ("", "f6", "f16") or (name == "silu" and typo in ("sil", "slu")):
            continue
        text = SWIGLU.replace(line, line.replace(name, typo, 1), 1)
        with pytest.raises(SpecError) as caught:
            load_rule("f.yaml", "fuse/f", text)
        assert caught.value.line >= 1


PIECES = ["\n", "  ", ": ", "- ", "{", "}", "[", "]", "'", '"', "|", "&a ", "*a", "!!str ", "<<", "#", ",", "x",
          "aten.", "summary", "inputs", "T[*B]", "0x1", ".nan", "\t", "---\n", "%YAML 1.2\n", "é", "\x85", "? "]  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(
    st.binary(max_size=60)
    | st.lists(st.sampled_from(PIECES), max_size=20).map(lambda p: "".join(p).encode())
)
def test_any_bytes_are_a_rule_or_a_spec_error(tmp_path_factory, raw):
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_bytes(raw)
    with pytest.raises(SpecError) as caught:
        load_rule(path, "fuse/fuzz")
    lines = raw.decode(errors="replace").count("\n") + 2
    assert 1 <= caught.value.line <= lines
    assert caught.value.column >= 1


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from([SWIGLU, FULL]),
    st.integers(0, 10_000),
    st.integers(0, 6),
    st.sampled_from([*PIECES, "", "gate", " % 8", "None", "(", ")", "=", "-1", "1e400"]),
)
def test_any_edit_of_a_rule_is_a_rule_or_a_spec_error(text, start, length, piece):
    start %= len(text)
    edited = text[:start] + piece + text[start + length :]
    try:
        load_rule("f.yaml", "fuse/full", edited)
    except SpecError as error:
        for one in getattr(error, "errors", [error]):
            assert 1 <= one.line <= edited.count("\n") + 2, str(one)
            assert one.column >= 1
