"""Whether a kernel pays at its site: measured against what it replaces, on this machine, at the site's own shapes.

On a CPU that is the ATen composition which Inductor would call out to (`linear`, attention); on a GPU ops that
Inductor would generate code for are compiled by it first. Verdicts are kept on disk beside the kernels, so each
shape is measured once; one taken while the machine was busy is used, and taken again the next time.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from ..graph.facts import val
from ..graph.ops import REFERENCES
from . import stopwatch
from .candidates import Candidate, device_of
from .triton.module import cache_dir, digest, write_whole

SETS = 4  # sites of one shape whose own operands take turns
LIBRARY = ("attention", "linears")  # what Inductor leaves to a library
Times = dict[str, float]


def worth(
    found: Sequence[Candidate], inputs: dict[Node, Any]
) -> dict[Node, tuple[Times, str]]:  # fmt: skip
    """For each candidate the microseconds of ours and theirs, and why it was not measured if it was not. inputs: the
    values of placeholders; everything else is made up in its shape."""
    groups: dict[str, list[Candidate]] = {}
    verdicts: dict[Node, tuple[Times, str]] = {}
    for one in found:
        key = _key(one)
        if key:
            groups.setdefault(key, []).append(one)
        else:
            verdicts[one.node] = {}, "not measured: a size is symbolic"
    for key, group in groups.items():
        times, why = _held(key), ""
        if not times:
            times, why, steady = _measured(group[:SETS], inputs)
            if times and steady:
                write_whole(_entry(key), json.dumps(times))
        verdicts.update({one.node: (times, why) for one in group})
    return verdicts


def _key(one: Candidate) -> str:
    """The kernel, the shapes and everything else that a time depends on; empty where a size is symbolic."""
    everything: Any = (one.node.args, dict(one.node.kwargs))
    facts: Any = lambda n: _Shape(val(n))  # noqa: E731
    args = repr(map_arg(everything, facts))
    if "Sym" in args:
        return ""
    machine = platform.processor() or platform.machine()
    if device_of(one.node) == "cuda":
        machine = torch.cuda.get_device_name()
    return digest(
        str(one.overload), repr(one.more), args, machine, str(torch.get_num_threads()), torch.__version__,
        VERSION,
    )  # fmt: skip


VERSION = "1"  # of what is measured and how


class _Shape:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        t = self.value
        if not isinstance(t, torch.Tensor):
            return f"Sym({t})"
        numbers = (*t.shape, *t.stride())
        if any(type(n) is not int for n in numbers):
            return "Sym"
        return f"{t.dtype}{tuple(t.shape)}{tuple(t.stride())}{t.device.type}"


def _entry(key: str) -> Any:
    return cache_dir().parent / "profit" / f"{key}.json"


def _held(key: str) -> Times:
    try:
        return {k: float(v) for k, v in json.loads(_entry(key).read_text()).items()}
    except (OSError, ValueError, AttributeError):
        return {}


def _measured(group: Sequence[Candidate], inputs: dict[Node, Any]) -> tuple[Times, str, bool]:
    device = device_of(group[0].node)
    name = group[0].node.target._schema.name.split("::")[1]  # type: ignore[union-attr]
    theirs: Any = REFERENCES.get(name)
    label = "aten"
    if theirs is None:
        return {}, "not measured: the op has no reference", False
    made: dict[Node, Any] = {}
    try:
        with torch.no_grad():
            sets = [_operands(one.node, inputs, made) for one in group]
            ours = [
                lambda s=s, one=one: one.overload(*s[0], **s[1], **one.more)
                for s, one in zip(sets, group, strict=True)
            ]
            if device == "cuda" and name not in LIBRARY:
                theirs, label = by_inductor(theirs, *sets[0]), "inductor"
            others = [lambda s=s: theirs(*s[0], **s[1]) for s in sets]
            first, second = stopwatch.race([ours, others], device)
    except RuntimeError as error:
        return {}, f"not measured: {str(error).splitlines()[0]}", False
    times = {"sits": round(first.us, 2), label: round(second.us, 2)}
    return times, "", first.steady and second.steady


def by_inductor(fn: Callable[..., Any], args: Any, kwargs: Any) -> Callable[..., Any]:
    """`fn` as Inductor compiles it for arguments like these. Dynamo is at work while this is called, so it is traced
    without it, in a context of its own."""
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils._pytree import tree_flatten, tree_unflatten

    leaves, shape = tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def flat(*tensors: torch.Tensor) -> list[Any]:
        filled = list(leaves)
        for i, tensor in zip(places, tensors, strict=True):
            filled[i] = tensor
        a, k = tree_unflatten(filled, shape)
        result = fn(*a, **k)
        return list(result) if isinstance(result, (tuple, list)) else [result]

    given = [leaves[i] for i in places]
    with tracing(TracingContext(FakeTensorMode())), torch.no_grad():
        compiled: Any = compile_fx(make_fx(flat)(*given), given)

    def call(*args: Any, **kwargs: Any) -> Any:
        now = tree_flatten((args, kwargs))[0]
        return compiled(*(now[i] for i in places))

    return call


def _operands(node: Node, inputs: dict[Node, Any], made: dict[Node, Any]) -> Any:
    def real(one: Node) -> Any:
        value = inputs.get(one)
        if isinstance(value, torch.Tensor) and not isinstance(value, torch._subclasses.FakeTensor):
            return value.detach()
        if one not in made:
            made[one] = _like(val(one))
        return made[one]

    everything: Any = (node.args, dict(node.kwargs))
    replaced: Any = real
    return map_arg(everything, replaced)


def _like(fake: Any) -> Any:
    """A tensor of the same shape, strides and device; random where it has a fraction, else ones."""
    if not isinstance(fake, torch.Tensor):
        return fake
    fresh = torch.empty_strided(
        fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device
    )  # fmt: skip
    return fresh.normal_() if fresh.is_floating_point() else fresh.fill_(1)
