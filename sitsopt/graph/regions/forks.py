"""Branches that do not need each other, on side streams where that is predicted to gain.

A region is cut at the kernels that everything else comes before or behind. Between two cuts the kernels make up
chains; `schedule` puts these on streams. One stream takes the chains' times and gaps in a row. Several take as long
as the longest of them, but no less than all their bytes take at the device's bandwidth, and a gap for each event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from ...spec.region import RegionFile
from .facts import Facts, op_name
from .plan import CONDITIONS, Condition, Reordering
from .schedule import Launch, Work, schedule

LIGHT = {"sits.swiglu", "sits.geglu", "sits.softcap", "sits.rope"}


@dataclass(frozen=True)
class Costs:
    """What a cost model says of one target. us: microseconds of a node's bytes and operations, without a start;
    gap_us: between two kernels of a graph; host_us: what the host takes to start one; unified: whether all memory has
    one address space, and why; limit_bytes: for static buffers."""

    us: Callable[[Node], float | None]
    gap_us: float | None = None
    host_us: float | None = None
    unified: tuple[bool, str] = (False, "nothing is known of the device")
    limit_bytes: int | None = None


@dataclass
class Forked:
    """Kernels in a new order, the stream of each that left the main one, and what was decided."""

    order: list[Node]
    stream: dict[Node, int] = field(default_factory=dict)
    reorderings: list[Reordering] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)


@dataclass
class _Chain:
    nodes: list[Node]
    us: float = 0.0
    move: float = 0.0


def forked(nodes: Sequence[Node], facts: Facts, rule: RegionFile, costs: Costs) -> Forked:
    """The kernels of a region (in a valid order) with branches on side streams. Nothing moves where a cost is unknown."""
    kernels = [n for n in nodes if n not in facts.free]
    made = Forked([])
    if not rule.streams.side:
        made.order = kernels
        return made
    needs = _through_views(nodes, facts)
    place = {n: i for i, n in enumerate(kernels)}
    for section in _sections(kernels, needs, place):
        done = _section(section, needs, facts, rule, costs, made)
        made.order += [*section.early, *done, *section.late] if done else section.whole(place)
    return made


def _through_views(nodes: Sequence[Node], facts: Facts) -> dict[Node, set[Node]]:
    """What each kernel needs of the region's kernels, views in between left out."""
    inside, needs = set(nodes), dict[Node, set[Node]]()
    for node in nodes:
        direct = [n for n in facts.needs[node] if n in inside]
        needs[node] = {k for n in direct for k in (needs[n] if n in facts.free else {n})}
    return {n: found for n, found in needs.items() if n not in facts.free}


@dataclass
class _Section:
    """Kernels between two cuts, or a cut. early: they need nothing of the core; late: nothing of the core needs them."""

    core: list[Node] = field(default_factory=list)
    early: list[Node] = field(default_factory=list)
    late: list[Node] = field(default_factory=list)

    def whole(self, place: dict[Node, int]) -> list[Node]:
        """All of it as it stands in the graph."""
        return sorted([*self.early, *self.core, *self.late], key=place.__getitem__)


def _sections(
    kernels: Sequence[Node], needs: dict[Node, set[Node]], place: dict[Node, int]
) -> Iterator[_Section]:
    """The core of a region is what lies between its widest source and its widest end. What only prepares (masks,
    angles) or only follows (a counter) belongs to the section in whose stretch of the graph it stands."""
    before, behind = _masks(kernels, needs, place)
    count = len(kernels)
    end = max(range(count), key=lambda i: before[i].bit_count(), default=0)
    reach = before[end] | 1 << end if count else 0
    start = max((i for i in range(count) if reach >> i & 1), key=lambda i: (behind[i] & reach).bit_count(), default=0)  # fmt: skip
    core = reach & (behind[start] | 1 << start) if count else 0
    section = _Section()
    for i, node in enumerate(kernels):
        if not core >> i & 1:
            (section.late if behind[start] >> i & 1 else section.early).append(node)
        elif (before[i] | behind[i] | 1 << i) & core == core:
            yield section
            yield _Section([node])
            section = _Section()
        else:
            section.core.append(node)
    yield section


def _masks(
    kernels: Sequence[Node], needs: dict[Node, set[Node]], place: dict[Node, int]
) -> tuple[list[int], list[int]]:
    """What comes before and behind each kernel, a bit each."""
    before, behind = [0] * len(kernels), [0] * len(kernels)
    for i, node in enumerate(kernels):
        for need in needs[node]:
            before[i] |= before[place[need]] | 1 << place[need]
    for i in reversed(range(len(kernels))):
        for need in needs[kernels[i]]:
            behind[place[need]] |= behind[i] | 1 << i
    return before, behind


def _section(
    section: _Section, needs: dict[Node, set[Node]], facts: Facts, rule: RegionFile, costs: Costs, made: Forked
) -> list[Node]:  # fmt: skip
    """The core of a section in a new order, and its streams noted; nothing where it stays as it is."""
    chains = _chains(section.core, needs)
    if len(chains) < 2:
        return []
    name = f"{section.core[0].name} .. {section.core[-1].name}"
    launches = schedule(_works(chains, needs), 1 + rule.streams.side) if _cost(chains, costs) else []  # fmt: skip
    everything = [*section.early, *section.core, *section.late]
    conditions = _conditions(everything, facts, rule, costs)
    if why := _why_kept(section, chains, launches, conditions, rule, costs):
        made.kept.append(f"{name}: {why}")
        return []
    by_name = {chain.nodes[0].name: chain for chain in chains}
    order = [n for one in launches for n in by_name[one.name].nodes]
    made.stream |= {n: one.stream for one in launches if one.stream for n in by_name[one.name].nodes}  # fmt: skip
    moved = [*section.early, *order, *section.late]
    streams = tuple(made.stream.get(n, 0) for n in moved)
    times = _compare(chains, launches, costs.gap_us or 0.0)
    made.reorderings.append(Reordering(tuple(n.name for n in moved), streams, *times, tuple(conditions)))  # fmt: skip
    return order


def _why_kept(
    section: _Section, chains: Sequence[_Chain], launches: Sequence[Launch], conditions: Sequence[Condition],
    rule: RegionFile, costs: Costs,
) -> str:  # fmt: skip
    """Why a section stays on one stream; empty where it is to be forked."""
    staying = next((n for n in section.core if rule.stays(op_name(n))), None)
    if staying is not None:
        return f"{op_name(staying)} stays on the main stream"
    if not launches:
        return "a time or the gap between kernels is not known"
    before, after = _compare(chains, launches, costs.gap_us or 0.0)
    if before - after < rule.streams.gain_us or len({one.stream for one in launches}) < 2:
        return f"{before:.2f} us on one stream, {after:.2f} us predicted on several"
    return next((f"{c.name}: {c.why}" for c in conditions if not c.holds), "")


def _chains(section: Sequence[Node], needs: dict[Node, set[Node]]) -> list[_Chain]:
    """Runs of kernels in which each is the only one that needs the one before, and needs no other here."""
    inside = set(section)
    users: dict[Node, list[Node]] = {n: [] for n in section}
    for node in section:
        for need in needs[node] & inside:
            users[need].append(node)
    chains: list[_Chain] = []
    of: dict[Node, _Chain] = {}
    for node in section:
        own = [n for n in needs[node] if n in inside]
        if len(own) == 1 and len(users[own[0]]) == 1:
            of[node] = of[own[0]]
            of[node].nodes.append(node)
        else:
            of[node] = _Chain([node])
            chains.append(of[node])
    return chains


def _cost(chains: Sequence[_Chain], costs: Costs) -> bool:
    """Fill in the times of chains: light ops in a row are one kernel. False where a fact is unknown."""
    if costs.gap_us is None:
        return False
    for chain in chains:
        times = [costs.us(n) for n in chain.nodes]
        if None in times:
            return False
        light = [_light(n) for n in chain.nodes]
        starts = sum(not (one and i and light[i - 1]) for i, one in enumerate(light))
        chain.move = sum(t for t in times if t is not None)
        chain.us = chain.move + starts * costs.gap_us
    return True


def _light(node: Node) -> bool:
    """Whether a compiler joins an op with its neighbours into one kernel."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags or op_name(node) in LIGHT


def _works(chains: Sequence[_Chain], needs: dict[Node, set[Node]]) -> list[Work]:
    of = {n: chain for chain in chains for n in chain.nodes}
    works = []
    for chain in chains:
        before = {of[n].nodes[0].name for node in chain.nodes for n in needs[node] if n in of}
        works.append(Work(chain.nodes[0].name, tuple(sorted(before - {chain.nodes[0].name})), chain.us))  # fmt: skip
    return works


def _compare(
    chains: Sequence[_Chain], launches: Sequence[Launch], gap: float
) -> tuple[float, float]:
    """Microseconds on one stream and on several."""
    us = {chain.nodes[0].name: chain.us for chain in chains}
    sides = len({one.stream for one in launches if one.stream})
    events = 2 * sides + sum(len(one.waits) for one in launches)
    longest = max(one.start + us[one.name] for one in launches)
    return sum(us.values()), max(longest, sum(c.move for c in chains)) + events * gap


def _conditions(
    section: Sequence[Node], facts: Facts, rule: RegionFile, costs: Costs
) -> list[Condition]:
    """Under which kernels may change places: all three are told, whether they hold or not."""
    most = max(rule.captures.buckets, default=0)
    waits = [n for n in section if facts.why_outside(n)]
    unknown = [n for n in section if facts.size(n, most) is None]
    elsewhere = {t.device.type for n in section for t in _values(n)} - {facts.device}
    holds = (not waits, not unknown, costs.unified[0] and not elsewhere)
    whys = (
        f"{waits[0].name}: {facts.why_outside(waits[0])}" if waits else f"none of {len(section)} kernels waits for the host or has a size that depends on values",
        f"the size of {unknown[0].name} varies" if unknown else "every result has a static buffer before the region starts",
        f"memory of the {elsewhere.pop()} is used" if elsewhere else costs.unified[1],
    )  # fmt: skip
    return [Condition(*each) for each in zip(CONDITIONS, holds, whys, strict=True)]


def _values(node: Node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else [value]
    return [v for v in values if isinstance(v, torch.Tensor)]
