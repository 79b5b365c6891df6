"""A graph under rewriting: live nodes by op, live users, and which replaced nodes are dead but can come back.

A replaced node stays in the graph until `sweep`, so that an edit can be undone; until then `users` hides it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from torch.fx import GraphModule, Node

from ..graph.facts import schema_mutates
from ..graph.opview import key_of


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
        for node in self.graph.nodes:
            self.add(node)

    def add(self, node: Node) -> None:
        if node.op != "call_function":
            return
        self.by_key[key_of(node)][node] = None
        if schema_mutates(node.target):
            self.mutating.append(node)

    def forget(self, node: Node) -> None:
        self.by_key[key_of(node)].pop(node, None)
        self.dead.discard(node)

    def nodes(self, keys: Iterable[str]) -> list[Node]:
        """Live nodes under any of the keys, in graph order."""
        found = [n for key in keys for n in self.by_key.get(key, ()) if n not in self.dead]
        return sorted(found) if len(found) > 1 else found

    def users(self, node: Node) -> list[Node]:
        """Live readers of a value."""
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
            unread = node.op == "call_function" and not node.users and not node.is_impure()
            if (node in self.dead or unread) and not node.users:
                self.forget(node)
                self.graph.erase_node(node)
