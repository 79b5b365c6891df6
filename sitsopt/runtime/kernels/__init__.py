"""The CPU kernels: which op there is for given facts, built the first time it is asked for.

    op = lookup("attention", dtype=torch.bfloat16, head_dim=64, q_rows=1)
    if op is None:
        reason = why_not("attention", dtype=torch.bfloat16, head_dim=64, q_rows=1)

The ops are `torch.ops.sits_cpp.attention`, `.linears`, `.gated` and `.packed_linears`. Each takes any tensors its schema
allows: where no kernel fits it calls ATen, so a wrong guess costs time and never a result. They have no
derivatives: for inference only.
"""

from __future__ import annotations

from typing import Any

import torch

from ...emit.kernel import SCHEMES
from ...graph.kv.layout import Layout
from . import load
from .toolchain import BuildError, machine_isa

__all__ = ["availability", "lookup", "refusal", "why_not"]

OPS = ("attention", "kv_attention", "linears", "gated", "packed_linears")
HEAD_DIMS = range(1, 513)
LINEAR_ROWS = 16


def availability() -> tuple[bool, str]:
    """Whether kernels can be used here (this builds the ops the first time), and if not, why."""
    try:
        load.ops()
    except BuildError as error:
        return False, str(error)
    return True, f"built for {machine_isa().name}"


def lookup(op: str, *, dtype: torch.dtype, device: str | torch.device = "cpu", **facts: Any) -> Any:
    """The overload to call for these facts, or None; `why_not` with the same arguments says why.

    attention: head_dim, value_dim (head_dim unless given), q_rows (T). linears, gated: rows (of x).
    kv_attention: head_dim, value_dim, kv_heads, layout. packed_linears: scheme, group, low, inputs, as `sits::packed_linears` has them. The ops
    serve any number of rows; with q_rows or rows given, the answer is whether a kernel of ours would run.
    """
    return None if _attempt(op, dtype, device, facts) else getattr(torch.ops.sits_cpp, op).default


def why_not(
    op: str, *, dtype: torch.dtype, device: str | torch.device = "cpu", **facts: Any
) -> str:
    """Why `lookup` gives None for these facts; empty when it does not."""
    return _attempt(op, dtype, device, facts)


def limited(dtype: torch.dtype) -> bool:
    """Whether the attention kernel is slower than matrix products for many query rows of this dtype here."""
    return load.most_query_rows(load.DTYPE_NAMES.get(dtype, "")) < load.ANY_ROWS


def _attempt(op: str, dtype: torch.dtype, device: str | torch.device, facts: dict[str, Any]) -> str:
    reason = refusal(op, dtype, device, facts)
    if reason:
        return reason
    try:
        load.kernel(load.describe(op, dtype, **facts))
    except BuildError as error:
        return str(error)
    return ""


def _packed_refusal(facts: dict[str, Any]) -> str:
    if facts.get("scheme") not in SCHEMES:
        return f"packed_linears needs a scheme: {', '.join(SCHEMES)}"
    if facts.get("group", 0) % 8:
        return f"groups of {facts['group']} are no multiple of 8"
    return ""


def kv_refusal(dtype: torch.dtype, facts: dict[str, Any]) -> str:
    """Why there is no kernel for such a cache; empty where there is one."""
    layout = Layout.parse(facts["layout"])
    if layout.dtype != dtype:
        return f"the cache keeps {layout.kept}, the model computes in {str(dtype).removeprefix('torch.')}"
    if facts["head_dim"] != facts["value_dim"]:
        return "keys and values differ in size"
    if layout.bits == 4 and facts["head_dim"] % 2:
        return f"int4 needs an even head size, not {facts['head_dim']}"
    return ""


def refusal(op: str, dtype: torch.dtype, device: str | torch.device, facts: dict[str, Any]) -> str:
    """What the facts alone rule out, without building anything; empty when they allow it."""
    if op not in OPS:
        return f"no kernel is called {op}; there are {', '.join(OPS)}"
    if torch.device(device).type != "cpu":
        return f"{op} is a CPU kernel and the tensors are on {device}"
    if dtype not in load.DTYPE_NAMES:
        return f"{op} computes in f32, bf16 and f16, not in {str(dtype).removeprefix('torch.')}"
    if op == "attention":
        for name in ("head_dim", "value_dim"):
            if facts.get(name) is not None and facts[name] not in HEAD_DIMS:
                return f"{name} {facts[name]} is outside 1 to {HEAD_DIMS[-1]}"
        if facts.get("head_dim") is None:
            return "attention needs head_dim"
        rows, most = facts.get("q_rows"), load.most_query_rows(load.DTYPE_NAMES[dtype])
    elif op == "kv_attention":
        return kv_refusal(dtype, facts)
    elif op == "packed_linears":
        return _packed_refusal(facts)
    else:
        rows, most = facts.get("rows"), LINEAR_ROWS
    if rows is not None and rows > most:
        return f"{rows} rows are a matrix product, which ATen does better (the kernel takes up to {most})"
    return ""
