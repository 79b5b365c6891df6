"""`sitsopt rules`: the list, a page, a scaffold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sitsopt.cli.rules import new, rules
from sitsopt.spec.rule import load_rule

GOOD = Path(__file__).parent / "good"


@pytest.fixture
def path(tmp_path):
    folder = tmp_path / "mine"
    for rule_id, file in (("own/swiglu", "swiglu.yaml"), ("own/full", "full.yaml")):
        target = folder / "rules" / f"{rule_id}.yaml"
        target.parent.mkdir(parents=True, exist_ok=True)
        text = (GOOD / file).read_text()
        for line in (
            "after: [recompose/linear]\n",
            "overrides: fuse/other\n",
            "replaces: fuse/full\n",
        ):
            text = text.replace(line, "")
        target.write_text(text)
    return [folder]


def out(capsys):
    return capsys.readouterr().out


def test_the_list(path, capsys):
    assert rules(path=path) == 0
    text = out(capsys)
    assert "own/swiglu" in text and "Multiply by SiLU in one kernel." in text
    assert rules(path=path, as_json=True) == 0
    rows = {row["id"]: row for row in json.loads(out(capsys))}
    assert rows["own/swiglu"]["stage"] == "own" and rows["own/swiglu"]["examples"] == 3


def test_a_page_says_what_the_file_says(path, capsys):
    assert rules("own/full", path=path) == 0
    text = out(capsys)
    rule = load_rule(path[0] / "rules" / "own" / "full.yaml", "own/full")
    for part in (rule.summary, rule.doc, "Param T[N, K]", "n = rms_norm(x, weight, eps, offset)",
                 "N % 8 == 0", "whole vectors", "K > 1", "one column has no spread", "style = plain",
                 "aten.mul(w, weight)", "rowwise", "rtol 1e-05", "because N % 8 == 0"):  # fmt: skip
        assert part in text, part


def test_a_page_as_json(path, capsys):
    assert rules("own/full", path=path, as_json=True) == 0
    data = json.loads(out(capsys))
    assert data["where"][0]["condition"] == "N % 8 == 0"
    assert data["where"][0]["at"].endswith("full.yaml:25:3")
    assert data["match"][1]["with"] == {"style": "swapped", "offset": 0.0}
    assert data["examples"][0]["fires"]["B"] == [2]
    assert data["examples"][0]["spelling"] == 1


def test_a_name_without_its_stage(path, capsys):
    assert rules("full", path=path, as_json=True) == 0
    assert json.loads(out(capsys))["id"] == "own/full"


def test_no_such_rule(path, capsys):
    assert rules("own/swigl", path=path) == 2
    assert "did you mean `own/swiglu`?" in capsys.readouterr().err
    assert rules("own/swigl", path=path, as_json=True) == 2
    assert "own/swiglu" in json.loads(out(capsys))["errors"][0]["hint"]


def test_a_broken_rule(path, capsys):
    (path[0] / "rules" / "own" / "bad.yaml").write_text("sumary: x")
    assert rules(path=path, as_json=True) == 2
    assert {error["line"] for error in json.loads(out(capsys))["errors"]} == {1}
    assert rules("own/swiglu", path=path) == 0  # one bad file does not hide the others


def test_a_new_rule_loads(path, tmp_path, capsys):
    assert new("own/third", path=path) == 0
    file = path[0] / "rules" / "own" / "third.yaml"
    assert str(file) in out(capsys)
    assert load_rule(file, "own/third").examples
    assert rules("own/third", path=path) == 0
    assert new("own/third", path=path) == 2
    assert new("own/fourth", directory=str(tmp_path / "other"), path=path, as_json=True) == 0
    capsys.readouterr()
    assert (tmp_path / "other" / "own" / "fourth.yaml").exists()


@pytest.mark.parametrize(
    "ident", ["third", "/own/third", "own/", "../own/third", "own/a.b", "own/../x", ""]
)
def test_ids_that_are_none(path, ident, capsys):
    assert new(ident, path=path) == 2
    assert "no id for a rule" in capsys.readouterr().err


def test_a_new_rule_verifies(path):
    from sitsopt.rewrite.mutate import survivors
    from sitsopt.rewrite.verify import verify

    assert new("own/third", path=path) == 0
    rule = load_rule(path[0] / "rules" / "own" / "third.yaml", "own/third")
    assert verify(rule) == []
    assert list(survivors(rule)) == []
