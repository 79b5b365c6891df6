"""Regions as plain data and as text: what is captured as one piece, what that saves, and what is outside and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from ..graph.regions.plan import Region
from ..rewrite.coverage import Coverage, Reason, coverage
from ..rewrite.record import GraphRecord
from .names import micros, plural, short, size

MOST = 6  # reasons


def regions_data(graphs: Iterable[GraphRecord]) -> list[dict[str, Any]]:
    """A map for each region of each graph."""
    return [
        _region(graph.name, graph.regions.rule, region)
        for graph in graphs if graph.regions is not None for region in graph.regions.regions
    ]  # fmt: skip


def _region(graph: str, rule: str, region: Region) -> dict[str, Any]:
    return {
        "graph": graph, "name": region.name, "rule": rule, "nodes": len(region.order), "kernels": region.kernels,
        "predicted_us": region.us, "saved_us": region.saved_us, "streams": region.streams,
        "events": len(region.events), "key": list(region.key), "pool_bytes": region.pool_bytes,
        "buffers": len(region.slots), "copied_bytes": region.copied_bytes,
        "held_bytes": sum(one.bytes or 0 for one in region.inputs if one.held),
        "copied_inputs": [one.name for one in region.inputs if not one.held], "outputs": list(region.outputs),
        "reorderings": [asdict(one) for one in region.reorderings], "kept": list(region.kept),
    }  # fmt: skip


def coverage_data(graphs: Iterable[GraphRecord]) -> list[dict[str, Any]]:
    """A map for each step: shares inside regions, and every reason for what is outside."""
    return [
        {
            "step": one.step, "rule": one.rule, "regions": one.regions, "kernels_inside": one.kernels_inside,
            "kernels": one.kernels, "share": one.share, "inside_us": one.us_inside, "predicted_us": one.us,
            "time_share": one.time_share, "saved_us": one.saved_us, "meant": one.fits,
            "refused": one.refused or None, "outside": [asdict(reason) for reason in one.reasons],
        }
        for one in coverage(graphs)
    ]  # fmt: skip


def regions_text(graphs: list[GraphRecord]) -> Iterator[RenderableType]:
    """A few lines for each step."""
    found = coverage(graphs)
    if not found:
        return
    yield ""
    yield Text("Regions (captured and replayed as one CUDA graph)", style="bold")
    for one in found:
        yield Text(_step(one))
        yield from (_reason(reason) for reason in one.reasons[:MOST] if not one.refused)
        if len(one.reasons) > MOST and not one.refused:
            yield Text(f"    … and {len(one.reasons) - MOST} more (--json has all)", style="dim")
    for graph in graphs:
        for region in graph.regions.regions if graph.regions else ():
            yield Text(_capture(graph.name, region), style="dim")


def _step(one: Coverage) -> str:
    if one.refused:
        return f"{one.step}: none: {one.refused}"
    share = one.time_share
    time = f", {share:.1%} of {micros(one.us)} predicted" if share is not None else ""
    saved = f"; saves {micros(one.saved_us)} of the host's starts" if one.saved_us else ""
    return (
        f"{one.step}: {one.kernels_inside} of {one.kernels} kernels ({one.share:.1%}){time} in"
        f" {plural(one.regions, 'region')} of rule {one.rule}{saved}"
    )


def _reason(reason: Reason) -> RenderableType:
    times = f"{reason.count} × " if reason.count > 1 else ""
    place = f" {reason.module}" if reason.module else ""
    where = f" ({short(reason.source)})" if reason.source else ""
    return Padding(Text(f"outside: {times}{reason.op}{place}{where}: {reason.reason}"), (0, 0, 0, 4))  # fmt: skip


def _capture(graph: str, region: Region) -> str:
    copied = [one for one in region.inputs if not one.held]
    told = f"{graph}, {region.name}: {plural(region.kernels, 'kernel')}, {size(region.pool_bytes)} in {plural(len(region.slots), 'buffer')}, {plural(len(copied), 'input')} copied in"  # fmt: skip
    if region.streams > 1:
        gain = sum(one.before_us - one.after_us for one in region.reorderings)
        told += f"; {plural(len(region.reorderings), 'fork')} over {region.streams} streams gain {micros(gain)}"  # fmt: skip
    return told
