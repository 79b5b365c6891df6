"""A story as plain data: the JSON of `explain`. Field names and units are fixed; more fields may come."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ..graph.kv.sizes import cost_of_site
from ..rewrite.record import GraphRecord, Site
from .misses import Attempt
from .regions import coverage_data, regions_data
from .sites import Spot
from .story import Story


def as_dict(story: Story) -> dict[str, Any]:
    """Everything, nothing hidden or capped."""
    record = story.record
    return {
        "target": record.target,
        "recipe": record.recipe,
        "graphs": [_graph(g) for g in record.graphs],
        "rules": [_rule(story, name) for name in story.ids],
        "effective": [
            {"asked": e.asked, "got": e.got, "reason": e.reason} for e in record.effective
        ],
        "regions": regions_data(record.graphs),
        "coverage": coverage_data(record.graphs),
        "loop": record.loop or None,
        "loop_why": record.loop_why or None,
        "speculation": record.speculation or None,
        "bandwidth_gbs": story.bandwidth_gbs,
        "misses_recorded": story.recorded,
        "notes": list(story.notes),
        "cache": None if story.cache is None else story.cache.json(),
    }


def _graph(one: GraphRecord) -> dict[str, Any]:
    return {
        "name": one.name,
        "nodes_before": one.nodes_before,
        "nodes_after": one.nodes_after,
        "capture_ms": one.capture_ms,
        "rewrite_ms": one.rewrite_ms,
        "compile_ms": one.compile_ms,
        "dynamic": one.dynamic,
        "grad": one.grad,
        "from_disk": one.from_disk,
        "fallback": one.fallback or None,
        "repeated": one.repeated,
        "repeat_failed": one.repeat_failed or None,
        "one_function": asdict(one.one_function) if one.one_function else None,
        "stages": [{"name": n, "rewrites": count, "ms": ms} for n, count, ms in one.stages],
    }


def _rule(story: Story, name: str) -> dict[str, Any]:
    found = story.spots.get(name, [])
    return {
        "id": name,
        "summary": story.rules.get(name, ""),
        "fired": len(found),
        "excluded": story.excluded.get(name),
        "sites": [_spot(s) for s in found],
        "missed": [attempt(a) for a in story.attempts if a.miss.rule == name],
    }


def _spot(one: Spot) -> dict[str, Any]:
    """A site; the flat fields are those of the first graph that has it, `graphs` has each graph's own."""
    first = one.first
    return {
        "module": one.module,
        "source": first.place.source,
        "key": first.key,
        **_costs(first),
        **_cache(first),
        "graphs": {name: {"node": s.place.node, **_costs(s)} for name, s in one.graphs.items()},
    }


def _cache(site: Site) -> dict[str, Any]:
    """Bytes a token of a cache, before and after, where the site is one."""
    found = cost_of_site(site.binding)
    return {} if found is None else {"kv_bytes": asdict(found)}


def _costs(site: Site) -> dict[str, Any]:
    return {
        "bytes_saved": site.bytes_saved,
        "bytes_before": site.bytes_before,
        "bytes_after": site.bytes_after,
        "unfused_us": site.unfused_us,
        "predicted_us": site.predicted_us,
        "measured_us": dict(site.measured_us),
        "weight_error": site.weight_error,
        "lowered": site.lowered,
        "lowered_why": site.lowered_why,
        "nodes": site.nodes,
    }


def attempt(one: Attempt) -> dict[str, Any]:
    """A miss."""
    miss = one.miss
    return {
        "module": miss.place.module,
        "source": miss.place.source,
        "reason": miss.reason,
        "condition": miss.condition,
        "explanation": miss.explanation,
        "expected": miss.expected,
        "found": miss.found,
        "matched": miss.matched,
        "of": miss.of,
        "node": miss.place.node,
        "graphs": list(one.graphs),
        "near": one.near,
        "taken_by": one.taken_by or None,
    }
