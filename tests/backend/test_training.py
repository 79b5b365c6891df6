"""Training through the backend: gradients are eager's, and only rules marked safe for them apply."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.backend.support import ConvNet, Mlp, fired, graphs, sits


def step(model: nn.Module, run, x: torch.Tensor) -> list[torch.Tensor | None]:
    model.zero_grad()
    run(x).pow(2).mean().backward()
    return [p.grad.clone() if p.grad is not None else None for p in model.parameters()]


@pytest.mark.parametrize("lowering", ["eager", "inductor", "auto"])
def test_gradients(lowering: str) -> None:
    model, x = Mlp(), torch.randn(3, 5, 16)
    wanted = step(model, model, x)
    run = sits(model, lowering)
    for _ in range(2):
        torch.testing.assert_close(step(model, run, x), wanted)
    assert all(g.grad and not g.fallback for g in graphs(model))


def test_gradients_of_inputs_and_of_a_second_order() -> None:
    model, x = Mlp(), torch.randn(2, 16, requires_grad=True)
    run = sits(model)
    for create in (False, True):
        (a,) = torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=create)
        (b,) = torch.autograd.grad(run(x).pow(2).sum(), x, create_graph=create)
        torch.testing.assert_close(a, b)
    (aa,) = torch.autograd.grad(a.sum(), x)
    (bb,) = torch.autograd.grad(b.sum(), x)
    torch.testing.assert_close(aa, bb)


def test_rules_for_inference_are_reported_not_applied() -> None:
    model, x = ConvNet().eval(), torch.randn(2, 3, 8, 8)
    run = sits(model, explain=True)
    with torch.no_grad():
        run(x)
    assert "fold/conv_bn" in fired(model)
    before = len(graphs(model))
    wanted = step(model, model, x)
    torch.testing.assert_close(step(model, run, x), wanted)
    trained = graphs(model)[before:]
    assert trained and all(g.grad for g in trained)
    assert not {s.rule for g in trained for s in g.sites if s.rule.startswith("fold/")}
    assert [m for g in trained for m in g.misses if m.rule == "fold/conv_bn" and m.reason == "grad"]


def test_batch_norm_in_training_updates_its_statistics() -> None:
    model = ConvNet().train()
    twin = copy.deepcopy(model)
    x = torch.randn(4, 3, 8, 8)
    run = sits(model)
    for _ in range(2):
        torch.testing.assert_close(step(model, run, x), step(twin, twin, x))
        torch.testing.assert_close(dict(model.named_buffers()), dict(twin.named_buffers()))
    with torch.no_grad():  # statistics of the batch, without gradients
        torch.testing.assert_close(run(x), twin(x))
        torch.testing.assert_close(dict(model.named_buffers()), dict(twin.named_buffers()))


def test_an_optimizer_step_is_seen_by_the_next_call() -> None:
    model = Mlp()
    twin = copy.deepcopy(model)
    x = torch.randn(4, 16)
    run = sits(model, "auto")
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, twin))
    for _ in range(3):
        step(model, run, x), step(twin, twin, x)
        ours.step(), theirs.step()
        with torch.no_grad():
            torch.testing.assert_close(run(x), twin(x), rtol=1e-4, atol=1e-4)


def test_train_and_eval_alternate() -> None:
    model = nn.Sequential(ConvNet(), nn.Dropout(0.5))
    x = torch.randn(4, 3, 8, 8)
    run = sits(model)
    for training in (False, True, False):
        model.train(training)
        twin = copy.deepcopy(model)
        with torch.no_grad():
            torch.manual_seed(5)
            a = run(x)
            torch.manual_seed(5)
            b = twin(x)
        torch.testing.assert_close(a, b)


def test_dropout_in_training_is_kept() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)).train()
    run = sits(model)
    out = run(torch.randn(8, 64))
    assert 0.3 < (out == 0).float().mean() < 0.7
    assert not torch.equal(run(torch.ones(8, 64)), run(torch.ones(8, 64)))


def test_gradients_switched_on_inside() -> None:
    model, x = Mlp(), torch.randn(3, 16)

    def f(x):
        with torch.enable_grad():
            return model(x)

    with torch.no_grad():
        a, b = f(x), sits(f, "auto")(x)
    torch.testing.assert_close(a, b)
    assert a.requires_grad and b.requires_grad
    wanted = torch.autograd.grad(a.pow(2).sum(), list(model.parameters()))
    torch.testing.assert_close(
        torch.autograd.grad(b.pow(2).sum(), list(model.parameters())), wanted
    )


def test_gradients_switched_off_inside() -> None:
    model, x = Mlp(), torch.randn(3, 16, requires_grad=True)

    def f(x):
        with torch.no_grad():
            h = model(x)
        return h * x

    a, b = f(x), sits(f)(x)
    torch.testing.assert_close(a, b)
    torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x) for y in (a, b)))


def test_frozen_parameters_get_no_gradient() -> None:
    model, x = Mlp(), torch.randn(3, 16)
    for p in (model.gate.weight, model.norm.weight):
        p.requires_grad_(False)
    wanted = step(model, model, x)
    torch.testing.assert_close(step(model, sits(model), x), wanted)
    assert sum(g is None for g in wanted) == 2


def test_a_written_input_that_needs_a_gradient() -> None:
    def f(x, w):
        y = x * w
        y[0] = 0
        y.mul_(w)
        return y, y.t()

    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    for lowering in ("eager", "inductor"):
        torch._dynamo.reset()
        grads = [
            torch.autograd.grad(sum(t.pow(2).sum() for t in g(x, w)), (x, w))
            for g in (f, sits(f, lowering))
        ]
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_a_written_argument_that_is_no_leaf(lowering: str) -> None:
    def f(y, w):
        y.add_(w)
        return (y * 2).sum()

    w = torch.randn(4, 4, requires_grad=True)
    found = []
    for g in (f, sits(f, lowering)):
        x = torch.ones(4, 4, requires_grad=True)
        y = x * 3
        total = g(y, w) + y.sum()
        found.append((total, *torch.autograd.grad(total, (x, w))))
    torch.testing.assert_close(*found)


def test_a_parameter_updated_without_gradients() -> None:
    class Ema(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.average = nn.Linear(4, 4), nn.Parameter(torch.zeros(4, 4))

        def forward(self, x):
            with torch.no_grad():
                self.average.mul_(0.9).add_(self.linear.weight, alpha=0.1)
            return self.linear(x)

    model = Ema()
    twin = copy.deepcopy(model)
    x = torch.randn(2, 4)
    for lowering in ("eager", "inductor"):
        torch._dynamo.reset()
        torch.testing.assert_close(step(model, sits(model, lowering), x), step(twin, twin, x))
        torch.testing.assert_close(model.average, twin.average)


def test_checkpointing() -> None:
    from torch.utils.checkpoint import checkpoint

    model, x = Mlp(), torch.randn(3, 16, requires_grad=True)

    def f(x):
        return checkpoint(model, x, use_reentrant=False)

    wanted = torch.autograd.grad(f(x).sum(), [x, *model.parameters()])
    torch.testing.assert_close(
        torch.autograd.grad(sits(f)(x).sum(), [x, *model.parameters()]), wanted
    )
    assert graphs(f)[0].fallback.startswith("activation checkpointing")


def test_hooks_on_a_result() -> None:
    model, x = Mlp(), torch.randn(3, 16)
    seen: list[float] = []
    out = sits(model)(x)
    out.register_hook(lambda g: seen.append(float(g.sum())))
    out.sum().backward()
    assert seen == [3 * 16]


def test_what_is_detached_or_hooked_inside() -> None:
    def detaches(x):
        return (x.detach() * x + (x * 2).detach() * nn.functional.silu(x)).sum()

    def hooks(x):
        y = nn.functional.silu(x)
        y.register_hook(lambda g: g * 2)
        return (y * x).sum()

    for f in (detaches, hooks):
        x = torch.randn(3, 4, requires_grad=True)
        torch.testing.assert_close(*(torch.autograd.grad(g(x), x) for g in (f, sits(f))))
