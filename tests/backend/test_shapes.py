"""Shapes that change: right at every size, and no new compilation at every step (D08)."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from tests.backend.support import ConvNet, Mlp, fired, graphs, sits


def attend(q, k, v):
    return nn.functional.scaled_dot_product_attention(q, k, v)


def test_one_then_more() -> None:
    def f(x, y):
        return nn.functional.silu(x * 2) * y + x

    run = sits(f)
    for size in (1, 2, 3, 1, 7, 0, 5, 1, 0):
        x, y = torch.randn(size, 8), torch.randn(1, 8)
        torch.testing.assert_close(run(x, y), f(x, y))
    assert len(graphs(f)) <= 4  # 2 at first, then any size, then 0 and 1


def test_a_rule_for_one_is_not_used_for_two() -> None:
    """Broadcasting: what is an addition of a row at size 1 is none at size 2."""

    def f(x, y):
        return nn.functional.silu(x) * y

    run = sits(f)
    for a, b in [(1, 1), (3, 1), (1, 3), (3, 3), (2, 1), (1, 1), (2, 2)]:
        x, y = torch.randn(a, 8), torch.randn(b, 8)
        torch.testing.assert_close(run(x, y), f(x, y))


@pytest.mark.parametrize("lowering", ["eager", "auto"])
def test_batch_and_length(lowering: str) -> None:
    model = Mlp()
    run = sits(model, lowering)
    with torch.no_grad():
        for batch, length in [(2, 5), (2, 6), (2, 7), (3, 9), (4, 33), (5, 17), (2, 5), (8, 64)]:
            x = torch.randn(batch, length, 16)
            torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-4)
    assert len(graphs(model)) <= 3
    assert graphs(model)[-1].dynamic


def test_marked_dynamic() -> None:
    model = Mlp()
    run = sits(model)
    x = torch.randn(4, 5, 16)
    torch._dynamo.mark_dynamic(x, 1)
    with torch.no_grad():
        torch.testing.assert_close(run(x), model(x))
        for length in (6, 7, 19, 3):  # fewer rows than fuse/linear takes, and more
            y = torch.randn(4, length, 16)
            torch.testing.assert_close(run(y), model(y))
    assert len(graphs(model)) == 1
    assert fired(model) and all(g.dynamic for g in graphs(model))


@pytest.mark.parametrize("dynamic", [True, False, None])
def test_the_argument_dynamic(dynamic: bool | None) -> None:
    model = Mlp()
    run = sits(model, torch_options={"dynamic": dynamic})
    with torch.no_grad():
        for length in (4, 5, 6, 7):
            x = torch.randn(length, 16)
            torch.testing.assert_close(run(x), model(x))
    assert len(graphs(model)) == {True: 1, False: 4, None: 2}[dynamic]


def test_images_of_any_size() -> None:
    model = ConvNet().eval()
    run = sits(model)
    with torch.no_grad():
        for batch, size in [(1, 8), (2, 8), (3, 9), (2, 12), (5, 11)]:
            x = torch.randn(batch, 3, size, size)
            torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-4)


def test_attention_of_any_length() -> None:
    run = sits(attend)
    for b, t, s in itertools.product((1, 2), (1, 4, 9), (1, 4, 9)):
        q, k, v = torch.randn(b, 3, t, 8), torch.randn(b, 3, s, 8), torch.randn(b, 3, s, 8)
        torch.testing.assert_close(run(q, k, v), attend(q, k, v))
    assert len(graphs(attend)) <= 10


def test_integers_as_arguments() -> None:
    def f(x, n: int, s: float):
        return x[:, :n] * s + n

    run = sits(f)
    for n, s in [(1, 0.5), (2, 0.5), (3, 1.5), (4, 2.5), (0, -1.0)]:
        x = torch.randn(3, 6)
        torch.testing.assert_close(run(x, n, s), f(x, n, s))


def test_a_size_as_a_result() -> None:
    def f(x):
        return x.shape[0] * 2, x.reshape(-1), x.numel()

    run = sits(f)
    for size in (3, 4, 5):
        a: Any = run(torch.ones(size, 2))
        assert (a[0], a[1].shape, a[2]) == (2 * size, (2 * size,), 2 * size)


def test_a_size_known_only_at_run_time() -> None:
    def f(x):
        found = x[x > 0]
        return found * 2, found.sum()

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for lowering in ("eager", "inductor"):
            torch._dynamo.reset()
            run = sits(f, lowering)
            for _ in range(3):
                x = torch.randn(20)
                torch.testing.assert_close(run(x), f(x))


def test_written_caches_of_any_length() -> None:
    def f(cache, new, at):
        cache.index_copy_(1, at, new)
        return cache.sum(1)

    run = sits(f, "inductor")
    for length in (8, 9, 10, 31):
        mine, theirs = torch.zeros(2, length, 4), torch.zeros(2, length, 4)
        new, at = torch.randn(2, 2, 4), torch.tensor([1, 5])
        torch.testing.assert_close(run(mine, new, at), f(theirs, new, at))
        torch.testing.assert_close(mine, theirs)
    assert len(graphs(f)) <= 2
