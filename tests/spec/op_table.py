"""Writes `sitsopt/spec/aten_ops.json` from the installed PyTorch:  python tests/spec/op_table.py

The table lets patterns be checked without importing PyTorch. It holds the functional ops, one a line, and
the names of the ops that write their input with the functional op that stands for each.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

TABLE = Path(__file__).parents[2] / "sitsopt" / "spec" / "aten_ops.json"

# Families that no inference graph on a CPU or a GPU is written with.
LEFT_OUT = re.compile(
    r"backward|foreach|_test_|^_?nested|_nested|sparse|miopen|cudnn|mkldnn|_functional_|_fake_quant"
    r"|_fused_(adam|sgd|ada|moving)|^_cslt|^_lu|fbgemm|quantized_|^_debug|^_make_dep|^special_.*_polynomial|^special_.*bessel|_mps$"
)
# Argument and result types that no pattern can write.
UNSPOKEN = re.compile(r"torch\.classes|Storage|QScheme|Dict\(")
ALIAS = re.compile(r"\(\w+!?( -> \*)?\)")


def schemas() -> dict[str, dict[str, object]]:
    """Every schema of the `aten` namespace: packet name -> overload name -> schema."""
    import torch

    found: dict[str, dict[str, object]] = {}
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        namespace, _, rest = name.partition("::")
        if namespace == "aten":
            packet, _, overload = rest.partition(".")
            schema = torch._C._get_schema(f"aten::{packet}", overload)
            found.setdefault(packet, {})[overload] = schema
    return found


def signature(schema: object) -> str:
    """A schema as the table spells it: no name, no aliasing, sizes as plain integers."""
    text = re.sub(r"\[\d+\](?=\??[ )])", "[]", ALIAS.sub("", str(schema)))
    text = text[text.index("(") :].replace("SymInt", "int")
    return re.sub(r"(\d+\.\d{10,}(?:e-?\d+)?)", lambda match: repr(float(match[1])), text)


def table() -> dict[str, dict[str, object]]:
    ops: dict[str, dict[str, str]] = {}
    writes: dict[str, str] = {}
    packets = schemas()
    for packet, overloads in packets.items():
        if LEFT_OUT.search(packet):
            continue
        functional = {
            name or "default": signature(schema)
            for name, schema in sorted(overloads.items())
            if not schema.is_mutable and not UNSPOKEN.search(str(schema))  # type: ignore[attr-defined]
        }
        if functional:
            ops[packet] = functional
        elif packet.endswith("_"):
            plain = packet.removesuffix("_")
            writes[packet] = plain if plain in packets else ""
    return {"ops": ops, "writes": {k: v if v in ops else "" for k, v in writes.items()}}


def dump(content: dict[str, dict[str, object]]) -> str:
    def lines(part: dict[str, object]) -> str:
        return ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in part.items())

    sections = ",\n".join(f'"{name}": {{\n{lines(part)}\n}}' for name, part in content.items())
    return f"{{\n{sections}\n}}\n"


if __name__ == "__main__":
    TABLE.write_text(dump(table()))
