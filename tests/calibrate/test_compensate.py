"""Numbers chosen for a layer's inputs: always allowed ones, and closer on these inputs than the nearest."""

import pytest
import torch

from sitsopt.calibrate.compensate import damped, fit, loss
from sitsopt.calibrate.grid import Form, first_fit
from sitsopt.graph.packed import lay_out, nearest, unpack

FORMS = [
    Form("int4", 64, True), Form("int4", 128, False), Form("int4", 32, True), Form("int8"),
    Form("int8", 64, True), Form("int8", 0, True), Form("fp8", per="row"), Form("fp8", per="tensor"),
    Form("fp8", 128, per="block"),
]  # fmt: skip


def inputs(k, rows=1000, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(k, k, generator=generator) / k**0.5
    return torch.randn(rows, k, generator=generator) @ mixing


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.label)
def test_closer_than_the_nearest(form):
    x = inputs(136)
    weight = torch.randn(37, 136, generator=torch.Generator().manual_seed(1))
    moments = damped(x.t() @ x / len(x))
    found = fit(weight, moments, form)
    plain = nearest(weight, form.scheme, form.group, form.low, form.per)
    assert loss(weight, found.values(), moments) < 0.6 * loss(weight, plain, moments)
    least, most = form.span
    assert found.numbers.min() >= least and found.numbers.max() <= most
    kept = unpack(lay_out(found.rounded(), form.layout), 37, 136, form.layout)
    torch.testing.assert_close(kept, found.values(), rtol=0, atol=0)


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.label)
@pytest.mark.parametrize("kind", ["zero", "constant", "one-signed", "outlier"])
def test_odd_rows(form, kind):
    weight = torch.randn(16, 128, generator=torch.Generator().manual_seed(2))
    if kind == "zero":
        weight[:, :64] = 0
        weight[3] = 0
    elif kind == "constant":
        weight[:, 64:] = 0.25
    elif kind == "one-signed":
        weight = weight.abs() + 3
    else:
        weight[:, 5] *= 100
    x = inputs(128)
    moments = damped(x.t() @ x / len(x))
    found = fit(weight, moments, form).values()
    assert found.isfinite().all()
    plain = nearest(weight, form.scheme, form.group, form.low, form.per)
    assert loss(weight, found, moments) <= 1.01 * loss(weight, plain, moments) + 1e-12


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.label)
def test_whole_range_is_the_nearest(form):
    weight = torch.randn(37, 136, generator=torch.Generator().manual_seed(1))
    ours = first_fit(weight, torch.ones(136), form, search=False).values()
    plain = nearest(weight, form.scheme, form.group, form.low, form.per)
    size = (plain - weight).square().mean()
    assert (ours - weight).square().mean() < 1.05 * size


def test_inputs_that_never_come():
    x = inputs(64)
    x[:, 10:20] = 0
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    found = fit(weight, damped(x.t() @ x / len(x)), Form("int4", 64, True)).values()
    assert found.isfinite().all()
