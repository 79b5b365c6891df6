"""Where in which layer a node stands: a model is one layer many times, and what fits in one of them fits in all.

Nodes are numbered within the numbered module they come from (`model.layers.7`), a *lane*. Two lanes are of one *kind*
while their nodes read alike, number for number: ops, constants, shapes, strides, dtypes, places in the module, which node of
the same lane or of the lane before is read, and which node of the rest of the graph. Every edit moves the lanes that it
touches on to another kind, so that lanes which had the same edits stay of one kind. What an attempt at a node finds
depends on no more than the kinds of its lane and of both neighbours, where it looks no further (`stamp.py` sees to that).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from ..graph.facts import module_path, schema_mutates

LEAST = 5  # lanes with which looking for equal ones can pay


class Ref(NamedTuple):
    """A node as seen from a lane: how many lanes on, and its number there."""

    lane: int
    slot: int


Window = tuple[int, int, int]  # the kinds of the lane before, of a lane, and of the lane behind


@dataclass
class Lane:
    """One layer. `slots` are its nodes: ops in graph order, inputs that it alone reads, then what edits have made."""

    path: str
    slots: list[Node] = field(default_factory=list)


class Lanes:
    """The lanes of a functional graph, neighbours next to each other, with an empty one before and behind every row of
    neighbours. `kinds` below 0 are of lanes that equal nothing."""

    def __init__(self, graph: Graph, params: set[Node], states: set[Node]) -> None:
        self.of: dict[Node, tuple[int, int]] = {}  # lane and number
        self.lanes: list[Lane] = []
        self.kinds: list[int] = []
        self._known: dict[Any, int] = {}
        self._odd = 0
        marks: dict[Node, int] = dict.fromkeys(states, 2)
        marks.update((n, marks.get(n, 0) + 1) for n in params)
        self._fill(graph)
        if len(self.lanes) >= LEAST:
            texts = _Texts(self, marks)
            regular = self._apart(graph)
            for i in range(len(self.lanes)):
                text = texts.of(i) if i in regular else None
                self.kinds.append(self._odd_kind() if text is None else self._intern(text))
        self.windows = [self._window(i) for i in range(len(self.kinds))]
        counts = Counter(self.windows)
        self.repeats = [w is not None and counts[w] > 1 for w in self.windows]

    def __bool__(self) -> bool:
        return any(self.repeats)

    def pairs_seen(self) -> set[int]:
        """Lanes that read as a lane before them does, ops of the lane before included."""
        seen: set[tuple[int, int]] = set()
        again = set()
        for i in range(1, len(self.kinds)):
            pair = self.kinds[i - 1], self.kinds[i]
            if min(pair) >= 0 and pair in seen:
                again.add(i)
            seen.add(pair)
        return again

    def ref(self, value: Any, lane: int) -> Any:
        """A value as seen from a lane: nodes of lanes as `Ref`, everything else as it is; lists are looked into."""
        if isinstance(value, Node):
            found = self.of.get(value)
            return value if found is None else Ref(found[0] - lane, found[1])
        if type(value) is tuple and not value:
            return value
        if isinstance(value, (list, tuple)):
            items = [self.ref(v, lane) for v in value]
            return items if isinstance(value, list) else tuple(items)
        if isinstance(value, dict):
            return {k: self.ref(v, lane) for k, v in value.items()}
        return value

    def node(self, ref: Any, lane: int) -> Any:
        """The opposite of `ref`."""
        kind = type(ref)
        if kind is Ref:
            return self.lanes[lane + ref[0]].slots[ref[1]]
        if kind is list or kind is tuple:
            lanes = self.lanes
            found = [
                lanes[lane + v[0]].slots[v[1]] if type(v) is Ref else self.node(v, lane)
                for v in ref
            ]
            return found if kind is list else tuple(found)
        if kind is dict:
            return {k: self.node(v, lane) for k, v in ref.items()}
        return ref

    def add(self, node: Node, lane: int) -> None:
        """A node that an edit has made."""
        slots = self.lanes[lane].slots
        self.of[node] = lane, len(slots)
        slots.append(node)

    def change(self, lanes: Iterable[int], event: int, origin: int | None) -> None:
        """Something has happened to lanes; `event` tells what, as seen from the lane `origin`."""
        for lane in lanes:
            off = None if origin is None else lane - origin
            if self.kinds[lane] < 0 or off not in (-1, 0, 1):
                self.kinds[lane] = self._odd_kind()
            else:
                self.kinds[lane] = self._intern((self.kinds[lane], event, off))
            for near in (lane - 1, lane, lane + 1):
                self.windows[near] = self._window(near)

    def event(self, text: Any) -> int:
        """The number of an event: equal texts have one."""
        return self._intern(("event", text))

    def _window(self, lane: int) -> Window | None:
        if not 0 < lane < len(self.kinds) - 1:
            return None
        a, b, c = self.kinds[lane - 1 : lane + 2]
        return (a, b, c) if a >= 0 and b >= 0 and c >= 0 else None

    # -- building -----------------------------------------------------------------------------------

    def _intern(self, key: Any) -> int:
        return self._known.setdefault(key, len(self._known))

    def _odd_kind(self) -> int:
        self._odd -= 1
        return self._odd

    def _fill(self, graph: Graph) -> None:
        found: dict[str, Lane] = {}
        inputs: list[Node] = []
        for node in graph.nodes:
            if node.op != "call_function":
                inputs.append(node)
                continue
            if schema_mutates(node.target):
                return  # what an attempt may do then depends on the order of the whole graph
            path = lane_path(module_path(node))
            if path:
                lane = found.get(path)
                if lane is None:
                    lane = found[path] = Lane(path)
                lane.slots.append(node)
        self._arrange(found)
        for node in inputs:
            lanes = {self.of[u][0] if u in self.of else -1 for u in node.users}
            if len(lanes) == 1 and -1 not in lanes:
                self.add(node, lanes.pop())

    def _arrange(self, found: dict[str, Lane]) -> None:
        rows: dict[str, dict[int, Lane]] = defaultdict(dict)
        for path, lane in found.items():
            name, _, number = path.rpartition(".")
            rows[name][int(number)] = lane
        for row in rows.values():
            for index in sorted(row):
                if index - 1 not in row:
                    self.lanes.append(Lane(""))
                self.lanes.append(row[index])
        self.lanes.append(Lane(""))
        for i, lane in enumerate(self.lanes):
            for slot, node in enumerate(lane.slots):
                self.of[node] = i, slot

    def _apart(self, graph: Graph) -> set[int]:
        """Lanes whose ops stand together in the graph, behind those of the lane before, with no other op between."""
        of, ops = self.of, (n for n in graph.nodes if n.op == "call_function")
        runs = [lane for lane, _ in groupby(of[n][0] if n in of else -1 for n in ops)]
        counts = Counter(runs)
        follows = {b: a for a, b in pairwise(runs)}
        good = {i for i, lane in enumerate(self.lanes) if lane.path and counts[i] == 1}
        for i in range(1, len(self.lanes)):
            if self.lanes[i - 1].path and self.lanes[i].path and follows.get(i) != i - 1:
                good -= {i - 1, i}
        return good


class _Texts:
    """The lanes without names: equal texts mean equal code."""

    def __init__(self, lanes: Lanes, marks: dict[Node, int]) -> None:
        self.lanes, self.marks = lanes, marks
        self.values: dict[int, tuple[Any, Any]] = {}  # by id, kept alive
        self.layouts: dict[Any, int] = {}

    def of(self, index: int) -> tuple[Any, ...] | None:
        """None where a lane reads what neither it nor the lane before it has, or a size is symbolic."""
        lane, of = self.lanes.lanes[index], self.lanes.of
        cut = len(lane.path)
        lines: list[Any] = []
        for node in lane.slots:
            value = self.value(node.meta.get("val"))
            args = self.args(node.args, index)
            kwargs = self.args(node.kwargs, index) if node.kwargs else None
            if value is None or args is None or (node.kwargs and kwargs is None):
                return None
            readers: list[Any] = []
            for user in node.users:
                at = of.get(user)
                if at is None:
                    readers.append(id(user.target))
                elif not 0 <= at[0] - index <= 1:
                    return None
            call = node.op == "call_function"
            path = module_path(node)[cut:] if call else ""
            mark = self.marks.get(node, 0), "sits_fold" in node.meta
            target = id(node.target) if call else node.op
            lines.append((target, args, kwargs, value, path, mark, tuple(readers)))
        return tuple(lines)

    def args(self, value: Any, index: int) -> Any:
        """An argument as a hashable text; None where it cannot be told."""
        if isinstance(value, Node):
            at = self.lanes.of.get(value)
            if at is None:
                return id(value)
            off = at[0] - index
            return (off, at[1]) if -1 <= off <= 0 else None
        if isinstance(value, (list, tuple)):
            parts = [self.args(v, index) for v in value]
            return None if None in parts else tuple(parts)
        if isinstance(value, dict):
            return self.args([x for item in value.items() for x in item], index)
        if type(value) is float:
            return value.hex()  # 0.0 and -0.0 are equal, and not the same
        if value is None or isinstance(
            value,
            (bool, int, str, torch.dtype, torch.device, torch.layout, torch.memory_format),
        ):
            return value.__class__, value
        return None

    def value(self, value: Any) -> Any:
        """A fake value by all that an op can see of it; None for what is symbolic or no tensor."""
        known = self.values.get(id(value))
        if known is None:
            known = self.values[id(value)] = value, self._layout(value)
        return known[1]

    def _layout(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            parts = tuple(self.value(v) for v in value)
            return None if None in parts else parts
        if not isinstance(value, torch.Tensor):
            return None
        shape, stride, offset = tuple(value.shape), value.stride(), value.storage_offset()
        if not all(type(n) is int for n in (*shape, *stride, offset)):
            return None
        key = shape, stride, offset, value.dtype, value.device, value.requires_grad
        return self.layouts.setdefault(key, len(self.layouts))


@lru_cache(maxsize=65536)
def lane_path(path: str) -> str:
    """`model.layers.7` for a module somewhere inside it; "" outside of numbered modules."""
    found = re.match(r"(.*?\.\d+)(\.|$)", path)
    return found.group(1) if found else ""
