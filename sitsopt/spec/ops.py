"""The ops that rules may name, and what is true of them, without importing PyTorch.

`aten_ops.json` is generated from PyTorch (`tests/spec/op_table.py`), `sits_ops.yaml` and `op_facts.yaml`
are written by hand. To add a `sits` op: one line in `sits_ops.yaml` and its reference in `graph/ops.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from .errors import nearest
from .signature import Signature, parse_signature
from .source import read

_HERE = Path(__file__).parent
NAMESPACES = ("aten", "sits", "prim")
CAST = "prim.cast"
_PRIMS = {CAST: "(Tensor x, ScalarType dtype) -> Tensor"}


@dataclass(frozen=True)
class OpFact:
    """One op, or one overload of it.

    name: canonical, `aten.mul`, `sits.rope`, `aten.mul.Tensor`; key: the name without the overload.
    overloads: the signatures it may have. commutes: the first two arguments may be swapped where the
    arguments named in `commutes_when` have those values. family: cast, reshape, permute, expand or empty.
    dims: arguments that count dimensions, in the rank of the input plus `extra_rank`.
    writes: the op changes its input; `functional` is the op that does the same to a new value.
    """

    name: str
    key: str
    overloads: Mapping[str, Signature] = field(hash=False)
    commutes: bool = False
    commutes_when: tuple[tuple[str, Any], ...] = ()
    family: str = ""
    dims: frozenset[str] = frozenset()
    extra_rank: int = 0
    writes: bool = False
    functional: str = ""

    @property
    def results(self) -> tuple[str, ...] | None:
        """The types of the results, or None when the overloads differ in them."""
        kinds = {signature.returns for signature in self.overloads.values()}
        return kinds.pop() if len(kinds) == 1 else None


@cache
def resolve(name: str) -> OpFact | None:
    """The op that `name` means: `aten.mul`, `aten.mul.Tensor`, `sits.rope`, or a bare name, which means
    `cast`, else the `sits` op of that name, else the `aten` one. None when there is no such op."""
    space, _, rest = name.partition(".")
    if name.endswith("."):
        return None
    if space not in NAMESPACES:
        if name == "cast":
            return resolve(CAST)
        return resolve(f"sits.{name}") or resolve(f"aten.{name}")
    base, _, overload = rest.partition(".")
    writes = space == "aten" and base in _table()["writes"]
    functional = _table()["writes"][base] if writes else ""
    signatures = _signatures(f"{space}.{functional or base}")
    if not writes and not signatures:
        return None
    if overload:
        if overload not in signatures:
            return None
        signatures = {overload: signatures[overload]}
    fact = OpFact(name, f"{space}.{base}", signatures, writes=writes,
                  functional=f"aten.{functional}" if functional else "")  # fmt: skip
    return fact if writes else _with_facts(fact, base, overload)


@cache
def commutative() -> frozenset[str]:
    """The keys of the ops whose first two arguments may be swapped, some only where `commutes_when` holds."""
    return frozenset(f"aten.{name}" for name in _facts()["commutative"])


@cache
def known() -> list[str]:
    """Every op that a pattern may name, canonical and without overloads."""
    aten = [f"aten.{name}" for name in _table()["ops"]]
    return sorted([*_PRIMS, *(f"sits.{name}" for name in sits_schemas()), *aten])


def suggest(name: str) -> str:
    """The nearest op to a name that is none, or an overload that exists, or an empty string."""
    base, _, overload = name.rpartition(".")
    if base not in NAMESPACES and (fact := resolve(base) if base else None):
        return f"{base}.{nearest(overload, fact.overloads) or next(iter(fact.overloads))}"
    if name.partition(".")[0] in NAMESPACES:
        return nearest(name, known())
    space = ["cast", *(other.partition(".")[2] for other in known())]
    return nearest(name, space)


@cache
def sits_schemas() -> dict[str, str]:
    """The schema of every `sits` op, as `torch.library` takes it."""
    return {schema.partition("(")[0]: schema for schema in read(_HERE / "sits_ops.yaml").data}


def _with_facts(fact: OpFact, base: str, overload: str) -> OpFact:
    if fact.key == CAST:
        return OpFact(fact.name, fact.key, fact.overloads, family="cast")
    if not fact.key.startswith("aten."):
        return fact
    facts = _facts()
    when = facts["commutative"].get(base)
    spellings = (
        {base, f"{base}.{overload}"}
        if overload
        else {base, *(f"{base}.{o}" for o in fact.overloads)}
    )
    family = next((f for f, members in facts["families"].items() if spellings & set(members)), "")
    names = {arg.name for signature in fact.overloads.values() for arg in signature.args}
    dims = names & set(facts["dims"]) - set(facts["not_dims"].get(base, ()))
    return OpFact(
        fact.name, fact.key, fact.overloads,
        commutes=when is not None, commutes_when=tuple((when or {}).items()), family=family,
        dims=frozenset(dims), extra_rank=int(base in facts["dims_of_result"]),
    )  # fmt: skip


@cache
def _signatures(key: str) -> dict[str, Signature]:
    space, _, base = key.partition(".")
    if space == "prim":
        texts = {"default": _PRIMS[key]} if key in _PRIMS else {}
    elif space == "sits":
        texts = {"default": sits_schemas()[base]} if base in sits_schemas() else {}
    else:
        texts = _table()["ops"].get(base, {})
    return {overload: parse_signature(text) for overload, text in texts.items()}


@cache
def _table() -> dict[str, dict[str, Any]]:
    table: dict[str, dict[str, Any]] = json.loads((_HERE / "aten_ops.json").read_text())
    return table


@cache
def _facts() -> dict[str, Any]:
    facts: dict[str, Any] = read(_HERE / "op_facts.yaml").data
    return facts
