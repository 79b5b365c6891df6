"""Proves a plan against its graph, or says what is wrong with it. Shares no code with the planner but the reading of
the graph: order is judged on networkx graphs, in which an edge means that one has ended before the other begins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import networkx as nx
from torch.fx import Graph, Node

from ...spec.region import RegionFile
from .facts import Facts, facts_of, op_name
from .plan import BEGIN, CONDITIONS, Region, RegionPlan

END = "end of the region"


class BadPlan(RuntimeError):
    """A plan that must not be run; the text has every reason."""


def check(
    plan: RegionPlan, graph: Graph, rule: RegionFile, written: Sequence[Node] = (), held: set[Node] | None = None
) -> list[str]:  # fmt: skip
    """Every way in which a plan does not fit its graph and rule; empty for a good one."""
    facts = facts_of(graph, written)
    nodes = {n.name: n for n in facts.nodes}
    problems = list(_complete(plan, nodes))
    if problems:
        return problems
    problems += _between(plan, facts, nodes)
    total = 0
    for region in plan.regions:
        own = [*_members(region, facts, nodes, rule), *_flow(region, facts, nodes)]
        if not own:
            own += _memory(region, facts, nodes, rule, held or set())
            own += _reordered(region, rule)
        problems += [f"{region.name}: {problem}" for problem in own]
        total += region.pool_bytes + region.copied_bytes
    if plan.limit_bytes is not None and total > plan.limit_bytes:
        problems.append(f"buffers take {total} bytes, more than the limit of {plan.limit_bytes}")
    return problems


def prove(
    plan: RegionPlan, graph: Graph, rule: RegionFile, written: Sequence[Node] = (), held: set[Node] | None = None
) -> None:  # fmt: skip
    """Raises BadPlan for a plan that `check` finds anything wrong with."""
    if problems := check(plan, graph, rule, written, held):
        raise BadPlan("; ".join(problems[:5]))


def _complete(plan: RegionPlan, nodes: dict[str, Node]) -> Iterator[str]:
    """Every node stands once, in a region or outside."""
    counts = Counter(s.node for region in plan.regions for s in region.order)
    counts.update(one.node for one in plan.outside)
    yield from (f"{name} is planned {n} times" for name, n in counts.items() if n > 1)
    yield from (f"{name} is no node of the graph" for name in counts if name not in nodes)
    yield from (f"{name} is not planned" for name in nodes if name not in counts)
    yield from (f"{one.node} is outside without a reason" for one in plan.outside if not one.reason)
    wanted = Counter([r.name for r in plan.regions] + [one.node for one in plan.outside])
    if Counter(plan.order) != wanted:
        yield "the order of regions and of what is outside does not have each of them once"


def _between(plan: RegionPlan, facts: Facts, nodes: dict[str, Node]) -> Iterator[str]:
    """Regions are convex, and what runs first is needed first."""
    part = {s.node: region.name for region in plan.regions for s in region.order}
    needs = nx.DiGraph((b.name, n.name) for n, before in facts.needs.items() for b in before)
    for region in plan.regions:
        mine = {s.node for s in region.order} & set(needs)
        left = {u for n in mine for u in needs.successors(n) if part.get(u) != region.name}
        back = _reached(needs, left) & mine
        if back:
            yield f"{region.name} is not convex: {min(back)} needs what runs outside, behind it"
    place = {name: i for i, name in enumerate(plan.order)}
    for before, node in needs.edges:
        first, then = part.get(before, before), part.get(node, node)
        if first != then and place[first] > place[then]:
            yield f"{node} runs before {before}, which it needs"


def _reached(graph: nx.DiGraph, starts: set[str]) -> set[str]:
    seen, todo = set(starts), list(starts)
    while todo:
        for following in graph.successors(todo.pop()):
            if following not in seen:
                seen.add(following)
                todo.append(following)
    return seen


def _members(
    region: Region, facts: Facts, nodes: dict[str, Node], rule: RegionFile
) -> Iterator[str]:
    """Only what may be captured, and as the region says of itself."""
    kernels = 0
    for start in region.order:
        node = nodes[start.node]
        if node in facts.free:
            continue
        kernels += 1
        if why := facts.why_outside(node) or rule.why_outside(op_name(node)):
            yield f"{start.node} may not be captured: {why}"
        if start.stream and rule.stays(op_name(node)):
            yield f"{start.node} must stay on the main stream"
        if not 0 <= start.stream <= rule.streams.side:
            yield f"{start.node} is on stream {start.stream}; there are {rule.streams.side} side streams"
    if kernels != region.kernels:
        yield f"it has {kernels} kernels, not {region.kernels}"
    if set(region.key) != facts.symbols:
        yield "its key does not name exactly the sizes that vary"
    inside = {nodes[s.node] for s in region.order}
    wanted = {n.name: {b.name for b in facts.needs[n] if b in inside} for n in inside}
    if wanted != {name: set(needs) for name, needs in region.needs.items()}:
        off = [n for n in wanted if set(region.needs.get(n, ())) != wanted[n]]
        yield f"the dependencies of {(off or ['unknown nodes'])[0]} are not those of the graph"
    leaving = {
        n.name for n in inside
        if n in facts.results or any(u not in inside and u.op == "call_function" for u in n.users)
    }  # fmt: skip
    if leaving != set(region.outputs):
        yield "its outputs are not what is read behind it"


def _flow(region: Region, facts: Facts, nodes: dict[str, Node]) -> Iterator[str]:
    """Each need has ended when its reader begins, by streams and events alone; all streams come together at the end."""
    flow = nx.DiGraph()
    flow.add_nodes_from([BEGIN, END])
    known = {event.name: event.after for event in region.events}
    if len(known) != len(region.events):
        yield "two events have one name"
    last: dict[int, str] = {0: BEGIN}
    started: set[str] = {BEGIN}
    for start in region.order:
        flow.add_node(start.node)
        if start.stream in last:
            flow.add_edge(last[start.stream], start.node)
        elif not start.waits:
            yield f"stream {start.stream} begins at {start.node} without an event of the captured stream"
        last[start.stream] = start.node
        for name in start.waits:
            if name not in known:
                yield f"{start.node} waits for an event that does not exist ({name})"
            elif known[name] not in started:
                yield f"{start.node} waits for {name} before it is recorded"
            else:
                flow.add_edge(known[name], start.node)
        started.add(start.node)
    flow.add_edge(last[0], END)
    for name in region.joins:
        if known.get(name) not in started:
            yield f"the end waits for an event that does not exist ({name})"
        else:
            flow.add_edge(known[name], END)
    yield from _ordered(region, facts, nodes, flow, last)


def _ordered(
    region: Region, facts: Facts, nodes: dict[str, Node], flow: nx.DiGraph, last: dict[int, str]
) -> Iterator[str]:
    if not nx.is_directed_acyclic_graph(flow):
        yield "streams and events wait for each other in a circle"
        return
    ended = ended_before(flow)
    inside = {s.node for s in region.order}
    for start in region.order:
        for need in facts.needs[nodes[start.node]]:
            if need.name in inside and need.name not in ended[start.node]:
                yield f"{start.node} may begin before {need.name} has ended, which it needs"
    for stream, name in last.items():
        if name != BEGIN and name not in ended[END]:
            yield f"stream {stream} is not joined at the end"


def ended_before(flow: nx.DiGraph) -> dict[str, frozenset[str]]:
    """For each node all that have ended when it begins."""
    ended: dict[str, frozenset[str]] = {}
    for node in nx.topological_sort(flow):
        before = list(flow.predecessors(node))
        ended[node] = frozenset(before).union(*(ended[b] for b in before))
    return ended


def _memory(
    region: Region, facts: Facts, nodes: dict[str, Node], rule: RegionFile, held: set[Node]
) -> Iterator[str]:
    """Every value has a buffer that is large enough, and nobody writes to one that is still read."""
    most = max(rule.captures.buckets, default=0)
    made = {s.node for s in region.order if nodes[s.node] not in facts.free and facts.owner(nodes[s.node]) is nodes[s.node]}  # fmt: skip
    sized = {name: facts.size(nodes[name], most) for name in made}
    yield from (f"the size of {name} is not known" for name, size in sized.items() if size is None)
    placed = Counter(name for slot in region.slots for name in slot.values)
    yield from (f"{name} has {n} buffers" for name, n in placed.items() if n > 1)
    yield from (f"{name} has no buffer" for name, size in sized.items() if size and not placed[name])  # fmt: skip
    yield from (f"{name} makes no value that needs a buffer" for name in placed if name not in made)
    inside = {nodes[s.node] for s in region.order}
    readers: dict[str, set[str]] = {name: {name} for name in made}
    lasting = {facts.owner(nodes[name]).name for name in region.outputs if name in nodes}
    for node in inside:
        for one in node.all_input_nodes:
            readers.get(facts.owner(one).name, set()).add(node.name)
    ended = ended_before(_streams(region))
    for slot in region.slots:
        for name in slot.values:
            if (sized.get(name) or 0) > slot.bytes:
                yield f"the buffer of {name} has {slot.bytes} bytes; it needs {sized[name]}"
        yield from _turns(slot.values, readers, lasting, ended)
    yield from _inputs(region, inside, facts, held, most)


def _turns(
    values: Sequence[str], readers: dict[str, set[str]], lasting: set[str], ended: dict[str, frozenset[str]]
) -> Iterator[str]:  # fmt: skip
    for i, one in enumerate(values):
        for other in values[i + 1 :]:
            for early, late in ((one, other), (other, one)):
                free = early not in lasting and readers.get(early, set()) <= ended.get(late, frozenset())  # fmt: skip
                if free:
                    break
            else:
                yield f"{one} and {other} share a buffer while both are in use"


def _streams(region: Region) -> nx.DiGraph:
    """Streams and events of a region whose flow was found good."""
    flow, last = nx.DiGraph(), {0: BEGIN}
    flow.add_node(BEGIN)
    after = {event.name: event.after for event in region.events}
    for start in region.order:
        before = [after[name] for name in start.waits]
        before += [last[start.stream]] if start.stream in last else []
        flow.add_node(start.node)
        flow.add_edges_from((one, start.node) for one in before)
        last[start.stream] = start.node
    return flow


def _inputs(
    region: Region, inside: set[Node], facts: Facts, held: set[Node], most: int
) -> Iterator[str]:
    read = {
        one for node in inside for one in node.all_input_nodes
        if one not in inside and one.op != "get_attr"
    }  # fmt: skip
    told = {one.name: one for one in region.inputs}
    if set(told) != {one.name for one in read} or len(told) != len(region.inputs):
        yield "its inputs are not what it reads from outside"
        return
    for node in read:
        home = facts.home.get(node, node)
        if home in facts.written and not told[node.name].held:
            yield f"{node.name} is written to, and a copy of it would be written instead"
        if told[node.name].held and home not in held and home not in facts.written:
            yield f"{node.name} is read where it lies, but need not stay there"
        if told[node.name].bytes != facts.size(node, most):
            yield f"the size of the input {node.name} is wrong"


def _reordered(region: Region, rule: RegionFile) -> Iterator[str]:
    """Whatever left the main stream stands in a reordering, all of whose conditions hold."""
    told = {name for one in region.reorderings for name in one.nodes}
    stream = {s.node: s.stream for s in region.order}
    kernels = {name for one in region.reorderings for name in one.nodes if name in stream}
    if told != kernels:
        yield "a reordering names nodes of another region"
    for one in region.reorderings:
        if tuple(stream.get(name, 0) for name in one.nodes) != one.streams:
            yield f"the reordering of {one.nodes[0]} names other streams than the plan"
        if tuple(c.name for c in one.conditions) != CONDITIONS:
            yield f"the reordering of {one.nodes[0]} does not check {', '.join(CONDITIONS)}"
        yield from (f"{one.nodes[0]}: {c.name} does not hold: {c.why}" for c in one.conditions if not c.holds)  # fmt: skip
        if one.before_us - one.after_us < rule.streams.gain_us:
            yield f"the reordering of {one.nodes[0]} gains less than {rule.streams.gain_us} us"
    moved = {s.node for s in region.order if s.stream and s.node in region.needs} - told
    yield from _unexplained(region, moved, told)


def _unexplained(region: Region, moved: set[str], told: set[str]) -> Iterator[str]:
    """Nodes off the main stream that no reordering names: only views of what one names may be."""
    for name in sorted(moved):
        needs = set(region.needs[name])
        if not needs or not needs <= told | moved:
            yield f"{name} left the main stream without its conditions being checked"
