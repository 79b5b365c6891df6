"""Whether a match may be applied: its conditions, its users, its order, the mutations around it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true

from ..graph.facts import DTYPE_NAMES, module_path, same_size, tensor
from ..spec.condition import EvalError, evaluate, explain
from .match import Match
from .view import GraphView


@dataclass(frozen=True)
class Refusal:
    """Why a complete match is not applied; the fields of a `Miss`."""

    reason: str
    condition: str
    explanation: str = ""
    expected: str = ""
    found: str = ""


class Env:
    """What names and calls in a condition mean for one match."""

    def __init__(self, match: Match, view: GraphView, facts: dict[str, Any]) -> None:
        self.match, self.view, self.facts = match, view, facts

    def name(self, name: str) -> Any:
        if name.startswith("target."):
            return self.facts.get(name.split(".", 1)[1])
        value = self.match.bound.get(name)
        return DTYPE_NAMES.get(value, str(value)) if isinstance(value, torch.dtype) else value

    def call(self, fn: str, args: list[Any]) -> Any:
        return FUNCTIONS[fn](self, *args)

    def truth(self, value: Any) -> bool | None:
        """Proved true, proved false, guarded, or unknown. A guard is an inequality or a divisibility that holds
        now: Dynamo then compiles again where it does not. An equality is never guarded: it would pin a size."""
        if not isinstance(value, torch.SymBool):
            return bool(value)
        if statically_known_true(value):
            return True
        expr = value.node.expr
        if statically_known_true(torch.sym_not(value)):
            return False
        if free_unbacked_symbols(expr):
            return None
        divisible = isinstance(expr, sympy.Eq) and any(
            a.has(sympy.Mod) or "Mod" in str(a) for a in expr.args
        )
        if isinstance(expr, (sympy.Lt, sympy.Le, sympy.Gt, sympy.Ge)) or divisible:
            return bool(value)
        return None


def _stride(env: Env, node: Any, i: int) -> Any:
    value = tensor(node)
    return None if value is None else value.stride()[i]


def _contiguous(env: Env, node: Any) -> bool:
    value = tensor(node)
    return value is not None and value.is_contiguous()


def _dense(env: Env, node: Any) -> bool:
    value = tensor(node)
    if value is None:
        return False
    expected: Any = 1
    for size, stride in sorted(
        zip(value.shape, value.stride(), strict=True), key=lambda p: (p[1], p[0])
    ):
        if size == 1:
            continue
        if not same_size(stride, expected):
            return False
        expected = expected * size
    return True


def _same_storage(env: Env, a: Any, b: Any) -> bool:
    from ..graph.facts import storage_root

    return isinstance(a, Node) and isinstance(b, Node) and storage_root(a) is storage_root(b)


def _layers(env: Env, node: Any) -> set[str]:
    """The repeated layers that read a value: `model.layers.3` for `model.layers.3.self_attn.q_proj`."""
    found = set()
    for user in env.view.users(node):
        parts = module_path(user).split(".")
        last = max((i for i, part in enumerate(parts) if part.isdigit()), default=-1)
        found.add(".".join(parts[: last + 1]))
    return found


def _same_layer(env: Env, a: Any, b: Any) -> bool:
    first, second = _layers(env, a), _layers(env, b)
    return not first.isdisjoint(second) or "" in first or "" in second


def _expands(env: Env, node: Any, *sizes: Any) -> bool:
    """Only what is proved: a symbolic size may turn out larger than the one it is compared with."""
    value = tensor(node)
    if value is None:
        return True
    if value.dim() > len(sizes):
        return False
    ends = sizes[len(sizes) - value.dim() :]
    return all(same_size(a, 1) or same_size(a, b) for a, b in zip(value.shape, ends, strict=True))


def _at_most(env: Env, a: Any, b: Any) -> bool:
    """For choices that pay on one side of a limit and are right on both: a length that crosses it compiles nothing."""
    return statically_known_true(a <= b)


FUNCTIONS: dict[str, Any] = {
    "rank": lambda env, x: tensor(x).dim(),  # type: ignore[union-attr]
    "size": lambda env, x, i: tensor(x).shape[i],  # type: ignore[union-attr]
    "numel": lambda env, x: tensor(x).numel(),  # type: ignore[union-attr]
    "stride": _stride,
    "contiguous": _contiguous,
    "dense": _dense,
    "dtype": lambda env, x: DTYPE_NAMES.get(tensor(x).dtype, "?"),  # type: ignore[union-attr]
    "device": lambda env, x: tensor(x).device.type,  # type: ignore[union-attr]
    "users": lambda env, x: len(env.view.users(x)),
    "is_param": lambda env, x: env.view.is_param(x),
    "is_const": lambda env, x: env.view.is_param(x),
    "present": lambda env, x: x is not None,
    "same_storage": _same_storage,
    "same_layer": _same_layer,
    "expands": _expands,
    "at_most": _at_most,
    "requires_grad": lambda env, x: tensor(x).requires_grad,  # type: ignore[union-attr]
    "abs": lambda env, x: abs(x),
    "min": lambda env, *xs: min(xs),
    "max": lambda env, *xs: max(xs),
}


def refuse(
    match: Match, view: GraphView, grad: bool, facts: dict[str, Any], explained: bool = True
) -> Refusal | None:
    """The first reason why this match must not be applied, or None when it may. Unless `explained`, without what was
    found instead, which takes longer to say than to know."""
    return (
        _conditions(match, view, facts, explained)
        or _uses(match, view)
        or _order(match, view)
        or _mutation(match, view)
        or (_grad(match) if grad else None)
    )


def _conditions(
    match: Match, view: GraphView, facts: dict[str, Any], explained: bool
) -> Refusal | None:
    env = Env(match, view, facts)
    for cond in (*match.rule.where, *match.rule.spellings[match.spelling].where):
        try:
            holds = evaluate(cond.tree, env)
        except EvalError as error:
            return Refusal("condition", cond.text, cond.reason, cond.text, error.problem)
        if holds is True:
            continue
        found = explain(cond.tree, env) if explained else ""
        if holds is None:
            return Refusal("symbolic", cond.text, cond.reason, "proved or guarded", found)
        return Refusal("condition", cond.text, cond.reason, cond.text, found)
    return None


def _uses(match: Match, view: GraphView) -> Refusal | None:
    """An interior value that something outside the match reads must stay."""
    taken, kept = set(match.nodes), set(match.returns)
    for node in match.nodes:
        if node in kept:
            continue
        for user in view.users(node):
            if user not in taken:
                return Refusal(
                    "uses", f"{node.name} is read outside the pattern",
                    "the value would be lost to its other reader", "no other reader",
                    f"{user.name} = {user.target}",
                )  # fmt: skip
    return None


def insertion_point(match: Match) -> Node:
    """The node behind which the replacement goes: the one before the first value that it replaces, or the last input
    where that comes later. Earlier would be wrong where an op in between writes an input, and keep values alive."""
    first = min((node for node in match.returns if node is not None), default=match.anchor)
    return max([first.prev, *match.inputs])


def _order(match: Match, view: GraphView) -> Refusal | None:
    if not match.inputs or match.rule.replace is None:
        return None
    point = insertion_point(match)
    taken = set(match.nodes)
    for node in match.returns:
        if node is None:
            continue
        for user in view.users(node):
            if user not in taken and (user < point or user is point):
                return Refusal(
                    "order", f"{user.name} reads {node.name} before {point.name} exists",
                    "an input of the rewrite is computed from one of its outputs, or after its use",
                )  # fmt: skip
    return None


def _mutation(match: Match, view: GraphView) -> Refusal | None:
    if not view.mutating or not match.nodes:
        return None
    node = view.mutation_between(min(match.nodes), max(match.nodes))
    if node is None:
        return None
    return Refusal(
        "mutation", f"{node.name} = {node.target} writes an argument between the matched nodes"
    )


def _grad(match: Match) -> Refusal | None:
    if match.rule.grad == "safe":
        return None
    return Refusal("grad", "grad: safe", "the rule is for inference; this graph records gradients")
