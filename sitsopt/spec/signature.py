"""Op schemas: `rms_norm(Tensor x, Tensor? weight, float eps, float offset=0.0) -> Tensor`.

The syntax is the one that PyTorch uses for its own ops, so the same line can register an op there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final


class _Required:
    """The default of an argument that has none."""

    def __repr__(self) -> str:
        return "required"


REQUIRED: Final = _Required()


@dataclass(frozen=True)
class Arg:
    """One argument. `type` is PyTorch's, without aliasing: Tensor, Tensor?, int[], Scalar, ScalarType."""

    name: str
    type: str
    default: object = REQUIRED
    keyword_only: bool = False

    @property
    def required(self) -> bool:
        return self.default is REQUIRED

    @property
    def takes_none(self) -> bool:
        return self.type.endswith("?")

    @property
    def base(self) -> str:
        """The type without `?` and `[]`."""
        return self.type.replace("?", "").replace("[]", "")

    @property
    def is_list(self) -> bool:
        return "[]" in self.type

    @property
    def is_tensor(self) -> bool:
        return self.base == "Tensor"


@dataclass(frozen=True)
class Signature:
    """The arguments and the types of the results of one overload."""

    args: tuple[Arg, ...]
    returns: tuple[str, ...]

    @property
    def positional(self) -> tuple[Arg, ...]:
        return tuple(arg for arg in self.args if not arg.keyword_only)

    def arg(self, name: str) -> Arg | None:
        return next((arg for arg in self.args if arg.name == name), None)

    def __str__(self) -> str:
        shown: list[str] = []
        for arg in self.args:
            if arg.keyword_only and "*" not in shown:
                shown.append("*")
            default = "" if arg.required else f"={arg.default!r}"
            shown.append(f"{arg.type} {arg.name}{default}")
        returns = self.returns[0] if len(self.returns) == 1 else f"({', '.join(self.returns)})"
        return f"({', '.join(shown)}) -> {returns}"


_ALIAS = re.compile(r"\(\w+!?( -> \*)?\)")
_LENGTH = re.compile(r"\[\d+\]")


def parse_signature(text: str) -> Signature:
    """`(ARGS) -> RETURNS`, with or without a name in front. Raises ValueError on anything else."""
    head, arrow, returns = _ALIAS.sub("", text).rpartition(" -> ")
    start = head.find("(")
    if not arrow or start < 0 or not head.endswith(")"):
        raise ValueError(f"not an op schema: {text!r}")
    args: list[Arg] = []
    keyword_only = False
    for part in _split(head[start + 1 : -1]):
        if part == "*":
            keyword_only = True
            continue
        declared, equals, default = part.partition("=")
        kind, _, name = declared.rpartition(" ")
        if not kind or not name.isidentifier():
            raise ValueError(f"not an argument: {part!r} in {text!r}")
        value = _default(default) if equals else REQUIRED
        args.append(Arg(name, _type(kind), value, keyword_only))
    many = returns.startswith("(")
    kinds = tuple(_type(kind) for kind in _split(returns[1:-1] if many else returns))
    return Signature(tuple(args), tuple(kind.partition(" ")[0] for kind in kinds))


def _split(text: str) -> list[str]:
    """The parts between the commas that stand outside brackets and quotes."""
    parts, depth, quoted, start = [], 0, False, 0
    for index, char in enumerate(text):
        if char in "'\"":
            quoted = not quoted
        depth += (char in "[(") - (char in ")]")
        if char == "," and not depth and not quoted:
            parts.append(text[start:index].strip())
            start = index + 1
    return [part for part in [*parts, text[start:].strip()] if part]


def _type(kind: str) -> str:
    return _LENGTH.sub("[]", kind.strip()).replace("SymInt", "int")


_WORDS = {"None": None, "True": True, "False": False}


def _default(text: str) -> object:
    if text in _WORDS:
        return _WORDS[text]
    if text.startswith("["):
        return tuple(_default(part) for part in _split(text[1:-1]))
    if text[:1] in "'\"":
        return text[1:-1]
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return text  # a named constant such as contiguous_format
