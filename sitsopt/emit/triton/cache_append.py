"""Triton text that rotates new queries and keys and stores keys and values, in one launch."""

from __future__ import annotations

from ..cache import Append
from .source import HEADER, TL, Source, Writer, function, integers, next_power, pointer

STRIDES = tuple(f"{t}_{d}" for t in ("q", "k", "v", "o", "kc", "vc") for d in ("b", "h", "t"))


def source(kernel: Append) -> Source:
    """The kernel. Grid: (blocks of batch * tokens * (query + kv heads),).

    q, k, v, out: [B, H, T, D]; caches [B, Hk, S, D] or [pages, Hk, page, D]; positions [B or 1, T].
    """
    write = Writer()
    write(HEADER)
    table = kernel.table or kernel.dtype
    params = [pointer(f"{n}_ptr", kernel.dtype) for n in ("q", "k", "v")]
    params += [pointer("cos_ptr", table), pointer("sin_ptr", table)]
    params += [pointer(f"{n}_ptr", kernel.dtype) for n in ("out", "kc", "vc")]
    params += [pointer("position_ptr", "i64")]
    params += [pointer("table_ptr", "i32")] if kernel.page else []
    params += integers("rows", "tokens", "q_heads", "kv_heads")
    params += integers(*STRIDES, wide=kernel.wide, aligned=kernel.head_dim % 16 == 0)
    params += integers("cos_b", "cos_t", "position_b", *["table_b"] * bool(kernel.page))
    pair = next_power(kernel.head_dim // 2)
    constants = {"ROWS": max(1, 256 // pair)}
    doc = "Rotates q and k, stores k and v in the cache."
    with function(write, kernel.name, tuple(params), constants, doc):
        write(_PLACE.replace("PAIR", str(pair)))
        if kernel.wide:
            write("batch = batch.to(tl.int64)")
        write(f"keep = live & (pair < {kernel.head_dim // 2})")
        write(_ROTATE.replace("HALF", str(kernel.head_dim // 2)).replace("KIND", TL[kernel.dtype]))
        if kernel.page:
            write(
                f"page = tl.load(table_ptr + batch * table_b + position // {kernel.page}, mask=live)"
            )
            write("batch = page.to(tl.int64)")
            write(f"position = position % {kernel.page}")
        write(_STORE.replace("HALF", str(kernel.head_dim // 2)))
        _values(write, kernel)
    return Source(
        kernel.name, "cache_write", write.text(), tuple(params), tuple(constants.items()), 2
    )


_PLACE = """
row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
heads = q_heads + kv_heads
head = row % heads
token = row // heads % tokens
batch = row // heads // tokens
live = row < rows
is_query = head < q_heads
kv_head = head - q_heads
pair = tl.arange(0, PAIR)[None, :]
position = tl.load(position_ptr + batch * position_b + token, mask=live, other=0)
"""

_ROTATE = """
ask, store = keep & is_query, keep & (head >= q_heads)
q_at = batch * q_b + head * q_h + token * q_t + pair
k_at = batch * k_b + kv_head * k_h + token * k_t + pair
low = tl.load(q_ptr + q_at, mask=ask, other=0) + tl.load(k_ptr + k_at, mask=store, other=0)
high = tl.load(q_ptr + q_at + HALF, mask=ask, other=0) + tl.load(k_ptr + k_at + HALF, mask=store, other=0)
low, high = low.to(tl.float32), high.to(tl.float32)
turn = batch * cos_b + token * cos_t + pair
cos_low = tl.load(cos_ptr + turn, mask=keep, other=0).to(tl.float32)
cos_high = tl.load(cos_ptr + turn + HALF, mask=keep, other=0).to(tl.float32)
sin_low = tl.load(sin_ptr + turn, mask=keep, other=0).to(tl.float32)
sin_high = tl.load(sin_ptr + turn + HALF, mask=keep, other=0).to(tl.float32)
first = (low * cos_low - high * sin_low).to(KIND)
second = (high * cos_high + low * sin_high).to(KIND)
out_at = batch * o_b + head * o_h + token * o_t + pair
v_from = batch * v_b + kv_head * v_h + token * v_t
tl.store(out_ptr + out_at, first, mask=ask)
tl.store(out_ptr + out_at + HALF, second, mask=ask)
"""

_STORE = """
kc_at = batch * kc_b + kv_head * kc_h + position * kc_t + pair
tl.store(kc_ptr + kc_at, first, mask=store)
tl.store(kc_ptr + kc_at + HALF, second, mask=store)
"""


def _values(write: Writer, kernel: Append) -> None:
    width = next_power(kernel.value_dim)
    write(f"channel = tl.arange(0, {width})[None, :]")
    write(f"keep = live & (head >= q_heads) & (channel < {kernel.value_dim})")
    write("value = tl.load(v_ptr + v_from + channel, mask=keep, other=0)")
    write("vc_at = batch * vc_b + kv_head * vc_h + position * vc_t + channel")
    write("tl.store(vc_ptr + vc_at, value, mask=keep)")
