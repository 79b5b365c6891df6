"""Packed weights that are kept between processes: whoever keeps them says so here, and packing asks there first."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from . import packed

Settings = tuple[str, int, bool, str]  # the arguments of `packed.pack` behind the weight
Keeper = Callable[[Tensor, Settings, Callable[[], Tensor]], Tensor]
_KEEPERS: list[Keeper] = []


def register(keeper: Keeper) -> None:
    """keeper(weight [N, K], settings, pack) gives the packed weight: what it kept, or what `pack` makes."""
    _KEEPERS[:] = [keeper]


def pack(weight: Tensor, scheme: str, group: int, low: bool, per: str) -> Tensor:
    """`packed.pack`, or what was kept of it for this very weight."""

    def make() -> Tensor:
        return packed.pack(weight, scheme, group, low, per)

    real = type(weight) in (Tensor, nn.Parameter) and weight.device.type != "meta"
    if not _KEEPERS or not real:
        return make()
    return _KEEPERS[0](weight, (scheme, group, low, per), make)
