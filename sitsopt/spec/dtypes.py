"""The names of dtypes, as rules, recipes and targets write them."""

from __future__ import annotations

FLOATS = ("f64", "f32", "f16", "bf16", "f8e4m3", "f8e5m2")
INTEGERS = ("i64", "i32", "i16", "i8", "u8")
DTYPES = (*FLOATS, *INTEGERS, "bool")
