"""From registers and shared memory to occupancy, and from bytes to a predicted time, by a target's facts."""

from __future__ import annotations

from sitsopt.emit.triton.cost import Cost
from sitsopt.spec.target import Target

from .compile import Facts

_WARP_REGISTERS = 256  # registers are given to a warp in blocks of this many (NVIDIA, 8 a thread)
_RESERVED = 1024  # bytes of shared memory that every block takes on sm_80 and later


def occupancy(facts: Facts, target: Target) -> float | None:
    """Threads that fit a unit at once over threads it can hold; None where a fact is missing."""
    compute = target.compute
    most, pool, warp = compute.max_threads_per_unit, compute.unit_registers, compute.warp
    if not (most and pool and warp and facts.threads):
        return None
    each = -(-max(facts.registers, 1) * warp // _WARP_REGISTERS) * _WARP_REGISTERS
    blocks = [most // facts.threads, pool // each // (facts.threads // warp)]
    shared = target.level("shared")
    if facts.shared_bytes and shared and shared.size_kb:
        reserved = _RESERVED if target.arch.startswith("sm_") else 0
        blocks.append(int(shared.size_kb * 1024) // (facts.shared_bytes + reserved))
    if compute.max_blocks_per_unit:
        blocks.append(compute.max_blocks_per_unit)
    return min(1.0, min(blocks) * facts.threads / most)


def predict_us(cost: Cost, facts: Facts, target: Target) -> tuple[float, float] | None:
    """Microseconds predicted, and the fraction of the roofline that is; None without a bandwidth.

    The roofline is the least bytes over the bandwidth, or the operations over the peak, whichever is longer.
    A launch that leaves units idle gets its share of the bandwidth only; a launch costs its gap.
    """
    bandwidth = target.memory.bandwidth_gbs
    if not bandwidth:
        return None
    peak = target.peak_tflops(cost.unit) or target.peak_tflops("f32") or 1.0
    floor = max(cost.least / (bandwidth * 1e3), cost.flops / (peak * 1e6))
    units = target.compute.units or 1
    busy = min(1.0, cost.programs / units)
    moved = cost.moved / (bandwidth * 1e3 * min(1.0, busy * 1.5))
    computed = cost.flops / (peak * 1e6 * busy)
    told = max(moved, computed) + (target.links.launch_us or 0.0)
    return told, floor / told
