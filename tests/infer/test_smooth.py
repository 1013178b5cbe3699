"""Smooth terms: a penalised regression, and its marginal likelihood in closed form."""

import copy

import numpy as np
import pyro
import pytest
import torch
from pyro.distributions import Normal, Poisson
from scipy.interpolate import BSpline
from scipy.optimize import minimize
from scipy.stats import multivariate_normal
from torch.distributions import constraints

from pyrohmm import (
    HMM,
    MarginalModel,
    RegressionHMM,
    Sequences,
    fit_em,
    fit_laplace,
    fit_map,
    formulas,
    freeze,
    metrics,
    regression,
)
from pyrohmm.infer import laplace


def splines(x, size, period):
    """B-splines of all of the line, or of a circle, one by one; and first differences."""
    if period is None:
        step = (x.max() - x.min()) / (size - 3)
        starts = x.min() + step * np.arange(-3, size - 3)
    else:
        step = period / size
        starts = step * np.arange(-3, size - 3)
    columns = []
    for start in starts:
        one = BSpline.basis_element(start + step * np.arange(5), extrapolate=False)
        turns = [0.0] if period is None else [0.0, -period, period]
        columns.append(sum(np.nan_to_num(one(x + turn)) for turn in turns))
    differences = np.diff(np.eye(size), axis=0)
    if period is not None:
        differences = np.vstack([differences, np.eye(size)[0] - np.eye(size)[-1]])
    return np.stack(columns, -1), differences


def normal_model(data):
    mean = pyro.param("mean", torch.tensor(0.0))
    spread = pyro.param("spread", torch.tensor(1.0), constraint=constraints.positive)
    noise = pyro.param("noise", torch.tensor(1.0), constraint=constraints.positive)
    size = data.covariates.size(-1) - 1
    scale = spread.unsqueeze(-1) * torch.ones(size)
    smooth = pyro.sample("smooth", Normal(0.0, scale).to_event(1))
    curve = (data.covariates[..., 1:] * smooth[..., None, :]).sum(-1)  # (*, N, T)
    level = (mean.unsqueeze(-1) + curve).unsqueeze(-1)
    zero = torch.zeros(1, dtype=level.dtype)
    with pyro.plate("sequences", len(data)):
        observed = Normal(level, noise.reshape(*noise.shape, 1, 1) if noise.dim() else noise)
        hmm = HMM(zero, zero.unsqueeze(0), observed, data.lengths, emission_per_step=True)
        pyro.sample("x", hmm, obs=data.values)
    return hmm


@pytest.mark.parametrize("period", [None, 24.0])
def test_the_weight_of_the_penalty_is_that_of_a_closed_form(period):
    generator = np.random.default_rng(0)
    x = np.sort(generator.uniform(0.0, 24.0, size=120))
    y = np.sin(2 * np.pi * x / 24) + 1.0 + 0.3 * generator.normal(size=120)
    text = "~ smooth(x, 8)" if period is None else "~ smooth(x, 8, period=24)"
    design = formulas({"x": x}, loc=text)
    columns = torch.as_tensor(design.matrix({"x": x}))
    assert columns.shape == (120, 8)
    data = Sequences(
        torch.as_tensor(y)[:, None], torch.ones(120).long(), covariates=columns[:, None]
    )
    fit = fit_laplace(normal_model, data, ["smooth"], tolerance=1e-9)

    basis, differences = splines(x, 8, period)
    flat = np.linalg.pinv(differences.T @ differences)  # covariance of a random walk around zero

    def loss(theta):
        cover = np.exp(2 * theta[1]) * basis @ flat @ basis.T + np.exp(2 * theta[2]) * np.eye(120)
        return -multivariate_normal(np.full(120, theta[0]), cover).logpdf(y)

    found = minimize(loss, [1.0, -1.0, -1.0], method="BFGS")
    assert fit.log_marginal == pytest.approx(-found.fun, abs=1e-5)
    spread, noise = (fit.parameters[name].item() for name in ("spread", "noise"))
    np.testing.assert_allclose([np.log(spread), np.log(noise)], found.x[1:], atol=1e-3)
    # the curve of the same weight, penalised: intercept and splines
    whole = np.concatenate([np.ones((120, 1)), basis], 1)
    penalty = np.zeros((9, 9))
    penalty[1:, 1:] = (noise / spread) ** 2 * (differences.T @ differences) + 1e-9 * np.eye(8)
    curve = whole @ np.linalg.solve(whole.T @ whole + penalty, whole.T @ y)
    ours = fit.parameters["mean"] + columns[:, 1:] @ fit.parameters["smooth"].double()
    np.testing.assert_allclose(ours, curve, atol=1e-3)
    low, high = fit.intervals(data)["spread"]
    assert low < spread < high
    effect = fit.effects(data)["smooth"]
    assert effect.mode.shape == effect.std_error.shape == (7,)
    assert bool((effect.std_error > 0).all())
    assert fit.hmm(data).emission.loc.shape == (120, 1, 1)
    # its standard errors, those of known weights and a little for their uncertainty
    known = np.linalg.inv(whole.T @ whole + penalty) * noise**2
    wide = np.sqrt(np.einsum("ti,ij,tj->t", whole, known, whole))
    information = fit.information(data)
    _, error = information.of(lambda hmm: hmm.emission.loc.flatten())
    assert bool((error.numpy() > 0.999 * wide).all())
    np.testing.assert_allclose(error, wide, rtol=0.03)
    limits = information.intervals(of=lambda hmm: hmm.emission.loc.flatten())
    low, high = limits["of"]
    np.testing.assert_allclose((high - low).mean(), 2 * 1.96 * wide.mean(), rtol=0.05)


def test_two_states_share_a_cyclic_curve():
    """Poisson counts; a curve that is not there has a spread near zero."""
    generator = np.random.default_rng(1)
    hours = np.arange(240) % 24
    states = (generator.random((30, 8)) < 0.1).cumsum(1).flatten() % 2
    design = formulas({"hour": hours}, rate="~ smooth(hour, 6, period=24)")
    columns = torch.as_tensor(design.matrix({"hour": hours})).float()

    def model(data):
        level = pyro.param("level", torch.tensor([0.0, 2.0]))
        spread = pyro.param("spread", torch.tensor(0.5), constraint=constraints.positive)
        scale = spread.unsqueeze(-1) * torch.ones(5)
        smooth = pyro.sample("smooth", Normal(0.0, scale).to_event(1))
        curve = (data.covariates[..., 1:] * smooth[..., None, :]).sum(-1, keepdim=True)
        rows = torch.tensor([[0.9, 0.1], [0.1, 0.9]]).to(curve).log()
        rate = (level.unsqueeze(-2) + curve).exp()
        with pyro.plate("sequences", len(data)):
            hmm = HMM(torch.full((2,), 0.5).to(curve).log(), rows, Poisson(rate), data.lengths,
                      emission_per_step=True)  # fmt: skip
            pyro.sample("x", hmm, obs=data.values)
        return hmm

    ends = []
    for height in (0.0, 0.6):
        rate = np.exp(2.0 * states + height * np.cos(2 * np.pi * hours / 24))
        counts = torch.as_tensor(generator.poisson(rate)).float()
        eight = torch.full((30,), 8)
        data = Sequences(counts.reshape(30, 8), eight, covariates=columns.reshape(30, 8, -1))
        fit = fit_laplace(model, data, ["smooth"])
        ends.append(fit.parameters["spread"].item())
        curve = (columns[:24, 1:].double() @ fit.parameters["smooth"].double()).numpy()
        wanted = height * np.cos(2 * np.pi * np.arange(24) / 24)
        np.testing.assert_allclose(curve - curve.mean(), wanted, atol=0.25)
    assert ends[0] < ends[1] / 3


@pytest.mark.parametrize("slope", [0.0, 2.0])
def test_em_finds_the_weight_of_the_restricted_likelihood(slope, monkeypatch):
    """One state and a known scale: the likelihood of all contrasts, in closed form."""
    generator = np.random.default_rng(2)
    x = generator.uniform(size=80)
    y = 3.0 + slope * np.sin(6 * x) + generator.normal(size=80)
    design = formulas({"x": x}, loc="~ smooth(x, 9)")
    data = Sequences(torch.as_tensor(y)[None], torch.tensor([80]),
                     covariates=torch.as_tensor(design.matrix({"x": x}))[None])  # fmt: skip
    module = RegressionHMM(1, regression(Normal, loc=design["loc"])).double()
    freeze(module, "emission.scale.coefficients", torch.zeros(1, 1))
    fit = fit_em(module, data, tolerance=1e-12)
    basis, differences = splines(x, 9, None)
    flat = basis @ np.linalg.pinv(differences.T @ differences) @ basis.T
    contrasts = np.linalg.svd(np.ones((1, 80)))[2][1:]

    def loss(spread):
        cover = contrasts @ (spread**2 * flat + np.eye(80)) @ contrasts.T
        return -multivariate_normal(np.zeros(79), cover).logpdf(contrasts @ y)

    spread = fit.model.module.emission.loc.spread.item()
    grid = np.geomspace(1e-3, 10.0, 4000)
    best = grid[np.argmin([loss(value) for value in grid])]
    assert spread == pytest.approx(best, rel=0.02) if slope else spread < 0.05 > best
    assert fit.notes[-1].startswith("smooth terms have ")
    share = spread**2 * contrasts @ flat @ contrasts.T  # of the variance of contrasts
    effective = np.trace(share @ np.linalg.inv(share + np.eye(79)))
    count = metrics.num_parameters(fit.model, data)  # the level, and what the penalty leaves
    assert count == pytest.approx(1 + effective, abs=0.02)
    monkeypatch.setattr(laplace, "FITS", 2)
    short = fit_em(module, data)
    assert [fit.converged, short.converged] == [True, False]
    assert "still changed in the last of 2 fits" in short.notes[-2]


def test_weights_of_all_parts_have_the_largest_marginal_likelihood():
    """Of transitions, first states, rates of counts; more knots than values, and a line beside."""
    generator = np.random.default_rng(1)
    x, hour = np.repeat(generator.uniform(-2.0, 2.0, 12), 40), np.tile(np.arange(40) % 8, 12)
    moves = generator.random(480) < 0.1 + 0.2 * (hour > 3)
    counts = generator.poisson(np.exp(1 + 1.5 * (moves.reshape(12, 40).cumsum(1).ravel() % 2)))
    frame = {"id": np.repeat(np.arange(12), 40), "x": x, "hour": hour, "y": counts}
    design = formulas(frame, transition="~ smooth(hour, 12, period=8)", rate="~ x + smooth(x, 40)",
                      initial="~ smooth(x, 5)")  # fmt: skip
    data = Sequences.from_dataframe(
        design.table(frame), by="id", columns="y", covariates=design.names
    )
    family = regression(Poisson, rate=design["rate"], prior_scale=3.0)
    module = RegressionHMM(2, family, design["transition"], design["initial"], prior_scale=3.0)
    with pytest.raises(ValueError, match="weights of smooth terms are not known"):
        fit_map(MarginalModel(module), data)
    pyro.set_rng_seed(0)
    fit = fit_em(module.double(), data, tolerance=1e-10, restarts=3)
    table = fit.table(data)
    assert {"transition 0 → 1: smooth(hour, 12, period=8)[3]", "initial 1: smooth(x, 5)[2]",
            "emission.rate 1: x"} < set(table["parameter"])  # fmt: skip

    def marginal(fit):
        return -fit.losses[-1] - torch.linalg.slogdet(fit.information(data).matrix)[1] / 2

    best = marginal(fit)
    for part in ("transition", "initial", "emission.rate"):
        for factor in (0.5, 2.0):
            other = copy.deepcopy(fit.model.module)
            other.get_submodule(part).spread.mul_(factor)
            again = fit_em(other, data, tolerance=1e-12, start=fit)
            # of first states, which twelve sequences hardly tell, the approximation is coarse
            assert marginal(again) < best + (0.5 if part == "initial" else 0.0)
