"""Collecting mistakes, so that one run of a check tells all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from .errors import SpecError, did_you_mean, raise_all
from .pytext import PosOf
from .source import Document, PathIn, dotted


class Problems:
    """The mistakes found in one document."""

    def __init__(self, doc: Document) -> None:
        self.doc = doc
        self.errors: list[SpecError] = []

    def add(
        self, path: PathIn, problem: str, expected: str = "", hint: str = "", *, key: bool = False
    ) -> None:
        """A mistake at the value at `path`, or at its key."""
        pos = self.doc.at(path, key=key)
        self.errors.append(SpecError(pos, problem, expected=expected, hint=hint, path=dotted(path)))

    def unknown(
        self, path: PathIn, what: str, name: str, known: Iterable[str], *, key: bool
    ) -> None:
        """A mistake: `name` is none of the known ones."""
        names = list(dict.fromkeys(known))
        if names:
            expected, hint = "one of " + ", ".join(names), did_you_mean(name, names)
            self.add(path, f"`{name}` is no {what}", expected, hint, key=key)
        else:
            self.add(path, f"`{name}` is no {what}: there is none", key=key)

    @contextmanager
    def catch(self, *path: str | int) -> Iterator[None]:
        """Keep the SpecError that the block raises, as one at `path`."""
        try:
            yield
        except SpecError as error:
            error.path = error.path or dotted(path)
            self.errors.append(error)

    def inside(self, path: PathIn, *, key: bool = False, shift: int = 0) -> PosOf:
        """From places in the text at `path` to places in the file; `shift` columns of its first line
        were put there by us."""
        return lambda line, column: self.doc.inside(
            path, line, max(column - (shift if line == 0 else 0), 0), key=key
        )

    def finish(self) -> None:
        """Raise what was found, if anything."""
        raise_all(self.errors)
