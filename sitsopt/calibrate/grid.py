"""The numbers a packed weight may hold, as arithmetic on whole matrices: value = number * scale + low.

Rows are padded with copies of their last column to whole groups, as `graph.packed.round_rows` pads them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..graph.packed import FP8, FP8_MOST, Layout, Rounded, power_of_two, values


@dataclass(frozen=True)
class Form:
    """How a weight is kept: what `sits.stored` has behind the weight, without the activations."""

    scheme: str
    group: int = 0
    low: bool = False
    per: str = ""

    @property
    def layout(self) -> Layout:
        """Where its bytes lie."""
        return Layout(self.scheme, self.group, self.low)

    @property
    def label(self) -> str:
        """A short name: `int4-g64-low`, `fp8-row`, `int8`."""
        group = f"g{self.group}" if self.group and not self.per else ""
        return "-".join(filter(None, [self.scheme, group, "low" if self.low else "", self.per]))

    @property
    def span(self) -> tuple[int, int]:
        """The least and the largest number."""
        if self.scheme == "fp8":
            return -int(FP8_MOST), int(FP8_MOST)
        if self.scheme == "int8":
            return -128, 127
        return (0, 15) if self.low else (-8, 7)

    def width(self, k: int) -> int:
        """Inputs that share a scale, for rows of k inputs."""
        return self.group or self.padded(k)

    def padded(self, k: int) -> int:
        """k with the padding of the last group."""
        layout = self.layout
        return layout.groups(k) * layout.width

    def near(self, x: Tensor) -> Tensor:
        """The nearest numbers, in f32."""
        least, most = self.span
        if self.scheme == "fp8":
            return x.clamp(least, most).to(FP8).to(torch.float32)
        return torch.round(x).clamp_(least, most)


@dataclass
class Fit:
    """Numbers and scales of one weight. numbers: f32 [N, padded K]; scale, low: f32 [N, groups]."""

    form: Form
    k: int
    numbers: Tensor
    scale: Tensor
    low: Tensor

    def wide(self) -> Tensor:
        """The values with their padding: f32 [N, padded K]."""
        n, groups = self.scale.shape
        q = self.numbers.view(n, groups, -1)
        return (q * self.scale[..., None] + self.low[..., None]).view(n, -1)

    def rounded(self) -> Rounded:
        """As kernels will have it, scales rounded to what is kept."""
        form, numbers = self.form, self.numbers
        if form.scheme == "fp8":
            kept = numbers.to(FP8).view(torch.uint8)
        else:
            kept = (numbers + (8 if form.scheme == "int4" and not form.low else 0)).to(torch.int8)
        if not form.group:
            factor = torch.where(self.scale == 0, 1.0, self.scale)[:, 0]
            low = self.low[:, 0] / factor if form.low else None
            return Rounded(kept, None, low, factor)
        most = torch.maximum(self.scale.abs(), self.low.abs())
        top = most.amax().expand(len(most)) if form.scheme == "fp8" else most.amax(1)
        factor = power_of_two(top)
        scale = (self.scale / factor[:, None]).half()
        return Rounded(
            kept, scale, (self.low / factor[:, None]).half() if form.low else None, factor
        )

    def values(self) -> Tensor:
        """What the kernels will compute with: f32 [N, K]."""
        return values(self.rounded(), self.form.layout, self.k)


def pad(matrix: Tensor, form: Form) -> Tensor:
    """[N, K] with copies of the last column up to whole groups."""
    n, k = matrix.shape
    more = form.padded(k) - k
    return torch.cat([matrix, matrix[:, -1:].expand(n, more)], 1) if more else matrix


SHRINKS = (1.0, 0.96, 0.92, 0.88, 0.84, 0.8, 0.75, 0.7, 0.65)


def first_fit(weight: Tensor, weights: Tensor, form: Form, search: bool = True) -> Fit:
    """Scales for f32 [N, K], the best of several clipped ranges, then fitted to their own numbers twice.

    weights: [K], how much an error at each input counts. search=False: the whole range, as the nearest has it.
    """
    k = weight.shape[1]
    w = pad(weight, form)
    importance = torch.cat([weights, weights.new_zeros(w.shape[1] - k)])
    n, groups = len(w), w.shape[1] // form.width(k)
    grouped, counts = w.view(n, groups, -1), importance.view(1, groups, -1)
    scale, low = _range(grouped, form)
    if not search:
        return _fit(grouped, scale, low, form, k)
    best = torch.full((n, groups), torch.inf)
    chosen = (scale.clone(), low.clone())
    for shrink in SHRINKS:
        tried = _shrunk(scale, low, shrink, form)
        loss = _loss(grouped, counts, *tried, form)
        better = loss < best
        best = torch.where(better, loss, best)
        chosen = tuple(
            torch.where(better, new, old) for new, old in zip(tried, chosen, strict=True)
        )  # type: ignore[assignment]
    if form.per in ("block", "tensor"):  # shared by many rows: only the whole range is
        return _fit(grouped, scale, low, form, k)
    for _ in range(2):
        tried = _fitted(grouped, counts, *chosen, form)
        loss = _loss(grouped, counts, *tried, form)
        better = loss < best
        best = torch.where(better, loss, best)
        chosen = tuple(
            torch.where(better, new, old) for new, old in zip(tried, chosen, strict=True)
        )  # type: ignore[assignment]
    return _fit(grouped, *chosen, form, k)


def _range(grouped: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    least, most = form.span
    if form.low:
        bottom, top = grouped.amin(2), grouped.amax(2)
        scale = (top - bottom) / (most - least)
        if not form.group:
            scale = torch.where(scale == 0, bottom.abs(), scale)
        return scale, bottom - least * scale
    size = grouped.abs().amax(2)
    if form.per == "tensor":
        size = size.amax().expand_as(size)
    if form.per == "block":
        n = len(size)
        more = torch.nn.functional.pad(size, (0, 0, 0, -n % 128))
        size = more.view(-1, 128, size.shape[1]).amax(1).repeat_interleave(128, 0)[:n]
    if form.scheme == "int4":  # the largest in size takes -8
        extreme = torch.take_along_dim(grouped, grouped.abs().argmax(2, keepdim=True), 2)[..., 0]
        return extreme / -8, torch.zeros_like(size)
    return size / most, torch.zeros_like(size)


def _shrunk(scale: Tensor, low: Tensor, shrink: float, form: Form) -> tuple[Tensor, Tensor]:
    """The range made smaller around its middle."""
    if not form.low:
        return scale * shrink, low
    middle = sum(form.span) / 2
    return scale * shrink, low + middle * scale * (1 - shrink)


def _numbers(grouped: Tensor, scale: Tensor, low: Tensor, form: Form) -> Tensor:
    step = torch.where(scale == 0, 1.0, scale)[..., None]
    return form.near((grouped - low[..., None]) / step)


def _loss(grouped: Tensor, counts: Tensor, scale: Tensor, low: Tensor, form: Form) -> Tensor:
    gone = _numbers(grouped, scale, low, form) * scale[..., None] + low[..., None] - grouped
    return (gone.square() * counts).sum(2)


def _fitted(
    grouped: Tensor, counts: Tensor, scale: Tensor, low: Tensor, form: Form
) -> tuple[Tensor, Tensor]:
    """Scale (and low) by weighted least squares for the numbers that they give now."""
    q = _numbers(grouped, scale, low, form)
    qq, qw = (counts * q * q).sum(2), (counts * q * grouped).sum(2)
    if not form.low:
        return torch.where(qq > 0, qw / qq.clamp(min=1e-30), scale), low
    one, q1, w1 = counts.sum(2).expand_as(qq), (counts * q).sum(2), (counts * grouped).sum(2)
    determinant = qq * one - q1 * q1
    fine = determinant > 1e-6 * qq * one
    safe = torch.where(fine, determinant, 1.0)
    return (
        torch.where(fine, (qw * one - q1 * w1) / safe, scale),
        torch.where(fine, (w1 * qq - qw * q1) / safe, low),
    )


def _fit(grouped: Tensor, scale: Tensor, low: Tensor, form: Form, k: int) -> Fit:
    numbers = _numbers(grouped, scale, low, form)
    return Fit(form, k, numbers.view(len(grouped), -1), scale.contiguous(), low.contiguous())
