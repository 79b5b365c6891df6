"""`bisect`: the smallest set of rewrites that breaks `check`.

Whole rules first, then the sites of those that remain. A trial compiles the model with only some
sites allowed; where the break also shows without Inductor, trials run without it, which is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from sitsopt.measure.check import CheckOptions, Say, check
from sitsopt.measure.ddmin import ddmin_grouped
from sitsopt.measure.models import Loaded


def bisect(loaded: Loaded, options: CheckOptions, say: Say = lambda text: None) -> dict[str, Any]:
    """The rewrites to blame, as `sites: [{id, site, key}]`; none when `check` passes."""
    # With few rewrites allowed, the counts that a recipe expects cannot be met.
    free = replace(options.sits, set=(*options.sits.set, "expect=null"))
    options = replace(options, rewrites=False, sits=free)
    trials = 0

    def run(extra: dict[str, Any]) -> dict[str, Any]:
        nonlocal trials
        trials += 1
        torch._dynamo.reset()
        sits = replace(options.sits, extra={**options.sits.extra, **extra})
        return check(loaded, replace(options, sits=sits), lambda text: None)

    say("checking with every rewrite")
    first = run({})
    result = {"model": loaded.name, "recipe": options.sits.recipe, "failures": first["failures"]}
    if first["passed"]:
        return {**result, "breaks": False, "sites": [], "trials": trials}
    sites = sites_of(loaded)
    quicker = {"lowering": "eager"} if _breaks_without_inductor(options, run, say) else {}

    def breaks(only: Sequence[str]) -> bool:
        say(f"trial {trials + 1}: {len(only)} of {len(sites)} rewrites")
        return not run({**quicker, "only": sorted(only)})["passed"]

    if breaks(()):
        return {**result, "breaks": True, "sites": [], "trials": trials, "note": NOT_A_REWRITE}
    blamed = ddmin_grouped(by_rule(sites), breaks)
    rows = [sites[key] for key in blamed]
    return {**result, "breaks": True, "sites": rows, "trials": trials}


NOT_A_REWRITE = "the check fails without any rewrite too: what compiles the rest is to blame"


def sites_of(loaded: Loaded) -> dict[str, dict[str, str]]:
    """Every rewrite of the latest compile, by its key."""
    from sitsopt.session import sessions_of

    session = sessions_of(loaded.model)[-1]
    return {
        site.key: {"id": site.rule, "site": site.place.module or site.place.source, "key": site.key}
        for graph in session.record.graphs
        for site in graph.sites
    }


def by_rule(sites: dict[str, dict[str, str]]) -> dict[str, list[str]]:
    """Site keys, grouped by their rule."""
    groups: dict[str, list[str]] = {}
    for key, row in sites.items():
        groups.setdefault(row["id"], []).append(key)
    return groups


def _breaks_without_inductor(
    options: CheckOptions, run: Callable[[dict[str, Any]], dict[str, Any]], say: Say
) -> bool:
    if "lowering" in options.sits.extra:
        return False
    say("checking whether the break shows without Inductor")
    return not run({"lowering": "eager"})["passed"]
