"""Numbers of one weight that change the layer's output least, given the second moments of its inputs.

The loss of a row is (w - v) H (w - v), H [K, K] the moments: exactly the squared error of the output. GPTQ (Frantar
et al., 2022) rounds column after column and lets the later ones make up for each error; what follows goes down the
same loss by coordinates (as CDQuant, Nair and Suggala, 2024): each number in turn, then each group's scale and low.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .grid import Fit, Form, first_fit, pad

ROWS = 8192  # rows at a time: bounds memory
BLOCK = 64


def damped(moments: Tensor, share: float = 0.01) -> Tensor:
    """Moments with a share of their mean on the diagonal; inputs that were never there count a little."""
    size = moments.diagonal().mean().clamp(min=1e-12)
    return moments + torch.eye(len(moments)) * (share * size)


def fit(weight: Tensor, moments: Tensor, form: Form, sweeps: int = 1) -> Fit:
    """The numbers and scales of f32 [N, K] for damped moments [K, K]."""
    k = weight.shape[1]
    wide = _padded(moments, form.padded(k))
    root = _inverse_root(wide, order := wide.diagonal().argsort(descending=True))
    parts = []
    for start in range(0, len(weight), ROWS):
        part = weight[start : start + ROWS]
        found = first_fit(part, moments.diagonal(), form)
        target = pad(part, form)
        found.numbers = _compensated(target, found, root, order)
        for _ in range(sweeps):
            _refit(target, found, wide)
            _descend(target, found, wide)
        _refit(target, found, wide)
        parts.append(found)
    if len(parts) == 1:
        return parts[0]
    whole = [torch.cat([getattr(p, name) for p in parts]) for name in ("numbers", "scale", "low")]
    return Fit(form, k, *whole)


def loss(weight: Tensor, values: Tensor, moments: Tensor) -> float:
    """The squared error of the output over its square."""
    gone = weight - values
    size = float(((weight @ moments) * weight).sum())
    return float(((gone @ moments) * gone).sum()) / max(size, 1e-30)


def _padded(moments: Tensor, k: int) -> Tensor:
    """Padding never meets an input: on its own, and hardly counted."""
    wide = torch.eye(k) * (moments.diagonal().mean() * 1e-3)
    wide[: len(moments), : len(moments)] = moments
    return wide


def _inverse_root(moments: Tensor, order: Tensor) -> Tensor:
    """The upper Cholesky factor of the inverse, in the order in which columns are rounded."""
    exact = moments[order][:, order].double()
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(exact))
    return torch.linalg.cholesky(inverse, upper=True).float()


def _compensated(target: Tensor, found: Fit, root: Tensor, order: Tensor) -> Tensor:
    """GPTQ. Columns lie as rows here and below: one is read and written for all outputs at a time."""
    form, width = found.form, target.shape[1] // found.scale.shape[1]
    w, scales, lows = target.t()[order].contiguous(), *_by_group(found)
    numbers = torch.empty_like(w)
    for start in range(0, len(w), BLOCK):
        end = min(start + BLOCK, len(w))
        mine, gone = w[start:end], torch.empty(end - start, w.shape[1])
        for at in range(end - start):
            group = int(order[start + at]) // width
            q = form.near((mine[at] - lows[group]) / scales[group])
            numbers[start + at] = q
            row = root[start + at, start + at : end]
            gone[at] = (mine[at] - torch.addcmul(lows[group], q, scales[group])) / row[0]
            mine[at:].addr_(row, gone[at], alpha=-1)
        w[end:].addmm_(root[start:end, end:].t(), gone, alpha=-1)
    back = torch.empty_like(numbers)
    back[order] = numbers
    return back.t().contiguous()


def _descend(target: Tensor, found: Fit, moments: Tensor) -> None:
    """Each number in turn at its best for the others as they are."""
    form, k = found.form, target.shape[1]
    width = k // found.scale.shape[1]
    values, numbers, scales, lows = (
        found.wide().t().contiguous(), found.numbers.t().contiguous(), *_by_group(found)
    )  # fmt: skip
    pull = moments @ (target.t() - values)
    for start in range(0, k, BLOCK):
        end = min(start + BLOCK, k)
        moved, local = torch.empty(end - start, len(target)), pull[start:end]
        for at in range(end - start):
            column, group = start + at, (start + at) // width
            best = values[column] + local[at] / moments[column, column]
            q = form.near((best - lows[group]) / scales[group])
            moved[at] = torch.addcmul(lows[group], q, scales[group]) - values[column]
            numbers[column] = q
            local.addr_(moments[column, start:end], moved[at], alpha=-1)
        pull[end:].addmm_(moments[end:, start:end], moved, alpha=-1)
    found.numbers = numbers.t().contiguous()


def _by_group(found: Fit) -> tuple[Tensor, Tensor]:
    """Scales that may be divided by, and lows: [groups, N]."""
    scale = torch.where(found.scale == 0, 1.0, found.scale)
    return scale.t().contiguous(), found.low.t().contiguous()


def _refit(target: Tensor, found: Fit, moments: Tensor) -> None:
    """Each group's scale and low in turn at their best for the numbers and for the other groups."""
    form, groups = found.form, found.scale.shape[1]
    if form.per in ("block", "tensor"):  # shared by many rows
        return
    width = target.shape[1] // groups
    pull = (target - found.wide()) @ moments
    for g in range(groups):
        at = slice(g * width, (g + 1) * width)
        q, own = found.numbers[:, at], moments[at, at]
        qh = q @ own
        qq, up = (qh * q).sum(1), (q * pull[:, at]).sum(1)
        if form.low:
            q1, one, side = qh.sum(1), own.sum(), pull[:, at].sum(1)
            determinant = qq * one - q1 * q1
            fine = determinant > 1e-5 * qq * one
            safe = torch.where(fine, determinant, 1.0)
            more = torch.where(fine, (up * one - q1 * side) / safe, 0.0)
            raised = torch.where(fine, (side * qq - up * q1) / safe, 0.0)
        else:
            fine = qq > 1e-20
            more = torch.where(fine, up / torch.where(fine, qq, 1.0), 0.0)
            raised = torch.zeros_like(more)
        found.scale[:, g] += more
        found.low[:, g] += raised
        pull -= (q * more[:, None] + raised[:, None]) @ moments[at]


__all__ = ["damped", "fit", "loss"]
