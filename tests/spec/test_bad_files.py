"""Every broken file of `bad/` is refused with exactly the message beside it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sitsopt.spec.errors import SpecError
from sitsopt.spec.rule import load_rule

BAD = Path(__file__).parent / "bad"
FILES = sorted(BAD.glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_message(path, golden, monkeypatch):
    monkeypatch.chdir(BAD)
    with pytest.raises(SpecError) as caught:
        load_rule(path.name, f"fuse/{path.stem}")
    message = re.sub(
        r"(not valid syntax).*?(?= \(at)", r"\1", str(caught.value)
    )  # Python words it anew
    golden(path.with_suffix(".txt"), f"{message}\n")


def test_every_message_points_into_its_file():
    for path in FILES:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
        for message in path.with_suffix(".txt").read_text(encoding="utf-8").splitlines():
            if not message.startswith("  "):
                file, line, column = message.split(":")[:3]
                assert file == path.name
                assert 1 <= int(column) <= len(lines[int(line) - 1]) + 1, message


def test_the_corpus_is_large_and_complete():
    assert len(FILES) >= 45
    assert {path.stem for path in FILES} == {path.stem for path in BAD.glob("*.txt")}
