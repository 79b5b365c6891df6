"""Fake machines by name, and what must be found of each."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import pynvml

from tests.hooks.fakes import Card, cards

FOUR = [0, 1, 2, 3]


def mesh(count: int, lanes: int) -> dict[tuple[int, int], int]:
    return dict.fromkeys(combinations(range(count), 2), lanes)


def circle(count: int, lanes: int) -> dict[tuple[int, int], int]:
    return {(i, (i + 1) % count): lanes for i in range(count)}


# DGX-1 with V100: two squares with diagonals, joined at the corners; six lanes a GPU.
CUBE = {
    (0, 1): 1, (0, 2): 1, (0, 3): 2, (1, 2): 2, (1, 3): 1, (2, 3): 1, (4, 5): 1, (4, 6): 1, (4, 7): 2,
    (5, 6): 2, (5, 7): 1, (6, 7): 1, (0, 4): 2, (1, 5): 2, (2, 6): 2, (3, 7): 2,
}  # fmt: skip


@dataclass
class Case:
    """A machine, and of it: the order of the visible GPUs, whether all reach each other over NVLink, whether each
    pair has a connection of its own, whether a ring goes through all, and GB/s one way on its narrowest edge."""

    cards: list[Card] | None
    visible: list[int]
    admitted: bool | None
    full: bool | None = None
    ring_gbs: float | None = None
    host: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


def lopsided() -> list[Card]:
    """Four GPUs in a square with one diagonal; GPU 1 reports a lane to 0 less than 0 does to it."""
    made = cards(4, {(0, 1): 4, (1, 2): 2, (2, 3): 4, (0, 3): 2, (0, 2): 1})
    made[1].links.remove(0)
    return made


def broken() -> list[Card]:
    """A full mesh of four in which every lane between 1 and 2 is down."""
    made = cards(4, mesh(4, 4))
    for one, other in ((1, 2), (2, 1)):
        made[one].links = [None if end == other else end for end in made[one].links]
    return made


def sliced() -> list[Card]:
    made = cards(2, switch=18)
    made[0].mig, made[0].slices = True, ("MIG-11111111-aaaa-0000-0000-000000000000", "MIG-22222222-bbbb-0000-0000-000000000000")  # fmt: skip
    return made


UUIDS = [card.uuid for card in cards(4)]
CASES: dict[str, Case] = {
    "no GPU": Case([], [], True),
    "no NVML": Case(None, [], None),
    "one": Case(cards(1), [0], True, True),
    "one pair": Case(cards(2, {(0, 1): 12}, generation=3), [0, 1], True, True, 300.0),
    "ring of four": Case(cards(4, circle(4, 6)), FOUR, True, False, 150.0),
    "full mesh of four": Case(cards(4, mesh(4, 4)), FOUR, True, True, 100.0),
    "two pairs": Case(cards(4, {(0, 1): 4, (2, 3): 4}), FOUR, False, False),
    "NVSwitch of eight": Case(cards(8, switch=18), [*range(8)], True, True, 450.0),
    "hybrid cube": Case(cards(8, CUBE, generation=2), [*range(8)], True, False, 25.0),
    "full mesh of eight": Case(cards(8, mesh(8, 2)), [*range(8)], True, True, 50.0),
    "circulant of eight": Case(cards(8, circle(8, 6)), [*range(8)], False, False, 150.0),
    "asymmetric": Case(lopsided(), FOUR, True, False, 50.0),
    "missing link": Case(broken(), FOUR, True, False, 100.0),
    "PCIe only": Case(cards(4), FOUR, False, False),
    "MIG": Case(sliced(), [0, 1], False, False),
    "masked": Case(
        cards(4, {(0, 1): 4, (2, 3): 4}), [2, 3], True, True, 100.0,
        host={"env": {"CUDA_VISIBLE_DEVICES": "2,3"}},
    ),
    "reordered by UUID": Case(
        cards(4, circle(4, 6)), [3, 0, 2], True, False, None,
        host={"env": {"CUDA_VISIBLE_DEVICES": f"{UUIDS[3]},{UUIDS[0].upper()},{UUIDS[2][:12]}"}},
    ),
    "sparse nodes": Case(
        cards(1), [0], True, True,
        host={"nodes": {0: "0-3", 8: "4-7,12"}, "gpu_nodes": {0: 8}, "memory": "0,8", "allowed": "0-7"},
        facts={"numa.nodes": [0, 8], "numa.node8.cpus": [4, 5, 6, 7, 12], "gpu0.node": 8},
    ),
    "a node that is not told": Case(
        cards(1), [0], True, True, host={"gpu_nodes": {0: -1}}, facts={"gpu0.node": None},
    ),
    "container with a cpuset": Case(
        cards(1), [0], True, True,
        host={
            "nodes": {0: "0-3", 1: "4-7"}, "gpu_nodes": {0: 1}, "allowed": "0-1", "memory": "0",
            "files": {"/sys/fs/cgroup/cpu.max": "150000 100000", "/sys/fs/cgroup/memory.max": "1073741824"},
        },
        facts={"cpu.allowed": [0, 1], "cpu.quota": 1.5, "memory.group_limit_mb": 1024, "gpu0.node": 1},
    ),
    "links of unknown state": Case(
        cards(2, {(0, 1): 4}), [0, 1], None, None, host={"fail": {name: pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN) for name in
                       ("nvmlDeviceGetNvLinkState", "nvmlDeviceGetP2PStatus")}},
    ),
}  # fmt: skip
