"""Triton text that chooses tokens from a large vocabulary.

A float becomes an integer of the same order, so that a threshold is found digit by digit: eight passes of
sixteen candidates each pin down the key of the k-th value, or of the last value inside p, however the logits lie.
"""

from __future__ import annotations

from ..sample import Argmax, Draw
from .source import HEADER, Source, Writer, floats, function, integers, pointer

_KEY = """
bits = (x + 0.0).to(tl.int32, bitcast=True)
key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
key = tl.where(x != x, 0x7FFFFFFF, key)
"""


def argmax(kernel: Argmax) -> Source:
    """The kernel. Grid: (rows, SPLITS). `lock` holds a zero a row and is left so."""
    write = Writer()
    write(HEADER)
    params = (
        pointer("x_ptr", kernel.dtype), pointer("part_ptr", "i64"), pointer("lock_ptr", "i32"),
        pointer("out_ptr", "i64"), *integers("vocabulary", "x_stride"),
    )  # fmt: skip
    constants = {"BLOCK": 4096, "SPLITS": 16}
    with function(
        write, kernel.name, params, constants, "The index of the largest logit of a row."
    ):
        write("""
            row = tl.program_id(0).to(tl.int64)
            share = tl.cdiv(tl.cdiv(vocabulary, BLOCK), SPLITS) * BLOCK
            first = tl.program_id(1) * share
            best = tl.full([BLOCK], -0x7FFFFFFFFFFFFFFF, tl.int64)
        """)
        with write.block(
            "for start in range(first, tl.minimum(first + share, vocabulary), BLOCK):"
        ):
            write("at = start + tl.arange(0, BLOCK)")
            write("keep = at < vocabulary")
            write(
                'x = tl.load(x_ptr + row * x_stride + at, mask=keep, other=float("-inf")).to(tl.float32)'
            )
            write(_KEY)
            write("""
                rank = (key.to(tl.int64) << 32) | (0x7FFFFFFF - at).to(tl.int64)
                best = tl.maximum(best, tl.where(keep, rank, -0x7FFFFFFFFFFFFFFF))
            """)
        write("""
            tl.store(part_ptr + row * SPLITS + tl.program_id(1), tl.max(best, 0))
            tl.debug_barrier()
            ticket = tl.atomic_add(lock_ptr + row, 1)
        """)
        with write.block("if ticket == SPLITS - 1:"):
            write("""
                tl.store(lock_ptr + row, 0)
                winner = tl.max(tl.load(part_ptr + row * SPLITS + tl.arange(0, SPLITS)), 0)
                tl.store(out_ptr + row, 0x7FFFFFFF - (winner & 0x7FFFFFFF))
            """)
    return Source(kernel.name, "sample", write.text(), params, tuple(constants.items()), 8)


def draw(kernel: Draw) -> Source:
    """The kernel. Grid: (rows,). uniform: one number of [0, 1) a row; k 0 and p 1 cut nothing."""
    write = Writer()
    write(HEADER)
    params = (
        pointer("x_ptr", kernel.dtype), pointer("uniform_ptr", "f32"), pointer("out_ptr", "i64"),
        *floats("inverse_temperature", "p"), *integers("k", "vocabulary", "x_stride"),
    )  # fmt: skip
    constants = {"BLOCK": 2048}
    with function(write, kernel.name, params, constants, "One draw a row, cut by top-k and top-p."):
        write("row = tl.program_id(0).to(tl.int64)")
        write("digit = tl.arange(0, 16)")
        _largest(write)
        write("floor = -0x80000000")
        with write.block("if k > 0:"):
            _search(write, "1.0", "tl.minimum(k, vocabulary).to(tl.float32)")
        _mass(write)
        with write.block("if p < 1.0:"):
            _search(write, "weight", "p * mass")
            _mass(write)
        _choose(write)
    return Source(kernel.name, "sample", write.text(), params, tuple(constants.items()), 8)


def _each_block(write: Writer, weights: bool = True) -> None:
    write("at = start + tl.arange(0, BLOCK)")
    write("keep = at < vocabulary")
    write('x = tl.load(x_ptr + row * x_stride + at, mask=keep, other=float("-inf")).to(tl.float32)')
    if weights:
        write("weight = tl.exp((x - top) * inverse_temperature)")
        write("weight = tl.where(keep & (x == x), weight, 0.0)")
        write(_KEY)
        write("inside = keep & (x == x) & (key >= floor)")


def _largest(write: Writer) -> None:
    write('tops = tl.full([BLOCK], float("-inf"), tl.float32)')
    with write.block("for start in range(0, vocabulary, BLOCK):"):
        _each_block(write, weights=False)
        write("tops = tl.maximum(tops, x)")
    write("top = tl.max(tops, 0)")


def _search(write: Writer, weight: str, target: str) -> None:
    """floor: the largest key at or above which the values inside weigh `target` or more."""
    write(f"target = {target}")
    write("base = tl.full([], -0x80000000, tl.int64)")
    with write.block("for turn in range(8):"):
        write("shift = 28 - 4 * turn")
        write("mark = (base + (digit.to(tl.int64) << shift)).to(tl.int32)")
        write("sums = tl.zeros([16], tl.float32)")
        with write.block("for start in range(0, vocabulary, BLOCK):"):
            _each_block(write)
            write("above = inside[:, None] & (key[:, None] >= mark[None, :])")
            value = f"{weight}[:, None]" if weight != "1.0" else weight
            write(f"sums += tl.sum(tl.where(above, {value}, 0.0), 0)")
        write("enough = tl.sum(((sums >= target) & (digit > 0)).to(tl.int32), 0)")
        write("base += enough.to(tl.int64) << shift")
    write("floor = base.to(tl.int32)")


def _mass(write: Writer) -> None:
    write("sums_of = tl.zeros([BLOCK], tl.float32)")
    with write.block("for start in range(0, vocabulary, BLOCK):"):
        _each_block(write)
        write("sums_of += tl.where(inside, weight, 0.0)")
    write("mass = tl.sum(sums_of, 0)")


def _choose(write: Writer) -> None:
    write("""
        goal = tl.load(uniform_ptr + row) * mass
        before = 0.0
        found = 0x7FFFFFFF
        last = 0
    """)
    with write.block("for start in range(0, vocabulary, BLOCK):"):
        _each_block(write)
        write("""
            inside = inside & (weight > 0.0)
            running = before + tl.cumsum(tl.where(inside, weight, 0.0), 0)
            found = tl.minimum(found, tl.min(tl.where(inside & (running > goal), at, 0x7FFFFFFF), 0))
            last = tl.maximum(last, tl.max(tl.where(inside, at, 0), 0))
            before = tl.max(running, 0)
        """)
    write("tl.store(out_ptr + row, tl.where(found == 0x7FFFFFFF, last, found).to(tl.int64))")
