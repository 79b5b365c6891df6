"""The rewrite differential: a function run by eager and through the pipeline must not be told apart.

    rewrite_case(lambda g, u: F.silu(g) * u, [randn(4, 8), randn(4, 8)], rules=[SWIGLU], must_fire=True)

Compared are the values, the inputs after the call, which results and inputs share storage or are one object, the
class of what is raised, the gradients, and whether a rule fired.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves

from sitsopt.pipeline import Plan, process
from sitsopt.rewrite.order import ordered
from sitsopt.rewrite.record import GraphRecord
from sitsopt.runtime.lower import Lowering
from sitsopt.spec.locate import rule_dirs
from sitsopt.spec.rule import Rule, load_rule, load_rules

Layout = Callable[[torch.Tensor], torch.Tensor]
F32, BF16 = torch.float32, torch.bfloat16
TOLERANCE = {torch.float64: 1e-9, F32: 2e-5, torch.float16: 4e-3, BF16: 3e-2}


def inline(text: str, rule_id: str = "fuse/inline") -> Rule:
    """A rule from its YAML text."""
    return load_rule("inline.yaml", rule_id, "summary: A rule of a test.\n" + text)


# -- compiling ------------------------------------------------------------------------------------------


@dataclass
class Compiled:
    """A compiled function and the record of every graph it has compiled so far."""

    call: Callable[..., Any]
    records: list[GraphRecord] = field(default_factory=list)

    def fired(self, rule: str | None = None) -> int:
        sites = [s for r in self.records for s in r.sites]
        return sum(rule is None or s.rule == rule for s in sites)

    @property
    def fallbacks(self) -> list[str]:
        return [r.fallback for r in self.records if r.fallback]


def compiled(
    fn: Callable[..., Any],
    rules: Sequence[Rule] = (),
    lowering: str = "eager",
    strict: bool = False,
    **torch_options: Any,
) -> Compiled:
    """`fn` behind the pipeline with these rules; forgets what Dynamo compiled before."""
    torch._dynamo.reset()
    plan = Plan(list(rules), lowering=Lowering(lowering), strict=strict, misses=True)
    records: list[GraphRecord] = []

    def backend(gm: Any, inputs: Any, **_: Any) -> Any:
        records.append(GraphRecord(f"graph{len(records)}"))
        return process(gm, inputs, plan, records[-1]).call()

    return Compiled(torch.compile(fn, backend=backend, **torch_options), records)


# -- layouts --------------------------------------------------------------------------------------------


def identity(x: torch.Tensor) -> torch.Tensor:
    return x


def transpose_back(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(-1, -2).contiguous().transpose(-1, -2) if x.dim() > 1 else x


def slice_of_bigger(x: torch.Tensor) -> torch.Tensor:
    if x.dim() == 0:
        return x
    big = x.new_zeros([s + 2 for s in x.shape])
    inner = big[tuple(slice(1, s + 1) for s in x.shape)]
    return inner.copy_(x)


def every_second(x: torch.Tensor) -> torch.Tensor:
    if x.dim() == 0:
        return x
    return x.new_zeros([*x.shape[:-1], 2 * x.shape[-1]])[..., ::2].copy_(x)


def expand_dim0(x: torch.Tensor) -> torch.Tensor:
    return x[:1].expand_as(x) if x.dim() > 1 and x.shape[0] > 1 else x


def storage_offset_3(x: torch.Tensor) -> torch.Tensor:
    return x.new_zeros(x.numel() + 3)[3:].view(x.shape).copy_(x)


def channels_last_like(x: torch.Tensor) -> torch.Tensor:
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if x.dim() > 2 else x


LAYOUTS: tuple[Layout, ...] = (
    identity, transpose_back, slice_of_bigger, every_second, expand_dim0, storage_offset_3,
    channels_last_like,
)  # fmt: skip


# -- copies, outcomes, comparisons ----------------------------------------------------------------------


def copies(args: Sequence[Any]) -> list[Any]:
    """Tensors as they lie in memory: strides kept, and what shares storage shares it in the copy."""
    storages: dict[int, torch.Tensor] = {}
    seen: dict[int, Any] = {}

    def copy(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return value.clone() if isinstance(value, torch.Tensor) else value
        if id(value) in seen:
            return seen[id(value)]
        with torch.no_grad():
            key = value.untyped_storage().data_ptr() if value.numel() else -id(value)
            count = value.untyped_storage().nbytes() // value.element_size()
            if key not in storages:
                whole = torch.as_strided(value.detach(), (count,), (1,), 0)
                storages[key] = whole.clone()
            made = torch.as_strided(
                storages[key].view(value.dtype), value.shape, value.stride(), value.storage_offset()
            )
        seen[id(value)] = made.requires_grad_(value.requires_grad)
        return made

    return [copy(a) for a in args]


def outcome(fn: Callable[..., Any], args: Sequence[Any]) -> tuple[Any, Exception | None]:
    try:
        return fn(*args), None
    except Exception as error:
        return None, error


def same_error(eager: Exception | None, ours: Exception | None) -> bool:
    """Dynamo finds errors of shapes and dtypes while it traces and raises them as its own RuntimeErrors."""
    if eager is None or ours is None:
        return eager is ours
    return isinstance(ours, type(eager)) or "dynamo" in type(ours).__module__


def close(eager: torch.Tensor, ours: torch.Tensor, tolerance: float | None = None) -> str:
    """What differs between two tensors, "" when nothing does."""
    if ours.dtype != eager.dtype or ours.shape != eager.shape or ours.device != eager.device:
        return f"{ours.dtype}{tuple(ours.shape)} instead of {eager.dtype}{tuple(eager.shape)}"
    if eager.layout is not torch.strided:
        eager, ours = eager.to_dense(), ours.to_dense()
    if not eager.dtype.is_floating_point and not eager.dtype.is_complex:
        return "" if torch.equal(eager, ours) else f"{ours} instead of {eager}"
    bound = TOLERANCE.get(eager.dtype, 2e-5) if tolerance is None else tolerance
    if torch.allclose(eager, ours, rtol=bound, atol=bound, equal_nan=True):
        return ""
    gap = (eager - ours).abs().double().nan_to_num(float("inf"))
    return f"off by {float(gap.max()):.3g}, allowed is {bound:g}"


def differences(eager: Any, ours: Any, tolerance: float | None = None, strides: bool = True) -> str:
    """What differs between two results of any structure, "" when nothing does."""
    a, shape = tree_flatten(eager)
    b, other = tree_flatten(ours)
    if shape != other:
        return f"structure {other} instead of {shape}"
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
            found = close(x, y, tolerance)
            if not found and strides and x.layout is torch.strided and _strides(x) != _strides(y):
                found = f"strides {y.stride()} instead of {x.stride()}"
        else:
            same = type(x) is type(y) and (x == y or x != x)
            found = "" if same else f"{y!r} instead of {x!r}"
        if found:
            return f"result {i}: {found}"
    return ""


def _strides(x: torch.Tensor) -> list[int]:
    """The strides that say anything: of dims that have more than one place."""
    return [s for s, size in zip(x.stride(), x.shape, strict=True) if size > 1] if x.numel() else []


def sharing(result: Any, args: Sequence[Any]) -> list[tuple[int, int, bool]]:
    """Which of the results and inputs share storage, and which are one object."""
    tensors = [
        t for t in (*tree_leaves(result), *tree_leaves(list(args))) if isinstance(t, torch.Tensor)
    ]
    found = []
    for (i, x), (j, y) in itertools.combinations(enumerate(tensors), 2):
        if x is y:
            found.append((i, j, True))
        elif home(x) and home(x) == home(y):
            found.append((i, j, False))
    return found


def home(x: torch.Tensor) -> int:
    """The address of a tensor's storage; 0 where there is none to share."""
    strided = x.layout is torch.strided and x.numel() > 0
    return x.untyped_storage().data_ptr() if strided else 0


def gradients(result: Any, args: Sequence[Any]) -> list[torch.Tensor | None]:
    """Gradients of a fixed weighting of every result, at every input that takes part."""
    parts = []
    for k, leaf in enumerate(tree_leaves(result)):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            weight = torch.linspace(-1, 1 + k, leaf.numel(), dtype=leaf.dtype).view(leaf.shape)
            parts.append((leaf * weight).sum().float())
    wanted = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    if not parts or not wanted:
        return []
    return list(torch.autograd.grad(sum(parts), wanted, allow_unused=True))  # type: ignore[arg-type]


# -- the case -------------------------------------------------------------------------------------------


def floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def check(
    fn: Callable[..., Any],
    args: Sequence[Any],
    rules: Sequence[Rule] = (),
    lowering: str = "eager",
    tolerance: float | None = None,
    strides: bool = True,
    calls: int = 1,
    **options: Any,
) -> Compiled:
    """One function, one set of inputs, eager against compiled; returns the compiled function. Raises
    AssertionError naming what differs."""
    mine, theirs = copies(args), copies(args)
    eager, eager_error = outcome(fn, mine)
    code = compiled(fn, rules, lowering, **options)
    ours, error = outcome(code.call, theirs)
    assert same_error(eager_error, error), f"eager: {eager_error!r}, compiled: {error!r}"
    if eager_error is not None:
        return code
    for n in range(calls):
        assert not (found := differences(eager, ours, tolerance, strides)), found
        assert not (found := differences(mine, theirs, tolerance)), (
            f"inputs after the call: {found}"
        )
        a, b = sharing(eager, mine), sharing(ours, theirs)
        assert a == b, f"shares storage {b} instead of {a}"
        if n + 1 < calls:
            eager, ours = fn(*mine), code.call(*theirs)
    if any(isinstance(a, torch.Tensor) and a.requires_grad for a in mine):
        found = differences(
            gradients(eager, mine), gradients(ours, theirs), tolerance, strides=False
        )
        assert not found, f"gradients: {found}"
    return code


def rewrite_case(
    fn: Callable[..., Any],
    args: Sequence[Any],
    rules: Sequence[Rule] = (),
    must_fire: bool | Callable[[torch.dtype, Layout, bool], bool] | None = None,
    grads: Iterable[bool] = (False, True),
    dtypes: Iterable[torch.dtype] = (F32, BF16),
    layouts: Iterable[Layout] = LAYOUTS,
    lowering: str = "eager",
    tolerance: float | None = None,
    full: bool = False,
) -> None:
    """`check` over dtypes, memory layouts and gradients: every one of them against the first of the others, or
    every combination when `full`. `must_fire`: whether a rule has to fire (or must not)."""
    axes = [list(dtypes), list(layouts), list(grads)]
    for point in itertools.product(*axes):
        unusual = sum(value is not axis[0] for value, axis in zip(point, axes, strict=True))
        if unusual <= 1 or full:
            _one_case(fn, args, rules, must_fire, *point, lowering, tolerance)


def _one_case(
    fn: Callable[..., Any],
    args: Sequence[Any],
    rules: Sequence[Rule],
    must_fire: bool | Callable[[torch.dtype, Layout, bool], bool] | None,
    dtype: torch.dtype,
    layout: Layout,
    grad: bool,
    lowering: str,
    tolerance: float | None,
) -> None:
    given = [layout(a.to(dtype)) if floating(a) else a for a in copies(args)]
    if grad:
        given = [a.detach().requires_grad_() if floating(a) else a for a in given]
    try:
        code = check(fn, given, rules, lowering, tolerance)
        if must_fire is not None:
            wanted = must_fire(dtype, layout, grad) if callable(must_fire) else must_fire
            fired = code.fired()
            assert (fired > 0) == wanted, f"fired {fired} times: {_misses(code)} {code.fallbacks}"
    except AssertionError as error:
        where = f"{dtype}, {layout.__name__}, grad={grad}, lowering={lowering}"
        raise AssertionError(f"{where}: {error}") from error


def _misses(code: Compiled) -> list[str]:
    return [f"{m.rule}: {m.reason} {m.condition}" for r in code.records for m in r.misses]


@lru_cache
def shipped() -> tuple[Rule, ...]:
    """The project's own rules, in the order in which they run."""
    return tuple(ordered(load_rules(rule_dirs())))
