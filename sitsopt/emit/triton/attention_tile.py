"""Triton text of one tile of keys: scores, mask, running softmax (Milakov and Gimelshein, 2018), values.

A quantized tile never becomes floats with scales: the scale of a key channel is folded into q once a tile, the
scale of a value token into the probabilities; what both leave over is one number a row.
"""

from __future__ import annotations

from ..attention import FlashAttention
from .pointwise import activation
from .source import TL, Writer, next_power

_LOG2E = "1.4426950408889634"
_LN2 = "0.6931471805599453"


def write_tile(write: Writer, kernel: FlashAttention, *, masked: bool) -> None:
    """One turn of the loop; `start` is the tile's first key."""
    write("key = start + tl.arange(0, TILE)")
    _addresses(write, kernel, masked)
    _scores(write, kernel, masked)
    _bias(write, kernel)
    if masked:
        _mask(write, kernel)
    _softmax(write, kernel)
    _values(write, kernel, masked)


def _addresses(write: Writer, kernel: FlashAttention, masked: bool) -> None:
    key = "key.to(tl.int64)" if kernel.wide else "key"
    if kernel.page:
        write(f"""
            page = tl.load(table_ptr + batch * table_b + key // {kernel.page}, mask=key < end, other=0)
            inside = key % {kernel.page}
            k_at = page.to(tl.int64) * k_b + kv_head * k_h + inside * k_t
            v_at = page.to(tl.int64) * v_b + kv_head * v_h + inside * v_t
        """)
    else:
        write(f"k_at = batch * k_b + kv_head * k_h + {key} * k_t")
        write(f"v_at = batch * v_b + kv_head * v_h + {key} * v_t")


def _pieces(kernel: FlashAttention, size: int) -> list[tuple[str, int]]:
    return [("_low", 0), ("_high", size // 2)] if kernel.halves else [("", 0)]


def _load(write: Writer, kernel: FlashAttention, name: str, masked: bool) -> None:
    """k [channels, keys] or v [keys, channels], as stored."""
    size = kernel.head_dim if name == "k" else kernel.value_dim
    width = size // 2 if kernel.halves else size
    channel, other = (
        ("dim[:, None]", "[None, :]") if name == "k" else ("value_dim[None, :]", "[:, None]")
    )
    keep = [f"(key < end){other}"] if masked else []
    keep += [f"({channel} < {width})"] if next_power(width, 16) != width else []
    guard = f", mask={' & '.join(keep)}, other=0" if keep else ""
    write(f"{name} = tl.load({name}_ptr + {name}_at{other} + {channel}{guard})")


def _score_dtype(kernel: FlashAttention) -> str:
    """Of the product with quantized keys: f16 holds them exactly, and q times a scale better than bf16."""
    return "f16" if kernel.cache and kernel.dtype == "bf16" else kernel.dtype


def _unpack(write: Writer, kernel: FlashAttention, name: str) -> None:
    kind = TL[_score_dtype(kernel) if name == "k" else kernel.dtype]
    if kernel.cache == "i4":
        write(f"{name}_low = ({name} & 15).to({kind})")
        write(f"{name}_high = ({name} >> 4).to({kind})")
    elif kernel.cache:
        write(f"{name} = {name}.to({kind})")


def _dot(kernel: FlashAttention, a: str, b: str, acc: str = "") -> str:
    exact = ', input_precision="ieee"' if kernel.dtype == "f32" else ""
    return f"tl.dot({a}, {b}{', ' + acc if acc else ''}{exact})"


def _scores(write: Writer, kernel: FlashAttention, masked: bool) -> None:
    _load(write, kernel, "k", masked)
    _unpack(write, kernel, "k")
    if kernel.cache:
        _fold_key_scale(write, kernel)
    terms = []
    for suffix, _ in _pieces(kernel, kernel.head_dim):
        q = f"turned{suffix}" if kernel.cache else "q"
        terms.append((q, f"k{suffix}"))
    write(f"score = {_dot(kernel, *terms[0])}")
    for q, k in terms[1:]:
        write(f"score = {_dot(kernel, q, k, 'score')}")
    if kernel.cache == "i4":
        write("score += offset[:, None]")
    write("score = score * score_scale")


def _scale_place(kernel: FlashAttention) -> str:
    if not kernel.page:
        return "batch * ks_b + kv_head * ks_h + start // TILE * ks_t"
    page = f"tl.load(table_ptr + batch * table_b + start // {kernel.page})"
    return f"{page} * ks_b + kv_head * ks_h + start % {kernel.page} // TILE * ks_t"


def _fold_key_scale(write: Writer, kernel: FlashAttention) -> None:
    write(f"scale_at = {_scale_place(kernel)} + dim")
    width = kernel.head_dim // 2 if kernel.halves else kernel.head_dim
    keep = f", mask=dim < {width}, other=0" if next_power(width, 16) != width else ""
    kind = TL[_score_dtype(kernel)]
    if kernel.cache == "i4":
        write("offset = tl.zeros([ROWS], tl.float32)")
    for suffix, first in _pieces(kernel, kernel.head_dim):
        shift = f" + {first}" if first else ""
        write(f"k_scale = tl.load(k_scale_ptr + scale_at{shift}{keep}).to(tl.float32)")
        write(f"turned{suffix} = (q{suffix}.to(tl.float32) * k_scale[None, :]).to({kind})")
        if kernel.cache == "i4":
            write(f"k_low_value = tl.load(k_low_ptr + scale_at{shift}{keep}).to(tl.float32)")
            write(f"offset += tl.sum(q{suffix}.to(tl.float32) * k_low_value[None, :], 1)")


def _bias(write: Writer, kernel: FlashAttention) -> None:
    if kernel.softcap:
        write("score = score / softcap")
        write(f"score = ({activation('tanh', 'score')}) * (softcap * {_LOG2E})")
    if kernel.alibi:
        write(
            "score += slope[:, None] * (key[None, :] - (token + diagonal)[:, None]).to(tl.float32)"
        )


def _mask(write: Writer, kernel: FlashAttention) -> None:
    write("seen = (key < end)[None, :] & live[:, None]")
    if kernel.causal:
        write("seen &= key[None, :] <= (token + diagonal)[:, None]")
    if kernel.window:
        write("seen &= key[None, :] > (token + diagonal - window)[:, None]")
    if kernel.bounds:
        write("seen &= (key >= first_key)[None, :]")
    if kernel.mask:
        write("mask_at = (batch * m_b + head * m_h + token * m_t)[:, None] + (key * m_s)[None, :]")
    if kernel.mask == "i1":
        write("seen &= tl.load(mask_ptr + mask_at, mask=seen, other=False)")
    elif kernel.mask:
        write("mask = tl.load(mask_ptr + mask_at, mask=seen, other=0).to(tl.float32)")
        # finfo.min times log2(e) would be -inf, and a row of it attends everything alike, not nothing.
        write('mask = tl.where((mask < -2.0e38) & (mask > float("-inf")), -2.0e38, mask)')
        write(f"score += mask * {_LOG2E}")
    write('score = tl.where(seen, score, float("-inf"))')


def _softmax(write: Writer, kernel: FlashAttention) -> None:
    write("""
        higher = tl.maximum(top, tl.max(score, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(score - base[:, None])
        shrink = tl.exp2(top - base)
        tile_total = tl.sum(weight, 1)
        total = total * shrink + tile_total
        top = higher
    """)
    if kernel.mass:
        write(f"""
            tiles = tl.cdiv(keys, TILE)
            place = (tl.program_id(2) * tokens * {kernel.group} + row) * tiles + start // TILE
            tl.store(mass_ptr + place, (tl.log2(tile_total) + base) * {_LN2}, mask=live)
        """)


def _values(write: Writer, kernel: FlashAttention, masked: bool) -> None:
    _load(write, kernel, "v", masked)
    _unpack(write, kernel, "v")
    if kernel.cache:
        _fold_value_scale(write, kernel, masked)
    write(f"share_of = weight.to({TL[kernel.dtype]})")
    for suffix, _ in _pieces(kernel, kernel.value_dim):
        write(f"acc{suffix} = acc{suffix} * shrink[:, None]")
        write(f"acc{suffix} = {_dot(kernel, 'share_of', f'v{suffix}', f'acc{suffix}')}")


def _fold_value_scale(write: Writer, kernel: FlashAttention, masked: bool) -> None:
    if kernel.page:
        write("value_at = page * vs_b + kv_head * vs_h + inside")
    else:
        write("value_at = batch * vs_b + kv_head * vs_h + key")
    guard = ", mask=key < end, other=0" if masked else ""
    if kernel.cache == "i4":
        write(f"v_low_value = tl.load(v_low_ptr + value_at{guard}).to(tl.float32)")
        write("low_sum = low_sum * shrink + tl.sum(weight * v_low_value[None, :], 1)")
    write(f"weight = weight * tl.load(v_scale_ptr + value_at{guard}).to(tl.float32)[None, :]")
