"""`sitsopt doctor`: the machine, what every hook plans, was applied and was refused, kernels and start-up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table
from rich.text import Text

from sitsopt.cli._common import emit, progress, show
from sitsopt.measure.doctor import Asked, Diagnosis, diagnose
from sitsopt.runtime.hooks.host import as_cpu_list

GROUPS = ("cpu", "memory", "pages", "numa", "env", "nvml", "gpu", "pair")
MOST_GPUS = 8


def doctor(asked: Asked, *, as_json: bool = False) -> int:
    """Show everything; the exit status is that of the command run with `--apply`, else 0."""
    with progress() as say:
        found = diagnose(asked, say)
    try:
        data = found.json()
    finally:
        found.run.revert()
    data["not_reverted"] = list(found.run.ledger.left)
    if as_json:
        emit(data)
    else:
        show(_page(found, data, asked.apply))
    return found.status


def _page(found: Diagnosis, data: dict[str, Any], applying: bool) -> Any:
    from rich.console import Group

    return Group(*_parts(found, data, applying))


def _parts(found: Diagnosis, data: dict[str, Any], applying: bool) -> Iterator[Any]:
    yield Text(_machine(found))
    yield Text("Facts (what is unknown, and why, stands in brackets)")
    yield _grid(_facts(data["facts"]))
    yield Text("Plan" if applying else "Plan (a dry run: --apply does it)")
    yield _grid(_plan(data["plans"]))
    if applying:
        yield Text("Applied, and taken back since")
        rows = [
            (a["hook"], f"{a['key']} = {a['after']} (was {a['before']})") for a in data["applied"]
        ]
        yield _grid(rows or [("", "nothing")])
    yield Text("Refused, and why")
    yield _grid(
        [(r["hook"], f"{r['what']}: {r['why']}") for r in data["refused"]] or [("", "nothing")]
    )
    for left in data["not_reverted"]:
        yield Text(f"Not taken back: {left}", style="red")
    yield Text("Kernels and start-up")
    yield _grid(_kernels(data))


def _grid(rows: list[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(min_width=8)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(Text(f"  {name}"), Text(text))
    return table


def _machine(found: Diagnosis) -> str:
    machine, memory = found.machine, found.target.memory
    gpus = [g["name"] or g["device"] for g in machine["gpus"]]
    parts = [
        f"target {found.target.name}", machine["cpu"] or machine["isa"], f"{machine['cores']} cores",
        f"{machine['memory_gb']} GB", *gpus,
        f"reads {memory.bandwidth_gbs:g} GB/s" if memory.bandwidth_gbs else "bandwidth not measured yet",
    ]  # fmt: skip
    return ", ".join(str(p) for p in parts if p)


def _facts(facts: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
    rows = []
    for group in GROUPS:
        inside = {
            n: f for n, f in facts.items() if n.partition(".")[0].rstrip("0123456789") == group
        }
        if not inside:
            continue
        known = [
            f"{_short(n)} {_value(f['value'])}" for n, f in inside.items() if f["value"] is not None
        ]
        unknown = [
            f"[{_short(n)}: {f['problem']}]" for n, f in inside.items() if f["value"] is None
        ]
        sources = dict.fromkeys(f["source"] for f in inside.values() if f["value"] is not None)
        shown = [*known[: 6 * MOST_GPUS], *unknown[:6]]
        if len(known) + len(unknown) > len(shown):
            shown.append("and more (--json)")
        said = ", ".join(shown)
        rows.append((group, f"{said}  < {', '.join(sources)}" if known else said))
    return rows


def _short(name: str) -> str:
    head, _, rest = name.partition(".")
    return name if head.rstrip("0123456789") != head else rest or head


def _value(value: Any) -> str:
    if isinstance(value, list) and value and all(isinstance(each, int) for each in value):
        return as_cpu_list(value)
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return f"{sum(bool(each.get('active')) for each in value)} active"
    return str(value)


def _plan(plans: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
    rows = []
    for name, plan in plans.items():
        for action in plan["actions"]:
            scope = "" if action["scope"] == "process" else f" [{action['scope']}]"
            rows.append((name, f"{action['key']} = {action['value']}{scope}: {action['why']}"))
        rows += [(name, text) for text in plan["advice"][:3]]
        rows += [(name, text) for text in _data(plan["data"])]
    return rows or [("", "nothing to do")]


def _data(data: dict[str, Any]) -> Iterator[str]:
    """The few parts of what a hook found that fit a screen."""
    if data.get("ring"):
        speed = f", {data['ring_gbs']:g} GB/s one way" if data.get("ring_gbs") else ""
        yield f"ring {' '.join(map(str, data['ring']))}{speed}; full mesh: {data['full']}"
    rows = data.get("decisions", [])
    if rows:
        changes = [r for i, r in enumerate(rows) if not i or (r["nccl"], r["nccl_protocol"]) != (
            rows[i - 1]["nccl"], rows[i - 1]["nccl_protocol"])]  # fmt: skip
        yield "all-reduce: " + ", ".join(
            f"from {r['bytes']} bytes {r['nccl']} {r['nccl_protocol']} ({r['nccl_us']:.0f} us)"
            for r in changes
        )
    if "thresholds" in data:
        limits = ", ".join(f"{k} {v:g}" for k, v in data["thresholds"].items() if v is not None)
        yield f"steps down at {limits}, in the order {', '.join(data['steps'])}"


def _kernels(data: dict[str, Any]) -> list[tuple[str, str]]:
    cache, load = data["kernel_cache"], data["load_time"]
    rate = (
        f"{cache['hits']} of {cache['asked']} found on disk ({cache['hit_rate']:.1%})"
        if cache["asked"]
        else "none asked for yet"
    )
    rows = [("cache", f"{rate}; {cache['objects']} kernels, {cache['bytes'] / 1e6:.1f} MB")]
    if "problem" in load:
        rows.append(("start", load["problem"]))
    elif load:
        stages = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in load["stages"].items())
        rows.append(("start", f"{sum(load['stages'].values()):.2f} s: {stages}"))
        graphs = load["graphs"]
        if graphs:
            rows.append(
                ("", f"{graphs['from_disk']} of {graphs['all']} compiled calls came from disk")
            )
        rows += [("", note) for note in load["notes"]]
    return rows
