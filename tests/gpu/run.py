"""`python -m tests.gpu.run RESULTS.json [SECONDS]`: probes, then every case: right, and how fast.

Written after every case, so that a run that is cut short still says what it found.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import triton

from tests.gpu.cases import MAKERS, Case
from tests.gpu.timing import alternate, probes


def main(path: Path, seconds: float) -> int:
    """Runs what fits the time; 1 when any kernel was wrong or failed."""
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was run", file=sys.stderr)
        return 2
    stop = time.monotonic() + seconds
    told: dict[str, Any] = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "probes": probes(), "kernels": [], "left_out": 0,
    }  # fmt: skip
    print(json.dumps(told))
    for at, make in enumerate(MAKERS):
        if time.monotonic() > stop:
            told["left_out"] = len(MAKERS) - at
            break
        told["kernels"].append(attempt(make, told["probes"]))
        print(json.dumps(told["kernels"][-1]))
        path.write_text(json.dumps(told, indent=2))
        torch.cuda.empty_cache()
    path.write_text(json.dumps(told, indent=2))
    return int(any(not row.get("right") for row in told["kernels"]))


def attempt(make: Any, probe: dict[str, float]) -> dict[str, Any]:
    """One case; an exception is a result too."""
    try:
        case = make()
        wrong, allowed = case.check()
        row = {"name": case.name, "error": wrong, "allowed": allowed, "right": wrong <= allowed}
        return {**row, **timings(case, probe)}
    except Exception as error:
        return {"name": getattr(make, "__name__", ""), "right": False, "failed": str(error)[-500:], "where": traceback.format_exc()[-800:]}  # fmt: skip


def timings(case: Case, probe: dict[str, float]) -> dict[str, Any]:
    """Microseconds of everyone, our bandwidth against the probe, and the ratios (above 1: we are faster)."""
    times = alternate({"sits": case.ours, **case.against}, count=max(case.sets, 8))
    gbs = case.bytes / times["sits"] / 1e3
    return {
        "us": {name: round(us, 2) for name, us in times.items()},
        "gbs": round(gbs, 1),
        "of_probe": round(gbs / probe["read_gbs"], 3),
        "versus": {
            name: round(us / times["sits"], 3) for name, us in times.items() if name != "sits"
        },
    }


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 420.0))
