"""Weights whose full-precision values were given back once they were packed.

A released parameter keeps its place, shape and dtype, and no memory: its pages were never written. Whatever would read
or write it raises `ReleasedError`, which says how to have it back; compiled graphs read the packed copy alone.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

Restore = Callable[[], Tensor]
_RELEASED = WeakTensorKeyDictionary()  # how to compute each again


class ReleasedError(RuntimeError):
    """Something read or wrote a weight that was released."""


FACTS = frozenset({
    "dim", "size", "stride", "numel", "nelement", "element_size", "data_ptr", "is_contiguous", "storage_offset", "shape",
    "dtype", "device", "layout", "requires_grad", "is_meta", "is_cpu", "is_cuda", "is_sparse", "is_quantized", "is_leaf",
    "is_inference", "ndim", "nbytes", "itemsize", "grad", "grad_fn", "is_floating_point", "is_complex", "names", "_version",
    "is_nested", "is_mkldnn", "__hash__", "_is_view", "_base", "is_shared", "is_mps", "is_xpu", "__len__",
})  # fmt: skip


class Released(nn.Parameter):
    """A parameter without its values: facts about it can be asked, anything else raises."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answer a fact, or raise ReleasedError."""
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        if name not in FACTS:
            raise ReleasedError(
                f"`{name}` needs a weight that `release: true` has given back once it was packed:"
                " sitsopt.restore(model) brings back what the packed copy stands for,"
                " sitsopt.restore(model, state_dict) the values of a state dict"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Released({tuple(self.shape)}, dtype={self.dtype})"


def is_released(tensor: Any) -> bool:
    """Whether a tensor's values were given back, whatever class it has at the moment."""
    return isinstance(tensor, Tensor) and tensor in _RELEASED


def release(weight: nn.Parameter, restore: Restore) -> None:
    """Give a parameter's memory back; `restore` computes its values again."""
    _advise(weight, DROP)
    weight.data = _unwritten(weight)
    _RELEASED[weight] = restore
    weight.__class__ = Released


def _unwritten(like: Tensor) -> Tensor:
    """A tensor of the same facts on pages that nothing was written to: they take no memory."""
    count = max(1, like.untyped_storage().nbytes() if like.numel() == 0 else _extent(like))
    pages = torch.frombuffer(mmap.mmap(-1, count * like.element_size()), dtype=like.dtype)
    return pages.as_strided(like.shape, like.stride())


def _extent(t: Tensor) -> int:
    return 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))


DROP, RECLAIM = 4, 21  # MADV_DONTNEED; MADV_PAGEOUT, which loses nothing


def cool(weight: Tensor) -> None:
    """Take a weight on a mapped file out of memory until it is read again."""
    _advise(weight, RECLAIM)


_COOLING: ContextVar[bool] = ContextVar("cooling", default=False)


@contextmanager
def cooling(wanted: bool) -> Iterator[None]:
    """Inside, a weight leaves memory as soon as it is packed, so that all of them are never there at once."""
    token = _COOLING.set(wanted)
    try:
        yield
    finally:
        _COOLING.reset(token)


def packed_once(weight: Tensor) -> None:
    """A weight was packed, and is hardly read again. A trace has none."""
    if _COOLING.get() and type(weight) in (Tensor, nn.Parameter) and not weight.is_meta:
        cool(weight)


def _advise(weight: Tensor, advice: int) -> None:
    """On a mapped file: of the pages that a weight fills alone, as one mapping holds all weights of a file."""
    if not weight.is_cpu or not weight.is_contiguous():
        return
    page = mmap.PAGESIZE
    start = -(-weight.data_ptr() // page) * page
    stop = (weight.data_ptr() + weight.numel() * weight.element_size()) // page * page
    if stop > start and _mapped_file(start, stop):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), advice)


def _mapped_file(start: int, stop: int) -> bool:
    """Whether addresses lie in one mapping of a file."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return False
    for line in lines:
        span, _, _, _, inode, *_ = line.split()
        low, high = (int(end, 16) for end in span.split("-"))
        if low <= start and stop <= high:
            return inode != "0"
    return False


@contextmanager
def as_parameters(model: nn.Module) -> Iterator[None]:
    """Released weights are plain parameters inside: for a trace, which reads facts only."""
    found = [p for p in model.parameters() if type(p) is Released]
    for weight in found:
        weight.__class__ = nn.Parameter  # type: ignore[assignment]
    try:
        yield
    finally:
        for weight in found:
            weight.__class__ = Released


def restore(model: nn.Module, state: Mapping[str, Tensor] | None = None) -> nn.Module:
    """Give released weights values again: those of `state` by the parameters' names, else what the packed copy stands
    for. Returns the model."""
    for owner, name, weight, full in _released(model):
        again = _RELEASED.pop(weight)
        given = state.get(full) if state is not None else None
        values = again() if given is None else given.detach()
        weight.__class__ = nn.Parameter
        weight.data = values.to(weight.dtype).reshape(weight.shape).clone()
        owner._parameters[name] = weight  # so that whoever watches the model looks again
    return model


def _released(model: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter, str]]:
    found: dict[int, tuple[nn.Module, str, nn.Parameter, str]] = {}
    for path, module in model.named_modules():
        for name, weight in module._parameters.items():
            if type(weight) is Released and id(weight) not in found:
                full = f"{path}.{name}" if path else name
                found[id(weight)] = (module, name, weight, full)
    return [*found.values()]
