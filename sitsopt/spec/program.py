"""What `match:` and `replace:` mean once parsed: a straight-line program over named values.

A program is in single-assignment form. Nested calls are flattened, so `aten.mul(aten.silu(g), up)` is two
`Let`s, the inner one named `%1`. Nothing here runs; the matcher and the rewriter read it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .errors import Pos


@dataclass(frozen=True)
class Ref:
    """A value by name: an input, the result of an earlier `Let`, a size variable or a dtype variable."""

    name: str


@dataclass(frozen=True)
class Lit:
    """A literal. Dtypes are written by name (`f32`) and held as `DType`."""

    value: int | float | bool | str | None | DType


@dataclass(frozen=True)
class DType:
    """A dtype by its short name: f64 f32 f16 bf16 f8e4m3 f8e5m2 i64 i32 i16 i8 u8 bool."""

    name: str


@dataclass(frozen=True)
class Seq:
    """A list of terms, such as `[Nq, Nk, Nv]`. A `Ref` to a pack of sizes, written `[*B, H]`, is spread into it."""

    items: tuple[Term, ...]


@dataclass(frozen=True)
class Arith:
    """Arithmetic over constants and sizes: `Hq // Hk`, `-eps`, `D ** -0.5`."""

    op: str  # one of + - * / // % ** neg min max
    args: tuple[Term, ...]


Term = Ref | Lit | Seq | Arith


@dataclass(frozen=True)
class Call:
    """One op applied to terms. `op` is `namespace.name` or `namespace.name.overload`: `aten.mul`,
    `sits.rms_norm`, `aten.add.Tensor`. Without an overload every overload of the packet may match."""

    op: str
    args: tuple[Term, ...]
    kwargs: tuple[tuple[str, Term], ...] = ()
    pos: Pos = field(default=Pos(""), compare=False)


@dataclass(frozen=True)
class Let:
    """`names = call`. Several names take the outputs of an op that returns a tuple or a list; `_` ignores one."""

    names: tuple[str, ...]
    call: Call


@dataclass(frozen=True)
class Program:
    """Lets in the order written, and the names returned (inputs may be returned too)."""

    lets: tuple[Let, ...]
    returns: tuple[str, ...]
    pos: Pos = field(default=Pos(""), compare=False)
    text: str = field(default="", compare=False)
