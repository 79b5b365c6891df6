"""What an all-reduce costs: latency plus bytes over the busiest wire (alpha-beta), for each way to do it.

A way is a list of rounds; in a round every transfer starts together. A transfer takes the shortest way over
NVLink, so two transfers that share a wire share its width; through NVSwitch the wires are the ports of the two
GPUs. The time of a way is therefore a straight line over the message size, `base + alpha * rounds + beta *
bytes`, and the table of decisions is where these lines cross.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise, permutations
from typing import Any

import networkx as nx

from .links import Links
from .ring import best_ring, width

Transfer = tuple[int, int, float]  # from, to, share of the message
SIZES = tuple(1 << power for power in range(10, 31, 2))  # 1 KiB to 1 GiB


@dataclass(frozen=True)
class Protocol:
    """How NCCL moves bytes: `base_us` once, `hop_us` a round (ring, tree), share of the wire that carries data.

    Figures: NCCL's own tuning table (NVIDIA/nccl, src/graph/tuning.cc, 2.8: baseLat, hwLat for NVLink, and the
    factors of the bus bandwidth), not measured here.
    """

    name: str
    base_us: float
    ring_us: float
    tree_us: float
    share: float


PROTOCOLS = (
    Protocol("LL", 3.6, 0.47, 0.52, 1 / 4),
    Protocol("LL128", 10.0, 1.9, 1.2, 0.92),
    Protocol("Simple", 8.4, 3.4, 28.0, 1.0),
)
NCCL = {"ring": "Ring", "tree": "Tree"}  # what NCCL calls the ways that it has


@dataclass(frozen=True)
class Way:
    """One algorithm in its best order of GPUs. `beta` is nanoseconds a byte (1 / GB/s) at full wires."""

    name: str
    order: tuple[int, ...]
    rounds: int
    beta: float

    def us(self, size: int, protocol: Protocol) -> float:
        """Microseconds for a message of `size` bytes."""
        hop = protocol.tree_us if self.name == "tree" else protocol.ring_us
        return protocol.base_us + hop * self.rounds + self.beta / protocol.share * size / 1000


@dataclass(frozen=True)
class Decision:
    """The cheapest way for one message size, and the cheapest that NCCL has."""

    bytes: int
    best: str
    protocol: str
    us: float
    nccl: str
    nccl_protocol: str
    nccl_us: float


def ways(links: Links) -> list[Way]:
    """Every algorithm that can run over these links, each in its best order. Empty when a pair is out of reach."""
    count = len(links.devices)
    if count < 2 or not links.admits(range(count)):
        return []
    found = [
        _way(links, "flat", [tuple(range(count))]),
        _way(links, "two-shot", [tuple(range(count))]),
    ]
    found.append(_way(links, "tree", orders(count)))
    if count & (count - 1) == 0:
        found.append(_way(links, "halving-doubling", orders(count)))
    ring = best_ring(links.graph)
    if ring is not None:
        found.append(_way(links, "ring", [tuple(ring)]))
    return sorted(found, key=lambda way: way.name)


def orders(count: int) -> list[tuple[int, ...]]:
    """Orders of GPUs to try: all of them up to six, else the given one and rotations of it."""
    if count <= 6:
        return list(permutations(range(count)))
    return [
        tuple((i * step + j) % count for i in range(count))
        for step in _coprime(count)
        for j in (0, 1)
    ]


def _coprime(count: int) -> list[int]:
    from math import gcd

    return [step for step in range(1, count) if gcd(step, count) == 1]


def _way(links: Links, name: str, choices: Iterable[tuple[int, ...]]) -> Way:
    best = min((round(beta_of(links, rounds_of(name, order)), 9), order) for order in choices)
    return Way(name, best[1], latency_rounds(name, len(links.devices)), best[0])


def latency_rounds(name: str, count: int) -> int:
    """Messages that one GPU waits for in turn."""
    depth = (count - 1).bit_length()
    return {"flat": 1, "two-shot": 2, "ring": 2 * (count - 1)}.get(name, 2 * depth)


def rounds_of(name: str, order: Sequence[int]) -> list[list[Transfer]]:
    """The transfers of an algorithm, round by round. A tree is a pipeline: all its wires are busy at once."""
    count = len(order)
    everyone = [(a, b) for a in order for b in order if a != b]
    if name == "flat":
        return [[(a, b, 1.0) for a, b in everyone]]
    if name == "two-shot":
        return [[(a, b, 1 / count) for a, b in everyone]] * 2
    if name == "ring":
        turn = [(a, b, 1 / count) for a, b in pairwise([*order, order[0]])]
        return [turn] * (2 * (count - 1))
    if name == "tree":
        up = [(order[i], order[(i - 1) // 2], 1.0) for i in range(1, count)]
        return [[*up, *((b, a, share) for a, b, share in up)]]
    halves = []
    for level in range((count - 1).bit_length()):
        share = 0.5 ** (level + 1)
        halves.append([(order[i], order[i ^ 1 << level], share) for i in range(count)])
    return [*halves, *reversed(halves)]


def beta_of(links: Links, rounds: list[list[Transfer]]) -> float:
    """Nanoseconds a byte of the message: in each round the wire with most to carry."""
    routes: dict[tuple[int, int], list[Any]] = {}
    total = 0.0
    for transfers in rounds:
        load: Counter[Any] = Counter()
        for a, b, share in transfers:
            if (a, b) not in routes:
                routes[a, b] = wires(links, a, b)
            for wire, gbs in routes[a, b]:
                load[wire] += share / gbs
        total += max(load.values())
    return total


def wires(links: Links, a: int, b: int) -> list[tuple[Any, float]]:
    """What a transfer occupies, each with its GB/s: of the shortest ways the widest, then by numbers."""
    found = []
    for path in nx.all_shortest_paths(links.graph, a, b):
        occupied: list[tuple[Any, float]] = []
        for one, two in pairwise(path):
            gbs = width(links.graph, one, two)
            if links.graph.edges[one, two]["switched"]:
                occupied += [
                    (("out", one), links.ports.get(one, gbs)),
                    (("in", two), links.ports.get(two, gbs)),
                ]
            else:
                occupied.append((("wire", one, two), gbs))
        found.append((-min(gbs for _, gbs in occupied), path, occupied))
    return min(found, key=lambda each: each[:2])[2]


def decide(found: list[Way], sizes: Sequence[int] = SIZES, ll128: bool = True) -> list[Decision]:
    """The table of decisions: for each message size the cheapest way and protocol. Without `ll128` that protocol
    is left out: it relies on 128-byte stores that arrive whole, which not every GPU and link give."""
    protocols = [p for p in PROTOCOLS if ll128 or p.name != "LL128"]
    table = []
    for size in sizes:
        priced = sorted((round(w.us(size, p), 3), w.name, p.name) for w in found for p in protocols)
        own = [each for each in priced if each[1] in NCCL]
        (us, name, protocol), (nccl_us, nccl, nccl_protocol) = priced[0], own[0]
        table.append(Decision(size, name, protocol, us, NCCL[nccl], nccl_protocol, nccl_us))
    return table


def as_rows(table: list[Decision]) -> list[dict[str, Any]]:
    """The table as plain data."""
    return [asdict(each) for each in table]
