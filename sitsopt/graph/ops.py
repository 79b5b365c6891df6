"""The `sits::` ops: each one is its reference, in plain PyTorch, exactly as models spell it.

A rule recomposes many spellings into one of these. Lowering gives a site its kernel; where there is none the body here
is what AOTAutograd traces and Inductor compiles, gradients included (the ops are CompositeImplicitAutograd).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from . import archived, calibrated, kept, packed, released
from .kv import ops as kv_ops

LIB = torch.library.Library("sits", "DEF")
REFERENCES: dict[str, object] = {}


def op(schema: str):  # type: ignore[no-untyped-def]
    """Register a reference under a schema."""

    def wrap(fn):  # type: ignore[no-untyped-def]
        name = schema.split("(")[0]
        LIB.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        LIB.impl(name, fn, "CompositeImplicitAutograd")
        REFERENCES[name] = fn
        return fn

    return wrap


@op(
    "rms_norm(Tensor x, Tensor? weight, float eps, float offset=0.0, bool round_first=True) -> Tensor"
)
def rms_norm(x, weight, eps, offset=0.0, round_first=True):  # type: ignore[no-untyped-def]
    """x / sqrt(mean(x^2) + eps) * (offset + weight) over the last dim, in f32 (Zhang & Sennrich, 2019).

    round_first: round the normalised value to x's dtype before the gain (Llama), or after it (Gemma, torch).
    """
    wide = x.to(torch.float32)
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return normed.to(x.dtype)
    if round_first:
        gain = weight if offset == 0.0 else weight + offset
        return gain * normed.to(x.dtype)
    gain = weight.to(torch.float32)
    return (normed * (gain if offset == 0.0 else gain + offset)).to(x.dtype)


@op(
    "add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps, float offset=0.0,"
    " bool round_first=True) -> (Tensor, Tensor)"
)
def add_rms_norm(x, residual, weight, eps, offset=0.0, round_first=True):  # type: ignore[no-untyped-def]
    """(rms_norm(x + residual), x + residual): the sum lives on as the next residual."""
    total = x + residual
    return rms_norm(total, weight, eps, offset, round_first), total


@op(
    "add_layer_norm(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor)"
)
def add_layer_norm(x, residual, weight, bias, eps):  # type: ignore[no-untyped-def]
    """(layer_norm(x + residual), x + residual) over the last dim."""
    total = x + residual
    return F.layer_norm(total, total.shape[-1:], weight, bias, eps), total


@op('rope(Tensor x, Tensor cos, Tensor sin, str style="half", int width=0) -> Tensor')
def rope(x, cos, sin, style="half", width=0):  # type: ignore[no-untyped-def]
    """Rotary embedding (Su et al., 2021) on the last dim; cos and sin broadcast against x.

    half: pairs (i, i + D/2), as in transformers; interleaved: pairs (2i, 2i + 1), as in the paper. width: only that
    many first elements turn, the rest passes. Tables of half the width hold one column a pair.
    """
    if width and width != x.shape[-1]:
        return torch.cat([rope(x[..., :width], cos, sin, style), x[..., width:]], dim=-1)
    half = x.shape[-1] // 2
    if cos.shape[-1] == half:
        cos, sin = _both_of_a_pair(cos, style), _both_of_a_pair(sin, style)
    if style == "half":
        turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    else:
        turned = torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)
    return x * cos + turned * sin


def _both_of_a_pair(table, style):  # type: ignore[no-untyped-def]
    return torch.cat([table, table], dim=-1) if style == "half" else table.repeat_interleave(2, -1)


@op(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, float scale, bool causal=False,"
    " float softcap=0.0, Tensor? sinks=None, bool safe=True) -> Tensor"
)
def attention(q, k, v, mask, scale, causal=False, softcap=0.0, sinks=None, safe=True):  # type: ignore[no-untyped-def]
    """Grouped-query attention. q [B, Hq, T, D]; k, v [B, Hk, S, D] with Hq a multiple of Hk; out [B, Hq, T, Dv].

    mask: bool (True attends) or additive, broadcastable to [B, Hq, T, S]. causal is top-left, as in SDPA.
    safe: a row that may attend nothing gives zeros, as in SDPA; otherwise NaN, as softmax does.
    """
    grouped = q.shape[1] != k.shape[1]
    if safe and softcap == 0.0 and sinks is None:
        return F.scaled_dot_product_attention(
            q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=grouped
        )
    if grouped:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = torch.matmul(q, k.transpose(-2, -1)) * scale
    if softcap != 0.0:
        scores = torch.tanh(scores / softcap) * softcap
    if causal:
        keep = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~keep, float("-inf"))
    if mask is not None:
        scores = (
            scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
        )
    if sinks is not None:
        return torch.matmul(_weights_beside(scores, sinks).to(v.dtype), v)
    weights = torch.softmax(scores, -1, dtype=torch.float32)
    if safe:
        weights = weights.masked_fill((scores == float("-inf")).all(-1, keepdim=True), 0.0)
    return torch.matmul(weights.to(v.dtype), v)


def _weights_beside(scores, sinks):  # type: ignore[no-untyped-def]
    """Softmax over the scores and one more logit a head, which no value answers (gpt-oss)."""
    sink = sinks.reshape(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
    full = torch.cat([scores, sink.to(scores.dtype)], -1)
    full = full - full.amax(-1, keepdim=True)
    return torch.softmax(full, -1)[..., :-1]


@op("swiglu(Tensor gate, Tensor up) -> Tensor")
def swiglu(gate, up):  # type: ignore[no-untyped-def]
    """silu(gate) * up (Shazeer, 2020)."""
    return F.silu(gate) * up


@op('geglu(Tensor gate, Tensor up, str approximate="none") -> Tensor')
def geglu(gate, up, approximate="none"):  # type: ignore[no-untyped-def]
    """gelu(gate) * up (Shazeer, 2020)."""
    return F.gelu(gate, approximate=approximate) * up


@op("softcap(Tensor x, float cap) -> Tensor")
def softcap(x, cap):  # type: ignore[no-untyped-def]
    """cap * tanh(x / cap) (Gemma 2)."""
    return torch.tanh(x / cap) * cap


@op("linears(Tensor x, Tensor[] weights, Tensor?[] biases) -> Tensor[]")
def linears(x, weights, biases):  # type: ignore[no-untyped-def]
    """Several linears of one input, the weights read where they lie. weights[i]: [N_i, K]."""
    return [F.linear(x, w, b) for w, b in zip(weights, biases, strict=True)]


@op("pack(Tensor weight, str scheme, int group, bool low, str per, str numbers) -> Tensor")
def pack(weight, scheme, group, low, per, numbers):  # type: ignore[no-untyped-def]
    """A weight [N, K] rounded and laid out as `packed.pack` does: uint8 [ceil(N / 16), bytes of 16 rows]. per
    `stored`: with the numbers of the file it was read from. numbers: empty for the nearest, else the name of
    calibrated ones, which `calibrated.find` knows."""
    if per == archived.STORED:
        return archived.pack(weight, scheme, group, low)
    found = calibrated.find(numbers, weight) if numbers else None
    if found is None:
        found = kept.pack(weight, scheme, group, low, per)
    released.packed_once(weight)
    return found


@op(
    "packed_linears(Tensor x, Tensor[] weights, Tensor?[] biases, int[] rows, str scheme, int group, bool low,"
    " str inputs) -> Tensor[]"
)
def packed_linears(x, weights, biases, rows, scheme, group, low, inputs):  # type: ignore[no-untyped-def]
    """Several linears of one input [*, K] over packed weights of rows[i] rows each.

    inputs: empty, or `int8` to round activations to 8-bit integers too, a scale for each 64 (or fewer, that
    share a group) of them.
    """
    layout = packed.Layout(scheme, group, low)
    if inputs:
        x = packed.round_inputs(x, layout)
    plain = (packed.unpack(w, n, x.shape[-1], layout) for w, n in zip(weights, rows, strict=True))
    return [F.linear(x, w.to(x.dtype), b) for w, b in zip(plain, biases, strict=True)]


@op(
    "stored(Tensor weight, str scheme, int group, bool low, str per, str inputs, str numbers) -> Tensor"
)
def stored(weight, scheme, group, low, per, inputs, numbers):  # type: ignore[no-untyped-def]
    """A weight as the recipe wants it kept: rounded, and a plain weight again. Rules of the stage `weights` swap the
    linear that reads it for one over the packed weight; where none fits, the weight stays what it was."""
    if per == archived.STORED:
        return archived.nearest(weight, scheme, group, low)
    found = calibrated.find(numbers, weight) if numbers else None
    if found is not None:
        layout = packed.Layout(scheme, group, low)
        return packed.unpack(found, weight.shape[0], weight.shape[1], layout).to(weight.dtype)
    return packed.nearest(weight, scheme, group, low, per)


ACTIVATIONS = {
    "relu": torch.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}


@op("linear_act(Tensor x, Tensor weight, Tensor? bias, str act) -> Tensor")
def linear_act(x, weight, bias, act):  # type: ignore[no-untyped-def]
    """act(x @ weight.T + bias)."""
    return ACTIVATIONS[act](F.linear(x, weight, bias))


@op(
    "conv_act(Tensor x, Tensor weight, Tensor? bias, int[] stride, int[] padding, int[] dilation,"
    " int groups, str act) -> Tensor"
)
def conv_act(x, weight, bias, stride, padding, dilation, groups, act):  # type: ignore[no-untyped-def]
    """act(conv2d(x, weight) + bias)."""
    return ACTIVATIONS[act](F.conv2d(x, weight, bias, stride, padding, dilation, groups))


def _wide(x):  # type: ignore[no-untyped-def]
    return torch.float64 if x.dtype == torch.float64 else torch.float32


@op("bn_scale(Tensor? gamma, Tensor var, float eps) -> Tensor")
def bn_scale(gamma, var, eps):  # type: ignore[no-untyped-def]
    """What a batch norm in inference multiplies each channel with; computed in f64, kept in f32 at least."""
    scale = torch.rsqrt(var.double() + eps)
    return (scale if gamma is None else scale * gamma.double()).to(_wide(var))


@op(
    "bn_shift(Tensor? bias, Tensor? gamma, Tensor? beta, Tensor mean, Tensor var, float eps) -> Tensor"
)
def bn_shift(bias, gamma, beta, mean, var, eps):  # type: ignore[no-untyped-def]
    """What it adds to each channel, behind an op that adds `bias`."""
    centre = -mean.double() if bias is None else bias.double() - mean.double()
    shift = centre * torch.rsqrt(var.double() + eps)
    shift = shift if gamma is None else shift * gamma.double()
    return (shift if beta is None else shift + beta.double()).to(_wide(var))


@op("scale_rows(Tensor weight, Tensor scale) -> Tensor")
def scale_rows(weight, scale):  # type: ignore[no-untyped-def]
    """weight[i] * scale[i], rounded once."""
    rows = scale.double().reshape(-1, *[1] * (weight.dim() - 1))
    return (weight.double() * rows).to(weight.dtype)


@op("channel_affine(Tensor x, Tensor scale, Tensor shift) -> Tensor")
def channel_affine(x, scale, shift):  # type: ignore[no-untyped-def]
    """x * scale + shift along dim 1, in f32 at least."""
    shape = [-1, *[1] * (x.dim() - 2)]
    return (x.to(scale.dtype) * scale.reshape(shape) + shift.reshape(shape)).to(x.dtype)


@op("channels_last(Tensor x) -> Tensor")
def channels_last(x):  # type: ignore[no-untyped-def]
    """The same values with the channel dimension innermost in memory; x itself where it lies so already."""
    return x.contiguous(memory_format=torch.channels_last)


kv_ops.register(LIB)
