"""Running a graph on real tensors, at its own precision and in f64, and judging a rewrite by both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter
from torch.utils._pytree import tree_leaves, tree_map

LOW = (torch.float32, torch.float16, torch.bfloat16)


class Wide(Interpreter):
    """Runs every floating-point op in f64, whatever dtype the graph asks for."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = tree_map(widen, (args, kwargs))
        return tree_map(widen, super().call_function(target, args, kwargs))


def widen(value: Any) -> Any:
    """A low-precision tensor or dtype as f64; anything else as it is."""
    if isinstance(value, torch.Tensor) and value.dtype in LOW:
        return value.double()
    return torch.float64 if value in LOW and isinstance(value, torch.dtype) else value


def run(gm: GraphModule, inputs: list[Any]) -> Any:
    """The graph's outputs on copies of the inputs. Raises what the ops raise."""
    with torch.no_grad():
        return gm(*tree_map(lambda t: t.clone() if isinstance(t, torch.Tensor) else t, inputs))


def run_wide(gm: GraphModule, inputs: list[Any]) -> Any:
    """The graph's outputs with every floating-point op done in f64."""
    with torch.no_grad():
        return Wide(gm).run(*[widen(i) for i in inputs])


@dataclass(frozen=True)
class Verdict:
    """right, or what differs: the largest error against f64, and eager's own."""

    right: bool
    why: str = ""
    error: float = 0.0
    eager_error: float = 0.0


def compare(eager: Any, got: Any, wide: Any, tolerance: tuple[float, float] | None) -> Verdict:
    """Outputs against eager's. Without a tolerance they are equal bit by bit (NaN equal to NaN, -0.0 not to 0.0); with
    (rtol, atol) the error against f64 stays within it and within twice eager's own."""
    a, b, w = tree_leaves(eager), tree_leaves(got), tree_leaves(wide)
    if len(a) != len(b):
        return Verdict(False, f"{len(b)} outputs instead of {len(a)}")
    worst = Verdict(True)
    for x, y, z in zip(a, b, w, strict=True):
        if not isinstance(x, torch.Tensor):
            if x != y:
                return Verdict(False, f"{y!r} instead of {x!r}")
            continue
        one = _one(x, y, z, tolerance)
        if not one.right:
            return one
        worst = max(worst, one, key=lambda v: v.error)
    return worst


def _one(
    x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, tolerance: tuple[float, float] | None
) -> Verdict:
    if x.dtype != y.dtype or x.shape != y.shape:
        return Verdict(False, f"{y.dtype}{tuple(y.shape)} instead of {x.dtype}{tuple(x.shape)}")
    if same_bits(x, y):
        return Verdict(True)
    if tolerance is None or not x.is_floating_point():
        return Verdict(
            False, f"not bitwise equal: off by up to {_gap(x, y):.3g} ({x.dtype})", _gap(x, y)
        )
    if not torch.equal(torch.isnan(x), torch.isnan(y)) or not torch.equal(
        torch.isinf(x), torch.isinf(y)
    ):
        return Verdict(False, "NaN or infinity in other places")
    rtol, atol = tolerance
    z = z.double()
    error, own = _gap(z, y), _gap(z, x)
    bound = float((atol + rtol * z.abs().nan_to_num(0, 0, 0)).max()) if z.numel() else atol
    limit = max(
        2 * own,
        torch.finfo(x.dtype).eps * float(z.abs().nan_to_num(0, 0, 0).max() if z.numel() else 0),
    )
    if error > bound:
        return Verdict(False, f"error {error:.3g} above the tolerance {bound:.3g}", error, own)
    if error > limit:
        return Verdict(False, f"error {error:.3g} above twice eager's own {own:.3g}", error, own)
    return Verdict(True, error=error, eager_error=own)


def _gap(x: torch.Tensor, y: torch.Tensor) -> float:
    if not x.numel():
        return 0.0
    gap = (x.double() - y.double()).abs()
    return float(gap[torch.isfinite(gap)].max()) if torch.isfinite(gap).any() else 0.0


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Bitwise equality, with every NaN equal to every other."""
    if x.dtype != y.dtype or x.shape != y.shape:
        return False
    if not x.is_floating_point():
        return torch.equal(x, y)
    nan = torch.isnan(x) & torch.isnan(y)
    same = (x == y) & (torch.signbit(x) == torch.signbit(y))
    return bool((same | nan).all())
