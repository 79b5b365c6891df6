"""A story as text for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from io import StringIO
from itertools import repeat

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..graph.kv.sizes import Cost, cost_of_site
from ..rewrite.record import OneFunction, Record
from .misses import Group
from .names import micros, parts, plural, short, size, where
from .regions import regions_text
from .sites import Spot, Sums, step, sums
from .story import Story

WIDTH = 118
MOST = 12  # groups of near misses
MOST_STEPS = 3
MOST_PLACES = 3


def as_text(renderable: RenderableType, width: int = WIDTH) -> str:
    """What a terminal of this width shows, without colours."""
    console = Console(file=StringIO(), width=width, color_system=None, highlight=False)
    console.print(renderable)
    assert isinstance(console.file, StringIO)
    lines = console.file.getvalue().splitlines()
    return "\n".join(line.rstrip() for line in lines)


def story_parts(story: Story) -> Iterator[RenderableType]:
    """The whole story, part by part."""
    yield _head(story)
    for note in story.notes:
        yield Text(note, style="yellow")
    if not story.record.graphs:
        yield from _effective(story)
        return
    yield ""
    yield _graphs(story)
    for graph in story.record.graphs:
        if graph.fallback:
            yield Text(f"{graph.name} was not rewritten: {graph.fallback}", style="yellow")
        for layers in graph.repeated:
            same = f"{graph.name}: {len(layers)} layers share one piece of code, {where(layers)}"
            yield Text(same, style="dim")
        if graph.one_function is not None:
            yield Text(f"{graph.name}: {one_function(graph.one_function)}", style="dim")
        if graph.repeat_failed:
            yield Text(
                f"{graph.name}: layers compiled one by one: {graph.repeat_failed}", style="dim"
            )
    yield from regions_text(story.record.graphs)
    yield from _applied(story)
    if story.cache is not None:
        yield ""
        yield from map(Text, story.cache.lines())
    yield from _missed(story)
    yield from _effective(story)


def one_function(one: OneFunction) -> str:
    """How a decode step runs on a CPU, in words."""
    times = ", ".join(f"{name} {us / 1e3:.2f} ms" for name, us in one.measured_us.items())
    how = (
        f"one generated function, {one.ops} ops" if one.used else "op by op, no generated function"
    )
    return f"{how}: {one.why}{f' ({times})' if times else ''}"


def _head(story: Story) -> Text:
    record = story.record
    speed = f" ({story.bandwidth_gbs:g} GB/s)" if story.bandwidth_gbs else ""
    return Text.assemble(
        "recipe ", (record.recipe or "?", "bold"), "   target ", (record.target or "?", "bold"), speed,
        *_decoding(record),
    )  # fmt: skip


def _decoding(record: Record) -> Iterator[str]:
    """Which loop the last generate() ran, and what proposed tokens in it."""
    if record.loop:
        yield f"\ndecoding loop: {record.loop}, {record.loop_why}"
    if record.speculation:
        yield f"\nspeculation: {record.speculation}"


def _graphs(story: Story) -> Table:
    table = _table("graph", ">nodes before", ">after", ">rewrites", ">capture", ">rewriting")
    for g in story.record.graphs:
        marks = "".join(f", {word}" for word in ("dynamic", "grad") if getattr(g, word))
        marks += ", from disk" * g.from_disk  # its times are those of the process that compiled it
        table.add_row(
            escape(g.name + marks), str(g.nodes_before), str(g.nodes_after), str(len(g.sites)),
            micros(g.capture_ms * 1e3), micros(g.rewrite_ms * 1e3),
        )  # fmt: skip
    return table


def _applied(story: Story) -> Iterator[RenderableType]:
    count = sum(map(len, story.spots.values()))
    yield ""
    if not count:
        yield Text("No rule fired.", style="bold")
        return
    yield Text(f"{plural(len(story.spots), 'rule')} fired at {plural(count, 'site')}", style="bold")
    table = _table(
        "rule, where", ">sites", "step", ">bytes saved", ">time, alone → fused", "lowered by"
    )
    table.columns[0].min_width = 44
    for name, found in story.spots.items():
        totals = sums(found)
        table.add_row(
            Text("\n  ".join([name, *parts((s.module for s in found), MOST_PLACES)])),
            str(len(found)),
            *("\n".join(map(escape, column)) for column in _by_step(totals, lowered(found))),
        )
    yield table
    for why, names in _reasons(story).items():
        yield Text(f"{why} ({', '.join(names)})", style="dim")
    yield from map(
        _swapped, (name for name in story.spots if name.startswith("weights/")), repeat(story)
    )
    for name, found in story.spots.items():
        yield from (Text(f"{name}: {line}", style="dim") for line in caches(found))
    if story.bandwidth_gbs:
        yield Text(
            "time: predicted from bytes and operations, each op alone → as rewritten", style="dim"
        )


def _swapped(name: str, story: Story) -> Text:
    """What packing weights does to bytes and to values, over all its sites."""
    sites = [spot.first for spot in story.spots[name]]
    before, after = (sum(getattr(s, f"bytes_{w}") or 0 for s in sites) for w in ("before", "after"))
    errors = sorted((s.weight_error, s.place.module) for s in sites if s.weight_error is not None)
    text = f"{name}: {size(before)} a step become {size(after)}"
    if errors:
        worst, where_ = errors[-1]
        text += (
            f"; weights are off by {errors[0][0]:.2%} to {worst:.2%} ({where_}), root mean square"
        )
    return Text(text, style="dim")


def caches(found: Iterable[Spot]) -> Iterator[str]:
    """What a token costs in the caches at these sites; layers that cost the same in one line."""
    same: dict[Cost, list[str]] = {}
    for spot in found:
        one = cost_of_site(spot.first.binding)
        if one is not None:
            same.setdefault(one, []).append(spot.module)
    for one, modules in same.items():
        yield (
            f"{where(modules)}: an old token takes {one.after:g} bytes a layer instead of {one.before:g}; a sequence of "
            f"{one.tokens:,} {size(one.whole_after)} instead of {size(one.whole_before)}"
        )


def _by_step(totals: dict[str, Sums], how: dict[str, str]) -> Iterator[list[str]]:
    """Columns with a line a step: its name, bytes, times, by whom; one line when the steps do not differ."""
    rows = [(name, size(t.bytes_saved), _times(t), how[name]) for name, t in totals.items()]
    if len({row[1:] for row in rows}) == 1:
        rows = [("all" if len(rows) > 1 else rows[0][0], *rows[0][1:])]
    more = len(rows) - MOST_STEPS
    if more > 0:
        rows = [*rows[:MOST_STEPS], (f"… {more} more", "", "", "")]
    return (list(column) for column in zip(*rows, strict=True))


def _times(total: Sums) -> str:
    if total.predicted_us is None or total.unfused_us is None:
        return "?"
    return f"{micros(total.unfused_us)} → {micros(total.predicted_us)}"


def lowered(found: Iterable[Spot]) -> dict[str, str]:
    """By whom, in each step: `cpp`, or `cpp 28, inductor 2`."""
    counts: dict[str, Counter[str]] = {}
    for spot in found:
        for graph, site in spot.graphs.items():
            counts.setdefault(step(graph), Counter())[site.lowered] += 1
    return {
        name: ", ".join(f"{how} {n}" if len(c) > 1 else how for how, n in c.most_common())
        for name, c in counts.items()
    }


def _reasons(story: Story) -> dict[str, list[str]]:
    """Why sites are lowered as they are, each reason once, with the rules that it holds for."""
    said: dict[str, list[str]] = {}
    for name, found in story.spots.items():
        for site in (s for spot in found for s in spot.graphs.values()):
            if site.lowered_why:
                names = said.setdefault(f"{site.lowered}: {site.lowered_why}", [])
                if name not in names:
                    names.append(name)
    return said


def _missed(story: Story) -> Iterator[RenderableType]:
    yield ""
    if not story.recorded:
        yield Text('Near misses were not recorded: options={"explain": True} keeps them.')
        return
    chosen = story.shown[:MOST]
    if chosen:
        yield Text("Near misses, the closest first", style="bold")
        for group in chosen:
            yield group_lines(group)
    else:
        yield Text("No near misses.", style="bold")
    rest = len(story.attempts) - sum(len(g.attempts) for g in chosen)
    if rest:
        yield Text(f"… and {plural(rest, 'attempt')} further off (--json has all)", style="dim")


def group_lines(group: Group, name: bool = True) -> RenderableType:
    """A group of misses: where, what failed and why, expected against found, the model's own line."""
    miss = group.miss
    places = plural(len(group.attempts), "place")
    elsewhere = f"; it fires there in {_some(group.fires_in)}" if group.fires_in else ""
    head = Text.assemble(
        (f"{miss.rule}  " if name else ""), (where(group.modules), "bold"),
        f"  ({places}, {group.fit}, in {_some(group.graphs)}{elsewhere})",
    )  # fmt: skip
    text = [f"{miss.reason}: {miss.condition}" if miss.condition else miss.reason]
    if miss.explanation:
        text[0] += f" — {miss.explanation}"
    if group.difference:
        text.append(group.difference)
    if group.taken_by:
        text.append(f"the node went to {', '.join(group.taken_by)}")
    if miss.place.source:
        text.append(short(miss.place.source))
    body = Padding(Text("\n".join(text)), (0, 0, 0, 4))
    table = Table.grid()
    table.add_row(head)
    table.add_row(body)
    return table


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_STEPS} more" if len(names) > MOST_STEPS else ""
    return ", ".join(names[:MOST_STEPS]) + more


def _effective(story: Story) -> Iterator[RenderableType]:
    if not story.record.effective:
        return
    yield ""
    table = _table("asked for", "got", "because")
    for one in dict.fromkeys(story.record.effective):
        table.add_row(escape(one.asked), escape(one.got), escape(one.reason))
    yield table


def _table(*heads: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for head in heads:
        right = head.startswith(">")
        table.add_column(
            head.lstrip(">"), justify="right" if right else "left", overflow="fold", no_wrap=right
        )
    return table
