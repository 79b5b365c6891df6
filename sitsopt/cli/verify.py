"""`sitsopt verify`: each rule's examples executed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from ..spec.errors import Pos, SpecError, did_you_mean
from ..spec.locate import rule_dirs
from ..spec.rule import Rule, load_rules


def verify(
    names: Sequence[str] = (),
    mutate: bool = False,
    as_json: bool = False,
    path: Sequence[Path] = (),
) -> int:
    """Run the examples of all rules, or of those named (`fuse/rope`, or a stage: `fuse`).

    Exit status: 0 all as the rules say, 1 a failed example, a surviving mutant or an overlap, 2 bad input.
    """
    from ..rewrite.mutate import survivors
    from ..rewrite.overlap import overlaps
    from ..rewrite.verify import verify as run

    rules = load_rules(rule_dirs(path))
    chosen = select(rules, names)
    failed: list[dict[str, Any]] = []
    lived: list[dict[str, str]] = []
    console = Console(stderr=True)
    with Progress(
        console=console, transient=True, disable=as_json or not sys.stderr.isatty()
    ) as bar:
        task = bar.add_task("verify", total=len(chosen))
        for rule in chosen:
            bar.update(task, description=rule.id)
            failed += [f.as_dict() for f in run(rule)]
            if mutate:
                lived += [{"rule": s.rule, "mutation": s.mutation} for s in survivors(rule)]
            bar.advance(task)
        bar.update(task, description="overlaps")
        clashes = [o for o in overlaps(rules) if {o.first, o.second} & {r.id for r in chosen}]
    examples = sum(len(r.examples) for r in chosen)
    places = {f["place"] for f in failed}
    result: dict[str, Any] = {
        "rules": len(chosen), "examples": examples, "passed": examples - len(places), "failed": failed,
        "overlaps": [o.as_dict() for o in clashes],
    }  # fmt: skip
    if mutate:
        result["survivors"] = lived
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        _print(result, clashes)
    return 1 if failed or clashes or lived else 0


def select(rules: Iterable[Rule], names: Sequence[str]) -> list[Rule]:
    """Rules by id or by stage; raises SpecError with the nearest name for one that is neither."""
    rules = list(rules)
    known = {r.id for r in rules} | {r.stage for r in rules}
    for name in names:
        if name not in known:
            raise SpecError(
                Pos("verify"), f"no rule or stage `{name}`", expected="an id that `sitsopt rules` lists",
                hint=did_you_mean(name, known),
            )  # fmt: skip
    return [r for r in rules if not names or r.id in names or r.stage in names]


def _print(result: dict[str, Any], clashes: Sequence[Any]) -> None:
    console = Console()
    for failure in result["failed"]:
        console.print(
            f"[red]failed[/red] {failure['rule']}  {failure['place']}\n  {failure['what']}"
        )
    for survivor in result.get("survivors", ()):
        console.print(f"[red]survived[/red] {survivor['rule']}  {survivor['mutation']}")
    for clash in clashes:
        console.print(f"[red]overlap[/red] {clash}")
    line = f"{result['rules']} rules, {result['examples']} examples, {result['passed']} as they say"
    if "survivors" in result:
        line += f", {len(result['survivors'])} surviving mutants"
    console.print(line)
