"""Steps that kernels do: linears over plain and packed weights, and attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from ...emit.cpp import region_calls as calls
from ...emit.cpp.region import Value
from ...emit.kernel import Attention, Linear, Packed
from ...graph.kv.layout import Layout
from ...graph.kv.ops import FEW
from ..kernels import LINEAR_ROWS
from ..kernels.load import describe, kv_numbers
from ..kernels.load import dtype_of as torch_dtype
from .pointwise import expression
from .scope import Scope, Unsupported, viewed


def _rows(scope: Scope, arg: Any) -> Value:
    x = scope.rows(arg)
    if x.sizes[0] > LINEAR_ROWS:
        raise Unsupported(f"{x.sizes[0]} rows: no decode step")
    if x.dtype not in ("f32", "bf16"):
        raise Unsupported(f"a linear in {x.dtype}")
    return x


def _outs(
    scope: Scope, node: Node, lead: tuple[int, ...], counts: Sequence[int], dtype: str
) -> list[Value]:
    """Room for each result of a linear, where its reader wants it."""
    several = isinstance(node.meta.get("val"), (list, tuple))
    readers = {u.args[1]: u for u in node.users} if several else {0: node}
    return [scope.shared(readers.get(i, node), (*lead, n), dtype) for i, n in enumerate(counts)]


def _fits(weight: Value, bias: Value | None, x: Value) -> None:
    if weight.dtype != x.dtype or len(weight.sizes) != 2:
        raise Unsupported("weights and input differ in dtype")
    _bias_fits(bias, weight.sizes[0], x)


def _bias_fits(bias: Value | None, n: int, x: Value) -> None:
    if bias is not None and (bias.dtype != x.dtype or bias.sizes != (n,) or bias.strides != (1,)):
        raise Unsupported("a bias that does not lie densely, in the input's dtype")


def _products(
    scope: Scope, node: Node, x: Value, weights: Sequence[Any], biases: Sequence[Any]
) -> list[Value]:
    kernel: Any = describe("linears", torch_dtype(x.dtype))
    assert isinstance(kernel, Linear)
    plain = [(scope.value(w), None if b is None else scope.value(b)) for w, b in zip(weights, biases, strict=True)]  # fmt: skip
    for w, b in plain:
        _fits(w, b, x)
    lead = scope.get(node.args[0]).sizes[:-1]
    outs = _outs(scope, node, lead, [w.sizes[0] for w, _ in plain], x.dtype)
    along = [w.strides[1] == 1 for w, _ in plain]
    if all(along):
        rows = [calls.Product(w, b, o, w.sizes[0], w.strides[0]) for (w, b), o in zip(plain, outs, strict=True)]  # fmt: skip
        calls.linear(scope.f, scope.unit, kernel, x, rows)
        return outs
    for (w, b), o in zip(plain, outs, strict=True):
        if w.strides[0] != 1:
            raise Unsupported("a weight that lies neither row by row nor column by column")
        calls.columns(scope.f, scope.unit, x, w, b, o)
    return outs


def _linears(scope: Scope, node: Node) -> list[Value]:
    weights, biases = node.args[1:3]
    return _products(scope, node, _rows(scope, node.args[0]), weights, biases)  # type: ignore[arg-type]


def _linear(scope: Scope, node: Node) -> Value:
    bias = node.args[2] if len(node.args) > 2 else None
    return _products(scope, node, _rows(scope, node.args[0]), [node.args[1]], [bias])[0]


def _linear_act(scope: Scope, node: Node) -> Any:
    act = node.args[3]
    kept, scope.results = scope.results, {}  # what is activated lies in a room of its own
    out = _linear(scope, node)
    scope.results = kept
    ops = {"gelu_tanh": (torch.ops.aten.gelu.default, {"approximate": "tanh"}), "gelu": (torch.ops.aten.gelu.default, {})}  # fmt: skip
    target, kwargs = ops.get(str(act), (getattr(torch.ops.aten, str(act)).default, {}) if hasattr(torch.ops.aten, str(act)) else (None, {}))  # fmt: skip
    made = expression(target, [out], kwargs, node.meta["val"]) if target else f"{act}"
    if isinstance(made, str):
        raise Unsupported(f"the activation {act}")
    return made


def _packed(scope: Scope, node: Node) -> list[Value]:
    x = _rows(scope, node.args[0])
    weights, biases, counts, scheme, group, low, inputs = (scope.get(a) for a in node.args[1:])
    facts = {"scheme": scheme, "group": group, "low": low, "inputs": inputs}
    kernel: Any = describe("packed_linears", torch_dtype(x.dtype), **facts)
    assert isinstance(kernel, Packed)
    outs = _outs(scope, node, scope.get(node.args[0]).sizes[:-1], counts, x.dtype)
    products = []
    for w, b, n, out in zip(weights, biases, counts, outs, strict=True):
        if not isinstance(w, Value) or w.strides != (w.sizes[1], 1) or w.sizes[0] != (n + 15) // 16:
            raise Unsupported("packed weights that do not lie as they were packed")
        _bias_fits(b, n, x)
        products.append(calls.Product(w, b, out, n, w.sizes[1]))
    calls.linear(scope.f, scope.unit, kernel, x, products)
    return outs


_DEFAULTS = {
    "mask": None,
    "scale": None,
    "causal": False,
    "softcap": 0.0,
    "sinks": None,
    "safe": True,
}


def _attention(scope: Scope, node: Node) -> Value:
    q, k, v = (scope.inner_dense(a) for a in node.args[:3])
    given = dict(zip(_DEFAULTS, node.args[3:], strict=False))
    named = {**_DEFAULTS, **given, **node.kwargs}
    mask = None if named["mask"] is None else scope.value(named["mask"])
    sinks = None if named["sinks"] is None else scope.value(named["sinks"])
    if not q.dtype == k.dtype == v.dtype or q.dtype not in ("f32", "bf16"):
        raise Unsupported("queries, keys and values differ in dtype")
    if q.sizes[2] > LINEAR_ROWS:
        raise Unsupported(f"{q.sizes[2]} query rows: no decode step")
    if mask is not None and mask.dtype not in calls.MASKS:
        raise Unsupported(f"a mask of {mask.dtype}")
    if sinks is not None and (sinks.dtype != "f32" or sinks.strides[-1:] != (1,)):
        raise Unsupported("sinks that are not f32")
    kernel: Any = describe("attention", torch_dtype(q.dtype), head_dim=q.sizes[3], value_dim=v.sizes[3])  # fmt: skip
    assert isinstance(kernel, Attention)
    batch, heads, rows, _ = q.sizes
    wide = scope.f.common(q.dtype, (batch, rows, heads, v.sizes[3]))
    out: Value = viewed(wide, lambda t: t.transpose(1, 2))
    numbers: Any = {n: named[n] for n in ("scale", "softcap", "causal", "safe")}
    calls.attention(scope.f, scope.unit, kernel, (q, k, v, mask, sinks), out, numbers)
    return out


def _kv_attention(scope: Scope, node: Node) -> Value:
    q, k, v = (scope.inner_dense(a) for a in node.args[:3])
    state, length = (scope.value(a) for a in node.args[3:5])
    mask, layout, scale, *rest = [scope.get(a) for a in node.args[5:]]
    given: list[Any] = [*rest, *(False, 0.0, None, True)[len(rest) :]]
    causal, softcap, sinks, safe = given
    facts = {
        "head_dim": k.sizes[3],
        "value_dim": v.sizes[3],
        "kv_heads": k.sizes[1],
        "layout": layout,
    }
    tokens, kept = k.sizes[2], Layout.parse(layout)
    if mask is None or causal or tokens > min(FEW, kept.recent) or q.sizes[2] != tokens:
        raise Unsupported(f"{tokens} tokens at once for a packed cache")
    if not q.dtype == k.dtype == v.dtype == kept.kept or q.sizes[3] != v.sizes[3]:
        raise Unsupported("queries, keys and values differ from what the cache keeps")
    if any(a.op != "placeholder" for a in node.args[3:5]):  # type: ignore[union-attr]
        raise Unsupported("a packed cache that is no argument")
    mask = scope.value(node.args[5])
    if mask.dtype not in calls.MASKS or (sinks is not None and sinks.dtype != "f32"):
        raise Unsupported(f"a mask of {mask.dtype}")
    kernel: Any = describe("kv_attention", torch_dtype(q.dtype), **facts)
    numbers = kv_numbers(kernel)
    cache = calls.Cache(state, length, numbers[:16], *numbers[16:22])
    for part in (state, length):
        scope.before_write(part.home, node)
    scope.caches.append((kernel, state, length, tokens))
    batch, heads, rows, _ = q.sizes
    out: Value = viewed(scope.f.common(q.dtype, (batch, rows, heads, v.sizes[3])), lambda t: t.transpose(1, 2))  # fmt: skip
    how: Any = {"scale": scale, "softcap": softcap, "causal": False, "safe": safe}
    calls.kv_attention(scope.f, scope.unit, kernel, (q, k, v, mask, sinks), cache, out, how)
    return out


KERNEL_STEPS: dict[str, Callable[[Scope, Node], Any]] = {
    "linears": _linears,
    "linear": _linear,
    "linear_act": _linear_act,
    "packed_linears": _packed,
    "attention": _attention,
    "kv_attention_": _kv_attention,
}
