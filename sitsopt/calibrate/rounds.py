"""One calibration: rounds that bring a model with packed weights ever closer to the model itself.

Round 0 takes the nearest numbers. Round 1 goes through the blocks and chooses each layer's numbers for what the
layers before it have done (`compensate`); every later round tunes all scales at once (`tune`). The best round on held
text is kept. After each layer and each round the state is written, and a run that was interrupted goes on from there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from .compensate import damped, fit
from .grid import Fit, Form, first_fit
from .passes import Moments, Walk, lent, linears, output, put, reading, weight_of
from .state import Progress, Round, load, save
from .tune import Adam, Teacher, measured, tune

Said = Callable[[str], None]
SAVE_EVERY = 20.0  # seconds, inside round 1
SAMPLE = 64  # tokens on which a layer's output is compared
ENOUGH = 0.01  # a round that gains less of the divergence is the last


@dataclass
class Job:
    """What to calibrate, and on what. held: batches that choose between rounds and tune nothing. start: what
    another calibration of the same weights found, instead of a pass over the blocks."""

    model: nn.Module
    forms: Mapping[str, Form]
    batches: Sequence[Tensor]
    held: Sequence[Tensor]
    head: nn.Module | None
    state: Path
    key: str  # of everything that the state depends on
    start: Mapping[str, Fit] = field(default_factory=dict)
    rate: float = 2e-3  # of tuning, in steps of a group
    share: float = 0.5  # see `Moments.target`

    def own(self) -> dict[str, Tensor]:
        """The weights as they came: f32 [N, K] by layer."""
        modules = linears(self.model)
        return {name: weight_of(modules[name]) for name in self.forms}


def calibrate(job: Job, rounds: int, said: Said, done: Callable[[Round], None]) -> Progress:
    """Run up to `rounds` rounds after round 0, those on disk included. `done` is told of each round."""
    progress = load(job.state, job.key) or Progress()
    for old in progress.rounds:
        done(old)
    if len(progress.rounds) > rounds:
        return progress
    with torch.no_grad():
        teacher = Teacher(job.model, job.head)
        teacher.learn(job.held, said)
        scale = Scale(job, job.own())
        with lent(job.model, list(job.forms)):
            try:
                for number in range(len(progress.rounds), rounds + 1):
                    if converged(progress.rounds):
                        break
                    how = _round(job, number, rounds, progress, teacher, scale.own, said)
                    kl = measured(job.model, job.held, teacher)
                    better = kl < min((r.kl for r in progress.rounds), default=torch.inf)
                    if number and (better or not progress.best):
                        progress.best = _copied(progress.fits)
                    progress.rounds.append(Round(number, how, kl, *scale(progress.fits)))
                    if number == 0:
                        progress.fits = {}
                        _put(job.model, scale.own)
                    done(progress.rounds[-1])
                    save(job.state, job.key, progress)
            except KeyboardInterrupt:
                if (
                    len(progress.rounds) == 1
                ):  # in the middle of round 1; a tuning round starts again
                    save(job.state, job.key, progress)
                raise
    return progress


def _round(
    job: Job, number: int, rounds: int, progress: Progress, teacher: Teacher,
    own: Mapping[str, Tensor], said: Said,
) -> str:  # fmt: skip
    """One round, which leaves its weights in the model; what it did."""

    def say(text: str) -> None:
        said(f"round {number}: {text}")

    if number == 0:
        say("the nearest numbers")
        for name, weight in own.items():
            progress.fits[name] = first_fit(
                weight, torch.ones(weight.shape[1]), job.forms[name], False
            )
        _put(job.model, {n: f.values() for n, f in progress.fits.items()})
        return "nearest"
    if number == 1 and job.start:
        say("what was calibrated without a budget")
        for name, form in job.forms.items():
            known = job.start.get(name)
            if known is None or known.form != form:
                known = first_fit(own[name], torch.ones(own[name].shape[1]), form)
            progress.fits[name] = known
        _put(job.model, {n: f.values() for n, f in progress.fits.items()})
        return "compensated before"
    if number == 1:
        _walk(job, progress, say)
        return "compensated"
    if not teacher.knows(job.batches):
        _put(job.model, own)
        teacher.learn(job.batches, say)
    _put(job.model, {n: f.values() for n, f in progress.fits.items()})
    rate = job.rate * (1 - (number - 2) / max(1, rounds - 1))
    tune(job.model, progress.fits, job.batches, teacher, Adam(rate), say)
    return "tuned"


def _walk(job: Job, progress: Progress, said: Said) -> None:
    saved = time.monotonic()

    def pack(name: str, module: nn.Module, moments: Moments) -> Tensor:
        nonlocal saved
        mean = Moments(moments.own / moments.rows, moments.cross / moments.rows, 1)
        target = mean.target(weight_of(module), job.share)
        found = progress.fits[name] = fit(target, damped(mean.own), job.forms[name])
        if time.monotonic() - saved > SAVE_EVERY:
            save(job.state, job.key, progress)
            saved = time.monotonic()
        return found.values()

    known = dict(progress.fits)
    Walk(job.model, list(job.forms), pack, known=known, said=said).run(job.batches)


class Scale:
    """Measures each layer's output: on a few tokens, with what the layer reads in the model as it is."""

    def __init__(self, job: Job, own: dict[str, Tensor]) -> None:
        self.own = own
        with reading(linears(job.model), list(own)) as inputs:
            output(job.model, job.held[0])
        flat = {n: x.flatten(0, -2).float() for n, x in inputs.items()}
        self.inputs = {n: x[:: max(1, len(x) // SAMPLE)].clone() for n, x in flat.items()}

    def __call__(self, fits: Mapping[str, Fit]) -> tuple[dict[str, float], dict[str, float]]:
        """(mean absolute error over the mean size, mean squared error over the mean square) of each output."""
        mae, mse = {}, {}
        for name, x in self.inputs.items():
            gave = x @ self.own[name].t()
            gone = x @ fits[name].values().t() - gave
            mae[name] = float(gone.abs().mean() / gave.abs().mean().clamp(min=1e-30))
            mse[name] = float(gone.square().mean() / gave.square().mean().clamp(min=1e-30))
        return mae, mse


def converged(rounds: Sequence[Round]) -> bool:
    """Whether the last tuned round gained next to nothing."""
    return (
        bool(rounds) and rounds[-1].how == "tuned" and rounds[-1].kl > rounds[-2].kl * (1 - ENOUGH)
    )


def _put(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    modules = linears(model)
    for name, weight in weights.items():
        put(modules[name], weight)


def _copied(fits: Mapping[str, Fit]) -> dict[str, Fit]:
    return {n: Fit(f.form, f.k, f.numbers, f.scale.clone(), f.low.clone()) for n, f in fits.items()}
