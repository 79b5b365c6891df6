"""Attention written out in ops: permutations, scales and masks that fused kernels have misread (M01, M04)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from sitsopt.runtime import kernels
from tests.cases.harness import check, identity, rewrite_case, shipped, transpose_back

INF = float("inf")
CASES: dict[str, tuple[Callable[..., Any], Callable[[], list[torch.Tensor]]]] = {}
SQUARE, ODD = (4, 4, 4, 4), (2, 3, 5, 8)  # every dim the same, and every dim its own


def qkv(shape: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.randn(shape) for _ in range(3)]


def case(*extra: torch.Tensor, shape: tuple[int, ...] = SQUARE) -> Callable[..., Any]:
    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        CASES[fn.__name__] = (fn, lambda: [*qkv(shape), *extra])
        return fn

    return add


@case()
def softmax_over_the_queries(q, k, v):
    return (q @ k.transpose(-2, -1) / 2.0).softmax(-2) @ v


@case()
def softmax_over_the_heads(q, k, v):
    return (q @ k.transpose(-2, -1) / 2.0).softmax(1) @ v


@case()
def key_of_the_wrong_axes(q, k, v):
    return (q @ k.transpose(1, 2) * 0.3).softmax(-1) @ v


@case()
def key_not_transposed(q, k, v):
    return (q @ k * 0.3).softmax(-1) @ v


@case()
def query_by_another_permutation(q, k, v):
    q, k, v = q.permute(0, 2, 3, 1), k.permute(0, 2, 1, 3), v.permute(0, 2, 1, 3)
    return (q @ k.transpose(-2, -1) / 0.3).softmax(-1) @ v


@case()
def value_by_another_permutation(q, k, v):
    q, k, v = q.permute(0, 2, 1, 3), k.permute(0, 2, 1, 3), v.permute(0, 2, 3, 1)
    return (q @ k.transpose(-2, -1) / 0.3).softmax(-1) @ v


@case(shape=ODD)
def plain(q, k, v):
    return (q @ k.transpose(-2, -1) * 0.35).softmax(-1) @ v


@case(torch.tensor(2.5), shape=ODD)
def scale_is_a_tensor(q, k, v, s):
    return (q @ k.transpose(-2, -1) / s).softmax(-1) @ v


@case(torch.tensor(2.5), torch.zeros(2, 1, 5, 5), shape=ODD)
def scale_is_a_tensor_under_a_mask(q, k, v, s, mask):
    return (q @ k.transpose(-2, -1) / s + mask).softmax(-1) @ v


@case(torch.tensor([[0, 1, 0, 2], [0, 0, 0, 0], [1, 1, 1, 1], [2, 0, 0, 0]]))
def mask_where_one(q, k, v, kind):
    q, k, v = (t.permute(0, 2, 1, 3) for t in (q, k, v))
    scores = (q @ k.transpose(-2, -1)).div(2.0)
    mask = (kind == 1).view(4, 1, 1, 4).expand_as(scores)
    return torch.softmax(scores.masked_fill(mask, torch.full((), -INF)), -1) @ v


@case(torch.tensor([[0, 1, 0, 2], [0, 0, 0, 0], [1, 1, 1, 1], [2, 0, 0, 0]]))
def mask_filled_with_little(q, k, v, kind):
    q, k, v = (t.permute(0, 2, 1, 3) for t in (q, k, v))
    scores = (q @ k.transpose(-2, -1)).div(2.0)
    mask = (kind == 0).view(4, 1, 1, 4).expand_as(scores)
    return torch.softmax(scores.masked_fill(mask, torch.full((), -0.25)), -1) @ v


@case()
def probabilities_returned_too(q, k, v):
    weights = (q @ k.transpose(-2, -1) * 0.5).softmax(-1)
    return weights @ v, weights


@case()
def probabilities_scaled(q, k, v):
    return ((q @ k.transpose(-2, -1) * 0.5).softmax(-1) * 2) @ v


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
@pytest.mark.parametrize("name", CASES)
def test_written_out(name: str, lowering: str) -> None:
    torch.manual_seed(1)
    fn, make = CASES[name]
    check(fn, make(), lowering=lowering)


# -- M01 ------------------------------------------------------------------------------------------------


def projected(x, wq, wk, wv, heads, dim):
    b, t, _ = x.shape
    q = (x @ wq).view(b, t, heads, dim).permute(0, 2, 1, 3)
    v = (x @ wv).view(b, t, heads, dim).permute(0, 2, 1, 3)
    k = (x @ wk).view(b, t, heads, dim).permute(0, 2, 3, 1)  # (B, H, D, T) already
    return ((q @ k) * 0.35).softmax(-1) @ v


@pytest.mark.parametrize("t, heads, dim", [(4, 4, 4), (8, 8, 8), (8, 4, 8), (5, 3, 7)])
@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_key_permuted_into_place(t: int, heads: int, dim: int, lowering: str) -> None:
    torch.manual_seed(2)
    size = heads * dim
    args = [torch.randn(2, t, size), *[torch.randn(size, size) / 4 for _ in range(3)]]
    check(lambda *a: projected(*a, heads, dim), args, lowering=lowering)


# -- M04: rows that may attend nothing ------------------------------------------------------------------

EMPTY_ROW = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 1, 1]]).bool()
FILLS = {
    "a large number: the mean of all values": lambda s: s.masked_fill(~EMPTY_ROW, -1e9),
    "the smallest number": lambda s: s.masked_fill(~EMPTY_ROW, torch.finfo(s.dtype).min),
    "infinity: NaN": lambda s: s.masked_fill(~EMPTY_ROW, -INF),
    "added infinity: NaN": lambda s: (
        s + torch.zeros(3, 3, dtype=s.dtype).masked_fill(~EMPTY_ROW, -INF)
    ),
    "where": lambda s: torch.where(EMPTY_ROW, s, -INF),
    "zeroed afterwards": lambda s: s.masked_fill(~EMPTY_ROW, -INF),
}


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
@pytest.mark.parametrize("fill", FILLS)
def test_rows_that_attend_nothing(fill: str, lowering: str) -> None:
    def attend(q, k, v):
        weights = FILLS[fill](q @ k.mT / 2).softmax(-1)
        if fill == "zeroed afterwards":
            weights = weights.masked_fill(~EMPTY_ROW, 0.0)
        return weights @ v

    torch.manual_seed(3)
    check(attend, qkv((2, 2, 3, 4)), lowering=lowering)


@pytest.mark.parametrize("fill", [-INF, torch.finfo(torch.float32).min])
def test_the_kernel_for_written_out_attention(fill: float) -> None:
    """Grouped heads, a softcap, and a row that may attend nothing: NaN with -inf, the mean with a finite number."""
    mask = torch.zeros(3, 70).masked_fill(torch.ones(3, 70).triu(30).bool(), fill)
    mask[1] = fill

    def attend(q, k, v):
        k, v = (t.repeat_interleave(3, 1) for t in (k, v))
        scores = torch.tanh(torch.matmul(q, k.transpose(2, 3)) * 0.25 / 5.0) * 5.0 + mask
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype)
        return torch.matmul(weights, v)

    torch.manual_seed(3)
    q, k, v = torch.randn(2, 6, 3, 16), torch.randn(2, 2, 70, 16), torch.randn(2, 2, 70, 16)
    with torch.no_grad():
        code = check(attend, [q, k, v], shipped(), lowering="auto")
    (site,) = [s for r in code.records for s in r.sites if s.rule == "attention/gqa"]
    assert site.lowered == ("cpp" if kernels.availability()[0] else "inductor")


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
@pytest.mark.parametrize("mask", [EMPTY_ROW, torch.zeros(3, 3).masked_fill(~EMPTY_ROW, -INF)])
def test_the_whole_op_gives_zeros_for_them(mask: torch.Tensor, lowering: str) -> None:
    torch.manual_seed(3)
    check(lambda q, k, v: sdpa(q, k, v, attn_mask=mask), qkv((2, 2, 3, 4)), lowering=lowering)


@pytest.mark.parametrize("queries, keys", [(1, 9), (3, 9), (9, 9), (9, 3)])
def test_causal_is_top_left(queries: int, keys: int) -> None:
    """K14. The values are unit vectors, so that the result shows who attends what."""
    q, k, v = torch.randn(1, 2, queries, 9), torch.randn(1, 2, keys, 9), torch.eye(keys, 9)
    v = v.expand(1, 2, keys, 9)
    check(lambda q, k, v: sdpa(q, k, v, is_causal=True), [q, k, v], lowering="eager")
    check(lambda q, k, v: sdpa(q, k, v, is_causal=True), [q, k, v], lowering="inductor")


def test_layouts_and_gradients() -> None:
    def attend(q, k, v):
        return ((q @ k.transpose(-2, -1)) / math.sqrt(8)).softmax(-1) @ v

    torch.manual_seed(4)
    rewrite_case(attend, qkv(ODD), tolerance=5e-2)
    rewrite_case(attend, qkv(ODD), lowering="inductor", dtypes=[torch.float32],
                 layouts=[identity, transpose_back])  # fmt: skip
