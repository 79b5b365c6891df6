"""A spelling made ready for matching: what every attempt at it shares."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from torch.fx import Node

from ..graph.opview import OpView, canonical, dim_args, front, key_of, rank_of
from ..spec.ops import commutative
from ..spec.program import Arith, Call, Let, Lit, Seq, Term
from ..spec.rule import Rule
from .values import plain

# Their memory format says where values lie, not what they are.
LAYOUT_ONLY = ("aten.clone", "aten.contiguous")


@dataclass(frozen=True)
class PatternOp:
    """What a call of the pattern asks of a node: its key, its overload if the pattern names one."""

    key: str
    overload: str
    commutes: bool

    @property
    def one_way(self) -> bool:
        """Whether a node can be this call in one way at most."""
        return not self.commutes and self.key != "prim.cast"


Pair = tuple[int, str, Term | None, bool]


@dataclass
class Pattern:
    """What every attempt at one spelling shares. `pairs`: for a call and the argument names of an op, which term of
    the call goes with which argument, None for one that must have its default, and whether it counts dims."""

    lets: dict[str, Let]
    ops: dict[int, PatternOp]  # by the id of the let
    fixed: dict[str, Any]
    pairs: dict[tuple[int, tuple[str, ...]], list[Pair] | str] = field(default_factory=dict)

    def arguments(self, call: Call, view: OpView) -> list[Pair] | str:
        """Which argument each term goes with; a text where the op has no such arguments."""
        key = id(call), view.names
        if key not in self.pairs:
            kwargs = dict(call.kwargs)
            found: list[Pair] = []
            dims = dim_args(view.key)
            for i, name in enumerate(view.names):
                term = call.args[i] if i < len(call.args) else kwargs.pop(name, None)
                if term is None and name == "memory_format" and view.key in LAYOUT_ONLY:
                    continue
                found.append((i, f"{call.op}({name}=…)", term, name in dims))
            odd = kwargs or len(call.args) > len(view.names)
            self.pairs[key] = str(list(kwargs)) if odd else found
        return self.pairs[key]


@lru_cache(maxsize=8192)
def pattern_of(rule: Rule, spelling: int) -> Pattern:
    """One spelling of a rule, made ready once."""
    chosen = rule.spellings[spelling]
    lets = {n: let for let in chosen.program.lets for n in let.names if n != "_"}
    ops = {}
    for let in lets.values():
        key, overload = canonical(let.call.op), let.call.op.split(".")[2:]
        ops[id(let)] = PatternOp(key, overload[0] if overload else "", key in commutative())
    return Pattern(lets, ops, {k: plain(v) for k, v in chosen.fixed.items()})


def from_the_front(term: Term, node: Node) -> Term:
    """A literal dim of the pattern, counted from the front like the node's."""
    rank = rank_of(node, key_of(node))
    if isinstance(term, Lit) and isinstance(term.value, int):
        return Lit(front(term.value, rank))
    if isinstance(term, Arith) and term.op == "neg" and isinstance(term.args[0], Lit):
        number = term.args[0].value
        return Lit(front(-number, rank)) if isinstance(number, int) else term
    if isinstance(term, Seq):
        return Seq(tuple(from_the_front(t, node) for t in term.items))
    return term
