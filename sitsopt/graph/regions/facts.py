"""A graph as a planner of regions sees it: which nodes start kernels, what each needs first, where values lie.

A node needs those whose results it reads; whoever writes to memory needs all earlier readers and the last writer of
that memory, and whoever reads it needs the last writer.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_leaves

from ..facts import is_view, nbytes, storage_root, tensor, val

aten = torch.ops.aten
# Ops that give back their first argument with something written into it; inside a cache they write in place.
INTO = {"aten.index_copy", "aten.index_put", "aten.slice_scatter", "aten.select_scatter", "aten.scatter"}  # fmt: skip
SYNC = "the host waits for its value"
SIZED = "the size of its result depends on values"


@dataclass
class Facts:
    """nodes: calls, in the graph's order; needs: what must have run before each; free: those that start no kernel
    (views, sizes); home: the node whose memory a value lies in; device: where the graph runs; symbols: sizes that vary."""

    graph: Graph
    nodes: list[Node]
    needs: dict[Node, frozenset[Node]]
    free: frozenset[Node]
    home: dict[Node, Node]
    device: str
    written: frozenset[Node] = frozenset()
    results: frozenset[Node] = frozenset()
    symbols: frozenset[str] = frozenset()
    users: dict[Node, list[Node]] = field(default_factory=dict)

    def why_outside(self, node: Node) -> str:
        """Why a node can be in no region, whatever a rule says; empty where nothing speaks against it."""
        if node in self.free:
            return ""
        target: Any = node.target
        if not isinstance(target, torch._ops.OpOverload):
            return f"what {op_name(node)} runs is not known"
        if torch.Tag.data_dependent_output in target.tags:
            return SYNC
        values = [v for v in tree_leaves(val(node)) if v is not None]
        if any(free_unbacked_symbols(v) for v in values if isinstance(v, torch.Tensor)):
            return SIZED
        if any(free_unbacked_symbols(v) for v in values if isinstance(v, torch.SymInt | torch.SymFloat)):  # fmt: skip
            return SYNC
        return self._elsewhere(node)

    def _elsewhere(self, node: Node) -> str:
        """A tensor that is not on the graph's device: copied to or from it, or computed on the host."""
        mine = {t.device.type for t in tensors_of(val(node))}
        read = {t.device.type for n in node.all_input_nodes for t in tensors_of(val(n))}
        if self.device in mine and read - {self.device}:
            return f"it reads memory of the {(read - {self.device}).pop()}, which a replay would not read anew"  # fmt: skip
        if self.device in read and mine - {self.device}:
            return f"it copies to the {(mine - {self.device}).pop()}, and the host waits for that"
        if mine and self.device not in mine:
            return f"it runs on the {mine.pop()}, not on the device of the graph ({self.device})"
        return ""

    def owner(self, node: Node) -> Node:
        """The node whose result holds a value: of one of several results, the op that makes them all."""
        home = self.home.get(node, node)
        several = home.target is operator.getitem and home.op == "call_function"
        return self.home.get(home.all_input_nodes[0], home) if several else home

    def size(self, node: Node, most: int = 0) -> int | None:
        """Bytes of a node's own tensors. A size that varies counts as `most`; None where that is 0."""
        total = nbytes(val(node))
        if isinstance(total, int):
            return total
        expr = total.node.expr
        if not most:
            return None
        return int(expr.subs(dict.fromkeys(expr.free_symbols, most)))


def facts_of(graph: Graph, written: Sequence[Node] = ()) -> Facts:
    """Read a graph. `written` are placeholders that the graph updates and whose new values are its last outputs;
    a graph that writes them itself, by `copy_`, has none."""
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    results = _results(graph)
    home = _homes(graph, nodes, dict(zip(written, results[len(results) - len(written) :], strict=True)))  # fmt: skip
    writes = {n: writes_of(n, home) for n in nodes}
    free = frozenset(n for n in nodes if not writes[n] and _free(n))
    needs = _needs(graph, nodes, home, writes)
    devices = Counter(t.device.type for n in nodes if n not in free for t in tensors_of(val(n)))
    facts = Facts(
        graph, nodes, needs, free, home, devices.most_common(1)[0][0] if devices else "cpu",
        frozenset(home[m] for n in nodes for m in writes[n]), frozenset(results), _symbols(graph),
    )  # fmt: skip
    facts.users = {n: [] for n in nodes}
    for node, before in needs.items():
        for one in before:
            if one in facts.users:
                facts.users[one].append(node)
    return facts


def op_name(node: Node) -> str:
    """`aten.mul`; the name of a function that is no op."""
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return f"{target.namespace}.{target._schema.name.split('::')[1]}"
    name = getattr(target, "__name__", str(target))
    return f"{getattr(target, 'namespace', '') or 'python'}.{name}"


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors inside a value."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def writes_of(node: Node, home: Mapping[Node, Node]) -> list[Node]:
    """The arguments that a node writes to: by its schema, or as a scatter that lies in the memory of an input."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return []
    if op_name(node) in INTO and home.get(node, node) is not node:
        return [node.args[0]] if isinstance(node.args[0], Node) else []
    found = []
    for index, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
            found += [n for n in tree_leaves(given) if isinstance(n, Node)]
    return found


def _free(node: Node) -> bool:
    """Whether a call starts no kernel: views, and arithmetic on sizes."""
    if is_view(node):
        return True
    leaves = [v for v in tree_leaves(val(node)) if v is not None]
    target: Any = node.target
    host = not isinstance(target, torch._ops.OpOverload) or op_name(node).startswith("aten.sym_")
    numbers = all(isinstance(v, int | float | torch.SymInt | torch.SymFloat | torch.SymBool) for v in leaves)  # fmt: skip
    return bool(leaves) and host and numbers


def _results(graph: Graph) -> list[Node]:
    return [n for n in tree_leaves(graph.output_node().args) if isinstance(n, Node)]


def _homes(graph: Graph, nodes: Sequence[Node], news: Mapping[Node, Node]) -> dict[Node, Node]:
    """Whose memory each value lies in. The new value of an input that is scattered into lies in the input where nobody
    reads the old contents afterwards."""
    home = {n: n for n in graph.nodes}
    place = {n: i for i, n in enumerate(graph.nodes)}
    pairs = [*news.items(), *((n.args[0], n.args[1]) for n in nodes if n.target is aten.copy_.default)]  # fmt: skip
    for old, new in pairs:
        chain, link = [], new
        while isinstance(link, Node) and op_name(link) in INTO:
            chain.append(link)
            link = link.args[0]
        if not chain or link is not old or not isinstance(old, Node):
            continue
        first = place[chain[-1]]
        late = [
            u for u in _readers(old) if u not in chain and place[u] > first and u.op != "output"
        ]
        if all(u.target is aten.copy_.default for u in late):
            home.update(dict.fromkeys(chain, old))
    for node in nodes:
        root = storage_root(node)
        changed = _gives_back(node)
        if changed is not None:
            home[node] = home[changed]
        elif root is not node:
            home[node] = home.get(root, root)
    return home


def _gives_back(node: Node) -> Node | None:
    """The argument that a node writes to and returns, as `copy_` does."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.returns:
        return None
    returned = target._schema.returns[0].alias_info
    if returned is None or not returned.is_write:
        return None
    return next(iter(writes_of(node, {})), None)


def _readers(node: Node) -> Iterable[Node]:
    """Whoever reads a value or a view of it."""
    todo, seen = [node], set[Node]()
    while todo:
        for user in todo.pop().users:
            if user not in seen:
                seen.add(user)
                if user.op == "call_function" and is_view(user):
                    todo.append(user)
    return seen


def _needs(
    graph: Graph,
    nodes: Sequence[Node],
    home: Mapping[Node, Node],
    writes: Mapping[Node, list[Node]],
) -> dict[Node, frozenset[Node]]:
    calls = set(nodes)
    changing = {home[m] for n in nodes for m in writes[n]}
    writer: dict[Node, Node] = {}
    readers: dict[Node, set[Node]] = {place: set() for place in changing}
    needs: dict[Node, frozenset[Node]] = {}
    for node in nodes:
        before = {n for n in node.all_input_nodes if n in calls}
        places = {home[n] for n in node.all_input_nodes} & changing
        before |= {writer[p] for p in places if p in writer}
        for place in {home[m] for m in writes[node]}:
            before |= readers[place] | ({writer[place]} if place in writer else set())
            writer[place], readers[place] = node, set()
        for place in places:
            readers[place].add(node)
        needs[node] = frozenset(before - {node})
    return needs


def _symbols(graph: Graph) -> frozenset[str]:
    """The names of sizes that vary, over all inputs."""
    found: set[str] = set()
    for node in graph.find_nodes(op="placeholder"):
        value, one = val(node), tensor(node)
        for size in (value,) if isinstance(value, torch.SymInt) else one.shape if one is not None else ():  # fmt: skip
            if isinstance(size, torch.SymInt):
                found |= {str(s) for s in size.node.expr.free_symbols}
    return frozenset(found)
