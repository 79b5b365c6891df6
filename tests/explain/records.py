"""Records made by hand: two layers, a decode and a prefill graph."""

from __future__ import annotations

from sitsopt.rewrite.record import Effective, GraphRecord, Miss, Place, Record, Site, Tried

MODEL = "/usr/lib/python3/site-packages/transformers/models/llama/modeling_llama.py"


def site(rule: str, module: str, node: str, saved: int = 1000, **more: object) -> Site:
    given = {
        "took": (node, f"{node}_inner"), "bytes_before": 5000 + saved, "bytes_after": 5000, "nodes": 2,
        "unfused_us": 4.0, "predicted_us": 1.5, **more,
    }  # fmt: skip
    return Site(rule, Place(module, f"{MODEL}:155", node), f"{rule}@{module}#0", **given)  # type: ignore[arg-type]


def miss(rule: str, module: str, node: str, matched: int = 3, of: int = 3, **more: str) -> Miss:
    given = {
        "reason": "condition", "condition": "D % 64 == 0", "explanation": "the kernel loads whole vectors",
        "expected": "D % 64 == 0", "found": "D = 80", **more,
    }  # fmt: skip
    place = Place(module, f"{MODEL}:98", node)
    return Miss(rule, place, matched=matched, of=of, **given)


def graph(name: str, saved: int) -> GraphRecord:
    made = GraphRecord(name, nodes_before=300, nodes_after=280, capture_ms=1200.0, rewrite_ms=12.5)
    for i in range(2):
        attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        made.sites.append(site("fuse/swiglu", mlp, f"mul_{i}", saved, lowered="cpp"))
        made.sites.append(site("fuse/rope", attention, f"add_{2 * i}", saved))
        made.sites.append(site("fuse/rope", attention, f"add_{2 * i + 1}", saved))
        made.misses.append(miss("attention/gqa", attention, f"sdpa_{i}"))
        made.misses.append(miss("fuse/swiglu", mlp, f"add_{2 * i}_inner", 1, 2, reason="pattern"))
        made.misses.append(miss("fuse/rms_norm", mlp, f"pow_{i}", 1, 6, reason="pattern"))
        made.misses.append(
            miss("fuse/late", mlp, f"mul_{i}", reason="order", condition="taken by fuse/swiglu")
        )
    made.stages = [("fuse", 6, 12.0)]
    made.tried = {
        "fuse/swiglu": Tried(roots=4), "fuse/rope": Tried(roots=4), "attention/gqa": Tried(roots=2),
        "fuse/rms_norm": Tried(roots=2), "fold/conv_bn": Tried(0, ("aten.conv2d",)),
        "fuse/late": Tried(roots=2),
    }  # fmt: skip
    return made


def record() -> Record:
    asked = [Effective("kv_cache: hotness-aware", "nothing", "quantized caches are not built yet")]
    return Record("h100", "llama,int4", [graph("decode", 1000), graph("prefill", 512000)], asked)
