"""Symbolic sizes as nodes: an argument of an op in a graph may not be a bare SymInt, it would lose its origin."""

from __future__ import annotations

import operator
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from .facts import tensor, val


def as_nodes(graph: Graph, args: Any) -> Any:
    """`args` with every symbolic size replaced by a node that holds it, made at the graph's insertion point.

    Raises LookupError for an expression over sizes that no input of the graph has.
    """

    def one(value: Any) -> Any:
        return node_for(graph, value.node.expr) if isinstance(value, torch.SymInt) else value

    return map_aggregate(args, one)


def node_for(graph: Graph, expr: Any) -> Any:
    """A node whose value is the expression: an input, a size of an input, or arithmetic over these."""
    if isinstance(expr, (int, sympy.Integer)):
        return int(expr)
    found = _of_input(graph, expr)
    if found is not None:
        return found
    ops = {sympy.Add: operator.add, sympy.Mul: operator.mul}
    if type(expr) in ops:
        parts = [node_for(graph, part) for part in expr.args]
        total = parts[0]
        for part in parts[1:]:
            total = _call(graph, ops[type(expr)], total, part)
        return total
    raise LookupError(f"no input of the graph has the size {expr}")


def _of_input(graph: Graph, expr: Any) -> Node | None:
    for node in graph.nodes:
        if node.op != "placeholder":
            continue
        value = val(node)
        if isinstance(value, torch.SymInt) and value.node.expr == expr:
            return node
        shape = tensor(node).shape if tensor(node) is not None else ()  # type: ignore[union-attr]
        for dim, size in enumerate(shape):
            if isinstance(size, torch.SymInt) and size.node.expr == expr:
                made = graph.call_function(torch.ops.aten.sym_size.int, (node, dim))
                made.meta["val"] = size
                return made
    return None


def _call(graph: Graph, op: Any, a: Any, b: Any) -> Any:
    if not isinstance(a, Node) and not isinstance(b, Node):
        return op(a, b)
    made = graph.call_function(op, (a, b))
    made.meta["val"] = op(
        val(a) if isinstance(a, Node) else a, val(b) if isinstance(b, Node) else b
    )
    return made
