"""What runs on the GPU: for each kernel a check against torch in f64 or f32, and who it is timed against."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from sitsopt.emit.attention import FlashAttention, Merge
from sitsopt.emit.matmul import Matmul
from sitsopt.emit.rope import Rope
from sitsopt.emit.rowwise import Rowwise
from sitsopt.emit.sample import Argmax
from sitsopt.emit.triton import attention, elementwise, matmul, rope, rowwise, sample
from sitsopt.emit.triton.forms import form
from sitsopt.runtime.triton import attend as att
from sitsopt.runtime.triton import product as prod
from sitsopt.runtime.triton.launch import launch

BF16, DEVICE = torch.bfloat16, "cuda"
EPS = 1e-5


@dataclass
class Case:
    """ours(i) and each of `against` run on the i-th set of operands; check() returns the worst error."""

    name: str
    bytes: float
    sets: int
    ours: Callable[[int], object]
    against: dict[str, Callable[[int], object]]
    check: Callable[[], tuple[float, float]]


def units() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


def randn(*shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device=DEVICE) * scale).to(dtype)


def inductor(fn: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(fn, dynamic=False, fullgraph=True)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).abs().max())


def sets_for(bytes_each: float) -> int:
    return int(max(2, min(64, 300e6 // max(bytes_each, 1) + 1)))


def swiglu(rows: int, width: int) -> Case:
    moved = 6.0 * rows * width
    sets = sets_for(moved)
    both = [randn(rows, 2 * width) for _ in range(sets)]
    out = [randn(rows, width) for _ in range(sets)]
    kernel = form("swiglu_halves", "bf16")
    source = elementwise.source(kernel)
    grid = elementwise.grid(kernel, source, (rows, width))

    def ours(i: int) -> None:
        x = both[i % sets]
        launch(source, grid, [x, x[:, width:], out[i % sets], rows, width, 2 * width, 2 * width])

    plain = inductor(lambda x: F.silu(x[:, :width]) * x[:, width:])

    def check() -> tuple[float, float]:
        ours(0)
        wide = both[0].double()
        want = F.silu(wide[:, :width]) * wide[:, width:]
        return error(out[0], want), 0.004 * float(want.abs().max())

    return Case(
        f"swiglu {rows}x{width}",
        moved,
        sets,
        ours,
        {"inductor": lambda i: plain(both[i % sets])},
        check,
    )


def add_rms_norm(rows: int, size: int) -> Case:
    moved = 8.0 * rows * size
    sets = sets_for(moved)
    x, r = ([randn(rows, size) for _ in range(sets)] for _ in range(2))
    total, out = ([torch.empty_like(t) for t in x] for _ in range(2))
    weight = randn(size)
    source = rowwise.source(Rowwise("rms_norm", "bf16", size, residual=True, weight="bf16"))
    grid = rowwise.grid(source, rows)

    def ours(i: int) -> None:
        j = i % sets
        launch(source, grid, [x[j], r[j], total[j], weight, out[j], EPS, rows, size, size])

    def eager(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        s = a + b
        wide = s.float()
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(BF16), s

    plain = inductor(eager)

    def check() -> tuple[float, float]:
        ours(0)
        want, _ = eager(x[0], r[0])
        return error(out[0], want), 0.016 * float(want.abs().max())

    return Case(
        f"add_rms_norm {rows}x{size}", moved, sets, ours,
        {"inductor": lambda i: plain(x[i % sets], r[i % sets])}, check,
    )  # fmt: skip


def rope_case(tokens: int, heads: int, head_dim: int) -> Case:
    moved = 4.0 * tokens * heads * head_dim
    sets = sets_for(moved)
    x = [randn(1, tokens, heads, head_dim).transpose(1, 2) for _ in range(sets)]
    out = [torch.empty_like(t) for t in x]
    cos, sin = randn(1, tokens, head_dim), randn(1, tokens, head_dim)
    source = rope.source(Rope("bf16", head_dim))
    rows = tokens * heads

    def ours(i: int) -> None:
        a, b = x[i % sets], out[i % sets]
        strides = [*a.stride()[:3], 0, cos.stride(1), *b.stride()[:3]]
        launch(source, rope.grid(source, rows), [a, cos, sin, b, rows, heads, tokens, *strides])

    def eager(a: torch.Tensor) -> torch.Tensor:
        half = head_dim // 2
        turned = torch.cat([-a[..., half:], a[..., :half]], -1)
        return a * cos[:, None] + turned * sin[:, None]

    plain = inductor(eager)

    def check() -> tuple[float, float]:
        ours(0)
        want = eager(x[0])
        return error(out[0], want), 0.02 * float(want.abs().max())

    return Case(
        f"rope {tokens}x{heads}x{head_dim}",
        moved,
        sets,
        ours,
        {"inductor": lambda i: plain(x[i % sets])},
        check,
    )


def linear(rows: int, n: int, k: int, scheme: str = "", group: int = 0, inputs: str = "") -> Case:
    native = torch.cuda.get_device_capability() >= (8, 9)
    kernel = Matmul(
        "bf16", n, k, scheme, group, scheme == "i4", skinny=rows <= 16, native_fp8=native
    )
    per = {"": 2.0, "i8": 1.0, "f8e4m3": 1.0, "i4": 0.5 + 4.0 / max(group, 1)}[scheme]
    moved = n * k * per + 2.0 * rows * (n + k)
    sets = sets_for(moved)
    weights = [randn(n, k, scale=k**-0.5) for _ in range(sets)]
    pack = {
        "": prod.Weight, "i8": prod.pack_int8, "f8e4m3": lambda w: prod.pack_fp8(w, group),
        "i4": lambda w: prod.pack_int4(w, group, True),
    }[scheme]  # fmt: skip
    packed = [pack(w) for w in weights]
    x, y = randn(rows, k), torch.empty(rows, n, dtype=BF16, device=DEVICE)
    source = matmul.source(kernel)
    if kernel.skinny:
        splits = prod.pick_splits(kernel, source.constant("COLS"), units())
        source = source.tuned({"SPLITS": splits}, source.warps, source.stages)

    def ours(i: int) -> None:
        prod.multiply(
            launch, kernel, x, packed[i % sets], prod.Around(), y, units=units(), source=source
        )

    def check() -> tuple[float, float]:
        y.fill_(float("nan"))
        ours(0)
        want = x.double() @ prod.unpack(packed[0], kernel).t()
        return error(y, want), 0.01 * (1 + float(want.abs().max()))

    return Case(
        f"linear {rows}x{n}x{k} {scheme or 'bf16'}{group or ''}", moved, sets, ours,
        {"cublas bf16": lambda i: torch.mm(x, weights[i % sets].t())}, check,
    )  # fmt: skip


def decode(keys: int, heads: int, kv_heads: int, head_dim: int, cache: str = "") -> Case:
    group = heads // kv_heads
    kernel = FlashAttention("bf16", head_dim, head_dim, group, cache=cache, splits=True)
    joined = Merge("bf16", head_dim, group)
    per = {"": 2.0, "i8": 1.0, "i4": 0.5}[cache]
    moved = 2 * keys * kv_heads * head_dim * per
    sets = sets_for(moved)
    k, v = ([randn(1, kv_heads, keys, head_dim) for _ in range(sets)] for _ in range(2))
    q = randn(1, heads, 1, head_dim)
    pairs = zip(k, v, strict=True)
    kept = [att.quantize_cache(a, b, cache) if cache else att.Cache(a, b) for a, b in pairs]
    splits = att.pick_splits(kv_heads, keys, units())
    parts = att.empty_parts(q, kv_heads, head_dim, splits)
    out = torch.empty_like(q)
    extras = att.Extras(scale=head_dim**-0.5)
    source = attention.source(kernel)

    def ours(i: int) -> None:
        att.attend(
            launch,
            kernel,
            q,
            kept[i % sets],
            keys,
            extras,
            splits=splits,
            parts=parts,
            source=source,
        )
        att.merge(launch, joined, parts, out)

    def sdpa(i: int) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k[i % sets], v[i % sets], enable_gqa=True)

    def check() -> tuple[float, float]:
        out.fill_(float("nan"))
        ours(0)
        a, b = att.dequantize_cache(kept[0], cache) if cache else (k[0].double(), v[0].double())
        a, b = (t[:, :, :keys].repeat_interleave(group, 1) for t in (a, b))
        want = torch.softmax(q.double() @ a.transpose(-1, -2) * extras.scale, -1) @ b
        return error(out, want), 0.01 * float(want.abs().max()) + 2e-3

    return Case(
        f"decode {keys} keys {heads}/{kv_heads}x{head_dim} {cache or 'bf16'}",
        moved,
        sets,
        ours,
        {"sdpa bf16": sdpa},
        check,
    )


def prefill(tokens: int, heads: int, kv_heads: int, head_dim: int) -> Case:
    group = heads // kv_heads
    kernel = FlashAttention("bf16", head_dim, head_dim, group, causal=True)
    q, out = (randn(1, heads, tokens, head_dim) for _ in range(2))
    k, v = (randn(1, kv_heads, tokens, head_dim) for _ in range(2))
    extras = att.Extras(scale=head_dim**-0.5)
    source = attention.source(kernel)

    def ours(i: int) -> None:
        att.attend(launch, kernel, q, att.Cache(k, v), tokens, extras, out=out, source=source)

    def sdpa(i: int) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def check() -> tuple[float, float]:
        out.fill_(float("nan"))
        ours(0)
        want = sdpa(0)
        return error(out, want), 0.02 * float(want.abs().max())

    moved = 4.0 * tokens * head_dim * (heads + kv_heads)
    return Case(
        f"prefill {tokens} {heads}/{kv_heads}x{head_dim}", moved, 2, ours, {"sdpa": sdpa}, check
    )


def argmax_case(vocabulary: int) -> Case:
    sets = sets_for(2.0 * vocabulary)
    x = [randn(1, vocabulary) for _ in range(sets)]
    source = sample.argmax(Argmax("bf16"))
    splits = source.constant("SPLITS")
    part = torch.zeros(splits, dtype=torch.int64, device=DEVICE)
    lock = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    out = torch.zeros(1, dtype=torch.int64, device=DEVICE)

    def ours(i: int) -> None:
        launch(source, (1, splits), [x[i % sets], part, lock, out, vocabulary, vocabulary])

    def check() -> tuple[float, float]:
        ours(0)
        best = x[0].float().amax()
        return float(best - x[0][0, out[0]].float()), 0.0

    return Case(
        f"argmax {vocabulary}",
        2.0 * vocabulary,
        sets,
        ours,
        {"torch": lambda i: torch.argmax(x[i % sets], -1)},
        check,
    )


MAKERS: list[Callable[[], Case]] = [
    lambda: add_rms_norm(1, 4096), lambda: add_rms_norm(4096, 4096), lambda: add_rms_norm(4096, 576),
    lambda: swiglu(1, 14336), lambda: swiglu(4096, 14336), lambda: rope_case(4096, 32, 128),
    lambda: rope_case(1, 40, 128),
    lambda: linear(1, 4096, 4096), lambda: linear(1, 14336, 4096), lambda: linear(1, 49152, 576),
    lambda: linear(1, 4096, 4096, "i8"), lambda: linear(1, 4096, 4096, "f8e4m3"),
    lambda: linear(1, 4096, 4096, "f8e4m3", 128), lambda: linear(1, 4096, 4096, "i4", 64),
    lambda: linear(1, 14336, 4096, "i4", 128), lambda: linear(8, 4096, 4096, "i4", 64),
    lambda: linear(16, 4096, 4096, "i8"), lambda: linear(4096, 4096, 4096),
    lambda: linear(4096, 4096, 4096, "i8"), lambda: linear(512, 4096, 4096, "i4", 128),
    lambda: decode(8192, 32, 8, 128), lambda: decode(8192, 32, 8, 128, "i8"),
    lambda: decode(8192, 32, 8, 128, "i4"), lambda: decode(32768, 32, 8, 128),
    lambda: decode(32768, 32, 8, 128, "i4"), lambda: decode(131072, 32, 8, 128, "i4"),
    lambda: decode(16000, 9, 3, 64), lambda: decode(16000, 9, 3, 64, "i4"),
    lambda: prefill(4096, 32, 8, 128), lambda: prefill(4096, 9, 3, 64), lambda: argmax_case(128256),
]  # fmt: skip
