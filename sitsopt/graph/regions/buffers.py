"""Static buffers: values take turns in one where the next is written only after everybody has read the last.

After means: on the same stream, or through events. On several streams the order in which kernels are started says
nothing about which ends first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .plan import BEGIN, Event, Slot, Start


@dataclass
class _Slot:
    bytes: int
    values: list[str]
    busy: int  # everybody who writes or reads it so far, a bit each
    open: bool = True


def share(
    order: Sequence[Start],
    events: Sequence[Event],
    sizes: Mapping[str, int],
    readers: Mapping[str, Sequence[str]],
    lasting: set[str],
) -> list[Slot]:
    """Slots for the values of `sizes` (bytes by the node that makes them). readers: who reads each; lasting: values
    that are read after the region, whose buffer nobody else gets."""
    bit = {start.node: 1 << i for i, start in enumerate(order)}
    done = happened(order, events)
    slots: list[_Slot] = []
    for start in order:
        size = sizes.get(start.node)
        if not size:
            continue
        free = [s for s in slots if s.open and not s.busy & ~done[start.node]]
        slot = _best(free, size)
        if slot is None:
            slot = _Slot(size, [], 0)
            slots.append(slot)
        slot.bytes = max(slot.bytes, size)
        slot.values.append(start.node)
        slot.busy = bit[start.node]
        for reader in readers.get(start.node, ()):
            slot.busy |= bit[reader]
        slot.open = start.node not in lasting
    return [Slot(s.bytes, tuple(s.values)) for s in slots]


def _best(free: Sequence[_Slot], size: int) -> _Slot | None:
    """The smallest slot that is large enough, else the largest one, to grow."""
    fitting = [s for s in free if s.bytes >= size]
    if fitting:
        return min(fitting, key=lambda s: s.bytes)
    return max(free, key=lambda s: s.bytes, default=None)


def happened(order: Sequence[Start], events: Sequence[Event]) -> dict[str, int]:
    """Which nodes are sure to have ended when each begins, a bit each by place in `order`."""
    after = {event.name: event.after for event in events}
    bit = {start.node: 1 << i for i, start in enumerate(order)}
    last: dict[int, int] = {}
    done: dict[str, int] = {}
    for start in order:
        mask = last.get(start.stream, 0)
        for name in start.waits:
            if after[name] != BEGIN:
                mask |= done[after[name]] | bit[after[name]]
        done[start.node] = mask
        last[start.stream] = mask | bit[start.node]
    return done
