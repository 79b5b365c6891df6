"""The executor of captures: warm-up, keys, static buffers, addresses, memory, and what falls back."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from torch.fx import GraphModule

from sitsopt.graph.regions.check import check
from sitsopt.graph.regions.planner import plan_regions
from sitsopt.runtime.capture.executor import Captures, Limits
from sitsopt.runtime.capture.pieces import Program, cut, is_whole
from tests.regions.devices import Device
from tests.regions.graphs import at_random, costs, experts, rule

W = torch.randn(4, 4)
LIMITS = Limits(frozenset({1}), warmup=2, most=2, moves=2)


def step(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x @ w, x + 1


def captured(limits: Limits = LIMITS, device: Device | None = None, fn=step) -> Captures:
    return Captures(fn, limits, device or Device())


def right(run: Captures, x: torch.Tensor, w: torch.Tensor = W) -> None:
    for got, wanted in zip(run(x, w), step(x, w), strict=True):
        assert torch.equal(got, wanted)


def test_plain_then_warm_then_captured_then_replayed():
    run = captured()
    for count in range(6):
        right(run, torch.randn(3, 4))
        assert (run.device.warmed, len(run.device.captured)) == (count >= 1, count >= 2)
    assert run.replays == 4 and not run.notes


def test_results_are_the_callers_own():
    run = captured()
    kept = [run(torch.full((1, 4), float(i)), W)[1] for i in range(5)]
    assert [float(k[0, 0]) for k in kept] == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_results_that_stay_inside_are_not_copied():
    run = captured(replace(LIMITS, kept=frozenset({0})))
    found = [run(torch.full((1, 4), float(i)), W) for i in range(5)]
    assert found[3][0] is found[4][0] and found[3][1] is not found[4][1]


def test_each_size_is_a_capture_and_the_oldest_goes():
    run = captured()
    for size in (1, 2, 3, 1):
        for _ in range(3):
            right(run, torch.randn(size, 4))
    assert len(run.device.captured) == 4 and len(run.kept) == 2
    assert [graph.live for graph in run.device.captured] == [False, False, True, True]


def test_strides_and_dtypes_are_sizes_too():
    run = captured(fn=lambda x, w: (x.sum(), x + 1))
    for x in (torch.randn(4, 4), torch.randn(4, 4).t(), torch.randn(4, 4).double()):
        for _ in range(4):
            assert torch.equal(run(x, W)[1], x + 1)
    assert len(run.device.captured) == 3


def test_a_held_tensor_is_read_where_it_lies():
    run, w = captured(), torch.randn(4, 4)
    x = torch.randn(2, 4)
    for _ in range(4):
        run(x, w)
    w.zero_()
    assert float(run(x, w)[0].abs().sum()) == 0 and len(run.device.captured) == 1


def test_a_held_tensor_that_moves_is_captured_anew_and_not_for_ever():
    run = captured()
    for _ in range(3):
        right(run, torch.randn(2, 4))
    for moves in range(1, 5):
        right(run, torch.randn(2, 4), torch.randn(4, 4))
        assert len(run.device.captured) == min(1 + moves, 3)
    assert "lay elsewhere 3 times" in run.refused and run.notes
    assert not any(graph.live for graph in run.device.captured)


def test_numbers_above_every_bucket_run_plainly():
    run = captured(replace(LIMITS, buckets=(2, 8)), fn=lambda x, w, n: (x * n,))
    for n in (3, 9):
        for _ in range(5):
            assert torch.equal(run(torch.ones(2), W, n)[0], torch.full((2,), float(n)))
    assert len(run.device.captured) == 1 and not run.refused


@pytest.mark.parametrize(
    ("device", "fn", "why"),
    [
        (Device(fails="operation not permitted"), step, "operation not permitted"),
        (Device(), lambda x, w: (w.t(), x + 1), "view of an input"),
        (Device(grows=1000), step, "MiB are allowed"),
    ],
)
def test_what_is_in_doubt_runs_plainly(device, fn, why):
    run = captured(replace(LIMITS, limit_bytes=500), device, fn)
    for _ in range(5):
        x = torch.randn(2, 4)
        assert all(torch.equal(a, b) for a, b in zip(run(x, W), fn(x, W), strict=True))
    assert why in run.refused and run.notes == [f"not captured: {run.refused}"]
    assert run.replays == 0 and not any(graph.live for graph in device.captured)


def test_an_expanded_input_is_left_alone():
    run = captured()
    for _ in range(4):
        right(run, torch.randn(1, 4).expand(3, 4))
    assert "expanded" in run.refused


def test_inside_the_users_own_capture_nothing_is_replayed():
    run = captured()
    for _ in range(4):
        right(run, torch.randn(2, 4))
    run.device.capturing, before = True, run.replays
    right(run, torch.randn(2, 4))
    assert run.replays == before


def test_another_thread_that_is_inside_does_not_share_buffers():
    entered, leave = threading.Event(), threading.Event()
    plain: list[int] = []

    def slow(x, w):
        plain.append(threading.get_ident())
        if len(plain) == 1:
            entered.set()
            assert leave.wait(20)
        return x @ w, x + 1

    run = captured(fn=slow)
    other = threading.Thread(target=lambda: right(run, torch.ones(2, 4)))
    other.start()
    assert entered.wait(20)
    right(run, torch.zeros(2, 4))
    assert run.calls.total() == 1  # ours was not counted: it ran beside
    leave.set()
    other.join(20)
    assert len(set(plain)) == 2


def test_gradients_are_never_replayed():
    run, x = captured(), torch.ones(2, 4, requires_grad=True)
    for _ in range(5):
        run(x, W)[0].sum().backward()
    assert not run.device.captured and float(x.grad[0, 0]) == pytest.approx(5 * float(W[0].sum()), rel=1e-5)  # fmt: skip


def program(graph, plan, device):
    return Program(
        GraphModule({}, graph), plan, device, lambda gm, values: gm.forward,
        lambda held, kept: Limits(held, warmup=2, kept=kept),
    )  # fmt: skip


@pytest.mark.parametrize("seed", [*range(8), "experts"])
def test_a_cut_graph_gives_what_the_whole_one_gives(seed):
    graph = experts(3) if seed == "experts" else at_random(seed, 30)
    for node in graph.nodes:  # sizes of a nonzero are made up in these graphs
        if node.target is torch.ops.aten.nonzero.default:
            node.target = torch.ops.aten.neg.default
    splits = rule().model_copy(update={"split": {"aten.neg": "it splits"}})
    plan = plan_regions(graph, splits, costs(us=1.0, gap=4.0))
    assert check(plan, graph, splits) == []
    device, whole = Device(), GraphModule({}, graph)
    run = program(graph, plan, device)
    w = torch.randn(16, 16) / 4
    for _ in range(5):
        x = torch.randn(16, 16)
        for got, wanted in zip(run(x, w), whole(x, w), strict=True):
            torch.testing.assert_close(got, wanted, equal_nan=True, rtol=0, atol=0)
    assert len(device.captured) == len(plan.regions)


def test_pieces_follow_streams_and_events():
    graph = experts(3)
    plan = plan_regions(graph, rule(), costs(us=1.0, gap=4.0))
    assert not is_whole(plan) and is_whole(plan_regions(graph, rule(), costs(gap=0.01)))
    (part,) = cut(GraphModule({}, graph), plan)
    assert {piece.stream for piece in part.pieces} == {0, 1, 2}
    assert [n.name for p in part.pieces for n in p.nodes] == [s.node for s in plan.regions[0].order]
    device = Device()
    run = program(graph, plan, device)
    for _ in range(3):
        run(torch.randn(16, 16), torch.randn(16, 16))
    waits = [entry for entry in device.log if entry[0] == "wait"]
    assert {(to, of) for _, to, of in waits} >= {(1, 0), (2, 0), (0, 1), (0, 2)}
