"""Every applied rewrite compared with what it replaced, on the user's own tensors.

Before the sweep a rewritten graph still holds the replaced nodes beside the new ones, both fed by the same values.
One interpreted run computes both, so each rewrite is judged alone, whatever the others do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from .graph.capture import CannotCapture, Captured
from .options import Options
from .pipeline import Plan, capture_and_rewrite
from .planning import make_session
from .rewrite.engine import Applied
from .rewrite.record import GraphRecord
from .session import owner_of


@dataclass
class SiteError:
    """The largest difference one rewrite made on the tensors it saw. key names the site for `only`/`exclude`."""

    id: str
    site: str
    key: str
    max_abs: float = 0.0
    scale: float = 0.0  # largest magnitude of the replaced value


@dataclass
class Audit:
    """Errors by site key, filled by every graph that runs while `auditing`."""

    errors: dict[str, SiteError] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)

    def rows(self) -> list[SiteError]:
        """The worst first."""
        return sorted(self.errors.values(), key=lambda e: -e.max_abs)


@contextmanager
def auditing(model: Any, recipe: Any = "auto", **options: Any) -> Iterator[tuple[Any, Audit]]:
    """A compiled form of `model` that runs eagerly, node by node, comparing as it goes.

        with auditing(model) as (run, audit):
            run(input_ids)
        audit.rows()

    Slow and memory-hungry: both sides of each rewrite are computed. No gradients.
    """
    parsed = Options.parse({"recipe": recipe, **options})
    audit = Audit()
    plans: dict[int, Plan] = {}

    def backend(gm: GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        owner = owner_of(gm)
        if id(owner) not in plans:
            plans[id(owner)] = make_session(owner, parsed).plan
        record = GraphRecord("audit")
        try:
            captured, applied, _view = capture_and_rewrite(gm, inputs, plans[id(owner)], record)
        except CannotCapture as reason:
            audit.refused.append(str(reason))
            return gm.forward
        return _runner(captured, applied, audit)

    yield torch.compile(model, backend=backend), audit


def _runner(captured: Captured, applied: Sequence[Applied], audit: Audit) -> Callable[..., Any]:
    pairs: dict[Node, list[tuple[Node, Applied]]] = {}
    for item in applied:
        if item.edit is None:
            continue
        for old, new in item.edit.pairs:
            last = max(old, new)
            pairs.setdefault(last, []).append((new if last is old else old, item))
    attached = captured.inputs[: captured.attached]

    def run(*args: Any) -> Any:
        outputs = _Comparing(captured.gm, pairs, audit).run(*attached, *args)
        user = len(outputs) - len(captured.written)
        for place, new in zip(captured.written, outputs[user:], strict=True):
            (*attached, *args)[captured.placeholders.index(place)].copy_(new)
        return outputs[:user]

    return run


class _Comparing(Interpreter):
    def __init__(
        self, gm: GraphModule, pairs: dict[Node, list[tuple[Node, Applied]]], audit: Audit
    ) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.pairs, self.audit = pairs, audit

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        for other, item in self.pairs.get(n, ()):
            self._compare(item, value, self.env[other])
        return value

    def _compare(self, item: Applied, a: Any, b: Any) -> None:
        if not isinstance(a, torch.Tensor) or not a.numel():
            return
        place = item.site.place
        row = self.audit.errors.setdefault(
            item.key, SiteError(item.site.rule, place.module or place.source, item.key)
        )
        gap = (a.double() - b.double()).abs()
        both = torch.isfinite(gap)
        row.max_abs = max(row.max_abs, float(gap[both].max()) if both.any() else 0.0)
        if not torch.equal(torch.isfinite(a), torch.isfinite(b)):
            row.max_abs = float("inf")
        row.scale = max(row.scale, float(b.double().abs().nan_to_num(0, 0, 0).max()))
