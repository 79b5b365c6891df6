"""Matching a rule's pattern against a functional graph: backtracking unification from a root node upward.

A literal is never a wildcard, an argument the pattern leaves out must have its default, and an interior value that
anyone else reads blocks the match. Why an attempt failed is kept only when a `Trace` is passed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from ..graph.facts import tensor
from ..graph.opview import REQUIRED, OpView, canonical, key_of, permutation, view_of
from ..spec.ops import resolve
from ..spec.program import Call, Let, Lit, Program, Ref, Seq, Term
from ..spec.rule import Rule
from .bindings import Bindings, Trace, Unbound, described
from .pattern import from_the_front, pattern_of
from .values import plain, same_constant, symbolic
from .view import GraphView

Goal = tuple[Term, Any, str]
FAILED: tuple[Goal, ...] = ((Lit(None), None, "failed"),)


_State = tuple[dict[str, Any], dict[Node, Let | None], int]


@dataclass
class Match:
    """A pattern found: names to nodes, constants, sizes and dtypes; the op nodes taken; the values returned."""

    rule: Rule
    spelling: int
    anchor: Node
    bound: dict[str, Any]
    nodes: list[Node]
    returns: tuple[Node | None, ...]
    inputs: list[Node] = field(default_factory=list)


class Attempt(Bindings):
    """One spelling of one rule tried at one node."""

    def __init__(self, rule: Rule, spelling: int, view: GraphView, trace: Trace | None) -> None:
        self.pattern = pattern_of(rule, spelling)
        super().__init__(rule, view, trace, self.pattern.fixed)
        self.index, self.lets = spelling, self.pattern.lets
        self.program: Program = rule.spellings[spelling].program
        self.deferred: list[Goal] = []

    # -- search -------------------------------------------------------------------------------------

    def run(self, anchor: Node) -> Iterator[Match]:
        """Every way the spelling fits with its first return at `anchor`, first found first."""
        root = self.program.returns[0]
        for _ in self._root(root, anchor):
            for _ in self._rest(1):
                if self.nodes:  # casts alone may be no node at all
                    yield self._match(anchor)

    def _root(self, name: str, anchor: Node) -> Iterator[None]:
        let = self.lets[name]
        if len(let.names) == 1:
            yield from self._solve(((Ref(name), anchor, ""),))
            return
        for goals in self._calls(let, anchor):
            yield from self._solve(goals)

    def _rest(self, i: int) -> Iterator[None]:
        """Returned values that the root does not reach: siblings that share one of its inputs."""
        while i < len(self.program.returns) and (
            self.program.returns[i] in self.bound or self.program.returns[i] not in self.lets
        ):
            i += 1
        if i == len(self.program.returns):
            if self._settled():
                yield None
            return
        let = self.lets[self.program.returns[i]]
        if len(let.names) > 1:  # an output of a matched op that nobody reads
            yield from self._rest(i + 1)
            return
        for node in self._siblings(let):
            mark = self._mark()
            for _ in self._solve(((Ref(let.names[0]), node, ""),)):
                yield from self._rest(i + 1)
            self._undo(mark)

    def _siblings(self, let: Let) -> list[Node]:
        """Nodes that could be `let`: users of a bound argument, after like siblings in graph order."""
        key = canonical(let.call.op)
        floor = [n for n, other in self.nodes.items() if other and canonical(other.call.op) == key]
        for term in let.call.args:
            base = self.bound.get(term.name) if isinstance(term, Ref) else None
            if isinstance(base, Node):
                users = [
                    u for u in self.view.users(base) if key_of(u) == key and u not in self.nodes
                ]
                same = [n for n in floor if base in n.all_input_nodes]
                return sorted(u for u in users if all(n < u for n in same))
        self.fail(
            "pattern",
            f"{', '.join(let.names)} = {let.call.op}",
            "a value that shares an input",
            "none",
        )
        return []

    def _solve(self, goals: tuple[Goal, ...]) -> Iterator[None]:
        """Every way to meet all goals; afterwards everything is as it was."""
        start = self._mark()
        mark: _State | None = start
        while goals:
            more = self._only_way(*goals[0])
            if more is None:
                break
            if more is FAILED:
                self._undo(start)
                return
            goals = (*more, *goals[1:])
            mark = None
        if not goals:
            yield None
            self._undo(start)
            return
        mark = mark or self._mark()  # what has been met so far stays between the alternatives
        for way in self._unify(*goals[0]):
            yield from self._solve((*way, *goals[1:]))
            self._undo(mark)
        self._undo(start)

    def _only_way(self, term: Term, actual: Any, label: str) -> tuple[Goal, ...] | None:
        """What is left of a goal that can be met in one way at most, FAILED where it cannot be met; None for a goal
        with alternatives."""
        if self.view.seen is not None and isinstance(actual, Node):
            self.view.seen.add(actual)
        if not isinstance(term, Ref):
            return self._list(term, actual, label) if isinstance(term, Seq) else (
                self._constant(term, actual, label)
            )  # fmt: skip
        name = term.name
        if name in self.bound:
            bound = self.bound[name]
            if bound is actual or same_constant(bound, symbolic(actual)):
                return ()
            self.fail("pattern", name, f"the same value for `{name}`", actual)
            return FAILED
        if name in self.rule.through:
            return None
        let = self.lets.get(name)
        if let is None:
            return self._leaf(name, actual)
        if not self.pattern.ops[id(let)].one_way:
            return None
        node = self._source(name, let, actual)
        return FAILED if node is None else self._call(let, node)

    def _mark(self) -> _State:
        return self.bound.copy(), self.nodes.copy(), len(self.deferred)

    def _undo(self, mark: _State) -> None:
        self.bound, self.nodes = dict(mark[0]), dict(mark[1])
        del self.deferred[mark[2] :]

    # -- one goal -----------------------------------------------------------------------------------

    def _unify(self, term: Term, actual: Any, label: str) -> Iterator[tuple[Goal, ...]]:
        """Every way to meet a goal that has alternatives."""
        assert isinstance(term, Ref)
        name = term.name
        for value, passed in self._through(name, actual):
            mark = self._mark()
            self.nodes.update(dict.fromkeys(passed))
            let = self.lets.get(name)
            if let is not None:
                node = self._source(name, let, value)
                if node is not None:
                    yield from self._calls(let, node)
            elif (more := self._leaf(name, value)) is not FAILED:
                yield more
            self._undo(mark)

    def _list(self, term: Seq, actual: Any, label: str) -> tuple[Goal, ...]:
        if isinstance(actual, (list, tuple)):
            parts = self._parts(term, actual)
            if len(parts) == len(term.items):
                return tuple((t, a, label) for t, a in zip(term.items, parts, strict=True))
        self.fail("pattern", label, f"a list of {len(term.items)}", actual)
        return FAILED

    def _constant(self, term: Term, actual: Any, label: str) -> tuple[Goal, ...]:
        try:
            wanted = self.value(term)
        except Unbound:
            self.deferred.append((term, actual, label))
            return ()
        if same_constant(wanted, symbolic(actual)):
            return ()
        self.fail("pattern", label, wanted, actual)
        return FAILED

    def _leaf(self, name: str, actual: Any) -> tuple[Goal, ...]:
        spec = self.rule.inputs.get(name)
        if spec is not None:
            return () if self.fits_input(spec, actual) else FAILED
        self.bound[name] = symbolic(actual)
        return ()

    def _parts(self, term: Seq, actual: list[Any] | tuple[Any, ...]) -> list[Any]:
        """The items of a list as the pattern divides them: a pack of sizes takes what the others leave."""
        packs = self.rule.packs
        at = next(
            (i for i, t in enumerate(term.items) if isinstance(t, Ref) and t.name in packs), None
        )
        extra = len(actual) - len(term.items) + 1
        if at is None or extra < 0:
            return list(actual)
        pack = tuple(symbolic(size) for size in actual[at : at + extra])
        return [*actual[:at], pack, *actual[at + extra :]]

    def _through(self, name: str, actual: Any) -> Iterator[tuple[Any, tuple[Node, ...]]]:
        """The value itself, then what lies behind the casts and views that the rule lets stand on this edge."""
        yield actual, ()
        kinds = self.rule.through.get(name, ())
        passed: tuple[Node, ...] = ()
        keys = {"cast": "prim.cast", "view": "prim.reshape", "transpose": "prim.permute"}
        allowed = {keys[k] for k in kinds}
        while isinstance(actual, Node) and allowed and key_of(actual) in allowed:
            passed = (*passed, actual)
            actual = actual.args[0]
            if self.view.seen is not None and isinstance(actual, Node):
                self.view.seen.add(actual)
            yield actual, passed

    def _source(self, name: str, let: Let, actual: Any) -> Node | None:
        """The node that must be the call, for a value that must be a result of it."""
        if not isinstance(actual, Node):
            self.fail("pattern", name, let.call.op, actual)
            return None
        if len(let.names) == 1:
            return actual
        view, index = view_of(actual), let.names.index(name)
        if view is None or view.key != "prim.getitem" or view.values[1] != index:
            self.fail("pattern", name, f"output {index} of {let.call.op}", described(actual))
            return None
        node: Node = view.values[0]
        if self.view.seen is not None:
            self.view.seen.add(node)
        return node

    def _call(self, let: Let, node: Node) -> tuple[Goal, ...]:
        """Take a node as the call, with its arguments as they stand. FAILED leaves everything as it was."""
        op = self.pattern.ops[id(let)]
        view = view_of(node)
        if view is None or view.key != op.key or (op.overload and view.overload != op.overload):
            self.fail(
                "pattern", f"{', '.join(let.names)} = {let.call.op}", let.call.op, described(node)
            )
            return FAILED
        if node in self.nodes:
            self.fail("pattern", let.call.op, "a node of its own", described(node))
            return FAILED
        goals = self._arguments(let.call, op.key, view, node)
        if goals is None:
            return FAILED
        self._take(let, node)
        return tuple(goals)

    def _calls(self, let: Let, node: Node) -> Iterator[tuple[Goal, ...]]:
        """Every way a node can be the call."""
        op = self.pattern.ops[id(let)]
        if op.key == "prim.cast":
            yield from self._casts(let, node)
            return
        mark = self._mark()
        goals = self._call(let, node)
        if goals is FAILED:
            return
        yield goals
        if op.commutes and self._swappable(view_of(node)):
            self._undo(mark)
            self._take(let, node)
            (a, x, la), (b, y, lb), *more = goals
            yield ((a, y, la), (b, x, lb), *more)

    @staticmethod
    def _swappable(view: Any) -> bool:
        fact = resolve(view.key)
        given = dict(zip(view.names, view.values, strict=True))
        return fact is not None and all(given.get(k, v) == v for k, v in fact.commutes_when)

    def _take(self, let: Let, node: Node) -> None:
        self.nodes[node] = let
        if len(let.names) == 1:
            self.bound[let.names[0]] = node
            return
        for user in self.view.users(node):
            view = view_of(user)
            if view is not None and view.key == "prim.getitem" and view.values[1] < len(let.names):
                self.nodes[user] = None
                self.bound[let.names[view.values[1]]] = user

    def _casts(self, let: Let, node: Node) -> Iterator[tuple[Goal, ...]]:
        """A cast is a cast node, or no node at all where the value has that dtype already."""
        operand, dtype = let.call.args[0], let.call.args[1]
        mark = self._mark()
        view = view_of(node)
        if view is not None and view.key == "prim.cast":
            self._take(let, node)
            yield ((dtype, view.values[1], "dtype"), (operand, view.values[0], "self"))
            self._undo(mark)
        value = tensor(node)
        if value is not None:
            self.bound[let.names[0]] = node
            yield ((dtype, value.dtype, "dtype"), (operand, node, "self"))

    def _arguments(self, call: Call, key: str, view: OpView, node: Node) -> list[Goal] | None:
        """Pair the pattern's arguments with the node's, by position, by name, or by default."""
        if key == "prim.permute":
            return self._permute_goals(call, view)
        pairs = self.pattern.arguments(call, view)
        if isinstance(pairs, str):
            self.fail("pattern", call.op, f"arguments {list(view.names)}", pairs)
            return None
        goals: list[Goal] = []
        for i, label, term, counts in pairs:
            if term is not None:
                counted = from_the_front(term, node) if counts else term
                goals.append((counted, view.values[i], label))
                continue
            default = view.defaults[i]
            if default is REQUIRED or not same_constant(default, view.values[i]):
                wanted = default if default is not REQUIRED else "given"
                self.fail("pattern", label, wanted, view.values[i])
                return None
        return goals

    def _permute_goals(self, call: Call, view: OpView) -> list[Goal] | None:
        base = ".".join(call.op.split(".")[:2])
        rank = len(view.values[1])
        try:
            args = tuple(self.value(t) for t in call.args[1:])
        except Unbound:
            self.fail("pattern", base, "literal dims", call.args[1:])
            return None
        wanted = permutation(base, rank, args)
        if wanted != view.values[1]:
            self.fail("pattern", f"{base} of {rank} dims", wanted, view.values[1])
            return None
        return [(call.args[0], view.values[0], "self")]

    # -- the end ------------------------------------------------------------------------------------

    def _settled(self) -> bool:
        """Whether the equations left for later hold, now that every size is known."""
        for term, actual, label in self.deferred:
            try:
                wanted = self.value(term)
            except Unbound as name:
                self.fail("pattern", label, f"a value for {name}", "none")
                return False
            if not same_constant(wanted, symbolic(actual)):
                self.fail("pattern", label, wanted, actual)
                return False
        return True

    def _match(self, anchor: Node) -> Match:
        for spec in self.rule.inputs.values():
            self.bound.setdefault(spec.name, plain(spec.default))
        returns = tuple(self.bound.get(name) for name in self.program.returns)
        inputs = [b for name in self.rule.inputs if isinstance(b := self.bound.get(name), Node)]
        return Match(
            self.rule, self.index, anchor, dict(self.bound), list(self.nodes), returns, inputs
        )
