"""What a line of `inputs` says: `T[*B, H]`, `Param[N, K]`, `State T[B, S]`, `optional const float = 0.0`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, NoReturn

from .dtypes import DTYPES
from .errors import Pos, SpecError, did_you_mean
from .notation import RESERVED
from .program import DType
from .pytext import PosOf
from .yamltree import compose, plain

CONST_TYPES = ("float", "int", "bool", "str", "dtype", "ints")
ROLES = {"Param": "param", "State": "state"}
_EXPECTED = (
    "`T[*B, H]`, `f32[N]`, `[N, K]`, `Tensor`, `Param[N, K]`, `State T[N]`, `const float`,"
    " each after `optional` if it may be absent"
)


@dataclass(frozen=True)
class Dim:
    """One dimension: a size variable, a number, or a pack of any number of dimensions (`*B`)."""

    name: str = ""
    size: int | None = None
    pack: bool = False

    def __str__(self) -> str:
        return str(self.size) if self.size is not None else "*" * self.pack + self.name


@dataclass(frozen=True)
class Input:
    """One input of a rule.

    kind: tensor, param (a parameter or a constant: may be folded), state (the replacement may write
    it), const. dtype: a short name, or a dtype variable (`T`), or None for any. dims: None for any.
    const_type and default belong to consts; a default makes a const optional.
    """

    name: str
    kind: str
    text: str
    pos: Pos = field(compare=False)
    dtype: str | None = None
    dims: tuple[Dim, ...] | None = None
    optional: bool = False
    const_type: str | None = None
    default: Any = None

    @property
    def is_tensor(self) -> bool:
        return self.kind != "const"

    @property
    def dtype_var(self) -> str | None:
        """The dtype variable, if the dtype is one."""
        return self.dtype if self.dtype not in DTYPES else None

    @property
    def sizes(self) -> list[str]:
        """The size variables among the dims."""
        return [dim.name for dim in self.dims or () if dim.name and not dim.pack]

    @property
    def packs(self) -> list[str]:
        return [dim.name for dim in self.dims or () if dim.pack]


def parse_input(name: str, text: str, pos_of: PosOf, name_pos: Pos) -> Input:
    """The input called `name`. `pos_of` maps a place in `text` to the file; raises SpecError."""
    return _Reader(name, text, pos_of, name_pos).input()


def const_value(kind: str, value: Any) -> Any:
    """A plain value as a constant of a type. Raises ValueError, naming what may stand there."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind == "float" and number:
        return float(value)
    if kind == "int" and number and isinstance(value, int):
        return value
    if (kind == "bool" and isinstance(value, bool)) or (kind == "str" and isinstance(value, str)):
        return value
    if kind == "dtype" and value in DTYPES:
        return DType(value)
    if kind == "ints" and isinstance(value, list) and all(type(one) is int for one in value):
        return tuple(value)
    raise ValueError(_KINDS[kind])


_KINDS = {
    "float": "a number", "int": "a whole number", "bool": "true or false", "str": "text",
    "dtype": "a dtype: " + ", ".join(DTYPES), "ints": "a list of whole numbers",
}  # fmt: skip
_TYPED = re.compile(r"(?P<dtype>\w*)\s*\[(?P<dims>[^\[\]]*)\]")
_VARIABLE = re.compile(r"[A-Z]\w*")


class _Reader:
    def __init__(self, name: str, text: str, pos_of: PosOf, name_pos: Pos) -> None:
        self.name, self.text, self.pos_of, self.name_pos = name, text, pos_of, name_pos
        self.at = 0  # how much of the text is read

    def input(self) -> Input:
        self._check_name()
        optional = self._word("optional")
        if self._word("const"):
            return self._const(optional)
        kind = "tensor"
        for word, role in ROLES.items():
            if self._word(word):
                kind = role
        dtype, dims = self._type(kind)
        return Input(self.name, kind, self.text, self.name_pos, dtype, dims, optional)

    def _check_name(self) -> None:
        if not self.name.isidentifier():
            raise SpecError(
                self.name_pos, f"`{self.name}` is no name", expected="letters, digits, `_`"
            )
        if self.name in RESERVED:
            raise SpecError(
                self.name_pos, f"`{self.name}` has a meaning of its own", expected="another name"
            )

    def _word(self, word: str) -> bool:
        found = re.compile(rf"\s*{word}(?![\w])").match(self.text, self.at)
        if found:
            self.at = found.end()
        return bool(found)

    def _rest(self) -> str:
        rest = self.text[self.at :]
        self.at += len(rest) - len(rest.lstrip())
        return rest.strip()

    def _refuse(
        self, problem: str, expected: str, hint: str = "", at: int | None = None
    ) -> NoReturn:
        pos = self.pos_of(0, self.at if at is None else at)
        raise SpecError(pos, problem, expected=expected, hint=hint)

    def _const(self, optional: bool) -> Input:
        rest = self._rest()
        kind, equals, default = (part.strip() for part in rest.partition("="))
        if kind not in CONST_TYPES:
            self._refuse(
                f"`{kind}` is no type of constant", "one of " + ", ".join(CONST_TYPES),
                did_you_mean(kind, CONST_TYPES),
            )  # fmt: skip
        if optional != bool(equals):
            self._refuse(
                "an optional constant says what its absence means"
                if optional else "only an optional constant has a default",
                f"`optional const {kind} = VALUE`",
            )  # fmt: skip
        value = self._default(kind, default) if optional else None
        return Input(
            self.name, "const", self.text, self.name_pos,
            optional=optional, const_type=kind, default=value,
        )  # fmt: skip

    def _default(self, kind: str, text: str) -> Any:
        at = self.text.rindex(text) if text else len(self.text)
        try:
            return const_value(kind, plain(compose(text, "")))
        except SpecError:
            self._refuse(f"`{text}` is no value", _KINDS[kind], at=at)
        except ValueError as error:
            self._refuse(f"`{text}` is no default of a const {kind}", str(error), at=at)

    def _type(self, kind: str) -> tuple[str | None, tuple[Dim, ...] | None]:
        rest = self._rest()
        if rest == "Tensor" or (not rest and kind != "tensor"):
            return None, None
        found = _TYPED.fullmatch(rest)
        if not found:
            self._refuse(f"`{rest or self.text}` is no type of input", _EXPECTED, self._hint(rest))
        return self._dtype(found["dtype"]), self._dims(found["dims"], self.at + found.start("dims"))

    def _hint(self, rest: str) -> str:
        if rest in DTYPES or _VARIABLE.fullmatch(rest):
            hint = did_you_mean(rest, ["Tensor", "Param", "State"])
            return hint or f"write `{rest}[*S]` for any shape"
        word = rest.split("[")[0].split(" ")[0]
        return did_you_mean(word, ["Tensor", "Param", "State", "optional", "const", *CONST_TYPES])

    def _dtype(self, name: str) -> str | None:
        if not name or name in DTYPES or (_VARIABLE.fullmatch(name) and name not in RESERVED):
            return name or None
        self._refuse(
            f"`{name}` is no dtype", "one of " + ", ".join(DTYPES) + ", or a variable such as `T`",
            did_you_mean(name, [*DTYPES, *ROLES]),
        )  # fmt: skip

    def _dims(self, text: str, at: int) -> tuple[Dim, ...]:
        if not text.strip():
            return ()
        dims: list[Dim] = []
        for part in text.split(","):
            start = at + len(part) - len(part.lstrip())
            dims.append(self._dim(part.strip(), start))
            if sum(dim.pack for dim in dims) > 1:
                self._refuse("a second pack", "one `*` in a shape", at=start)
            at += len(part) + 1
        return tuple(dims)

    def _dim(self, text: str, at: int) -> Dim:
        if text.isascii() and text.isdigit() and len(text) < 19:
            return Dim(size=int(text))
        name = text.removeprefix("*").strip()
        if not _VARIABLE.fullmatch(name) or name in RESERVED:
            self._refuse(f"`{text}` is no size", "`H`, `*B` or a number", at=at,
                         hint=f"sizes start with a capital: `{name.capitalize()}`"
                         if name.isidentifier() and name[0].islower() else "")  # fmt: skip
        return Dim(name, pack=text.startswith("*"))
