"""A `sits::` op as launches of its generated kernels: one function an op, the same for whoever runs them.

Each takes a runner and the arguments of the op, and returns new dense tensors. `NoText` is raised where no text
stands for the form at hand; that depends on shapes, dtypes and options only, never on values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from sitsopt.emit.attention import FlashAttention, Merge
from sitsopt.emit.expr import Input, Scalar, apply
from sitsopt.emit.matmul import ACTIVATIONS, Matmul
from sitsopt.emit.rope import Rope
from sitsopt.emit.rowwise import Rowwise
from sitsopt.emit.triton import attention as attention_text
from sitsopt.emit.triton import attention_merge
from sitsopt.emit.triton import matmul as matmul_text

from . import attend as att
from . import product, rows, turn
from .points import DTYPES, compute
from .runner import NoText, Runner

FEW_ROWS = 16
SITES: dict[str, Callable[..., Any]] = {}


def site(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Enter a function under the name of its op."""
    SITES[fn.__name__] = fn
    return fn


def name_of(dtype: torch.dtype) -> str:
    """The dtype as kernels call it. Raises NoText for one that they do not compute with."""
    if dtype not in DTYPES:
        raise NoText(f"no text computes with {str(dtype).removeprefix('torch.')}")
    return DTYPES[dtype]


def alike(*tensors: torch.Tensor | None) -> str:
    """The one dtype of all tensors that are there. Raises NoText where they differ."""
    given = [t.dtype for t in tensors if t is not None]
    if len(set(given)) > 1:
        raise NoText("its inputs differ in dtype")
    return name_of(given[0])


@site
def rms_norm(on: Runner, x, weight, eps, offset=0.0, round_first=True):  # type: ignore[no-untyped-def]
    """As `sits::rms_norm`."""
    kernel = _rms(x, weight, offset, round_first, False)
    return rows.normalise(on, kernel, x, eps, weight)[0]


@site
def add_rms_norm(on: Runner, x, residual, weight, eps, offset=0.0, round_first=True):  # type: ignore[no-untyped-def]
    """As `sits::add_rms_norm`."""
    _same_shape(x, residual)
    kernel = _rms(x, weight, offset, round_first, True)
    return rows.normalise(on, kernel, x, eps, weight, residual=residual)


@site
def add_layer_norm(on: Runner, x, residual, weight, bias, eps):  # type: ignore[no-untyped-def]
    """As `sits::add_layer_norm`."""
    _same_shape(x, residual)
    kernel = Rowwise(
        "layer_norm", alike(x, residual), x.shape[-1], residual=True,
        weight=_optional(weight), bias=_optional(bias),
    )  # fmt: skip
    return rows.normalise(on, kernel, x, eps, weight, bias, residual)


def _rms(
    x: torch.Tensor, weight: torch.Tensor | None, offset: float, round_first: bool, residual: bool
) -> Rowwise:
    if weight is not None and round_first and weight.dtype != x.dtype:
        raise NoText("the gain has another dtype, which the result takes on")
    if not isinstance(x.shape[-1], int):
        raise NoText("the length of a row is symbolic")
    return Rowwise(
        "rms_norm", name_of(x.dtype), x.shape[-1], residual, _optional(weight),
        offset=float(offset), round_first=round_first,
    )  # fmt: skip


def _optional(t: torch.Tensor | None) -> str:
    return "" if t is None else name_of(t.dtype)


def _same_shape(a: torch.Tensor, b: torch.Tensor) -> None:
    alike(a, b)
    if a.shape != b.shape:
        raise NoText("its inputs differ in shape")


@site
def rope(on: Runner, x, cos, sin, style="half", width=0):  # type: ignore[no-untyped-def]
    """As `sits::rope`."""
    turned = width or x.shape[-1]
    if torch.promote_types(x.dtype, cos.dtype) != x.dtype or cos.dtype != sin.dtype:
        raise NoText("the tables have another dtype, which the result takes on")
    if cos.shape[-1] * 2 == turned:
        cos, sin = (_both_of_a_pair(table, style) for table in (cos, sin))
    kernel = Rope(
        name_of(x.dtype), x.shape[-1], style, 0 if turned == x.shape[-1] else turned, name_of(cos.dtype)
    )  # fmt: skip
    return turn.rotate(on, kernel, x, cos, sin)


def _both_of_a_pair(table: torch.Tensor, style: str) -> torch.Tensor:
    return torch.cat([table, table], -1) if style == "half" else table.repeat_interleave(2, -1)


_GATES = {"swiglu": "silu", "geglu_none": "gelu", "geglu_tanh": "gelu_tanh"}


def _gated(on: Runner, name: str, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    _same_shape(gate, up)
    expr = apply("mul", apply(_GATES[name], Input("a")), Input("b"))
    return compute(on, name, expr, {"a": gate, "b": up})


@site
def swiglu(on: Runner, gate, up):  # type: ignore[no-untyped-def]
    """As `sits::swiglu`."""
    return _gated(on, "swiglu", gate, up)


@site
def geglu(on: Runner, gate, up, approximate="none"):  # type: ignore[no-untyped-def]
    """As `sits::geglu`."""
    return _gated(on, f"geglu_{approximate}", gate, up)


@site
def softcap(on: Runner, x, cap):  # type: ignore[no-untyped-def]
    """As `sits::softcap`."""
    name_of(x.dtype)
    expr = apply("mul", apply("tanh", apply("div", Input("a"), Scalar("s"))), Scalar("s"))
    return compute(on, "softcap", expr, {"a": x}, s=float(cap))


@site
def linears(on: Runner, x, weights, biases):  # type: ignore[no-untyped-def]
    """As `sits::linears`: a launch a weight."""
    return [_linear(on, x, w, b, "") for w, b in zip(weights, biases, strict=True)]


@site
def linear_act(on: Runner, x, weight, bias, act):  # type: ignore[no-untyped-def]
    """As `sits::linear_act`."""
    if act not in ACTIVATIONS:
        raise NoText(f"no text for the activation {act}")
    return _linear(on, x, weight, bias, act)


def _linear(
    on: Runner, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, act: str
) -> torch.Tensor:
    dtype = alike(x, weight, bias)
    flat = rows.as_rows(x)
    count = flat.shape[0]
    n, k = weight.shape
    few = isinstance(count, int) and count <= FEW_ROWS
    kernel = Matmul(dtype, n, k, bias=bias is not None, act=act, skinny=few)
    source = on.source(matmul_text.source, kernel)
    place = None
    if few:
        splits = product.pick_splits(kernel, source.constant("COLS"), on.units)
        source = source.tuned({"SPLITS": splits}, source.warps, source.stages)
        floats = splits * count * kernel.rows if splits > 1 else 1
        place = (
            flat.new_empty((floats,), dtype=torch.float32),
            flat.new_zeros((-(-n // source.constant("COLS")),), dtype=torch.int32),
        )
    y = flat.new_empty((count, n))
    around = product.Around(bias=None if bias is None else bias.contiguous())
    packed = product.Weight(weight.contiguous())
    product.multiply(
        on.run, kernel, flat, packed, around, y, units=on.units, source=source, place=place
    )
    return y.reshape(*x.shape[:-1], n)


@site
def attention(on: Runner, q, k, v, mask, scale, causal=False, softcap=0.0, sinks=None, safe=True):  # type: ignore[no-untyped-def]
    """As `sits::attention`."""
    kernel = _attention_kernel(q, k, v, mask, causal, softcap, sinks, safe)
    q, k, v = (t if t.stride(3) == 1 else t.contiguous() for t in (q, k, v))
    batch, heads, tokens, _ = q.shape
    keys = k.shape[2]
    extras = att.Extras(scale=float(scale), softcap=float(softcap))
    extras.mask = None if mask is None else mask.expand(batch, heads, tokens, keys)
    extras.sinks = None if sinks is None else sinks.reshape(-1).float()
    out = q.new_empty((batch, heads, tokens, v.shape[-1]))
    source = on.source(attention_text.source, kernel)
    if not kernel.splits:
        att.attend(on.run, kernel, q, att.Cache(k, v), keys, extras, out=out, source=source)
        return out
    pairs = batch * k.shape[1]
    known = isinstance(pairs, int) and isinstance(keys, int)
    splits = att.pick_splits(pairs, keys, on.units) if known else 16
    parts = att.empty_parts(q, k.shape[1], v.shape[-1], splits)
    att.attend(
        on.run, kernel, q, att.Cache(k, v), keys, extras, splits=splits, parts=parts, source=source
    )
    joined = Merge(kernel.dtype, kernel.value_dim, kernel.group, sinks is not None, kernel.empty)
    merge_source = on.source(attention_merge.source, joined)
    att.merge(on.run, joined, parts, out, extras.sinks, merge_source)
    return out


def _attention_kernel(  # type: ignore[no-untyped-def]
    q, k, v, mask, causal, softcap, sinks, safe
) -> FlashAttention:
    dtype = alike(q, k, v)
    sizes = (q.shape[1], k.shape[1], q.shape[-1], v.shape[-1])
    if not all(isinstance(size, int) for size in sizes):
        raise NoText("heads or their size are symbolic")
    group, tokens = q.shape[1] // k.shape[1], q.shape[2]
    name = ""
    if mask is not None:
        name = "i1" if mask.dtype == torch.bool else name_of(mask.dtype)
    far = any(isinstance(t.numel(), int) and t.numel() > rows.WIDE for t in (q, k, v, mask) if t is not None)  # fmt: skip
    return FlashAttention(
        dtype, q.shape[-1], v.shape[-1], group, causal=bool(causal), softcap=softcap != 0.0, mask=name,
        sinks=sinks is not None, splits=isinstance(tokens, int) and tokens * group <= FEW_ROWS,
        empty="zero" if safe else "nan", wide=far,
    )  # fmt: skip


def names(launches: Sequence[Any]) -> str:
    """The kernels of some launches, each once."""
    return ", ".join(dict.fromkeys(launch.source.name for launch in launches))
