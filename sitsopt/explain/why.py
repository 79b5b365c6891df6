"""Why a rule did not fire: one sentence that decides it, then the closest attempt at every place."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from ..spec.errors import Pos, SpecError, did_you_mean
from . import misses
from .data import attempt
from .names import plural
from .story import Story
from .text import as_text, group_lines

MOST = 20  # groups of near misses
MOST_FAR = 3  # of attempts that are further off, where there is nothing nearer


@dataclass
class WhyNot:
    """The answer for one rule; `str()` of it is the text."""

    rule: str
    summary: str
    fired: int
    verdict: str
    attempts: list[misses.Attempt]

    def json(self) -> dict[str, Any]:
        """Plain data, every attempt."""
        return {
            "rule": self.rule,
            "summary": self.summary,
            "fired": self.fired,
            "verdict": self.verdict,
            "missed": [attempt(a) for a in self.attempts],
        }

    def __str__(self) -> str:
        return as_text(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        about = f": {self.summary}" if self.summary else ""
        yield Text.assemble((self.rule, "bold"), about)
        yield Text(self.verdict)
        groups = misses.groups(self.attempts)
        near = [g for g in groups if g.near]
        chosen = (near or groups)[: MOST if near else MOST_FAR]
        for group in chosen:
            yield ""
            yield group_lines(group, name=False)
        rest = len(self.attempts) - sum(len(g.attempts) for g in chosen)
        if rest:
            yield Text(f"\n… and {plural(rest, 'attempt')} further off (--json has all)")


def why_not(story: Story, rule: str) -> WhyNot:
    """Raises SpecError, with the nearest name, for a rule that there is not."""
    if rule not in story.ids:
        known = sorted(story.ids)
        raise SpecError(
            Pos("--why-not"),
            f"there is no rule `{rule}`",
            expected="one of " + ", ".join(known) if known else "",
            hint=did_you_mean(rule, known),
        )
    mine = [a for a in story.attempts if a.miss.rule == rule]
    verdict = _verdict(story, rule, mine)
    return WhyNot(rule, story.rules.get(rule, ""), story.fired(rule), verdict, mine)


def _verdict(story: Story, rule: str, mine: list[misses.Attempt]) -> str:
    fired = story.fired(rule)
    if rule in story.excluded:
        return f"The recipe {story.record.recipe} leaves it out: {story.excluded[rule]}."
    open_places = [a for a in mine if not a.taken_by]
    taken = _taken(mine)
    if fired:
        return f"It fired at {plural(fired, 'site')}." + (taken or _beside(open_places, len(mine)))
    if not story.record.graphs:
        return "No graph was compiled yet."
    if not story.recorded:
        return (
            "It fired nowhere; near misses were not recorded (option `explain: true` keeps them)."
        )
    unchanged = [g for g in story.record.graphs if g.fallback]
    if len(unchanged) == len(story.record.graphs):
        return "No graph was rewritten: " + "; ".join(sorted({g.fallback for g in unchanged})) + "."
    return _never_started(story, rule) or _almost(mine, open_places, taken)


def _beside(open_places: list[misses.Attempt], total: int) -> str:
    if not open_places:
        return " Nowhere else did it start to fit."
    near = sum(a.near for a in open_places)
    return (
        f" {plural(total, 'other place')} started to fit, "
        f"{near or 'none'} of them more than half way."
    )


def _taken(mine: list[misses.Attempt]) -> str:
    """Where the pattern fits but another rule was first."""
    lost = Counter(a.taken_by for a in mine if a.taken_by and a.refused)
    by = ", ".join(f"{rule} ({n})" for rule, n in lost.most_common())
    return (
        f" At {plural(sum(lost.values()), 'place')} its pattern fits, but the nodes went to {by}."
        if lost
        else ""
    )


def _never_started(story: Story, rule: str) -> str:
    """A sentence when no graph gave the rule a place to start; "" otherwise."""
    tried = [(g, g.tried[rule]) for g in story.record.graphs if rule in g.tried]
    if not tried:
        return ""
    if all(t.missing for _, t in tried):
        ops = sorted({op for _, t in tried for op in t.missing})
        where = "no graph has" if len(tried) > 1 else f"{tried[0][0].name} does not have"
        need = f"It fired nowhere: its pattern needs {', '.join(ops)}, which {where}."
        return need + _makers(story, rule, ops)
    return ""


def _makers(story: Story, rule: str, ops: list[str]) -> str:
    """What other rules should have put there first."""
    idle = [r for r in story.ids if r != rule and not story.fired(r)]
    makers = {op: [r for r in story.makes.get(op, ()) if r in idle] for op in ops}
    return "".join(
        f" {op} is what {' and '.join(rules)} would put there, and that fired nowhere either."
        for op, rules in makers.items()
        if rules
    )


def _almost(mine: list[misses.Attempt], open_places: list[misses.Attempt], taken: str) -> str:
    if not mine:
        return "It fired nowhere, and nowhere did more than the first op of its pattern fit."
    if taken and not any(a.near for a in open_places):
        return f"It fired nowhere.{taken}"
    if not open_places:
        by = ", ".join(sorted({a.taken_by for a in mine}))
        return f"It fired nowhere: every place where it started to fit was taken by {by}."
    best = max(open_places, key=lambda a: a.share)
    miss = best.miss
    closest = [a for a in open_places if a.share == best.share]
    fit = (
        "the whole pattern fits"
        if best.share == 1.0
        else f"{miss.matched} of its {miss.of} ops fit"
    )
    stop = f"{miss.reason}: {miss.condition}" if miss.condition else miss.reason
    why = f" ({miss.explanation})" if miss.explanation else ""
    return f"It fired nowhere. It came closest at {plural(len(closest), 'place')}, where {fit}; stopped by {stop}{why}.{taken}"
