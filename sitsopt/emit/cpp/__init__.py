"""C++ text for a kernel description. Plain text in, plain text out: no torch, no compiler."""

from __future__ import annotations

from ..kernel import ISAS, Attention, Kernel, KvAttention, Packed
from . import abi, attention, attention_kv, element, linear, packed, vector
from .ops import ops_text

__all__ = ["kernel_text", "ops_text"]


def kernel_text(kernel: Kernel) -> str:
    """The whole translation unit of one kernel. It needs no header but the compiler's own."""
    lanes = ISAS[kernel.isa].lanes
    parts = [vector.text(lanes), element.text(kernel.dtype)]
    if isinstance(kernel, Attention):
        parts += [abi.ATTENTION, attention.text(kernel)]
    elif isinstance(kernel, KvAttention):
        parts += [abi.ATTENTION, abi.KV, attention_kv.text(kernel)]
    elif isinstance(kernel, Packed):
        parts += [abi.LINEAR, packed.text(kernel)]
    else:
        parts += [abi.LINEAR, linear.text(kernel)]
    return "\n".join(parts)
