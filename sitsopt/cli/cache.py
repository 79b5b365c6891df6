"""`sitsopt cache [info|clear] [PART]`: what is kept on disk between runs, and how to be rid of it."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from sitsopt.runtime.cachedir import root
from sitsopt.spec.errors import did_you_mean

PARTS = {
    "graphs": "compiled calls: rewritten graphs, their guards and what explain says of them",
    "kernels": "CPU kernels, built for this machine",
    "packed": "weights in few bits, found by the weights they were made from",
    "triton": "Triton kernels' texts and what their compiler found",
    "models": "the sample models, unpacked",
    "measurements": "bandwidth and kernel times of this machine",
}
ACTIONS = ("info", "clear")


def cache(action: str = "info", part: str = "", *, as_json: bool = False) -> int:
    """Show or empty the cache folder; 2 for an action or a part that there is not."""
    wrong = _wrong("action", action, ACTIONS) or (part and _wrong("part", part, PARTS))
    if wrong:
        print(
            json.dumps({"errors": [{"problem": wrong}]}) if as_json else wrong, file=_out(as_json)
        )
        return 2
    parts = [part] if part else list(PARTS)
    found = {name: _facts(name) for name in parts}
    if action == "clear":
        for name in parts:
            _remove(name)
    if as_json:
        print(json.dumps({"folder": str(root()), "cleared": action == "clear", "parts": found}))
        return 0
    said = "removed" if action == "clear" else "holds"
    print(f"{root()} {said}")
    for name, facts in found.items():
        damaged = f", {facts['damaged']} damaged (never used)" if facts.get("damaged") else ""
        print(
            f"  {name:13} {facts['files']:6} files {facts['bytes'] / 1e6:9.1f} MB{damaged}   {PARTS[name]}"
        )
    return 0


def _wrong(kind: str, given: str, known: Any) -> str:
    if given in known:
        return ""
    hint = did_you_mean(given, list(known))
    return f"unknown {kind} `{given}`: expected {', '.join(known)}" + (f"; {hint}" if hint else "")


def _out(as_json: bool) -> Any:
    return sys.stdout if as_json else sys.stderr


def _files(part: str) -> list[Path]:
    """The files of one part; measurements lie in the cache folder itself and in a folder of their own."""
    inside = [p for p in (root() / part).rglob("*") if p.is_file() or p.is_symlink()]
    return inside + (sorted(root().glob("*.json")) if part == "measurements" else [])


def _facts(part: str) -> dict[str, int]:
    files = _files(part)
    facts = {"files": len(files), "bytes": sum(p.lstat().st_size for p in files)}
    if part == "graphs":
        from sitsopt.dispatch.disk import read

        facts["damaged"] = sum(read(p, mark=False) is None for p in files)
    return facts


def _remove(part: str) -> None:
    """Whole files only ever go away: a process that runs meanwhile makes anew what it misses."""
    for path in _files(part):
        path.unlink(missing_ok=True)
    if not (root() / part).is_symlink():
        shutil.rmtree(root() / part, ignore_errors=True)
