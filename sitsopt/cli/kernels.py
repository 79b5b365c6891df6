"""`sitsopt kernels --target T`: every kernel generated and compiled for a target, no GPU needed."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from sitsopt.emit.triton.cost import cost
from sitsopt.emit.triton.manifest import Entry, entries
from sitsopt.emit.triton.source import Source
from sitsopt.runtime.machine import detect_target
from sitsopt.runtime.triton import compile as compiler
from sitsopt.runtime.triton.fit import Fitted, fit
from sitsopt.runtime.triton.occupancy import occupancy, predict_us
from sitsopt.spec.errors import Pos, SpecError, did_you_mean
from sitsopt.spec.target import Target, all_targets, load_target

_CODES = {"source": "", "ptx": "ptx", "sass": "sass", "ttir": "ttir", "ttgir": "ttgir", "llir": "llir", "amdgcn": "amdgcn"}  # fmt: skip


def kernels(
    target: str = "auto",
    *,
    show: str = "",
    as_: str = "source",
    family: str = "",
    jobs: int = 0,
    as_json: bool = False,
    path: Sequence[str | Path] = (),
) -> int:
    """Compile the manifest for a target and print a line a kernel; or show one kernel's code."""
    try:
        facts = find_target(target, path)
        if facts.triton is None:
            raise SpecError(
                Pos("kernels"), f"the target {facts.name} has no Triton kernels",
                expected="a GPU target", hint="sitsopt targets lists them",
            )  # fmt: skip
        known = [e for e in entries(facts.arch) if not family or e.source.family == family]
        if show:
            return _show(show, as_, known, facts)
        if not known:
            raise SpecError(
                Pos("kernels"), f"no kernels of the family {family!r}", expected="a family"
            )
    except SpecError as error:
        if as_json:
            print(json.dumps({"errors": [error.as_dict()]}, indent=2))
        else:
            print(error, file=sys.stderr)
        return 2
    rows = measure(known, facts, jobs or os.cpu_count() or 1, quiet=as_json)
    if as_json:
        print(json.dumps({"target": facts.name, "kernels": rows}, indent=2))
    else:
        _print(rows, facts)
    return 1 if any(row["wrong"] and not row["excused"] for row in rows) else 0


def find_target(name: str, path: Sequence[str | Path] = ()) -> Target:
    """A target by id, by architecture, or this machine's own (`auto`)."""
    if name == "auto":
        return detect_target()
    known = all_targets(path)
    if any(one.name == name for one in known):
        return load_target(name, path)
    same = [one for one in known if one.arch == name and one.memory.bandwidth_gbs]
    if same:
        return min(same, key=lambda one: one.name)
    names = [one.name for one in known] + [one.arch for one in known]
    raise SpecError(
        Pos("kernels"), f"no target `{name}`", expected="an id of backends/ or an architecture",
        hint=did_you_mean(name, names),
    )  # fmt: skip


def measure(
    known: Sequence[Entry], target: Target, jobs: int, quiet: bool = False
) -> list[dict[str, Any]]:
    """Compile entries for a target; one plain record a kernel."""
    asked = [entry for entry in known if not entry.excused]
    console = Console(stderr=True, quiet=quiet)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(f"compiling for {target.arch}", total=len(asked))
        fitted = fit([e.source for e in asked], target, jobs, lambda: progress.advance(task))
    rows = [_row(entry, one, target) for entry, one in zip(asked, fitted, strict=True)]
    for entry in known:
        if entry.excused:
            rows.append({"name": entry.name, "family": entry.source.family, "excused": entry.excused, "wrong": ""})  # fmt: skip
    return rows


def _row(entry: Entry, fitted: Fitted, target: Target) -> dict[str, Any]:
    spent = cost(entry.kernel, fitted.source)
    told = predict_us(spent, fitted.facts, target)
    used = occupancy(fitted.facts, target)
    return {
        "name": entry.name,
        "family": entry.source.family,
        "registers": fitted.facts.registers,
        "spills": fitted.facts.spills,
        "shared_bytes": fitted.facts.shared_bytes,
        "occupancy": None if used is None else round(used, 3),
        "bytes": int(spent.moved),
        "least_bytes": int(spent.least),
        "roofline": None if told is None else round(told[1], 3),
        "predicted_us": None if told is None else round(told[0], 2),
        "problem": spent.problem,
        "constants": dict(fitted.source.constants),
        "warps": fitted.source.warps,
        "stages": fitted.source.stages,
        "excused": "",
        "wrong": fitted.wrong,
    }


def _show(name: str, kind: str, known: Sequence[Entry], target: Target) -> int:
    found = {entry.name: entry.source for entry in known}
    if name not in found:
        raise SpecError(
            Pos("kernels"), f"no kernel `{name}` for {target.arch}", expected="a name that the table lists",
            hint=did_you_mean(name, found),
        )  # fmt: skip
    if kind not in _CODES:
        raise SpecError(Pos("kernels"), f"no code `{kind}`", expected=", ".join(_CODES))
    if kind == "source":
        print(found[name].text, end="")
        return 0
    return _show_code(fit([found[name]], target, 1)[0].source, kind, target)


def _show_code(source: Source, kind: str, target: Target) -> int:
    assert target.triton is not None
    facts = compiler.code(source, target.triton, kind)
    if facts.error:
        print(facts.error, file=sys.stderr)
        return 1
    print(facts.code, end="")
    return 0


def _print(rows: Sequence[dict[str, Any]], target: Target) -> None:
    console = Console()
    table = Table(title=f"{target.name} ({target.arch})", title_justify="left", box=None)
    table.add_column("kernel", overflow="fold")
    for head in ("registers", "spills", "shared", "occupancy", "MB", "of least", "us", "roofline"):
        table.add_column(head, justify="right")
    for row in rows:
        if row["excused"]:
            table.add_row(row["name"], f"[dim]{row['excused']}[/dim]")
        elif row["wrong"]:
            table.add_row(row["name"], f"[red]{row['wrong'].splitlines()[-1]}[/red]")
        else:
            table.add_row(row["name"], *_cells(row))
    console.print(table)
    asked = [row for row in rows if not row["excused"]]
    right = sum(not row["wrong"] for row in asked)
    console.print(
        f"{right} of {len(asked)} kernels compiled without spills; times are predictions, not measured"
    )


def _cells(row: dict[str, Any]) -> list[str]:
    def percent(value: float | None) -> str:
        return "-" if value is None else f"{100 * value:.0f} %"

    time = "-" if row["predicted_us"] is None else f"{row['predicted_us']:.1f}"
    return [
        str(row["registers"]), str(row["spills"]), str(row["shared_bytes"]), percent(row["occupancy"]),
        f"{row['bytes'] / 1e6:.2f}", f"{row['bytes'] / max(row['least_bytes'], 1):.2f}", time,
        percent(row["roofline"]),
    ]  # fmt: skip
