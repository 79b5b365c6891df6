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
        Isa(
            "avx512_vbmi",
            16,
            (*_AVX512, "avx512_vnni", "avx512_bf16", "avx512vbmi"),
            ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16", "-mavx512vbmi"),
        ),
        Isa(
            "avx512_bf16",
            16,
            (*_AVX512, "avx512_vnni", "avx512_bf16"),
            ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"),
        ),
        Isa("avx512_vnni", 16, (*_AVX512, "avx512_vnni"), ("-march=x86-64-v4", "-mavx512vnni")),
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
class KvAttention:
    """Few query rows against a quantized cache, which is read as it is kept.

    dtype: of the model and of what is not packed. bits: 4 or 8, of packed tiles. kv_heads and layout (the text of
    `graph.kv.layout.Layout`) say where the parts of such a cache lie: they are no part of the text.
    """

    isa: str
    dtype: str
    head_dim: int
    value_dim: int
    bits: int
    kv_heads: int
    layout: str

    family = "kv_attention"

    @property
    def symbol(self) -> str:
        """The one C function the text exports."""
        return f"sits_kv_{self.dtype}_{self.head_dim}_{self.value_dim}_i{self.bits}"


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


SCHEMES = ("int8", "int4", "fp8")


@dataclass(frozen=True)
class Packed:
    """Few rows of activations times quantized weights, laid out as `sitsopt.graph.packed` says.

    scheme: int8, int4 or fp8 (e4m3). group: k's that share a scale, 0 for one scale a row. low: a lowest value
    beside each scale. inputs: `int8` to take activations as 8-bit integers, a scale for every 64 at most; empty
    to take them as they are, or where integers multiply faster, as 15-bit ones.
    """

    isa: str
    dtype: str
    scheme: str
    group: int = 0
    low: bool = False
    inputs: str = ""

    family = "packed"

    @property
    def symbol(self) -> str:
        """The C function that multiplies; the text exports `..._gated`, `..._probe` and `..._unpack` beside it."""
        parts = ["sits_packed", self.dtype, self.scheme] + [str(self.group)] * bool(self.group)
        return "_".join(parts + ["low"] * self.low + [f"x_{self.inputs}"] * bool(self.inputs))


Kernel = Attention | KvAttention | Linear | Packed
