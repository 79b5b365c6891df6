"""Steps of a region that kernels do: products with weights, attention, and a layer's own function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..kernel import Attention, Kernel, KvAttention, Linear, Packed
from .region import ARGUMENTS, BYTES, C_TYPES, Function, Value

FLOAT_MASKS = {"f32": 2, "bf16": 3}
MASKS = {"bool": 1, **FLOAT_MASKS}


@dataclass
class Unit:
    """What the functions of a region share: which kernel functions they call, and how large a member's room for a
    linear's input must be."""

    pointers: dict[tuple[Kernel, str], int] = field(default_factory=dict)
    inputs: set[tuple[Kernel, int, int]] = field(default_factory=set)  # kernel, rows, k
    floats: int = 0  # of a product by columns, in that room
    functions: list[Function] = field(default_factory=list)

    def pointer(self, kernel: Kernel, suffix: str) -> str:
        """A kernel's function as C."""
        return f"kernels[{self.pointers.setdefault((kernel, suffix), len(self.pointers))}]"


@dataclass(frozen=True)
class Product:
    """One weight of a linear: [n, k] row by row, or packed in units of 16 rows of `lead` bytes."""

    weight: Value
    bias: Value | None
    out: Value
    n: int
    lead: int


def linear(
    f: Function, unit: Unit, kernel: Linear | Packed, x: Value, products: Sequence[Product]
) -> None:
    """Products of the rows of x [m, k], whose rows are dense, with each weight; members share out their rows."""
    m, k = x.sizes
    part = unit.pointer(kernel, "part")
    unit.inputs.add((kernel, m, k))
    operands = [v for p in products for v in (p.weight, p.bias) if v is not None]
    f.access({h for v in (x, *operands) for h in v.reads()}, {p.out.home for p in products})
    with f.block(""):
        rows = ", ".join(_product(p) for p in products)
        f.line(f"SitsWeight w[] = {{{rows}}};")
        lead = x.strides[0] if m > 1 else k
        f.line(f"SitsLinear l = {{{x.pointer()}, {m}, {k}, {lead}, w, {len(products)}, 1, 0}};")
        f.line(f"((LinearPart){part})(&l, x, id, team);")


def _product(p: Product) -> str:
    bias = p.bias.pointer() if p.bias else "nullptr"
    return f"{{{p.weight.pointer()}, {bias}, {p.out.pointer()}, {p.n}, {p.lead}, {p.n}}}"


def columns(
    f: Function, unit: Unit, x: Value, weight: Value, bias: Value | None, out: Value
) -> None:
    """A product of the rows of x [m, k] with a weight [n, k] that lies column by column: members share out the n's."""
    (m, k), n = x.sizes, weight.sizes[0]
    unit.floats = max(unit.floats, k + n)
    f.access(x.reads() | weight.reads() | (bias.reads() if bias else set()), {out.home})
    kind = C_TYPES[x.dtype]
    lead = x.strides[0] if m > 1 else k
    to_bias = bias.pointer() if bias else f"(const {kind}*)nullptr"
    f.line(
        f"column_part<{kind}>({x.pointer()}, {m}, {k}, {lead}, {weight.pointer()}, {weight.strides[1]}, "
        f"{to_bias}, {out.pointer()}, {n}, x, id, team);"
    )


def attention(
    f: Function,
    unit: Unit,
    kernel: Attention,
    operands: tuple[Value, Value, Value, Value | None, Value | None],
    out: Value,
    numbers: dict[str, float | int],
) -> None:
    """Attention of q [B, Hq, T, D] over k, v [B, Hk, S, D]; operands: q, k, v, a mask that broadcasts or None, sinks as
    f32 or None; numbers: scale, softcap, causal, safe. out: [B, Hq, T, Dv]."""
    q, k, v, mask, sinks = operands
    used = [o for o in operands if o is not None]
    f.names += 1
    name = f"s{f.names}"
    f.line(f"SitsAttention {name} = {{}};")
    for key, value in _fields(q, k, v, mask, sinks, out, numbers).items():
        f.line(f"{name}.{key} = {value};")
    f.access(mask.reads() if mask else (), {"opened"})
    with f.block("if (id == 0)"):
        f.line(f"c->opened = ((AttentionOpen){unit.pointer(kernel, 'open')})(&{name}, team);")
    f.access({h for o in used for h in o.reads()} | {"opened"}, {out.home})
    f.line("if (!c->opened) return 1;")
    f.line(f"((AttentionPart){unit.pointer(kernel, 'part')})(&{name}, c->opened, id, team);")
    f.barrier()
    f.access({"opened"}, {out.home})
    f.line(f"((AttentionPart){unit.pointer(kernel, 'join')})(&{name}, c->opened, id, team);")
    if mask is not None and mask.dtype in FLOAT_MASKS:
        f.barrier()
        f.access({h for o in used for h in o.reads()} | {"opened"}, {out.home})
        with f.block("if (id == 0)"):
            f.line(f"((AttentionClose){unit.pointer(kernel, 'close')})(&{name}, c->opened);")


@dataclass(frozen=True)
class Cache:
    """A packed cache. state [batch, bytes of a row], u8; length: an i64 of no dims; at: where the parts of a row start, in
    the order of `attention_kv.PARTS`; then how many tokens or tiles, as in `SitsKv`."""

    state: Value
    length: Value
    at: Sequence[int]
    ring: int
    old: int
    pool: int
    sinks: int
    tiles: int
    rate: int


def kv_attention(
    f: Function,
    unit: Unit,
    kernel: KvAttention,
    operands: tuple[Value, Value, Value, Value, Value | None],
    cache: Cache,
    out: Value,
    numbers: dict[str, float | int],
) -> None:
    """Store k, v [B, Hk, T, D] behind the tokens of a packed cache, and attend q [B, Hq, T, D]; operands: q, k, v, a mask
    [.., S], sinks as f32 or None. There is room, and what gets old was packed before."""
    q, k, v, mask, sinks = operands
    f.names += 1
    name = f"s{f.names}"
    f.line(f"SitsKv {name} = {{}};")
    fields = _fields(q, None, None, mask, sinks, out, numbers)
    fields.update(kv_heads=k.sizes[1], keys=mask.sizes[-1])
    for key, value in fields.items():
        f.line(f"{name}.a.{key} = {value};")
    for key in ("ring", "old", "pool", "sinks", "tiles", "rate"):
        f.line(f"{name}.{key} = {getattr(cache, key)};")
    f.line(f"{name}.state = {cache.state.pointer()}, {name}.row_bytes = {cache.state.strides[0]};")
    for i, at in enumerate(cache.at):
        f.line(f"{name}.at[{i}] = {at};")
    if cache.rate:
        _rate_room(f, name, q, k, cache.tiles)
    homes = {cache.state.home, cache.length.home}
    given = {h for o in (q, k, v, mask, sinks) if o is not None for h in o.reads()}
    f.access(given, {*homes, "opened"})
    with f.block("if (id == 0)"):
        for part, new in ((1, k), (2, v)):
            _ring_store(f, new, cache, cache.at[part])
        f.line(f"{cache.length.at(())} += {k.sizes[2]};")
        _counts(f, name, cache)
        f.line(f"c->opened = ((KvOpen){unit.pointer(kernel, 'open')})(&{name}, team);")
    f.access(given | homes | {"opened"}, {out.home})
    f.line("if (!c->opened) return 1;")
    _counts(f, name, cache)
    f.line(f"((AttentionPart){unit.pointer(kernel, 'all_part')})(&{name}.a, c->opened, id, team);")
    f.barrier()
    f.access({"opened"}, {out.home})
    f.line(f"((AttentionPart){unit.pointer(kernel, 'all_join')})(&{name}.a, c->opened, id, team);")
    f.barrier()
    f.access({"opened"}, {cache.state.home, out.home})
    with f.block("if (id == 0)"):
        f.line(f"((KvClose){unit.pointer(kernel, 'close')})(&{name}, c->opened);")


def _counts(f: Function, name: str, cache: Cache) -> None:
    f.line(f"{name}.total = {cache.length.at(())};")
    f.line(f"{name}.committed = *(int64_t*)({cache.state.pointer()} + {cache.at[0]});")


def _ring_store(f: Function, new: Value, cache: Cache, at: int) -> None:
    size = BYTES[new.dtype]
    sizes = ", ".join(str(n) for n in new.sizes[:3])
    strides = ", ".join(str(n * size) for n in new.strides[:3])
    with f.block(""):
        f.line(f"int64_t sizes[] = {{{sizes}}}, strides[] = {{{strides}}};")
        f.line(
            f"ring_store((const char*)({new.pointer()}), sizes, strides, {new.sizes[3] * size}, "
            f"(char*)({cache.state.pointer()}) + {at}, {cache.state.strides[0]}, {cache.ring}, {cache.length.at(())});"
        )


def _rate_room(f: Function, name: str, q: Value, k: Value, tiles: int) -> None:
    """Where a step notes what each tile got: [pairs][tiles][rows] twice, [pairs][rows] twice."""
    pairs = q.sizes[0] * k.sizes[1]
    rows = q.sizes[2] * (q.sizes[1] // k.sizes[1])
    room = f.common("f32", (2 * pairs * (tiles + 1) * rows,)).base
    f.line(f"{name}.peak = {room}, {name}.part = {room} + {pairs * tiles * rows};")
    f.line(f"{name}.base = {room} + {2 * pairs * tiles * rows};")
    f.line(f"{name}.sum = {name}.base + {pairs * rows};")


def _fields(
    q: Value,
    k: Value | None,
    v: Value | None,
    mask: Value | None,
    sinks: Value | None,
    out: Value,
    numbers: dict[str, float | int],
) -> dict[str, str | int | float]:
    found: dict[str, str | int | float] = {}
    for name, value in (("q", q), ("k", k), ("v", v), ("out", out)):
        if value is None:
            continue
        found[name] = value.pointer()
        found.update({f"{name}_stride[{d}]": value.strides[d] for d in range(3)})
    batch, heads, rows, _ = q.sizes
    found.update(batch=batch, heads=heads, rows=rows)
    if k is not None:
        found.update(kv_heads=k.sizes[1], keys=k.sizes[2])
    found.update(scale=f"{float(numbers['scale'])!r}f", softcap=f"{float(numbers['softcap'])!r}f")
    found.update(causal=int(numbers["causal"]), safe=int(numbers["safe"]), threads="(int32_t)team")
    if sinks is not None:
        found["sinks"] = sinks.pointer()
    if mask is not None:
        found.update(mask=mask.pointer(), mask_kind=MASKS[mask.dtype])
        missing = 4 - len(mask.sizes)
        for d, (size, stride) in enumerate(zip(mask.sizes, mask.strides, strict=True)):
            found[f"mask_stride[{missing + d}]"] = stride if size != 1 else 0
    return found


def call(
    f: Function, callee: Function, arguments: Sequence[Value], results: Sequence[Value]
) -> None:
    """A layer's function over these tensors. It leaves nothing that has to be waited for."""
    if f.read or f.written:
        f.barrier()
    pointers = ", ".join(f"(void*)({v.pointer()})" for v in (*arguments, *results))
    with f.block(""):
        f.line(f"void* b[] = {{{pointers}}};")
        rooms = "mine + MAIN_MINE, ours + MAIN_OURS"
        f.line(f"int failed = {callee.name}(b, {rooms}, x, c, id, team);")
        f.line("if (failed) return failed;")


def within(f: Function, index: str, size: int) -> None:
    """All members give up where an index is out of range."""
    f.line(f"if ((uint64_t)({index}) >= {size}) return 2;")


__all__ = [
    "ARGUMENTS",
    "Cache",
    "Product",
    "Unit",
    "attention",
    "call",
    "columns",
    "kv_attention",
    "linear",
    "within",
]
