"""The notation of `match`, `replace` and `fold`: straight-line Python, parsed and never run.

    s = aten.silu(gate)
    q, k, v = split(linear(x, w), [Nq, Nk, Nv], -1)
    return aten.mul(s, up), q

A statement binds the results of one call; the last one returns. Arguments are names, literals, lists,
nested calls, and arithmetic over sizes and constants.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable
from typing import NoReturn

from .dtypes import DTYPES
from .errors import did_you_mean
from .opcall import check_call
from .ops import NAMESPACES, OpFact, resolve, suggest
from .program import Call, Let, Program, Ref, Term
from .pytext import PosOf, PyText
from .terms import CONSTANTS, TermReader

RESERVED = frozenset({*DTYPES, *CONSTANTS, *NAMESPACES, "min", "max", "cast", "_"})


def parse_program(
    text: str,
    pos_of: PosOf,
    inputs: Collection[str],
    names: Collection[str] = (),
    *,
    packs: Collection[str] = (),
    outputs: int | None = None,
    in_place: bool = False,
) -> Program:
    """The program in `text`. Raises SpecError at the first mistake.

    inputs: the values that may be read. names: sizes, dtype variables and constants. packs: names of
    several sizes, spread into a list as `[*B, H]`. outputs: how many values the program must return; a
    returned call with a list of results is then taken apart. in_place: allow ops that write their input.
    """
    return _Reader(PyText(text, pos_of, "exec"), inputs, names, packs, in_place).program(outputs)


class _Reader:
    def __init__(
        self, text: PyText, inputs: Collection[str], names: Collection[str],
        packs: Collection[str], in_place: bool,
    ) -> None:  # fmt: skip
        self.text, self.in_place = text, in_place
        self.inputs, self.names, self.packs = set(inputs), set(names), set(packs)
        self.lets: list[Let] = []
        self.bound: dict[str, ast.AST] = {}  # results, with the statement that binds each
        self.lists: set[str] = set()  # results that are lists of values
        self.used: set[str] = set()
        self.temps = 0
        self.terms = TermReader(text, self._name, self._spread, self._nested)

    def program(self, outputs: int | None) -> Program:
        tree = self.text.tree
        assert isinstance(tree, ast.Module)
        last = tree.body[-1] if tree.body else None
        for statement in tree.body:
            if statement is not last or not isinstance(last, ast.Return):
                self._statement(statement)
        if not isinstance(last, ast.Return) or last.value is None:
            self.text.refuse(
                last or tree, "the program returns nothing", "a last line `return VALUE, ...`"
            )
        returns = self._returns(last.value, outputs)
        self._check_used()
        return Program(
            tuple(self.lets), tuple(returns), self.text.pos_of(0, 0), self.text.text.strip()
        )

    # -- statements ---------------------------------------------------------------------------------

    def _statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Assign(targets=[target], value=ast.Call() as call):
                self._bind(target, call)
            case ast.Assign(targets=[_], value=value):
                self.text.refuse(
                    value, f"`{self.text.source(value)}` is no call", "`name = op(...)`"
                )
            case ast.Return():
                self.text.refuse(node, "nothing may follow `return`", "one `return`, at the end")
            case _:
                self.text.refuse(
                    node, f"`{self.text.source(node)}` is no statement of this notation",
                    "`name = op(...)` or `return name`",
                )  # fmt: skip

    def _bind(self, target: ast.expr, node: ast.Call) -> None:
        if isinstance(target, ast.Tuple):
            targets: list[ast.expr] = target.elts
        else:
            targets = [target]
        call, fact = self._call(node)
        names = [self._fresh(one, many=len(targets) > 1) for one in targets]
        if all(name == "_" for name in names):
            self.text.refuse(target, "no result of this call is named")
        for one, name in zip(targets, names, strict=True):
            if name in self.bound:
                self.text.refuse(one, f"`{name}` is assigned twice", "a new name")
            if name != "_":
                self.bound[name] = one
        self._let(names, call, fact, target)

    def _fresh(self, node: ast.expr, many: bool) -> str:
        if not isinstance(node, ast.Name):
            self.text.refuse(node, f"`{self.text.source(node)}` is no name", "a new name")
        name = node.id
        if name == "_" and many:
            return name
        if name in RESERVED:
            self.text.refuse(node, f"`{name}` has a meaning of its own", "another name")
        if name in self.inputs or name in self.names or name in self.packs:
            self.text.refuse(node, f"`{name}` is declared in `inputs`", "a new name")
        if name in self.bound:
            self.text.refuse(node, f"`{name}` is assigned twice", "a new name")
        return name

    def _let(self, names: list[str], call: Call, fact: OpFact, node: ast.AST) -> None:
        results = fact.results
        if results is not None:
            count = None if results[0].endswith("[]") else len(results)
            if count is not None and count != len(names):
                self.text.refuse(
                    node, f"{call.op} has {count} result{'s' * (count != 1)}, not {len(names)}",
                    f"{count} name{'s' * (count != 1)} before `=`",
                )  # fmt: skip
            if count is None and len(names) == 1:
                self.lists.add(names[0])
        self.lets.append(Let(tuple(names), call))

    def _returns(self, value: ast.expr, outputs: int | None) -> list[str]:
        if isinstance(value, ast.Tuple):
            return [self._returned(item) for item in value.elts]
        if isinstance(value, ast.Call) and (several := self._returned_call(value, outputs)):
            return several
        return [self._returned(value)]

    def _returned_call(self, value: ast.Call, outputs: int | None) -> list[str]:
        """The results of a returned call that has several, each under a name of its own."""
        call, fact = self._call(value)
        results = fact.results or ("Tensor",)
        count: int | None = len(results)
        if results[0].endswith("[]"):
            count = outputs
        if count is None:
            self._refuse_list(value)
        names = [self._temp() for _ in range(count)]
        self._let(names, call, fact, value)
        if count == 1:
            self.lists.discard(names[0])
        self.used.update(names)
        return names

    def _returned(self, node: ast.expr) -> str:
        term = self.terms.read(node)
        if not isinstance(term, Ref) or self._is_scalar(term.name):
            self.text.refuse(
                node, f"`{self.text.source(node)}` is no value of the graph", "a result or an input"
            )
        if term.name in self.lists:
            self._refuse_list(node)
        return term.name

    def _refuse_list(self, node: ast.AST) -> NoReturn:
        self.text.refuse(
            node, "this is a list of values", "values, one by one",
            "name the results first: `a, b = op(...)`, then `return a, b`",
        )  # fmt: skip

    def _check_used(self) -> None:
        for name, node in self.bound.items():
            if name not in self.used:
                alone = any(let.names == (name,) for let in self.lets)
                self.text.refuse(
                    node, f"the result `{name}` is never used", "every result used or returned",
                    "remove this line" if alone else "write `_` for a result that does not matter",
                )  # fmt: skip

    # -- calls and names ----------------------------------------------------------------------------

    def _call(self, node: ast.Call) -> tuple[Call, OpFact]:
        name = _dotted(node.func)
        if name is None:
            self.text.refuse(
                node.func, f"`{self.text.source(node.func)}` is no op", "`aten.mul(...)`"
            )
        fact = resolve(name)
        if fact is None:
            hint = suggest(name)
            if "." in name and name.partition(".")[0] in self._values():
                hint = f"aten.{name.rpartition('.')[2]}({name.partition('.')[0]}, ...)"
            self.text.refuse(
                node.func, f"there is no op `{name}`", "an op of aten or sits, or `cast`",
                f"did you mean `{hint}`?" if hint else "",
            )  # fmt: skip
        if fact.writes and not self.in_place:
            self.text.refuse(
                node.func, f"{fact.name} writes its input", "the functional form",
                f"match {fact.functional}: graphs are functional when rules see them"
                if fact.functional else "",
            )  # fmt: skip
        args = tuple(self.terms.read(arg) for arg in node.args)
        kwargs = tuple((self._keyword(keyword), self.terms.read(keyword.value))
                       for keyword in node.keywords)  # fmt: skip
        check_call(self.text, node, fact, args, kwargs, self._kind)
        return Call(fact.name, args, kwargs, self.text.at(node)), fact

    def _keyword(self, keyword: ast.keyword) -> str:
        if keyword.arg is None:
            self.text.refuse(keyword.value, "`**` is not part of this notation", "`name=value`")
        return keyword.arg

    def _nested(self, node: ast.Call) -> Term:
        call, fact = self._call(node)
        name = self._temp()
        self._let([name], call, fact, node)
        self.used.add(name)
        return Ref(name)

    def _temp(self) -> str:
        self.temps += 1
        return f"%{self.temps}"

    def _name(self, node: ast.Name, scalar: bool) -> Term:
        """A name as an argument; `scalar` when it stands in arithmetic."""
        name = node.id
        if name in self.packs:
            self.text.refuse(node, f"`{name}` is several sizes", f"`[*{name}]`")
        if self._is_scalar(name):
            return Ref(name)
        if name not in self._values():
            known: Iterable[str] = {*self._values(), *self.names}
            self.text.refuse(
                node, f"`{name}` is not bound", "one of " + ", ".join(sorted(known)),
                did_you_mean(name, known),
            )  # fmt: skip
        if scalar:
            self.text.refuse(
                node, f"`{name}` is a tensor: arithmetic is over sizes and constants",
                hint="call the op, such as aten.mul(a, b)",
            )  # fmt: skip
        self.used.add(name)
        return Ref(name)

    def _spread(self, node: ast.Starred) -> Term:
        if isinstance(node.value, ast.Name) and node.value.id in self.packs:
            return Ref(node.value.id)
        known = (
            ", ".join(f"*{pack}" for pack in sorted(self.packs)) or "no `*` (no input has a pack)"
        )
        self.text.refuse(node, f"`{self.text.source(node)}` is no pack of sizes", known)

    def _kind(self, name: str) -> str:
        if self._is_scalar(name) or name in self.packs:
            return "a constant"
        return "a list" if name in self.lists else "a tensor"

    def _is_scalar(self, name: str) -> bool:
        return name in self.names and name not in self.bound

    def _values(self) -> set[str]:
        return self.inputs | set(self.bound)


def _dotted(node: ast.expr) -> str | None:
    """`aten.mul.Tensor` as text, or None when the callee is anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := _dotted(node.value)):
        return f"{base}.{node.attr}"
    return None
