"""Random programs that are likely to be rewritten, and to be rewritten wrongly.

A program grows by running: every step is an op on real tensors, recorded in a graph. Around the pattern of a rule,
taken from one of its examples, stand views, casts, writes in place and readers of what the rule would take; the pattern
itself may be changed a little. Whatever an op refuses is left out. The oracle is the graph itself, run by eager.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from sitsopt.graph import ops as _ops  # noqa: F401  registers the sits:: ops
from sitsopt.graph.build import overload
from sitsopt.graph.facts import DTYPES
from sitsopt.rewrite.edit import run
from sitsopt.rewrite.example import make_input
from sitsopt.rewrite.values import plain
from sitsopt.spec.program import Let, Lit, Program, Ref
from sitsopt.spec.rule import Example, Rule

F32, LOW = torch.float32, (torch.bfloat16, torch.float16)
SIZES = (0, 1, 1, 2, 3, 4, 6)


@dataclass
class Case:
    """A program and the values it is called with."""

    gm: GraphModule
    inputs: list[Any]
    seed: int
    seeded: str = ""  # the rule whose pattern is in it
    change: str = ""  # what was done to the pattern


@dataclass
class Recorder:
    """Runs ops on real tensors and records them; what `sitsopt.rewrite.edit.run` builds with."""

    graph: Graph = field(default_factory=Graph)
    made: list[Node] = field(default_factory=list)
    inputs: list[Any] = field(default_factory=list)

    def input(self, value: torch.Tensor, name: str) -> Node:
        first = self.graph.inserting_before(self.made[0]) if self.made else nullcontext()
        with first:
            node = self.graph.placeholder(f"{name}_{len(self.inputs)}")
        self.inputs.append(value if isinstance(value, nn.Parameter) else _same_layout(value))
        node.meta["val"] = _same_layout(value.detach())
        return node

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Node:
        """One op, run now. Raises what it raises."""
        kwargs = kwargs or {}
        if name == "prim.getitem":
            return self.item(args[0], args[1])
        if name == "prim.cast":
            if args[0].meta["val"].dtype == args[1]:
                return args[0]
            name, args, kwargs = "aten._to_copy", args[:1], {"dtype": args[1]}
        real = map_arg(args, _value), map_arg(kwargs, _value)
        with torch.no_grad():
            target = overload(name, *real)
            value = target(*real[0], **real[1])
        return self._keep(self.graph.call_function(target, args, kwargs), value)

    def item(self, node: Node, index: int) -> Node:
        made = self.graph.call_function(operator.getitem, (node, index))
        return self._keep(made, node.meta["val"][index])

    def _keep(self, node: Node, value: Any) -> Node:
        node.meta["val"] = value
        self.made.append(node)
        return node


def _value(node: Node) -> Any:
    return node.meta["val"]


def _same_layout(value: torch.Tensor) -> torch.Tensor:
    """A copy with the strides of the original, in a storage of its own."""
    size = value.untyped_storage().nbytes() // value.element_size()
    whole = torch.as_strided(value.detach(), (size,), (1,), 0).clone()
    return torch.as_strided(whole, value.shape, value.stride(), value.storage_offset())


class Grower:
    """One program in the making."""

    def __init__(self, seed: int, rules: Sequence[Rule]) -> None:
        self.random, self.rules = random.Random(seed), rules
        self.seed, self.to = seed, Recorder()
        self.pool: list[Node] = []
        self.inner: list[Node] = []  # values inside a pattern
        self.returned: list[Node] = []
        self.seeded = self.change = ""

    def grow(self, rule: Rule | None, steps: int = 5, writes: bool = True) -> Case:
        torch.manual_seed(self.seed)
        for _ in range(self.random.choice((1, 2))):
            self.pool.append(self.to.input(self._tensor(), "a"))
        for _ in range(self.random.randrange(steps)):
            self.step(writes)
        if rule is not None:
            self.plant(rule)
        for _ in range(self.random.randrange(steps)):
            self.step(writes)
        return self._finish()

    def _tensor(self) -> torch.Tensor:
        rank = self.random.choice((1, 2, 2, 3, 4))
        shape = [self.random.choice(SIZES) for _ in range(rank)]
        dtype = self.random.choice((F32, F32, F32, *LOW))
        return self._layout(torch.randn(shape).to(dtype))

    def _layout(self, x: torch.Tensor) -> torch.Tensor:
        kind = self.random.randrange(6)
        if kind == 0 and x.dim() > 1:
            return x.transpose(-1, -2).contiguous().transpose(-1, -2)
        if kind == 1 and x.dim():
            return x.new_zeros([*x.shape[:-1], 2 * x.shape[-1]])[..., ::2].copy_(x)
        if kind == 2:
            return x.new_zeros(x.numel() + 3)[3:].view(x.shape).copy_(x)
        return x

    def try_(self, name: str, *args: Any, **kwargs: Any) -> Node | None:
        """A step, unless the op refuses it or blows up."""
        try:
            node = self.to.call(name, args, kwargs)
        except Exception:
            return None
        value = node.meta["val"]
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel():
            top = float(value.detach().abs().max())
            if not top < 1e3 and not _writes(node):
                self.to.made.remove(node)
                self.to.graph.erase_node(node)
                return None
        return node

    def pick(self, floating: bool = True) -> Node:
        fits = [n for n in self.pool if not floating or n.meta["val"].is_floating_point()]
        return self.random.choice(fits or self.pool)

    # -- steps ------------------------------------------------------------------------------------------

    def step(self, writes: bool) -> None:
        kinds: list[tuple[int, Callable[[], Node | None]]] = [
            (4, self._unary), (4, self._binary), (5, self._view), (2, self._cast), (2, self._copy),
            (2, self._reduce), (1, self._linear), (3 if writes else 0, self._write),
        ]  # fmt: skip
        chosen = self.random.choices([k for _, k in kinds], [w for w, _ in kinds])[0]
        made = chosen()
        if made is not None and isinstance(made.meta["val"], torch.Tensor):
            self.pool.append(made)

    def _unary(self) -> Node | None:
        name = self.random.choice(
            ("silu", "sin", "neg", "relu", "sigmoid", "tanh", "gelu", "abs", "clone", "alias")
        )
        return self.try_(f"aten.{name}", self.pick())

    def _binary(self) -> Node | None:
        a, b = self.pick(), self.pick()
        name = self.random.choice(("add", "mul", "sub", "mul", "maximum"))
        if self.random.random() < 0.3 and name != "maximum":
            return self.try_(f"aten.{name}", a, self.random.choice((1, 1.0, 0.0, -1, 2, 0.5, -0.0)))
        return self.try_(f"aten.{name}", a, b)

    def _view(self) -> Node | None:
        x = self.pick(floating=False)
        shape, rank = list(x.meta["val"].shape), x.meta["val"].dim()
        d = self.random.randrange(-rank, rank) if rank else 0
        dims = self.random.sample(range(rank), rank)
        size = shape[d] if rank else 1
        cut = self.random.randrange(size + 1)
        steps: list[tuple[Any, ...]] = [
            ("aten.transpose", x, d, self.random.randrange(rank) if rank else 0), ("aten.permute", x, dims),
            ("aten.unsqueeze", x, d), ("aten.squeeze", x), ("aten.reshape", x, [-1]),
            ("aten.reshape", x, [*shape[:1], -1] if rank > 1 else shape), ("aten.reshape", x, shape),
            ("aten.slice", x, d, 0, cut), ("aten.slice", x, d, cut, 2**63 - 1), ("aten.slice", x, d, 0, 2**63 - 1),
            ("aten.select", x, d, max(cut - 1, 0)), ("aten.expand", x, shape), ("aten.expand", x, [2, *shape]),
            ("aten.detach", x), ("aten.view", x, [-1]), ("aten.flatten", x),
        ]  # fmt: skip
        return self.try_(*self.random.choice(steps))

    def _cast(self) -> Node | None:
        return self.to.call(
            "prim.cast", (self.pick(), self.random.choice((F32, torch.float64, *LOW)))
        )

    def _copy(self) -> Node | None:
        x = self.pick()
        rank = x.meta["val"].dim()
        d = self.random.randrange(rank) if rank else 0
        choice = self.random.randrange(5)
        if choice == 0:
            return self.try_("aten.cat", [x, self.random.choice((x, self.pick()))], d)
        if choice == 1:
            return self.try_("aten.cat", [x], d)
        if choice == 2:
            return self.try_("aten.constant_pad_nd", x, self.random.choice(([0, 0], [1, 0])), 0.0)
        return self.try_("aten.clone" if choice == 3 else "aten.contiguous", x)

    def _reduce(self) -> Node | None:
        x = self.pick()
        rank = x.meta["val"].dim()
        d = self.random.randrange(-rank, rank) if rank else 0
        name = self.random.choice(("softmax", "mean", "sum"))
        return self.try_("aten.softmax", x, d) if name == "softmax" else self.try_(
            f"aten.{name}", x, [d], self.random.random() < 0.5)  # fmt: skip

    def _linear(self) -> Node | None:
        x = self.pick()
        value = x.meta["val"]
        if not value.dim():
            return None
        w = nn.Parameter(torch.randn(3, value.shape[-1]).to(value.dtype) / 2, requires_grad=False)
        return self.try_("aten.linear", x, self.to.input(w, "w"))

    def _write(self) -> Node | None:
        x, y = self.pick(), self.pick()
        if self.random.random() < 0.4:
            x = self._view() or x
        if isinstance(x.meta["val"], nn.Parameter) or not x.meta["val"].is_floating_point():
            return None
        value = x.meta["val"]
        if any(s == 0 and n > 1 for s, n in zip(value.stride(), value.shape, strict=True)):
            return None  # several places are one: eager itself gives no fixed result
        steps: list[tuple[Any, ...]] = [
            ("aten.add_", x, 1.0), ("aten.mul_", x, 0.5), ("aten.zero_", x), ("aten.neg_", x),
            ("aten.fill_", x, 0.25), ("aten.tanh_", x),
        ]  # fmt: skip
        same = y.meta["val"].shape == value.shape and y.meta["val"].dtype == value.dtype
        if same and y.meta["val"].untyped_storage()._cdata != value.untyped_storage()._cdata:
            steps += [("aten.copy_", x, y), ("aten.add_", x, y), ("aten.copy_", x, y)]
        return self.try_(*self.random.choice(steps))

    # -- a rule's pattern ---------------------------------------------------------------------------------

    def plant(self, rule: Rule) -> None:
        """One firing example of a rule, with values of the program among its inputs."""
        fires = [e for e in rule.examples if e.fires]
        example = self.random.choice(fires)
        spelling = self.random.choice(example.spellings(rule) or [0])
        env = self._bind(rule, spelling, example)
        program = example.given or rule.spellings[spelling].program
        if self.random.random() < 0.5:
            program, self.change = self._changed(program)
        before = len(self.to.made)
        try:
            results = run(program, env, self.to)  # type: ignore[arg-type]
        except Exception as error:
            self.change += f" (refused: {type(error).__name__})"
            return
        self.seeded = rule.id
        self.inner = [n for n in self.to.made[before:] if isinstance(n.meta["val"], torch.Tensor)]
        results = [r for r in results if isinstance(r.meta["val"], torch.Tensor)]
        if self.inner and self.random.random() < 0.15:
            self.change += " another reader"
            self.returned.append(self.random.choice(self.inner))
        self.pool += results
        self.returned += results

    def _bind(self, rule: Rule, spelling: int, example: Example) -> dict[str, Any]:
        env: dict[str, Any] = {k: plain(v) for k, v in rule.spellings[spelling].fixed.items()}
        variables = set(rule.dtypes)
        env |= {k: DTYPES[v] if k in variables else plain(v) for k, v in example.binding.items()}
        for spec in rule.inputs.values():
            if spec.kind == "const":
                env.setdefault(spec.name, plain(spec.default))
            elif spec.name in example.absent:
                env[spec.name] = None
            else:
                env[spec.name] = self._operand(spec.kind, make_input(spec, env, example), spec.name)
        return env

    def _operand(self, kind: str, value: torch.Tensor, name: str) -> Node:
        if kind == "param":
            return self.to.input(nn.Parameter(value, requires_grad=False), name)
        alike = [
            n for n in self.pool
            if n.meta["val"].shape == value.shape and n.meta["val"].dtype == value.dtype
        ]  # fmt: skip
        if alike and kind == "tensor" and self.random.random() < 0.4:
            return self.random.choice(alike)
        node = self.to.input(self._layout(value) if self.random.random() < 0.3 else value, name)
        if kind == "tensor":
            self.pool.append(node)
        return node

    def _changed(self, program: Program) -> tuple[Program, str]:
        """The pattern with a literal changed, two operands swapped, or a cast, view or write in between."""
        lets = list(program.lets)
        i = self.random.randrange(len(lets))
        let = lets[i]
        kind = self.random.choice(("literal", "swap", "insert", "write"))
        if kind == "literal":
            numbers = [
                j
                for j, a in enumerate(let.call.args)
                if isinstance(a, Lit) and type(a.value) in (int, float)
            ]
            if numbers:
                j = self.random.choice(numbers)
                term = let.call.args[j]
                assert isinstance(term, Lit)
                other = Lit(self.random.choice((term.value + 1, -term.value, term.value * 1.5)))  # type: ignore
                lets[i] = _with_args(let, (*let.call.args[:j], other, *let.call.args[j + 1 :]))
        elif kind == "swap" and len(let.call.args) > 1:
            lets[i] = _with_args(let, (let.call.args[1], let.call.args[0], *let.call.args[2:]))
        elif len(let.names) == 1:
            inserted = {
                "insert": self.random.choice(
                    ("aten.neg", "aten.clone", "aten.alias", "aten.contiguous")
                ),
                "write": self.random.choice(("aten.neg_", "aten.tanh_", "aten.zero_")),
            }.get(kind, "aten.clone")
            fresh = replace(let, names=(f"{let.names[0]}_before",))
            call = replace(let.call, op=inserted, args=(Ref(fresh.names[0]),), kwargs=())
            lets[i : i + 1] = [fresh, Let(let.names, call)]
        return replace(program, lets=tuple(lets)), kind

    # -- the end --------------------------------------------------------------------------------------------

    def _finish(self) -> Case:
        extra = self.random.sample(self.pool, min(len(self.pool), self.random.randrange(1, 4)))
        results = [*self.returned, *extra]
        if self.random.random() < 0.2:
            results.append(self.random.choice(results))
        self.to.graph.output(tuple(results))
        used = [n for n in self.to.graph.nodes if n.op == "placeholder"]
        for i, node in reversed(list(enumerate(used))):
            if not node.users:
                self.to.graph.erase_node(node)
                del self.to.inputs[i]
        for node in self.to.graph.nodes:  # as Dynamo notes values
            node.meta = {"example_value": node.meta.get("val")}
        gm = GraphModule({}, self.to.graph)
        return Case(gm, self.to.inputs, self.seed, self.seeded, self.change.strip())


def _with_args(let: Let, args: tuple[Any, ...]) -> Let:
    return replace(let, call=replace(let.call, args=args))


def _writes(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def program(seed: int, rules: Sequence[Rule], writes: bool = True) -> Case:
    """The program of a seed: rules take turns in lending their pattern."""
    return Grower(seed, rules).grow(rules[seed % len(rules)] if rules else None, writes=writes)
