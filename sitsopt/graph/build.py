"""Adding one op to a functional graph: choose the overload, compute the fake value, keep the provenance."""

from __future__ import annotations

import weakref
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


_KNOWN: weakref.WeakKeyDictionary[FakeTensorMode, dict[Any, Any]] = weakref.WeakKeyDictionary()


def signature(value: Any) -> Any:
    """What the result of an op can depend on, as a key; None when a size is symbolic."""
    if isinstance(value, torch.Tensor):
        shape, stride = tuple(value.shape), value.stride()
        if not all(type(n) is int for n in (*shape, *stride)):
            return None
        return shape, stride, value.dtype, value.device, value.storage_offset(), value.requires_grad
    if isinstance(value, (list, tuple)):
        parts = tuple(signature(v) for v in value)
        return None if None in parts else (type(value), parts)
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return None
    return type(value), value


class Builder:
    """Inserts calls at one place of a graph; `made` lists the new nodes in order."""

    def __init__(
        self, graph: Graph, mode: FakeTensorMode, like: Node | None = None, compose: bool = False
    ) -> None:
        self.graph, self.mode, self.like, self.compose = graph, mode, like, compose
        self.made: list[Node] = []

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
            return self._insert(torch.ops.aten._to_copy.default, (args[0],), {"dtype": args[1]})
        if name == "prim.getitem":
            return self.item(args[0], args[1])
        if self.compose and canonical(name) == "prim.permute":
            inner = view_of(args[0])
            if inner is not None and inner.key == "prim.permute":
                outer = permutation(name, len(inner.values[1]), args[1:])
                if outer is not None:
                    return self._permuted(inner.values[0], [inner.values[1][d] for d in outer])
        fake_args, fake_kwargs = map_arg(args, val), map_arg(kwargs, val)
        with self.mode:
            target = overload(name, fake_args, fake_kwargs)
        return self._insert(target, args, kwargs)

    def _permuted(self, base: Node, dims: list[int]) -> Node:
        if dims == list(range(len(dims))):
            return base
        return self._insert(torch.ops.aten.permute.default, (base, dims), {})

    def item(self, node: Node, index: int) -> Node:
        """Output `index` of an op with several."""
        import operator

        made = self.graph.call_function(operator.getitem, (node, index))
        made.meta["val"] = val(node)[index]
        return self._keep(made)

    def _insert(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
        value = self._value(target, map_arg(args, val), map_arg(kwargs, val))
        args, kwargs = as_nodes(self.graph, args), as_nodes(self.graph, kwargs)
        made = self.graph.call_function(target, args, kwargs)
        made.meta["val"] = value
        return self._keep(made)

    def _value(self, target: Any, args: Any, kwargs: Any) -> Any:
        """What an op gives for fake arguments; layers repeat, so equal arguments share one result."""
        key = (target, signature(args), signature(tuple(sorted(kwargs.items()))))
        known = _KNOWN.setdefault(self.mode, {})
        if None not in key and key in known:
            return known[key]
        with self.mode, torch.no_grad():
            value = target(*args, **kwargs)
        if None not in key:
            known[key] = value
        return value

    def _keep(self, made: Node) -> Node:
        if self.like is not None:
            for key in PROVENANCE:
                if key in self.like.meta:
                    made.meta[key] = self.like.meta[key]
        self.made.append(made)
        return made
