"""One C++ function for a run of ops: its members share out what is large, repeat what is small, and meet at barriers.

Large is what reads weights or a cache: `linears` and attention, whose kernels give a member its share. Everything else
of a decode step is a few thousand values. Each member computes these for itself in room of its own, so that nobody
waits; what others must see, one member writes. A barrier stands where something shared is read that was written since
the last one, or written that was read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from math import prod

C_TYPES = {"f32": "float", "bf16": "uint16_t", "i64": "int64_t", "bool": "uint8_t", "u8": "uint8_t"}
BYTES = {"f32": 4, "bf16": 2, "i64": 8, "bool": 1, "u8": 1}
ARGUMENTS = "void** a, char* mine, char* ours, float* x, Control* c, int64_t id, int64_t team"
SPLIT = 4096  # elements from which members share out a store
Index = tuple[str, ...]


@dataclass(frozen=True)
class Value:
    """A tensor in memory. base: a C expression of type `C_TYPES[dtype]*`; sizes and strides in elements; home: what it
    lies in, as far as members share it, or "" for a member's own room."""

    base: str
    dtype: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0
    home: str = ""

    @property
    def count(self) -> int:
        """How many elements it has."""
        return prod(self.sizes)

    def at(self, index: Index) -> str:
        """The element at an index of its own rank."""
        terms = [
            f"{i} * {stride}" if stride != 1 else i
            for i, stride, size in zip(index, self.strides, self.sizes, strict=True)
            if stride and size != 1
        ]
        if self.offset or not terms:
            terms.append(str(self.offset))
        return f"{self.base}[{' + '.join(terms)}]"

    def pointer(self) -> str:
        """Its first element's address."""
        return f"{self.base} + {self.offset}" if self.offset else self.base

    def read(self, index: Index) -> str:
        """The element, as float or int64_t."""
        text = self.at(index)
        return (
            f"up_bf16({text})"
            if self.dtype == "bf16"
            else f"(int64_t){text}"
            if self.dtype == "bool"
            else text
        )

    def reads(self) -> set[str]:
        """What it shares with other members."""
        return {self.home} if self.home else set()


@dataclass(frozen=True)
class Lazy:
    """A tensor that is computed where it is read: `text` gives an element, as float or int64_t, at an index."""

    dtype: str
    sizes: tuple[int, ...]
    text: Callable[[Index], str]
    homes: frozenset[str] = frozenset()
    cost: int = 1  # ops that each reader repeats

    def read(self, index: Index) -> str:
        """The element, rounded to its dtype."""
        text = self.text(index)
        return f"round_bf16({text})" if self.dtype == "bf16" else f"({text})"

    def reads(self) -> set[str]:
        """What it shares with other members."""
        return set(self.homes)


Operand = Value | Lazy


def broadcast(operand: Operand, index: Index) -> Index:
    """An index of a larger tensor as one of `operand`, from the right."""
    rank = len(operand.sizes)
    tail = index[len(index) - rank :] if rank else ()
    return tuple("0" if size == 1 else i for i, size in zip(tail, operand.sizes, strict=True))


def contiguous(sizes: Sequence[int]) -> tuple[int, ...]:
    """The strides of a dense tensor."""
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


class Function:
    """The text of one C function. Its arguments are `a`, pointers to tensors; `mine`, a member's own room; `ours`, room
    that all share; `x`, a member's room for a linear's input; `c`, where members meet; `id` and `team`. It gives 0, or
    1 without memory, or 2 for an index out of range: to all members alike."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lines: list[str] = []
        self.mine = self.ours = 0  # bytes of room taken so far
        self.names = 0
        self.written: set[str] = set()
        self.read: set[str] = set()
        self.depth = 1

    # rooms

    def own(self, dtype: str, sizes: Sequence[int]) -> Value:
        """Room of a member's own, dense."""
        at, self.mine = self.mine, self.mine + _lines(prod(sizes) * BYTES[dtype])
        base = self.name_for(C_TYPES[dtype], f"(mine + {at})")
        return Value(base, dtype, tuple(sizes), contiguous(sizes))

    def common(self, dtype: str, sizes: Sequence[int]) -> Value:
        """Room that all members share, dense."""
        at, self.ours = self.ours, self.ours + _lines(prod(sizes) * BYTES[dtype])
        base = self.name_for(C_TYPES[dtype], f"(ours + {at})")
        return Value(base, dtype, tuple(sizes), contiguous(sizes), home=base)

    def argument(
        self, number: int, dtype: str, sizes: Sequence[int], strides: Sequence[int]
    ) -> Value:
        """The tensor that pointer `number` leads to."""
        base = self.name_for(C_TYPES[dtype], f"a[{number}]")
        return Value(base, dtype, tuple(sizes), tuple(strides), home=base)

    def name_for(self, kind: str, pointer: str) -> str:
        """A local name for a pointer."""
        self.names += 1
        name = f"v{self.names}"
        self.line(f"{kind}* {name} = ({kind}*){pointer};")
        return name

    # text

    def line(self, text: str) -> None:
        self.lines.append("    " * self.depth + text)

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        """A block in braces."""
        self.line(f"{head} {{".strip())
        self.depth += 1
        yield
        self.depth -= 1
        self.line("}")

    # order

    def access(self, reads: Iterable[str] = (), writes: Iterable[str] = ()) -> None:
        """Announce what the next lines share with other members; a barrier first where it is needed."""
        reads, writes = set(reads), set(writes)
        if reads & self.written or writes & (self.written | self.read):
            self.barrier()
        self.read |= reads
        self.written |= writes

    def barrier(self) -> None:
        """All members meet."""
        self.line("BARRIER")
        self.written.clear()
        self.read.clear()

    # steps

    def store(self, source: Operand, target: Value) -> None:
        """Write every element; what is shared, one member alone."""
        self.access(source.reads(), target.reads())
        if target.home and target.count < SPLIT:
            with self.block("if (id == 0)"):
                self._loops(source, target, False)
        else:
            self._loops(source, target, bool(target.home))

    def _loops(self, source: Operand, target: Value, split: bool) -> None:
        source, target = _flat(source, target)
        with self.loops(target.sizes, split) as index:
            place = broadcast(source, index)
            same = isinstance(source, Lazy) and source.dtype == target.dtype
            text = source.text(place) if isinstance(source, Lazy) and same else source.read(place)
            self.line(f"{target.at(index)} = {_stored(text, source.dtype, target.dtype)};")

    def settled(self, source: Operand) -> Value:
        """A value that lies somewhere: a member's own copy of what was to be computed where it is read."""
        if isinstance(source, Value):
            return source
        target = self.own(source.dtype, source.sizes)
        self.store(source, target)
        return target

    def sum(self, source: Operand, keep: bool, scale: float) -> Value:
        """The sum over the last dim times `scale`, in f32."""
        sizes = source.sizes[:-1]
        target = self.own("f32", (*sizes, 1) if keep else sizes)
        self.access(source.reads())
        with self.loops(sizes) as index:
            self.line("float total = 0.0f;")
            self.line("#pragma omp simd reduction(+ : total)")
            head = f"for (int64_t j = 0; j < {source.sizes[-1]}; j++)"
            self.line(f"{head} total += {source.read((*index, 'j'))};")
            place = target.at((*index, "0") if keep else index)
            self.line(f"{place} = total * {number(scale)};")
        return target

    @contextmanager
    def loops(self, sizes: Sequence[int], split: bool = False) -> Iterator[Index]:
        """A loop for each size, in a block of its own; gives the index. What is written lies elsewhere than what is
        read, or at the same index. split: members share out the longest."""
        index: list[str] = []
        inner = max((d for d, size in enumerate(sizes) if size != 1), default=-1)
        longest = max(range(len(sizes)), key=lambda d: sizes[d], default=0) if split else -1
        with ExitStack() as stack:
            stack.enter_context(self.block(""))
            for d, size in enumerate(sizes):
                if size == 1:
                    index.append("0")
                    continue
                self.names += 1
                name = f"i{self.names}"
                first, last = "0", str(size)
                if d == longest:
                    first, last = f"{size} * id / team", f"{size} * (id + 1) / team"
                head = f"for (int64_t {name} = {first}; {name} < {last}; {name}++)"
                if d == inner:
                    self.line("#pragma GCC ivdep")
                stack.enter_context(self.block(head))
                index.append(name)
            yield tuple(index)

    def body(self) -> str:
        """The function's text."""
        return "\n".join(
            [f"static int {self.name}({ARGUMENTS}) {{", *self.lines, "    return 0;", "}"]
        )


def number(value: float | int | bool) -> str:
    """A constant as C."""
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, int):
        return f"{value}LL"
    if value != value:
        return "NAN"
    if value in (float("inf"), float("-inf")):
        return "INFINITY" if value > 0 else "(-INFINITY)"
    return f"{float(value)!r}f" if value >= 0 else f"({float(value)!r}f)"


def _stored(text: str, source: str, target: str) -> str:
    if target == "bf16":
        return f"down_bf16({text})"
    if target == "bool":
        return f"({text}) != 0"
    return f"({C_TYPES[target]})({text})" if source != target else text


def _flat(source: Operand, target: Value) -> tuple[Operand, Value]:
    """Both as one dimension where a dense value is copied into a dense one."""
    if not isinstance(source, Value) or source.sizes != target.sizes:
        return source, target
    if any(v.strides != contiguous(v.sizes) for v in (source, target)):
        return source, target
    count = (target.count,)
    return replace(source, sizes=count, strides=(1,)), replace(target, sizes=count, strides=(1,))


def _lines(count: int) -> int:
    """Bytes rounded up to cache lines."""
    return (count + 63) // 64 * 64
