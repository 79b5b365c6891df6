"""Applying one match, and taking it back.

The replacement is built behind the last input, its outputs are compared with what they stand for (shape, dtype,
device, aliasing), and only then do readers move over and learn its strides. Until `GraphView.sweep` the old nodes lie
dead in the graph.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node

from ..graph.build import Builder
from ..graph.facts import escapes, same_shape, storage_root, tensor, val
from ..spec.program import Arith, Let, Lit, Program, Ref, Seq, Term
from .bindings import Unbound
from .check import Refusal, insertion_point
from .match import Match
from .relay import relay
from .values import arithmetic, plain
from .view import GraphView


@dataclass
class Edit:
    """A rewrite that was applied: what it made, whose readers it took over, what it left dead."""

    match: Match
    made: list[Node] = field(default_factory=list)
    built: int = 0  # how many of them the rule asks for; the rest keeps strides
    moved: list[tuple[Node, Node, Node]] = field(default_factory=list)  # old, new, reader
    kept: list[tuple[Node, Any, Any]] = field(default_factory=list)  # readers of both, as they were
    died: list[Node] = field(default_factory=list)
    pairs: list[tuple[Node, Node]] = field(default_factory=list)  # old value, its replacement
    values: list[tuple[Node, Any]] = field(default_factory=list)  # fake values that strides changed
    targets: list[tuple[Node, Any]] = field(default_factory=list)  # views that became reshapes

    def undo(self, view: GraphView) -> None:
        """Put the old nodes back. Later edits that built on this one must be undone first."""
        for node, value in reversed(self.values):
            node.meta["val"] = value
        for node, target in self.targets:
            node.target = target
        for old, new, reader in self.moved:
            reader.replace_input_with(new, old)
        for reader, args, kwargs in self.kept:
            reader.args, reader.kwargs = args, kwargs
        view.dead.difference_update(self.died)
        for node in reversed(self.made):
            view.forget(node)
            view.graph.erase_node(node)


def apply(match: Match, view: GraphView, mode: FakeTensorMode) -> Edit | Refusal:
    """Replace a match. A replacement that would change shape, dtype, device or aliasing is taken out again."""
    edit = Edit(match)
    try:
        news = _build(match, view, mode, edit)
    except Exception as error:  # whatever an op raises on these shapes is a reason not to rewrite
        _discard(edit, view)
        return Refusal("shape", "replace", f"the replacement cannot be built: {error}")
    refusal = _changed(match, news, edit) or _overwritten(match, news, edit, view)
    if refusal is not None:
        _discard(edit, view)
        return refusal
    edit.built = len(edit.made)
    move(match, view, edit, news)
    refusal = relay(edit, view, mode)
    if refusal is not None:
        edit.undo(view)
        return refusal
    return edit


def _build(match: Match, view: GraphView, mode: FakeTensorMode, edit: Edit) -> list[Node]:
    after = behind(insertion_point(match))
    with view.graph.inserting_before(after):
        builder = Builder(view.graph, mode, match.anchor, compose=True)
        edit.made = builder.made
        env = dict(match.bound)
        for name, program in match.rule.fold.items():
            before = len(builder.made)
            env[name] = run(program, env, builder)[0]
            for node in builder.made[before:]:
                node.meta["sits_fold"] = match.rule.id
        replace = match.rule.spellings[match.spelling].replace or match.rule.replace
        assert replace is not None
        news = run(replace, env, builder)
    for node in edit.made:
        view.add(node)
    return news


def behind(node: Node) -> Node:
    """The node before which an op goes that is to stand behind another: inputs stay in front."""
    after = node.next
    while after.op in ("placeholder", "get_attr"):
        after = after.next
    return after


def run(program: Program, env: dict[str, Any], builder: Builder) -> list[Any]:
    """Evaluate a program over nodes and constants, adding its ops through the builder."""
    env = dict(env)
    for let in program.lets:
        args = tuple(resolve(t, env) for t in let.call.args)
        kwargs = {k: resolve(t, env) for k, t in let.call.kwargs}
        out = builder.call(let.call.op, args, kwargs)
        _bind(let, out, env, builder)
    return [_single(env[name], builder) for name in program.returns]


def _single(value: Any, builder: Builder) -> Any:
    """What a program returns is a value: of an op with a list of results, the only one."""
    made = val(value) if isinstance(value, Node) else None
    return builder.item(value, 0) if isinstance(made, (list, tuple)) and len(made) == 1 else value


def _bind(let: Let, out: Node, env: dict[str, Any], builder: Builder) -> None:
    if len(let.names) == 1:
        env[let.names[0]] = out
        return
    for i, name in enumerate(let.names):
        if name != "_":
            env[name] = builder.item(out, i)


def resolve(term: Term, env: dict[str, Any]) -> Any:
    """A term as a node or a constant; packs inside a list are spread."""
    if isinstance(term, Lit):
        return plain(term.value)
    if isinstance(term, Ref):
        if term.name not in env:
            raise Unbound(term.name)
        return env[term.name]
    if isinstance(term, Seq):
        items: list[Any] = []
        for item in term.items:
            value = resolve(item, env)
            items.extend(value) if isinstance(value, tuple) else items.append(value)
        return items
    assert isinstance(term, Arith)
    return arithmetic(term.op, [resolve(a, env) for a in term.args])


def _changed(match: Match, news: list[Any], edit: Edit) -> Refusal | None:
    for old, new in zip(match.returns, news, strict=True):
        if old is None:
            continue
        before, after = tensor(old), tensor(new)
        if before is None or after is None:
            return Refusal("pattern", "replace", "an output is no tensor", found=str(new))
        if before.dtype != after.dtype:
            return Refusal("dtype", "replace", "the replacement has another dtype", str(before.dtype),
                           str(after.dtype))  # fmt: skip
        if not same_shape(before.shape, after.shape) or before.device != after.device:
            return Refusal("shape", "replace", "the replacement has another shape or device",
                           f"{tuple(before.shape)} on {before.device}",
                           f"{tuple(after.shape)} on {after.device}")  # fmt: skip
        if escapes(old) and _alias_differs(old, new, edit):
            return Refusal("alias", "replace", "the value is an output of the graph and would share other storage",
                           storage_root(old).name, storage_root(new).name)  # fmt: skip
    return None


def _alias_differs(old: Node, new: Node, edit: Edit) -> bool:
    """An output must stay a view of what it was a view of, a fresh value fresh, its strides what they were, and no
    input or other output may become the very same tensor."""
    a, b = storage_root(old), storage_root(new)
    if a is not b:
        owned = a.op != "call_function" or b.op != "call_function"
        if owned or (b not in edit.made and escapes(b)):
            return True
    if _returned(old) and new not in edit.made and (new.op != "call_function" or _returned(new)):
        return True
    before, after = tensor(old), tensor(new)
    assert before is not None and after is not None
    return tuple(before.stride()) != tuple(after.stride())


def _returned(node: Node) -> bool:
    return any(user.op == "output" for user in node.users)


def _overwritten(match: Match, news: list[Any], edit: Edit, view: GraphView) -> Refusal | None:
    """A copy that a later op writes, or whose source it writes, must stay a copy."""
    for old, new in zip(match.returns, news, strict=True):
        if old is None or not isinstance(new, Node) or storage_root(new) in edit.made:
            continue
        writer = next((m for m in view.mutating if m > old and m not in view.dead), None)
        if writer is not None and storage_root(old) is not storage_root(new):
            return Refusal(
                "mutation", f"{writer.name} = {writer.target} may write what the copy was made of"
            )
    return None


def move(match: Match, view: GraphView, edit: Edit, news: list[Any], known: bool = False) -> None:
    """Let the readers of what a match returns read `news`; bury what is no longer read. `known`: the view has noted
    such readers already."""
    taken = set(match.nodes)
    for old, new in zip(match.returns, news, strict=True):
        if old is None:
            continue
        edit.pairs.append((old, new))
        for reader in [u for u in old.users if u not in taken and u not in edit.made]:
            if isinstance(new, Node) and reader in new.users:
                edit.kept.append((reader, reader.args, reader.kwargs))
            else:
                edit.moved.append((old, new, reader))
            reader.replace_input_with(old, new)
            if not known:
                view.note_moved(reader, new)
    edit.died = [n for n in match.nodes if n not in view.dead]
    view.dead.update(edit.died)
    _bury_unread(edit, view)


def _bury_unread(edit: Edit, view: GraphView) -> None:
    """What only the replaced nodes read is dead too: to a later rule it would be another reader of its inputs."""
    todo = [source for node in edit.died for source in node.all_input_nodes]
    while todo:
        node = todo.pop()
        if node.op != "call_function" or node in view.dead or view.users(node) or node.is_impure():
            continue
        view.dead.add(node)
        edit.died.append(node)
        todo.extend(node.all_input_nodes)


def _discard(edit: Edit, view: GraphView) -> None:
    for node in reversed(edit.made):
        view.forget(node)
        view.graph.erase_node(node)


def claim(match: Match) -> list[Node]:
    """The nodes a kernel would take over; the graph stays as it is."""
    return list(match.nodes)
