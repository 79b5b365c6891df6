"""Packed weights that were calibrated: looked up when a weight is packed, instead of taking the nearest numbers.

What keeps them registers a reader; a weight that has changed since has none.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

Reader = Callable[[str, Tensor], Tensor | None]
_READERS: list[Reader] = []


def register(reader: Reader) -> None:
    """reader(name of the set, weight [N, K]) gives the packed weight, or None where it has none for this very one."""
    if reader not in _READERS:
        _READERS.append(reader)


def find(name: str, weight: Tensor) -> Tensor | None:
    """The packed weight in the set called `name`; None, with a warning, where none is made for this very weight, and
    None for a weight without numbers (a trace)."""
    if type(weight) not in (Tensor, nn.Parameter) or weight.device.type == "meta":
        return None
    for reader in _READERS:
        found = reader(name, weight)
        if found is not None:
            return found
    warnings.warn(
        f"the calibration {name} has no weight {list(weight.shape)} with these values:"
        " the nearest numbers are taken", stacklevel=2,
    )  # fmt: skip
    return None


def fingerprint(weight: Tensor) -> str:
    """Sixteen hex digits for the values of [N, K] as bf16 has them: a model loaded in f32 and in bf16 has the same."""
    plain = weight.detach().to("cpu", torch.bfloat16).contiguous().view(-1)
    words = torch.nn.functional.pad(plain, (0, -plain.numel() % 256)).view(torch.int64).view(-1, 64)
    mixed = words * torch.arange(1, 128, 2)  # by odd numbers: moved words show
    digest = hashlib.blake2b(mixed.sum(1).numpy().tobytes(), digest_size=8)
    digest.update(str(list(weight.shape)).encode())
    return digest.hexdigest()
