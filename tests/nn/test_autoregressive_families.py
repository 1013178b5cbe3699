"""Families of autoregressive emissions: M-steps, priors and fits, against NumPy and scipy."""

import numpy as np
import pyro
import pytest
import torch
from pyro.distributions import Categorical, MultivariateNormal, Poisson
from pyro.infer import Predictive
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule, PyroParam
from scipy import optimize, stats
from torch.distributions import constraints

from pyrohmm import (
    HMM,
    MarginalModel,
    Sequences,
    TabularHMM,
    autoregressive_categorical,
    autoregressive_normal,
    fit_em,
    fit_map,
    fit_svi,
    freeze,
    markov_sample,
    starts,
)
from pyrohmm.distributions import Autoregressive, AutoregressiveCategorical, AutoregressiveNormal


def cases():
    walk = rows(20, 12, 3)
    symbols = Sequences(torch.randint(3, (3, 15)), torch.tensor([15, 9, 1]))
    return {
        "vectors": (lambda: TabularHMM(2, autoregressive_normal(2, 2)), walk),
        "symbols": (lambda: TabularHMM(2, autoregressive_categorical(3, 2, 1.5)), symbols),
    }


PRIOR = {"loc": 0.3, "weight": 0.7, "ridge": 0.4, "degrees": 5.5, "scale": None}
SCALE = np.array([[1.0, 0.3], [0.3, 2.0]])


def rows(*lengths, dim=2):
    """Ragged walks, far from zero, so that they depend on what was before."""
    return Sequences.from_list([3 + torch.randn(n, dim).cumsum(0) for n in lengths])


def regression(data, lags):
    """Design ``(M, 1 + L D)`` and response ``(M, D)`` of all steps with a whole context."""
    design, response = [], []
    for x, length in zip(data.values.numpy(), data.lengths.tolist()):
        for t in range(lags, length):
            design.append(np.concatenate([[1.0], *(x[t - lag] for lag in range(1, lags + 1))]))
            response.append(x[t])
    return np.array(design), np.array(response)


def points(emission):
    """Its HMM of one state."""
    return HMM(torch.zeros(1), torch.zeros(1, 1), emission, torch.tensor(1))


# The M-step -------------------------------------------------------------------------------------


@pytest.mark.parametrize("lags", [1, 3])
@pytest.mark.parametrize("origin", [0.0, 3.0])
def test_one_state_without_priors_is_least_squares(lags, origin):
    data = rows(9, 30, 2, 1)
    eye = MultivariateNormal(torch.zeros(1, 2), torch.eye(2).expand(1, 2, 2))
    start = AutoregressiveNormal(eye, eye, torch.zeros(1, lags, 2, 2), torch.full((2,), origin))
    emission = fit_em(points(start), data, num_iterations=3).hmm(data).emission
    design, response = regression(data, lags)
    found, *_ = np.linalg.lstsq(design, response, rcond=None)
    slopes = emission.weights[0].detach().numpy()
    intercept = emission.base.loc[0].detach().numpy() - origin * slopes.sum((0, 1))
    assert slopes.reshape(-1, 2) == pytest.approx(found[1:])
    assert intercept == pytest.approx(found[0])
    residual = response - design @ found
    covariance = emission.base.covariance_matrix[0].detach().numpy()
    assert covariance == pytest.approx(residual.T @ residual / len(response))
    first = np.concatenate([x[: min(lags, n)] for x, n in zip(data.values.numpy(), data.lengths)])
    assert emission.initial.loc[0].tolist() == pytest.approx(first.mean(0).tolist())


def module_of(states=2, lags=2):
    return autoregressive_normal(2, lags, **{**PRIOR, "scale": torch.tensor(SCALE)})(states)


def log_prior(found, states, lags, without=None):
    """Log-density of covariance, loc and weights in scipy's words, ``without`` one of them."""
    total = 0.0
    for k in range(states):
        matrix = found["covariance"][k]
        if without != "covariance":
            total += stats.invwishart.logpdf(matrix, 5.5, SCALE)
        if without != "loc":
            total += stats.multivariate_normal.logpdf(found["loc"][k], [0.3, 0.3], matrix / 0.7)
        for lag, i in np.ndindex(lags, 2) if without != "weights" else ():
            spread = matrix / (0.4 * SCALE[i, i])
            total += stats.multivariate_normal.logpdf(found["weights"][k, lag, i], cov=spread)
    return total


def expected_log_likelihood(found, data, weights, lags):
    """Of what has a whole context, one number at a time."""
    total, m = 0.0, 0
    for x, length in zip(data.values.numpy(), data.lengths.tolist()):
        for t in range(length):
            for k, weight in enumerate(weights[m]) if t >= lags else ():
                loc = found["loc"][k] + sum(
                    (x[t - lag] - 0.3) @ found["weights"][k, lag - 1] for lag in range(1, lags + 1)
                )
                score = stats.multivariate_normal.logpdf(x[t], loc, found["covariance"][k])
                total += weight * score
            m += 1
    return total


@pytest.mark.parametrize("frozen", [None, "loc", "weights", "covariance"])
def test_the_m_step_is_a_maximum(frozen):
    rng, states, lags = np.random.default_rng(0), 2, 2
    data, module = rows(6, 5), module_of(states, lags)
    values = {
        "loc": rng.normal(size=(states, 2)),
        "weights": rng.normal(size=(states, lags, 2, 2)),
        "covariance": np.stack([np.eye(2), SCALE]),
    }
    if frozen is not None:
        freeze(module, frozen, torch.tensor(values[frozen]))
    weights = rng.dirichlet(np.ones(states), size=11)
    windows = module().windows(data.values[:, :6])[data.observed]
    statistics = module.statistics(windows, torch.tensor(weights).unsqueeze(0), None)
    mode, notes = module.m_step(statistics)
    assert not notes
    found = {name: mode[name][0].numpy() for name in values if name != frozen}
    found = values | found

    def score(candidate):
        likelihood = expected_log_likelihood(candidate, data, weights, lags)
        return likelihood + log_prior(candidate, states, lags, frozen)

    best = score(found)
    for _ in range(20):
        for name in set(values) - {frozen}:
            nudge = 1e-3 * rng.normal(size=found[name].shape)
            if name == "covariance":
                nudge = nudge + nudge.swapaxes(-1, -2)
            assert score({**found, name: found[name] + nudge}) < best


def test_counts_of_symbols_by_their_context():
    module = autoregressive_categorical(3, 2, torch.tensor([1.5, 1.0, 2.0]))(2)
    values, lengths = torch.randint(3, (2, 7)), torch.tensor([7, 4])
    data = Sequences(values, lengths)
    weights = torch.rand(11, 2).numpy()
    windows = module().windows(values)[data.observed]
    mode, _ = module.m_step(module.statistics(windows, torch.tensor(weights)[None], None))
    first, table = np.zeros((2, 3)), np.zeros((2, 3, 3, 3))
    first += [0.5, 0.0, 1.0]
    table += [0.5, 0.0, 1.0]
    m = 0
    for x, length in zip(values.numpy(), lengths.tolist()):
        for t in range(length):
            if t < 2:
                first[:, x[t]] += weights[m]
            else:
                table[:, x[t - 2], x[t - 1], x[t]] += weights[m]
            m += 1
    first /= first.sum(-1, keepdims=True)
    table /= table.sum(-1, keepdims=True)
    assert mode["initial"][0].numpy() == pytest.approx(first)
    assert mode["probs"][0].numpy() == pytest.approx(table.reshape(2, 9, 3))


# Fits -------------------------------------------------------------------------------------------


def test_the_loss_of_em_is_minus_the_log_joint():
    data, lags = rows(8, 5, 2), 2
    module = TabularHMM(
        2, autoregressive_normal(2, lags, **{**PRIOR, "scale": torch.tensor(SCALE)})
    )
    fit = fit_em(module, data, num_iterations=1, start=starts.from_prior)
    values = {name.removeprefix("module.emission."): value.detach().numpy()
              for name, value in fit.parameters.items()}  # fmt: skip
    prior = log_prior(values, 2, lags)
    for k in range(2):
        matrix = values["initial.covariance"][k]
        prior += stats.invwishart.logpdf(matrix, 5.5, SCALE)
        prior += stats.multivariate_normal.logpdf(values["initial.loc"][k], [0.3] * 2, matrix / 0.7)
    evidence = fit.hmm(data).log_prob(data.values).sum().item()
    joint = sum(fit.parts(data).values())
    assert fit.losses[-1].item() == pytest.approx(-(evidence + prior), rel=1e-9)
    assert abs(joint) == pytest.approx(abs(evidence + prior), rel=1e-9)


@pytest.mark.parametrize("fit", ["em", "map"])
def test_the_unit_of_the_data_does_not_matter(fit):
    """Neither their origin: losses differ by what the unit adds, weights by the ratio of units."""
    data, unit, origin = rows(30, 20), torch.tensor([100.0, 0.1]), torch.tensor([-7e3, 5.0])
    other = Sequences(data.values * unit + origin, data.lengths)
    found = []
    for each in (data, other):
        pyro.set_rng_seed(0)
        model = TabularHMM(2, autoregressive_normal(2))
        if fit == "em":
            done = fit_em(model, each, num_iterations=5)
        else:
            done = fit_map(MarginalModel(model), each, num_iterations=5, learning_rate=0.05)
        found.append(done.hmm(each).emission.weights.detach())
    expected = found[0] * unit / unit.unsqueeze(-1)
    torch.testing.assert_close(found[1], expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("case", ["vectors", "symbols"])
def test_every_fit_lowers_its_loss(case):
    make, data = cases()[case]
    em = fit_em(make(), data, num_iterations=15, restarts=2)
    assert bool((em.restarts.losses.diff() <= 1e-8).all())
    assert em.restarts.losses[0, -1] < em.restarts.losses[0, 0]
    assert fit_em(make(), data, num_iterations=5, batch_size=2).losses.isfinite().all()
    model = MarginalModel(make())
    fit = fit_svi(model, AutoNormal(model), data, num_iterations=60, learning_rate=0.05)
    assert fit.losses[-10:].mean() < fit.losses[:10].mean()


class Contagion(PyroModule):
    """A family of a user: counts whose rate is a level and a share of the count before."""

    def __init__(self, num_states):
        super().__init__()
        self.level = PyroParam(torch.linspace(1.0, 3.0, num_states), constraints.positive)
        self.share = PyroParam(torch.full((num_states,), 0.3), constraints.positive)

    def forward(self):
        return ContagiousCounts(self.level, self.share)


class ContagiousCounts(Autoregressive):
    def __init__(self, level, share):
        super().__init__(Poisson(level), 1, level.shape)
        self.level, self.share = level, share

    def given(self, context):
        return Poisson(self.level + self.share * context)


def test_gradient_steps_fit_a_distribution_of_a_user_that_reads_the_last_values():
    """One state, so that the maximum is that of a regression of counts on those before."""
    counts = [torch.tensor(2.0)]
    for _ in range(300):
        counts.append(torch.poisson(1.0 + 0.6 * counts[-1]))
    data = Sequences.from_list([torch.stack(counts)])
    fit = fit_em(TabularHMM(1, Contagion), data, num_iterations=20)
    x = data.values[0].numpy()

    def loss(at):
        rate = np.append(at[0], at[0] + at[1] * x[:-1])
        return -stats.poisson.logpmf(x, rate).sum()

    best = optimize.minimize(loss, [1.0, 0.5], bounds=[(1e-3, None)] * 2)
    part = fit.model.module.emission
    assert [part.level.item(), part.share.item()] == pytest.approx(best.x, abs=1e-2)
    assert fit.losses[-1].item() == pytest.approx(best.fun, abs=1e-3)


def test_markov_sample_feeds_what_it_generates():
    tables = Categorical(torch.eye(3).roll(1, 1).expand(2, 3, 3))  # 0, 1, 2, 0, ...
    emission = AutoregressiveCategorical(Categorical(torch.ones(2, 3)), tables)
    even = torch.full((2, 2), 0.5).log()
    hmm = HMM(even[0], even, emission, torch.tensor([5, 5, 5]))

    def model():
        with pyro.plate("data", 3):
            return markov_sample("x", hmm)

    values = Predictive(model, num_samples=4)()
    steps = torch.stack([values[f"x_{t}"] for t in range(5)], -1)
    assert ((steps[..., 1:] - steps[..., :-1]) % 3 == 1).all()
    with pyro.plate("data", 3):
        assert ((pyro.sample("y", hmm).diff() % 3) == 1).all()
