"""What one attempt at a pattern has bound, which values fit the rule's inputs, and what failed last.

An input says a dtype and sizes, by value or by name: the first value that stands there gives the name its meaning, every
later one has to agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ..graph.facts import DTYPES, tensor
from ..spec.program import Let, Lit, Ref, Seq, Term
from ..spec.rule import Input, Rule
from .values import arithmetic, const_kinds, plain, same_constant
from .view import GraphView


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


class Bindings:
    """Names of a rule and what they mean so far; the nodes taken, each with the line of the pattern that it is."""

    def __init__(
        self, rule: Rule, view: GraphView, trace: Trace | None, fixed: dict[str, Any]
    ) -> None:
        self.rule, self.view, self.trace = rule, view, trace
        self.bound: dict[str, Any] = dict(fixed)
        self.nodes: dict[Node, Let | None] = {}

    def fail(self, reason: str, condition: str, expected: object, found: object) -> None:
        """Keep a failure where somebody wants to know of it."""
        if self.trace is not None:
            self.trace.fail(len(self.nodes), reason, condition, expected, found)

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

    def fits_input(self, spec: Input, actual: Any) -> bool:
        """Bind an input where it fits; what it says of dtypes and sizes may be bound even where it does not."""
        if spec.kind == "const":
            fits = self._const_fits(spec, actual)
        elif actual is None and spec.optional:
            fits = True
        elif (value := tensor(actual)) is None:
            self.fail("pattern", spec.name, "a tensor", actual)
            fits = False
        elif spec.kind == "param" and not self.view.is_param(actual):
            self.fail(
                "pattern", f"{spec.name}: Param", "a parameter or constant", described(actual)
            )
            fits = False
        elif spec.kind == "state" and not self.view.is_state(actual):
            what = "a buffer that the graph updates"
            self.fail("pattern", f"{spec.name}: State", what, described(actual))
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
            self.fail("pattern", f"{spec.name}: const {spec.const_type}", spec.const_type, actual)
        return fits

    def _dtype_fits(self, spec: Input, value: torch.Tensor) -> bool:
        if spec.dtype is None:
            return True
        wanted = DTYPES.get(spec.dtype) or self.bound.get(spec.dtype)
        if wanted is None:
            self.bound[spec.dtype] = value.dtype
            return True
        if wanted != value.dtype:
            self.fail("dtype", f"{spec.name}: {spec.dtype}", wanted, value.dtype)
        return bool(wanted == value.dtype)

    def _dims_fit(self, spec: Input, value: torch.Tensor) -> bool:
        if spec.dims is None:
            return True
        shape = list(value.shape)
        pack = next((i for i, d in enumerate(spec.dims) if d.pack), None)
        fixed = len(spec.dims) - (pack is not None)
        if len(shape) < fixed or (pack is None and len(shape) != fixed):
            self.fail("shape", f"{spec.name}: {spec.text}", f"{fixed} dims", tuple(shape))
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
        self.fail("shape", f"{spec.name}: {spec.text}", f"{dim.name or dim.size} = {wanted}", size)
        return False


def described(node: object) -> str:
    """A value as a miss shows it."""
    return f"{node.name} = {node.target}" if isinstance(node, Node) else repr(node)
