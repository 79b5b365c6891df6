"""Which linear layers of a model a recipe wants packed, and how: its `weights:` against the model's modules."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.fx import Node

from ..graph.archived import STORED, Archived, open_for
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
    """The entry of `weights:` for each linear layer, by its name in the model that `owner` gives. stored: what the
    model's file holds of those it is asked for; left: why layers stay as they are."""

    owner: Callable[[], Any]
    entries: dict[str, Weight] = field(default_factory=dict)
    stored: dict[str, Archived] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, str] = field(default_factory=dict)  # the set of a layer's calibrated numbers

    def settings_of(self, name: str) -> Settings | None:
        """The arguments of `sits.stored` for a layer; None where it stays as it is."""
        entry = self.entries.get(name)
        if entry is None or entry.scheme is None:
            return None
        if entry.scheme != STORED:
            return settings(entry, self.numbers.get(name, ""))
        found = self.stored.get(name)
        if found is None:
            return None
        form = found.layout
        return form.scheme, form.group, form.low, STORED, entry.activations or "", ""

    @property
    def releasing(self) -> bool:
        """Whether any entry wants its originals given back."""
        return any(entry.release for entry in self.entries.values())

    def released(self) -> Callable[[Tensor], bool]:
        """A test of parameters: whether every layer that reads it wants it given back."""
        names = names_of(self.owner())
        ids = {i for i, layers in names.items() if all(self._releases(n) for n in layers)}
        return lambda weight: id(weight) in ids

    def _releases(self, name: str) -> bool:
        return name in self.entries and self.entries[name].release

    def facts(self) -> dict[str, Settings | None]:
        """The settings of every layer: what decides, beside the recipe, what a compile gives."""
        return {name: self.settings_of(name) for name in self.entries}

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
            wanted = self.settings_of(name)
            if wanted is None:
                return None
            if name in self.stored and weight not in params:
                self.left[name] = "it is read transposed or folded: the file holds it as it was"
                return None
            while (
                weight not in params and "sits_fold" not in weight.meta
            ):  # a transpose is folded too
                weight.meta["sits_fold"] = "weights"
                weight = weight.all_input_nodes[0]
            return wanted, name

        return chosen


def swap(
    view: GraphView,
    wanted: WantedWeights,
    captured: Captured,
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
    marked = mark(view, wanted.choose(captured))
    applied = [*applied, *rewrite(view, rules, how, record)]
    merge(view, marked, applied)
    record.left_weights = left_alone(marked, record) | wanted.left
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
    """The recipe's entries, resolved; None where it has none. Lines for `effective` say what is skipped.
    Raises SpecError for an entry that selects nothing, with the nearest names."""
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
    wanted = WantedWeights(weak, entries)
    from_file = [name for name, entry in entries.items() if entry.scheme == STORED]
    if from_file:
        _look_up(owner, from_file, wanted, effective)
    return wanted


def _look_up(
    owner: nn.Module, asked: list[str], wanted: WantedWeights, effective: list[Effective]
) -> None:
    """Fill in what the model's file holds of the layers that are asked for."""
    archive = open_for(owner)
    if archive is None:
        why = "the model was read from no file with quantized weights"
        effective.append(Effective("weights: stored", "as they are", why))
        return
    by_weight = {
        id(p): archive[name]
        for name, p in owner.named_parameters(remove_duplicate=False)
        if name in archive
    }
    for name in asked:
        found = by_weight.get(id(owner.get_submodule(name).weight), "the file has no such weight")
        if isinstance(found, str):
            wanted.left[name] = found
        else:
            wanted.stored[name] = found


def settings(entry: Weight, numbers: str = "") -> Settings:
    """An entry as the arguments of `sits.stored`. numbers: the set of calibrated ones, if any."""
    scheme, group, per = str(entry.scheme), entry.group or 0, ""
    if scheme == "fp8":
        per = entry.per or "row"
        group = 128 if per == "block" else 0
    return scheme, group, entry.zero_point, per, entry.activations or "", numbers
