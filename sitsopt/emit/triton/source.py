"""A generated Triton kernel: its text, and what a compiler or a launcher must know beside it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from textwrap import dedent, indent

HEADER = "import triton\nimport triton.language as tl"

# How Triton spells a dtype: in a signature, and in kernel text.
POINTED = {
    "f64": "fp64", "f32": "fp32", "f16": "fp16", "bf16": "bf16", "i1": "i1", "i8": "i8",
    "u8": "u8", "i32": "i32", "i64": "i64", "f8e4m3": "fp8e4nv",
}  # fmt: skip
TL = {
    "f64": "tl.float64", "f32": "tl.float32", "f16": "tl.float16", "bf16": "tl.bfloat16",
    "i1": "tl.int1", "i8": "tl.int8", "u8": "tl.uint8", "i32": "tl.int32", "i64": "tl.int64",
    "f8e4m3": "tl.float8e4nv",
}  # fmt: skip
BYTES = {
    "f64": 8, "f32": 4, "f16": 2, "bf16": 2, "i1": 1, "i8": 1, "u8": 1, "i32": 4, "i64": 8,
    "f8e4m3": 1, "i4": 0.5,
}  # fmt: skip
LIMITS = {"i8": 127.0, "f8e4m3": 448.0}  # the largest value of a quantized dtype that is used


@dataclass(frozen=True)
class Param:
    """One run-time argument. aligned: a pointer's bytes, or an integer, are a multiple of 16."""

    name: str
    type: str
    aligned: bool = False


def pointer(name: str, dtype: str) -> Param:
    """An argument that points at elements of a dtype, at an address as allocators give it."""
    return Param(name, "*" + POINTED[dtype], aligned=True)


def integers(*names: str, wide: bool = False, aligned: bool = False) -> tuple[Param, ...]:
    """Integer arguments: sizes and strides."""
    return tuple(Param(name, "i64" if wide else "i32", aligned) for name in names)


def floats(*names: str) -> tuple[Param, ...]:
    """Float arguments."""
    return tuple(Param(name, "fp32") for name in names)


@dataclass(frozen=True)
class Source:
    """One kernel as text. constants: the compile-time arguments, block sizes above all."""

    name: str
    family: str
    text: str
    params: tuple[Param, ...]
    constants: tuple[tuple[str, int], ...] = ()
    warps: int = 4
    stages: int = 2

    def tuned(self, constants: Mapping[str, int], warps: int, stages: int) -> Source:
        """The same text at other block sizes."""
        merged = {**dict(self.constants), **constants}
        return replace(self, constants=tuple(merged.items()), warps=warps, stages=stages)

    def constant(self, name: str) -> int:
        """The value of a compile-time argument."""
        return dict(self.constants)[name]


class Writer:
    """Lines of Python at the depth of the enclosing blocks."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._depth = 0

    def __call__(self, text: str) -> None:
        self._lines.append(indent(dedent(text).strip("\n").rstrip(" "), "    " * self._depth))

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        """Everything written inside stands one step deeper, under `head`."""
        self(head)
        self._depth += 1
        yield
        self._depth -= 1

    def text(self) -> str:
        """What was written."""
        return "\n".join(self._lines).replace("\n@triton.jit", "\n\n\n@triton.jit") + "\n"


@contextmanager
def function(
    write: Writer, name: str, params: tuple[Param, ...], constants: Iterable[str], doc: str
) -> Iterator[None]:
    """The head of one kernel, one argument a line; its body is written inside."""
    names = [f"    {param.name}," for param in params]
    names += [f"    {constant}: tl.constexpr," for constant in constants]
    with write.block("\n".join(["@triton.jit", f"def {name}(", *names, "):"])):
        write(f'"""{doc}"""')
        yield


def next_power(n: int, least: int = 1) -> int:
    """The smallest power of two that is at least n and `least`."""
    return max(1 << max(n - 1, 0).bit_length(), least)
