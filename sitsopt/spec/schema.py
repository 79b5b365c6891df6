"""Writes the JSON schemas of data files, for editors:  python -m sitsopt.spec.schema

One for each kind of file, in `docs/schemas/`; tests keep them current.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from .file_schema import DIALECT, file_schema, text
from .recipe import Recipe
from .region import RegionFile
from .rule_file import RuleFile
from .target import Target

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "schemas"


def rule_schema(
    model: type[BaseModel] = RuleFile, title: str = "A rule of sitsopt"
) -> dict[str, Any]:
    """The schema of a file of `rules/`. Rules do not lie on top of each other: what is required stays so."""
    return {"$schema": DIALECT, **model.model_json_schema(by_alias=True), "title": title}


SCHEMAS: dict[str, Callable[[], dict[str, Any]]] = {
    "rule": rule_schema,
    "region": lambda: rule_schema(RegionFile, "A region rule of sitsopt"),
    "recipe": lambda: file_schema(Recipe, "A recipe of sitsopt"),
    "target": lambda: file_schema(Target, "A target of sitsopt"),
}


def write(folder: Path = FOLDER) -> list[Path]:
    """Write every schema; the files written."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.json" for name in SCHEMAS]
    for path, make in zip(paths, SCHEMAS.values(), strict=True):
        path.write_text(text(make()), encoding="utf-8")
    return paths


if __name__ == "__main__":
    for written in write(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER):
        print(written)
