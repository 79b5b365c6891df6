"""A model seen as linear layers in the order they run: which inputs each has had, block after block.

Two streams of activations go through the blocks: `plain` through the weights as they are, `kept` through the packed
ones before it. Each block runs a few times on both while its layers are packed, so a whole model is one pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..rewrite.wanted import is_linear
from .grid import Fit


def linears(model: nn.Module) -> dict[str, nn.Module]:
    """Every linear layer by its name."""
    return {name: m for name, m in model.named_modules() if is_linear(m)}


def weight_of(module: nn.Module) -> Tensor:
    """A layer's weight as f32 [N, K] whichever way round it lies."""
    weight: Any = module.weight
    plain = weight.detach().to(torch.float32)
    return plain if isinstance(module, nn.Linear) else plain.t()


def put(module: nn.Module, weight: Tensor) -> None:
    """Give a layer f32 [N, K] as a weight of its own; whoever shared the old one keeps it."""
    old: Any = module.weight
    laid = weight if isinstance(module, nn.Linear) else weight.t()
    module.weight = nn.Parameter(laid.to(old.dtype).contiguous(), requires_grad=False)


@contextmanager
def lent(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Inside, weights may be replaced by `put`; at the end the model has its own parameters again."""
    modules = linears(model)
    kept: dict[str, Any] = {name: modules[name].weight for name in names}
    try:
        yield
    finally:
        for name, parameter in kept.items():
            setattr(modules[name], "weight", parameter)  # noqa: B010  typed as a parameter


def blocks_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The members of the module list with the most linear weights, by name; none where no list has any."""
    best, most = [], 0
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module):
            sizes = [sum(weight_of(m).numel() for m in linears(b).values()) for b in module]
            if min(sizes) > 0 and sum(sizes) > most:
                most, best = sum(sizes), [(f"{name}.{i}", b) for i, b in enumerate(module)]
    return best


@dataclass
class Moments:
    """Sums over what a layer has read. own: x'x of the kept stream [K, K]; cross: (plain - kept)'kept."""

    own: Tensor
    cross: Tensor
    rows: int = 0

    def add(self, plain: Tensor, kept: Tensor) -> None:
        a, b = (x.reshape(-1, x.shape[-1]).to(torch.float32) for x in (plain, kept))
        self.own.addmm_(b.t(), b)
        self.cross.addmm_((a - b).t(), b)
        self.rows += len(b)

    def target(self, weight: Tensor, share: float = 1.0) -> Tensor:
        """The weight [N, K] that gives on kept inputs most nearly what the old one gives on plain ones (GPTAQ, Li
        et al., 2025); `share` of the way, since few tokens tell it only roughly."""
        size = self.own.diagonal().mean()
        firm = self.own + torch.eye(len(self.own)) * (0.05 * size)
        return weight + share * torch.linalg.solve(firm, (weight @ self.cross).t()).t()


Pack = Callable[
    [str, nn.Module, Moments], Tensor
]  # a layer and its moments to its packed weight's values


@dataclass
class Walk:
    """One pass over a model's blocks. `pack` is asked once for each layer of `names`, in the order they run."""

    model: nn.Module
    names: Sequence[str]
    pack: Pack
    known: Mapping[str, Fit] = field(default_factory=dict)  # packed by an earlier pass
    staged: bool = False  # layers of a block that read different inputs one after another
    said: Callable[[str], None] = lambda text: None
    originals: dict[str, Any] = field(default_factory=dict)  # parameters, by layer
    _calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)

    @torch.no_grad()
    def run(self, batches: Sequence[Tensor]) -> None:
        """batches: rows of token ids, all of one shape. Packed weights stay in the model: see `lent`."""
        left = list(self.names)
        blocks = blocks_of(self.model)
        streams = self._first(blocks, batches) if blocks else []
        plain, kept = list(streams), list(streams)
        for at, (name, block) in enumerate(blocks):
            self.said(f"block {at + 1} of {len(blocks)}")
            mine = [n for n in left if n.startswith(f"{name}.")]
            left = [n for n in left if n not in mine]
            plain, kept = self._block(name, block, mine, plain, kept)
        if left:
            self.said("the layers outside the blocks")
            self._rest(left, batches)

    def _first(
        self, blocks: list[tuple[str, nn.Module]], batches: Sequence[Tensor]
    ) -> list[Tensor]:
        """What the first block reads for each batch; how each block is called beside that."""
        first, *others = blocks
        seen: list[Tensor] = []

        def note(name: str, enough: bool) -> Callable[..., None]:
            def hook(module: Any, args: Any, kwargs: Any) -> None:
                if name == first[0]:
                    seen.append((args[0] if args else kwargs["hidden_states"]).clone())
                rest = {k: v for k, v in kwargs.items() if k != "hidden_states"}
                self._calls[name] = (args[1:], rest)
                if enough:
                    raise _Enough

            return hook

        for number, batch in enumerate(batches):
            hooked = [first, *others] if number == 0 else [first]
            handles = [
                b.register_forward_pre_hook(note(n, number > 0), with_kwargs=True)
                for n, b in hooked
            ]
            try:
                call(self.model, batch)
            except _Enough:
                pass
            finally:
                for handle in handles:
                    handle.remove()
        return seen

    def _block(
        self, name: str, block: nn.Module, mine: list[str], plain: list[Tensor], kept: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        args, kwargs = self._calls[name]

        def through(hidden: Tensor) -> Tensor:
            out = block(hidden, *args, **kwargs)
            return out[0] if isinstance(out, tuple) else out

        modules = linears(self.model)
        with reading(modules, mine) as inputs:
            ahead, read = [], []
            for hidden in plain:
                inputs.clear()
                ahead.append(through(hidden))
                read.append(dict(inputs))
        mine = self._known(mine, modules)
        stages = _stages(mine, read[0]) if self.staged else [mine]
        for stage in filter(None, stages):
            moments: dict[str, Moments] = {}
            with reading(modules, stage) as inputs:
                for at, hidden in enumerate(kept):
                    through(hidden)
                    _gather(moments, stage, read[at], inputs)
            self._packed(stage, modules, moments)
        return ahead, [through(hidden) for hidden in kept]

    def _rest(self, left: list[str], batches: Sequence[Tensor]) -> None:
        """Layers outside the blocks, all at once, over whole runs of the model."""
        modules = linears(self.model)
        left = self._known(left, modules)
        packed = {n: m.weight for n, m in modules.items() if n not in left}
        moments: dict[str, Moments] = {}
        for batch in batches if left else ():
            runs = []
            for plain in (True, False):
                original = self._original(packed if plain else {})
                read = reading(modules, left, enough=True)
                with contextlib.suppress(_Enough), read as inputs, original:
                    call(self.model, batch)
                runs.append(dict(inputs))
            _gather(moments, left, *runs)
        self._packed(left, modules, moments)

    @contextmanager
    def _original(self, packed: dict[str, Any]) -> Iterator[None]:
        modules = linears(self.model)
        for name in packed:
            if name in self.originals:
                modules[name].weight = self.originals[name]
        try:
            yield
        finally:
            for name, weight in packed.items():
                modules[name].weight = weight

    def _known(self, names: list[str], modules: dict[str, nn.Module]) -> list[str]:
        """Put what an earlier pass has packed already; the other names."""
        for name in [n for n in names if n in self.known]:
            self.originals[name] = modules[name].weight
            put(modules[name], self.known[name].values())
        return [n for n in names if n not in self.known]

    def _packed(
        self, names: Sequence[str], modules: dict[str, nn.Module], moments: dict[str, Moments]
    ) -> None:
        for name in names:
            if name in moments:
                self.originals[name] = modules[name].weight
                put(modules[name], self.pack(name, modules[name], moments[name]))


class _Enough(Exception):
    pass


def call(model: nn.Module, ids: Tensor) -> Any:
    """A model's own forward on rows of token ids, without a cache."""
    if getattr(getattr(model, "config", None), "is_decoder", True) and hasattr(model, "generate"):
        return model(input_ids=ids, use_cache=False)
    return model(input_ids=ids)


def output(model: nn.Module, ids: Tensor) -> Tensor:
    """Logits, or for a model without a head its last hidden states."""
    out = call(model, ids)
    found = getattr(out, "logits", None)
    return out.last_hidden_state if found is None else found


@contextmanager
def reading(
    modules: dict[str, nn.Module], names: Sequence[str], enough: bool = False
) -> Iterator[dict[str, Tensor]]:
    """What each layer last read, by its name; with `enough` the run ends, by `_Enough`, when all have."""
    inputs: dict[str, Tensor] = {}

    def hook(name: str) -> Callable[..., None]:
        def note(module: Any, args: Any) -> None:
            inputs[name] = args[0]
            if enough and len(inputs) == len(names):
                raise _Enough

        return note

    handles = [modules[n].register_forward_pre_hook(hook(n)) for n in names]
    try:
        yield inputs
    finally:
        for handle in handles:
            handle.remove()


def _stages(names: list[str], inputs: dict[str, Tensor]) -> list[list[str]]:
    """Layers in the order they ran, those that read the same tensor together."""
    stages: dict[int, list[str]] = {}
    for name in inputs:
        if name in names:
            stages.setdefault(inputs[name].data_ptr(), []).append(name)
    return list(stages.values())


def _gather(
    moments: dict[str, Moments],
    names: Sequence[str],
    plain: dict[str, Tensor],
    kept: dict[str, Tensor],
) -> None:
    """Add one batch; layers that read the same tensor share their sums."""
    shared: dict[int, Moments] = {}
    for name in names:
        if name not in kept or name not in plain:
            continue
        x = kept[name]
        at = x.data_ptr()
        if at in shared:
            moments[name] = shared[at]
            continue
        if name not in moments:
            k = x.shape[-1]
            moments[name] = Moments(torch.zeros(k, k), torch.zeros(k, k))
        shared[at] = moments[name]
        moments[name].add(plain[name], x)
