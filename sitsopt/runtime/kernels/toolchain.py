"""What this machine compiles with: the C++ compiler, torch's headers and OpenMP, the CPU's instruction set."""

from __future__ import annotations

import functools
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from ...emit.kernel import ISAS, Isa, best_isa


class BuildError(RuntimeError):
    """A kernel cannot be built here; the text says why and what would help."""


@dataclass(frozen=True)
class Compiler:
    """A compiler that answered: where it is and what it calls itself (name, version, target)."""

    path: str
    version: str


def find_compiler() -> Compiler:
    """$CXX if set, else g++, else clang++; raises BuildError with the reason when there is none."""
    asked = os.environ.get("CXX")
    for name in [asked] if asked else ["g++", "clang++"]:
        path = shutil.which(name)
        if path:
            return Compiler(path, _version(path))
    if asked:
        raise BuildError(f"CXX={asked} is not a program; unset CXX or name a C++ compiler")
    raise BuildError("no C++ compiler: neither g++ nor clang++ is on the path (CXX names another)")


@functools.lru_cache(maxsize=8)
def _version(path: str) -> str:
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{path} --version failed: {error}") from error
    if done.returncode:
        raise BuildError(f"{path} --version failed: {done.stderr.strip()[:200]}")
    return done.stdout.splitlines()[0] if done.stdout else path


@functools.lru_cache(maxsize=1)
def cpu_flags() -> frozenset[str]:
    """The CPU's feature flags as Linux names them; empty where the system does not say."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    return frozenset()


def machine_isa() -> Isa:
    """The best instruction set of this CPU that the texts know; SITSOPT_ISA names a lesser one."""
    best = best_isa(cpu_flags()) if platform.machine() in ("x86_64", "AMD64") else ISAS["generic"]
    asked = os.environ.get("SITSOPT_ISA")
    if not asked:
        return best
    if asked not in ISAS:
        raise BuildError(f"SITSOPT_ISA={asked} is unknown; known: {', '.join(ISAS)}")
    if not cpu_flags().issuperset(ISAS[asked].needs):
        raise BuildError(f"SITSOPT_ISA={asked} needs more than this CPU has ({best.name})")
    return ISAS[asked]


@functools.lru_cache(maxsize=1)
def openmp_library() -> Path | None:
    """The OpenMP runtime torch has loaded: kernels share its thread pool. None: kernels run alone."""
    if sys.platform != "linux":
        return None
    try:
        maps = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    loaded = {Path(line.split(maxsplit=5)[5]) for line in maps if line.count("/")}
    ours = Path(torch.__file__).parent
    pools = [p for p in loaded if p.name.startswith(("libgomp", "libiomp5", "libomp"))]
    return min(pools, key=lambda p: (ours not in p.parents, p.name), default=None)


KERNEL_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-ffp-contract=off",  # products and sums fuse where the text says fma, nowhere else
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=default",
    "-Wno-psabi",
)


def kernel_flags(isa: Isa) -> tuple[list[str], list[str]]:
    """Flags for a kernel's text: (compile, link). Linking never sees -ffast-math, which would flush denormals
    to zero in the whole process."""
    pool = openmp_library()
    compile_flags = [*KERNEL_FLAGS, *isa.flags]
    if pool is None:
        return compile_flags, []
    return [*compile_flags, "-fopenmp"], [str(pool), f"-Wl,-rpath,{pool.parent}"]


def torch_flags() -> tuple[list[str], list[str]]:
    """Flags for the unit that registers the ops: (compile, link)."""
    include, library = _torch_folders()
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    flags = ["-std=c++20", "-O2", "-fPIC", f"-D_GLIBCXX_USE_CXX11_ABI={abi}", "-w"]
    flags += [f"-I{path}" for path in include]
    link = [part for path in library for part in (f"-L{path}", f"-Wl,-rpath,{path}")]
    return flags, [*link, "-lc10", "-ltorch_cpu", "-ltorch"]


def _torch_folders() -> tuple[list[str], list[str]]:
    """(headers, libraries). A wheel's are beside the package; for others torch's own helper knows, whose
    import takes half a second."""
    root = Path(torch.__file__).parent
    include = [root / "include", root / "include/torch/csrc/api/include"]
    if all(path.is_dir() for path in (*include, root / "lib")):
        return [str(path) for path in include], [str(root / "lib")]
    from torch.utils import cpp_extension

    return cpp_extension.include_paths(), cpp_extension.library_paths()
