"""The cache against a list of vectors, over random histories: in eager mode, by the reference op, by the kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sitsopt.runtime.kernels import lookup, why_not
from sitsopt.runtime.kv.layer import QuantizedLayer

from .differential import Case

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def reference(layer: QuantizedLayer, q: Any, k: Any, v: Any, mask: Any, scale: float) -> torch.Tensor:  # fmt: skip
    """The op that a graph has, without a kernel."""
    out: torch.Tensor = torch.ops.sits.kv_attention_(
        q, k, v, layer.state, layer.cumulative_length, mask, layer.layout_text, scale
    )
    return out


def kernel(layer: QuantizedLayer, q: Any, k: Any, v: Any, mask: Any, scale: float) -> torch.Tensor:
    """The op with its kernel for this machine."""
    facts = {"head_dim": k.shape[3], "value_dim": v.shape[3], "kv_heads": k.shape[1]}
    facts["layout"] = layer.layout_text
    assert lookup("kv_attention", dtype=q.dtype, **facts), why_not("kv_attention", dtype=q.dtype, **facts)  # fmt: skip
    out: torch.Tensor = torch.ops.sits_cpp.kv_attention_(
        q, k, v, layer.state, layer.cumulative_length, mask, layer.layout_text, scale
    )
    return out


@pytest.mark.parametrize("seed", range(12))
def test_a_cache_is_a_list_of_vectors(seed: int) -> None:
    Case(seed).run(12)


@pytest.mark.parametrize("seed", range(100, 106))
def test_so_is_the_op(seed: int) -> None:
    Case(seed, reference).run(12)


@pytest.mark.parametrize("seed", range(200, 218))
def test_so_is_its_kernel(seed: int) -> None:
    Case(seed, kernel, DTYPES).run(12)


@pytest.mark.slow
@pytest.mark.parametrize("step", [None, kernel], ids=["eager", "kernel"])
def test_ten_thousand_operations(step: Any) -> None:
    for seed in range(1000, 1200):
        Case(seed, step, DTYPES).run(25) if step else Case(seed).run(25)
