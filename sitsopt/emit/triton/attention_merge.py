"""Triton text that joins the parts of a split attention: a program takes one (sequence, kv head, row)."""

from __future__ import annotations

from ..attention import Merge
from .attention import LOG2E
from .source import HEADER, TL, Source, Writer, function, integers, next_power, pointer


def source(kernel: Merge) -> Source:
    """The kernel. Grid: (batch * kv_heads * tokens * group,). lse: log of each row's softmax sum."""
    write = Writer()
    write(HEADER)
    params = [pointer(n, "f32") for n in ("part_ptr", "top_ptr", "total_ptr")]
    params += [pointer("out_ptr", kernel.dtype), pointer("lse_ptr", "f32")]
    params += [pointer("sink_ptr", "f32")] if kernel.sinks else []
    params += integers("tokens", "kv_heads", "slots", "o_b", "o_h", "o_t")
    constants = {"SLOTS": 16}
    with function(
        write, kernel.name, tuple(params), constants, "Joins the parts of a split attention."
    ):
        _place(write, kernel)
        write('top = tl.max(tl.full([SLOTS], float("-inf"), tl.float32), 0)')
        _sum(write, kernel)
        _store(write, kernel)
    return Source(
        kernel.name, "attention", write.text(), tuple(params), tuple(constants.items()), 2
    )


def _place(write: Writer, kernel: Merge) -> None:
    width = next_power(kernel.value_dim, 16)
    write(f"""
        rows = tokens * {kernel.group}
        pair = (tl.program_id(0) // rows).to(tl.int64)
        row = tl.program_id(0) % rows
        batch = pair // kv_heads
        head = pair % kv_heads * {kernel.group} + row % {kernel.group}
        token = row // {kernel.group}
        dim = tl.arange(0, {width})
        total = 0.0
        acc = tl.zeros([{width}], tl.float32)
    """)


def _sum(write: Writer, kernel: Merge) -> None:
    width = next_power(kernel.value_dim, 16)
    keep = "live[:, None]"
    if width != kernel.value_dim:
        keep += f" & (dim < {kernel.value_dim})[None, :]"
    with write.block("for start in range(0, slots, SLOTS):"):
        write(f"""
            slot = start + tl.arange(0, SLOTS)
            live = slot < slots
            at = (pair * slots + slot) * rows + row
            tops = tl.load(top_ptr + at, mask=live, other=float("-inf"))
            higher = tl.maximum(top, tl.max(tops, 0))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            share = tl.exp2(tops - base)
            shrink = tl.exp2(top - base)
            total = total * shrink + tl.sum(share * tl.load(total_ptr + at, mask=live, other=0), 0)
            part_at = part_ptr + at[:, None] * {kernel.value_dim} + dim[None, :]
            part = tl.load(part_at, mask={keep}, other=0)
            acc = acc * shrink + tl.sum(part * share[:, None], 0)
            top = higher
        """)


def _store(write: Writer, kernel: Merge) -> None:
    if kernel.sinks:
        write(f"""
            sink = tl.load(sink_ptr + head) * {LOG2E}
            final = tl.maximum(top, sink)
            shrink = tl.exp2(top - final)
            acc = acc * shrink
            total = total * shrink + tl.exp2(sink - final)
            top = final
        """)
    write("tl.store(lse_ptr + tl.program_id(0), (top + tl.log2(total)) * 0.6931471805599453)")
    if kernel.empty == "zero":
        write("total = tl.where(total == 0.0, 1.0, total)")
    keep = ""
    if next_power(kernel.value_dim, 16) != kernel.value_dim:
        keep = f", mask=dim < {kernel.value_dim}"
    write("to = batch * o_b + head * o_h + token * o_t + dim")
    write(f"tl.store(out_ptr + to, (acc / total).to({TL[kernel.dtype]}){keep})")
