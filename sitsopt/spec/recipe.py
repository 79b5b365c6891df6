"""Recipes: what a model is given, from files that lie on top of one another.

load_recipe("auto,int4", ["LlamaForCausalLM", "PreTrainedModel", "Module"], overrides=["weights.*.group=128"])
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from .errors import Pos, SpecError, raise_all
from .fields import fields_at
from .locate import dirs, files, find
from .merge import bases, document, from_data, merge, read_map, without_null
from .override import override
from .recipe_check import check, check_removals
from .recipe_form import Hook, KVCache, Recipe, Regions, Speculate, Weight, matches_rule
from .source import Document, build
from .yamltree import Node

__all__ = [
    "AUTO", "Hook", "KVCache", "Recipe", "Regions", "Request", "Speculate", "Weight", "dump", "family",
    "load_recipe", "matches_rule", "requests",
]  # fmt: skip

AUTO = "auto"
DEFAULT = "default"

Source = str | Path | Mapping[str, Any]
Paths = Sequence[str | Path]


@dataclass(frozen=True)
class _Layer:
    name: str
    doc: Document
    path: Path | None


def load_recipe(
    spec: Source | Sequence[Source] = AUTO,
    model_classes: Sequence[str] = (),
    extra_dirs: Paths = (),
    overrides: Sequence[str] = (),
    rule_ids: Collection[str] | None = None,
) -> Recipe:
    """The recipe that `spec` means, checked.

    `spec` is a name, a path, a map, several names joined by commas, or a list of all these: later ones
    lie on top. `auto` is the family of the model, by `model_classes`: the names of its class and of the
    classes that it derives from, the nearest first. `extra_dirs` comes before the search path.
    `overrides` are `PATH=VALUE`. With `rule_ids` a name of an unknown rule is an error.

    Raises SpecError or SpecErrors; every error names the file and line that is wrong.
    """
    layers = list(_layers(spec, model_classes, extra_dirs))
    root: Node | None = None
    errors: list[SpecError] = []
    for layer in _stack(layers, extra_dirs):
        errors += check_removals(root, layer.doc.root)
        root = layer.doc.root if root is None else merge(root, layer.doc.root)
    raise_all(errors)
    assert root is not None
    for text in overrides:
        root = override(root, text, fields_at(Recipe, ()))
    entries = {key: entry for key, entry in root.entries.items() if key != "extends"}
    merged = without_null(Node("map", root.pos, entries=entries), Recipe)
    return _built(document(merged, ",".join(layer.name for layer in layers)), rule_ids)


def _built(doc: Document, rule_ids: Collection[str] | None) -> Recipe:
    recipe = build(Recipe, doc)
    recipe._name, recipe._doc = doc.file, doc
    raise_all(check(recipe, rule_ids))
    return recipe


def _layers(
    spec: Source | Sequence[Source], classes: Sequence[str], extra: Paths
) -> Iterator[_Layer]:
    if isinstance(spec, Mapping):
        pos = Pos("recipe")
        root = from_data(spec, pos)
        yield _Layer("recipe", document(root, "recipe"), None)
    elif isinstance(spec, Path):
        yield _Layer(spec.stem, read_map(spec), spec)
    elif isinstance(spec, str):
        column = 1
        for part in spec.split(","):
            yield _named(part.strip(), Pos(f"--recipe {spec}", 1, column), classes, extra)
            column += len(part) + 1
    elif isinstance(spec, Sequence) and spec:
        for one in spec:
            yield from _layers(one, classes, extra)
    else:
        raise SpecError(Pos("recipe"), f"{spec!r} is no recipe", expected="a name, a path or a map")


def _named(name: str, pos: Pos, classes: Sequence[str], extra: Paths) -> _Layer:
    if not name:
        raise SpecError(pos, "an empty name", expected="names joined by commas: auto,int4")
    if name.endswith((".yaml", ".yml")):
        path = Path(name).expanduser()
    else:
        name = family(classes, extra) if name == AUTO else name
        path = find("recipes", name, extra, pos=pos)
    return _Layer(path.stem, read_map(path), path)


def _stack(layers: list[_Layer], extra: Paths) -> Iterator[_Layer]:
    """The layers with the files that they extend, each file once: the lowest first."""

    def lookup(name: str, doc: Document, at: Path) -> Path:
        pos = doc.at(("extends",))
        return find("recipes", name, extra, pos=pos, below=at if name == at.stem else None)

    seen: set[Path] = set()
    for layer in layers:
        start = layer.path or Path(layer.name)
        for path in bases(layer.doc, start, lookup):
            if path not in seen:
                seen.add(path)
                yield _Layer(path.stem, read_map(path), path)
        if layer.path is None or layer.path not in seen:
            seen.add(start)
            yield layer


def family(model_classes: Sequence[str], extra_dirs: Paths = ()) -> str:
    """The name of the recipe made `for` a model: the one that names the nearest of its classes, else
    `default`. Between two that name the same class, the folder that comes first on the path decides."""
    homes = dirs("recipes", extra_dirs)
    made: dict[str, list[tuple[int, str, Pos]]] = {}
    for name, path in files("recipes", extra_dirs).items():
        doc = read_map(path)
        wanted = doc.data.get("for")
        for index, one in enumerate(wanted if isinstance(wanted, list) else []):
            home = next(i for i, folder in enumerate(homes) if path.is_relative_to(folder))
            made.setdefault(str(one), []).append((home, name, doc.at(("for", index))))
    for one in model_classes:
        if one in made:
            best = min(made[one])
            rivals = [other for other in made[one] if other[0] == best[0] and other[1] != best[1]]
            if rivals:
                problem = f"both `{best[1]}` and `{rivals[0][1]}` are for {one}"
                raise SpecError(rivals[0][2], problem, hint="name the recipe", path="for")
            return best[1]
    return DEFAULT


@dataclass(frozen=True)
class Request:
    """One thing that a recipe asks for: `section` is its key in the file, `asked` says it in words."""

    section: str
    asked: str
    path: tuple[str | int, ...]
    pos: Pos


def requests(recipe: Recipe) -> list[Request]:
    """Everything that a recipe asks for and that may turn out otherwise: weights, cache, speculation,
    regions, hooks, and how a rewrite must prove itself. `expect` is not among them: it raises."""
    found: list[tuple[tuple[str | int, ...], str]] = []
    for index, weight in enumerate(recipe.weights):
        if weight.scheme is not None:
            found.append((("weights", index), str(weight)))
    if recipe.kv_cache is not None:
        found.append((("kv_cache",), _words(recipe.kv_cache.model_dump())))
    if recipe.speculate is not None:
        found.append((("speculate",), _words(recipe.speculate.model_dump())))
    if recipe.regions is not None:
        found += [(("regions", "use", i), name) for i, name in enumerate(recipe.regions.use)]
        if recipe.regions.require is not None:
            found.append((("regions", "require"), f"require {recipe.regions.require:g}"))
    for name, hook in sorted(recipe.hooks.sections().items()):
        path = ("hooks", "others", name) if name in recipe.hooks.others else ("hooks", name)
        found.append((path, f"{name}, {'applied' if hook['apply'] else 'planned'}"))
    if "profitability" in recipe.model_fields_set:
        found.append((("profitability",), recipe.profitability))
    return [
        Request(str(path[0]), f"{path[0]}: {asked}", path, recipe.origin(path))
        for path, asked in found
    ]


def _words(settings: dict[str, Any]) -> str:
    head, *rest = settings.items()
    return ", ".join([str(head[1]), *(f"{key} {value}" for key, value in rest)])


def dump(recipe: Recipe) -> str:
    """The recipe as the text of one file that needs no other."""
    stream = StringIO()
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style, yaml.width = False, 4096
    yaml.dump(recipe.as_dict(), stream)
    return stream.getvalue()
