"""The one error that bad input gets: file, line, column, what is wrong, what was expected, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Pos:
    """A place in a file; lines and columns count from 1."""

    file: str
    line: int = 1
    column: int = 1

    def shifted(self, line: int, column: int) -> Pos:
        """The place `line` lines below and `column` columns right of this one (both from 0)."""
        return Pos(self.file, self.line + line, self.column + column if line == 0 else column + 1)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


class SpecError(ValueError):
    """One mistake in a rule, a recipe, a target or an option.

    Attributes: pos (where), problem (what is wrong), expected (what may stand there), hint (what to
    do), path (the dotted place inside the file, such as `rules[0].eps`).
    """

    def __init__(
        self, pos: Pos, problem: str, *, expected: str = "", hint: str = "", path: str = ""
    ) -> None:
        self.pos, self.problem, self.expected, self.hint, self.path = (
            pos,
            problem,
            expected,
            hint,
            path,
        )
        super().__init__(str(self))

    @property
    def line(self) -> int:
        return self.pos.line

    @property
    def column(self) -> int:
        return self.pos.column

    def __str__(self) -> str:
        where = f" (at {self.path})" if self.path else ""
        lines = [f"{self.pos}: {self.problem}{where}"]
        if self.expected:
            lines.append(f"  expected: {self.expected}")
        if self.hint:
            lines.append(f"  hint: {self.hint}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (self.pos, self.problem, self.expected, self.hint, self.path)

    def as_dict(self) -> dict[str, object]:
        return {
            "file": self.pos.file, "line": self.pos.line, "column": self.pos.column,
            "problem": self.problem, "expected": self.expected, "hint": self.hint, "path": self.path,
        }  # fmt: skip


def _rebuild(pos: Pos, problem: str, expected: str, hint: str, path: str) -> SpecError:
    return SpecError(pos, problem, expected=expected, hint=hint, path=path)


class SpecErrors(SpecError):
    """Several mistakes found in one go, in the order of the file. As one error it stands for the first."""

    def __init__(self, errors: Iterable[SpecError]) -> None:
        flat = [one for error in errors for one in getattr(error, "errors", [error])]
        self.errors = sorted(
            flat, key=lambda error: (error.pos.file, error.pos.line, error.pos.column)
        )
        first = self.errors[0]
        super().__init__(
            first.pos, first.problem, expected=first.expected, hint=first.hint, path=first.path
        )

    def __reduce__(self) -> tuple[object, ...]:
        return SpecErrors, (self.errors,)

    def __str__(self) -> str:
        return "\n".join(str(error) for error in self.errors)


def raise_all(errors: list[SpecError]) -> None:
    """Raise the one error, or all of them as SpecErrors; nothing when there is none."""
    if errors:
        raise errors[0] if len(errors) == 1 else SpecErrors(errors)


def nearest(name: str, names: Iterable[str]) -> str:
    """The known name closest to `name`, or an empty string when nothing is close."""
    close = _close(name, names)
    return close[0] if close else ""


def did_you_mean(name: str, names: Iterable[str], *, ties: bool = False) -> str:
    """A hint naming the nearest known name, or an empty string. `ties`: with it, every other name that is
    one letter away too."""
    close = _close(name, names)[: 3 if ties else 1]
    return f"did you mean {' or '.join(f'`{one}`' for one in close)}?" if close else ""


def _close(name: str, names: Iterable[str]) -> list[str]:
    """Every name one letter away, else the single most similar one."""
    known = sorted(set(names) - {name})
    one_letter = [other for other in known if _one_letter_off(name, other)]
    return one_letter or difflib.get_close_matches(name, known, n=1, cutoff=0.6)


def _one_letter_off(one: str, other: str) -> bool:
    """Whether one letter dropped, added, changed or swapped with its neighbour tells the two apart."""
    if len(one) > len(other):
        one, other = other, one
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))
    if len(one) < len(other):
        return len(one) + 1 == len(other) and len(one) > 1 and one[same:] == other[same + 1 :]
    swapped = one[:same] + one[same : same + 2][::-1] + one[same + 2 :]
    return len(one) > 1 and (swapped == other or one[same + 1 :] == other[same + 1 :])
