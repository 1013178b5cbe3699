"""Covariates: against a likelihood written in NumPy, and the textbook's logistic regression."""

import importlib

import numpy as np
import pandas as pd
import polars
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.distributions import (
    Bernoulli,
    Beta,
    Categorical,
    Gamma,
    NegativeBinomial,
    Normal,
    Poisson,
    VonMises,
)
from pyro.infer.autoguide import AutoNormal
from scipy.optimize import minimize

from pyrohmm import (
    MarginalModel,
    RegressionHMM,
    Sequences,
    TabularHMM,
    fit_em,
    fit_map,
    fit_mcmc,
    fit_svi,
    formulas,
    freeze,
    load_hmm,
    normal,
    plots,
    poisson,
    regression,
    save,
)


def choices(num_steps=300, seed=5):
    """Choices of two strategies: two sequences of a stimulus and of zeros and ones."""
    generator = np.random.default_rng(seed)
    x, y = generator.normal(size=(2, num_steps)), np.zeros((2, num_steps))
    for n in range(2):
        state = 0
        for t in range(num_steps):
            logit = 3.0 * x[n, t] if state == 0 else -2.0 + 0.0 * x[n, t]
            y[n, t] = generator.random() < 1 / (1 + np.exp(-logit))
            state = state if generator.random() < 0.95 else 1 - state
    return x, y


def numpy_em(x, y, beta, rows, start, num_steps):
    """EM of a logistic regression in each of two states, by loops over steps."""
    design = np.stack([np.ones_like(x), x], -1)
    for _ in range(num_steps):
        evidence, gamma, pairs = 0.0, np.zeros((*x.shape, 2)), np.zeros((2, 2))
        for n in range(len(x)):
            p = 1 / (1 + np.exp(-design[n] @ beta.T))
            like = np.where(y[n, :, None] == 1, p, 1 - p)
            alpha, scale = np.zeros_like(like), np.zeros(len(like))
            for t in range(len(like)):
                alpha[t] = (start if t == 0 else alpha[t - 1] @ rows) * like[t]
                scale[t] = alpha[t].sum()
                alpha[t] /= scale[t]
            back = np.ones(2)
            for t in range(len(like) - 1, -1, -1):
                gamma[n, t] = alpha[t] * back
                if t:
                    pairs += alpha[t - 1][:, None] * rows * (like[t] * back) / scale[t]
                back = rows @ (like[t] * back) / scale[t]
            evidence += np.log(scale).sum()
        rows, start = pairs / pairs.sum(1, keepdims=True), gamma[:, 0].mean(0)
        for k in range(2):
            for _ in range(30):
                p = 1 / (1 + np.exp(-design @ beta[k]))
                slope = np.einsum("nt,ntp->p", gamma[..., k] * (y - p), design)
                weight = gamma[..., k] * p * (1 - p)
                bend = np.einsum("nt,ntp,ntq->pq", weight, design, design)
                beta[k] = beta[k] + np.linalg.solve(bend, slope)
    return evidence, beta, rows, start


def counts(num_steps=400, seed=0):
    """Counts of two states, whose rate and whose transitions follow a covariate."""
    generator = np.random.default_rng(seed)
    x = generator.normal(size=num_steps)
    state, states = 0, []
    for value in x:
        states.append(state)
        logit = -1.5 + 1.0 * value if state == 0 else -1.0
        if generator.random() < 1 / (1 + np.exp(-logit)):
            state = 1 - state
    rate = np.exp(np.where(np.array(states) == 0, 0.5 + 0.3 * x, 2.0 - 0.3 * x))
    return {"x": x, "y": generator.poisson(rate), "id": np.zeros(num_steps)}


def numpy_loss(parameters, x, y):
    """Minus log-likelihood of two Poisson states; eight numbers, the first state last."""
    rate, move, first = parameters[:4].reshape(2, 2), parameters[4:8].reshape(2, 2), parameters[8]
    logs = y[:, None] * (rate[:, 0] + x[:, None] * rate[:, 1])
    logs = logs - np.exp(rate[:, 0] + x[:, None] * rate[:, 1])
    logs = logs - np.array([sum(np.log(np.arange(1, n + 1))) for n in y])[:, None]
    leave = 1 / (1 + np.exp(-(move[:, 0] + x[:, None] * move[:, 1])))  # (T, 2)
    start = 1 / (1 + np.exp(-first))  # of the first state
    message, total = np.array([start, 1 - start]), 0.0
    for t in range(len(y)):
        if t:
            stay = 1 - leave[t - 1]
            matrix = np.array([[stay[0], leave[t - 1, 0]], [leave[t - 1, 1], stay[1]]])
            message = message @ matrix
        message = message * np.exp(logs[t])
        total += np.log(message.sum())
        message = message / message.sum()
    return -total


def fitted():
    table = counts()
    design = formulas(table, transition="~ x", rate="~ x")
    data = Sequences.from_dataframe(
        design.table(table), by="id", columns="y", covariates=design.names
    )
    plain = fit_em(TabularHMM(2, poisson()), data_without(data), restarts=4)
    module = RegressionHMM(2, regression(Poisson, rate=design["rate"]), design["transition"])
    hmm = plain.hmm(data_without(data))
    order = hmm.emission.rate.argsort()
    module.begin_at(hmm.permute_states(order))
    return table, design, data, fit_em(module, data, num_iterations=150, tolerance=1e-10)


def data_without(data):
    return Sequences(data.values, data.lengths)


def test_the_maximum_is_that_of_a_likelihood_written_in_numpy():
    table, _, data, fit = fitted()
    module = fit.model.module
    rate = module.emission.rate.coefficients.detach()
    moves = module.transition.coefficients.detach()
    first = module.initial.coefficients.detach()
    ours = torch.cat([rate.flatten(), moves.flatten(), -first.flatten()])
    x, y = table["x"], table["y"]
    evidence = fit.hmm(data).log_prob(data.values).sum().item()
    assert evidence == pytest.approx(-numpy_loss(ours.numpy(), x, y), rel=1e-9)
    found = minimize(numpy_loss, ours.numpy(), (x, y), method="BFGS")
    assert -found.fun - evidence < 0.05  # of some 800 nats; the first state's logit is unbounded
    np.testing.assert_allclose(ours[:8], found.x[:8], atol=0.05)


@pytest.mark.parametrize("by", ["EM", "MAP"])
def test_coefficients_are_parameters_of_the_fit(by, tmp_path):
    _, design, data, _ = fitted()
    module = RegressionHMM(2, regression(Poisson, rate=design["rate"]), design["transition"])
    freeze(module, "initial.coefficients", torch.tensor([[-9.0]]))
    model = MarginalModel(module)
    fit = fit_em(module, data, tolerance=1e-9) if by == "EM" else (
        fit_map(model, data, num_iterations=400, learning_rate=0.03))  # fmt: skip
    held = fit.model.module
    own = {f"module.{part}.coefficients": held.get_submodule(part).coefficients
           for part in ("transition", "emission.rate")}  # fmt: skip
    assert fit.parameters.keys() == fit.start.keys() == own.keys()
    assert not any(value.requires_grad for value in fit.parameters.values())
    for name, value in own.items():
        torch.testing.assert_close(fit.parameters[name], value.detach())
    table = fit.table(data)
    numbers = torch.cat([value.flatten() for value in fit.parameters.values()])
    assert sorted(table["estimate"]) == pytest.approx(sorted(numbers.tolist()))
    assert len(set(table["parameter"])) == 8
    again = fit_em(module, data, num_iterations=1, start=fit)  # goes on where the fit ended
    evidence = fit.hmm(data).log_prob(data.values).sum()
    assert again.losses[0].item() == pytest.approx(-evidence.item(), abs=1e-3)
    with torch.no_grad():
        held.transition.coefficients = 0 * held.transition.coefficients
    torch.testing.assert_close(fit.hmm(data).log_prob(data.values).sum(), evidence)
    save(fit.hmm(data), tmp_path / "hmm")
    torch.testing.assert_close(load_hmm(tmp_path / "hmm").log_prob(data.values).sum(), evidence)
    save(fit, tmp_path / "fit")
    with pytest.raises(ValueError, match="without one HMM for all data"):
        load_hmm(tmp_path / "fit")


def test_coefficients_have_intervals_and_predictions_bands():
    _, design, data, fit = fitted()
    alone = fit.intervals(data)
    # one sequence says nothing about where others begin; the others keep their limits
    assert bool(alone["module.initial.coefficients"][0].isnan().all())
    assert bool(alone["module.emission.rate.coefficients"][0].isfinite().all())
    fixed = RegressionHMM(2, regression(Poisson, rate=design["rate"]), design["transition"])
    fixed.load_state_dict(fit.model.module.state_dict())
    del fixed.initial.coefficients
    fixed.initial.register_buffer("coefficients", torch.tensor([[-9.0]]))
    fit = fit_map(MarginalModel(fixed), data, num_iterations=200, learning_rate=0.02)
    information = fit.information(data)
    low, high = information.intervals()["module.emission.rate.coefficients"]
    truth = torch.tensor([[0.5, 0.3], [2.0, -0.3]]).double()
    assert bool(((low - 0.1 < truth) & (truth < high + 0.1)).all())
    grid = torch.as_tensor(design.matrix({"x": [-1.0, 0.0, 1.0]}))
    at = Sequences(torch.zeros(1, 3, dtype=torch.long), torch.tensor([3]), covariates=grid[None])
    rates, errors = information.of(lambda hmm: hmm.emission.rate[0], at)
    assert rates.shape == errors.shape == (3, 2)
    assert rates[2, 0] > rates[0, 0]
    assert bool((errors[1] > 0).all())
    bands = fit.bands(data, design.matrix({"x": [-1.0, 0.0, 1.0]}), "mean")
    torch.testing.assert_close(bands.value, rates)
    torch.testing.assert_close(bands.upper, rates * (1.959964 * errors / rates).exp())
    moves = fit.bands(data, grid)
    beta = fit.model.module.transition.coefficients.detach().double()
    torch.testing.assert_close(moves.value[:, 0, 1], (grid @ beta[0, 0]).sigmoid())
    logit = [moves.lower[:, 0, 1].logit(), moves.upper[:, 0, 1].logit()]
    torch.testing.assert_close((logit[0] + logit[1]) / 2, grid @ beta[0, 0])
    assert bool((moves.lower > 0).all())
    assert bool((moves.upper < 1).all())
    rows = fit.table(data)
    place = rows["parameter"].index("transition 0 → 1: x")
    assert rows["estimate"][place] == pytest.approx(beta[0, 0, 1].item())
    assert rows["lower"][place] < rows["estimate"][place] < rows["upper"][place]
    assert "emission.rate 1: Intercept" in fit.summary(data)
    axes = plots.bands([-1.0, 0.0, 1.0], moves)
    assert [line.get_label() for line in axes.get_lines()] == ["0 → 1", "1 → 0"]


@pytest.mark.parametrize(("first", "second"), [(2.0, None), (None, 2.0), (2.0, 2.0)])
def test_priors_of_coefficients_leave_errors_in_single_precision(first, second):
    """Computed in double precision, whatever the dtype of the covariates."""
    pyro.set_rng_seed(0)
    covariates = torch.randn(20, 10, 2)
    covariates[..., 0] = 1.0
    values = torch.poisson(torch.tensor([1.0, 6.0])[(covariates[..., 1] > 0).long()])
    errors = []
    for dtype in (torch.float32, torch.float64):
        data = Sequences(values.to(dtype), torch.full((20,), 10), covariates=covariates.to(dtype))
        pyro.set_rng_seed(0)
        module = RegressionHMM(
            2, regression(Poisson, rate=[0, 1], prior_scale=first), [0], prior_scale=second
        )
        fit = fit_em(module.to(dtype), data, num_iterations=30)
        errors.append(fit.std_errors(data))
        assert fit.bands(data, covariates[0]).value.isfinite().all()
    for name, error in errors[0].items():
        torch.testing.assert_close(error.double(), errors[1][name].double(), rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("by", ["EM", "MAP"])
def test_units_of_covariates_change_coefficients_alone(by):
    pyro.set_rng_seed(0)
    x, states = torch.randn(10, 40), (torch.rand(10, 40) < 0.2).long().cumsum(-1) % 2
    values = torch.poisson((torch.tensor([0.0, 2.0])[states] + 0.4 * x).exp())
    found = []
    for mean, spread in ((0.0, 1.0), (0.0, 1e5), (1953.0, 30.0)):
        covariates = torch.stack([torch.ones(10, 40), mean + spread * x], -1)
        data = Sequences(values, torch.full((10,), 40), covariates=covariates)
        pyro.set_rng_seed(1)
        module = RegressionHMM(2, regression(Poisson, rate=[0, 1]), [0, 1])
        fit = fit_em(module, data) if by == "EM" else fit_map(MarginalModel(module), data)
        parts = (fit.parameters, fit.std_errors(data))
        slopes = [spread * part["module.emission.rate.coefficients"][:, 1] for part in parts]
        evidence = fit.hmm(data).log_prob(data.values).sum().reshape(1)
        found.append(torch.cat([evidence, fit.losses[:1], *slopes]))
        again = RegressionHMM(2, regression(Poisson, rate=[0, 1]), [0, 1])
        again.load_state_dict(fit.model.module.state_dict())
        hmm = again(data.lengths, covariates=data.covariates)
        torch.testing.assert_close(hmm.log_prob(values).sum().reshape(1), evidence)
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-4, atol=1e-4)


def test_one_state_is_a_generalized_linear_model():
    """Logistic regression, by Newton's method as in every textbook."""
    generator = np.random.default_rng(1)
    x = np.stack([np.ones(500), generator.normal(size=500)], -1)
    y = (generator.random(500) < 1 / (1 + np.exp(-x @ np.array([0.3, -0.8])))).astype(float)
    beta = np.zeros(2)
    for _ in range(20):
        p = 1 / (1 + np.exp(-x @ beta))
        beta += np.linalg.solve((x.T * (p * (1 - p))) @ x, x.T @ (y - p))
    errors = np.sqrt(np.diag(np.linalg.inv((x.T * (p * (1 - p))) @ x)))[None]
    data = Sequences(torch.as_tensor(y)[None], torch.tensor([500]),
                     covariates=torch.as_tensor(x)[None])  # fmt: skip
    fit = fit_em(RegressionHMM(1, regression(Bernoulli, logits=[0, 1])), data)
    np.testing.assert_allclose(
        fit.model.module.emission.logits.coefficients[0].detach(), beta, atol=1e-4
    )
    found = fit.std_errors(data)["module.emission.logits.coefficients"]
    np.testing.assert_allclose(found, errors, rtol=1e-3)


@pytest.mark.parametrize("length", [1, 2, 5])
def test_gaps_ragged_sequences_priors_and_both_parameters(length):
    pyro.set_rng_seed(length)
    lengths = torch.tensor([length, 1])
    observed = torch.arange(length) < lengths.unsqueeze(-1)
    observed[0, length // 2] = length == 1
    covariates = torch.randn(2, length, 2)
    data = Sequences(torch.randn(2, length), lengths, observed, covariates=covariates)
    emission = regression(Normal, loc=[1])
    with pytest.raises(ValueError, match="parameters must be those of Normal"):
        regression(Normal, mean=[1])
    module = RegressionHMM(2, emission, transition=[0, 1], initial=[0], prior_scale=1.0)
    hmm = module(data.lengths, data.observed, data.covariates)
    assert hmm.log_prob(data.values).shape == (2,)
    torch.testing.assert_close(hmm.log_transition.exp().sum(-1), torch.ones(2, length - 1, 2))
    model = MarginalModel(module)
    fit = fit_svi(model, AutoNormal(model), data, num_iterations=3)
    assert "module.transition.coefficients" in fit.names


def test_formulas_and_their_mistakes():
    table = pd.DataFrame({"hour": [0, 6, 12, 18, 3], "dose": [0.0, 1.0, 0.5, 2.0, 1.0],
                          "sex": list("fmfmf")})  # fmt: skip
    design = formulas(table, a="~ cyclic(hour, 24, 2)", b="~ sex + dose")
    assert design["a"].indices == (0, 1, 2, 3, 4)
    assert design["b"].names == ("Intercept", "sex[T.m]", "dose")
    assert list(design) == ["a", "b"]
    matrix = design.matrix(table)
    np.testing.assert_allclose(matrix[:, 1], np.sin(2 * np.pi * table["hour"] / 24))
    scaled = formulas(table, c="~ center(dose) - 1")  # centred by the mean of this table
    np.testing.assert_allclose(scaled.matrix({"dose": [0.9, 1.9]}), [[0.0], [1.0]], atol=1e-12)

    with pytest.raises(ValueError, match=r"columns of a are collinear: 'twice'"):
        formulas({"dose": [0.0, 1.0, 3.0], "twice": [0.0, 2.0, 6.0]}, a="~ dose + twice")
    with pytest.raises(ValueError, match="covariates of a have missing values: dose"):
        formulas({"dose": [0.0, np.nan, 3.0]}, a="~ dose")
    with pytest.raises(ValueError, match="does not fit the formula of b"):
        design.matrix({"hour": [1], "dose": [1.0], "sex": ["x"]})


def test_an_offset_has_a_coefficient_of_one():
    """Of one state: the rate is the number of events for each unit of exposure."""
    hours, counts = np.array([1.0, 2.0, 5.0, 0.5, 3.0]), np.array([2, 3, 14, 0, 8])
    frame = {"hours": hours, "dose": [0, 0, 1, 1, 1], "y": counts}
    design = formulas(frame, rate="~ offset(log(hours)) + dose")
    data = Sequences.from_dataframe(design.table(frame), columns="y", covariates=design.names)
    module = RegressionHMM(1, regression(Poisson, rate=design["rate"]))
    fit = fit_em(module.double(), data, tolerance=1e-12)
    rates = [counts[:2].sum() / 3.0, counts[2:].sum() / 8.5]
    found = fit.model.module.emission.rate.coefficients.detach().numpy()
    np.testing.assert_allclose(found, [np.log(rates[0]), np.log(rates[1] / rates[0])], atol=1e-6)
    at = design.matrix({"hours": [1.0, 10.0], "dose": [0, 1]})
    np.testing.assert_allclose(fit.bands(data, at, "mean").value[:, 0], [rates[0], 10 * rates[1]])


NATURAL = {  # of the two states: intercepts, and slopes of x, or of the group
    Gamma: {"concentration": [[0.5, 0.5], [3.0, 0.0]], "rate": [[0.0, 0.5], [0.5, -0.5]]},
    NegativeBinomial: {"total_count": [[1.0, 0.5], [3.0, 0.0]], "probs": [[-1.0, 0.5], [1.0, 0.5]]},
    Beta: {"concentration1": [[0.0, 0.5], [2.0, 0.0]], "concentration0": [[2.0, 0.5], [0.0, 0.5]]},
    VonMises: {"loc": [[0.0, 0.5], [2.5, 0.0]], "concentration": [[1.0, 1.0], [2.0, 0.5]]},
    Normal: {"loc": [[0.0, 1.0], [4.0, 0.5]], "scale": [[-0.5, 0.7], [0.0, -0.5]]},
}


@pytest.mark.parametrize("kind", NATURAL)
def test_every_natural_parameter_has_a_formula(kind):
    """States are known; the truth lies within four standard errors."""
    pyro.set_rng_seed(0)
    truth = NATURAL[kind]
    frame = {"x": torch.randn(900).tolist(), "group": ["b" if n % 3 else "a" for n in range(900)]}
    first, second = truth
    design = formulas(frame, **{first: "~ x", second: "~ 1 + group"})
    module = RegressionHMM(2, regression(kind, **{n: design[n] for n in truth})).double()
    for part, table in truth.items():
        module.emission.get_submodule(part).coefficients = torch.tensor(table).double()
    covariates = torch.as_tensor(design.matrix(frame))
    states = (torch.arange(900) // 20 % 2).reshape(1, -1)
    values = module.emission(covariates).sample().gather(-1, states.mT).mT
    data = Sequences(values, torch.tensor([900]), covariates=covariates[None], labels=states)
    freeze(module, "initial.coefficients")
    fit = fit_em(module, data, tolerance=1e-10)
    errors = fit.std_errors(data)
    for part, table in truth.items():
        key = f"module.emission.{part}.coefficients"
        assert bool(((fit.parameters[key] - torch.tensor(table)).abs() < 4 * errors[key]).all())
        assert bool((errors[key] < 0.5).all())


def test_coefficients_with_priors_have_chains_and_restarts() -> None:
    pyro.set_rng_seed(0)
    x = torch.stack([torch.ones(2, 60), torch.randn(2, 60)], -1)
    counts = torch.poisson((1 + 0.5 * x[..., 1]).exp())
    data = Sequences(counts, torch.tensor([60, 40]), covariates=x)
    family = regression(Poisson, prior_scale=1.0, rate=[0, 1])
    model = MarginalModel(RegressionHMM(2, family, transition=[0, 1], prior_scale=1.0))
    fit = fit_mcmc(model, data, num_samples=3, num_chains=3, warmup=2)
    last = fit_map(model, data, restarts=3, num_iterations=3)
    assert last.restarts.hmm(data).log_transition.shape == (3, 2, 59, 2, 2)
    for chain, lp in zip(range(3), fit.stats["lp"][:, -1]):
        values = {name: value[chain, -1] for name, value in fit.chains.items()}
        one = poutine.trace(poutine.condition(model, values)).get_trace(data).log_prob_sum()
        assert torch.allclose(one.double(), lp, atol=1e-3)


@pytest.mark.parametrize("categorical", [False, True])
def test_choices_are_those_of_an_em_written_in_numpy(categorical, monkeypatch):
    """If each M-step goes on to the maximum."""
    monkeypatch.setattr(importlib.import_module("pyrohmm.nn.regression"), "NEAR", 0.0)
    x, y = choices()
    beta, rows = np.array([[0.0, 2.0], [-1.0, 0.0]]), np.array([[0.9, 0.1], [0.1, 0.9]])
    evidence, *wanted, start = numpy_em(x, y, beta.copy(), rows, np.array([0.6, 0.4]), 11)
    covariates = torch.as_tensor(np.stack([np.ones_like(x), x], -1))
    values = torch.as_tensor(y)
    data = Sequences(values.long() if categorical else values, torch.tensor([300, 300]),
                     covariates=covariates)  # fmt: skip
    family = regression(Bernoulli, logits=[0, 1])
    if categorical:
        family = regression(Categorical, num_symbols=2, logits=[0, 1])
    module = RegressionHMM(2, family).double()
    leave = np.log([[0.1 / 0.9], [0.1 / 0.9]])
    size = (2, 1, 2) if categorical else (2, 2)
    for part, value in (
        (module.emission.logits, beta.reshape(size)),
        (module.transition, leave.reshape(2, 1, 1)),
        (module.initial, np.log([[0.4 / 0.6]])),
    ):
        part.coefficients = torch.as_tensor(value)
    fit = fit_em(module, data, num_iterations=10, tolerance=None)
    assert fit.losses[-1].item() == pytest.approx(-evidence, rel=1e-9)
    fit = fit_em(module, data, num_iterations=11, tolerance=None)
    found = fit.model.module.emission.logits.coefficients.detach().reshape(2, 2)
    np.testing.assert_allclose(found, wanted[0], atol=1e-6)
    hmm = fit.hmm(data)
    np.testing.assert_allclose(hmm.log_transition.exp()[0, 0], wanted[1], atol=1e-8)
    np.testing.assert_allclose(hmm.log_initial[0].exp(), start, atol=1e-8)
    assert bool((fit.losses.diff() <= 1e-9).all())


def test_estimates_are_those_of_statsmodels():
    """``MarkovRegression`` of statsmodels 0.15.0: time-varying transitions, known first state.

    Its known state is two transitions before the first observation, both with the covariates of
    that, and covariates of a transition are those of the step that is entered.
    """
    generator = np.random.default_rng(3)
    x, z = generator.normal(size=(2, 300))
    state, states = 0, []
    for value in z:
        logit = -2.0 + value if state == 0 else -1.5
        state = state ^ int(generator.random() < 1 / (1 + np.exp(-logit)))
        states.append(state)
    states = np.array(states)
    y = np.where(states == 0, 1.0 + 0.5 * x, -1.0 - 0.5 * x)
    y = y + np.where(states == 0, 0.5, 1.0) * generator.normal(size=300)
    none = np.zeros(2)
    columns = [np.ones(302), np.concatenate([none, x]), np.concatenate([z[:1], z, none[:1]])]
    data = Sequences(
        torch.as_tensor(np.concatenate([none, y]))[None], torch.tensor([302]),
        torch.arange(302)[None] > 1, covariates=torch.as_tensor(np.stack(columns, -1))[None],
    )  # fmt: skip
    family = regression(Normal, loc=[0, 1])
    module = RegressionHMM(2, family, transition=[0, 2]).double()
    module.emission.loc.coefficients = torch.tensor([[1.0, 0.0], [-1.0, 0.0]]).double()
    module.initial.coefficients = torch.zeros(1, 1).double()
    freeze(module.initial, "coefficients")
    fit = fit_em(module, data, tolerance=1e-12)
    assert -fit.losses[-1].item() == pytest.approx(-429.7530536074403, abs=1e-6)
    end = fit.model.module
    means = [[1.03423589, 0.43530292], [-0.91275662, -0.51036765]]
    np.testing.assert_allclose(end.emission.loc.coefficients.detach(), means, atol=1e-4)
    scales = end.emission.scale.coefficients.detach().exp().square().squeeze(-1)
    np.testing.assert_allclose(scales, [0.1775977, 1.06033208], atol=1e-4)
    moves = end.transition.coefficients.detach().squeeze(1)
    wanted = [[-1.45672421, 0.83507459], [-1.7877027, -0.23764125]]
    np.testing.assert_allclose(moves, wanted, atol=2e-3)


@pytest.mark.parametrize("kind", ["free", "parts", "restarts"])
def test_em_ends_at_the_maximum_of_the_log_joint(kind):
    """With priors and missing steps; with coefficients that are zero; with restarts."""
    pyro.set_rng_seed(0)
    lengths = torch.tensor([40, 1, 25])
    x = torch.cat([torch.ones(3, 40, 1), torch.randn(3, 40, 1)], -1).double()
    observed = (torch.rand(3, 40) < 0.8) & (torch.arange(40) < lengths.unsqueeze(-1))
    counts = torch.poisson((1.0 + torch.randn(3, 40).sign()).exp()).double()
    data = Sequences(counts, lengths, observed, covariates=x)
    options = {}
    if kind == "parts":
        allowed = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 1, 1]]).bool()
        free = torch.tensor([[[1, 0], [1, 1]]]).bool().expand(3, 2, 2)
        options = {"transition_allowed": allowed, "transition_free": free}
    size = 3 if kind == "parts" else 2
    family = regression(Poisson, rate=[0, 1], prior_scale=2.0)
    module = RegressionHMM(size, family, [0, 1], [0], prior_scale=1.0, **options).double()
    restarts = 3 if kind == "restarts" else 1
    fit = fit_em(module, data, tolerance=1e-13, restarts=restarts)
    assert not any("rose" in note for note in fit.notes)
    assert fit.information(data).decrement < 1e-6  # nats below the maximum of the log joint
    model, values = fit.model, {n: v.requires_grad_() for n, v in fit.parameters.items()}
    trace = poutine.trace(poutine.condition(model, values)).get_trace(data)
    slopes = torch.autograd.grad(trace.log_prob_sum(), list(values.values()))
    assert max(slope.abs().max().item() for slope in slopes) < 1e-3
    if kind == "parts":
        assert fit.parameters["module.transition.coefficients"].shape == (6,)
        moves = fit.hmm(data).log_transition.exp()
        assert bool((moves[..., ~allowed] == 0).all())
        assert fit.std_errors(data)["module.transition.coefficients"].shape == (6,)


@pytest.mark.parametrize(("kind", "name"), [(dist.Bernoulli, "logits"), (dist.Poisson, "rate")])
def test_limits_of_means_lie_in_their_support(kind, name):
    pyro.set_rng_seed(0)
    x = torch.linspace(-2.0, 4.0, 40).double()
    covariates = torch.stack([torch.ones(40).double(), x], -1).unsqueeze(0)
    values = (x > 2 * torch.randn(40)).double().unsqueeze(0)
    data = Sequences(values, torch.tensor([40]), covariates=covariates)
    module = RegressionHMM(1, regression(kind, **{name: [0, 1]})).double()
    bands = fit_em(module, data).bands(data, covariates[0], of="mean")
    assert bool((bands.lower >= 0).all())
    assert bool((bands.lower <= bands.value).all())
    assert bool((bands.upper >= bands.value).all())
    if kind is dist.Bernoulli:
        assert bool((bands.upper <= 1).all())


@pytest.mark.parametrize("double", [False, True])
def test_a_module_of_either_dtype_takes_the_covariates_of_a_table(double):
    """Whatever the default dtype; and a column of dates may be named inside a string."""
    torch.set_default_dtype(torch.float32)
    day = pd.date_range("2021-01-01", periods=40)
    frame = pd.DataFrame({"x": np.arange(40) % 3.0, "dose": np.arange(40) / 40, "day": day})
    frame["kind"] = ["day", "night"] * 20
    design = formulas(frame, transition="~ dose", loc="~ C(kind, levels=['day', 'night'])")
    table = pd.DataFrame(design.matrix(frame), columns=design.names).assign(x=frame["x"])
    data = Sequences.from_dataframe(table, columns="x", covariates=design.names)
    module = RegressionHMM(2, regression(Normal, loc=design["loc"]), design["transition"])
    module = module.double() if double else module
    fit = fit_em(module, data, num_iterations=2)
    assert {part.dtype for part in fit.parameters.values()} == {
        [torch.float32, torch.float64][double]
    }


def test_hours_of_a_table_of_polars_are_local():
    """In its time zone, as in pandas, over a change of the clock."""
    days = pd.date_range("2026-03-28", periods=40, freq="h", tz="Europe/Berlin")
    frame = polars.DataFrame({"day": [day.to_pydatetime() for day in days]})
    frame = frame.with_columns(polars.col("day").dt.convert_time_zone("Europe/Berlin"))
    design = formulas(frame, transition="~ cyclic(day.dt.hour, 24)")
    wanted = np.sin(2 * np.pi * days.hour / 24)
    np.testing.assert_allclose(design.matrix(frame)[:, 1], wanted, atol=1e-12)
    assert list(design.table(frame)["day"]) == list(days)


@pytest.mark.parametrize("make", [lambda x: x, polars.from_pandas])
def test_states_of_a_design_come_back_to_the_rows_of_its_table(make):
    """Whatever its index, as of a table that was sorted and filtered."""
    frame = pd.DataFrame(
        {"x": np.arange(40) * 7.0 % 40, "dose": np.arange(40) % 3.0, "t": range(40)}
    )
    frame = frame.sort_values("x")[5:35]
    design, given = formulas(frame, loc="~ center(dose)"), make(frame)
    table = design.table(given)
    assert type(table) is type(given)
    assert list(table["dose"]) == list(frame["dose"])
    np.testing.assert_allclose(table["center(dose)"], frame["dose"] - frame["dose"].mean())
    data = Sequences.from_dataframe(
        table, columns="x", covariates=design.names, time="t", gaps="ignore"
    )
    rows = data.to_dataframe(states=data.packed("values").long())
    if given is frame:
        assert list(frame.assign(state=rows["state"])["state"]) == list(frame["x"])
        assert list(rows.index) == list(frame.index)
    assert list(rows["state"]) == list(frame["x"])
    assert isinstance(design.table(frame.to_dict("list")), dict)


@pytest.mark.parametrize("table", [
    {"s": ["a", None, "b"]}, {"s": [1, None, 3]}, {"s": [True, None, False]},
    pd.DataFrame({"s": ["a", np.nan, "b"]}), pd.DataFrame({"s": pd.Categorical(["a", None, "b"])}),
    pd.DataFrame({"s": pd.array([True, None, False], dtype="boolean")}),
    pd.DataFrame({"s": pd.array([1, None, 2], dtype="Int64")}),
    polars.DataFrame({"s": ["a", None, "b"]}), polars.DataFrame({"s": [True, None, False]}),
    polars.DataFrame({"s": [1, None, 2]}),
])  # fmt: skip
def test_missing_values_of_a_formula_are_told_by_their_column(table):
    with pytest.raises(ValueError, match=r"(column 's' has|of loc have) missing values.* Drop"):
        formulas(table, loc="~ s")
    names = [value for value in list(table["s"]) if pd.notna(value)] * 2
    with pytest.raises(ValueError, match=r"(column 's' has|of loc have) missing values.* Drop"):
        formulas({"s": names}, loc="~ s").matrix(table)
    assert formulas({"s": [1, 2, 3], "t": [None] * 3}, loc="~ s").names == ["Intercept", "s"]


def test_levels_of_an_enum_have_their_order():
    levels = ["low", "mid", "high"]
    column = polars.Series(["mid", "high", "low", "mid"], dtype=polars.Enum(levels))
    design = formulas(polars.DataFrame({"dose": column}), loc="~ dose")
    assert design.names == ["Intercept", "dose[T.mid]", "dose[T.high]"]
    np.testing.assert_array_equal(design.matrix({"dose": ["high", "low"]}), [[1, 0, 1], [1, 0, 0]])


def test_a_module_of_some_transitions_takes_its_own_state():
    allowed = torch.tensor([[1, 1, 0], [0, 1, 1], [1, 0, 1]]).bool()
    module = RegressionHMM(3, normal(0), transition=[0, 1], transition_allowed=allowed)
    module.load_state_dict(module.state_dict())


def test_regressions_without_priors_have_restarts_and_one_scale_gives_all_a_prior():
    generator = torch.Generator().manual_seed(0)
    covariates = torch.cat([torch.ones(3, 40, 1), torch.randn(3, 40, 1, generator=generator)], -1)
    rates = (torch.tensor([0.5, 2.5])[torch.randint(2, (3, 40), generator=generator)]).exp()
    data = Sequences(torch.poisson(rates, generator), covariates=covariates)
    family = regression(Poisson, rate=[0, 1])
    fit = fit_em(RegressionHMM(2, family, [0, 1]), data, restarts=3, num_iterations=8)
    assert fit.restarts.final.shape == (3,)
    assert fit.losses[-1] == fit.restarts.final.min()
    assert fit.restarts.final.unique().numel() > 1
    for hmm, final in (
        (fit.restarts.hmm(data), fit.restarts.final),
        (fit.hmm(data), fit.losses[-1]),
    ):
        found = -hmm.log_prob(data.values).sum(-1).double()
        torch.testing.assert_close(found, final.double(), rtol=1e-5, atol=1e-3)
    with pytest.raises(ValueError, match="checkpoint must be None"):
        fit_em(RegressionHMM(2, family, [0, 1]), data, restarts=2, checkpoint="x")
    module = RegressionHMM(2, family, [0, 1], prior_scale=2.0)
    assert module.emission.rate.prior_scale == 2.0
    assert fit_em(module, data, restarts=2, num_iterations=2).restarts.final.shape == (2,)
    own = regression(Poisson, rate=[0, 1], prior_scale=1.0)
    assert RegressionHMM(2, own, [0, 1], prior_scale=2.0).emission.rate.prior_scale == 1.0


@pytest.mark.parametrize("fit", [fit_map, fit_em], ids=lambda fit: fit.__name__)
def test_fresh_coefficients_that_are_frozen_stay(fit):
    """They are not reread in units of the covariates, nor drawn again by a restart."""
    x, y = choices(20)
    data = Sequences(torch.tensor(y), covariates=torch.tensor(5 + 3 * x)[..., None])
    module = RegressionHMM(2, regression(Normal, loc=[0], scale=None), [0]).double()
    for name in ("emission.loc", "transition"):
        module.get_submodule(name).coefficients_unconstrained.requires_grad_(False)
    before = {n: p.tolist() for n, p in module.named_parameters() if not p.requires_grad}
    assert len(before) == 2
    options = {"num_iterations": 3, **({"restarts": 3} if fit is fit_em else {})}
    found = fit(module if fit is fit_em else MarginalModel(module), data, **options)
    fitted = dict((found.model.module if fit is fit_em else module).named_parameters())
    assert {name: fitted[name].tolist() for name in before} == before
