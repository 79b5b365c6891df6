"""Which calls of a Dynamo graph are equal: the same function, constants and layouts, whoever's values they are."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

SILENT = {"_log_api_usage_once"}  # calls that compute nothing
BY_VALUE = (int, bool, str, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format)  # fmt: skip


class Unsuited(Exception):
    """The graph must be traced whole; the message says why."""


class Marks:
    """The layouts of all values of a Dynamo graph, and the calls in it that need a sample."""

    def __init__(self, gm: GraphModule, inputs: Sequence[Any]) -> None:
        self.of: dict[Node, tuple[Any, ...]] = {}  # layouts of the tensors that a node holds
        self.calls: list[Node] = []
        self.mode = _mode(gm)
        places = [n for n in gm.graph.nodes if n.op == "placeholder"]
        for node, given in zip(places, inputs, strict=True):
            self.of[node] = self._marks(node)
            if not isinstance(given, torch.Tensor) or mark(given) != self.of[node][0]:
                raise Unsuited(f"{node.name} is no tensor as it was when it was traced")
        for node in gm.graph.nodes:
            if node.op not in ("placeholder", "output"):
                self._read(node)

    def _read(self, node: Node) -> None:
        if node.op not in ("call_function", "call_method"):
            raise Unsuited(f"{node.name} is a {node.op}")
        if getattr(node.target, "__name__", "") in SILENT:
            return
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            raise Unsuited(f"{node.name} is a call of a nested graph")
        self.of[node] = self._marks(node)
        if not takes_item(node):
            self.calls.append(node)

    def _marks(self, node: Node) -> tuple[Any, ...]:
        value = node.meta.get("example_value")
        if value is None and node.op != "placeholder":
            if node.users or node.target is not operator.setitem:
                raise Unsuited(f"{node.name} has no known value")
            return ()
        leaves = [value] if isinstance(value, torch.Tensor) else tree_leaves(value)
        return tuple(map(mark, leaves))

    def key(self, node: Node) -> Any:
        """What a call does, whoever's values it is called with."""
        numbers = {n: i for i, n in enumerate(node.all_input_nodes)}

        def one(value: Any) -> Any:
            if isinstance(value, Node):
                return numbers[value], self.of[value]
            if isinstance(value, (tuple, list)):
                return type(value), *map(one, value)
            if isinstance(value, slice):
                return slice, one(value.start), one(value.stop), one(value.step)
            if isinstance(value, float):
                return float, value.hex()
            if isinstance(value, BY_VALUE):
                return type(value), value
            return object, id(value), id(node)  # compared with nothing

        kwargs = tuple((name, one(value)) for name, value in node.kwargs.items())
        return node.target, one(node.args), kwargs


def _mode(gm: GraphModule) -> FakeTensorMode:
    """The mode to trace in: the one that Dynamo gives its backend, which is not that of its own values."""
    context = torch._guards.TracingContext.try_get()
    if context is not None and context.fake_mode is not None:
        return context.fake_mode
    for node in gm.graph.nodes:
        for leaf in tree_leaves(node.meta.get("example_value")):
            if isinstance(leaf, FakeTensor):
                return leaf.fake_mode
    raise Unsuited("there are no fake values")


def mark(value: Any) -> tuple[Any, ...]:
    """The layout of a tensor, as far as an op can depend on it. Raises Unsuited for what has none in plain numbers."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        raise Unsuited("a value is no dense tensor")
    found = (tuple(value.shape), value.stride())
    if not all(type(n) is int for part in found for n in part):
        raise Unsuited("a size is symbolic")
    if value.requires_grad and torch.is_grad_enabled():
        raise Unsuited("gradients are recorded")
    if value.is_conj() or value.is_neg():
        raise Unsuited("a tensor is conjugated or negated by a flag")
    return *found, value.dtype, value.device, value.requires_grad


def like(layout: tuple[Any, ...], mode: FakeTensorMode) -> torch.Tensor:
    """A fake tensor of a layout."""
    shape, stride, dtype, device, grad = layout
    with mode:
        return torch.empty_strided(shape, stride, dtype=dtype, device=device, requires_grad=grad)


def takes_item(node: Node) -> bool:
    """Whether a node picks one of several results."""
    source = node.args[0] if node.target is operator.getitem else None
    value = source.meta.get("example_value") if isinstance(source, Node) else None
    return isinstance(value, (tuple, list))
