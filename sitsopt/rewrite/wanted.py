"""Which linear layers of a model a recipe wants packed, and how: its `weights:` against the model's modules."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.fx import Node

from ..graph.capture import Captured
from ..graph.facts import storage_root
from ..spec.recipe import Recipe, Weight
from ..spec.rule import Rule
from .engine import Applied, rewrite
from .engine import Settings as EngineSettings
from .record import Effective, GraphRecord
from .stored import Choose, Settings, left_alone, mark, merge
from .view import GraphView


@dataclass
class WantedWeights:
    """The entry of `weights:` for each linear layer, by its name in the model that `owner` gives."""

    owner: Callable[[], Any]
    entries: dict[str, Weight] = field(default_factory=dict)

    def choose(self, captured: Captured) -> Choose:
        """What to do with a weight, as one graph knows it: by the parameter behind it, and where several modules
        share that, by the module that reads it."""
        names = names_of(self.owner())
        params = {
            node: names[id(value)]
            for node, value in zip(captured.placeholders, captured.inputs, strict=True)
            if id(value) in names
        }

        def chosen(weight: Node, module: str) -> tuple[Settings, str] | None:
            found = _behind(weight, params)
            if not found:
                return None
            name = module if module in found else found[0]
            entry = self.entries.get(name)
            if entry is None or entry.scheme is None:
                return None
            while (
                weight not in params and "sits_fold" not in weight.meta
            ):  # a transpose is folded too
                weight.meta["sits_fold"] = "weights"
                weight = weight.all_input_nodes[0]
            return settings(entry), name

        return chosen


def swap(
    view: GraphView,
    choose: Choose,
    rules: Sequence[Rule],
    applied: list[Applied],
    how: EngineSettings,
    record: GraphRecord,
) -> list[Applied]:
    """Pack the weights of one graph that are wanted packed, after what was `applied`; `record` learns which were
    not, and why. Returns all that is applied now."""
    if how.grad:
        why = "gradients are recorded, and packed weights have none"
        record.left_weights = {"every layer": why}
        return applied
    marked = mark(view, choose)
    applied = [*applied, *rewrite(view, rules, how, record)]
    merge(view, marked, applied)
    record.left_weights = left_alone(marked, record)
    return applied


def _behind(weight: Node, params: dict[Node, list[str]]) -> list[str]:
    """The linear layers of the parameter that a weight is a view of, or was folded from."""
    if "sits_fold" in weight.meta:
        return next(filter(None, (_behind(n, params) for n in weight.all_input_nodes)), [])
    return params.get(storage_root(weight), [])


def is_linear(module: nn.Module) -> bool:
    """A linear layer, or GPT-2's, which keeps its weight transposed."""
    return isinstance(module, nn.Linear) or (
        type(module).__name__ == "Conv1D" and getattr(module, "weight", nn.Parameter()).dim() == 2
    )


def names_of(owner: Any) -> dict[int, list[str]]:
    """The linear layers that read each parameter, by its id."""
    found: dict[int, list[str]] = defaultdict(list)
    if isinstance(owner, nn.Module):
        for name, module in owner.named_modules(remove_duplicate=False):
            if is_linear(module):
                found[id(module.weight)].append(name)
    return found


def wanted_weights(
    owner: Any, weak: Callable[[], Any], recipe: Recipe, effective: list[Effective]
) -> WantedWeights | None:
    """The recipe's entries, resolved; None where it has none. Lines for `effective` say what is skipped and what is
    not built. Raises SpecError for an entry that selects nothing, with the nearest names."""
    if not recipe.weights:
        return None
    if not isinstance(owner, nn.Module):
        why = "what is compiled is no module: its weights have no names"
        effective.extend(Effective(f"weights: {w}", "nothing", why) for w in recipe.weights)
        return None
    names = [n for n, m in owner.named_modules(remove_duplicate=False) if is_linear(m)]
    classes = {n: [c.__name__ for c in type(m).__mro__] for n, m in owner.named_modules()}
    entries = recipe.weights_of(names, classes)
    for weight in recipe.weights:
        count = sum(entry is weight for entry in entries.values())
        if weight.skip is not None:
            asked = f"weights: {weight.match}"
            effective.append(Effective(asked, f"as they are ({count} layers)", weight.skip))
        for key, why in UNBUILT.items():
            if getattr(weight, key):
                asked = f"weights: {weight.match}: {key} {getattr(weight, key)}"
                effective.append(Effective(asked, "ignored", why))
    return WantedWeights(weak, entries)


UNBUILT = {
    "rounds": "calibration is not built yet: the nearest value is taken",
    "effective_bits": "calibration is not built yet: every layer gets its scheme",
    "release": "releasing is not built yet: the original weights stay in memory",
}


def settings(entry: Weight) -> Settings:
    """An entry as the arguments of `sits.stored`."""
    scheme, group, per = str(entry.scheme), entry.group or 0, ""
    if scheme == "fp8":
        per = entry.per or "row"
        group = 128 if per == "block" else 0
    return scheme, group, entry.zero_point, per, entry.activations or ""
