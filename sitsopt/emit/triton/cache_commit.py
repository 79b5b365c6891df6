"""Triton text that quantizes tiles of 64 keys and values: keys per channel, values per token, packed by halves.

A byte of int4 holds channels i and i + D/2. They are also the pair that a rotation turns, so a key goes from
floats to its byte inside one thread.
"""

from __future__ import annotations

from ..cache import Commit
from .quantize import write_int8
from .source import HEADER, TL, Source, Writer, function, integers, next_power, pointer


def source(kernel: Commit) -> Source:
    """The kernel. Grid: (tiles, kv_heads, batch). All tensors [B, Hk, tokens or tiles, ...]."""
    write = Writer()
    write(HEADER)
    kept = "u8" if kernel.cache == "i4" else "i8"
    low = kernel.cache == "i4"
    params = [pointer("k_ptr", kernel.dtype), pointer("v_ptr", kernel.dtype)]
    if kernel.rope:
        params += [pointer(n, kernel.table or kernel.dtype) for n in ("cos_ptr", "sin_ptr")]
    params += [pointer("kq_ptr", kept), pointer("vq_ptr", kept)]
    params += [pointer("k_scale_ptr", "f16"), pointer("v_scale_ptr", "f16")]
    params += [pointer("k_low_ptr", "f16"), pointer("v_low_ptr", "f16")] * low
    params += integers("tokens", "first_tile")
    params += integers(
        *(f"{t}_{d}" for t in ("k", "v", "kq", "vq") for d in ("b", "h", "t")), aligned=True
    )
    params += integers("ks_b", "ks_h", "ks_t", "vs_b", "vs_h", *["cos_b", "cos_t"] * kernel.rope)
    with function(write, kernel.name, tuple(params), {}, "Quantizes and packs tiles of a cache."):
        write(_PLACE.replace("TILE", str(kernel.tile)))
        for name, size in (("k", kernel.head_dim), ("v", kernel.value_dim)):
            _load(write, kernel, name, size)
            if name == "k" and kernel.rope:
                _rotate(write, kernel)
            _quantize(write, kernel, name, axis=0 if name == "k" else 1)
            _store(write, kernel, name, size)
    return Source(kernel.name, "cache_write", write.text(), tuple(params), (), 4)


_PLACE = """
batch = tl.program_id(2).to(tl.int64)
head = tl.program_id(1)
token = tl.program_id(0) * TILE + tl.arange(0, TILE)
to = token + first_tile * TILE
live = (token < tokens)[:, None]
"""


def _load(write: Writer, kernel: Commit, name: str, size: int) -> None:
    half, width = size // 2, next_power(size // 2)
    write(f"dim = tl.arange(0, {width})[None, :]")
    write(f"keep = live & (dim < {half})")
    write(f"at = batch * {name}_b + head * {name}_h + (token * {name}_t)[:, None] + dim")
    write(f"low = tl.load({name}_ptr + at, mask=keep, other=0).to(tl.float32)")
    write(f"high = tl.load({name}_ptr + at + {half}, mask=keep, other=0).to(tl.float32)")


def _rotate(write: Writer, kernel: Commit) -> None:
    half = kernel.head_dim // 2
    write("turn = batch * cos_b + (token * cos_t)[:, None] + dim")
    for name in ("cos", "sin"):
        write(f"{name}_low = tl.load({name}_ptr + turn, mask=keep, other=0).to(tl.float32)")
        write(
            f"{name}_high = tl.load({name}_ptr + turn + {half}, mask=keep, other=0).to(tl.float32)"
        )
    narrow = f".to({TL[kernel.dtype]}).to(tl.float32)"
    write(f"turned = (low * cos_low - high * sin_low){narrow}")
    write(f"high = (high * cos_high + low * sin_high){narrow}")
    write("low = turned")


def _quantize(write: Writer, kernel: Commit, name: str, axis: int) -> None:
    """`low` and `high` become integers; scales and lows are rounded to f16 before they are used."""
    lift = "[None, :]" if axis == 0 else "[:, None]"
    if kernel.cache == "i4":
        for end, pick, other in (("least", "min", "inf"), ("most", "max", "-inf")):
            for half in ("low", "high"):
                inside = f'tl.where(keep, {half}, float("{other}"))'
                write(f"{end}_{half} = tl.{pick}({inside}, {axis})")
        _join(write, axis)
        for half in ("low", "high"):
            write(
                f"base_{half} = tl.where(tl.abs(least_{half}) < 65504.0, least_{half}, 0.0).to(tl.float16)"
            )
            base = f"base_{half}.to(tl.float32)"
            write(f"scale_{half} = tl.maximum((most_{half} - {base}) / 15.0, 6e-8)")
            write(f"scale_{half} = tl.minimum(scale_{half}, 65504.0).to(tl.float16)")
            step = f"scale_{half}.to(tl.float32){lift}"
            write(f"{half} = ({half} - {base}{lift}) / {step}")
            write(f"{half} = ({half} + 12582912.0) - 12582912.0")
            write(f"{half} = tl.minimum(tl.maximum({half}, 0.0), 15.0).to(tl.uint8)")
        return
    for half in ("low", "high"):
        write(f"most_{half} = tl.max(tl.where(keep, tl.abs({half}), 0.0), {axis})")
    if axis == 1:
        write("most_low = tl.maximum(most_low, most_high)")
        write("most_high = most_low")
    for half in ("low", "high"):
        write(
            f"scale_{half} = tl.minimum(tl.maximum(most_{half} / 127.0, 6e-8), 65504.0).to(tl.float16)"
        )
        write(f"{half} = {half} / scale_{half}.to(tl.float32){lift}")
        write_int8(write, half, half)


def _join(write: Writer, axis: int) -> None:
    """A token has one range over both halves of its channels."""
    if axis == 0:
        return
    write("least_low = tl.minimum(least_low, least_high)")
    write("least_high = least_low")
    write("most_low = tl.maximum(most_low, most_high)")
    write("most_high = most_low")


def _store(write: Writer, kernel: Commit, name: str, size: int) -> None:
    half = size // 2
    write(f"at = batch * {name}q_b + head * {name}q_h + (to * {name}q_t)[:, None] + dim")
    if kernel.cache == "i4":
        write(f"tl.store({name}q_ptr + at, low | (high << 4), mask=keep)")
    else:
        write(f"tl.store({name}q_ptr + at, low, mask=keep)")
        write(f"tl.store({name}q_ptr + at + {half}, high, mask=keep)")
    stored = [("scale", "scale")] + [("low", "base")] * (kernel.cache == "i4")
    for field, value in stored:
        base = f"{name}_{field}_ptr + batch * {name}s_b + head * {name}s_h"
        if name == "v":
            write(f"tl.store({base} + to, {value}_low, mask=token < tokens)")
            continue
        write("channel = tl.arange(0, dim.shape[1])")
        place = f"{base} + (first_tile + tl.program_id(0)) * ks_t + channel"
        write(f"tl.store({place}, {value}_low, mask=channel < {half})")
        write(f"tl.store({place} + {half}, {value}_high, mask=channel < {half})")
