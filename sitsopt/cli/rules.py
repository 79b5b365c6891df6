"""`sitsopt rules [ID]` and `sitsopt rules new ID`."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from sitsopt.cli._region_page import region_page
from sitsopt.spec.errors import Pos, SpecError, did_you_mean
from sitsopt.spec.locate import rule_dirs, shipped
from sitsopt.spec.program import DType
from sitsopt.spec.region import FOLDER, RegionFile, load_region, load_regions, region_files
from sitsopt.spec.rule import Condition, Example, Rule, load_rule, load_rules, rule_files

Paths = Sequence[str | Path]

SCAFFOLD = """\
summary: Multiply by the sigmoid of a gate in one kernel.
doc: |
  Eager code writes sigmoid(gate) to memory and reads it back for the product.
inputs:
  gate: T[*B, H]
  up:   T[*B, H]
match: |
  return aten.mul(aten.sigmoid(gate), up)
where:
  T in {f16, bf16, f32}: the kernel computes in f32 and rounds once
emit: elementwise                # or replace: in the notation of match
tolerance:
  f32: {rtol: 1.0e-6, atol: 1.0e-6}
  f16: {rtol: 1.0e-3, atol: 1.0e-5}
  bf16: {rtol: 8.0e-3, atol: 1.0e-5}
examples:
  - fires: {T: bf16, B: [2, 16], H: 128}
  - fires: {T: f16, B: [3], H: 5}
  - fires: {T: f32, B: [], H: 1}
  - skips: {T: f64, B: [2], H: 128}
    because: T in {f16, bf16, f32}
  - skips: {T: bf16, B: [2], H: 128}
    given: |
      s = aten.sigmoid(gate)
      return aten.mul(s, up), s
    because: uses
"""


def rules(ident: str = "", *, as_json: bool = False, path: Paths = ()) -> int:
    """List the rules there are, or show one: everything that its file says.

    Exit status: 0, or 2 when a rule file is wrong or there is no such rule.
    """
    try:
        if ident and (region := _region(ident, path)):
            return region_page(region, as_json)
        if ident:
            return _page(_find(ident, path), as_json)
        return _list(
            load_rules(rule_dirs(path)), list(load_regions(rule_dirs(path)).values()), as_json
        )
    except SpecError as error:
        return _bad_input(error, as_json)


def new(ident: str, *, directory: str = "", as_json: bool = False, path: Paths = ()) -> int:
    """Write a rule that works, to be changed into the one that is meant.

    It goes to `directory`, else to the first folder of rules on the search path that is not shipped, else
    to `rules/`. Exit status: 0, or 2 when the id is taken or is none.
    """
    try:
        file = _new_file(ident, directory, path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(SCAFFOLD, encoding="utf-8")
    except SpecError as error:
        return _bad_input(error, as_json)
    except OSError as error:
        return _bad_input(SpecError(Pos(ident), f"the file cannot be written: {error}"), as_json)
    load_rule(file, ident)
    folder = file.parents[ident.count("/")].absolute()
    on_path = folder.resolve() in {one.resolve() for one in rule_dirs(path)}
    if as_json:
        print(json.dumps({"id": ident, "file": str(file), "on_path": on_path}, indent=2))
        return 0
    print(f"written to {file}")
    if not on_path and folder.name == "rules":
        print(f'to use it, put this into pyproject.toml: [tool.sitsopt] path = ["{folder.parent}"]')
    elif not on_path:
        print(
            f"to use it, call its folder {folder.name} `rules`, and put what holds it on the search path"
        )
    print(f"next: change it, then `sitsopt verify {ident}`")
    return 0


# -- finding ----------------------------------------------------------------------------------------


def _region(ident: str, path: Paths) -> RegionFile | None:
    """The region rule called `regions/NAME`, or NAME where no other rule is."""
    files, name = region_files(rule_dirs(path)), ident.removeprefix(f"{FOLDER}/")
    others = {rule_id.split("/")[-1] for rule_id in rule_files(rule_dirs(path))}
    if name in files and (name != ident or name not in others):
        return load_region(files[name], name)
    if name != ident:
        raise SpecError(
            Pos(f"rule {ident}"), f"there is no region rule `{name}`",
            expected="one of " + ", ".join(files) if files else "", hint=did_you_mean(name, files),
        )  # fmt: skip
    return None


def _find(ident: str, path: Paths) -> Rule:
    files = rule_files(rule_dirs(path))
    if ident in files:
        return load_rule(files[ident][0], ident)
    short = [name for name in files if name.split("/")[-1] == ident]
    if len(short) == 1:
        return load_rule(files[short[0]][0], short[0])
    raise SpecError(
        Pos(f"rule {ident}"), f"there is no rule `{ident}`",
        expected="one of " + ", ".join(sorted(files)) if files else "",
        hint=did_you_mean(ident, files),
    )  # fmt: skip


def _new_file(ident: str, directory: str, path: Paths) -> Path:
    if not re.fullmatch(r"\w[\w-]*(/\w[\w-]*)+", ident):
        raise SpecError(
            Pos(ident),
            f"`{ident}` is no id for a rule",
            expected="STAGE/NAME, such as fuse/my_rule",
        )
    own = [folder for folder in rule_dirs(path) if folder != shipped("rules")]
    folder = Path(directory) if directory else own[0] if own else Path("rules")
    taken = rule_files([*rule_dirs(path), *([folder] if folder.is_dir() else [])])
    file = folder / f"{ident}.yaml"
    if ident in taken or file.exists():
        other = taken[ident][0] if ident in taken else file
        raise SpecError(
            Pos(str(other)), f"there is a rule `{ident}` already", hint="choose another id"
        )
    return file


# -- as data ----------------------------------------------------------------------------------------


def as_dict(rule: Rule) -> dict[str, Any]:
    """Everything a rule says, as plain data."""
    return {
        "id": rule.id, "stage": rule.stage, "summary": rule.summary, "doc": rule.doc,
        "file": rule.pos.file, "digest": rule.digest,
        "inputs": {name: one.text for name, one in rule.inputs.items()},
        "match": [
            {"code": one.code, "with": _plain(one.fixed), "where": _conditions(one.where),
             "replace": one.replace.text if one.replace else None}
            for one in rule.spellings
        ],
        "where": _conditions(rule.where),
        "through": {name: sorted(kinds) for name, kinds in rule.through.items()},
        "fold": {name: program.text for name, program in rule.fold.items()},
        "replace": rule.replace.text if rule.replace else None,
        "emit": rule.emit,
        "tolerance": {name: {"rtol": one.rtol, "atol": one.atol} for name, one in rule.tolerance.items()},
        "grad": rule.grad, "after": list(rule.after), "overrides": list(rule.overrides),
        "examples": [_example(one) for one in rule.examples],
    }  # fmt: skip


def _conditions(conditions: Sequence[Condition]) -> list[dict[str, str]]:
    return [{"condition": one.text, "reason": one.reason, "at": str(one.pos)} for one in conditions]


def _example(example: Example) -> dict[str, Any]:
    data: dict[str, Any] = {
        "fires" if example.fires else "skips": _plain(example.binding),
        "because": example.because,
        "given": example.given.text if example.given else None,
        "spelling": example.spelling + 1 if example.spelling is not None else None,
        "absent": sorted(example.absent), "symbolic": sorted(example.symbolic),
        "values": example.values, "layout": example.layout, "shapes": _plain(example.shapes),
        "dtypes": example.dtypes, "grad": example.grad, "modules": example.modules,
        "target": example.target,
    }  # fmt: skip
    return {name: value for name, value in data.items() if value or name in ("fires", "skips")}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return value.name if isinstance(value, DType) else value


# -- as text ----------------------------------------------------------------------------------------


def _list(found: list[Rule], regions: list[RegionFile], as_json: bool) -> int:
    if as_json:
        rows = [
            {"id": rule.id, "stage": rule.stage, "summary": rule.summary, "file": rule.pos.file,
             "grad": rule.grad, "emit": rule.emit, "examples": len(rule.examples)}
            for rule in found
        ]  # fmt: skip
        rows += [
            {"id": rule.id, "stage": FOLDER, "summary": rule.summary, "file": rule.file}
            for rule in regions
        ]
        print(json.dumps(rows, indent=2))
        return 0
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="bold")
    every = [(one.id, one.summary) for one in found] + [(one.id, one.summary) for one in regions]
    for name, summary in every:
        table.add_row(Text(name), Text(summary))
    Console(highlight=False).print(table)
    return 0


def _page(rule: Rule, as_json: bool) -> int:
    if as_json:
        print(json.dumps(as_dict(rule), indent=2))
        return 0
    console = Console(highlight=False)
    console.print(Text(rule.id, style="bold"), Text(rule.summary))
    console.print(Text(str(rule.pos.file), style="dim"))
    if rule.doc:
        console.print(Text("\n" + rule.doc))
    for title, part in _parts(rule):
        console.print(Text(f"\n{title}", style="bold"))
        console.print(part)
    return 0


def _parts(rule: Rule) -> Iterator[tuple[str, RenderableType]]:
    yield "inputs", _table((name, one.text) for name, one in rule.inputs.items())
    for index, spelling in enumerate(rule.spellings):
        fixed = ", ".join(f"{name} = {value}" for name, value in _plain(spelling.fixed).items())
        number = f" {index + 1}" if len(rule.spellings) > 1 else ""
        yield f"match{number}" + (f", where {fixed}" if fixed else ""), _code(spelling.code)
        if spelling.replace:
            yield f"match{number} is replaced by", _code(spelling.replace.text)
        if spelling.where:
            yield f"conditions of match{number}", _table((c.text, c.reason) for c in spelling.where)
    if rule.where:
        yield "conditions", _table((one.text, one.reason) for one in rule.where)
    if rule.through:
        yield (
            "may stand behind",
            _table((name, ", ".join(sorted(k))) for name, k in rule.through.items()),
        )
    for name, program in rule.fold.items():
        yield f"computed once: {name}", _code(program.text)
    if rule.replace and not any(one.replace for one in rule.spellings):
        yield "replaced by", _code(rule.replace.text)
    if rule.emit:
        yield "kernel", Text(f"  {rule.emit}")
    yield "tolerance", _table(_tolerances(rule))
    order = [
        (key, ", ".join(getattr(rule, key))) for key in ("after", "overrides") if getattr(rule, key)
    ]
    yield "applies", _table([("grad", _GRAD[rule.grad]), *order])
    yield "examples", _table(_example_row(one) for one in rule.examples)


_GRAD = {
    "safe": "also where gradients are recorded",
    "inference": "only where no gradients are recorded",
}


def _tolerances(rule: Rule) -> Iterator[tuple[str, str]]:
    for name, one in rule.tolerance.items():
        yield name, f"rtol {one.rtol:g}, atol {one.atol:g}, and twice the error of eager"
    yield "any other" if rule.tolerance else "every dtype", "bitwise equal"


def _example_row(example: Example) -> tuple[str, str]:
    data = _example(example)
    binding = data.pop("fires" if example.fires else "skips")
    shown = ", ".join(f"{name} = {value}" for name, value in binding.items())
    because = data.pop("because", "")
    more = "".join(f"; {name}: {' / '.join(value.splitlines()) if isinstance(value, str) else value}"
                   for name, value in data.items())  # fmt: skip
    why = f"\nbecause {because}" if because else ""
    return "fires" if example.fires else "skips", shown + more + why


def _table(rows: Any) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for left, right in rows:
        table.add_row(Text(left), Text(right))
    return table


def _code(text: str) -> Text:
    shown = Syntax("", "python").highlight(textwrap.indent(text, "  "))
    shown.rstrip()
    return shown


def _bad_input(error: SpecError, as_json: bool) -> int:
    if as_json:
        errors = getattr(error, "errors", [error])
        print(json.dumps({"errors": [one.as_dict() for one in errors]}, indent=2))
    else:
        print(error, file=sys.stderr)
    return 2
