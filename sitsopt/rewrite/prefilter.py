"""A cheap look before matching: can a spelling stand in this graph, and at this node, at all?

Most nodes under a rule's root op are not the rule's: a `mul` is tried for every norm. Each spelling is compiled once:
into what a graph must have for it (ops, which op reads which, constants), and into a test of one node that looks at op
names, literals and dtypes all the way down and notes the nodes it looked at. Both may only say no where the matcher
would.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from torch.fx import Node

from ..graph.facts import DTYPES, tensor
from ..graph.opview import canonical, dim_args, key_of, permutation, view_of
from ..spec.ops import commutative
from ..spec.program import Call, Let, Lit, Ref, Seq, Term
from ..spec.rule import Input, Rule
from .values import const_kinds, plain, same_constant, symbolic

Seen = list[Node]
Test = Callable[[Any, Seen], bool]
CAST = "prim.cast"


@dataclass
class Needs:
    """What a graph must have for a spelling: ops, and pairs of an op and what it reads (an op or a constant)."""

    keys: set[str] = field(default_factory=set)
    reads: set[tuple[str, Any]] = field(default_factory=set)


@lru_cache(maxsize=8192)
def needs(rule: Rule, spelling: int) -> Needs:
    """Casts may be no node, and behind a `through` edge anything may stand: these ask for nothing."""
    found = Needs()
    lets = _lets(rule, spelling)
    for let in rule.spellings[spelling].program.lets:
        key = canonical(let.call.op)
        if key == CAST:
            continue
        found.keys.add(key)
        for term in let.call.args:
            for item in term.items if isinstance(term, Seq) else (term,):
                found.reads.update((key, read) for read in _reads(key, item, lets, rule))
    return found


def _reads(key: str, term: Term, lets: dict[str, Let], rule: Rule) -> list[Any]:
    if isinstance(term, Ref) and term.name in lets and term.name not in rule.through:
        let = lets[term.name]
        child = canonical(let.call.op)
        return [] if child == CAST else [child if len(let.names) == 1 else "prim.getitem"]
    plainly = not key.startswith("prim.") and key != "aten.expand" and not dim_args(key)
    if isinstance(term, Lit) and plainly and term.value == term.value:  # no NaN
        return [("is", plain(term.value))]
    return []


@lru_cache(maxsize=8192)
def _lets(rule: Rule, spelling: int) -> dict[str, Let]:
    lets = rule.spellings[spelling].program.lets
    return {name: let for let in lets for name in let.names if name != "_"}


@lru_cache(maxsize=8192)
def test_of(rule: Rule, spelling: int) -> Test:
    """Whether a node may be what the spelling's first return stands at."""
    return _Compiler(rule, spelling).root()


class _Compiler:
    """Builds the test of a node from the pattern; `None` stands for a test that all pass."""

    def __init__(self, rule: Rule, spelling: int) -> None:
        self.rule, self.program = rule, rule.spellings[spelling].program
        self.fixed = {k: plain(v) for k, v in rule.spellings[spelling].fixed.items()}
        self.lets = _lets(rule, spelling)
        self.packs = set(rule.packs)
        self.known: dict[str, Test | None] = {}

    def root(self) -> Test:
        name = self.program.returns[0]
        let = self.lets[name]
        test = self._named(name) if len(let.names) == 1 else self._call(let)
        return test or (lambda actual, seen: True)

    def _named(self, name: str) -> Test | None:
        if name not in self.known:
            self.known[name] = None if name in self.rule.through else self._value(name)
        return self.known[name]

    def _value(self, name: str) -> Test | None:
        if name in self.fixed:
            return _equals(self.fixed[name])
        if name in self.rule.inputs:
            return _input(self.rule.inputs[name])
        let = self.lets.get(name)
        if let is None:
            return None
        call = self._call(let)
        return call if len(let.names) == 1 else _item(let.names.index(name), call)

    def _term(self, term: Term) -> Test | None:
        if isinstance(term, Ref):
            return self._named(term.name)
        if isinstance(term, Lit):
            return _equals(plain(term.value))
        if isinstance(term, Seq):
            if any(isinstance(t, Ref) and t.name in self.packs for t in term.items):
                return lambda actual, seen: isinstance(actual, (list, tuple))
            return _each([self._term(item) for item in term.items])
        return None

    def _call(self, let: Let) -> Test:
        key = canonical(let.call.op)
        if key == CAST:
            return _cast(self._term(let.call.args[0]), self._term(let.call.args[1]))
        if key == "prim.permute":
            return _permute(let.call, self._term(let.call.args[0]))
        tests = [self._argument(key, term) for term in let.call.args]
        overload = let.call.op.split(".")[2:]
        return _op(key, overload, tests, key in commutative() and len(tests) > 1)

    def _argument(self, key: str, term: Term) -> Test | None:
        """A literal that may count dims is left to the matcher."""
        if dim_args(key) and not isinstance(term, Ref):
            return None
        return self._term(term)


def _op(key: str, overload: list[str], tests: list[Test | None], commutes: bool) -> Test:
    chosen = [(i, test) for i, test in enumerate(tests) if test is not None]
    count = len(tests)

    def test(node: Any, seen: Seen) -> bool:
        if not isinstance(node, Node):
            return False
        seen.append(node)
        if key_of(node) != key:
            return False
        view = view_of(node)
        if view is None or (overload and view.overload != overload[0]):
            return False
        values = view.values
        if len(values) < count:
            return False
        if all(check(values[i], seen) for i, check in chosen):
            return True
        if not commutes:
            return False
        swapped = (values[1], values[0], *values[2:])
        return all(check(swapped[i], seen) for i, check in chosen)

    return test


def _cast(operand: Test | None, dtype: Test | None) -> Test:
    def test(node: Any, seen: Seen) -> bool:
        if not isinstance(node, Node):
            return False
        seen.append(node)
        if key_of(node) == CAST:
            view = view_of(node)
            assert view is not None
            if (dtype is None or dtype(view.values[1], seen)) and (
                operand is None or operand(view.values[0], seen)
            ):
                return True
        value = tensor(node)
        if value is None or (dtype is not None and not dtype(value.dtype, seen)):
            return False
        return operand is None or operand(node, seen)

    return test


def _permute(call: Call, operand: Test | None) -> Test:
    base = ".".join(call.op.split(".")[:2])
    literal = all(isinstance(t, Lit) for t in call.args[1:])
    dims = tuple(t.value for t in call.args[1:] if isinstance(t, Lit))

    def test(node: Any, seen: Seen) -> bool:
        if not isinstance(node, Node):
            return False
        seen.append(node)
        view = view_of(node) if node.op == "call_function" else None
        if view is None or view.key != "prim.permute":
            return False
        if literal and permutation(base, len(view.values[1]), dims) != view.values[1]:
            return False
        return operand is None or operand(view.values[0], seen)

    return test


def _item(index: int, source: Test) -> Test:
    def test(node: Any, seen: Seen) -> bool:
        if not isinstance(node, Node):
            return False
        seen.append(node)
        if key_of(node) != "prim.getitem":
            return False
        return bool(node.args[1] == index) and source(node.args[0], seen)

    return test


def _each(tests: list[Test | None]) -> Test:
    def test(actual: Any, seen: Seen) -> bool:
        if not isinstance(actual, (list, tuple)) or len(actual) != len(tests):
            return False
        pairs = zip(tests, actual, strict=True)
        return all(check is None or check(item, seen) for check, item in pairs)

    return test


def _equals(wanted: Any) -> Test:
    return lambda actual, seen: same_constant(wanted, symbolic(actual))


def _input(spec: Input) -> Test | None:
    if spec.kind == "const":
        fits = const_kinds(spec)
        return lambda actual, seen: isinstance(actual, fits)
    dtype = DTYPES.get(spec.dtype or "")
    param = spec.kind == "param"

    def test(actual: Any, seen: Seen) -> bool:
        if actual is None:
            return bool(spec.optional)
        if isinstance(actual, Node):
            seen.append(actual)
        value = tensor(actual)
        if value is None or (dtype is not None and value.dtype != dtype):
            return False
        return (
            not param
            or not isinstance(actual, Node)
            or actual.op != "call_function"
            or "sits_fold" in actual.meta
        )

    return test
