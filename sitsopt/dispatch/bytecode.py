"""Dynamo's byte code for a call without the part that gathers the graph's inputs.

That part walks from the call's arguments and the model to several hundred tensors. Where they are known to be those of
the last call, `without_gathering` gives the rest: run the graph, make the results, do what the call does besides.
"""

from __future__ import annotations

import dis
import types
from typing import Any


def without_gathering(code: types.CodeType, graph: str) -> types.CodeType | None:
    """`code` with the call of the global `graph` made without arguments. None where the code is not laid out as one
    straight run of instructions from loading `graph` to calling it, or where what these leave behind is used later."""
    from torch._dynamo.bytecode_transformation import create_call_function, transform_code_object

    possible = True

    def cut(instructions: list[Any], options: dict[str, Any]) -> None:
        nonlocal possible
        region = _region(instructions, graph)
        if region is None:
            possible = False
            return None
        first, last = region
        stored = {i.argval for i in instructions[first:last] if i.opname == "STORE_FAST"}
        rest = [
            i
            for i in instructions[last + 1 :]
            if not (i.opname == "DELETE_FAST" and i.argval in stored)
        ]
        possible = not any(_local(i) and i.argval in stored for i in rest)
        kept = instructions[: first + 1]
        instructions[:] = [*kept, *create_call_function(0, push_null=False), *rest]
        return None

    made, _ = transform_code_object(code, cut)
    return made if possible else None


def _region(instructions: list[Any], graph: str) -> tuple[int, int] | None:
    """Where the graph is loaded and where it is called: the stack is then one higher than before."""
    loads = [
        at for at, i in enumerate(instructions) if i.opname == "LOAD_GLOBAL" and i.argval == graph
    ]
    if len(loads) != 1:
        return None
    height = 0
    for at in range(loads[0], len(instructions)):
        each = instructions[at]
        if each.opcode in JUMPS:
            return None
        height += dis.stack_effect(each.opcode, each.arg, jump=False)
        if at > loads[0] and height <= 1:
            return (loads[0], at) if each.opname == "CALL" else None
    return None


def _local(instruction: Any) -> bool:
    return instruction.opcode in dis.haslocal


JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))
