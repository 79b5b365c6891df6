"""`calibrate`: what a recipe asks of the weights, made with the least loss and kept where the recipe finds it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sitsopt.calibrate import store
from sitsopt.calibrate.choose import form_of, packs
from sitsopt.calibrate.grid import Fit, Form
from sitsopt.calibrate.passes import linears
from sitsopt.calibrate.rounds import Job, calibrate, converged
from sitsopt.calibrate.sensitivity import plan, sensitivity
from sitsopt.calibrate.state import Progress, Round
from sitsopt.calibrate.state import load as load_state
from sitsopt.graph.packed import lay_out
from sitsopt.measure import text
from sitsopt.measure.engines import SitsOptions
from sitsopt.measure.errors import InputError
from sitsopt.measure.models import Loaded
from sitsopt.planning import class_names
from sitsopt.rewrite.wanted import wanted_weights
from sitsopt.runtime.cachedir import root
from sitsopt.spec.locate import search_path
from sitsopt.spec.recipe import Recipe, Weight, load_recipe

Say = Callable[[str], None]
BETTER = Form("int8")  # what a layer may have instead, under a budget
DEFAULT_ROUNDS = 3


@dataclass(frozen=True)
class CalibrateOptions:
    """How much text, how many rounds (those of the recipe unless given), where to keep the result."""

    sits: SitsOptions = field(default_factory=SitsOptions)
    text: Path | None = None
    rounds: int | None = None
    tokens: int = 16384
    window: int = 512
    out: Path | None = None


@dataclass
class _Texts:
    batches: list[Tensor]
    held: list[Tensor]
    digest: str


def run(
    loaded: Loaded, options: CalibrateOptions, say: Say = lambda text: None,
    told: Callable[[str, Round], None] = lambda name, r: None,
) -> dict[str, Any]:  # fmt: skip
    """Calibrate every entry of the recipe's `weights:`; the JSON of the verb. Raises InputError and SpecError."""
    if any(p.device.type == "meta" for p in loaded.model.parameters()):
        raise InputError(f"{loaded.name} has no weights to calibrate")
    recipe = _recipe(loaded, options)
    wanted = wanted_weights(loaded.model, lambda: loaded.model, recipe, [])
    entries = {} if wanted is None else {n: e for n, e in wanted.entries.items() if packs(e)}
    if not entries:
        raise InputError(
            f"the recipe {options.sits.recipe} packs no weights: give one that does, as in --recipe auto,int4"
        )
    texts = _texts(loaded, options)
    head = head_of(loaded.model)
    sets = [
        _one_set(loaded, options, entry, [n for n, e in entries.items() if e is entry], texts, head, say, told)
        for entry in {id(e): e for e in entries.values()}.values()
    ]  # fmt: skip
    return {
        "model": loaded.name,
        "recipe": recipe.name,
        "text": {"digest": texts.digest, "tokens": sum(b.numel() for b in texts.batches)},
        "sets": sets,
    }


def _home(options: CalibrateOptions) -> Path:
    """The folder of the search path that holds one of the recipes, else the cache folder: those that are shipped lie
    where nothing is written."""
    names = [name.strip() for name in options.sits.recipe.split(",")]
    for folder in search_path(options.sits.path):
        if any((folder / "recipes" / f"{name}.yaml").is_file() for name in names):
            return folder
    return root()


def head_of(model: Any) -> nn.Module | None:
    """What makes logits of hidden states, where a model does."""
    found: nn.Module | None = None
    if hasattr(model, "get_output_embeddings"):
        found = model.get_output_embeddings()
    return found


def _recipe(loaded: Loaded, options: CalibrateOptions) -> Recipe:
    sits = options.sits
    return load_recipe(sits.recipe, class_names(loaded.model), sits.path, sits.set)


def _one_set(
    loaded: Loaded, options: CalibrateOptions, entry: Weight, names: list[str], texts: _Texts,
    head: nn.Module | None, say: Say, told: Callable[[str, Round], None],
) -> dict[str, Any]:  # fmt: skip
    model, form = loaded.model, form_of(entry)
    name = store.set_name(form, entry.effective_bits)
    sizes = {n: (m.shape[0], m.shape[1]) for n, m in _plain(model, names).items()}
    choices = {n: [form, BETTER] if form != BETTER else [form] for n in names}
    costs = sensitivity(model, choices, [texts.held[0][:1].contiguous()], head is not None, say)
    prints = store.prints_of(model)
    kind, weights = store.model_keys(model, prints)
    folder = (options.out or _home(options)) / store.FOLDER / f"{kind}-{weights}"

    def key(forms: Mapping[str, Form]) -> str:
        facts = (sorted(prints.items()), sorted(forms.items()), texts.digest)
        return hashlib.sha256(repr((*facts, options.tokens, options.window)).encode()).hexdigest()

    forms, start = dict.fromkeys(names, form), dict[str, Fit]()
    if entry.effective_bits is not None:
        same = load_state(folder / f"{form.label}.part", key(forms))
        if same is not None and same.best:  # what the same layers got without a budget
            start, costs = same.best, _as_calibrated(costs, form, same.rounds)
        try:
            forms = plan(costs, sizes, choices, entry.effective_bits)
        except ValueError as error:
            raise InputError(str(error)) from None
    job = Job(
        model, forms, texts.batches, texts.held, head, folder / f"{name}.part", key(forms), start
    )
    rounds = options.rounds or entry.rounds or DEFAULT_ROUNDS
    progress = calibrate(job, rounds, say, lambda r: told(name, r))
    made = {
        "rounds": len(progress.rounds) - 1,
        "converged": converged(progress.rounds),
        "kl": min(r.kl for r in progress.rounds[1:]),
        "kl_nearest": progress.rounds[0].kl,
        "bits": sum(forms[n].layout.bits(*sizes[n]) * sizes[n][0] * sizes[n][1] for n in names)
        / sum(n * k for n, k in sizes.values()),
        "text": texts.digest,
    }
    packed = {n: lay_out(f.rounded(), f.form.layout) for n, f in progress.best.items()}
    path = store.write(folder, name, packed, forms, prints, made)
    return {
        "name": name,
        "file": str(path),
        **made,
        "rounds": [
            {"round": r.number, "how": r.how, "kl": r.kl, "mae": r.mean_mae}
            for r in progress.rounds
        ],
        "layers": _layers(progress, forms, sizes, costs),
    }


def _as_calibrated(
    costs: Mapping[str, Mapping[str, float]], form: Form, rounds: Sequence[Round]
) -> dict[str, dict[str, float]]:
    """Costs of the nearest numbers, brought down as far as calibration brought each layer's error."""
    label = form.label
    first, last = rounds[0].mse, rounds[-1].mse
    left = {name: last[name] / first[name] if first[name] else 1.0 for name in costs}
    return {name: {**each, label: each[label] * left[name]} for name, each in costs.items()}


def _layers(
    progress: Progress, forms: Mapping[str, Form], sizes: Mapping[str, tuple[int, int]],
    costs: Mapping[str, Mapping[str, float]],
) -> list[dict[str, Any]]:  # fmt: skip
    """The sensitivity table, the most sensitive first."""
    rows = []
    for name, form in forms.items():
        first, last = progress.rounds[0].mse[name], progress.rounds[-1].mse[name]
        nearest = costs[name][form.label]
        rows.append(
            {
                "layer": name,
                "form": form.label,
                "bits": form.layout.bits(*sizes[name]),
                "kl_by_form": dict(costs[name]),
                "kl": nearest * last / first if first else 0.0,
                "mae": [r.mae[name] for r in progress.rounds],
            }
        )
    return sorted(rows, key=lambda row: -row["kl_by_form"][row["form"]])


def _plain(model: nn.Module, names: list[str]) -> dict[str, Tensor]:
    modules = linears(model)
    return {n: store.plain(modules[n]) for n in names}


def _texts(loaded: Loaded, options: CalibrateOptions) -> _Texts:
    """Windows spread evenly over the text, four a batch; the last in eight of them is held."""
    if loaded.tokenizer is None:
        raise InputError(f"{loaded.name} came without a tokenizer: calibrate reads text")
    whole = text.calibration_text() if options.text is None else _read(options.text)
    ids = text.encode(loaded.tokenizer, whole)
    limit = getattr(loaded.config, "max_position_embeddings", None) or options.window
    window = min(options.window, limit, max(8, len(ids) // 8))
    count = min(options.tokens, len(ids)) // window // 4 * 4
    if count < 8:
        raise InputError(f"the text has {len(ids)} tokens: too few for eight windows of {window}")
    held = max(4, count // 8 // 4 * 4)
    total = count + held
    if total * window > len(ids):
        total, count = count, count - held
    apart = (len(ids) - window) // (total - 1)
    rows = torch.tensor([ids[i * apart : i * apart + window] for i in range(total)])
    rows = rows.to(loaded.device)
    chosen = torch.arange(total) % (total // held) == total // held - 1
    chosen &= chosen.cumsum(0) <= held
    batches = [b.contiguous() for b in rows[~chosen][: count // 4 * 4].view(-1, 4, window)]
    digest = hashlib.sha256(whole.encode()).hexdigest()[:12]
    return _Texts(batches, [b.contiguous() for b in rows[chosen].view(-1, 4, window)], digest)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as text: {error}") from error
