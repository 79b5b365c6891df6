"""`sitsopt kernels --target T`: every kernel generated and compiled for a target, no GPU needed."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from sitsopt.emit.triton.cost import Cost, cost
from sitsopt.emit.triton.manifest import entries, targets
from sitsopt.emit.triton.source import Source
from sitsopt.runtime.machine import detect_target
from sitsopt.runtime.triton import compile as compiler
from sitsopt.runtime.triton.fit import Fitted, fit
from sitsopt.runtime.triton.occupancy import occupancy, predict_us
from sitsopt.spec.errors import Pos, SpecError, did_you_mean
from sitsopt.spec.target import Target, all_targets, load_target

from ._common import progress

_CODES = {"source": "", "ptx": "ptx", "sass": "sass", "ttir": "ttir", "ttgir": "ttgir", "llir": "llir", "amdgcn": "amdgcn"}  # fmt: skip


@dataclass(frozen=True)
class Item:
    """A kernel to compile: its text, what it moves at given block sizes, why it need not compile, its sites."""

    source: Source
    cost: Callable[[Source], Cost]
    excused: str = ""
    sites: int | None = None

    @property
    def name(self) -> str:
        """The kernel's name."""
        return self.source.name


def kernels(
    target: str = "auto",
    model: str = "",
    *,
    everything: bool = False,
    show: str = "",
    as_: str = "source",
    family: str = "",
    jobs: int = 0,
    as_json: bool = False,
    recipe: str = "auto",
    config: str = "",
    dtype: str = "bf16",
    path: Sequence[str | Path] = (),
    trust_remote_code: bool = False,
) -> int:
    """Compile the manifest, or what a model needs, for a target and print a line a kernel; or show one kernel's code.

    everything: for every architecture of the manifest, one after another.
    """
    try:
        asked = [find_target(arch, path) for arch in targets()] if everything else [find_target(target, path)]  # fmt: skip
        loaded = _load(model, dtype, config, trust_remote_code) if model or config else None
        lists = []
        for facts in asked:
            known = _of_model(loaded, recipe, facts, path) if loaded else _of_manifest(facts)
            lists.append(_of_family(known, family))
        if show:
            return _show(show, as_, lists[0], asked[0])
    except SpecError as error:
        if as_json:
            print(json.dumps({"errors": [error.as_dict()]}, indent=2))
        else:
            print(error, file=sys.stderr)
        return 2
    told, wrong = [], False
    for facts, known in zip(asked, lists, strict=True):
        start = time.monotonic()
        rows = measure(known, facts, jobs or os.cpu_count() or 1, quiet=as_json)
        told.append({"target": facts.name, "kernels": rows})
        wrong = wrong or any(row["wrong"] and not row["excused"] for row in rows)
        if not as_json:
            _print(rows, facts, brief=everything, seconds=time.monotonic() - start)
    if as_json:
        print(json.dumps({"targets": told} if everything else told[0], indent=2))
    return int(wrong)


def _load(model: str, dtype: str, config: str, trust: bool) -> Any:
    from sitsopt.measure.models import load

    with progress() as say:
        say("loading the model")
        return load(model or None, dtype, trust, config=config or None)


def _needs_gpu(target: Target) -> None:
    if target.triton is None:
        raise SpecError(
            Pos("kernels"), f"the target {target.name} has no Triton kernels",
            expected="a GPU target", hint="sitsopt targets lists them",
        )  # fmt: skip


def _of_manifest(target: Target) -> list[Item]:
    _needs_gpu(target)
    return [Item(e.source, partial(cost, e.kernel), e.excused) for e in entries(target.arch)]


def _of_model(loaded: Any, recipe: str, target: Target, path: Sequence[str | Path]) -> list[Item]:
    from sitsopt.measure.kernels import needed
    from sitsopt.options import Options

    _needs_gpu(target)
    options = Options.parse({"recipe": recipe, "target": target.name, "path": list(path)})
    with progress() as say:
        found = needed(loaded.model, options, target, loaded.inputs, say)
    return [Item(one.source, lambda source, c=one.cost: c, sites=one.sites) for one in found]  # type: ignore[misc]


def _of_family(known: list[Item], family: str) -> list[Item]:
    chosen = [item for item in known if not family or item.source.family == family]
    if not chosen:
        problem = f"no kernels of the family {family!r}" if family else "no kernels are needed"
        raise SpecError(Pos("kernels"), problem, expected="a family")
    return chosen


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
    known: Sequence[Item], target: Target, jobs: int, quiet: bool = False
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


def _row(entry: Item, fitted: Fitted, target: Target) -> dict[str, Any]:
    spent = entry.cost(fitted.source)
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
        "sites": entry.sites,
        "constants": dict(fitted.source.constants),
        "warps": fitted.source.warps,
        "stages": fitted.source.stages,
        "excused": "",
        "wrong": fitted.wrong,
    }


def _show(name: str, kind: str, known: Sequence[Item], target: Target) -> int:
    found = {item.name: item.source for item in known}
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


def _print(
    rows: Sequence[dict[str, Any]], target: Target, brief: bool = False, seconds: float = 0.0
) -> None:
    """A table; brief: only what is wrong or excused, and the count."""
    console = Console() if sys.stdout.isatty() else Console(width=140, color_system=None)
    if brief:
        _print_brief(console, rows, target, seconds)
        return
    table = Table(title=f"{target.name} ({target.arch})", title_justify="left", box=None)
    table.add_column("kernel", overflow="fold", min_width=40)
    sites = any(row.get("sites") for row in rows)
    for head in ["sites"] * sites + [
        "registers",
        "spills",
        "shared",
        "occupancy",
        "MB",
        "of least",
        "us",
        "roofline",
    ]:
        table.add_column(head, justify="right")
    for row in rows:
        if row["excused"]:
            table.add_row(row["name"], f"[dim]{row['excused']}[/dim]")
        elif row["wrong"]:
            table.add_row(row["name"], f"[red]{row['wrong'].splitlines()[-1]}[/red]")
        else:
            table.add_row(row["name"], *[str(row["sites"])] * sites, *_cells(row))
    console.print(table)
    _print_count(console, rows)


def _print_brief(
    console: Console, rows: Sequence[dict[str, Any]], target: Target, seconds: float
) -> None:
    console.print(f"[bold]{target.name}[/bold] ({target.arch}), {seconds:.0f} s")
    for row in rows:
        if row["excused"] or row["wrong"]:
            console.print(f"  {row['name']}: {row['excused'] or row['wrong'].splitlines()[-1]}")
    _print_count(console, rows)


def _print_count(console: Console, rows: Sequence[dict[str, Any]]) -> None:
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
