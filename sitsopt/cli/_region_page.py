"""The page of one region rule: everything that its file says."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sitsopt.spec.region import RegionFile


def region_page(rule: RegionFile, as_json: bool) -> int:
    """Print a region rule. Exit status 0."""
    if as_json:
        print(json.dumps({"id": rule.id, "stage": "regions", "file": rule.file, **rule.model_dump()}, indent=2))  # fmt: skip
        return 0
    console = Console(highlight=False)
    console.print(Text(rule.id, style="bold"), Text(rule.summary))
    console.print(Text(rule.file, style="dim"))
    if rule.doc:
        console.print(Text("\n" + rule.doc))
    for title, rows in _parts(rule):
        console.print(Text(f"\n{title}", style="bold"))
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
        table.add_column(style="cyan", no_wrap=True)
        table.add_column(overflow="fold")
        for left, right in rows:
            table.add_row(Text(left), Text(right))
        console.print(table)
    return 0


def _parts(rule: RegionFile) -> list[tuple[str, list[tuple[str, str]]]]:
    meant = f"steps of at most {rule.tokens} tokens" if rule.tokens else "any graph"
    streams, captures, memory = rule.streams, rule.captures, rule.memory
    return [
        ("for", [("graphs", meant), ("kernels", f"{rule.min_kernels} or more in a region")]),
        ("may be captured", [(pattern, "") for pattern in rule.capture]),
        ("splits a region", list(rule.split.items())),
        ("streams", [
            ("side streams", str(streams.side)), ("stay on the main one", ", ".join(streams.main) or "nothing"),
            ("a fork gains", f"{streams.gain_us:g} us or more, as predicted"),
        ]),
        ("captures", [
            ("plain calls before", str(captures.warmup)), ("kept", str(captures.most)),
            ("made anew", f"{captures.moves} times at most, where a weight or cache lies elsewhere"),
            ("sizes that vary", _words(captures.buckets) or "are not captured"),
        ]),
        ("memory", [("at most", _words([f"{memory.share:.0%} of the device", f"{memory.limit_mb:g} MiB" if memory.limit_mb else ""]))]),
    ]  # fmt: skip


def _words(values: list[Any]) -> str:
    return ", ".join(str(one) for one in values if one)
