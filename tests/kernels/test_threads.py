"""Threads: any number, several callers, after a fork; results that do not depend on them."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from sitsopt.runtime import kernels
from tests.kernels.harness import BF16, F32, needs_kernels, randn

pytestmark = needs_kernels


@pytest.fixture(autouse=True)
def threads_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def attend(seed=0, T=1, S=3000):
    op = kernels.lookup("attention", dtype=BF16, head_dim=64)
    q = randn(2, 6, T, 64, dtype=BF16, seed=seed)
    k, v = (randn(2, 2, S, 64, dtype=BF16, seed=seed + i) for i in (1, 2))
    return lambda: op(q, k, v, None, 0.125, T > 16)


def multiply(seed=0):
    op = kernels.lookup("linears", dtype=F32)
    x, w = randn(3, 500, seed=seed), [randn(n, 500, seed=seed) for n in (7, 1000, 90)]
    return lambda: torch.cat(op(x, w, [None] * 3), -1)


@pytest.mark.parametrize("work", [attend, multiply])
def test_equal_results_again_and_again(work):
    call = work()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        first = call()
        assert all(torch.equal(call(), first) for _ in range(5))


def test_linears_do_not_depend_on_threads():
    call = multiply()
    results = []
    for count in (1, 2, 3, 7):
        torch.set_num_threads(count)
        results.append(call())
    assert all(torch.equal(r, results[0]) for r in results)


@pytest.mark.parametrize("T, S", [(1, 64), (1, 65), (1, 3000), (7, 500), (100, 100), (300, 400)])
def test_attention_by_any_team(T, S):
    """The split over threads changes rounding only: partial results are joined in f32."""
    call = attend(T=T, S=S)
    torch.set_num_threads(1)
    alone = call().float()
    for count in (2, 3, 5, 8):
        torch.set_num_threads(count)
        assert torch.allclose(call().float(), alone, atol=1e-2, rtol=1e-2)


def test_two_callers_at_once():
    torch.set_num_threads(2)
    work = [attend(3), attend(5, T=40, S=200), multiply(7), attend(9, S=70)]
    want = [call() for call in work]
    wrong: list[int] = []

    def run(i):
        for _ in range(20):
            torch.set_num_threads(2)
            if not torch.equal(work[i](), want[i]):
                wrong.append(i)

    callers = [threading.Thread(target=run, args=(i,)) for i in range(len(work))]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def test_many_calls_do_not_pile_up_memory():
    """Room is kept a thread and a size, not a call."""
    call = attend(S=200)
    call()
    pages = lambda: int(open("/proc/self/statm").read().split()[1])  # noqa: E731, SIM115
    before = pages()
    for _ in range(2000):
        call()
    assert pages() - before < 1000


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_fork_after_use():
    """A pool of threads does not survive a fork; the child works alone."""
    torch.set_num_threads(2)
    calls = [attend(S=4000), multiply()]
    want = [call() for call in calls]
    child = os.fork()
    if child == 0:
        good = all(
            torch.allclose(c().float(), w.float(), atol=1e-2)
            for c, w in zip(calls, want, strict=True)
        )
        os._exit(0 if good else 1)
    watch = threading.Timer(60, os.kill, (child, 9))
    watch.start()
    status = os.waitpid(child, 0)[1]
    watch.cancel()
    assert status == 0


def test_from_threads_of_torch_s_own():
    torch.set_num_threads(2)
    call = multiply()
    want = call()
    results = [torch.jit.wait(torch.jit.fork(call)) for _ in range(3)]
    assert all(torch.equal(r, want) for r in results)
