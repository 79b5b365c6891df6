"""`sitsopt targets [ID]`: the machines that are known, or the page of one."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sitsopt.runtime.machine import detect_target
from sitsopt.spec.errors import SpecError
from sitsopt.spec.target import Target, all_targets, load_target


def targets(ident: str = "", *, as_json: bool = False, path: Sequence[str | Path] = ()) -> int:
    """List the targets, or show one (`auto` is this machine): every fact, its unit and its source."""
    try:
        if not ident:
            return _list(all_targets(path), as_json)
        target = detect_target(measure=True) if ident == "auto" else load_target(ident, path)
    except SpecError as error:
        if as_json:
            errors = getattr(error, "errors", [error])
            print(json.dumps({"errors": [one.as_dict() for one in errors]}, indent=2))
        else:
            print(error, file=sys.stderr)
        return 2
    if as_json:
        print(json.dumps(target.as_dict(), indent=2))
    else:
        _print_page(target)
    return 0


def _list(known: list[Target], as_json: bool) -> int:
    if as_json:
        print(json.dumps([target.as_dict() for target in known], indent=2))
        return 0
    here = detect_target().name
    width = max((len(target.name) for target in known), default=0)
    for target in known:
        mark = "*" if target.name == here else " "
        print(f"{mark} {target.name:{width}}  {target.summary}")
    print("* this machine")
    return 0


def _print_page(target: Target) -> None:
    print(f"{target.name}: {target.summary}")
    print(f"  emitter {target.emitter}, architecture {target.arch}")
    for section in ("memory", "compute", "links"):
        found = list(_facts(getattr(target, section)))
        known = [fact for fact in found if fact[1] is not None]
        unknown = [name for name, value, _ in found if value is None]
        print(section)
        for name, value, meaning in known:
            shown = f"{value:g}" if isinstance(value, float) else str(value)
            print(f"  {name:22} {shown:12} {meaning}".rstrip())
        if unknown:
            print("  not known: " + ", ".join(unknown))
    if target.passes:
        print("passes " + ", ".join(target.passes))
    print("sources")
    for source in target.sources:
        print(f"  {source}")


def _facts(section: Any) -> Iterator[tuple[str, Any, str]]:
    """Each fact of a section with its name and what it means."""
    for name, info in type(section).model_fields.items():
        value, meaning = getattr(section, name), info.description or ""
        if name == "levels":
            for level, facts in (value or {}).items():
                more = f", {facts.per_block_kb:g} for one block" if facts.per_block_kb else ""
                yield level, facts.size_kb, f"KiB in each {facts.per}{more}"
        elif isinstance(value, dict):
            yield from ((f"{name}.{key}", one, meaning) for key, one in value.items())
        elif isinstance(value, list):
            yield name, ", ".join(map(str, value)), meaning
        else:
            yield name, value, meaning
