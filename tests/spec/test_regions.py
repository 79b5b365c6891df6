"""Region rules: broken files are refused with exactly the message beside them, good ones mean what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from sitsopt.cli.rules import rules
from sitsopt.spec.errors import SpecError
from sitsopt.spec.locate import rule_dirs
from sitsopt.spec.region import load_region, load_regions

BAD = Path(__file__).parent / "bad_regions"
FILES = sorted(BAD.glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_message(path, golden, monkeypatch):
    monkeypatch.chdir(BAD)
    with pytest.raises(SpecError) as caught:
        load_region(path.name, path.stem)
    golden(path.with_suffix(".txt"), f"{caught.value}\n")
    for one in getattr(caught.value, "errors", [caught.value]):
        assert one.pos.file == path.name and one.line >= 1 and one.column >= 1


def test_the_corpus_is_complete():
    assert len(FILES) >= 20
    assert {path.stem for path in FILES} == {path.stem for path in BAD.glob("*.txt")}


def test_shipped_rules_load():
    found = load_regions(rule_dirs())
    assert list(found) == ["decode", "forward"]
    decode = found["decode"]
    assert decode.why_outside("aten.mul") == "" and "host" in decode.why_outside("aten.item")
    assert decode.why_outside("aten.linalg_inv") and "does not name" in decode.why_outside("vllm.x")
    assert decode.stays("sits.attention") and not decode.stays("aten.linear")


def test_the_first_folder_wins_and_all_mistakes_are_told(tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    for folder, text in ((first, "summary: A.\ncapture: [aten.*]"), (second, "sumary: B.")):
        (folder / "regions").mkdir(parents=True)
        (folder / "regions" / "one.yaml").write_text(text)
    assert load_regions([first, second])["one"].summary == "A."
    with pytest.raises(SpecError) as caught:
        load_regions([second, first])
    assert "summary" in str(caught.value) and "capture" in str(caught.value)


def test_they_are_listed_and_have_a_page(capsys):
    assert rules(as_json=True) == 0
    assert '"id": "regions/decode"' in capsys.readouterr().out
    assert rules("regions/decode") == 0
    page = capsys.readouterr().out
    assert "aten.nonzero" in page and "splits a region" in page
    assert rules("regions/decod") == 2
    assert "did you mean `decode`?" in capsys.readouterr().err
