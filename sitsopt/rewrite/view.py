"""A graph under rewriting: live nodes by op, live users, and which replaced nodes are dead but can come back.

A replaced node stays in the graph until `sweep`, so that an edit can be undone; until then `users` hides it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule, Node

from ..graph.facts import schema_mutates
from ..graph.opview import key_of, view_of
from .lanes import Lanes

if TYPE_CHECKING:
    from .prefilter import Needs

ANY = "any constant"  # read where a size is symbolic or not known by name


def _reads(value: Any) -> tuple[Any, ...]:
    """What an op reads, as keys: the key of an op, or a constant."""
    if isinstance(value, Node):
        known = isinstance(value.meta.get("val"), (torch.Tensor, list, tuple))
        return (key_of(value),) if known else (key_of(value), ANY)
    plain = isinstance(value, (bool, int, float, str, torch.dtype)) or value is None
    return (("is", value) if plain else ANY,)


class GraphView:
    """Index of one functional graph. `params` are placeholders that hold parameters or constants, `states`
    those that the graph writes back. Entries may be stale for erased nodes only through `forget`."""

    def __init__(
        self, gm: GraphModule, params: Iterable[Node] = (), states: Iterable[Node] = ()
    ) -> None:
        self.gm, self.graph = gm, gm.graph
        self.params, self.states = set(params), set(states)
        self.dead: set[Node] = set()
        self.by_key: dict[str, dict[Node, None]] = defaultdict(dict)
        self.mutating: list[Node] = []
        self.reads: set[tuple[str, Any]] = set()
        self.seen: set[Node] | None = None  # while somebody wants to know: nodes looked at
        self.asked: set[Node] | None = None  # and those whose readers were
        self.lanes: Lanes | None = Lanes(self.graph, self.params, self.states)
        again, of = self.lanes.pairs_seen(), self.lanes.of
        for node in self.graph.nodes:
            self.add(node, of.get(node, (0, 0))[0] in again)

    def add(self, node: Node, known: bool = False) -> None:
        """Index a node; `known`: what it reads is noted already."""
        if node.op != "call_function":
            return
        self.by_key[key_of(node)][node] = None
        if not known:
            self.note(node)
        if schema_mutates(node.target):
            self.mutating.append(node)

    def note(self, node: Node) -> None:
        """Keep in `reads` what an op reads: other ops, and constants. What was there once stays in it."""
        view = view_of(node)
        if view is not None:
            key, reads = view.key, self.reads
            for value in view.values:
                for item in value if isinstance(value, (list, tuple)) else (value,):
                    for read in _reads(item):
                        reads.add((key, read))

    def note_moved(self, reader: Node, new: object) -> None:
        """The same for one more value that an op reads."""
        key = key_of(reader)
        if key:
            self.reads.update((key, read) for read in _reads(new))

    def could_have(self, needs: Needs) -> bool:
        """Whether everything that a pattern needs is somewhere in the graph."""
        return self.has(needs) and all(
            read in self.reads or ((read[0], ANY) in self.reads and isinstance(read[1], tuple))
            for read in needs.reads
        )

    def has(self, needs: Needs) -> bool:
        """Whether all ops of a pattern are in the graph."""
        return all(self.by_key.get(key) for key in needs.keys)

    def forget(self, node: Node) -> None:
        self.by_key[key_of(node)].pop(node, None)
        self.dead.discard(node)

    def nodes(self, keys: Iterable[str]) -> list[Node]:
        """Live nodes under any of the keys, in graph order."""
        found = [n for key in keys for n in self.by_key.get(key, ()) if n not in self.dead]
        return sorted(found) if len(found) > 1 else found

    def users(self, node: Node) -> list[Node]:
        """Live readers of a value."""
        if self.asked is not None:
            self.asked.add(node)
        if not self.dead:
            return list(node.users)
        return [u for u in node.users if u not in self.dead]

    def is_param(self, node: object) -> bool:
        """Whether a value depends on parameters and constants alone: one of them, or folded from them."""
        if not isinstance(node, Node):
            return False
        return node in self.params or node.op == "get_attr" or "sits_fold" in node.meta

    def is_state(self, node: object) -> bool:
        return node in self.states

    def mutation_between(self, first: Node, last: Node) -> Node | None:
        """A node that writes one of its arguments and lies between two others in graph order."""
        return next((m for m in self.mutating if first < m < last and m not in self.dead), None)

    def sweep(self) -> None:
        """Erase what is dead for good: replaced nodes, and values nobody reads any more."""
        for node in reversed(list(self.graph.nodes)):
            if node.users or node.op != "call_function":
                continue
            if node in self.dead or not node.is_impure():
                self.forget(node)
                self.graph.erase_node(node)
