"""The few block sizes worth trying for a kernel, best guess first.

The first is what bandwidth or tensor throughput asks for; each later one needs fewer registers or less shared
memory. A compiler without a GPU tells which of them fit a target.
"""

from __future__ import annotations

from .source import Source


def candidates(source: Source) -> list[Source]:
    """The source itself, then smaller ones."""
    made = [source]
    for constants, warps, stages in _ladder(source):
        made.append(source.tuned(constants, warps, stages))
    unique: dict[tuple[object, ...], Source] = {}
    for one in made:
        unique.setdefault((one.constants, one.warps, one.stages), one)
    return list(unique.values())


def _ladder(source: Source) -> list[tuple[dict[str, int], int, int]]:
    have = dict(source.constants)
    if source.name.startswith("attention_prefill"):
        return [
            ({"ROWS": 64}, 8, 2),
            ({"ROWS": 64}, 8, 1),
            ({"ROWS": 32}, 8, 1),
            ({"ROWS": 32}, 4, 1),
        ]
    if source.name.startswith("attention_decode"):
        return [({}, 4, 2), ({}, 8, 2), ({}, 8, 1), ({}, 4, 1)]
    if source.name.startswith("matmul_wide"):
        small = {"ROWS": 64, "COLS": min(64, have["COLS"])}
        return [
            ({}, 8, 2),
            ({"ROWS": 64}, 4, 3),
            ({"ROWS": 64}, 8, 2),
            (small, 4, 2),
            (small, 4, 1),
        ]
    if source.name.startswith("matmul_skinny"):
        return [({}, 4, 2), ({}, 8, 2), ({}, 8, 1)]
    return [({}, min(16, source.warps * 2), source.stages)]
