"""How each op of a decode graph is written: a view, an expression, a step of a kernel, or its reference's ops."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_flatten, tree_unflatten

from ...emit.cpp.region import Function, Lazy, Operand, Value, broadcast, number
from ...emit.cpp.region_calls import within
from ...graph.facts import tensor
from ...graph.ops import REFERENCES
from .kernels import KERNEL_STEPS
from .pointwise import expression, known
from .scope import Scope, Sym, Unsupported, dtype_of, viewed

aten = torch.ops.aten
Step = Callable[[Scope, Node], Any]
VIEWS = {
    "view", "reshape", "_unsafe_view", "transpose", "t", "permute", "unsqueeze", "squeeze", "expand", "slice", "select",
    "split", "split_with_sizes", "chunk", "unbind", "flatten", "unflatten", "narrow", "movedim",
}  # fmt: skip
SAME = {"alias", "detach", "clone", "contiguous", "lift_fresh_copy", "lift_fresh", "dropout"}


def step(scope: Scope, node: Node) -> Any:
    """Write one node. Raises Unsupported."""
    target: Any = node.target
    if target in (operator.add, operator.sub, operator.mul, torch.sym_max, torch.sym_min):
        return _size(scope, node)
    space = getattr(target, "namespace", "")
    if space not in ("aten", "sits", "sits_cpp"):
        raise Unsupported(f"{getattr(target, '__name__', target)} is none of a region's ops")
    name = target._schema.name.split("::")[1]
    if name in KERNEL_STEPS:
        return KERNEL_STEPS[name](scope, node)
    if space != "aten":
        return _reference(scope, node, name)
    if name in _STEPS:
        return _STEPS[name](scope, node)
    if name in VIEWS:
        return _view(scope, node)
    if name in SAME:
        return scope.get(node.args[0])
    if known(name):
        return _pointwise(scope, node)
    raise Unsupported(f"aten.{name} is none of a region's ops")


def _fake(node: Node) -> torch.Tensor:
    fake = tensor(node)
    if fake is None:
        raise Unsupported(f"{node} is no tensor")
    if any(type(n) is not int for n in (*fake.shape, *fake.stride())):
        raise Unsupported("a size varies")
    return fake


def _size(scope: Scope, node: Node) -> Sym:
    def tree(arg: Any) -> Any:
        return arg.tree if isinstance(arg, Sym) else ("const", arg)

    left, right = (tree(scope.get(a)) for a in node.args)
    return Sym((node.target.__name__, left, right))  # type: ignore[union-attr]


def _plain(args: Any) -> None:
    if any(isinstance(a, Sym) for a in tree_flatten(args)[0]):
        raise Unsupported("a size varies")


def _view(scope: Scope, node: Node) -> Any:
    target: Any = node.target
    value = scope.value(node.args[0])
    rest = scope.get(node.args[1:])
    _plain((rest, node.kwargs))
    found = viewed(value, lambda t: target(t, *rest, **node.kwargs))
    if found is None:
        dense = scope.f.own(value.dtype, value.sizes)
        scope.f.store(value, dense)
        found = viewed(dense, lambda t: target(t, *rest, **node.kwargs))
    if found is None:
        raise Unsupported(f"{target} makes no view")
    return found


def _pointwise(scope: Scope, node: Node) -> Lazy:
    fake = _fake(node)
    count = fake.numel()

    def operand(arg: Any) -> Any:
        found = scope.get(arg)
        if isinstance(found, Sym):
            return scope.number(found)
        spread = (
            isinstance(found, Lazy) and found.cost >= 2 and torch.Size(found.sizes).numel() < count
        )
        return scope.value(arg) if spread else found

    args = [operand(a) for a in node.args]
    made = expression(node.target, args, dict(node.kwargs), fake)
    if isinstance(made, str):
        raise Unsupported(f"{made}: not in a region")
    return made


def _reference(scope: Scope, node: Node, name: str) -> Any:
    """The ops of a reference, in place of its op."""
    fn: Any = REFERENCES.get(name)
    if fn is None:
        raise Unsupported(f"{node.target} is none of a region's ops")
    leaves, form = tree_flatten((node.args, dict(node.kwargs)))
    nodes = [leaf for leaf in leaves if isinstance(leaf, Node)]
    fakes = [_fake(n) for n in nodes]
    shown = [("", tuple(f.shape), f.stride(), f.dtype) for f in fakes]
    plain = [repr(leaf) for leaf in leaves if not isinstance(leaf, Node)]
    key = (name, str(form), tuple(shown), tuple(plain))
    gm = scope.inlined.get(key)
    if gm is None:
        gm = scope.inlined[key] = _traced(fn, leaves, form, fakes)
    inner = Scope(scope.f, scope.unit, scope.inlined)
    for place, n in zip(gm.graph.find_nodes(op="placeholder"), nodes, strict=True):
        inner.env[place] = scope.value(n) if len(place.users) > 1 else scope.get(n)
    results = [inner.env[r] for r in inner.run(gm.graph, step)]
    value = node.meta.get("val")
    return results if isinstance(value, (list, tuple)) else results[0]


def _traced(fn: Any, leaves: list[Any], form: Any, fakes: list[torch.Tensor]) -> GraphModule:
    from torch._guards import TracingContext, tracing
    from torch.fx.experimental.proxy_tensor import make_fx

    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Node)]

    def flat(*tensors: torch.Tensor) -> list[Any]:
        filled = list(leaves)
        for i, t in zip(places, tensors, strict=True):
            filled[i] = t
        args, kwargs = tree_unflatten(filled, form)
        result = fn(*args, **kwargs)
        return list(result) if isinstance(result, (tuple, list)) else [result]

    ghosts = [torch.empty_strided(f.shape, f.stride(), dtype=f.dtype, device="meta") for f in fakes]
    with tracing(TracingContext(None)), torch.no_grad():  # type: ignore[arg-type]
        made: GraphModule = make_fx(flat)(*ghosts)
    return made


def _cat(scope: Scope, node: Node) -> Value:
    fake = _fake(node)
    pieces: list[Operand] = scope.get(node.args[0])
    given: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    dim = given % max(fake.dim(), 1)
    whole = scope.f.own(dtype_of(node), tuple(fake.shape))
    at = 0
    for piece in pieces:
        if len(piece.sizes) != fake.dim():
            raise Unsupported("a cat of tensors of unlike rank")
        size = piece.sizes[dim]
        part = viewed(whole, partial(torch.narrow, dim=dim, start=at, length=size))
        scope.f.store(piece, part)
        at += size
    return whole


def _embedding(scope: Scope, node: Node) -> Value:
    table, places = scope.value(node.args[0]), scope.value(node.args[1])
    result = scope.f.own(table.dtype, (*places.sizes, table.sizes[1]))
    scope.f.access(places.reads() | table.reads())
    with scope.f.loops(places.sizes) as index:
        scope.f.line(f"int64_t row = {places.read(index)};")
        within(scope.f, "row", table.sizes[0])
        head = f"for (int64_t j = 0; j < {table.sizes[1]}; j++)"
        scope.f.line(f"{head} {result.at((*index, 'j'))} = {table.at(('row', 'j'))};")
    return result


def _arange(scope: Scope, node: Node) -> Lazy:
    fake = _fake(node)
    bounds = [a for a in node.args if isinstance(a, (int, float))]
    start = bounds[0] if len(bounds) > 1 else 0
    pace = bounds[2] if len(bounds) > 2 else 1
    if dtype_of(node) != "i64" or not isinstance(start, int) or not isinstance(pace, int):
        raise Unsupported("an arange that is not of integers")
    return Lazy("i64", tuple(fake.shape), lambda i: f"({start}LL + ({i[0]}) * {pace}LL)", cost=0)


def _constant(scope: Scope, node: Node) -> Lazy:
    fake, name = _fake(node), node.target._schema.name.split("::")[1]  # type: ignore[union-attr]
    values = {"zeros": 0, "ones": 1}
    kind = name.removeprefix("new_").removesuffix("_like")
    place = 0 if name == "scalar_tensor" else 2 if name == "new_full" else 1
    value = values[kind] if kind in values else node.args[place]
    if not isinstance(value, (int, float)):
        raise Unsupported("a fill that varies")
    dtype = dtype_of(node)
    text = number(float(value) if dtype in ("f32", "bf16") else int(value))
    return Lazy(dtype, tuple(fake.shape), lambda i: text, cost=0)


def _mean(scope: Scope, node: Node) -> Operand:
    operand = scope.get(node.args[0])
    rank = len(operand.sizes)
    dims: Any = node.args[1] if len(node.args) > 1 else list(range(rank))
    if [d % rank for d in dims] != [rank - 1]:
        raise Unsupported("a sum over other dims than the last")
    if operand.dtype not in ("f32", "bf16") or dtype_of(node) not in ("f32", "bf16"):
        raise Unsupported("a sum of integers")
    keep = bool(node.args[2]) if len(node.args) > 2 else bool(node.kwargs.get("keepdim", False))
    mean = node.target._schema.name == "aten::mean"  # type: ignore[union-attr]
    found = scope.f.sum(operand, keep, 1.0 / operand.sizes[-1] if mean else 1.0)
    return found if dtype_of(node) == "f32" else _as(found, dtype_of(node))


def _as(value: Operand, dtype: str) -> Lazy:
    return Lazy(dtype, value.sizes, value.read, frozenset(value.reads()), 0)


def _layer_norm(scope: Scope, node: Node) -> list[Any]:
    x, shape, weight, bias, eps = (scope.get(a) for a in node.args)
    if len(shape) != 1:
        raise Unsupported("a layer norm over several dims")
    f, x = scope.f, scope.value(node.args[0])
    mean = f.sum(x, True, 1.0 / x.sizes[-1])
    at: Callable[[Any], Any] = lambda i: (*i[:-1], "0")  # noqa: E731
    centred = lambda i: f"({x.read(i)} - {mean.at(at(i))})"  # noqa: E731
    homes = frozenset(x.reads())
    square = Lazy("f32", x.sizes, lambda i: f"square({centred(i)})", homes, 2)
    spread = f.sum(square, True, 1.0 / x.sizes[-1])
    scale = f.own("f32", spread.sizes)
    f.store(
        Lazy("f32", spread.sizes, lambda i: f"(1.0f / sqrtf({spread.at(i)} + {number(eps)}))"),
        scale,
    )

    def text(i: Any) -> str:
        made = f"{centred(i)} * {scale.at(at(i))}"
        made = f"{made} * {weight.read(i[-1:])}" if weight is not None else made
        return f"({made} + {bias.read(i[-1:])})" if bias is not None else f"({made})"

    used = [v for v in (weight, bias) if v is not None]
    homes |= {h for v in used for h in v.reads()}
    return [Lazy(x.dtype, x.sizes, text, homes, 6), mean, scale]


def _index(scope: Scope, node: Node) -> Value:
    """Elements of a tensor by an index for each dim."""
    source, f = scope.value(node.args[0]), scope.f
    given: Any = node.args[1]
    if len(given) != len(source.sizes) or any(g is None for g in given):
        raise Unsupported("an index that leaves a dim whole")
    places = [scope.get(g) for g in given]
    if any(p.dtype != "i64" for p in places):
        raise Unsupported("an index of truth values")
    made = f.own(source.dtype, tuple(_fake(node).shape))
    f.access(source.reads() | {h for p in places for h in p.reads()})
    with f.loops(made.sizes) as i:
        names = []
        for place, size in zip(places, source.sizes, strict=True):
            names.append(_wrapped(f, place.read(broadcast(place, i)), size))
        f.line(f"{made.at(i)} = {source.at(tuple(names))};")
    return made


def _wrapped(f: Function, index: str, size: int) -> str:
    """A name for an index that may count from the end. All members give up where it is out of range."""
    f.names += 1
    name = f"n{f.names}"
    f.line(f"int64_t {name} = {index};")
    f.line(f"if ({name} < 0) {name} += {size};")
    within(f, name, size)
    return name


def _roll(scope: Scope, node: Node) -> Lazy:
    value, (shifts, dims) = scope.value(node.args[0]), node.args[1:3]
    if len(shifts) != 1 or len(dims) != 1 or not isinstance(shifts[0], int):  # type: ignore[arg-type, index]
        raise Unsupported("a roll along several dims")
    dim, size = dims[0] % len(value.sizes), value.sizes[dims[0]]  # type: ignore[index, operator]
    shift = -shifts[0] % size  # type: ignore[index, operator]

    def text(i: Any) -> str:
        at = f"(({i[dim]} + {shift}) % {size})"
        return value.read((*i[:dim], at, *i[dim + 1 :]))

    return Lazy(value.dtype, value.sizes, text, frozenset(value.reads()), 3)


def _index_put(scope: Scope, node: Node) -> Value:
    """A window that moves on by one: `roll` by -1, a new last row, and the copy back, done in place."""
    given: Any = node.args
    rolled, indices, source = given[:3]
    along = [d for d, index in enumerate(indices) if index is not None]
    into = rolled.args[0] if rolled.target is aten.roll.default else rolled
    cache, new = scope.value(into), scope.value(source)
    rank, f = len(cache.sizes), scope.f
    moves = rolled.target is aten.roll.default and rolled.args[1] == [-1] and along == [rank - 2]
    if not moves or [d % rank for d in rolled.args[2]] != along or len(rolled.users) != 1:
        raise Unsupported("an index_put that is not of a moving window")
    if len(given) > 3 and given[3]:
        raise Unsupported("an index_put that adds up")
    place = scope.value(indices[along[0]])
    row_sizes = (*cache.sizes[:-2], 1, cache.sizes[-1])
    if place.count != 1 or torch.broadcast_shapes(new.sizes, row_sizes) != row_sizes:
        raise Unsupported("a window that moves on by several rows")
    _ends_here(node, into)
    scope.before_write(cache.home, node)
    f.access(place.reads() | new.reads(), {cache.home})
    rows, width = cache.sizes[-2:]
    with f.block(""):
        row = _wrapped(f, place.read(("0",) * len(place.sizes)), rows)
        f.line(f"int64_t first = {width} * id / team, last = {width} * (id + 1) / team;")
        with f.loops(cache.sizes[:-2]) as i:
            start = f"&{cache.at((*i, '0', '0'))}"
            f.line(f"shift_rows({start}, {rows - 1}, {cache.strides[-2]}, first, last);")
            with f.block("for (int64_t j = first; j < last; j++)"):
                f.line(f"{cache.at((*i, row, 'j'))} = {new.at(broadcast(new, (*i, '0', 'j')))};")
    return cache


def _ends_here(node: Node, into: Node) -> None:
    """Whether the graph ends with what `node` makes of `into` being copied there, and nobody reads what was there."""
    order = {n: i for i, n in enumerate(node.graph.nodes)}
    made = [node, *(u for u in node.users if u.target is aten.copy.default and u.args == (into, node))]  # fmt: skip
    back = [u for u in into.users if u in made or (u.target is aten.copy_.default and u.args[1] in made)]  # fmt: skip
    late = [u for u in into.users if u not in back and order[u] > order[node]]
    written = any(u.target is aten.copy_.default for u in back)
    if into.op != "placeholder" or not written or late:
        name = getattr(node.target, "__name__", "op").split(".")[0]
        raise Unsupported(f"an {name} that does not end where it began")


def _copied(scope: Scope, node: Node) -> Operand:
    """The values of the second, as the first has them."""
    into, new = _fake(node), scope.get(node.args[1])
    if new.sizes != tuple(into.shape) or new.dtype != dtype_of(node):
        raise Unsupported("a copy that changes a tensor's form")
    return new  # type: ignore[no-any-return]


def _index_copy(scope: Scope, node: Node) -> Value:
    """In place, where the graph ends with the copy back."""
    given: Any = node.args
    into, dim, index, source = given
    _ends_here(node, into)
    cache, f = scope.value(into), scope.f
    scope.before_write(cache.home, node)
    places, new = scope.value(index), scope.value(source)
    dim %= len(cache.sizes)
    f.access(places.reads())
    with f.loops(places.sizes) as i:
        within(f, places.read(i), cache.sizes[dim])
    f.access(places.reads() | new.reads(), cache.reads())
    with f.block("if (id == 0)"), f.loops(new.sizes) as i:
        to = list(i)
        to[dim] = places.read((i[dim],) if places.sizes else ())
        f.line(f"{cache.at(tuple(to))} = {new.at(i)};")
    return cache


def _copy(scope: Scope, node: Node) -> Value:
    into = scope.value(node.args[0])
    if node.args[0].op != "placeholder":  # type: ignore[union-attr]
        raise Unsupported("a copy into what is no argument")
    found = scope.get(node.args[1])
    if found == into:
        return into  # it was written in place
    scope.before_write(into.home, node)
    new = scope.get(node.args[1])
    if into.home in new.reads() and new.sizes != ():
        new = scope.f.settled(new) if isinstance(new, Lazy) else new
    scope.f.store(new, into)
    return into


_STEPS: dict[str, Step] = {
    "cat": _cat,
    "embedding": _embedding,
    "arange": _arange,
    "zeros": _constant, "ones": _constant, "full": _constant, "scalar_tensor": _constant,
    "zeros_like": _constant, "ones_like": _constant, "full_like": _constant,
    "new_zeros": _constant, "new_ones": _constant, "new_full": _constant,
    "index": _index,
    "roll": _roll,
    "index_put": _index_put,
    "copy": _copied,
    "mean": _mean, "sum": _mean,
    "native_layer_norm": _layer_norm,
    "index_copy": _index_copy,
    "copy_": _copy,
}  # fmt: skip
