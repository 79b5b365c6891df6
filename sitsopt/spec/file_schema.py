"""The JSON schema of a data file, for editors: `docs/schemas/` keeps it, a test keeps it current."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel

DIALECT = "https://json-schema.org/draft/2020-12/schema"
ABOUT = ("title", "description", "default")


def file_schema(model: type[BaseModel], title: str) -> dict[str, Any]:
    """The schema of one file that may lie on top of another: at its top nothing is required, and null
    takes back what stands below."""
    schema = model.model_json_schema(by_alias=True)
    for one in [schema, *schema.get("$defs", {}).values()]:
        required = [] if one is schema else one.get("required", [])
        for name, spec in one.get("properties", {}).items():
            if name not in required:
                one["properties"][name] = _or_null(spec)
    schema.pop("required", None)
    return {"$schema": DIALECT, **schema, "title": title}


def text(schema: dict[str, Any]) -> str:
    """The schema as it stands in its file."""
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def _or_null(spec: dict[str, Any]) -> dict[str, Any]:
    if {"type": "null"} in spec.get("anyOf", []):
        return spec
    about: dict[str, Any] = {k: v for k, v in spec.items() if k in ABOUT}
    rest = {key: value for key, value in spec.items() if key not in about}
    choices = rest["anyOf"] if set(rest) == {"anyOf"} else [rest]
    return {"anyOf": [*choices, {"type": "null"}], **about}
