"""A cheap look before matching: do the ops around a node have the right names at all?

Most nodes under a rule's root op are not the rule's: a `mul` is tried for every norm. Two levels of op names tell
most of them apart without building a search. It may only say no where the matcher would.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from torch.fx import Node

from ..graph.opview import canonical, key_of, view_of
from ..spec.program import Let, Ref
from ..spec.rule import Rule

DEPTH = 2


@lru_cache(maxsize=8192)
def _lets(rule: Rule, spelling: int) -> dict[str, Let]:
    """The single-valued lets of a spelling by name; those behind a `through` edge are left out."""
    lets = rule.spellings[spelling].program.lets
    return {
        let.names[0]: let
        for let in lets
        if len(let.names) == 1 and let.names[0] not in rule.through
    }


def plausible(rule: Rule, spelling: int, node: Node, commutes: frozenset[str] | set[str]) -> bool:
    """Whether the op names at and just below `node` can be those of the spelling's first return."""
    root = rule.spellings[spelling].program.returns[0]
    return _fits(_lets(rule, spelling), root, node, DEPTH, commutes)


def _fits(lets: dict[str, Let], name: str, node: Any, depth: int, commutes: Any) -> bool:
    let = lets.get(name)
    if let is None:
        return True
    if not isinstance(node, Node):
        return False
    key = canonical(let.call.op)
    if key == "prim.cast":
        operand = let.call.args[0]
        if not isinstance(operand, Ref):
            return True
        if key_of(node) == key and _fits(lets, operand.name, node.args[0], depth, commutes):
            return True
        return _fits(lets, operand.name, node, depth, commutes)
    view = view_of(node) if node.op == "call_function" else None
    if view is None or view.key != key:
        return False
    if depth == 0:
        return True
    wanted = [t.name if isinstance(t, Ref) else "" for t in let.call.args[: len(view.values)]]
    if _all(lets, wanted, view.values, depth, commutes):
        return True
    if key not in commutes or len(wanted) < 2:
        return False
    swapped = (view.values[1], view.values[0], *view.values[2:])
    return _all(lets, wanted, swapped, depth, commutes)


def _all(lets: dict[str, Let], names: list[str], values: Any, depth: int, commutes: Any) -> bool:
    return all(
        _fits(lets, name, value, depth - 1, commutes)
        for name, value in zip(names, values, strict=False)
        if name
    )
