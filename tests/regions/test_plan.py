"""What the planner makes of graphs whose right plan is known, and that the checker accepts it."""

from __future__ import annotations

import itertools

import pytest
import torch

from sitsopt.graph.regions.buffers import share
from sitsopt.graph.regions.check import check
from sitsopt.graph.regions.plan import Event, Start
from sitsopt.graph.regions.planner import plan_regions
from tests.regions.graphs import RULE, Made, at_random, costs, experts, rule

aten = torch.ops.aten


def test_one_region_where_nothing_splits():
    graph = experts(1)
    plan = plan_regions(graph, rule(), costs())
    assert [len(r.order) for r in plan.regions] == [5] and not plan.outside
    assert plan.kernels == (5, 5) and plan.times == (27.5, 27.5)
    assert plan.regions[0].streams == 1 and not plan.regions[0].events
    assert check(plan, graph, rule()) == []


def test_a_split_ends_a_region_and_what_does_not_need_it_stays_before():
    made = Made()
    x, w = made.input("x"), made.input("w")
    a = made.call(aten.mm.default, x, w)
    cut = made.call(aten.nonzero.default, a, val=torch.empty(4, 2, device="meta"))
    free = made.call(aten.mm.default, a, w)
    behind = made.call(aten.relu.default, cut)
    graph = made.done(made.call(aten.relu.default, free), behind)
    plan = plan_regions(graph, rule(), costs())
    assert [[s.node for s in r.order] for r in plan.regions] == [
        ["mm_default", "mm_default_1", "relu_default_1"], ["relu_default"]]  # fmt: skip
    assert plan.order == ["region0", "nonzero_default", "region1"]
    assert [(o.node, o.reason) for o in plan.outside] == [
        ("nonzero_default", "the size depends on values")
    ]
    assert plan.kernels == (4, 5)
    assert check(plan, graph, rule()) == []
    small = rule(min_kernels=2)
    plan = plan_regions(graph, small, costs())
    assert len(plan.regions) == 1 and "min_kernels" in plan.outside[-1].reason
    assert check(plan, graph, small) == []


def test_branches_go_to_side_streams_where_that_gains():
    graph = experts(3)
    plan = plan_regions(graph, rule(), costs(us=1.0, gap=2.0))
    region = plan.regions[0]
    # on one stream 9 products of 3 us and a fused pair of sums; on three the longest chain, or all bytes
    assert region.streams == 3 and len(region.reorderings) == 1
    moved = region.reorderings[0]
    assert moved.before_us > moved.after_us + 0.5
    assert [c.name for c in moved.conditions] == [
        "no hidden synchronisation", "resources allocated", "unified addressing"]  # fmt: skip
    assert all(c.holds and c.why for c in moved.conditions)
    assert check(plan, graph, rule()) == []


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"gap": 0.01}, "on one stream"),
        ({"gap": None}, "is not known"),
        ({"unified": (False, "two devices")}, "unified addressing: two devices"),
    ],
)
def test_branches_stay_where_it_does_not_or_is_not_allowed(more, why):
    plan = plan_regions(experts(3), rule(), costs(us=1.0, **{"gap": 2.0, **more}))
    assert plan.regions[0].streams == 1 and why in plan.regions[0].kept[0]


def test_an_op_that_stays_keeps_its_section():
    kept = rule(RULE.replace("side: 2", "side: 2, main: [aten.mm]"))
    plan = plan_regions(experts(3), kept, costs(us=1.0, gap=2.0))
    assert plan.regions[0].streams == 1 and "aten.mm stays" in plan.regions[0].kept[0]


@pytest.mark.parametrize("seed", range(40))
def test_plans_of_random_graphs_are_good(seed):
    graph = at_random(seed, 15 + seed)
    for gap in (0.01, 4.0):
        plan = plan_regions(graph, rule(), costs(us=1.0, gap=gap))
        assert check(plan, graph, rule()) == []


def test_random_graphs_fork_split_and_share():
    plans = [plan_regions(at_random(s, 40), rule(), costs(us=1.0, gap=4.0)) for s in range(30)]
    assert any(r.streams > 1 for p in plans for r in p.regions)
    assert any(len(p.regions) > 2 for p in plans)
    assert any(len(slot.values) > 3 for p in plans for r in p.regions for slot in r.slots)


def test_a_region_is_as_large_as_can_be():
    """No two neighbouring levels could be joined: each region needs something that runs between them."""
    for seed in range(20):
        graph = at_random(seed, 40)
        plan = plan_regions(graph, rule(), costs())
        for first, second in itertools.pairwise(plan.regions):
            assert plan.order.index(second.name) > plan.order.index(first.name) + 1


def test_writes_keep_their_order():
    made = Made()
    x, w = made.input("x"), made.input("w")
    old = made.call(aten.mm.default, x, w)
    write = made.call(aten.copy_.default, w, old)
    new = made.call(aten.relu.default, w)
    graph = made.done(new)
    plan = plan_regions(graph, rule(), costs())
    region = plan.regions[0]
    assert region.needs[write.name] == (old.name,) and region.needs[new.name] == (write.name,)
    assert {i.name: i.held for i in region.inputs} == {"x": False, "w": True}
    assert not any(write.name in slot.values for slot in region.slots)
    assert check(plan, graph, rule()) == []


def test_a_cache_is_written_where_it_lies():
    made = Made()
    cache, at, row = made.input("cache", 1000, 4), made.input("at", 1), made.input("row", 1, 4)
    at.meta["val"] = torch.empty(1, dtype=torch.int64, device="meta")
    new = made.call(aten.index_copy.default, cache, 0, at, row)
    graph = made.done(made.call(aten.relu.default, new), new)
    plan = plan_regions(graph, rule(), costs(), written=[cache])
    region = plan.regions[0]
    assert {i.name: i.held for i in region.inputs} == {"cache": True, "at": False, "row": False}
    assert [slot.values for slot in region.slots] == [("relu_default",)]
    assert check(plan, graph, rule(), [cache]) == []


def test_limits_of_memory():
    graph = experts(2)
    plan = plan_regions(graph, rule(), costs(limit=100))
    assert not plan.regions and "are allowed" in plan.refused
    assert {o.reason for o in plan.outside} == {plan.refused}
    assert check(plan, graph, rule()) == []


def test_steps_of_more_tokens_are_left():
    made = Made()
    weight, ids = made.input("weight", 10, 4), made.input("ids", 1, 9)
    ids.meta["val"] = torch.empty(1, 9, dtype=torch.int64, device="meta")
    graph = made.done(made.call(aten.relu.default, made.call(aten.embedding.default, weight, ids)))
    few = rule(RULE + "tokens: 8\n")
    assert "at most 8 tokens; this one has 9" in plan_regions(graph, few, costs()).refused
    assert plan_regions(graph, rule(RULE + "tokens: 9\n"), costs()).regions


def test_a_buffer_waits_for_streams_and_not_for_the_order_of_starts():
    order = [Start("a"), Start("b", 1, ("a done",)), Start("c"), Start("d", 0)]
    events = [Event("a done", "a")]
    sizes = {"a": 8, "b": 8, "c": 8, "d": 8}
    slots = share(order, events, sizes, {"a": ["b"], "c": ["d"]}, {"b", "d"})
    assert ("a", "d") not in [s.values[:2] for s in slots]  # b may still read a
    joined = [*order[:3], Start("d", 0, ("b done",))]
    slots = share(joined, [*events, Event("b done", "b")], sizes, {"a": ["b"], "c": ["d"]}, {"d"})
    assert any(s.values == ("a", "d") for s in slots)
