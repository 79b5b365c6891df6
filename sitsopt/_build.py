"""Build step: copy `rules/`, `backends/` and `recipes/` into the wheel as `sitsopt/_data/<kind>`.

An editable install copies nothing: there the folders beside the package are the ones that are read.
"""

from __future__ import annotations

from pathlib import Path

from setuptools.command.build_py import build_py

KINDS = ("rules", "backends", "recipes")


class BuildWithData(build_py):
    """`build_py` that also carries the data folders."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for source in self._data():
            target = Path(self.build_lib) / "sitsopt" / "_data" / source
            self.mkpath(str(target.parent))
            self.copy_file(str(source), str(target))

    def get_source_files(self) -> list[str]:
        """What a source distribution must hold beyond the modules."""
        return [*super().get_source_files(), *map(str, self._data())]

    def _data(self) -> list[Path]:
        found = (path for kind in KINDS for path in Path(kind).rglob("*"))
        return sorted(p for p in found if p.is_file() and "__pycache__" not in p.parts)
