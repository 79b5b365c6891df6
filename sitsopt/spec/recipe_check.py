"""What a recipe must satisfy beyond the types of its keys."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from .errors import SpecError, did_you_mean
from .merge import is_null
from .recipe_form import Recipe, Weight, matches_rule
from .select import selector
from .yamltree import Node

FREE = ("exclude", "include", "expect")  # maps whose keys are names of rules


def check(recipe: Recipe, rules: Collection[str] | None) -> list[SpecError]:
    """Every mistake. `rules` are the ids of all rules; without them their names are not checked."""
    errors = [*_weights(recipe), *_kv_cache(recipe), *_speculate(recipe), *_expect(recipe)]
    return errors if rules is None else [*errors, *_rules(recipe, rules)]


def check_removals(base: Node | None, over: Node) -> list[SpecError]:
    """The nulls of a file that take nothing back, where a null could also be a forgotten value."""
    errors = []
    for name in FREE:
        entry = over.entries.get(name)
        below = base.entries.get(name) if base else None
        for key, value in (entry.value.entries if entry else {}).items():
            if not is_null(value.value) or (below and key in below.value.entries):
                continue
            what = "a count" if name == "expect" else "a reason"
            errors.append(SpecError(value.key.pos, f"`{key}` has no value", expected=what,
                                    hint="null takes back what a recipe below says; none does",
                                    path=f"{name}.{key}"))  # fmt: skip
    return errors


def _weights(recipe: Recipe) -> Iterator[SpecError]:
    first: dict[str, int] = {}
    for index, weight in enumerate(recipe.weights):
        path = ("weights", index)
        pos = recipe.text_at((*path, "match"))
        try:
            selector(weight.match, pos=pos)
        except SpecError as error:
            yield SpecError(error.pos, error.problem, expected=error.expected, hint=error.hint,
                            path=f"weights[{index}].match")  # fmt: skip
        if weight.match in first:
            yield SpecError(pos, f"`{weight.match}` stands twice", hint="the first match wins",
                            path=f"weights[{index}].match")  # fmt: skip
        first.setdefault(weight.match, index)
        yield from _weight(recipe, weight, index)


def _weight(recipe: Recipe, weight: Weight, index: int) -> Iterator[SpecError]:
    def error(key: str, problem: str, **more: str) -> SpecError:
        pos = recipe.origin(("weights", index, key)) if key else recipe.origin(("weights", index))
        return SpecError(
            pos, problem, path=f"weights[{index}]" + (f".{key}" if key else ""), **more
        )

    if weight.scheme is None and weight.skip is None:
        yield error("", "neither `scheme` nor `skip`", expected="scheme: int4, or skip: why")
    if weight.scheme is not None and weight.skip is not None:
        yield error("skip", "both `scheme` and `skip`", expected="one of the two")
    if weight.skip is not None:
        for key in sorted(weight.model_fields_set - {"match", "skip", "scheme"}):
            yield error(
                key, f"`{key}` beside `skip`", hint="weights that are skipped take no settings"
            )
    if weight.scheme == "stored":
        for key in sorted({"group", "zero_point", "per", "rounds"} & weight.model_fields_set):
            yield error(key, f"`{key}` beside `stored`", hint="the file says how its weights are")
        return
    if weight.per is not None and weight.scheme != "fp8":
        yield error("per", "`per` is a setting of fp8", expected="scheme: fp8")
    if weight.group is not None and weight.scheme == "fp8":
        yield error("group", "fp8 has no groups of its own", expected="per: tensor, row or block")
    elif weight.group is not None and weight.group % 8:
        yield error("group", f"groups of {weight.group}", expected="a multiple of 8")
    if weight.scheme == "fp8" and weight.zero_point:
        yield error("zero_point", "fp8 has no zero point", expected="int8 or int4")


def _kv_cache(recipe: Recipe) -> Iterator[SpecError]:
    cache = recipe.kv_cache
    if cache is None:
        return
    useless = {"recency": ("hot_budget", "fallback_threshold"), "hotness-aware": ()}.get(
        cache.policy, ("hot_budget", "fallback_threshold", "window", "sinks")
    )
    for key in useless:
        if key in cache.model_fields_set:
            yield SpecError(recipe.origin(("kv_cache", key)), f"`{key}` means nothing to `{cache.policy}`",
                            hint="remove it, or choose another policy", path=f"kv_cache.{key}")  # fmt: skip


DRAFTS = ("prompt-lookup", "layer-skip", "int4", "int8")


def _speculate(recipe: Recipe) -> Iterator[SpecError]:
    if recipe.speculate is None:
        return
    draft = recipe.speculate.draft
    pos, path = recipe.text_at(("speculate", "draft")), "speculate.draft"
    if draft not in DRAFTS and not draft.removeprefix("model:").strip():
        yield SpecError(pos, "no model after `model:`", path=path)
    elif draft not in DRAFTS and (close := did_you_mean(draft, DRAFTS)):
        yield SpecError(pos, f"`{draft}` is no draft", expected="prompt-lookup, layer-skip, int4, int8 or a model",
                        hint=f"{close} A model of that name is `model:{draft}`", path=path)  # fmt: skip
    if (
        recipe.speculate.acceptance == "exact"
        and "entropy_ratio" in recipe.speculate.model_fields_set
    ):
        yield SpecError(recipe.origin(("speculate", "entropy_ratio")),
                        "`entropy_ratio` means nothing to `exact`",
                        hint="remove it, or choose `acceptance: adaptive`",
                        path="speculate.entropy_ratio")  # fmt: skip


def _expect(recipe: Recipe) -> Iterator[SpecError]:
    try:
        recipe.expectations()
    except SpecError as error:
        yield error
    for rule in recipe.expect:
        if why := recipe.excluded(rule):
            yield SpecError(recipe.key_at(("expect", rule)), f"`{rule}` is expected and excluded",
                            hint=f"excluded because: {why}", path=f"expect.{rule}")  # fmt: skip


def _rules(recipe: Recipe, rules: Collection[str]) -> Iterator[SpecError]:
    for name in FREE:
        for key in getattr(recipe, name):
            known = key in rules if name == "expect" else any(matches_rule(key, r) for r in rules)
            if not known:
                yield SpecError(recipe.key_at((name, key)), f"there is no rule `{key}`",
                                hint=did_you_mean(key, rules), path=f"{name}.{key}")  # fmt: skip
    regions = [rule.removeprefix("regions/") for rule in rules if rule.startswith("regions/")]
    for index, name in enumerate(recipe.regions.use if recipe.regions else []):
        if name not in regions:
            yield SpecError(recipe.text_at(("regions", "use", index)), f"there is no region rule `{name}`",
                            hint=did_you_mean(name, regions), path=f"regions.use[{index}]")  # fmt: skip
