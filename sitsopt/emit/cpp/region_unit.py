"""The whole text of a region: its functions, where its members meet, and what the outside calls."""

from __future__ import annotations

from . import abi
from .region import ARGUMENTS, Function
from .region_calls import Unit
from .region_text import REGION_TEXT

_TYPES = r"""
typedef void (*LinearPart)(const SitsLinear*, float*, int64_t, int64_t);
typedef void* (*AttentionOpen)(SitsAttention*, int64_t);
typedef void (*AttentionPart)(const SitsAttention*, const void*, int64_t, int64_t);
typedef void (*AttentionClose)(const SitsAttention*, void*);
typedef void* (*KvOpen)(SitsKv*, int64_t);
typedef void (*KvClose)(SitsKv*, void*);
static void* kernels[MOST_KERNELS];  // set once, before the first call
#define BARRIER meet(c, team);
"""

_ENTRY = r"""
extern "C" void SYMBOL_BIND(void** given) { memcpy(kernels, given, sizeof(kernels)); }

// a: pointers to arguments, then results. room: ROOM_OURS + team * (ROOM_MINE + input) bytes, on a cache line; input:
// bytes a member needs for the input of a linear.
extern "C" int SYMBOL(void** a, char* room, int64_t input, int64_t team) {
    Control* c = (Control*)room;
    c->came = c->turn = 0;
    int result = 0;
#pragma omp parallel num_threads(team) if (team > 1)
    {
        int64_t id = omp_get_thread_num(), members = omp_get_num_threads();
        char* mine = room + ROOM_OURS + id * (ROOM_MINE + input);
        int failed = region_main(a, mine, room + CONTROL, (float*)(mine + ROOM_MINE), c, id, members);
        if (id == 0) result = failed;
    }
    return result;
}

extern "C" int64_t SYMBOL_ROOM(int shared) { return shared ? ROOM_OURS : ROOM_MINE; }
"""


def region_text(name: str, unit: Unit, main: Function) -> str:
    """The translation unit: it exports `name`, `name_bind` and `name_room`."""
    mine = max((f.mine for f in unit.functions), default=0)
    ours = max((f.ours for f in unit.functions), default=0)
    head = {
        "MOST_KERNELS": max(len(unit.pointers), 1),
        "MAIN_MINE": main.mine,
        "MAIN_OURS": main.ours,
        "CONTROL": 256,
        "ROOM_MINE": main.mine + mine,
        "ROOM_OURS": 256 + main.ours + ours,
        "SYMBOL": name,
        "SYMBOL_BIND": f"{name}_bind",
        "SYMBOL_ROOM": f"{name}_room",
    }
    lines = [f"#define {key} {value}" for key, value in head.items()]
    bodies = [f.body() for f in (*unit.functions, main)]
    parts = [*lines, REGION_TEXT, abi.ATTENTION, abi.KV, abi.LINEAR, _TYPES, *bodies, _ENTRY]
    return "\n".join(parts)


__all__ = ["ARGUMENTS", "region_text"]
