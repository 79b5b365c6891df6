"""One canonical reading of an FX call, so that spellings of the same op compare equal.

`transpose`, `t`, `permute` and `mT` are one permutation; `view`, `reshape` and `_unsafe_view` are one reshape to
the size of the output; dims count from the front; a slice ends where its dimension ends.
"""

from __future__ import annotations

import operator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from ..spec.ops import OpFact, resolve
from .facts import tensor

aten = torch.ops.aten
PRIMS = ("cast", "permute", "reshape")  # families of ops that are read as one


class OpView(NamedTuple):
    """`key` is the canonical op name; `names` and `values` its arguments in schema order; `defaults` says
    which argument may be left out of a pattern (the index of the first one that has a default)."""

    key: str
    overload: str
    names: tuple[str, ...]
    values: tuple[Any, ...]
    defaults: tuple[Any, ...]


REQUIRED = object()


@cache
def canonical(name: str) -> str:
    """The key under which ops spelled `name` are indexed."""
    base = ".".join(name.split(".")[:2])
    fact = resolve(base)
    return f"prim.{fact.family}" if fact and fact.family in PRIMS else base


def permutation(name: str, rank: int, args: tuple[Any, ...]) -> tuple[int, ...] | None:
    """The permutation that a call spelled `name` means on a value of this rank, or None if it is no valid one."""
    base = name.split(".")[1]
    order = list(range(rank))
    try:
        if base == "permute":
            order = [_within(d, rank) for d in args[0]]
        elif base in ("t", "mT", "numpy_T"):
            if base == "mT" or (base == "t" and rank == 2):
                order[-1], order[-2] = order[-2], order[-1]
            elif base == "numpy_T":
                order.reverse()
        else:
            a, b = _within(args[0], rank), _within(args[1], rank)
            order[a], order[b] = order[b], order[a]
    except (IndexError, TypeError, ZeroDivisionError):
        return None
    return tuple(order) if sorted(order) == list(range(rank)) else None


def _within(dim: int, rank: int) -> int:
    """A dim counted from the front. Raises IndexError where there is no such dim."""
    if not -rank <= dim < rank:
        raise IndexError(dim)
    return dim % rank


def view_of(node: Node) -> OpView | None:
    """The canonical reading of a node, or None for anything that is not a call of an op. Cached on the node."""
    cached = node.meta.get("sits_view")
    if cached is not None and cached[0] is node.target and cached[1] is node.args:
        view: OpView | None = cached[2]
        return view
    view = _read(node)
    node.meta["sits_view"] = (node.target, node.args, view)
    return view


def key_of(node: Node) -> str:
    """The index key of a node; "" when it is no op."""
    if node.op != "call_function":
        return ""
    target = node.target
    known = _KEYS.get(id(target))  # hashing an op runs Python code
    if known is None or known[0] is not target:
        known = _KEYS[id(target)] = target, _plain_key(target)
    if known[1] is not None:
        return known[1]
    view = view_of(node)
    return view.key if view else ""


_KEYS: dict[int, tuple[Any, str | None]] = {}


def _plain_key(target: Any) -> str | None:
    """The key of an op where its name alone gives it; None where the arguments decide."""
    if target is operator.getitem:
        return "prim.getitem"
    if not isinstance(target, torch._ops.OpOverload):
        return ""
    name, fact = _fact(target)
    return None if fact and fact.family else name


def _read(node: Node) -> OpView | None:
    target = node.target
    if target is operator.getitem:
        return OpView("prim.getitem", "", ("self", "index"), tuple(node.args), (REQUIRED, REQUIRED))
    if not isinstance(target, torch._ops.OpOverload):
        return None
    name, fact = _fact(target)
    family = fact.family if fact else ""
    if family == "cast":
        return _cast(node)
    if family == "permute":
        base = tensor(node.args[0])
        order = permutation(name, base.dim(), tuple(node.args[1:])) if base is not None else None
        if order is None:
            return None
        return OpView("prim.permute", "", ("self", "dims"), (node.args[0], order), (REQUIRED,) * 2)
    if family in ("reshape", "expand"):
        out = tensor(node)
        if out is None:
            return None
        sizes = tuple(out.shape)
        key = "aten.expand" if family == "expand" else "prim.reshape"
        return OpView(key, "", ("self", "size"), (node.args[0], sizes), (REQUIRED,) * 2)
    return _by_schema(node, name, target)


@cache
def _fact(target: torch._ops.OpOverload) -> tuple[str, OpFact | None]:
    """The name of an op without its overload, and what is known of the overload."""
    name = f"{target.namespace}.{target._schema.name.split('::')[1]}"
    return name, resolve(f"{name}.{target._overloadname}")


def _cast(node: Node) -> OpView | None:
    """A pure dtype change; a copy that also moves device, layout or memory format stays its own op."""
    args: Any = node.args
    kwargs: Any = node.kwargs
    dtype: Any
    if node.target is aten.type_as.default:
        like, src = tensor(node.args[1]), tensor(node.args[0])
        dtype = like.dtype if like is not None else None
        plain = like is not None and src is not None and like.device == src.device
    elif node.target is aten.to.dtype:
        dtype, rest = args[1], tuple(args[2:]) + tuple(kwargs.values())
        plain = not any(rest)
    else:
        dtype = kwargs.get("dtype")
        src = tensor(node.args[0])
        device = kwargs.get("device")
        same_device = device is None or (src is not None and torch.device(device) == src.device)
        other = {k: v for k, v in kwargs.items() if k not in ("dtype", "device") and v}
        other = {k: v for k, v in other.items() if not (k == "layout" and v is torch.strided)}
        plain = same_device and not other
    if dtype is None or not plain:
        return _by_schema(node, "aten._to_copy_other", node.target)
    return OpView("prim.cast", "", ("self", "dtype"), (node.args[0], dtype), (REQUIRED,) * 2)


@cache
def _arguments(target: Any) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """Names and defaults of an op's arguments."""
    arguments = target._schema.arguments
    return tuple(a.name for a in arguments), tuple(
        a.default_value if a.has_default_value() else REQUIRED for a in arguments
    )


def _by_schema(node: Node, name: str, target: Any) -> OpView:
    names, defaults = _arguments(target)
    values, kwargs = list(node.args), node.kwargs
    for i in range(len(values), len(names)):
        absent = None if defaults[i] is REQUIRED else defaults[i]
        values.append(kwargs.get(names[i], absent))
    dims = dim_args(name)
    if dims:
        rank = rank_of(node, name)
        counted = [n in dims for n in names]
        values = [front(v, rank) if c else v for v, c in zip(values, counted, strict=True)]
        defaults = tuple(front(v, rank) if c else v for v, c in zip(defaults, counted, strict=True))
    if name == "aten.slice":
        values = _clamped(node, values)
    return OpView(name, target._overloadname, names, tuple(values), defaults)


def dim_args(key: str) -> frozenset[str]:
    """The arguments of an op that count dimensions."""
    fact = resolve(key)
    return fact.dims if fact else frozenset()


def rank_of(node: Node, key: str) -> int | None:
    """The rank that the dims of a call count in, or None where it is unknown."""
    first = node.args[0] if node.args else None
    if isinstance(first, (list, tuple)) and first:
        first = first[0]
    base = tensor(first)
    fact = resolve(key)
    return None if base is None else base.dim() + (fact.extra_rank if fact else 0)


def front(value: Any, rank: int | None) -> Any:
    """A dim, or a list of dims, counted from the front; one that does not exist stays as it is."""
    if rank and isinstance(value, int) and not isinstance(value, bool):
        return value % rank if -rank <= value < rank else value
    if rank and isinstance(value, (list, tuple)):
        return tuple(front(v, rank) for v in value)
    return value


def _clamped(node: Node, values: list[Any]) -> list[Any]:
    """`x[..., a:b]` with both ends inside the dimension, where the sizes are numbers."""
    base = tensor(node.args[0])
    if base is None:
        return values
    size = base.shape[values[1]] if base.dim() else 1
    start, end = values[2], values[3]
    if isinstance(size, int) and (start is None or isinstance(start, int)):
        start = 0 if start is None else max(0, start + size if start < 0 else min(start, size))
        if end is None or isinstance(end, int):
            end = size if end is None else max(0, end + size if end < 0 else min(end, size))
    elif end is None or (isinstance(end, int) and end >= 2**62):
        end = size
        start = 0 if start is None else start
    return [values[0], values[1], start, end, *values[4:]]
