"""Hooks by recipe: found, ordered, planned, applied, and taken back."""

from __future__ import annotations

import graphlib
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from typing import Any

from .cpu import Cpu
from .facts import Facts, gather
from .guard import Guard
from .hbm import Hbm
from .host import Host
from .ledger import Ledger
from .nvlink import NvLink
from .plan import Hook, Plan, Refused, Scope, Wanted
from .streams import Streams

log = logging.getLogger("sitsopt")

GROUP = "sitsopt.hooks"
OWN: dict[str, Callable[[], Any]] = {
    "nvlink": NvLink, "hbm": Hbm, "cpu": Cpu, "streams": Streams, "guard": Guard,
}  # fmt: skip


@dataclass
class Run:
    """What the hooks of one recipe plan and have done. `facts` is what they planned from."""

    facts: Facts
    ledger: Ledger
    hooks: dict[str, Hook] = field(default_factory=dict)
    plans: dict[str, Plan] = field(default_factory=dict)
    applying: dict[str, bool] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)  # hooks that are not there, or that raised

    def apply(self) -> Run:
        """Apply the plans of those hooks that may; everything is reverted when one raises what it must not."""
        try:
            for name, plan in self.plans.items():
                if self.applying[name]:
                    self.hooks[name].apply(plan, self.ledger)
        except BaseException:
            self.revert()
            raise
        return self

    def revert(self) -> None:
        """Take back everything, the last hook first."""
        for name, hook in reversed(self.hooks.items()):
            try:
                hook.revert()
            except Exception as error:
                self.ledger.left.append(f"{name}: {type(error).__name__}: {error}")
        self.ledger.revert()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: Any) -> None:
        self.revert()

    def refused(self) -> list[tuple[str, Refused]]:
        """Everything that is not done, by hook, with why: planned so, or found when applying."""
        found = [(name, each) for name, plan in self.plans.items() for each in plan.refused]
        found += self.ledger.refused
        for name, plan in self.plans.items():
            if not self.applying[name]:
                why = "the recipe says apply: false"
                found += [(name, Refused(f"{a.key} = {a.value}", why)) for a in plan.actions]
        return found + [(name, Refused("everything", why)) for name, why in self.failed.items()]

    def json(self) -> dict[str, Any]:
        """Plain data: facts, plans, what was applied, what was refused and why, reports."""
        return {
            "facts": self.facts.json(),
            "plans": {name: plan.json() for name, plan in self.plans.items()},
            "applied": self.ledger.json()["applied"],
            "refused": [{"hook": name, "what": r.what, "why": r.why} for name, r in self.refused()],
            "reports": {name: hook.report() for name, hook in self.hooks.items()},
        }


def plan_hooks(
    sections: Mapping[str, Mapping[str, Any]],
    wanted: Wanted | None = None,
    host: Host | None = None,
    scopes: tuple[Scope, ...] = ("process",),
    new_process: bool = False,
    facts: Facts | None = None,
    given: Mapping[str, Hook] | None = None,
) -> Run:
    """Plan the hooks that `sections` names, each with its options from the recipe (`apply: false` only plans).
    `given` are hooks that are made already.

    A hook that is not installed, or that raises while it plans, stands under `failed`.
    """
    host = host or Host.here()
    run = Run(facts or gather(host), Ledger(host, scopes, new_process))
    wanted = wanted or Wanted()
    found = {}
    for name in sections:
        try:
            found[name] = (given or {}).get(name) or make(name)
        except Exception as error:
            run.failed[name] = str(error)
    for hook in ordered(found.values()):
        options = sections[hook.name]
        try:
            plan = hook.plan(run.facts, replace(wanted, options=options))
        except Exception as error:  # of a third party's hook: the others still plan
            run.failed[hook.name] = f"{type(error).__name__}: {error}"
            log.warning("the hook %s cannot plan: %s", hook.name, error)
            continue
        run.hooks[hook.name], run.plans[hook.name] = hook, plan
        run.applying[hook.name] = bool(options.get("apply", True))
    return run


def make(name: str) -> Hook:
    """The hook of a name: one of sitsopt's, or an installed one of the entry point group `sitsopt.hooks`.

    Raises LookupError where there is none, TypeError for what is no hook.
    """
    if name in OWN:
        own: Hook = OWN[name]()
        return own
    for point in entry_points(group=GROUP):
        if point.name == name:
            hook: Any = point.load()()
            if not isinstance(hook, Hook) or hook.name != name:
                raise TypeError(f"{point.value} is no hook called {name}")
            return hook
    raise LookupError(f"no hook `{name}` is installed: there are {', '.join(names())}")


def names() -> list[str]:
    """Every hook that there is, sitsopt's own first."""
    return [
        *OWN,
        *sorted(point.name for point in entry_points(group=GROUP) if point.name not in OWN),
    ]


def ordered(hooks: Iterable[Hook]) -> list[Hook]:
    """Hooks in the order that `after` gives; sitsopt's own before others where nothing is said, then by name."""
    by_name = {hook.name: hook for hook in hooks}
    sorter = graphlib.TopologicalSorter[str]()
    for hook in by_name.values():
        sorter.add(hook.name, *(name for name in hook.after if name in by_name))
    sorter.prepare()
    rank = {name: place for place, name in enumerate(OWN)}
    found: list[Hook] = []
    waiting: list[str] = []
    while sorter.is_active():
        waiting += sorter.get_ready()
        waiting.sort(key=lambda name: (rank.get(name, len(rank)), name))
        found.append(by_name[waiting[0]])
        sorter.done(waiting.pop(0))
    return found
