"""How well a kernel's reads fit the memory: sectors of a warp, and channels under a stride. And moving pages."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from math import gcd
from typing import Any

from .settings import system_call

WARP, SECTOR = (
    32,
    32,
)  # threads; bytes that memory delivers at once (CUDA C++ Programming Guide, 7.x and later)
INTERLEAVE = 256  # bytes that stay on one channel; an assumption, vendors publish no map
PAGE = 4096


@dataclass(frozen=True)
class Access:
    """A kernel's operand: `kernel` names it; shape and strides in elements, `item` bytes each."""

    kernel: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item: int

    @property
    def step(self) -> int:
        """Bytes between what two neighbouring threads read: the last dimension goes over threads."""
        return self.strides[-1] * self.item

    def sectors(self) -> float:
        """Sectors that a warp's read touches, over the fewest that could hold its bytes."""
        touched = {(thread * self.step) // SECTOR for thread in range(WARP)}
        return len(touched) / max(1, -(-WARP * self.item // SECTOR))

    def channels_used(self, channels: int) -> int:
        """Of `channels`, those that rows side by side start on when address bits choose the channel. Hardware mixes
        higher bits in, so this is the worst that can be."""
        stride = self.strides[0] * self.item
        if stride % INTERLEAVE:
            return channels
        return channels // gcd(stride // INTERLEAVE, channels)


def advice_on(access: Access, channels: int | None) -> list[str]:
    """What is wrong with an access, in words; nothing for a good one."""
    found = []
    if (waste := access.sectors()) > 1:
        found.append(
            f"{access.kernel}: neighbouring threads read {access.step} bytes apart, {waste:.0f} times the sectors needed"
        )
    if channels and len(access.shape) > 1 and access.shape[0] > 1:
        used = access.channels_used(channels)
        if 4 * used <= channels:
            stride = access.strides[0] * access.item
            found.append(
                f"{access.kernel}: rows {stride} bytes apart start on {used} of {channels} channels unless the"
                f" hardware mixes them; padded by {INTERLEAVE} bytes they would use them all"
            )
    return found


def pages_of(tensor: Any) -> list[int]:
    """The addresses of the pages that a CPU tensor's bytes lie on."""
    start = tensor.data_ptr() // PAGE * PAGE
    return list(range(start, tensor.data_ptr() + tensor.nbytes, PAGE))


def move_pages(tensor: Any, node: int | None) -> list[int]:
    """Move the pages of a CPU tensor to a memory node, before it is pinned: pinned pages stay where they are. With
    None nothing is moved. Returns each page's node, or minus an errno (14, EFAULT: never touched).

    Raises OSError when the kernel allows none of it, CannotSet where there is no such call.
    """
    pages = pages_of(tensor)
    count = len(pages)
    addresses = (ctypes.c_void_p * count)(*pages)
    status = (ctypes.c_int * count)()
    nodes = None if node is None else (ctypes.c_int * count)(*[node] * count)
    system_call(
        "move", ctypes.c_int(0), ctypes.c_ulong(count), addresses, nodes, status, ctypes.c_int(2)
    )
    return list(status)
