"""`sitsopt.report(model)`: what was rewritten, what almost was, and what the settings came to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from torch import nn

from .explain.data import as_dict
from .explain.page import as_html
from .explain.story import Story
from .explain.text import as_text, story_parts
from .explain.why import WhyNot, why_not
from .rewrite.record import Place, Record
from .runtime.kv.account import last
from .session import Session, sessions_of
from .spec.locate import files
from .spec.rule import Rule

NEVER = (
    'Nothing here was compiled with backend="sits" yet. Compile it and call it once: '
    'model.compile(backend="sits"); model(**inputs).'
)
WRAPPED = "It is wrapped by torch.compile: under a backend other than sits, its generate() runs the uncompiled forward."


@dataclass
class Report(Story):
    """What is known about one model that was compiled. `str()` and `print` show it; a notebook shows the page."""

    def __str__(self) -> str:
        return as_text(self)

    def json(self) -> dict[str, Any]:
        """Plain data: the fields of `sitsopt explain --json`."""
        return as_dict(self)

    def html(self) -> str:
        """One page that needs no other file and no network."""
        return as_html(self)

    def why_not(self, rule: str) -> WhyNot:
        """Why a rule did not fire, place by place. Raises SpecError, with the nearest name, for an unknown rule."""
        return why_not(self, rule)

    def _repr_html_(self) -> str:
        return self.html()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from story_parts(self)


def report(owner: Any = None) -> Report:
    """The report of a model, a compiled model or a compiled function; of everything compiled so far for None."""
    found = sessions_of(owner)
    made = of_sessions(found, getattr(owner, "_orig_mod", owner))
    if not made.record.graphs:
        made.notes.append(NEVER)
        if hasattr(owner, "_orig_mod") and hasattr(owner, "generate"):
            made.notes.append(WRAPPED)
    return made


def of_sessions(found: list[Session], owner: Any = None) -> Report:
    """One report over several sessions, as of a model that was compiled twice, or in parts."""
    inside = owner.named_modules() if isinstance(owner, nn.Module) else ()
    prefixes = {id(module): name for name, module in inside}
    rules = {r.id: r.summary for s in found for r in s.plan.rules}
    excluded = {name: why for s in found for name, why in _excluded(s).items() if name not in rules}
    bandwidths = {s.target.memory.bandwidth_gbs for s in found if s.target is not None}
    parts = [_part(s, prefixes.get(id(s.owner()), ""), len(found) > 1) for s in found]
    return Report(
        _merged(parts),
        rules,
        excluded,
        recorded=all(s.plan.misses for s in found),
        bandwidth_gbs=bandwidths.pop() if len(bandwidths) == 1 else None,
        makes=_makes(rule for s in found for rule in s.plan.rules),
        cache=last(owner),
    )


def _makes(rules: Iterable[Rule]) -> dict[str, list[str]]:
    """Ops of this project to the rules that put them into a graph."""
    made: dict[str, list[str]] = {}
    for rule in rules:
        programs = [rule.replace, *(spelling.replace for spelling in rule.spellings)]
        for op in {let.call.op for p in programs if p is not None for let in p.lets}:
            if op.startswith("sits."):
                made.setdefault(op, []).append(rule.id)
    return made


def _excluded(session: Session) -> dict[str, str]:
    """The rules that the recipe leaves out, with its reasons."""
    if session.recipe is None:
        return {}
    whys = {name: session.recipe.excluded(name) for name in files("rules", session.options.path)}
    return {name: why for name, why in whys.items() if why is not None}


def _part(session: Session, prefix: str, named: bool) -> Record:
    """A session's record as a part of a larger one: module paths from the whole model's root, and graphs called
    after what they were compiled from."""
    if not (named or prefix):
        return session.record
    owner = session.owner()
    own = type(owner).__name__ if isinstance(owner, nn.Module) else getattr(owner, "co_name", "")
    label = prefix or own
    graphs = [
        replace(
            graph,
            name=f"{label}.{graph.name}" if named else graph.name,
            sites=[replace(s, place=_below(prefix, s.place)) for s in graph.sites],
            misses=[replace(m, place=_below(prefix, m.place)) for m in graph.misses],
        )
        for graph in session.record.graphs
    ]
    return replace(session.record, graphs=graphs)


def _below(prefix: str, place: Place) -> Place:
    return replace(place, module=f"{prefix}.{place.module}".strip("."))


def _merged(records: list[Record]) -> Record:
    if len(records) == 1:
        return records[0]
    one = Record(_names(r.target for r in records), _names(r.recipe for r in records))
    taken = Counter[str]()
    for record in records:
        for graph in record.graphs:
            taken[graph.name] += 1
            again = f" ({taken[graph.name]})" if taken[graph.name] > 1 else ""
            one.graphs.append(replace(graph, name=graph.name + again))
        if record.loop:
            one.loop, one.loop_why, one.speculation = (
                record.loop,
                record.loop_why,
                record.speculation,
            )
        one.effective += [e for e in record.effective if e not in one.effective]
    return one


def _names(names: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(filter(None, names)))
