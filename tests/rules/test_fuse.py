"""Rules that fuse: their examples and mutants, and the situations that broke others (M05, M10, M15, M18, D08)."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sitsopt.rewrite.mutate import survivors
from sitsopt.rewrite.order import ordered
from sitsopt.rewrite.verify import verify
from sitsopt.spec.locate import rule_dirs
from sitsopt.spec.rule import load_rules
from tests.cases.harness import (
    BF16,
    F32,
    LAYOUTS,
    Compiled,
    check,
    compiled,
    expand_dim0,
    rewrite_case,
)

ALL = ordered(r for r in load_rules(rule_dirs(())) if r.stage != "weights")
RULES = {r.id: r for r in ALL}
WRITABLE = [layout for layout in LAYOUTS if layout is not expand_dim0]
FEW = LAYOUTS[:2]
FUSE = [i for i in RULES if i.startswith("fuse/")]


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


def fired(code: Compiled) -> Counter[str]:
    return Counter(site.rule for record in code.records for site in record.sites)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("rule", FUSE)
def test_examples_hold(rule: str) -> None:
    assert verify(RULES[rule]) == []


@pytest.mark.slow
@pytest.mark.parametrize("rule", FUSE)
def test_examples_notice_every_mutant(rule: str) -> None:
    assert survivors(RULES[rule]) == []


# -- which linears belong together ----------------------------------------------------------------------


class Attention(nn.Module):
    """Attention and a gated MLP of one input whose projections all have the same shape."""

    def __init__(self, mlp_first: bool) -> None:
        super().__init__()
        self.mlp_first = mlp_first
        for name in ("q", "k", "v", "gate", "up", "down"):
            setattr(self, name, nn.Linear(8, 8, bias=name in "qv"))

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (p(x).unflatten(-1, (2, 4)).transpose(1, 2) for p in (self.q, self.k, self.v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = (self.feed, self.attend) if self.mlp_first else (self.attend, self.feed)
        return sum(part(x) for part in parts)


@pytest.mark.parametrize("mlp_first", [False, True])
def test_gate_and_up_are_never_taken_for_query_and_key(mlp_first: bool) -> None:
    model = Attention(mlp_first)
    with torch.no_grad():
        code = check(model, [randn(3, 5, 8)], ALL)
    counts = fired(code)
    assert (counts["fuse/qkv"], counts["fuse/gate_up"], counts["fuse/swiglu"]) == (1, 1, 1)
    assert counts["fuse/kv"] == 0 and counts["fuse/linear"] == 1
    gate_up = next(a for a in code.records[0].sites if a.rule == "fuse/gate_up")
    assert {gate_up.binding[w] for w in ("wg", "wu")} == {
        a for a, name in _names(code, model).items() if name in ("gate.weight", "up.weight")
    }


def _names(code: Compiled, model: nn.Module) -> dict[str, str]:
    """Placeholders of the captured graph to the parameters they hold, in the order of first use."""
    x, found = randn(3, 5, 8), {}

    def backend(gm, inputs):
        from sitsopt.graph.capture import capture

        graph = capture(gm, inputs)
        ids = {id(p): n for n, p in model.named_parameters()}
        for place, value in zip(graph.placeholders, graph.inputs, strict=True):
            found[place.name] = ids.get(id(value), "")
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, backend=backend)(x)
    return found


class CrossAttention(nn.Module):
    """Layers that all project the same memory."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({n: nn.Linear(8, 8) for n in "qkv"}) for _ in range(layers)
        )

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            q, k, v = layer["q"](x), layer["k"](memory), layer["v"](memory)
            x = x + F.scaled_dot_product_attention(q, k, v)
        return x


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_cross_attention_gets_one_pair_a_layer(layers: int) -> None:
    with torch.no_grad():
        counts = fired(check(CrossAttention(layers), [randn(2, 3, 8), randn(2, 5, 8)], ALL))
    assert counts["fuse/kv"] == layers and counts["fuse/qkv"] == 0


def test_weights_stay_where_they_lie() -> None:
    """No copy of a weight: what the model changes later is seen by the next call."""
    model = Attention(False)
    x = randn(3, 5, 8)
    with torch.no_grad():
        code = compiled(model, ALL)
        code.call(x)
        for p in model.parameters():
            p.data.mul_(-0.5)
        torch.testing.assert_close(code.call(x), model(x))
    assert len(code.records) == 1


# -- M05: a write between the values of a pattern ---------------------------------------------------------


def _swiglu_then_write(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    act = F.silu(gate)
    up.mul_(2)
    return act * up


def _write_through_view(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    act = F.silu(gate)
    up[0].add_(1)
    gate[1:].zero_()
    return act * up + gate


def _norm_of_a_written_sum(x: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + r
    x.copy_(r)
    return F.rms_norm(total, [6], eps=1e-6), total + x


@pytest.mark.parametrize("fn", [_swiglu_then_write, _write_through_view, _norm_of_a_written_sum])
def test_writes_in_between_are_seen(fn) -> None:
    rewrite_case(fn, [randn(4, 6), randn(4, 6)], ALL, grads=[False], layouts=WRITABLE)


# -- M10: a value inside a pattern that others read -------------------------------------------------------


def test_inner_values_stay_for_their_other_readers() -> None:
    def capped(x, w):
        logits = F.linear(x, w)
        cap = torch.tanh(logits / 30.0) * 30.0
        return cap, logits.logsumexp(-1), torch.tanh(logits / 30.0).detach()

    def gated(x, w, v):
        gate, up = F.linear(x, w), F.linear(x, v)
        act = F.silu(gate)
        return act * up, act.sum(), gate.detach(), up.mean()

    rewrite_case(capped, [randn(5, 8), randn(10, 8)], ALL, layouts=FEW)
    rewrite_case(gated, [randn(5, 8), randn(6, 8), randn(6, 8)], ALL, layouts=FEW)


def test_a_loss_and_its_regulariser_share_their_logits() -> None:
    y = torch.tensor([1, 5, 0, 7, 9, 5])

    def f(x, w):
        logits = F.linear(x, w).float() / 2.0
        loss = F.cross_entropy(logits, y, ignore_index=5)
        z = logits.logsumexp(-1)[y != 5].pow(2).mean()
        return loss + 0.1 * z, z.detach()

    rewrite_case(f, [randn(6, 8), randn(10, 8)], ALL, dtypes=[F32], layouts=FEW)


# -- M15: what an op does stands in its schema, not in its name -------------------------------------------

LIB = torch.library.Library("sits_names", "DEF")
LIB.define("f(Tensor x, Tensor out) -> Tensor")
LIB.define("g_(Tensor x) -> Tensor")
LIB.define("h(Tensor(a!) x) -> ()")
for _name, _fn in {
    "f": lambda x, out: x + 2 * out,
    "g_": lambda x: x * 3,
    "h": lambda x: x.add_(1) and None,
}.items():
    LIB.impl(_name, _fn, "CompositeExplicitAutograd")
    torch.library.register_fake(
        f"sits_names::{_name}",
        (lambda x: None) if _name == "h" else (lambda *a: torch.empty_like(a[0])),
        lib=LIB,
    )
T = torch.ops.sits_names


@pytest.mark.parametrize("op", [lambda x: T.f(x, x), T.g_], ids=["argument out", "name g_"])
def test_a_pure_op_with_a_suspicious_name_stops_nothing(op) -> None:
    def fn(gate, up):
        act = F.silu(gate)
        other = op(up)
        return act * up, other

    code = check(fn, [randn(4, 6), randn(4, 6)], ALL)
    assert fired(code)["fuse/swiglu"] == 1


def test_a_writing_op_with_an_innocent_name_is_seen() -> None:
    def fn(gate, up):
        act = F.silu(gate)
        T.h(up)
        return act * up

    check(fn, [randn(4, 6), randn(4, 6)], ALL)


# -- M18: mixed dtypes in one pattern ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtypes", [*itertools.product([BF16, F32, torch.float16], [BF16, F32])], ids=str
)
@pytest.mark.parametrize("round_first", [True, False])
def test_norms_promote_as_eager_does(dtypes, round_first: bool) -> None:
    stream, gain = dtypes

    def fn(x, residual, w):
        h = x + residual
        wide = h.float()
        n = wide * torch.rsqrt(wide.pow(2).mean(-1, True) + 1e-6)
        out = w * n.to(h.dtype) if round_first else (n * (w.float() + 1)).to(x.dtype)
        return out, h

    args = [randn(4, 32).to(stream), randn(4, 32).to(stream), randn(32).to(gain)]
    code = check(fn, args, ALL, tolerance=0.0)
    assert fired(code)["fuse/add_rms_norm"] == 1, [m for r in code.records for m in r.misses]


# -- D08: sizes 1 and 2, in any order ---------------------------------------------------------------------


def test_sizes_that_change_between_calls() -> None:
    model, w, u = nn.Linear(8, 8), randn(12, 8), randn(12, 8)

    def fn(x, row):
        h = x + row
        y = model(h)
        return F.silu(F.linear(y, w)) * F.linear(y, u) + F.gelu(F.linear(h, w))

    with torch.no_grad():
        code = compiled(fn, ALL)
        for size in (1, 2, 3, 1, 7, 0, 5):
            x, row = randn(size, 8), randn(1, 8)
            torch.testing.assert_close(code.call(x, row), fn(x, row))
    assert len(code.records) <= 3  # one row, none, any other number


def test_a_broadcast_that_holds_for_one_row_is_not_reused_for_two() -> None:
    def fn(gate, up):
        return F.silu(gate) * up

    with torch.no_grad():
        code = compiled(fn, ALL)
        for rows in (1, 2, 3, 1):
            gate, up = randn(rows, 8), randn(1, 8)
            torch.testing.assert_close(code.call(gate, up), fn(gate, up))
    assert fired(code)["fuse/swiglu"] <= 1


def test_few_rows_are_proved_and_never_guarded() -> None:
    """fuse/linear is for few rows. A length that may grow stays one graph, in which it does not apply."""
    model = nn.Linear(8, 6)
    with torch.no_grad():
        code = compiled(model, ALL, dynamic=True)
        for rows in (3, 30, 4, 16, 17):
            x = randn(rows, 8)
            torch.testing.assert_close(code.call(x), model(x))
    assert [any(s.rule == "fuse/linear" for s in r.sites) for r in code.records] == [False]
    few = compiled(model, ALL)
    with torch.no_grad():
        few.call(randn(3, 8))
    assert [any(s.rule == "fuse/linear" for s in r.sites) for r in few.records] == [True]


# -- gradients ------------------------------------------------------------------------------------------


def test_every_fusion_may_stand_in_a_graph_that_records_gradients() -> None:
    assert all(RULES[i].grad == "safe" for i in FUSE)
    model = Attention(False)

    def fn(x):
        return model(x)

    check(fn, [randn(3, 5, 8).requires_grad_()], ALL, tolerance=1e-5)
