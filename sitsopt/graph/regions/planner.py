"""Plans the regions of one graph by a region rule. It refuses, with a reason, whatever it is not sure of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.fx import Graph, Node

from ...spec.region import RegionFile
from ..facts import module_path, source, tensor
from .buffers import share
from .facts import Facts, facts_of, op_name
from .forks import Costs, Forked, forked
from .partition import Part, partition
from .plan import BEGIN, Event, Input, Outside, Region, RegionPlan, Slot, Start


def plan_regions(
    graph: Graph, rule: RegionFile, costs: Costs, written: Sequence[Node] = (), held: set[Node] | None = None
) -> RegionPlan:  # fmt: skip
    """The regions of a graph. written: placeholders whose new values are the graph's last outputs; held: placeholders
    that stay where they are between calls (weights, buffers), beside those that are written."""
    facts = facts_of(graph, written)
    made = RegionPlan(rule.name, limit_bytes=costs.limit_bytes)
    made.refused = not_meant(facts, rule)
    made.fits = not made.refused
    made.refused = made.refused or not_sure(facts, rule)
    parts = [] if made.refused else partition(facts, rule)
    if made.refused:
        everything = Part(list(facts.nodes), dict.fromkeys(facts.nodes, made.refused))
        parts = [everything] if facts.nodes else []
    for part in parts:
        if part.inside:
            region = _region(f"region{len(made.regions)}", part, facts, rule, costs, held or set())
            made.regions.append(region)
            made.order.append(region.name)
        else:
            made.outside += [_outside(n, part.reasons[n], facts, costs) for n in part.nodes]
            made.order += [n.name for n in part.nodes]
    _bound(made, facts, rule, costs)
    return made


def not_meant(facts: Facts, rule: RegionFile) -> str:
    """Why a rule is not meant for a graph; empty where it is."""
    count = tokens(facts)
    if rule.tokens is not None and isinstance(count, int) and count > rule.tokens:
        return f"the rule `{rule.name}` is for steps of at most {rule.tokens} tokens; this one has {count}"  # fmt: skip
    return ""


def not_sure(facts: Facts, rule: RegionFile) -> str:
    """Why nothing of a graph can be planned; empty where it can."""
    if facts.symbols and not rule.captures.buckets:
        return f"sizes vary ({', '.join(sorted(facts.symbols))}) and the rule `{rule.name}` gives no `buckets`"  # fmt: skip
    return ""


def tokens(facts: Facts) -> object:
    """How many tokens the step of a graph has: the indices of its first embedding; None where it has none."""
    for node in facts.nodes:
        if op_name(node) == "aten.embedding":
            indices = tensor(node.args[1])
            return None if indices is None else indices.numel()
    return None


def _bound(made: RegionPlan, facts: Facts, rule: RegionFile, costs: Costs) -> None:
    """Give up a plan whose buffers would take more than is allowed, or whose sizes are not known."""
    most = max(rule.captures.buckets, default=0)
    nodes = {n.name: n for n in facts.nodes}
    total = 0
    for region in made.regions:
        total += region.pool_bytes + region.copied_bytes
        unknown = [s.node for s in region.order if facts.size(nodes[s.node], most) is None]
        if unknown or any(one.bytes is None for one in region.inputs):
            made.refused = f"the size of {(unknown or ['an input'])[0]} is not known before it runs"
    if costs.limit_bytes is not None and total > costs.limit_bytes:
        made.refused = f"static buffers would take {total / 2**20:.0f} MiB; {costs.limit_bytes / 2**20:.0f} MiB are allowed"  # fmt: skip
    if made.refused and made.regions:
        made.regions = []
        made.outside = [_outside(n, made.refused, facts, costs) for n in facts.nodes]
        made.order = [n.name for n in facts.nodes]


def _outside(node: Node, reason: str, facts: Facts, costs: Costs) -> Outside:
    kernel = node not in facts.free
    us = _plus(costs.us(node), costs.gap_us) if kernel else 0.0
    return Outside(
        node.name, op_name(node), reason, module_path(node), source(node), us, kernel
    )  # fmt: skip


def _region(
    name: str, part: Part, facts: Facts, rule: RegionFile, costs: Costs, held: set[Node]
) -> Region:
    fork = forked(part.nodes, facts, rule, costs)
    placed = _with_views(part.nodes, fork, facts)
    order, events, joins = _marked(placed, facts, set(part.nodes))
    inside = set(part.nodes)
    outputs = [n for n in part.nodes if _leaves(n, inside, facts)]
    most = max(rule.captures.buckets, default=0)
    kernels = [n for n in part.nodes if n not in facts.free]
    times = [costs.us(n) for n in kernels]
    region = Region(
        name, order, events, joins,
        needs={n.name: tuple(sorted(b.name for b in facts.needs[n] if b in inside)) for n in part.nodes},
        inputs=_inputs(part.nodes, facts, held, most), outputs=[n.name for n in outputs], slots=[],
        kernels=len(kernels), key=tuple(sorted(facts.symbols)), reorderings=fork.reorderings, kept=fork.kept,
    )  # fmt: skip
    region.us = _sum(times, costs.gap_us, len(kernels))
    region.saved_us = _saved(region, costs)
    region.slots = _slots(region, part.nodes, outputs, facts, most)
    return region


def _with_views(nodes: Sequence[Node], fork: Forked, facts: Facts) -> list[tuple[Node, int]]:
    """The order of kernels with every view right behind the last thing it needs, on that one's stream."""
    stream, inside = dict(fork.stream), set(nodes)
    waiting: dict[Node, set[Node]] = {
        n: {b for b in facts.needs[n] if b in inside} for n in nodes if n in facts.free
    }
    placed: list[tuple[Node, int]] = []

    def settle(done: Node) -> None:
        for view in facts.users.get(done, ()):
            left = waiting.get(view)
            if left is not None and done in left:
                left.discard(done)
                if not left:
                    stream[view] = stream.get(done, 0)
                    placed.append((view, stream[view]))
                    settle(view)

    for view in [n for n, left in waiting.items() if not left]:
        placed.append((view, 0))
        settle(view)
    for node in fork.order:
        placed.append((node, stream.get(node, 0)))
        settle(node)
    return placed


def _marked(
    placed: Sequence[tuple[Node, int]], facts: Facts, inside: set[Node]
) -> tuple[list[Start], list[Event], tuple[str, ...]]:
    """Events where a need lies on another stream and no earlier event says that it has ended; joins at the end."""
    place: dict[Node, tuple[int, int]] = {}
    count: dict[int, int] = {}
    last: dict[int, Node] = {}
    known: dict[int, dict[int, int]] = {}  # by stream: how far each other one is known to be
    clock: dict[Node, dict[int, int]] = {}
    events: dict[str, Event] = {}
    order: list[Start] = []

    def wait(seen: dict[int, int], before: Node) -> str:
        event = events.setdefault(f"after {before.name}", Event(f"after {before.name}", before.name))  # fmt: skip
        for other, far in clock[before].items():
            seen[other] = max(seen.get(other, 0), far)
        return event.name

    for node, stream in placed:
        seen, waits = known.setdefault(stream, {}), list[str]()
        before = [b for b in facts.needs[node] if b in inside and place[b][0] != stream]
        for need in sorted(before, key=lambda b: (-place[b][1], place[b][0])):
            if seen.get(place[need][0], 0) < place[need][1]:
                waits.append(wait(seen, need))
        if stream and stream not in count and not waits:
            events[BEGIN] = Event(BEGIN, BEGIN)
            waits.append(BEGIN)
        count[stream] = seen[stream] = count.get(stream, 0) + 1
        place[node], last[stream], clock[node] = (stream, count[stream]), node, dict(seen)
        order.append(Start(node.name, stream, tuple(waits)))
    main = known.setdefault(0, {})
    joins = tuple(
        wait(main, last[s]) for s in sorted(count) if s and main.get(s, 0) < count[s]
    )  # fmt: skip
    return order, list(events.values()), joins


def _leaves(node: Node, inside: set[Node], facts: Facts) -> bool:
    """Whether a value is read behind the region, or is a result of the graph."""
    return node in facts.results or any(u not in inside and u.op == "call_function" for u in node.users)  # fmt: skip


def _inputs(nodes: Sequence[Node], facts: Facts, held: set[Node], most: int) -> list[Input]:
    inside, found = set(nodes), dict[Node, Input]()
    for node in nodes:
        for one in node.all_input_nodes:
            if one not in inside and one not in found and one.op != "get_attr":
                home = facts.home.get(one, one)
                stays = home in held or home in facts.written
                found[one] = Input(one.name, stays, facts.size(one, most))
    return list(found.values())


def _slots(
    region: Region, nodes: Sequence[Node], outputs: Sequence[Node], facts: Facts, most: int
) -> list[Slot]:
    makers = [n for n in nodes if n not in facts.free and facts.owner(n) is n]
    readers: dict[str, list[str]] = {n.name: [] for n in makers}
    for node in nodes:
        for one in node.all_input_nodes:
            owner = facts.owner(one)
            if owner.name in readers and owner is not node:
                readers[owner.name].append(node.name)
    sizes: Mapping[str, int] = {n.name: facts.size(n, most) or 0 for n in makers}
    lasting = {facts.owner(n).name for n in outputs}
    return share(region.order, region.events, sizes, readers, lasting)


def _sum(times: Sequence[float | None], gap: float | None, count: int) -> float | None:
    if None in times or gap is None:
        return None
    return sum(t for t in times if t is not None) + count * gap


def _saved(region: Region, costs: Costs) -> float | None:
    """Microseconds that a replay is predicted to save: where the host starts kernels more slowly than they run, its
    time shows; side streams add theirs."""
    if region.us is None or costs.host_us is None:
        return None
    forks = sum(one.before_us - one.after_us for one in region.reorderings)
    return max(0.0, region.kernels * costs.host_us - region.us) + forks


def _plus(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a + b
