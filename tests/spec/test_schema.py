"""The schemas for editors are those of the models."""

from __future__ import annotations

import json

from sitsopt.spec.file_schema import text
from sitsopt.spec.rule_file import RuleFile
from sitsopt.spec.schema import FOLDER, SCHEMAS, write


def test_the_schemas_are_current(tmp_path):
    for path in write(tmp_path):
        kept = FOLDER / path.name
        assert kept.read_text() == path.read_text(), "run python -m sitsopt.spec.schema"


def test_every_object_of_a_rule_forbids_other_keys():
    schema = SCHEMAS["rule"]()
    assert json.loads(text(schema)) == schema
    fixed = [one for one in [schema, *schema["$defs"].values()] if "properties" in one]
    assert len(fixed) == 4
    assert all(one["additionalProperties"] is False for one in fixed)


def test_every_key_is_described():
    for one in [SCHEMAS["rule"](), *SCHEMAS["rule"]()["$defs"].values()]:
        for name, spec in one["properties"].items():
            assert spec.get("description"), name


def test_keys_are_spelled_as_in_the_file():
    schema = SCHEMAS["rule"]()
    assert set(schema["properties"]) == {
        info.alias or name for name, info in RuleFile.model_fields.items()
    }
    assert "with" in schema["$defs"]["SpellingFile"]["properties"]
    assert set(schema["required"]) == {"summary", "inputs", "match", "examples"}
