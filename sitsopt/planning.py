"""From options to a plan: the recipe that fits the model, the target it runs on, the rules that may apply.

Also the other direction: what the recipe asked for against what came of it, and the counts it expects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import nn

from .calibrate.choose import apply as use_calibrated
from .options import Options
from .pipeline import LoweringError, Plan
from .rewrite.coverage import too_little
from .rewrite.order import ordered
from .rewrite.record import Effective, GraphRecord, Miss, Record
from .rewrite.wanted import wanted_weights
from .runtime.lower import Lowering
from .runtime.machine import detect_target
from .session import Session, weak
from .spec.locate import rule_dirs
from .spec.recipe import Recipe, load_recipe, requests
from .spec.region import load_regions
from .spec.rule import Rule, load_rules
from .spec.target import Target, load_target

DECODE = "decode"  # the region rule that a CPU answers with one function
# What lies outside a graph: `sitsopt.optimize` does it, torch.compile alone cannot.
OUTSIDE = {
    "speculate": "proposals lie outside a graph: `sitsopt.optimize` makes and checks them",
    "hooks": "hooks lie outside a graph: `sitsopt.optimize` runs them",
    "kv_cache": "a cache is no part of a graph: `sitsopt.optimize` puts it in, or give the model a QuantizedKVCache",
}


class ExpectationError(RuntimeError):
    """A rule fired less (or more) often than the recipe's `expect` demands, or less of a step is in regions than
    `regions.require`; the message shows the near misses, or what is outside and why."""


def make_session(
    owner: Any,
    options: Options,
    mode: str | None = None,
    unknown: Mapping[str, Any] | None = None,
    outside: Collection[str] = (),
) -> Session:
    """Load what the options name and plan for one model; `outside` are sections about what lies outside a graph that the caller sees to. Raises SpecError for anything that is wrong with
    it, and LoweringError under `strict` for what the recipe asks and is not to be had."""
    rules, regions = load_rules(rule_dirs(options.path)), load_regions(rule_dirs(options.path))
    known = [r.id for r in rules] + [r.id for r in regions.values()]
    recipe = load_recipe(options.recipe, class_names(owner), options.path, options.set, known)
    target = (
        detect_target() if options.target == "auto" else load_target(options.target, options.path)
    )
    record = Record(target=target.name, recipe=recipe.name)
    chosen = choose(rules, recipe, record)
    plan = Plan(
        chosen, facts_of(target), Lowering(
            options.lowering, inductor=inductor_options(options, mode), profitability=recipe.profitability,
            regions=recipe.regions is not None and DECODE in recipe.regions.use,
        ),
        options.strict, options.explain, options.allows(), target,
    )  # fmt: skip
    plan.weights = wanted_weights(owner, weak(owner), recipe, record.effective)
    plan.regions = tuple(regions[name] for name in recipe.regions.use) if recipe.regions else ()
    missing = [*unbuilt(recipe, outside), *_no_graphs(recipe, target)]
    if plan.weights is not None:
        lines, complete = use_calibrated(plan.weights, owner, options.path)
        (record.effective if complete else missing).extend(lines)
    if options.strict and missing:
        raise LoweringError("; ".join(f"{m.asked}: {m.reason}" for m in missing))
    record.effective.extend(missing)
    for name, value in (unknown or {}).items():
        record.effective.append(
            Effective(f"{name}={value!r}", "ignored", "the backend has no such setting")
        )
    return Session(weak(owner), options, plan, record, recipe, target)


def class_names(owner: Any) -> list[str]:
    """The class of a model and what it derives from, the nearest first; the wrapped model's for a wrapper."""
    return [c.__name__ for c in type(owner).__mro__] if isinstance(owner, nn.Module) else []


def choose(rules: Iterable[Rule], recipe: Recipe, record: Record) -> list[Rule]:
    """Rules that the recipe lets apply, in order; those it excludes stand under `effective` with its reason."""
    chosen = []
    for rule in rules:
        why = recipe.excluded(rule.id)
        if why is None:
            chosen.append(rule)
        else:
            record.effective.append(Effective(f"rule {rule.id}", "off", why))
    return ordered(chosen)


def facts_of(target: Target) -> dict[str, Any]:
    """A target as the names a condition may read: `target.emitter`, `target.arch`, `target.channels_last`."""
    facts: dict[str, Any] = {"name": target.name, "emitter": target.emitter, "arch": target.arch}
    facts.update(dict.fromkeys(target.passes, True))
    return facts


def inductor_options(options: Options, mode: str | None) -> dict[str, Any]:
    """What torch.compile's `mode` means to Inductor, with the user's own options on top."""
    found: dict[str, Any] = {}
    if mode:
        import torch._inductor

        found.update(torch._inductor.list_mode_options(mode))
    found.update(options.inductor)
    return found


def unbuilt(recipe: Recipe, outside: Collection[str] = ()) -> list[Effective]:
    """What a recipe asks for and this version does not have, and what lies outside a graph unless the caller sees to it."""
    reasons = {k: v for k, v in OUTSIDE.items() if k not in outside}
    return [
        Effective(request.asked, "nothing", reasons[request.section])
        for request in requests(recipe)
        if request.section in reasons
    ]


def _no_graphs(recipe: Recipe, target: Target) -> list[Effective]:
    """What a recipe says of regions, where the target has no graphs to capture. A CPU makes a decode step one function:
    each graph says whether."""
    if target.emitter == "triton":
        return []
    asked = [r for r in requests(recipe) if r.section == "regions"]
    why = f"regions are captured as CUDA graphs; {target.name} is no GPU"
    return [Effective(r.asked, "nothing", why) for r in asked if r.asked != f"regions: {DECODE}"]


def fired(graphs: Iterable[GraphRecord]) -> Counter[str]:
    """How many distinct sites of the model each rule fired at, counted once over all graphs."""
    places: set[tuple[str, str, int]] = set()
    for graph in graphs:
        seen: Counter[tuple[str, str]] = Counter()
        for site in graph.sites:
            key = (site.rule, site.place.module)
            places.add((*key, seen[key]))
            seen[key] += 1
    return Counter(rule for rule, _, _ in places)


def check_once(session: Session) -> None:
    """Compare `expect` with what fired at the first complete call; `regions.require` at every one."""
    check_regions(session)
    if not session.checked:
        session.checked = True
        check_expectations(session)


def check_expectations(session: Session) -> None:
    """Compare `expect` with what fired. Raises ExpectationError naming each rule, what was wanted, and the closest
    near misses."""
    owner = session.owner()
    config = getattr(owner, "config", None)
    if session.recipe is None or config is None:
        return
    counts, wrong = fired(session.record.graphs), []
    for expected in session.recipe.expectations():
        holds, wanted = expected.holds(counts[expected.rule], config)
        if not holds:
            wrong.append(
                f"{expected.pos}: {expected.rule} fired {counts[expected.rule]} times, expected {wanted}"
                + _closest(session.record.graphs, expected.rule)
            )
    if wrong and any(g.grad for g in session.record.graphs):
        why = "gradients are recorded, and rules for inference do not apply then"
        session.record.effective.extend(
            Effective(f"expect: {line}", "not checked", why) for line in wrong
        )
    elif wrong:
        hint = "`sitsopt explain MODEL --why-not RULE` shows every near miss"
        raise ExpectationError("\n".join([*wrong, f"  hint: {hint}"]))


def check_regions(session: Session) -> None:
    """Raises ExpectationError where less of a step is in regions than the recipe requires, with what is outside."""
    asked = session.recipe.regions if session.recipe is not None else None
    if asked is None or asked.require is None:
        return
    if wrong := too_little(session.record.graphs, asked.require):
        pos = session.recipe.origin(("regions", "require"))
        raise ExpectationError("\n".join(f"{pos}: {line}" for line in wrong))


def _closest(graphs: Iterable[GraphRecord], rule: str) -> str:
    misses: list[Miss] = [m for g in graphs for m in g.misses if m.rule == rule]
    misses.sort(key=lambda m: -m.matched)
    fallbacks = [
        f"\n  graph {g.name} was not rewritten: {g.fallback}" for g in graphs if g.fallback
    ]
    lines = [
        f"\n  near miss at {m.place.module} ({m.place.source}): {m.reason}: {m.condition}: "
        f"expected {m.expected}, found {m.found}"
        for m in misses[:3]
    ]
    return "".join(fallbacks + lines)
