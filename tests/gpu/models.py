"""Whole models on the GPU: `torch.compile(model, backend="sits")` against eager, and timed beside Inductor.

    python -m tests.gpu.models RESULTS.json [SECONDS]

Random weights. First with every kernel that compiles (`profitability: always`), so that each is seen to be right
inside a compiled model; then as users get it, where a kernel must have been measured to pay.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn

import sitsopt
from sitsopt.backend import sits
from tests.gpu.timing import alternate

DEVICE, LENGTH, PROMPT = "cuda", 1024, 48
SIZES = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 32000, "max_position_embeddings": 2048,
}  # fmt: skip
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", SIZES),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {**SIZES, "sliding_window": 512}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {
        "n_embd": 768, "n_head": 12, "n_layer": 4, "n_positions": 2048, "vocab_size": 50257}),
}  # fmt: skip
PLAN = [("llama", "always"), ("gemma3", "always"), ("gpt2", "always"), ("llama", "measure")]

if "sits" not in torch._dynamo.list_backends(exclude_tags=()):  # the tree is here, not installed
    torch._dynamo.register_backend(sits, name="sits")


def build(name: str) -> nn.Module:
    import transformers

    config_name, model_name, sizes = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_name)(**sizes)
    model = getattr(transformers, model_name)(config)
    return model.to(torch.bfloat16).to(DEVICE).eval()


def cache(model: nn.Module) -> Any:
    from transformers import StaticCache

    config: Any = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    made = StaticCache(config=config, max_cache_len=LENGTH)
    made.early_initialization(1, heads, width, torch.bfloat16, torch.device(DEVICE))
    return made


def steps(run: Any, model: nn.Module) -> tuple[list[torch.Tensor], Any]:
    """Logits of a prefill and of three decode steps on one cache, and the cache."""
    torch.manual_seed(1)
    ids = torch.randint(3, 30000, (1, PROMPT), device=DEVICE)
    held, found = cache(model), []
    with torch.no_grad():
        for one in (ids, ids[:, :1].clone(), ids[:, 1:2].clone(), ids[:, 2:3].clone()):
            found.append(run(one, past_key_values=held, use_cache=True).logits.float().clone())
    return found, held


def attempt(name: str, how: str) -> dict[str, Any]:
    """One model under one setting: how far it is from eager, how sites were lowered, what a decode step takes."""
    torch._dynamo.reset()
    model = build(name)
    start = time.monotonic()
    run = torch.compile(
        model, backend="sits", options={"set": f"profitability={how}"}, dynamic=False
    )
    wanted, _ = steps(model, model)
    got, held = steps(run, model)
    compile_s = time.monotonic() - start
    scale = max(float(w.abs().max()) for w in wanted)
    wrong = max(float((a - b).abs().max()) for a, b in zip(got, wanted, strict=True))
    graphs = sitsopt.report(model).record.graphs
    sites = [site for graph in graphs for site in graph.sites if site.lowered_why]
    row = {
        "name": name, "profitability": how, "error": wrong, "allowed": 0.03 * scale, "right": wrong <= 0.03 * scale,
        "compile_s": round(compile_s, 1), "lowered": dict(Counter(s.lowered for s in sites)),
        "why": sorted({f"{s.lowered}: {s.rule}: {s.lowered_why}" for s in sites}),
        "fallbacks": [g.fallback for g in graphs if g.fallback],
        "effective": [f"{e.asked}: {e.got}: {e.reason}" for e in sitsopt.report(model).record.effective],
    }  # fmt: skip
    row["right"] = bool(row["right"] and not row["fallbacks"] and row["lowered"].get("triton"))
    if name == "llama":
        row["decode_us"] = times(model, run, held)
    return row


def times(model: nn.Module, run: Any, held: Any) -> dict[str, float]:
    """Microseconds of a decode step, as CUDA graphs: eager's launches cost nothing either then."""
    ids = torch.full((1, 1), 7, device=DEVICE)
    plain = torch.compile(model, dynamic=False)
    step = {"sits": run, "inductor": plain, "eager": model}
    with torch.no_grad():
        calls = {
            name: lambda i, fn=fn: fn(ids, past_key_values=held, use_cache=True)
            for name, fn in step.items()
        }
        return {name: round(us, 1) for name, us in alternate(calls, 2, rounds=5).items()}


def main(path: Path, seconds: float) -> int:
    """Runs what fits the time; 1 when any model was wrong or failed."""
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was run", file=sys.stderr)
        return 2
    stop = time.monotonic() + seconds
    told: dict[str, Any] = {"torch": torch.__version__, "models": [], "left_out": []}
    for name, how in PLAN:
        if time.monotonic() > stop:
            told["left_out"].append(f"{name} {how}")
            continue
        try:
            row = attempt(name, how)
        except Exception as error:
            row = {"name": name, "profitability": how, "right": False, "failed": str(error)[-1000:], "where": traceback.format_exc()[-3000:]}  # fmt: skip
        told["models"].append(row)
        print(json.dumps(row), flush=True)
        path.write_text(json.dumps(told, indent=2))
    return int(any(not row["right"] for row in told["models"]))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 150.0))
