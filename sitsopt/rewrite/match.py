"""Matching a rule's pattern against a functional graph: backtracking unification from a root node upward.

A literal is never a wildcard, an argument the pattern leaves out must have its default, and an interior value that
anyone else reads blocks the match. Why an attempt failed is kept only when a `Trace` is passed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch.fx import Node

from ..graph.facts import DTYPES, tensor
from ..graph.opview import (
    REQUIRED,
    OpView,
    canonical,
    dim_args,
    front,
    key_of,
    permutation,
    rank_of,
    view_of,
)
from ..spec.ops import commutative, resolve
from ..spec.program import Arith, Call, Let, Lit, Program, Ref, Seq, Term
from ..spec.rule import Input, Rule
from .values import arithmetic, const_kinds, plain, same_constant, symbolic
from .view import GraphView

LAYOUT_ONLY = {
    "aten.clone",
    "aten.contiguous",
}  # the memory format changes where values lie, not what they are
Goal = tuple[Term, Any, str]
FAILED: tuple[Goal, ...] = ((Lit(None), None, "failed"),)


_State = tuple[dict[str, Any], dict[Node, Let | None], int]


class Unbound(Exception):
    """A term names a size or a constant that is not known yet."""


@dataclass
class Trace:
    """The failure that got furthest: how many nodes had matched, and why the next step failed."""

    matched: int = -1
    reason: str = ""
    condition: str = ""
    expected: str = ""
    found: str = ""
    explanation: str = ""
    of: int = 0  # nodes in the pattern

    def fail(
        self, matched: int, reason: str, condition: str, expected: object, found: object
    ) -> None:
        if matched > self.matched:
            self.matched, self.reason, self.condition = matched, reason, condition
            self.expected, self.found = str(expected), str(found)


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


@dataclass(frozen=True)
class _Op:
    """What a call of the pattern asks of a node: its key, its overload if the pattern names one."""

    key: str
    overload: str
    commutes: bool

    @property
    def one_way(self) -> bool:
        """Whether a node can be this call in one way at most."""
        return not self.commutes and self.key != "prim.cast"


Pair = tuple[int, str, str, Term | None, bool]


@dataclass
class _Plan:
    """What every attempt at one spelling shares. `pairs`: for a call and the argument names of an op, which term of
    the call goes with which argument, None for one that must have its default, and whether it counts dims."""

    lets: dict[str, Let]
    ops: dict[int, _Op]  # by the id of the let
    fixed: dict[str, Any]
    pairs: dict[tuple[int, tuple[str, ...]], list[Pair] | str] = field(default_factory=dict)


@lru_cache(maxsize=8192)
def _plan(rule: Rule, spelling: int) -> _Plan:
    chosen = rule.spellings[spelling]
    lets = {n: let for let in chosen.program.lets for n in let.names if n != "_"}
    ops = {}
    for let in lets.values():
        key, overload = canonical(let.call.op), let.call.op.split(".")[2:]
        ops[id(let)] = _Op(key, overload[0] if overload else "", key in commutative())
    return _Plan(lets, ops, {k: plain(v) for k, v in chosen.fixed.items()})


class Attempt:
    """One spelling of one rule tried at one node."""

    def __init__(self, rule: Rule, spelling: int, view: GraphView, trace: Trace | None) -> None:
        self.rule, self.view, self.trace = rule, view, trace
        self.index = spelling
        self.program: Program = rule.spellings[spelling].program
        self.plan = _plan(rule, spelling)
        self.lets = self.plan.lets
        self.bound: dict[str, Any] = dict(self.plan.fixed)
        self.nodes: dict[Node, Let | None] = {}
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
        self._fail(
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
        if not isinstance(term, Ref):
            return self._list(term, actual, label) if isinstance(term, Seq) else (
                self._constant(term, actual, label)
            )  # fmt: skip
        name = term.name
        if name in self.bound:
            bound = self.bound[name]
            if bound is actual or same_constant(bound, symbolic(actual)):
                return ()
            self._fail("pattern", name, f"the same value for `{name}`", actual)
            return FAILED
        if name in self.rule.through:
            return None
        let = self.lets.get(name)
        if let is None:
            return self._leaf(name, actual)
        if not self.plan.ops[id(let)].one_way:
            return None
        node = self._source(name, let, actual)
        return FAILED if node is None else self._call(let, node)

    def _mark(self) -> _State:
        return self.bound.copy(), self.nodes.copy(), len(self.deferred)

    def _undo(self, mark: _State) -> None:
        self.bound, self.nodes = dict(mark[0]), dict(mark[1])
        del self.deferred[mark[2] :]

    def _fail(self, reason: str, condition: str, expected: object, found: object) -> None:
        if self.trace is not None:
            self.trace.fail(len(self.nodes), reason, condition, expected, found)

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
        self._fail("pattern", label, f"a list of {len(term.items)}", actual)
        return FAILED

    def _constant(self, term: Term, actual: Any, label: str) -> tuple[Goal, ...]:
        try:
            wanted = self.value(term)
        except Unbound:
            self.deferred.append((term, actual, label))
            return ()
        if same_constant(wanted, symbolic(actual)):
            return ()
        self._fail("pattern", label, wanted, actual)
        return FAILED

    def _leaf(self, name: str, actual: Any) -> tuple[Goal, ...]:
        spec = self.rule.inputs.get(name)
        if spec is not None:
            return () if self._input(spec, actual) else FAILED
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
            yield actual, passed

    def _source(self, name: str, let: Let, actual: Any) -> Node | None:
        """The node that must be the call, for a value that must be a result of it."""
        if not isinstance(actual, Node):
            self._fail("pattern", name, let.call.op, actual)
            return None
        if len(let.names) == 1:
            return actual
        view, index = view_of(actual), let.names.index(name)
        if view is None or view.key != "prim.getitem" or view.values[1] != index:
            self._fail("pattern", name, f"output {index} of {let.call.op}", _op(actual))
            return None
        node: Node = view.values[0]
        return node

    def _call(self, let: Let, node: Node) -> tuple[Goal, ...]:
        """Take a node as the call, with its arguments as they stand. FAILED leaves everything as it was."""
        op = self.plan.ops[id(let)]
        view = view_of(node)
        if view is None or view.key != op.key or (op.overload and view.overload != op.overload):
            self._fail("pattern", f"{', '.join(let.names)} = {let.call.op}", let.call.op, _op(node))
            return FAILED
        if node in self.nodes:
            self._fail("pattern", let.call.op, "a node of its own", _op(node))
            return FAILED
        goals = self._arguments(let.call, op.key, view, node)
        if goals is None:
            return FAILED
        self._take(let, node)
        return tuple(goals)

    def _calls(self, let: Let, node: Node) -> Iterator[tuple[Goal, ...]]:
        """Every way a node can be the call."""
        op = self.plan.ops[id(let)]
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
        pairs = self._pairs(call, view)
        if isinstance(pairs, str):
            self._fail("pattern", call.op, f"arguments {list(view.names)}", pairs)
            return None
        goals: list[Goal] = []
        for i, name, label, term, counts in pairs:
            if term is not None:
                counted = self._front(term, name, node) if counts else term
                goals.append((counted, view.values[i], label))
                continue
            default = view.defaults[i]
            if default is REQUIRED or not same_constant(default, view.values[i]):
                wanted = default if default is not REQUIRED else "given"
                self._fail("pattern", label, wanted, view.values[i])
                return None
        return goals

    def _pairs(self, call: Call, view: OpView) -> list[Pair] | str:
        """Which argument each term goes with; a text where the op has no such arguments."""
        key = id(call), view.names
        if key not in self.plan.pairs:
            kwargs = dict(call.kwargs)
            found: list[Pair] = []
            dims = dim_args(view.key)
            for i, name in enumerate(view.names):
                term = call.args[i] if i < len(call.args) else kwargs.pop(name, None)
                if term is None and name == "memory_format" and view.key in LAYOUT_ONLY:
                    continue
                found.append((i, name, f"{call.op}({name}=…)", term, name in dims))
            odd = kwargs or len(call.args) > len(view.names)
            self.plan.pairs[key] = str(list(kwargs)) if odd else found
        return self.plan.pairs[key]

    @staticmethod
    def _front(term: Term, name: str, node: Node) -> Term:
        """A literal dim of the pattern, counted from the front like the node's."""
        rank = rank_of(node, key_of(node))
        if isinstance(term, Lit) and isinstance(term.value, int):
            return Lit(front(term.value, rank))
        if isinstance(term, Arith) and term.op == "neg" and isinstance(term.args[0], Lit):
            number = term.args[0].value
            return Lit(front(-number, rank)) if isinstance(number, int) else term
        if isinstance(term, Seq):
            return Seq(tuple(Attempt._front(t, name, node) for t in term.items))
        return term

    def _permute_goals(self, call: Call, view: OpView) -> list[Goal] | None:
        base = ".".join(call.op.split(".")[:2])
        rank = len(view.values[1])
        try:
            args = tuple(self.value(t) for t in call.args[1:])
        except Unbound:
            self._fail("pattern", base, "literal dims", call.args[1:])
            return None
        wanted = permutation(base, rank, args)
        if wanted != view.values[1]:
            self._fail("pattern", f"{base} of {rank} dims", wanted, view.values[1])
            return None
        return [(call.args[0], view.values[0], "self")]

    # -- inputs -------------------------------------------------------------------------------------

    def _input(self, spec: Input, actual: Any) -> bool:
        """Bind an input where it fits; what it says of dtypes and sizes may be bound even where it does not."""
        if spec.kind == "const":
            fits = self._const_fits(spec, actual)
        elif actual is None and spec.optional:
            fits = True
        elif (value := tensor(actual)) is None:
            self._fail("pattern", spec.name, "a tensor", actual)
            fits = False
        elif spec.kind == "param" and not self.view.is_param(actual):
            self._fail("pattern", f"{spec.name}: Param", "a parameter or constant", _op(actual))
            fits = False
        elif spec.kind == "state" and not self.view.is_state(actual):
            what = "a buffer that the graph updates"
            self._fail("pattern", f"{spec.name}: State", what, _op(actual))
            fits = False
        else:
            fits = self._dtype_fits(spec, value) and self._dims_fit(spec, value)
        if fits:
            self.bound[spec.name] = actual
        return fits

    def _const_fits(self, spec: Input, actual: Any) -> bool:
        fits = isinstance(actual, const_kinds(spec))
        if spec.const_type in ("float", "int") and isinstance(actual, bool):
            fits = False
        if not fits:
            self._fail("pattern", f"{spec.name}: const {spec.const_type}", spec.const_type, actual)
        return fits

    def _dtype_fits(self, spec: Input, value: torch.Tensor) -> bool:
        if spec.dtype is None:
            return True
        wanted = DTYPES.get(spec.dtype) or self.bound.get(spec.dtype)
        if wanted is None:
            self.bound[spec.dtype] = value.dtype
            return True
        if wanted != value.dtype:
            self._fail("dtype", f"{spec.name}: {spec.dtype}", wanted, value.dtype)
        return bool(wanted == value.dtype)

    def _dims_fit(self, spec: Input, value: torch.Tensor) -> bool:
        if spec.dims is None:
            return True
        shape = list(value.shape)
        pack = next((i for i, d in enumerate(spec.dims) if d.pack), None)
        fixed = len(spec.dims) - (pack is not None)
        if len(shape) < fixed or (pack is None and len(shape) != fixed):
            self._fail("shape", f"{spec.name}: {spec.text}", f"{fixed} dims", tuple(shape))
            return False
        extra = len(shape) - fixed
        pieces: list[Any] = shape
        if pack is not None:
            pieces = [*shape[:pack], tuple(shape[pack : pack + extra]), *shape[pack + extra :]]
        return all(self._dim(spec, d, s) for d, s in zip(spec.dims, pieces, strict=True))

    def _dim(self, spec: Input, dim: Any, size: Any) -> bool:
        wanted = dim.size if dim.size is not None else self.bound.get(dim.name)
        if wanted is None:
            self.bound[dim.name] = size
            return True
        if same_constant(wanted, size):
            return True
        self._fail("shape", f"{spec.name}: {spec.text}", f"{dim.name or dim.size} = {wanted}", size)
        return False

    # -- the end ------------------------------------------------------------------------------------

    def value(self, term: Term) -> Any:
        """What a term without tensors is worth now; Unbound when a name in it is not known."""
        if isinstance(term, Lit):
            return plain(term.value)
        if isinstance(term, Ref):
            if term.name not in self.bound:
                raise Unbound(term.name)
            return self.bound[term.name]
        if isinstance(term, Seq):
            return tuple(self.value(t) for t in term.items)
        return arithmetic(term.op, [self.value(a) for a in term.args])

    def _settled(self) -> bool:
        """Whether the equations left for later hold, now that every size is known."""
        for term, actual, label in self.deferred:
            try:
                wanted = self.value(term)
            except Unbound as name:
                self._fail("pattern", label, f"a value for {name}", "none")
                return False
            if not same_constant(wanted, symbolic(actual)):
                self._fail("pattern", label, wanted, actual)
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


def _op(node: object) -> str:
    return f"{node.name} = {node.target}" if isinstance(node, Node) else repr(node)
