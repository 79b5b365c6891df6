"""Good plans, each spoiled in one way: the checker rejects every one. A kind of damage that finds nothing to spoil in
a plan returns False, and another plan is taken."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
from torch.fx import Graph

from sitsopt.graph.regions.check import BadPlan, check, prove
from sitsopt.graph.regions.plan import Condition, Event, Outside, Region, RegionPlan, Slot, Start
from sitsopt.graph.regions.planner import plan_regions
from tests.regions.graphs import at_random, costs, experts, rule

Spoil = Callable[[RegionPlan, random.Random], bool]
KINDS: dict[str, Spoil] = {}
EACH = 4  # plans that each kind spoils


def kind(spoil: Spoil) -> Spoil:
    KINDS[spoil.__name__] = spoil
    return spoil


def largest(plan: RegionPlan) -> Region:
    return max(plan.regions, key=lambda region: len(region.order))


def forked(plan: RegionPlan) -> Region | None:
    return next((region for region in plan.regions if region.streams > 1), None)


@kind
def a_node_before_what_it_needs(plan, rng):
    region = largest(plan)
    places = [i for i, s in enumerate(region.order) if region.needs[s.node]]
    i = rng.choice(places)
    region.order.insert(0, region.order.pop(i))
    return True


@kind
def a_node_behind_who_needs_it(plan, rng):
    region = largest(plan)
    needed = {n for needs in region.needs.values() for n in needs}
    i = rng.choice([i for i, s in enumerate(region.order) if s.node in needed])
    region.order.append(region.order.pop(i))
    return True


@kind
def a_missing_wait(plan, rng):
    region = forked(plan)
    if region is None:
        return False
    i = rng.choice([i for i, s in enumerate(region.order) if s.waits])
    region.order[i] = replace(region.order[i], waits=region.order[i].waits[1:])
    return True


@kind
def a_missing_event(plan, rng):
    region = forked(plan)
    if region is None:
        return False
    region.events.pop(rng.randrange(len(region.events)))
    return True


@kind
def an_event_recorded_too_early(plan, rng):
    region = forked(plan)
    late = [i for i, e in enumerate(region.events) if e.after != "begin"] if region else []
    if not late:
        return False
    i = rng.choice(late)
    region.events[i] = Event(region.events[i].name, "begin")
    return True


@kind
def an_event_recorded_too_late(plan, rng):
    region = forked(plan)
    if region is None:
        return False
    waited = [(i, w) for i, s in enumerate(region.order) for w in s.waits]
    i, name = rng.choice(waited)
    at = next(j for j, e in enumerate(region.events) if e.name == name)
    region.events[at] = Event(name, region.order[-1].node if i < len(region.order) - 1 else region.order[i].node)  # fmt: skip
    return True


@kind
def a_stream_that_is_not_joined(plan, rng):
    made = Graphs.fork_at_the_end()
    plan.__dict__.update(copy.deepcopy(made.__dict__))
    plan.regions[0].joins = ()
    return True


@kind
def two_values_in_use_in_one_buffer(plan, rng):
    region = largest(plan)
    for i, node in enumerate([s.node for s in region.order]):
        of = next((s for s in region.slots if node in s.values), None)
        for need in region.needs[node]:
            other = next((s for s in region.slots if need in s.values), None)
            if of is not None and other is not None and of is not other and i:
                region.slots = [s for s in region.slots if s not in (of, other)]
                values = [v for v in (*other.values, *of.values) if v not in (node, need)]
                region.slots.append(Slot(max(of.bytes, other.bytes), (need, node)))
                region.slots += [Slot(max(of.bytes, other.bytes), (v,)) for v in values]
                return True
    return False


@kind
def a_result_in_a_buffer_that_is_used_again(plan, rng):
    region = largest(plan)
    first = next((s for s in region.slots for v in s.values if v in region.outputs), None)
    later = [s for s in region.slots if s is not first]
    if first is None or not later:
        return False
    region.slots = [s for s in later if s is not later[-1]]
    region.slots.append(Slot(max(first.bytes, later[-1].bytes), (*first.values, *later[-1].values)))
    results = [v for v in region.slots[-1].values if v in region.outputs]
    return region.slots[-1].values[-1] not in results or len(results) > 1


@kind
def a_value_without_a_buffer(plan, rng):
    region = largest(plan)
    i = rng.randrange(len(region.slots))
    region.slots[i] = Slot(region.slots[i].bytes, region.slots[i].values[1:])
    return True


@kind
def a_value_with_two_buffers(plan, rng):
    region = largest(plan)
    region.slots.append(Slot(1 << 20, rng.choice(region.slots).values[:1]))
    return True


@kind
def a_buffer_that_is_too_small(plan, rng):
    region = largest(plan)
    i = rng.randrange(len(region.slots))
    region.slots[i] = replace(region.slots[i], bytes=8)
    return True


@kind
def a_missing_dependency(plan, rng):
    region = largest(plan)
    name = rng.choice([n for n, needs in region.needs.items() if needs])
    region.needs[name] = region.needs[name][1:]
    return True


@kind
def a_dependency_that_is_none(plan, rng):
    region = largest(plan)
    name = region.order[0].node
    region.needs[name] = (*region.needs[name], region.order[-1].node)
    return True


@kind
def what_splits_taken_inside(plan, rng):
    taken = next((o for o in plan.outside if o.op == "aten.nonzero"), None)
    if taken is None or not plan.regions:
        return False
    plan.outside.remove(taken)
    plan.order.remove(taken.node)
    region = rng.choice(plan.regions)
    region.order.append(Start(taken.node))
    region.kernels += 1
    return True


@kind
def a_node_planned_twice(plan, rng):
    region = largest(plan)
    region.order.append(rng.choice(region.order))
    return True


@kind
def a_node_left_out(plan, rng):
    region = largest(plan)
    region.order.pop(rng.randrange(len(region.order)))
    return True


@kind
def regions_joined_over_what_runs_between(plan, rng):
    for first in plan.regions:
        for then in plan.regions[plan.regions.index(first) + 1 :]:
            reads = {i.name for i in then.inputs}
            between = {o.node for o in plan.outside} & reads
            if not between:
                continue
            first.order += then.order
            first.needs.update(then.needs)
            first.kernels += then.kernels
            first.slots += then.slots
            plan.regions.remove(then)
            plan.order.remove(then.name)
            return True
    return False


@kind
def regions_in_the_wrong_order(plan, rng):
    if len(plan.regions) < 2:
        return False
    plan.order.reverse()
    return True


@kind
def an_unknown_node(plan, rng):
    plan.outside.append(Outside("ghost", "aten.mul", "none", "", ""))
    plan.order.append("ghost")
    return True


@kind
def no_reason(plan, rng):
    if not plan.outside:
        return False
    plan.outside[0] = replace(plan.outside[0], reason="")
    return True


@kind
def a_node_moved_to_a_stream_without_events(plan, rng):
    region = largest(plan)
    needed = [i for i, s in enumerate(region.order) if region.needs[s.node] and s.stream == 0]
    if not needed:
        return False
    i = rng.choice(needed)
    region.order[i] = Start(region.order[i].node, 1)
    return True


@kind
def a_stream_that_does_not_exist(plan, rng):
    region = largest(plan)
    region.order = [replace(s, stream=s.stream + 99) for s in region.order]
    return True


@kind
def a_condition_that_does_not_hold(plan, rng):
    region = forked(plan)
    if region is None:
        return False
    one, at = region.reorderings[0], rng.randrange(3)
    conditions = list(one.conditions)
    conditions[at] = Condition(conditions[at].name, False, "it does not")
    region.reorderings[0] = replace(one, conditions=tuple(conditions))
    return True


@kind
def a_condition_that_was_not_checked(plan, rng):
    region = forked(plan)
    if region is None:
        return False
    one, at = region.reorderings[0], rng.randrange(3)
    left = one.conditions[:at] + one.conditions[at + 1 :]
    region.reorderings[0] = replace(one, conditions=left)
    return True


@kind
def a_fork_that_gains_nothing(plan, rng):
    region = forked(plan)
    if region is None:
        return False
    one = region.reorderings[0]
    region.reorderings[0] = replace(one, after_us=one.before_us)
    return True


@kind
def a_fork_that_nobody_reported(plan, rng):
    region = forked(plan)
    if region is None:
        return False
    region.reorderings.pop()
    return True


@kind
def kernels_miscounted(plan, rng):
    largest(plan).kernels += rng.choice([-1, 1])
    return True


@kind
def a_key_of_another_graph(plan, rng):
    largest(plan).key = ("s0",)
    return True


@kind
def a_result_forgotten(plan, rng):
    region = largest(plan)
    region.outputs = region.outputs[1:]
    return True


@kind
def an_input_forgotten(plan, rng):
    region = largest(plan)
    region.inputs = region.inputs[1:]
    return True


@kind
def an_input_held_that_moves(plan, rng):
    region = largest(plan)
    region.inputs = [replace(one, held=True) for one in region.inputs]
    return True


@kind
def an_input_of_another_size(plan, rng):
    region = largest(plan)
    region.inputs[0] = replace(region.inputs[0], bytes=1)
    return True


@kind
def more_memory_than_allowed(plan, rng):
    plan.limit_bytes = 64
    return True


class Graphs:
    """Graphs and their good plans."""

    @staticmethod
    @cache
    def all() -> list[tuple[Graph, RegionPlan]]:
        found = [experts(3), experts(4, 2), experts(2, 5), *(at_random(s, 40) for s in range(12))]
        return [(g, plan_regions(g, rule(), costs(us=1.0, gap=4.0))) for g in found]

    @staticmethod
    @cache
    def open_end() -> Graph:
        from tests.regions.graphs import Made, aten

        made = Made()
        x, w = made.input("x"), made.input("w")
        start = made.call(aten.relu.default, x)
        ends = []
        for _ in range(2):
            one = start
            for _ in range(4):
                one = made.call(aten.mm.default, one, w)
            ends.append(one)
        return made.done(*ends)

    @staticmethod
    def fork_at_the_end() -> RegionPlan:
        """Two streams of which the side one is read by nobody but the caller."""
        plan = plan_regions(Graphs.open_end(), rule(), costs(us=1.0, gap=4.0))
        region = plan.regions[0]
        side = {s.node for s in region.order[-4:]}
        region.order = [replace(s, stream=int(s.node in side), waits=("x",) if s is region.order[-4] else ()) for s in region.order]  # fmt: skip
        region.events = [Event("x", region.order[0].node), Event("y", region.order[-1].node)]
        region.joins = ("y",)
        region.slots = [Slot(1024, (s.node,)) for s in region.order]
        moved = tuple(s.node for s in region.order if s.stream)
        held = Graphs.all()[0][1].regions[0].reorderings[0]
        region.reorderings = [replace(held, nodes=moved, streams=(1,) * len(moved))]
        return plan


def test_the_plan_with_an_open_end_is_good():
    plan = Graphs.fork_at_the_end()
    assert check(plan, Graphs.open_end(), rule()) == []


@pytest.mark.parametrize("name", KINDS)
def test_every_corrupted_plan_is_rejected(name):
    rng = random.Random(name)
    spoiled = 0
    for graph, good in Graphs.all() * EACH:
        plan = copy.deepcopy(good)
        if spoiled >= EACH or not KINDS[name](plan, rng):
            continue
        spoiled += 1
        if name == "a_stream_that_is_not_joined":
            graph = Graphs.open_end()
        problems = check(plan, graph, rule())
        assert problems, (name, spoiled)
        with pytest.raises(BadPlan):
            prove(plan, graph, rule())
    assert spoiled == EACH


def test_the_plans_are_good_before():
    assert all(check(plan, graph, rule()) == [] for graph, plan in Graphs.all())


def test_there_are_a_hundred():
    assert len(KINDS) * EACH >= 100
