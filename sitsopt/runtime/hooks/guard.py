"""The hook `guard`: watches for the signs of memory running out, and knows the steps down."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from .facts import Facts
from .memory import Thresholds
from .plan import Plan, Settings, Wanted
from .smaller import shrink_cache
from .stepdown import ORDER, Guarded, Step, absent, release_pools

NOT_HERE = {
    "speculation": "nothing is speculated",
    "graphs": "nothing is compiled",
    "plain": "there is no plainer form",
}


class Guard(Settings):
    """It changes no setting. `around` makes a guarded call of a model's call."""

    name = "guard"
    after = ("cpu", "streams")

    def __init__(self) -> None:
        self.thresholds = Thresholds()
        self.order: tuple[str, ...] = ORDER
        self._guarded: list[weakref.ref[Guarded]] = []  # a call holds its model
        self.applied = False

    def plan(self, facts: Facts, wanted: Wanted) -> Plan:
        plan = Plan(self.name)
        options, memory = wanted.options, getattr(wanted.target, "memory", None)
        seeds = {"failures": 3.0, "fragmentation": getattr(memory, "fragmentation", None)}
        given = {
            k: options[k]
            for k in ("failures", "fragmentation", "headroom_mb")
            if options.get(k) is not None
        }
        self.thresholds = Thresholds(**{**seeds, **given})
        self.order = tuple(options.get("steps") or ORDER)
        plan.data = {"thresholds": vars(self.thresholds), "steps": list(self.order)}
        if self.thresholds.fragmentation is None:
            plan.refuse(
                "the sign `fragmentation`",
                "the target names no threshold, and neither does the recipe",
            )
        plan.refuse(
            "the sign `TLB misses`",
            "this process has no counter of them; major page faults are counted instead",
        )
        limits = {
            "address space": facts["memory.address_limit_mb"],
            "control group": facts["memory.group_limit_mb"],
            "machine": facts["memory.available_mb"],
        }
        plan.data["limits_mb"] = limits
        if not any(limits.values()):
            plan.refuse("the sign `growth against free memory`", "no limit is known")
        return plan

    def apply(self, plan: Plan, ledger: Any) -> None:
        self.applied = True

    def around(self, call: Callable[..., Any], steps: Mapping[str, Step]) -> Guarded:
        """`call` with these steps down, in the recipe's order; what has no step here says so when its turn comes."""
        known = {"pools": Step("pools", release_pools), "cache": shrink_cache(), **steps}
        chosen = [known.get(name) or absent(name, NOT_HERE[name]) for name in self.order]
        guarded = Guarded(call, chosen, self.thresholds)
        self._guarded.append(weakref.ref(guarded))
        return guarded

    def report(self) -> dict[str, Any]:
        alive = [one for ref in self._guarded if (one := ref()) is not None]
        return {"events": [event for one in alive for event in one.json()]}
