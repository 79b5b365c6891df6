"""What a kernel is, apart from any text: the facts a generator needs, as frozen data that can be a cache key."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

BYTES = {"f32": 4, "f16": 2, "bf16": 2}
ACTIVATIONS = ("silu", "gelu_tanh")


@dataclass(frozen=True)
class Isa:
    """An instruction set as the C++ text sees it.

    lanes: f32 values a vector holds. needs: flags of /proc/cpuinfo that must all be there.
    flags: what the compiler is told; explicit rather than `native`, so that a cache shared by
    unlike machines stays right.
    """

    name: str
    lanes: int
    needs: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()


_AVX2 = ("avx2", "fma", "f16c", "bmi2")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")

# Best first. Levels v3 and v4: x86-64 psABI, "micro-architecture levels".
ISAS = {
    isa.name: isa
    for isa in (
        Isa("avx512_bf16", 16, (*_AVX512, "avx512_bf16"), ("-march=x86-64-v4", "-mavx512bf16")),
        Isa("avx512", 16, _AVX512, ("-march=x86-64-v4",)),
        Isa("avx2", 8, _AVX2, ("-march=x86-64-v3",)),
        Isa("generic", 4),
    )
}


def best_isa(cpu_flags: Iterable[str]) -> Isa:
    """The widest instruction set whose needs the CPU meets; `generic` on anything unknown."""
    have = set(cpu_flags)
    return next(isa for isa in ISAS.values() if have.issuperset(isa.needs))


@dataclass(frozen=True)
class Attention:
    """Few query rows against a long key/value cache, read once for a whole group of query heads.

    dtype: of q, k, v and the output. head_dim, value_dim: last dims of q and k, and of v.
    """

    isa: str
    dtype: str
    head_dim: int
    value_dim: int

    family = "attention"

    @property
    def symbol(self) -> str:
        """The one C function the text exports."""
        return f"sits_attention_{self.dtype}_{self.head_dim}_{self.value_dim}"


@dataclass(frozen=True)
class Linear:
    """Few rows of activations times row-major weights, several weights in one parallel region."""

    isa: str
    dtype: str

    family = "linear"

    @property
    def symbol(self) -> str:
        """The C function that multiplies; the text exports `..._gated` and `..._probe` beside it."""
        return f"sits_linear_{self.dtype}"


Kernel = Attention | Linear
