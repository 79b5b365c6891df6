"""Golden files: `pytest tests/spec --update-golden` writes them anew."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite expected output")


@pytest.fixture
def golden(request: pytest.FixtureRequest):
    """Compares text with a file, or writes the file under `--update-golden`."""

    def check(path: Path, text: str) -> None:
        if request.config.getoption("--update-golden", default=False):
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"{path.name} is missing: run pytest with --update-golden"
        assert text == path.read_text(encoding="utf-8")

    return check
