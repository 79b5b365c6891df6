"""What a rule may take: never across a write, never a value that someone else reads, never another dtype."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.cases.harness import (
    BF16,
    F32,
    Compiled,
    check,
    compiled,
    copies,
    inline,
    rewrite_case,
    shipped,
)

SIN_ADD = inline("""
inputs: {x: "T[*B]"}
match: return aten.add(aten.sin(x), x)
replace: return aten.add(x, aten.sin(x))
grad: safe
examples:
  - fires: {T: f32, B: [2]}
""")
GATE = inline("""
inputs: {g: "T[*B, H]", u: "T[*B, H]"}
match: return aten.mul(aten.silu(g), u)
replace: return sits.swiglu(g, u)
grad: safe
examples:
  - fires: {T: f32, B: [2], H: 4}
""")


def sites(code: Compiled, prefix: str = "") -> set[str]:
    return {s.rule for r in code.records for s in r.sites if s.rule.startswith(prefix)}


# -- M05: across a write ---------------------------------------------------------------------------------


def not_written(x, y):
    return torch.sin(x) + x, y * 1


def copied_over(x, y):
    a = torch.sin(x)
    x.copy_(y)
    return a + x


def written_through_a_view(x, y):
    a = torch.sin(x)
    x[0].mul_(2)
    return a + x + y


def written_through_out(x, y):
    a = torch.sin(x)
    torch.mul(x, y, out=x)
    return a + x


def written_and_then_all_after(x, y):
    x.add_(y)
    return torch.sin(x) + x


def written_only_afterwards(x, y):
    a = torch.sin(x) + x
    x.zero_()
    return a + y


def the_data_replaced(x, y):
    a = torch.sin(x)
    x.data = y.data
    return a + x


def set_to_another(x, y):
    a = torch.sin(x)
    with torch.no_grad():
        x.set_(y)
    return a + x


WRITES: dict[Callable[..., Any], bool | None] = {
    not_written: True, copied_over: False, written_through_a_view: False, written_through_out: False,
    written_and_then_all_after: True, written_only_afterwards: True,
    the_data_replaced: None, set_to_another: None,
}  # fmt: skip


@pytest.mark.parametrize("fn", WRITES)
def test_across_a_write(fn: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    args = [torch.randn(5, 5), torch.randn(5, 5)]
    rewrite_case(fn, args, [SIN_ADD], must_fire=WRITES[fn], grads=[False], dtypes=[F32],
                 layouts=[lambda t: t])  # fmt: skip


def test_across_a_write_through_an_alias() -> None:
    def f(x, y):
        a = torch.sin(x)
        y.mul_(2)
        return a + x

    x = torch.randn(5, 5)
    for args in ([x, x], [x, x.view(5, 5)], [x, x[1:3]], [x.t(), x]):
        check(f, args, [SIN_ADD])


@pytest.mark.parametrize("write", ["x", "gate", "nothing"])
def test_between_gate_and_up(write: str) -> None:
    def f(x, wg, wu):
        g = F.silu(F.linear(x, wg))
        if write == "x":
            x.mul_(2)
        if write == "gate":
            g.mul_(2)
        return g * F.linear(x, wu)

    args = [torch.randn(4, 8), torch.randn(6, 8), torch.randn(6, 8)]
    code = check(f, args, [GATE])
    assert code.fired() == (write != "gate")
    check(f, args, shipped())


# -- M10: a value in the middle that others read ----------------------------------------------------------


def test_logits_with_several_readers() -> None:
    def f(x, y, w):
        logits = F.linear(x, w).float() / 2.0
        loss = F.cross_entropy(logits, y, ignore_index=5)
        z = logits.logsumexp(-1)[y != 5].pow(2).mean()
        return loss + 0.1 * z, z.detach()

    torch.manual_seed(1)
    x, y, w = torch.randn(6, 8), torch.randint(0, 10, (6,)), torch.randn(10, 8)
    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    try:
        for grad in (False, True):
            check(f, [x.clone().requires_grad_(grad), y, w.clone().requires_grad_(grad)], shipped())
    finally:
        torch._dynamo.config.capture_dynamic_output_shape_ops = False


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_attention_that_returns_its_probabilities(lowering: str) -> None:
    def f(q, k, v):
        weights = (q @ k.transpose(-2, -1) * 0.25).softmax(-1)
        return weights @ v, weights

    code = check(f, [torch.randn(2, 3, 5, 16) for _ in range(3)], shipped(), lowering)
    assert not sites(code, "attention") and not sites(code, "recompose/attention")


@pytest.mark.parametrize("reader", ["returned", "read", "viewed", "written"])
def test_an_interior_value_is_kept(reader: str) -> None:
    def f(g, u):
        s = F.silu(g)
        out = s * u
        extra = {
            "returned": lambda: s,
            "read": lambda: s.sum(),
            "viewed": lambda: s.t(),
            "written": s.zero_,
        }
        return out, extra[reader]()

    code = check(f, [torch.randn(4, 8), torch.randn(4, 8)], [GATE])
    assert code.fired() == 0
    assert {m.reason for r in code.records for m in r.misses} == {"uses"}


# -- M11: a weight with several readers -------------------------------------------------------------------


class OneConvTwoUses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.bn.running_mean.uniform_(-1, 1)
        self.bn.running_var.uniform_(0.5, 2)

    def forward(self, x, y):
        return self.bn(self.conv(x)), self.conv(y)


class OneConvTwoNorms(OneConvTwoUses):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.BatchNorm2d(4)
        self.other.running_var.uniform_(3, 4)

    def forward(self, x, y):
        return self.bn(self.conv(x)), self.other(self.conv(y))


class OneLinearTwoNorms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.one, self.two = nn.LayerNorm(6), nn.LayerNorm(6)
        for norm in (self.one, self.two):
            nn.init.uniform_(norm.weight, 0.5, 2)

    def forward(self, x, y):
        return self.linear(self.one(x)), self.linear(self.two(y))


class TiedHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.norm = nn.RMSNorm(6)
        nn.init.uniform_(self.norm.weight, 0.5, 2)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids, scale):
        return self.head(self.norm(self.embed(ids))) * scale


IDS = torch.tensor([[1, 2, 10], [0, 5, 5]])
IMAGES = [torch.randn(1, 3, 5, 5), torch.randn(1, 3, 5, 5)]
REUSE: dict[type[nn.Module], list[torch.Tensor]] = {
    OneConvTwoUses: IMAGES, OneConvTwoNorms: IMAGES,
    OneLinearTwoNorms: [torch.randn(2, 6), torch.randn(2, 6)], TiedHead: [IDS, torch.tensor(0.5)],
}  # fmt: skip


@pytest.mark.parametrize("kind", REUSE)
@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_a_reused_weight(kind: type[nn.Module], lowering: str) -> None:
    torch.manual_seed(2)
    model = kind().eval()
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        check(model, REUSE[kind], shipped(), lowering, calls=2)
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[k], before[k]) for k in before)


def test_a_norm_with_statistics_of_its_batch_is_left_alone() -> None:
    torch.manual_seed(3)
    model = OneConvTwoUses().train()
    twin = copy.deepcopy(model)
    code = compiled(model, shipped())
    with torch.no_grad():
        torch.testing.assert_close(code.call(*IMAGES), twin(*IMAGES))
    torch.testing.assert_close(model.state_dict(), twin.state_dict())
    assert not sites(code, "fold")


# -- M15: what an op writes is in its schema --------------------------------------------------------------

LIB = torch.library.Library("sits_cases", "DEF")
LIB.define("f(Tensor x, Tensor out) -> Tensor")
LIB.define("g_(Tensor x) -> Tensor")
LIB.define("h(Tensor(a!) x) -> Tensor")
LIB.impl("f", lambda x, out: x + out, "CompositeExplicitAutograd")
LIB.impl("g_", lambda x: x * 2, "CompositeExplicitAutograd")
LIB.impl("h", lambda x: x.add_(1).clone(), "CompositeExplicitAutograd")
for _name in ("f", "g_", "h"):
    torch.library.register_fake(f"sits_cases::{_name}", lambda x, *_: torch.empty_like(x), lib=LIB)


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_ops_are_judged_by_their_schema(lowering: str) -> None:
    ops = torch.ops.sits_cases

    def innocent(x, y):
        a = torch.sin(x)
        b = ops.f(x, y) + ops.g_(y)
        return a + x, b

    def writes(x, y):
        a = torch.sin(x)
        b = ops.h(x)
        return a + x, b + y

    args = [torch.randn(4, 4), torch.randn(4, 4)]
    assert check(innocent, args, [SIN_ADD], lowering).fired() == 1
    assert check(writes, args, [SIN_ADD], lowering).fired() == 0


# -- M18: mixed dtypes ------------------------------------------------------------------------------------


def gemma_norm(x, res, w):
    h = x + res
    n = h.float() * torch.rsqrt(h.float().pow(2).mean(-1, True) + 1e-6)
    return (n * (w.float() + 1)).to(x.dtype), h


def llama_norm(x, res, w):
    h = x + res
    n = h.float() * torch.rsqrt(h.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * n.to(x.dtype), h


@pytest.mark.parametrize("fn", [gemma_norm, llama_norm])
@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_mixed_dtypes(fn: Callable[..., Any], lowering: str) -> None:
    torch.manual_seed(4)
    for dx, dw in itertools.product([BF16, torch.float16, F32], [BF16, F32]):
        args = [torch.randn(4, 32).to(dx), torch.randn(4, 32).to(dx), torch.randn(32).to(dw)]
        low = None if dx == F32 else 3e-2  # Inductor keeps more digits between two ops than eager
        check(fn, copies(args), shipped(), lowering, tolerance=low)
