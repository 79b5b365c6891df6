"""`sitsopt recipes [ID]`, `recipes new MODEL`, `recipes test`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sitsopt.cli._common import tell_error
from sitsopt.spec.errors import Pos, SpecError
from sitsopt.spec.locate import files
from sitsopt.spec.recipe import load_recipe, requests

Paths = Sequence[str | Path]


def recipes(ident: str = "", *, as_json: bool = False, path: Paths = ()) -> int:
    """List the recipes there are, or show one: what it sets, and which file and line sets it."""
    try:
        data = _page(ident, path) if ident else [_row(name, path) for name in _names(path)]
    except SpecError as error:
        return _bad_input(error, as_json)
    if as_json:
        print(json.dumps(data, indent=2))
    elif isinstance(data, list):
        width = max((len(row["id"]) for row in data), default=0)
        for row in data:
            print(f"{row['id']:{width}}  {row['summary']}")
    else:
        _print_page(data)
    return 0


def new(model: str, *, name: str = "", out: str = "", as_json: bool = False) -> int:
    """Write the beginning of a recipe for a model: what every verb takes, a config.json, or a class."""
    from sitsopt.measure.errors import InputError

    try:
        classes, config = _model(model)
    except (SpecError, InputError) as error:
        tell_error(error, as_json)
        return 2
    text = _scaffold(classes, config)
    if out:
        target = Path(out)
        if target.exists():
            return _bad_input(
                SpecError(Pos(out), "this file exists", hint="choose another"), as_json
            )
        target.write_text(text, encoding="utf-8")
    stem = name or classes[0].lower().removesuffix("forcausallm")
    if as_json:
        print(
            json.dumps({"name": stem, "for": classes, "text": text, "file": out or None}, indent=2)
        )
    else:
        print(f"written to {out}" if out else text, end="\n" if out else "")
    return 0


def test(*, as_json: bool = False, path: Paths = ()) -> int:
    """Load and check every recipe on the path, alone and, for an overlay, on `default`. 1 if one fails."""
    try:
        names, rules = _names(path), set(files("rules", path))
    except SpecError as error:
        return _bad_input(error, as_json)
    failed: list[dict[str, Any]] = []
    for name in names:
        try:
            recipe = load_recipe(name, (), path, rule_ids=rules or None)
            if recipe.for_ is None:
                load_recipe(f"default,{name}", (), path, rule_ids=rules or None)
        except SpecError as error:
            errors = getattr(error, "errors", [error])
            failed.append({"id": name, "errors": [one.as_dict() for one in errors]})
            if not as_json:
                print(f"{name}: failed\n{error}")
        else:
            if not as_json:
                print(f"{name}: ok")
    passed = len(names) - len(failed)
    if as_json:
        data = {
            "recipes": len(names),
            "passed": passed,
            "failed": failed,
            "rules_checked": bool(rules),
        }
        print(json.dumps(data, indent=2))
    else:
        print(f"{passed} of {len(names)} recipes are right")
    return 1 if failed else 0


def _names(path: Paths) -> list[str]:
    return sorted(files("recipes", path))


def _row(name: str, path: Paths) -> dict[str, Any]:
    recipe = load_recipe(name, (), path)
    return {
        "id": name,
        "summary": recipe.summary or "",
        "for": recipe.for_ or [],
        "overlay": recipe.for_ is None and name != "default",
        "file": str(files("recipes", path)[name]),
    }


def _page(spec: str, path: Paths) -> dict[str, Any]:
    recipe = load_recipe(spec, (), path)
    settings = recipe.as_dict()
    return {
        "id": recipe.name,
        "summary": settings.pop("summary", ""),
        "for": settings.pop("for", []),
        "settings": settings,
        "origins": {dotted: str(recipe.origin(parts)) for dotted, parts, _ in _leaves(settings)},
        "asks_for": [request.asked for request in requests(recipe)],
    }


def _leaves(data: Any, dotted: str = "", parts: tuple[str | int, ...] = ()) -> list[Any]:
    """Every value with its path: (dotted text, parts, value)."""
    if isinstance(data, dict) and data:
        items: list[tuple[str | int, Any]] = list(data.items())
    elif isinstance(data, list) and data:
        items = list(enumerate(data))
    else:
        return [(dotted, parts, data)]
    return [
        leaf
        for key, value in items
        for leaf in _leaves(value, f"{dotted}.{key}".lstrip("."), (*parts, key))
    ]


def _print_page(page: dict[str, Any]) -> None:
    print(f"{page['id']}: {page['summary']}")
    if page["for"]:
        print("for " + ", ".join(page["for"]))
    rows = [(dotted, json.dumps(value)) for dotted, _, value in _leaves(page["settings"]) if dotted]
    names = max((len(dotted) for dotted, _ in rows), default=0)
    values = max((len(value) for _, value in rows), default=0)
    for dotted, value in rows:
        print(f"  {dotted:{names}}  {value:{values}}  {page['origins'][dotted]}")
    for asked in page["asks_for"]:
        print(f"asks for {asked}")


def _model(model: str) -> tuple[list[str], dict[str, Any]]:
    """The classes of a model and its config. A config tells without the weights; anything else is loaded."""
    file = Path(model) / "config.json" if Path(model).is_dir() else Path(model)
    if file.suffix == ".json":
        return _from_config(file)
    from sitsopt.measure.packaged import PACKAGED

    if model.isidentifier() and model not in PACKAGED:
        return [model], {}
    from sitsopt.measure.models import load

    loaded = load(model)
    tell = getattr(loaded.config, "to_dict", dict)
    return [type(loaded.model).__name__], tell()


def _from_config(file: Path) -> tuple[list[str], dict[str, Any]]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        classes = [str(one) for one in config["architectures"]]
    except (OSError, ValueError) as error:
        raise SpecError(Pos(str(file)), f"no readable config: {error}") from None
    except (KeyError, TypeError):
        raise SpecError(
            Pos(str(file)), "the config names no class", expected="`architectures`"
        ) from None
    return classes, config


def _scaffold(classes: list[str], config: dict[str, Any]) -> str:
    layers = config.get("num_hidden_layers")
    count = f"num_hidden_layers   # {layers} in this model" if layers else "num_hidden_layers"
    return f"""summary: {classes[0]}.
for: [{", ".join(classes)}]
extends: default
# How often a rule must fire, so that a release that respells the model fails loudly.
# Fill in what `sitsopt explain` reports:
# expect:
#   fuse/qkv: {count}
# Rules that must not be used here, each with why:
# exclude:
#   fuse/rope: reason
"""


def _bad_input(error: SpecError, as_json: bool) -> int:
    if as_json:
        errors = getattr(error, "errors", [error])
        print(json.dumps({"errors": [one.as_dict() for one in errors]}, indent=2))
    else:
        print(error, file=sys.stderr)
    return 2
