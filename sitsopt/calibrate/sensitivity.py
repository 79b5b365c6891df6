"""What rounding one layer would cost the whole model, for every layer and form from a few backward passes.

With labels drawn from the model itself, the divergence that a small change of a layer's output causes is half the
mean square of (gradient . change) (the Fisher information of the output). Tokens count on their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..graph.packed import nearest
from .grid import Form
from .passes import linears, output, reading, weight_of


def sensitivity(
    model: nn.Module, forms: Mapping[str, Sequence[Form]], batches: Sequence[Tensor], labels: bool,
    said: Callable[[str], None],
) -> dict[str, dict[str, float]]:  # fmt: skip
    """For each layer and each form's label, the divergence a token (nats; without labels the squared change of the
    output over its square) that the nearest numbers cause there, all else being exact."""
    modules = linears(model)
    sums = {name: dict.fromkeys((f.label for f in each), 0.0) for name, each in forms.items()}
    tokens = 0
    for number, batch in enumerate(batches):
        said(f"sensitivity: batch {number + 1} of {len(batches)}")
        tokens += batch.numel()
        for name, inputs, slope in _slopes(model, modules, list(forms), batch, labels):
            weight = weight_of(modules[name])
            for form in forms[name]:
                gone = nearest(weight, form.scheme, form.group, form.low, form.per) - weight
                change = (F.linear(inputs, gone) * slope).sum(-1)
                sums[name][form.label] += float(change.double().square().sum())
    return {n: {f: total / 2 / tokens for f, total in each.items()} for n, each in sums.items()}


def _slopes(
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    names: list[str],
    batch: Tensor,
    labels: bool,
) -> list[tuple[str, Tensor, Tensor]]:
    """(layer, what it read, gradient of what it gave) for one drawn labelling of a batch."""
    gave: dict[str, Tensor] = {}
    some = next(model.parameters())

    def hook(name: str) -> Callable[..., Any]:
        def note(module: Any, args: Any, out: Tensor) -> Tensor:
            gave[name] = out if out.requires_grad else out.requires_grad_(True)
            return gave[name]

        return note

    handles = [modules[n].register_forward_hook(hook(n)) for n in names]
    try:
        with torch.enable_grad(), reading(dict(modules), names) as inputs:
            out = output(model, batch).to(some.dtype)
            slopes = torch.autograd.grad(
                _drawn(out, labels), list(gave.values()), allow_unused=True
            )
    finally:
        for handle in handles:
            handle.remove()
    found = []
    for name, slope in zip(gave, slopes, strict=True):
        if slope is not None:
            found.append((name, inputs[name].detach().float(), slope.float()))
    return found


def _drawn(out: Tensor, labels: bool) -> Tensor:
    """What to differentiate: the log likelihood of drawn labels, or a random projection of hidden states."""
    generator = torch.Generator().manual_seed(0)
    if labels:
        flat = out.flatten(0, -2)
        drawn = torch.multinomial(flat.detach().softmax(-1), 1, generator=generator)[:, 0]
        return -F.cross_entropy(flat, drawn, reduction="sum")
    direction = torch.randn(out.shape, generator=generator)
    return (out * direction).sum() / out.detach().norm(dim=-1).mean()


def plan(
    costs: Mapping[str, Mapping[str, float]], sizes: Mapping[str, tuple[int, int]],
    forms: Mapping[str, Sequence[Form]], budget: float,
) -> dict[str, Form]:  # fmt: skip
    """A form for each layer: at most `budget` bits a weight over all of them, by most divergence saved a bit.

    forms: what a layer may have, the smallest first. Raises ValueError where even the smallest need more.
    """
    chosen = {name: _smallest(each, sizes[name]) for name, each in forms.items()}
    room = budget * sum(n * k for n, k in sizes.values())
    used = sum(_bits(form, sizes[name]) for name, form in chosen.items())
    if used > room:
        least = used / sum(n * k for n, k in sizes.values())
        raise ValueError(
            f"{budget:g} bits a weight are too few: the smallest forms take {least:.2f}"
        )
    steps = []
    for name, each in forms.items():
        for form in each:
            more = _bits(form, sizes[name]) - _bits(chosen[name], sizes[name])
            saved = costs[name][chosen[name].label] - costs[name][form.label]
            if more > 0 and saved > 0:
                steps.append((saved / more, more, name, form))
    for _, _, name, form in sorted(steps, key=lambda s: -s[0]):
        more = _bits(form, sizes[name]) - _bits(chosen[name], sizes[name])
        if more > 0 and used + more <= room:
            chosen[name], used = form, used + more
    return chosen


def _smallest(forms: Sequence[Form], size: tuple[int, int]) -> Form:
    return min(forms, key=lambda form: _bits(form, size))


def _bits(form: Form, size: tuple[int, int]) -> float:
    n, k = size
    return form.layout.bits(n, k) * n * k
