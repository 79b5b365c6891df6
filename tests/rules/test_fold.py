"""Rules that fold weights and change layouts: examples, mutants, reuse (M11), parameters that change (Q14)."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from sitsopt.pipeline import Plan, process
from sitsopt.rewrite.mutate import survivors
from sitsopt.rewrite.order import ordered
from sitsopt.rewrite.record import GraphRecord
from sitsopt.rewrite.verify import verify
from sitsopt.runtime.lower import Lowering
from sitsopt.spec.locate import rule_dirs
from sitsopt.spec.rule import load_rules

ALL = ordered(r for r in load_rules(rule_dirs(())) if r.stage != "weights")
RULES = {r.id: r for r in ALL}
FOLD = [i for i in RULES if i.startswith(("fold/", "layout/"))]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("rule", FOLD)
def test_examples_hold(rule: str) -> None:
    assert verify(RULES[rule]) == []


@pytest.mark.slow
@pytest.mark.parametrize("rule", FOLD)
def test_examples_notice_every_mutant(rule: str) -> None:
    assert survivors(RULES[rule]) == []


class Run:
    """A model behind the pipeline, run eagerly without gradients."""

    def __init__(self, model: nn.Module, facts: dict[str, object] | None = None) -> None:
        self.model, self.records = model.eval(), list[GraphRecord]()
        plan = Plan(ALL, dict(facts or {}), Lowering("eager"), strict=True, misses=True)

        def backend(gm, inputs, **_):
            self.records.append(GraphRecord("g"))
            return process(gm, inputs, plan, self.records[-1]).call()

        torch._dynamo.reset()
        self.code = torch.compile(self.model, backend=backend)

    def same(self, *args: torch.Tensor, tolerance: float = 1e-5) -> Counter[str]:
        """Equal to eager, the parameters untouched; how often each rule fired in the latest graph."""
        state = {n: v.clone() for n, v in self.model.state_dict().items()}
        with torch.no_grad():
            eager, ours = self.model(*args), self.code(*args)
        torch.testing.assert_close(ours, eager, rtol=tolerance, atol=tolerance)
        for name, value in self.model.state_dict().items():
            assert torch.equal(value, state[name]), f"{name} was changed"
        return Counter(site.rule for site in self.records[-1].sites)


def norm(channels: int) -> nn.BatchNorm2d:
    made = nn.BatchNorm2d(channels)
    with torch.no_grad():
        for value in (made.weight, made.bias, made.running_mean, made.running_var):
            value.add_(torch.rand(channels))
    return made


class Net(nn.Module):
    """Parts by name and a function that joins them."""

    def __init__(self, forward, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.joined = forward

    def forward(self, *args: torch.Tensor):
        return self.joined(self, *args)


def image(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (2, 3, 5, 6)))


# -- M11: a weight with more than one reader --------------------------------------------------------------


def test_a_convolution_normalised_on_one_path_only_is_left_alone() -> None:
    net = Net(lambda m, x, y: (m.bn(m.conv(x)), m.conv(y)), conv=nn.Conv2d(3, 4, 3), bn=norm(4))
    counts = Run(net).same(image(), image())
    assert counts["fold/conv_bn"] == 0 and counts["fold/bn_eval"] == 1


def test_a_convolution_under_two_norms_is_left_alone() -> None:
    net = Net(
        lambda m, x: m.one(m.conv(x)) + m.two(m.conv(x.neg())),
        conv=nn.Conv2d(3, 4, 3),
        one=norm(4),
        two=norm(4),
    )
    assert Run(net).same(image())["fold/conv_bn"] == 0


def test_one_norm_behind_two_convolutions_is_folded_into_both() -> None:
    net = Net(
        lambda m, x: m.bn(m.a(x)) + m.bn(m.b(x)),
        a=nn.Conv2d(3, 4, 3),
        b=nn.Conv2d(3, 4, 3, bias=False),
        bn=norm(4),
    )
    counts = Run(net).same(image())
    assert counts["fold/conv_bn"] == 2 and counts["fold/bn_eval"] == 0


def test_a_tied_head_is_not_scaled() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 8)
            self.head = nn.Linear(8, 11, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = self.embed(ids)
            return self.head(x * 0.3), x

    assert Run(Tied()).same(torch.arange(5))["fold/scale_linear"] == 0


def test_a_head_of_its_own_is_scaled() -> None:
    net = Net(lambda m, x: m.head(x * 0.3), head=nn.Linear(8, 11))
    assert Run(net).same(torch.randn(3, 8))["fold/scale_linear"] == 1


def test_a_linear_under_two_norms_keeps_its_weight() -> None:
    net = Net(
        lambda m, x: m.linear(m.one(x)) + m.linear(m.two(x)),
        linear=nn.Linear(8, 6),
        one=nn.RMSNorm(8, eps=1e-6),
        two=nn.RMSNorm(8, eps=1e-6),
    )
    assert Run(net).same(torch.randn(3, 8))["fold/norm_linear"] == 0


# -- training -------------------------------------------------------------------------------------------


def test_statistics_of_the_batch_are_not_folded() -> None:
    net = Net(lambda m, x: m.bn(m.conv(x)), conv=nn.Conv2d(3, 4, 3), bn=norm(4))
    run = Run(net)
    net.train()
    x = image()
    with torch.no_grad():
        first = net.bn.running_mean.clone()
        ours = run.code(x)
        moved = net.bn.running_mean.clone()
        net.bn.running_mean.copy_(first)
        torch.testing.assert_close(ours, net(x), rtol=1e-5, atol=1e-5)
    assert not torch.equal(moved, first)
    torch.testing.assert_close(moved, net.bn.running_mean)
    assert not any(s.rule.startswith("fold/") for s in run.records[-1].sites)


def test_where_gradients_are_recorded_nothing_is_folded() -> None:
    net = Net(lambda m, x: m.bn(m.conv(x)), conv=nn.Conv2d(3, 4, 3), bn=norm(4))
    run = Run(net)
    run.code(image()).sum().backward()
    assert net.conv.weight.grad is not None
    assert not any(s.rule.startswith("fold/") for s in run.records[-1].sites)


# -- Q14: parameters that change ------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["copy", "data", "load", "assign", "statistics", "replace"])
def test_folded_weights_follow_the_parameters(how: str) -> None:
    net = Net(lambda m, x: m.bn(m.conv(x)).relu(), conv=nn.Conv2d(3, 4, 3, bias=False), bn=norm(4))
    run, x = Run(net), image()
    assert run.same(x)["fold/conv_bn"] == 1
    new = torch.randn_like(net.conv.weight)
    with torch.no_grad():
        if how == "copy":
            net.conv.weight.copy_(new)
        elif how == "data":
            net.conv.weight.data.mul_(-2)
        elif how in ("load", "assign"):
            state = {n: v * 1.5 for n, v in net.state_dict().items()}
            net.load_state_dict(state, assign=how == "assign")
        elif how == "statistics":
            net.bn.running_var.mul_(3)
        else:
            net.conv.weight = nn.Parameter(new)
    run.same(x)


# -- layouts --------------------------------------------------------------------------------------------

TARGET = {"channels_last": True}


def test_a_layout_is_changed_only_where_the_target_wants_it() -> None:
    net = Net(lambda m, x: m.conv(x).relu(), conv=nn.Conv2d(3, 4, 3))
    assert Run(net).same(image())["layout/channels_last"] == 0
    assert Run(net, TARGET).same(image())["layout/channels_last"] == 1


@pytest.mark.parametrize("end", ["relu", "add", "pool", "both", "view"])
def test_outputs_lie_as_in_eager(end: str) -> None:
    ends = {
        "relu": lambda y: y.relu(),
        "add": lambda y: y + 1,
        "pool": lambda y: y.relu().amax((2, 3)),
        "both": lambda y: (y.relu(), y.sigmoid()),
        "view": lambda y: y.relu().flatten(1),
    }
    net = Net(
        lambda m, x: ends[end](m.b(m.a(x).relu())), a=nn.Conv2d(3, 4, 3), b=nn.Conv2d(4, 5, 1)
    )
    run = Run(net, TARGET)
    x = image()
    assert run.same(x)["layout/channels_last"] == 2
    with torch.no_grad():
        eager, ours = net(x), run.code(x)
    for old, new in zip(
        *([v] if isinstance(v, torch.Tensor) else v for v in (eager, ours)), strict=True
    ):
        assert old.stride() == new.stride()


def test_folding_and_layout_follow_each_other() -> None:
    net = Net(
        lambda m, x: m.two(m.b(m.one(m.a(x)).relu())).relu().mean((2, 3)),
        a=nn.Conv2d(3, 4, 3, bias=False),
        one=norm(4),
        b=nn.Conv2d(4, 6, 3, stride=2, padding=1),
        two=norm(6),
    )
    run, x = Run(net, TARGET), image(2, 3, 9, 9)
    counts = run.same(x)
    assert counts["fold/conv_bn"] == counts["layout/channels_last"] == 2
    assert counts["fuse/conv_bias_relu"] == 2 and counts["fold/bn_eval"] == 0
    with torch.no_grad():
        net.a.weight.mul_(0.5)
    run.same(x)
