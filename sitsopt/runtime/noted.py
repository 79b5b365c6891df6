"""Whether any of many tensors was moved, resized or made another kind since it was noted.

With the ops loaded that is one call of a few nanoseconds a tensor; without them the addresses are read one by one.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence

import torch

from .kernels import load

ADDRESS = torch.Tensor.data_ptr


def moved(tensors: Sequence[torch.Tensor]) -> Callable[[], bool | int]:
    """A question about `tensors` as they are now: true once one of them has another address, size, stride, dtype
    or `requires_grad`; only addresses and sizes are looked at where the ops are not loaded. Keeps them alive."""
    library = load.state().quick
    if library is not None:
        handle = torch.ops.sits_cpp.note.default(list(tensors))
        ask = functools.partial(library.sits_moved, handle)
        weakref.finalize(ask, library.sits_forget, handle)
        return ask
    noted = [*map(ADDRESS, tensors)]
    return lambda: [*map(ADDRESS, tensors)] != noted
