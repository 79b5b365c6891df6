"""Runs ordered rules over one graph and records what applied, and on request what did not and why."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node

from ..graph.build import fake_mode
from ..graph.facts import is_view, module_path, source
from ..graph.opview import canonical
from ..spec.rule import Rule
from ..spec.target import Target
from .bindings import Trace
from .check import Refusal, insertion_point, refuse
from .edit import Edit, apply
from .match import Attempt, Match
from .predict import Forecast, bytes_moved
from .prefilter import needs, test_of
from .record import GraphRecord, Miss, Place, Site, Tried
from .stamp import FAILS, OTHER, Outcome, Stamp, noted, stays_near
from .view import GraphView


@dataclass
class Settings:
    """How to run the rules: grad mode, target facts, which sites to leave out, whether to keep misses."""

    grad: bool = False
    facts: dict[str, Any] = field(default_factory=dict)
    allow: Callable[[str], bool] = lambda site: True  # site key -> may apply
    misses: bool = False
    target: Target | None = None  # to predict times for
    stamp: bool = True  # do in equal layers what one of them shows


@dataclass
class Applied:
    """One rewrite in a graph: its site and either the edit or the nodes claimed for a kernel."""

    key: str
    site: Site
    match: Match
    edit: Edit | None
    claimed: list[Node]


def rewrite(
    view: GraphView, rules: Sequence[Rule], settings: Settings, record: GraphRecord
) -> list[Applied]:
    """Apply every rule wherever it fits, in the order given; fill `record` with sites, misses and stages."""
    engine = _Engine(view, settings, record, fake_mode(view.gm))
    for stage, group in groupby(rules, key=lambda r: r.stage):
        start, before = time.perf_counter(), len(engine.applied)
        for rule in group:
            engine.run(rule)
        record.stages.append(
            (stage, len(engine.applied) - before, (time.perf_counter() - start) * 1e3)
        )
    return engine.applied


class _Engine:
    def __init__(
        self, view: GraphView, settings: Settings, record: GraphRecord, mode: FakeTensorMode
    ) -> None:
        self.view, self.settings, self.record, self.mode = view, settings, record, mode
        self.applied: list[Applied] = []
        self.claims: dict[Node, str] = {}
        self.owners: dict[Node, str] = {}  # replaced nodes to the rule that did
        self.ordinals: Counter[str] = Counter()
        lanes, view.lanes = view.lanes, None  # edits of others would not be told to them
        self.lanes = lanes if lanes and settings.stamp and not settings.misses else None
        self.stamp: Stamp | None = None  # of the match applied last
        self.denied = False
        self.forecast = Forecast(settings.target)

    def run(self, rule: Rule) -> None:
        """Try one rule at every node that can be its root; a spelling that fits stops the search there."""
        missed: dict[Node, Trace] = {}
        done: set[Node] = set()
        for index in range(len(rule.spellings)):
            present = self.view.has if self.settings.misses else self.view.could_have
            if not present(needs(rule, index)):
                continue
            fits = test_of(rule, index)
            known: dict[Any, Outcome] = {}
            for node in [n for k in root_keys(rule, index) for n in self.view.nodes((k,))]:
                if node in self.view.dead or node in done:
                    continue
                key = self._place(node)
                if key is not None:
                    applied = known.get(key) is not FAILS and self._repeated(
                        rule, index, node, key, known
                    )
                else:
                    fit = self.settings.misses or fits(node, [])
                    applied = fit and self._try(rule, index, node, missed)
                if applied:
                    done.add(node)
        if self.settings.misses:
            self.record.tried[rule.id] = self._tried(rule)
            for node, trace in missed.items():
                if node not in done:
                    self.record.misses.append(_miss(rule, node, trace))
            self._note_taken(rule)

    def _place(self, node: Node) -> Any:
        """Where in a repeated layer a node stands: nodes of one place are alike. None for all others."""
        lanes = self.lanes
        if lanes is None or node not in lanes.of:
            return None
        lane, slot = lanes.of[node]
        window = lanes.windows[lane] if lanes.repeats[lane] else None
        return (slot, window) if window else None

    def _repeated(
        self, rule: Rule, index: int, node: Node, key: Any, known: dict[Any, Outcome]
    ) -> bool:
        """`_try` at a node of a repeated layer: an equal layer before it shows what comes of it."""
        assert self.lanes is not None
        lanes, view, of = self.lanes, self.view, self.lanes.of
        lane = of[node][0]
        outcome = known.get(key)
        if isinstance(outcome, Stamp) and self._stamped(outcome, lane):
            return True
        looked: list[Node] = []
        if not test_of(rule, index)(node, looked):
            if outcome is None and all(of[n][0] >= lane - 1 for n in looked if n in of):
                known[key] = FAILS
            return False
        if outcome is not None:
            return self._try(rule, index, node, {})
        view.seen, view.asked, self.denied = set(), set(), False
        try:
            applied = self._try(rule, index, node, {})
            alike = stays_near(view, lanes, lane) and not self.denied
        finally:
            view.seen = view.asked = None
        shown = (self.stamp or OTHER) if applied else FAILS
        known[key] = shown if alike else OTHER
        return applied

    def _stamped(self, stamp: Stamp, lane: int) -> bool:
        """Apply in another lane what a stamp holds; False where the site is switched off."""
        assert self.lanes is not None
        lanes, rule = self.lanes, stamp.match.rule
        match = stamp.image(lanes, lane)
        module = stamp.place(match, lanes, lane)
        if module is None:
            module = common_module(match.nodes)
        base = f"{rule.id}@{module}"
        key = f"{base}#{self.ordinals[base]}"
        if not self.settings.allow(key):
            return False
        self.ordinals[base] += 1
        site = stamp.note(match, module, key)
        edit = stamp.apply(match, self.view, lanes, lane)
        self._keep(key, site, match, edit)
        lanes.change([lane + off for off in stamp.touched], stamp.event, lane)
        return True

    def _note_taken(self, rule: Rule) -> None:
        """Misses where the rule would fit nodes that rules before it have replaced."""
        seen: set[Node] = set()
        for index in range(len(rule.spellings)):
            roots = (n for k in root_keys(rule, index) for n in self.view.by_key.get(k, ()))
            for node in [
                n for n in roots if self.owners.get(n, rule.id) != rule.id and n not in seen
            ]:
                match = next(Attempt(rule, index, self.view, None).run(node), None)
                if (
                    match
                    and refuse(match, self.view, self.settings.grad, self.settings.facts) is None
                ):
                    seen.add(node)
                    count = len(match.nodes)
                    trace = Trace(count, "order", f"taken by {self.owners[node]}", of=count)
                    self.record.misses.append(_miss(rule, node, trace))

    def _tried(self, rule: Rule) -> Tried:
        every = range(len(rule.spellings))
        roots = set().union(*(root_keys(rule, i) for i in every))
        missing = [
            sorted(k for k in needs(rule, i).keys if not self.view.by_key.get(k)) for i in every
        ]
        fewest = min(missing, key=len)
        return Tried(sum(len(self.view.by_key.get(k, ())) for k in roots), tuple(fewest))

    def _try(self, rule: Rule, index: int, node: Node, missed: dict[Node, Trace]) -> bool:
        trace = Trace(of=len(rule.spellings[index].program.lets)) if self.settings.misses else None
        refusal: Refusal | None = None
        for match in Attempt(rule, index, self.view, trace).run(node):
            refusal = self._apply(match)
            if refusal is None:
                return True
            if trace is not None:
                trace.fail(
                    len(match.nodes) + 1,
                    refusal.reason,
                    refusal.condition,
                    refusal.expected,
                    refusal.found,
                )
                trace.explanation, trace.of = refusal.explanation, trace.matched
        if trace is not None and trace.matched > 0:
            best = missed.get(node)
            if best is None or trace.matched > best.matched:
                missed[node] = trace
        return False

    def _apply(self, match: Match) -> Refusal | None:
        rule = match.rule
        setting = self.settings
        refusal = refuse(match, self.view, setting.grad, setting.facts, setting.misses)
        if refusal is None and rule.replace is None:
            owner = next((self.claims[n] for n in match.nodes if n in self.claims), None)
            if owner is not None:
                return Refusal("order", f"taken by {owner}", "a node belongs to one kernel")
        if refusal is not None:
            return refusal
        module = common_module(match.nodes)
        base = f"{rule.id}@{module}"
        key = f"{base}#{self.ordinals[base]}"
        if not self.settings.allow(key):
            self.ordinals[base] += 1
            self.denied = True
            return Refusal(
                "order", "switched off", "this site is switched off by `only` or `exclude`"
            )
        costs = self.forecast.of(match.nodes)
        edit: Edit | None = None
        point: Node | None = None
        if rule.replace is not None:
            point = insertion_point(match)
            asked, self.view.asked = (
                self.view.asked,
                None,
            )  # from here on each layer asks for itself
            outcome = apply(match, self.view, self.mode)
            self.view.asked = asked
            if isinstance(outcome, Refusal):
                return outcome
            edit = outcome
        self.ordinals[base] += 1
        site = self._note(key, match, edit, module, bytes_moved(costs))
        kernels = sum(not is_view(n) for n in _each_call(edit)) if edit else 1
        self.forecast.predict(site, costs, kernels)
        if self.lanes is not None:
            self.stamp = noted(match, edit, point, site, self.lanes)
        return None

    def _note(
        self, key: str, match: Match, edit: Edit | None, module: str, before: int | None
    ) -> Site:
        after = bytes_moved(self.forecast.of(_each_call(edit))) if edit else boundary(match)
        site = Site(
            match.rule.id, Place(module, source(match.anchor), match.anchor.name), key, match.spelling,
            len(match.nodes), tuple(n.name for n in match.nodes), before, after, binding=_readable(match),
        )  # fmt: skip
        self._keep(key, site, match, edit)
        return site

    def _keep(self, key: str, site: Site, match: Match, edit: Edit | None) -> None:
        claimed = list(match.nodes) if edit is None else []
        self.claims.update(dict.fromkeys(claimed, match.rule.id))
        if edit is not None and self.settings.misses:
            self.owners.update(dict.fromkeys(match.nodes, match.rule.id))
        self.record.sites.append(site)
        self.applied.append(Applied(key, site, match, edit, claimed))


@lru_cache(maxsize=8192)
def root_keys(rule: Rule, spelling: int) -> tuple[str, ...]:
    """Op keys a spelling's first return can stand at; through a cast that may be no node, its operand's too. Casts come
    first: where there is one, a match without it would be the smaller one and leave the cast behind."""
    program = rule.spellings[spelling].program
    lets = {n: let for let in program.lets for n in let.names}
    let, keys = lets[program.returns[0]], dict[str, None]()
    while True:
        key = canonical(let.call.op)
        keys[key] = None
        operand = let.call.args[0] if let.call.args else None
        name = getattr(operand, "name", None)
        if key != "prim.cast" or name not in lets:
            return tuple(keys)
        let = lets[name]


def common_module(nodes: Iterable[Node]) -> str:
    """The deepest module that contains every node that knows where it comes from."""
    paths = [p.split(".") for p in {module_path(n) for n in nodes} if p]
    if not paths:
        return ""
    depth = 0
    while all(len(p) > depth and p[depth] == paths[0][depth] for p in paths):
        depth += 1
    return ".".join(paths[0][:depth])


def boundary(match: Match) -> int | None:
    """Bytes one kernel for the whole match must move: inputs once, outputs once."""
    from ..graph.facts import nbytes, val

    total = sum((nbytes(val(n)) for n in {*match.inputs, *(r for r in match.returns if r)}), 0)
    return total if isinstance(total, int) else None


def _each_call(edit: Edit) -> list[Node]:
    """The new nodes that run in every call; what is folded from parameters runs once."""
    return [n for n in edit.made if "sits_fold" not in n.meta]


def _miss(rule: Rule, node: Node, trace: Trace) -> Miss:
    place = Place(module_path(node), source(node), node.name)
    return Miss(
        rule.id, place, trace.reason, trace.condition, trace.explanation,
        trace.expected, trace.found, trace.matched, trace.of,
    )  # fmt: skip


def _readable(match: Match) -> dict[str, str]:
    return {
        k: v.name if isinstance(v, Node) else str(v)
        for k, v in match.bound.items()
        if not k.startswith("%")
    }
