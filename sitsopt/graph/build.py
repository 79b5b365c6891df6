"""Adding one op to a functional graph: choose the overload, compute the fake value, keep the provenance."""

from __future__ import annotations

import operator
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from .facts import tensor, val
from .opview import canonical, permutation, view_of
from .sizes import as_nodes

PROVENANCE = ("stack_trace", "nn_module_stack", "source_fn_stack", "custom")


def fake_mode(gm: GraphModule) -> FakeTensorMode:
    """The mode that the graph's fake values belong to; a new one for a graph of plain values."""
    for node in gm.graph.nodes:
        for leaf in tree_leaves(val(node)):
            if isinstance(leaf, torch._subclasses.FakeTensor):
                return leaf.fake_mode
    return FakeTensorMode(allow_non_fake_inputs=True)


def overload(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The op overload that `namespace.name` means for these values.

    Raises LookupError when the op does not exist or takes no such arguments.
    """
    space, base, *rest = name.split(".")
    packet = getattr(getattr(torch.ops, space), base, None)
    if packet is None:
        raise LookupError(f"no op {name}")
    if rest:
        return getattr(packet, rest[0])
    names = packet.overloads()
    if len(names) == 1:
        return getattr(packet, names[0])
    chosen = torch._C._jit_resolve_packet(packet._qualified_op_name, *args, **kwargs)
    return getattr(packet, chosen)


@dataclass
class _Known:
    """What is known of calls under one fake mode: layers repeat, so equal arguments share one overload and result."""

    calls: dict[Any, tuple[Any, Any]] = field(default_factory=dict)
    layouts: dict[int, tuple[torch.Tensor, Any]] = field(default_factory=dict)  # by id, kept alive


_KNOWN: weakref.WeakKeyDictionary[FakeTensorMode, _Known] = weakref.WeakKeyDictionary()


def _signature(value: Any, known: _Known) -> Any:
    """What the result of an op can depend on, as a key; None when a size is symbolic."""
    if isinstance(value, torch.Tensor):
        found = known.layouts.get(id(value))
        if found is None:
            found = known.layouts[id(value)] = (value, _layout(value))
        return found[1]
    if isinstance(value, (list, tuple)):
        parts = tuple(_signature(v, known) for v in value)
        return None if None in parts else (type(value), parts)
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return None
    return type(value), value


def _layout(value: torch.Tensor) -> Any:
    shape, stride = tuple(value.shape), value.stride()
    if not all(type(n) is int for n in (*shape, *stride)):
        return None
    return shape, stride, value.dtype, value.device, value.storage_offset(), value.requires_grad


class Builder:
    """Inserts calls at one place of a graph; `made` lists the new nodes in order."""

    def __init__(
        self, graph: Graph, mode: FakeTensorMode, like: Node | None = None, compose: bool = False
    ) -> None:
        self.graph, self.mode, self.like, self.compose = graph, mode, like, compose
        self.made: list[Node] = []
        self.known = _KNOWN.setdefault(mode, _Known())

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Node:
        """One op over nodes and constants. A cast to the dtype a value has is the value itself; with `compose`, a
        transpose of a transpose is one permutation, or nothing.

        Raises what the op raises for bad shapes or dtypes.
        """
        kwargs = kwargs or {}
        if name == "prim.cast":
            value = tensor(args[0])
            if value is not None and value.dtype == args[1]:
                node: Node = args[0]
                return node
            return self._insert("aten._to_copy.default", (args[0],), {"dtype": args[1]})
        if name == "prim.getitem":
            return self.item(args[0], args[1])
        if self.compose and canonical(name) == "prim.permute":
            inner = view_of(args[0])
            if inner is not None and inner.key == "prim.permute":
                outer = permutation(name, len(inner.values[1]), args[1:])
                if outer is not None:
                    return self._permuted(inner.values[0], [inner.values[1][d] for d in outer])
        return self._insert(name, args, kwargs)

    def _permuted(self, base: Node, dims: list[int]) -> Node:
        if dims == list(range(len(dims))):
            return base
        return self._insert("aten.permute", (base, dims), {})

    def item(self, node: Node, index: int) -> Node:
        """Output `index` of an op with several."""
        made = self.graph.call_function(operator.getitem, (node, index))
        made.meta["val"] = val(node)[index]
        return self._keep(made)

    def _insert(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
        fakes, keywords = map_arg(args, val), map_arg(kwargs, val) if kwargs else kwargs
        known = self.known
        key = name, _signature(fakes, known), _signature(tuple(sorted(keywords.items())), known)
        found = known.calls.get(key)
        if found is None:
            with self.mode, torch.no_grad():
                target = overload(name, fakes, keywords)
                found = target, target(*fakes, **keywords)
            if None not in key:
                known.calls[key] = found
            args, kwargs = as_nodes(self.graph, args), as_nodes(self.graph, kwargs)
        made = self.graph.call_function(found[0], args, kwargs)
        made.meta["val"] = found[1]
        return self._keep(made)

    def _keep(self, made: Node) -> Node:
        if self.like is not None:
            for key in PROVENANCE:
                if key in self.like.meta:
                    made.meta[key] = self.like.meta[key]
        self.made.append(made)
        return made
