"""docs/schemas holds the schemas of today; `python -m sitsopt.spec.schema` writes them."""

import json
from pathlib import Path

import pytest

from sitsopt.spec.file_schema import file_schema, text
from sitsopt.spec.recipe import Recipe
from sitsopt.spec.target import Target

FOLDER = Path(__file__).parents[2] / "docs" / "schemas"
SCHEMAS = {
    "recipe": file_schema(Recipe, "A recipe of sitsopt"),
    "target": file_schema(Target, "A target of sitsopt"),
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_is_current(name):
    file = FOLDER / f"{name}.json"
    assert file.read_text() == text(SCHEMAS[name])


def test_says_what_a_file_may_hold():
    recipe = json.loads(text(SCHEMAS["recipe"]))
    assert recipe["additionalProperties"] is False
    assert "for" in recipe["properties"]
    assert "required" not in recipe
    assert recipe["$defs"]["Weight"]["required"] == ["match"]
    assert {"type": "null"} in recipe["properties"]["profitability"]["anyOf"]
