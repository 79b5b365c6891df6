"""Captured decode steps on the GPU: right against the same model without captures, replayed, and timed.

python -m tests.gpu.regions RESULTS.json
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

import sitsopt
from tests.gpu.models import DEVICE, build, steps


def attempt(name: str) -> dict[str, Any]:
    """One model with `regions: {use: [decode]}` and without: logits of a prefill and three decode steps, run several
    times so that captures are made and replayed, and microseconds of a decode step, host included."""
    torch._dynamo.reset()
    model = build(name)
    plain = torch.compile(model, backend="sits", dynamic=False)
    wanted, held = steps(plain, model)
    plain_us = timed(plain, held)
    torch._dynamo.reset()
    run = torch.compile(model, backend="sits", options={"set": "regions.use=[decode]"}, dynamic=False)  # fmt: skip
    wrong = 0.0
    for _ in range(4):
        got, held = steps(run, model)
        pairs = zip(got, wanted, strict=True)
        wrong = max(wrong, *(float((a - b).abs().max()) for a, b in pairs))
    report = sitsopt.report(model)
    scale = max(float(w.abs().max()) for w in wanted)
    data, notes = report.json(), [n for g in report.record.graphs for n in g.capture_notes]
    captured = any(one["share"] > 0 for one in data["coverage"]) and not notes
    return {
        "name": name, "error": wrong, "allowed": 0.03 * scale, "right": captured and wrong <= 0.03 * scale,
        "notes": notes, "coverage": data["coverage"], "decode_us": {"plain": plain_us, "captured": timed(run, held)},
    }  # fmt: skip


def timed(run: Any, held: Any, calls: int = 40) -> float:
    """Median microseconds of a decode step from call to result."""
    ids, found = torch.full((1, 1), 7, device=DEVICE), []
    with torch.no_grad():
        for _ in range(calls):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run(ids, past_key_values=held, use_cache=True)
            stop.record()
            stop.synchronize()
            found.append(start.elapsed_time(stop) * 1e3)
    return round(sorted(found[calls // 2 :])[calls // 4], 1)


def main(path: Path) -> int:
    """1 when a model was wrong, failed, or was not captured."""
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was run", file=sys.stderr)
        return 2
    rows = []
    for name in ("llama", "gpt2"):
        try:
            rows.append(attempt(name))
        except Exception as error:
            rows.append({"name": name, "right": False, "failed": str(error)[-1000:], "where": traceback.format_exc()[-2000:]})  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
        path.write_text(json.dumps({"torch": torch.__version__, "regions": rows}, indent=2))
    return int(any(not row["right"] for row in rows))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
