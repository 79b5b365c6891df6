"""The child of `compile`: one kernel a line from stdin, its facts a line to stdout.

Imports no torch, touches no device: `triton.compile` is told the target, the active driver is never asked.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .module import load

_USAGE = re.compile(r"REG:(\d+).*?STACK:(\d+).*?SHARED:(\d+).*?LOCAL:(\d+)", re.S)


def serve() -> None:
    """One job after another, until stdin ends."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            answer = compile_one(json.loads(line))
        except Exception as error:
            answer = {"error": _words(error)}
        out.write(json.dumps(answer) + "\n")
        out.flush()


def _words(error: Exception) -> str:
    last = traceback.format_exception_only(error)
    cause = error.__cause__ or error.__context__
    if cause is not None:
        last += traceback.format_exception_only(cause)
    return "".join(last).strip()


def compile_one(job: dict[str, Any]) -> dict[str, Any]:
    """Compiles one text for one target; what the hardware is asked for, and the code where wanted."""
    fn = load(job["text"], job["name"])
    target = GPUTarget(*job["target"])
    signature = {name: kind for name, kind, _ in job["params"]}
    signature.update(dict.fromkeys(job["constants"], "constexpr"))
    attrs = {
        (at,): [["tt.divisibility", 16]]
        for at, (_, _, aligned) in enumerate(job["params"])
        if aligned
    }
    source = ASTSource(fn, signature, dict(job["constants"]), attrs)
    options = {"num_warps": job["warps"], "num_stages": job["stages"]}
    made = triton.compile(source, target=target, options=options)
    facts = _nvidia(made) if target.backend == "cuda" else _amd(made)
    facts["shared_bytes"] = made.metadata.shared
    facts["threads"] = made.metadata.num_warps * target.warp_size
    wanted = job.get("show")
    if wanted:
        facts["code"] = _code(made, wanted)
    return facts


def _tool(name: str) -> str:
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    return str(folder / name)


def _nvidia(made: Any) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(made.asm["cubin"])
        cubin.flush()
        told = subprocess.run(
            [_tool("cuobjdump"), "--dump-resource-usage", cubin.name],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
    found = _USAGE.search(told)
    if found is None:
        raise RuntimeError(f"cuobjdump names no registers: {told[-300:]}")
    registers, stack, _, local = map(int, found.groups())
    return {"registers": registers, "spills": stack + local}


def _amd(made: Any) -> dict[str, Any]:
    text = made.asm["amdgcn"]

    def last(key: str) -> int:
        found = re.findall(rf"\.{key}:\s+(\d+)", text)
        return int(found[-1]) if found else 0

    vector = last("vgpr_count")
    if not re.search(r"gfx9[04]", text[:2000]):
        vector += last("agpr_count")
    return {"registers": vector, "spills": 4 * last("vgpr_spill_count")}


def _code(made: Any, wanted: str) -> str:
    if wanted != "sass":
        code = made.asm.get(wanted)
        return code if isinstance(code, str) else f"this target has no {wanted}"
    if "cubin" not in made.asm:
        return made.asm["amdgcn"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(made.asm["cubin"])
        cubin.flush()
        told = subprocess.run([_tool("nvdisasm"), cubin.name], capture_output=True, text=True)
    return told.stdout or told.stderr


if __name__ == "__main__":
    serve()
