"""Scales and lows of all layers at once, by descent on the divergence of the whole model's output.

Numbers stay; a layer's gradient is that of its plain weight, summed up over each group (the end-to-end phase of
EfficientQAT, Chen et al., 2024). The teacher is the model itself with the weights that it came with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .grid import Fit
from .passes import linears, output, put


@dataclass
class Adam:
    """Adam (Kingma and Ba, 2015) on scales and lows, in units of each group's own step."""

    rate: float
    moments: dict[str, list[Tensor]] = field(default_factory=dict)
    steps: int = 0

    def step(self, fits: Mapping[str, Fit], gradients: Mapping[str, Tensor]) -> None:
        """gradients: [N, padded K] of each layer's weight."""
        self.steps += 1
        for name, gradient in gradients.items():
            fit = fits[name]
            n, groups = fit.scale.shape
            by_group = gradient.view(n, groups, -1)
            unit = fit.scale.abs()
            for part, slope in (
                ("scale", (by_group * fit.numbers.view(n, groups, -1)).sum(2)),
                *((("low", by_group.sum(2)),) if fit.form.low else ()),
            ):
                move = self._move(f"{name}.{part}", slope * unit)
                if part == "scale":  # a number is up to some 16 steps from the low
                    move = move / max(abs(bound) for bound in fit.form.span)
                getattr(fit, part).sub_(self.rate * unit * move)

    def _move(self, key: str, slope: Tensor) -> Tensor:
        first, second = self.moments.setdefault(key, [torch.zeros_like(slope) for _ in "ab"])
        first.lerp_(slope, 0.1)
        second.lerp_(slope.square(), 0.05)
        ahead, wide = first / (1 - 0.9**self.steps), second / (1 - 0.95**self.steps)
        return ahead / wide.sqrt().clamp(min=1e-20)


def divergence(wanted: Tensor, got: Tensor, labels: bool) -> Tensor:
    """A token's mean: KL from the wanted logits, or 1 - cosine for hidden states."""
    if not labels:
        return (1 - F.cosine_similarity(wanted.float(), got.float(), dim=-1)).mean()
    log_p = F.log_softmax(wanted.flatten(0, -2).float(), -1)
    log_q = F.log_softmax(got.flatten(0, -2).float(), -1)
    return F.kl_div(log_q, log_p, reduction="batchmean", log_target=True)


class Teacher:
    """The model's own outputs; hidden states before the head are kept, which are small, and go through it again."""

    def __init__(self, model: nn.Module, head: nn.Module | None) -> None:
        self.model, self.head = model, head
        self.weight: Any = None if head is None else head.weight
        self.kept: dict[int, Tensor] = {}

    @torch.no_grad()
    def learn(self, batches: Sequence[Tensor], said: Callable[[str], None]) -> None:
        """Run the batches; the model must have its own weights."""
        new = [batch for batch in batches if id(batch) not in self.kept]
        for number, batch in enumerate(new):
            said(f"the model's own output: batch {number + 1} of {len(new)}")
            self.kept[id(batch)] = self._hidden(batch)

    def knows(self, batches: Sequence[Tensor]) -> bool:
        return all(id(batch) in self.kept for batch in batches)

    def _hidden(self, batch: Tensor) -> Tensor:
        if self.head is None:
            return output(self.model, batch)
        seen: list[Tensor] = []

        def note(module: Any, args: Any) -> None:
            seen.append(args[0].clone())
            raise _Enough

        handle = self.head.register_forward_pre_hook(note)
        try:
            output(self.model, batch)
        except _Enough:
            pass
        finally:
            handle.remove()
        return seen[0]

    @torch.no_grad()
    def __call__(self, batch: Tensor, row: int | None = None) -> Tensor:
        """The output for a batch that was learnt, or for one row of it."""
        hidden = self.kept[id(batch)]
        if row is not None:
            hidden = hidden[row : row + 1]
        if self.head is None:
            return hidden
        bias: Any = getattr(self.head, "bias", None)
        return F.linear(hidden, self.weight, bias)


class _Enough(Exception):
    pass


def tune(
    model: nn.Module, fits: Mapping[str, Fit], batches: Sequence[Tensor], teacher: Teacher, adam: Adam,
    said: Callable[[str], None],
) -> float:  # fmt: skip
    """One round: a step a row of each batch, with the packed weights in the model (see `passes.lent`). Returns the mean loss."""
    modules, total = linears(model), 0.0
    rows = [(batch, at) for batch in batches for at in range(len(batch))]
    for number, (batch, at) in enumerate(rows):
        said(f"tuning: row {number + 1} of {len(rows)}")
        weights: dict[str, Any] = {name: modules[name].weight for name in fits}
        for weight in weights.values():
            weight.requires_grad_(True)
        with torch.enable_grad(), torch.autocast("cpu", torch.bfloat16):
            found = divergence(
                teacher(batch, at), output(model, batch[at : at + 1]), teacher.head is not None
            )
        found.backward()
        total += float(found)
        gradients: dict[str, Tensor] = {}
        for name, fit in fits.items():
            gradient = weights[name].grad
            if gradient is None:
                continue
            plain = gradient if isinstance(modules[name], nn.Linear) else gradient.t()
            more = fit.numbers.shape[1] - plain.shape[1]
            gradients[name] = F.pad(plain, (0, more)) if more else plain
            weights[name].grad = None
        adam.step(fits, gradients)
        with torch.no_grad():
            for name in gradients:
                put(modules[name], fits[name].values())
    return total / len(rows)


@torch.no_grad()
def measured(model: nn.Module, batches: Sequence[Tensor], teacher: Teacher) -> float:
    """The mean divergence over batches, in f32."""
    gaps = [
        float(divergence(teacher(b), output(model, b), teacher.head is not None)) for b in batches
    ]
    return sum(gaps) / len(gaps)
