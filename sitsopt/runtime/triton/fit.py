"""Block sizes that fit a target: the first candidate of each kernel that compiles, does not spill, and has room."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sitsopt.emit.triton.source import Source
from sitsopt.emit.triton.tune import candidates
from sitsopt.spec.target import Target

from .compile import Facts, compile_all


@dataclass(frozen=True)
class Fitted:
    """A kernel at the block sizes chosen for a target. wrong: why none of them fits, else empty."""

    source: Source
    facts: Facts
    wrong: str = ""


def fit(
    sources: Sequence[Source],
    target: Target,
    jobs: int = 0,
    done: Callable[[], None] = lambda: None,
) -> list[Fitted]:
    """The choice for each source, in order. done: called once a kernel is settled."""
    key = target.triton
    if key is None:
        raise ValueError(f"the target {target.name} has no Triton kernels")
    ladders = [candidates(source) for source in sources]
    settled: dict[int, Fitted] = {}
    for turn in range(max(map(len, ladders), default=0)):
        open_ = [i for i in range(len(sources)) if i not in settled and turn < len(ladders[i])]
        found = compile_all([ladders[i][turn] for i in open_], key, jobs)
        for i, facts in zip(open_, found, strict=True):
            wrong = complaint(facts, target)
            if not wrong or turn + 1 == len(ladders[i]):
                settled[i] = Fitted(ladders[i][turn], facts, wrong)
                done()
    return [settled[i] for i in range(len(sources))]


def complaint(facts: Facts, target: Target) -> str:
    """What keeps a compiled kernel from running well on a target; empty when nothing does."""
    if facts.error:
        return facts.error
    shared = target.level("shared")
    room = (shared and shared.per_block_kb) or 0
    if room and facts.shared_bytes > room * 1024:
        return f"{facts.shared_bytes} bytes of shared memory; a block may have {room:g} KiB"
    if facts.spills:
        return f"{facts.spills} bytes of spilled registers a thread"
    return ""
