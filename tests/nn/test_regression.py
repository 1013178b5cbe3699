"""Covariates: against a likelihood written in NumPy, and the textbook's logistic regression."""

import numpy as np
import pandas as pd
import pyro
import pytest
import torch
from pyro import poutine
from pyro.distributions import Bernoulli, Normal, Poisson
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
    poisson,
    regression,
)


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
    return table, design, data, fit_em(module, data, num_steps=150, tolerance=1e-10)


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


def test_coefficients_have_intervals_and_predictions_bands():
    _, design, data, fit = fitted()
    low, high = fit.intervals(data)["module.initial.coefficients"]
    assert bool((high - low > 5).all())  # one sequence says little about where sequences begin
    fixed = RegressionHMM(2, regression(Poisson, rate=design["rate"]), design["transition"])
    fixed.load_state_dict(fit.model.module.state_dict())
    del fixed.initial.coefficients
    fixed.initial.register_buffer("coefficients", torch.tensor([[-9.0]]))
    fit = fit_map(MarginalModel(fixed), data, num_steps=200, learning_rate=0.02)
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
    emission = regression(Normal, loc=[1], scale=None)
    with pytest.raises(ValueError, match="parameters must be those of Normal"):
        regression(Normal, mean=[1])
    module = RegressionHMM(2, emission, transition=[0, 1], initial=[0], scale=1.0)
    hmm = module(data.lengths, data.observed, data.covariates)
    assert hmm.log_prob(data.values).shape == (2,)
    torch.testing.assert_close(hmm.log_transition.exp().sum(-1), torch.ones(2, length - 1, 2))
    model = MarginalModel(module)
    fit = fit_svi(model, AutoNormal(model), data, num_steps=3)
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

    with pytest.raises(ValueError, match=r"formula of a.*hours"):
        formulas(table, a="~ hours")
    with pytest.raises(ValueError, match=r"columns of a are collinear: 'twice'"):
        formulas({"dose": [0.0, 1.0, 3.0], "twice": [0.0, 2.0, 6.0]}, a="~ dose + twice")
    with pytest.raises(ValueError, match="covariates of a have missing values: dose"):
        formulas({"dose": [0.0, np.nan, 3.0]}, a="~ dose")
    with pytest.raises(ValueError, match="does not fit the formula of b"):
        design.matrix({"hour": [1], "dose": [1.0], "sex": ["x"]})
    with pytest.raises(KeyError, match="c"):
        design["c"]


def test_coefficients_with_priors_have_chains_and_restarts() -> None:
    pyro.set_rng_seed(0)
    x = torch.stack([torch.ones(2, 60), torch.randn(2, 60)], -1)
    counts = torch.poisson((1 + 0.5 * x[..., 1]).exp())
    data = Sequences(counts, torch.tensor([60, 40]), covariates=x)
    family = regression(Poisson, scale=1.0, rate=[0, 1])
    model = MarginalModel(RegressionHMM(2, family, transition=[0, 1], scale=1.0))
    fit = fit_mcmc(model, data, num_samples=3, num_chains=3, warmup=2)
    last = fit_map(model, data, restarts=3, num_steps=3)
    assert last.restarts.hmm(data).log_transition.shape == (3, 2, 59, 2, 2)
    for chain, lp in zip(range(3), fit.stats["lp"][:, -1]):
        values = {name: value[chain, -1] for name, value in fit.chains.items()}
        one = poutine.trace(poutine.condition(model, values)).get_trace(data).log_prob_sum()
        assert torch.allclose(one.double(), lp, atol=1e-3)
