"""Triton text of attention: which rows and keys a program has, the loop over tiles, what is stored.

One text serves decode (keys split over programs, 16 rows) and prefill (no split, 64 to 128 rows): the rows are
(token, head) pairs of one kv head, so K and V are read once for the whole group in both.
"""

from __future__ import annotations

from ..attention import TILE, FlashAttention
from .attention_tile import write_tile
from .source import (
    HEADER,
    TL,
    Param,
    Source,
    Writer,
    floats,
    function,
    integers,
    next_power,
    pointer,
)

LOG2E = "1.4426950408889634"


def source(kernel: FlashAttention) -> Source:
    """The kernel. Grid: (blocks of rows, splits, batch * kv_heads)."""
    write = Writer()
    write(HEADER)
    params = parameters(kernel)
    rows, warps, stages = _shape(kernel)
    roomy = kernel.head_dim <= 128 and (kernel.splits or kernel.dtype != "f32")
    tile = TILE if kernel.cache or roomy else 32
    constants = {"ROWS": rows, "TILE": tile}
    with function(write, kernel.name, params, constants, _doc(kernel)):
        _place(write, kernel)
        _queries(write, kernel)
        _range(write, kernel)
        _start(write, kernel)
        _loops(write, kernel)
        _finish(write, kernel)
    return Source(
        kernel.name, "attention", write.text(), params, tuple(constants.items()), warps, stages
    )


def _doc(kernel: FlashAttention) -> str:
    kept = {"": kernel.dtype, "i8": "int8", "i4": "int4"}[kernel.cache]
    return (
        f"Attention, {kernel.group} query heads a kv head of {kernel.head_dim}, K and V in {kept}."
    )


def _shape(kernel: FlashAttention) -> tuple[int, int, int]:
    """Rows of a program, warps, pipeline stages."""
    if kernel.splits:
        return 16, 4, 3 if kernel.head_dim <= 128 else 2
    if kernel.mask or kernel.cache or kernel.head_dim > 128:
        return 64, 8, 2
    if kernel.dtype == "f32":
        return 64, 8, 1
    return 128, 8, 2


def parameters(kernel: FlashAttention) -> tuple[Param, ...]:
    """Every argument in order."""
    kept = {"": kernel.dtype, "i8": "i8", "i4": "u8"}[kernel.cache]
    params = [pointer("q_ptr", kernel.dtype), pointer("k_ptr", kept), pointer("v_ptr", kept)]
    if kernel.cache:
        params += [pointer("k_scale_ptr", "f16"), pointer("v_scale_ptr", "f16")]
    if kernel.cache == "i4":
        params += [pointer("k_low_ptr", "f16"), pointer("v_low_ptr", "f16")]
    if kernel.splits:
        params += [pointer(n, "f32") for n in ("part_ptr", "top_ptr", "total_ptr")]
    else:
        params += [pointer("out_ptr", kernel.dtype)]
    params += [pointer("mass_ptr", "f32")] if kernel.mass else []
    params += [pointer("table_ptr", "i32")] if kernel.page else []
    params += [pointer("mask_ptr", kernel.mask)] if kernel.mask else []
    params += [pointer("slope_ptr", "f32")] if kernel.alibi else []
    params += [pointer("first_ptr", "i32"), pointer("last_ptr", "i32")] if kernel.bounds else []
    params += [pointer("sink_ptr", "f32")] if kernel.sinks and not kernel.splits else []
    params += floats("scale", *["softcap"] * kernel.softcap)
    params += integers("tokens", "keys", "kv_heads", "diagonal")
    params += integers(*["window"] * kernel.window, *["slot", "slots"] * kernel.splits)
    return (*params, *_strides(kernel))


def _strides(kernel: FlashAttention) -> tuple[Param, ...]:
    names = [f"{t}_{d}" for t in "qkv" for d in ("b", "h", "t")]
    params = integers(*names, wide=kernel.wide, aligned=kernel.head_dim % 32 == 0)
    if not kernel.splits:
        params += integers(
            "o_b", "o_h", "o_t", wide=kernel.wide, aligned=kernel.value_dim % 16 == 0
        )
    if kernel.cache:
        params += integers("ks_b", "ks_h", "ks_t", aligned=True) + integers("vs_b", "vs_h")
    params += integers("table_b") if kernel.page else ()
    params += integers("m_b", "m_h", "m_t", "m_s", wide=kernel.wide) if kernel.mask else ()
    return params


def _place(write: Writer, kernel: FlashAttention) -> None:
    write(f"""
        batch = tl.program_id(2) // kv_heads
        kv_head = tl.program_id(2) % kv_heads
        first_row = tl.program_id(0) * ROWS
        row = first_row + tl.arange(0, ROWS)
        token = row // {kernel.group}
        head = kv_head * {kernel.group} + row % {kernel.group}
        live = token < tokens
    """)
    if kernel.wide:
        write("batch = batch.to(tl.int64)")
        write("token = token.to(tl.int64)")


def parts(kernel: FlashAttention, size: int) -> list[tuple[str, int, int]]:
    """The pieces a head is worked on in: suffix of the names, first channel, channels."""
    if kernel.halves:
        return [("_low", 0, size // 2), ("_high", size // 2, size // 2)]
    return [("", 0, size)]


def keep_channels(kernel: FlashAttention, size: int, name: str) -> str:
    """The part of a load's mask that cuts padding channels off; empty where there are none."""
    width = parts(kernel, size)[0][2]
    return "" if next_power(width, 16) == width else f" & ({name} < {width})"


def _queries(write: Writer, kernel: FlashAttention) -> None:
    width = next_power(parts(kernel, kernel.head_dim)[0][2], 16)
    write(f"dim = tl.arange(0, {width})")
    write("q_at = (batch * q_b + head * q_h + token * q_t)[:, None] + dim[None, :]")
    keep = keep_channels(kernel, kernel.head_dim, "dim[None, :]")
    for suffix, first, _ in parts(kernel, kernel.head_dim):
        shift = f" + {first}" if first else ""
        write(f"q{suffix} = tl.load(q_ptr + q_at{shift}, mask=live[:, None]{keep}, other=0)")
    value = next_power(parts(kernel, kernel.value_dim)[0][2], 16)
    write(f"value_dim = tl.arange(0, {value})")
    write("score_scale = scale" if kernel.softcap else f"score_scale = scale * {LOG2E}")


def _range(write: Writer, kernel: FlashAttention) -> None:
    """begin, end: this program's keys; `whole`: where masking starts to matter."""
    write("end = keys")
    write("begin = 0")
    if kernel.causal or kernel.window:
        write(f"oldest = first_row // {kernel.group} + diagonal")
    if kernel.causal:
        last = f"(first_row + ROWS - 1) // {kernel.group}"
        write(f"end = tl.minimum(end, tl.minimum({last}, tokens - 1) + diagonal + 1)")
    if kernel.window:
        write("begin = tl.maximum(begin, oldest - window + 1)")
    if kernel.bounds:
        write("""
            first_key = tl.load(first_ptr + batch)
            last_key = tl.load(last_ptr + batch)
            begin = tl.maximum(begin, first_key)
            end = tl.minimum(end, last_key)
        """)
    write("begin = begin // TILE * TILE")
    if kernel.splits:
        write("""
            share = tl.cdiv(tl.cdiv(end - begin, TILE), tl.num_programs(1)) * TILE
            begin = begin + tl.program_id(1) * share
            end = tl.minimum(end, begin + share)
        """)
    if not always_masked(kernel):
        limit = "tl.minimum(end, oldest + 1)" if kernel.causal else "end"
        write(f"whole = tl.maximum(begin, {limit} // TILE * TILE)")


def always_masked(kernel: FlashAttention) -> bool:
    """Whether no tile can do without looking at the mask."""
    return bool(kernel.mask) or kernel.window or kernel.bounds


def _start(write: Writer, kernel: FlashAttention) -> None:
    write("""
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
    """)
    if kernel.cache == "i4":
        write("low_sum = tl.zeros([ROWS], tl.float32)")
    for suffix, _, width in parts(kernel, kernel.value_dim):
        write(f"acc{suffix} = tl.zeros([ROWS, {next_power(width, 16)}], tl.float32)")
    if kernel.alibi:
        write(f"slope = tl.load(slope_ptr + head, mask=live, other=0) * {LOG2E}")


def _loops(write: Writer, kernel: FlashAttention) -> None:
    if not always_masked(kernel):
        with write.block("for start in range(begin, whole, TILE):"):
            write_tile(write, kernel, masked=False)
    start = "begin" if always_masked(kernel) else "whole"
    with write.block(f"for start in range({start}, end, TILE):"):
        write_tile(write, kernel, masked=True)


def _finish(write: Writer, kernel: FlashAttention) -> None:
    keep = "live[:, None]" + keep_channels(kernel, kernel.value_dim, "value_dim[None, :]")
    if kernel.cache == "i4":
        for suffix, _, _ in parts(kernel, kernel.value_dim):
            write(f"acc{suffix} += low_sum[:, None]")
    if kernel.splits:
        write(f"rows = tokens * {kernel.group}")
        write("to = (tl.program_id(2).to(tl.int64) * slots + slot + tl.program_id(1)) * rows + row")
        write("tl.store(top_ptr + to, top, mask=live)")
        write("tl.store(total_ptr + to, total, mask=live)")
        write(f"part_at = part_ptr + to[:, None] * {kernel.value_dim} + value_dim[None, :]")
        for suffix, first, _ in parts(kernel, kernel.value_dim):
            write(f"tl.store(part_at + {first}, acc{suffix}, mask={keep})")
        return
    if kernel.sinks:
        write(f"""
            sink = tl.load(sink_ptr + head, mask=live, other=0) * {LOG2E}
            final = tl.maximum(top, sink)
            shrink = tl.exp2(top - final)
            total = total * shrink + tl.exp2(sink - final)
        """)
    if kernel.empty == "zero":
        write("total = tl.where(total == 0.0, 1.0, total)")
    write("out_at = (batch * o_b + head * o_h + token * o_t)[:, None] + value_dim[None, :]")
    shrink = " * shrink[:, None]" if kernel.sinks else ""
    for suffix, first, _ in parts(kernel, kernel.value_dim):
        value = f"(acc{suffix}{shrink} / total[:, None]).to({TL[kernel.dtype]})"
        write(f"tl.store(out_ptr + out_at + {first}, {value}, mask={keep})")
