"""Rings and all-reduces against brute force, written without the code under test."""

from __future__ import annotations

import random
from itertools import combinations, pairwise, permutations
from pathlib import Path

import networkx as nx
import pytest

from sitsopt.runtime.hooks import Wanted, gather, plan_hooks
from sitsopt.runtime.hooks.collective import (
    PROTOCOLS,
    beta_of,
    decide,
    latency_rounds,
    rounds_of,
    ways,
)
from sitsopt.runtime.hooks.devices import Device, visible
from sitsopt.runtime.hooks.links import Links, link_graph
from sitsopt.runtime.hooks.nvlink import predicted
from sitsopt.runtime.hooks.ring import best_ring
from tests.hooks.fakes import cards, host
from tests.hooks.topologies import CASES, circle, mesh


def links(count: int, widths: dict[tuple[int, int], float], ports: float = 0.0) -> Links:
    """Links of these widths in GB/s one way; with `ports` through a switch."""
    made = Links(tuple(Device(i) for i in range(count)), nx.Graph())
    made.graph.add_nodes_from(range(count))
    for (a, b), gbs in widths.items():
        made.graph.add_edge(a, b, gbs=gbs, lanes=1, switched=bool(ports))
    made.ports = dict.fromkeys(range(count), ports) if ports else {}
    return made


def of_case(name: str, root: Path) -> Links:
    facts = gather(host(root, CASES[name].cards, **CASES[name].host))
    return link_graph(facts, visible(facts).devices)


def some(count: int, seed: int) -> dict[tuple[int, int], float]:
    """Random widths of some pairs."""
    pick = random.Random(1000 * count + seed)
    return {
        p: pick.choice([25.0, 50.0, 75.0, 100.0])
        for p in combinations(range(count), 2)
        if pick.random() < 0.7
    }


def brute_ring(widths: dict[tuple[int, int], float], count: int) -> tuple[float, float] | None:
    """Narrowest edge and sum of the best ring, over all orders."""
    best = None
    for rest in permutations(range(1, count)):
        order = (0, *rest)
        pairs = [tuple(sorted((order[i], order[(i + 1) % count]))) for i in range(count)]
        if all(p in widths for p in pairs):
            found = [widths[p] for p in pairs]
            best = max(best or (0.0, 0.0), (min(found), sum(found)))
    return best


@pytest.mark.parametrize("count", [3, 4, 5, 6])
@pytest.mark.parametrize("seed", range(8))
def test_no_ring_is_wider(count: int, seed: int) -> None:
    widths = some(count, seed)
    ring, best = best_ring(links(count, widths).graph), brute_ring(widths, count)
    if best is None:
        assert ring is None
        return
    assert ring is not None and sorted(ring) == [*range(count)]
    found = [widths[tuple(sorted((a, b)))] for a, b in zip(ring, [*ring[1:], ring[0]], strict=True)]
    assert (min(found), sum(found)) == best


def test_the_cube_of_eight(tmp_path: Path) -> None:
    cube = of_case("hybrid cube", tmp_path).graph
    widths = {tuple(sorted(e)): cube.edges[e]["gbs"] for e in cube.edges}
    best, ring = brute_ring(widths, 8), best_ring(cube)
    found = [widths[tuple(sorted(p))] for p in zip(ring, [*ring[1:], ring[0]], strict=True)]
    assert (min(found), sum(found)) == best == (25.0, 350.0)


def test_more_gpus_than_are_tried_exactly() -> None:
    ring = best_ring(
        links(12, {**dict.fromkeys(combinations(range(12), 2), 25.0), **circle(12, 100)}).graph
    )
    assert ring is not None and {abs(a - b) for a, b in pairwise(ring)} == {1}
    assert best_ring(links(12, {(i, i + 1): 25.0 for i in range(11)}).graph) is None


def brute_beta(name: str, widths: dict[tuple[int, int], float], count: int) -> float | None:
    """Nanoseconds a byte of the best order, from the definition of each algorithm. Direct connections only."""
    best = None
    for order in permutations(range(count)):
        rounds: list[list[tuple[int, int, float]]] = []
        if name == "ring":
            rounds = [[(order[i], order[(i + 1) % count], 1 / count) for i in range(count)]] * (
                2 * count - 2
            )
        elif name == "tree":
            up = [(order[i], order[(i - 1) // 2], 1.0) for i in range(1, count)]
            rounds = [up + [(b, a, m) for a, b, m in up]]
        elif name == "halving-doubling":
            step, share = 1, 0.5
            while step < count:
                rounds.append([(order[i], order[i ^ step], share) for i in range(count)])
                step, share = step * 2, share / 2
            rounds += rounds[::-1]
        elif name == "two-shot":
            rounds = [[(a, b, 1 / count) for a in order for b in order if a != b]] * 2
        else:
            rounds = [[(a, b, 1.0) for a in order for b in order if a != b]]
        cost = sum(max(share / widths[tuple(sorted((a, b)))] for a, b, share in r) for r in rounds)
        best = cost if best is None else min(best, cost)
    return best


@pytest.mark.parametrize(("count", "seed"), [(2, 0), (3, 0), (4, 0), (4, 1), (5, 0), (6, 0)])
def test_no_order_is_cheaper(count: int, seed: int) -> None:
    pick = random.Random(count * 10 + seed)
    widths = {p: pick.choice([25.0, 50.0, 100.0]) for p in combinations(range(count), 2)}
    found = {way.name: way for way in ways(links(count, widths))}
    assert set(found) == {"flat", "two-shot", "tree", "ring"} | (
        {"halving-doubling"} if count in (2, 4) else set()
    )
    for name, way in found.items():
        assert way.beta == pytest.approx(brute_beta(name, widths, count)), name


@pytest.mark.parametrize("count", [2, 4, 8])
def test_a_full_mesh_by_formula(count: int) -> None:
    found = {
        way.name: way.beta
        for way in ways(links(count, dict.fromkeys(combinations(range(count), 2), 50.0)))
    }
    share = (count - 1) / count
    assert found["flat"] == pytest.approx(1 / 50)
    assert found["two-shot"] == pytest.approx(2 / count / 50)
    assert found["ring"] == pytest.approx(2 * share / 50)
    assert found["halving-doubling"] == pytest.approx(2 * share / 50)


@pytest.mark.parametrize("count", [4, 8])
def test_a_switch_by_formula(count: int) -> None:
    """Through a switch the port of a GPU carries all that it sends in a round."""
    pairs = dict.fromkeys(combinations(range(count), 2), 450.0)
    found = {way.name: way.beta for way in ways(links(count, pairs, ports=450.0))}
    assert found["flat"] == pytest.approx((count - 1) / 450)
    assert found["two-shot"] == pytest.approx(2 * (count - 1) / count / 450)
    assert found["ring"] == pytest.approx(2 * (count - 1) / count / 450)
    assert found["tree"] == pytest.approx(
        (3 if count > 5 else 2) / 450
    )  # the busiest node's neighbours


def test_transfers_that_share_a_wire(tmp_path: Path) -> None:
    """In a path 0-1-2 what 0 and 2 exchange goes over 1 and takes both wires with it."""
    path = links(3, {(0, 1): 50.0, (1, 2): 50.0})
    assert beta_of(path, rounds_of("flat", (0, 1, 2))) == pytest.approx(2 / 50)


def test_the_decision_is_the_cheapest_of_all() -> None:
    for found in (
        ways(links(4, dict(mesh(4, 100)))),
        ways(
            links(8, dict(circle(8, 50)) | {(0, 4): 25.0, (1, 5): 25.0, (2, 6): 25.0, (3, 7): 25.0})
        ),
    ):
        for row in decide(found):
            prices = {
                (w.name, p.name): p.base_us + (p.tree_us if w.name == "tree" else p.ring_us) * w.rounds
                + w.beta / p.share * row.bytes / 1000
                for w in found for p in PROTOCOLS
            }  # fmt: skip
            assert row.us == pytest.approx(min(prices.values()), abs=1e-3)
            own = {key: us for key, us in prices.items() if key[0] in ("ring", "tree")}
            assert row.nccl_us == pytest.approx(min(own.values()), abs=1e-3)
            assert row.us <= row.nccl_us


def test_small_messages_wait_and_large_ones_flow() -> None:
    table = decide(ways(links(8, dict.fromkeys(combinations(range(8), 2), 450.0), ports=450.0)))
    assert table[0].best == "flat" and table[-1].best != "flat"
    assert (table[0].nccl, table[-1].nccl) == ("Tree", "Ring")
    assert table[0].nccl_protocol == "LL" and table[-1].nccl_protocol == "Simple"
    assert [row.us for row in table] == sorted(row.us for row in table)
    assert latency_rounds("ring", 8) == 14 and latency_rounds("tree", 8) == 6


def test_no_way_over_pcie(tmp_path: Path) -> None:
    assert ways(of_case("two pairs", tmp_path)) == []
    run = plan_hooks({"nvlink": {}}, host=host(tmp_path, CASES["two pairs"].cards))
    assert not run.plans["nvlink"].actions
    assert "0-1 and 2-3" in run.plans["nvlink"].refused[0].why


def test_variables_for_nccl(tmp_path: Path) -> None:
    machine = host(tmp_path, CASES["NVSwitch of eight"].cards)
    small = plan_hooks({"nvlink": {}}, Wanted(message_bytes=(8192,)), machine).plans["nvlink"]
    assert {a.key: a.value for a in small.actions} == {
        "env:NCCL_ALGO": "Tree", "env:NCCL_PROTO": "LL", "env:NCCL_P2P_LEVEL": "NVL",
    }  # fmt: skip
    both = plan_hooks({"nvlink": {}}, Wanted(message_bytes=(8192, 1 << 28)), machine).plans[
        "nvlink"
    ]
    assert {a.value for a in both.actions if a.key == "env:NCCL_ALGO"} == {"Ring,Tree"}
    named = host(tmp_path, CASES["NVSwitch of eight"].cards, env={"NCCL_ALGO": "CollNet"})
    kept = plan_hooks({"nvlink": {}}, Wanted(message_bytes=(8192,)), named).plans["nvlink"]
    assert "env:NCCL_ALGO" not in {a.key for a in kept.actions}
    assert any("the environment says CollNet" in r.why for r in kept.refused)


def test_ll128_only_where_nccl_trusts_it(tmp_path: Path) -> None:
    old = plan_hooks({"nvlink": {}}, host=host(tmp_path, cards(4, mesh(4, 4), capability=(6, 0))))
    new = plan_hooks({"nvlink": {}}, host=host(tmp_path, cards(4, mesh(4, 4), capability=(9, 0))))
    protocols = [
        {row["nccl_protocol"] for row in run.plans["nvlink"].data["decisions"]}
        for run in (old, new)
    ]
    assert "LL128" not in protocols[0] and "LL128" in protocols[1]


def test_a_prediction_lies_between_its_neighbours(tmp_path: Path) -> None:
    plan = plan_hooks({"nvlink": {}}, host=host(tmp_path, cards(4, mesh(4, 4)))).plans["nvlink"]
    rows = plan.data["decisions"]
    assert predicted(plan, rows[3]["bytes"]) == pytest.approx(rows[3]["nccl_us"])
    assert rows[3]["nccl_us"] < predicted(plan, rows[3]["bytes"] * 2) < rows[4]["nccl_us"]
    assert predicted(plan, 1) is None


def test_the_ring_as_nccl_writes_it(tmp_path: Path) -> None:
    from xml.etree import ElementTree

    plan = plan_hooks({"nvlink": {}}, host=host(tmp_path, CASES["ring of four"].cards)).plans[
        "nvlink"
    ]
    graph = ElementTree.fromstring(plan.data["nccl_graph"]).find("graph")
    assert graph is not None and graph.get("pattern") == "4" and graph.get("speedintra") == "150.0"
    assert [int(g.get("dev") or -1) for g in graph.iter("gpu")] == plan.data["ring"] == [0, 1, 2, 3]
