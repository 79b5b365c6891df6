"""What an attempt found in one layer, done again in the layers that are equal to it.

An attempt at a node is a function of what it looks at. While all that lies in its lane and the two next to it, it ends
alike at the same node of every lane with the same window: where it failed it fails, and where an edit was made the same
edit is made, from the numbers of its nodes. Nothing is matched, checked, typed or predicted again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from ..graph.build import PROVENANCE
from ..graph.facts import source
from ..graph.opview import key_of
from .edit import Edit, behind, move
from .lanes import Lanes, Ref
from .match import Match
from .record import Place, Site
from .view import GraphView

Outcome = Any  # a `Stamp`, or one of:
FAILS = "fails"  # the attempt fails wherever the window is the same
OTHER = "other"  # it has to be made each time


@dataclass
class _Made:
    """A node of the replacement: what to call, with what, and what it gives."""

    name: str
    target: Any
    args: Any
    kwargs: Any
    meta: dict[str, Any]
    key: str


@dataclass
class Stamp:
    """An applied match as seen from its lane."""

    match: Match
    site: Site
    parts: tuple[Any, ...]  # of the match: anchor, bound, nodes, returns, inputs
    made: list[_Made]
    news: list[Any] | None  # None for a claim
    point: Any
    lane: int
    texts: dict[str, str | None]  # of the site's binding; None for the name of a node
    event: int
    touched: tuple[int, ...]

    def image(self, lanes: Lanes, lane: int) -> Match:
        """The match of another lane."""
        anchor, bound, nodes, returns, inputs = (lanes.node(part, lane) for part in self.parts)
        match = self.match
        return Match(match.rule, match.spelling, anchor, bound, nodes, returns, inputs)

    def apply(self, match: Match, view: GraphView, lanes: Lanes, lane: int) -> Edit | None:
        """Make the edit for a match that is the image of this one."""
        if self.news is None:
            return None
        edit = Edit(match, built=len(self.made))
        meta = match.anchor.meta
        origin = {key: meta[key] for key in PROVENANCE if key in meta}
        graph = view.graph
        with graph.inserting_before(behind(lanes.node(self.point, lane))):
            for spec in self.made:
                node = graph.create_node("call_function", spec.target, name=spec.name)
                node.args, node.kwargs = lanes.node(spec.args, lane), lanes.node(spec.kwargs, lane)
                node.meta.update(spec.meta)
                node.meta.update(origin)
                edit.made.append(node)
                lanes.add(node, lane)
                view.by_key[spec.key][node] = None
        move(match, view, edit, lanes.node(self.news, lane), known=True)
        return edit

    def place(self, match: Match, lanes: Lanes, lane: int) -> str | None:
        """The module of the image, where it follows from this one's; else None."""
        mine, path = self.site.place.module, lanes.lanes[self.lane].path
        inside = mine == path or mine.startswith(f"{path}.")
        return lanes.lanes[lane].path + mine[len(path) :] if inside else None

    def note(self, match: Match, module: str, key: str) -> Site:
        """The site of the image. Its bytes and times are those of an equal layer."""
        old, bound = self.site, match.bound
        return Site(
            old.rule, Place(module, source(match.anchor), match.anchor.name), key, old.spelling, old.nodes,
            tuple([n.name for n in match.nodes]), old.bytes_before, old.bytes_after, old.predicted_us, old.unfused_us,
            binding={k: bound[k].name if v is None else v for k, v in self.texts.items()},
        )  # fmt: skip


def noted(
    match: Match, edit: Edit | None, point: Node | None, site: Site, lanes: Lanes
) -> Stamp | None:
    """Tell the lanes of an applied match. Its stamp, where it has one. `point` is the node that the replacement stands
    behind."""
    if match.anchor not in lanes.of:
        _outside(match, edit, lanes)
        return None
    lane = lanes.of[match.anchor][0]
    readers = [reader for _, _, reader in edit.moved] if edit is not None else []
    touched = {lanes.of[n][0] for n in (*match.nodes, *readers, *_changed(edit)) if n in lanes.of}
    touched.add(lane)
    made = _specs(edit, lanes, lane) if edit is not None else []
    parts = match.anchor, match.bound, match.nodes, match.returns, match.inputs
    refs = tuple(lanes.ref(part, lane) for part in parts)
    news = None if edit is None else [_new(old, edit) for old in match.returns]
    plain = edit is None or (edit.built == len(edit.made) and not edit.values and not edit.targets)
    event = lanes.event(_text(match, edit, made, lanes, lane) if plain else id(match))
    lanes.change(touched, event, lane)
    stamp = Stamp(
        match, site, refs, made, lanes.ref(news, lane), lanes.ref(point, lane), lane,
        {k: None if isinstance(match.bound[k], Node) else v for k, v in site.binding.items()},
        event, tuple(sorted(t - lane for t in touched)),
    )  # fmt: skip
    return stamp if plain and _local(stamp) else None


def _new(old: Node | None, edit: Edit) -> Node | None:
    return next((new for before, new in edit.pairs if before is old), None)


def _changed(edit: Edit | None) -> list[Node]:
    """The nodes of before that an edit has changed, beside those of its match and the readers of its results."""
    if edit is None:
        return []
    both = [reader for reader, _, _ in edit.kept]
    return [*both, *edit.died, *(n for n, _ in (*edit.values, *edit.targets))]


def _outside(match: Match, edit: Edit | None, lanes: Lanes) -> None:
    """Tell the lanes of a match outside of them all. Lanes where no more was done than giving equal readers another
    node of the outside stay of one kind."""
    others = {lanes.of[n][0] for n in (*match.nodes, *_changed(edit)) if n in lanes.of}
    lanes.change(others, -1, None)
    readers: dict[int, list[Any]] = {}
    for old, new, reader in edit.moved if edit is not None else ():
        if reader in lanes.of:
            lane, slot = lanes.of[reader]
            readers.setdefault(lane, []).append((slot, lanes.ref(old, lane), lanes.ref(new, lane)))
    for lane, text in readers.items():
        lanes.change([lane], lanes.event((match.rule.id, tuple(text))), lane)


def _specs(edit: Edit, lanes: Lanes, lane: int) -> list[_Made]:
    found = []
    for node in edit.made:
        lanes.add(node, lane)
        meta = {k: v for k, v in node.meta.items() if k in ("val", "sits_fold")}
        args, kwargs = lanes.ref(tuple(node.args), lane), lanes.ref(dict(node.kwargs), lane)
        name = node.graph._target_to_str(node.target)
        found.append(_Made(name, node.target, args, kwargs, meta, key_of(node)))
    return found


def _text(
    match: Match, edit: Edit | None, made: list[_Made], lanes: Lanes, lane: int
) -> tuple[Any, ...]:
    """All that an event changes, as seen from its lane."""
    taken = tuple(lanes.ref(n, lane) for n in match.nodes)
    if edit is None:
        return match.rule.id, match.spelling, taken
    nodes = (
        *(n for old, new, reader in edit.moved for n in (old, new, reader)),
        *(reader for reader, _, _ in edit.kept), None, *edit.died, None,
        *(n for pair in edit.pairs for n in pair),
    )  # fmt: skip
    calls = tuple((id(m.target), repr(m.args), repr(m.kwargs)) for m in made)
    return match.rule.id, match.spelling, taken, calls, tuple(lanes.ref(n, lane) for n in nodes)


def _local(stamp: Stamp) -> bool:
    """Whether all that the match takes lies in its lane and the one before, and all that is read near by."""
    _, bound, nodes, returns, inputs = stamp.parts
    if not all(type(n) is Ref and n.lane in (-1, 0) for n in nodes):
        return False
    if stamp.news is not None and not (type(stamp.point) is Ref and stamp.point.lane in (-1, 0)):
        return False
    near = [bound, returns, inputs, stamp.news, *((m.args, m.kwargs) for m in stamp.made)]
    return all(r.lane in (-1, 0) for part in near for r in _refs(part))


def _refs(value: Any) -> list[Ref]:
    if type(value) is Ref:
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [ref for v in value for ref in _refs(v)]
    return []


def stays_near(view: GraphView, lanes: Lanes, lane: int) -> bool:
    """Whether an attempt has looked no further than the next lanes, and asked for readers no further than its own."""
    seen, asked, of = view.seen or (), view.asked or (), lanes.of
    return all(n in of and -1 <= of[n][0] - lane <= 0 for n in asked) and all(
        -1 <= of[n][0] - lane <= 1 for n in seen if n in of
    )
