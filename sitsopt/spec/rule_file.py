"""The shape of a rule file: its keys and their types. What they mean together is checked in `rule_check`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from .families import kernel_families
from .source import Spec

DTypeName = Literal[
    "f64", "f32", "f16", "bf16", "f8e4m3", "f8e5m2", "i64", "i32", "i16", "i8", "u8", "bool"
]
Text = Annotated[str, Field(min_length=1)]
Family = Annotated[
    str, Field(json_schema_extra=lambda schema: schema.update(enum=[*kernel_families()]))
]
RuleId = Annotated[str, Field(min_length=1, examples=["fuse/swiglu"])]


def _reason(value: object) -> object:
    if value is None or value == "":
        raise ValueError("a condition without a reason: write behind it why it is needed")
    return value


Reason = Annotated[str, BeforeValidator(_reason)]
Where = dict[str, Reason]


class SpellingFile(Spec):
    """One way to write the pattern, with the constants that it fixes and conditions of its own."""

    code: Text = Field(description="The pattern: straight-line Python that ends in `return`.")
    with_: dict[str, Any] = Field(
        default={}, alias="with", description="Constants of `inputs` that this spelling fixes."
    )
    where: Where = Field(default={}, description="Conditions of this spelling only, with reasons.")
    replace: Text | None = Field(
        default=None,
        description="What stands there afterwards, where it is not the rule's `replace`.",
    )


class ToleranceFile(Spec):
    """How far a result in one dtype may be from the f64 reference: |error| <= atol + rtol * |value|."""

    rtol: float = Field(ge=0, description="Relative part.")
    atol: float = Field(ge=0, description="Absolute part.")


class ExampleFile(Spec):
    """A case that is run by `verify`: the rule fires, or skips for the reason named."""

    fires: dict[str, Any] | None = Field(
        default=None, description="Sizes, dtypes and constants with which the rule must fire."
    )
    skips: dict[str, Any] | None = Field(
        default=None, description="Sizes, dtypes and constants with which it must not."
    )
    because: str | None = Field(
        default=None,
        description="What stops it: a condition, word for word, or one of pattern, shape, dtype, uses, "
        "mutation, alias, grad, order.",
    )
    given: Text | None = Field(
        default=None, description="The program to run instead of the pattern."
    )
    absent: list[str] = Field(default=[], description="Optional inputs that are left out.")
    values: dict[str, Literal["zeros", "ones", "large", "small", "inf", "nan"]] = Field(
        default={}, description="What inputs hold, where it matters; random otherwise."
    )
    layout: dict[str, Literal["transposed", "strided"]] = Field(
        default={}, description="How inputs lie in memory; contiguous otherwise."
    )
    symbolic: list[str] = Field(default=[], description="Sizes that are symbols, not numbers.")
    spelling: int | None = Field(
        default=None, ge=1, description="Which spelling, from 1; every one that fits otherwise."
    )
    shapes: dict[str, list[Annotated[int, Field(ge=0)]]] = Field(
        default={}, description="Shapes of inputs that differ from what `inputs` declares."
    )
    dtypes: dict[str, DTypeName] = Field(
        default={}, description="Dtypes of inputs that differ from what `inputs` declares."
    )
    grad: bool = Field(default=False, description="Whether gradients are recorded.")
    modules: dict[str, Text] = Field(
        default={}, description="Inputs to the module of the model in which they are read."
    )
    target: dict[str, bool | str] = Field(
        default={}, description="Facts of the target, as conditions read them."
    )

    @model_validator(mode="after")
    def _one_outcome(self) -> ExampleFile:
        if (self.fires is None) == (self.skips is None):
            raise ValueError("an example says either `fires` or `skips`")
        if self.skips is not None and not self.because:
            raise ValueError("`skips` without `because`: name the condition that stops the rule")
        if self.fires is not None and self.because is not None:
            raise ValueError("`because` belongs to `skips`")
        return self


class RuleFile(Spec):
    """A graph rewrite rule of sitsopt."""

    summary: Text = Field(description="One sentence.")
    doc: str = Field(default="", description="Why the rule exists and what it costs.")
    inputs: dict[str, str] = Field(
        min_length=1, description="Name to type: `T[*B, H]`, `Param[N, K]`, `const float`."
    )
    match: Text | Annotated[list[Text | SpellingFile], Field(min_length=1)] = Field(
        description="The pattern, or a list of its spellings."
    )
    where: Where = Field(default={}, description="Condition to the reason for it.")
    through: dict[str, list[Literal["cast", "view", "transpose"]]] = Field(
        default={},
        description="Values that may reach their reader behind a cast, view or transpose.",
    )
    fold: Text | dict[str, Text] = Field(
        default={}, description="Values computed once per parameter: `w = cat([a, b], 0)`."
    )
    replace: Text | None = Field(default=None, description="What stands there afterwards.")
    emit: Family | None = Field(default=None, description="The family of kernel to generate.")
    tolerance: dict[str, ToleranceFile] = Field(
        default={}, description="Dtype to tolerance; a dtype without one must be bitwise equal."
    )
    grad: Literal["safe", "inference"] = Field(
        default="inference",
        description="`safe`: the rule also applies where gradients are recorded.",
    )
    after: list[RuleId] = Field(default=[], description="Rules that run before this one.")
    overrides: RuleId | list[RuleId] = Field(
        default=[], description="Rules that this one is tried before, where both fit."
    )
    replaces: RuleId | None = Field(
        default=None, description="This rule's own id, when it stands in for a rule of that id."
    )
    examples: list[ExampleFile] = Field(description="Cases that `verify` runs.")
