"""What the package imports is declared in pyproject.toml: an installation brings all of it."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "sitsopt").rglob("*.py"))
# Imported under a name that is not the distribution's.
PROVIDES = {
    "ruamel": "ruamel.yaml", "pydantic_core": "pydantic", "llama_cpp": "llama-cpp-python",
    "pynvml": "nvidia-ml-py",
}  # fmt: skip
# Peers that `bench` measures where somebody has installed them, and what builds the package.
NOT_NEEDED = {"xllamacpp", "llama-cpp-python", "setuptools"}


def imported(path: Path) -> Iterator[str]:
    """Top-level packages that a file imports anywhere, functions included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.split(".")[0]


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def used() -> dict[str, Path]:
    """Distribution to one file that imports it."""
    found = {name: path for path in SOURCES for name in imported(path)}
    own = {*sys.stdlib_module_names, "sitsopt"}
    return {PROVIDES.get(name, name): path for name, path in found.items() if name not in own}


def names(lines: list[str]) -> set[str]:
    return {Requirement(line).name for line in lines}


def test_every_import_is_declared(project: dict[str, Any], used: dict[str, Path]) -> None:
    declared = names(project["dependencies"])
    declared |= {n for lines in project["optional-dependencies"].values() for n in names(lines)}
    assert {n: str(p) for n, p in used.items() if n not in declared | NOT_NEEDED} == {}


def test_nothing_is_declared_for_nothing(project: dict[str, Any], used: dict[str, Path]) -> None:
    assert names(project["dependencies"]) - set(used) == set()
