"""Tempered chains: marginal likelihoods that are known exactly, modes, and what is refused."""

import math

import numpy as np
import oracle
import pyro
import pytest
import torch
from pyro.distributions import Dirichlet
from pyro.nn import PyroSample
from scipy import stats
from scipy.special import gammaln

from pyrohmm import (
    MarginalModel,
    Sequences,
    TabularHMM,
    categorical,
    fit_em,
    fit_gibbs,
    fit_mcmc,
    normal,
    normal_mixture,
    poisson,
)
from pyrohmm.infer.sampled import Ladder, marginal_likelihood


def close(fit, exact, widest):
    value, error = fit.marginal_likelihood()
    assert error < widest
    assert abs(value - exact) < 4 * error + 1e-4, (value, error, exact)


SEQUENCES = [[0, 0, 1, 1], [1, 0, 2]]
SIZES = {"num_chains": 8, "num_temperatures": 4, "num_samples": 40, "warmup": 40}


@pytest.mark.parametrize("sampler", ["gibbs", "hmc", "trajectories"])
def test_marginal_likelihood_is_that_of_the_sum_over_all_paths(sampler):
    """By conjugate steps, by trajectories, and by those of a prior of the user's own."""
    pyro.set_rng_seed(0)
    data = Sequences.from_list(SEQUENCES)
    module = TabularHMM(2, categorical(3))
    if sampler == "hmc":
        start = fit_em(module, data, num_iterations=5)
        fit = fit_mcmc(MarginalModel(module), data, start=start, **SIZES)
    else:
        if sampler == "trajectories":
            module.emission.probs = PyroSample(Dirichlet(torch.ones(2, 3)).to_event(1))
        fit = fit_gibbs(module, data, **SIZES)
    exact, _ = oracle.by_tables(data, [np.ones((1, 2)), np.ones((2, 2)), np.ones((2, 3))])
    close(fit, exact, 0.1)
    assert fit.chains["module.transition"].shape == (8, 40, 2, 2)
    assert fit.tuning["swaps"] > 0.3
    assert (fit.inverse_temperatures[0], fit.inverse_temperatures[-1]) == (0, 1)


def test_one_state_has_the_marginal_likelihood_of_a_conjugate_model():
    """Poisson counts are negative binomial."""
    pyro.set_rng_seed(0)
    counts, shape, rate = torch.tensor([2.0, 5.0, 3.0, 4.0, 0.0]), 2.0, 0.5
    data = Sequences.from_list([counts[:3], counts[3:]])
    total, size = counts.sum().item(), len(counts)
    exact = (
        shape * math.log(rate) - gammaln(shape) + gammaln(shape + total)
        - (shape + total) * math.log(rate + size) - gammaln(counts.numpy() + 1).sum()
    )  # fmt: skip
    close(fit_gibbs(TabularHMM(1, poisson(0, shape, rate)), data, **SIZES), exact, 0.1)


@pytest.mark.parametrize("family", [
    normal(1, 0.5, 2.0, 3.0, 1.5), normal_mixture(1, 0.5, 2.0, 3.0, 1.5, num_components=1),
])  # fmt: skip
def test_a_normal_sample_has_the_density_of_a_multivariate_t(family):
    """Also as a mixture of one component, whose parameters take trajectories in tempered chains."""
    pyro.set_rng_seed(0)
    values = torch.tensor([0.3, -1.0, 2.5, 0.7]).unsqueeze(-1)
    module = TabularHMM(1, family)
    fit = fit_gibbs(module, Sequences.from_list([values]), **SIZES)
    matrix = 1.5 / 3.0 * (torch.eye(4) + 1 / 2.0)
    exact = stats.multivariate_t([0.5] * 4, matrix.numpy(), df=6.0).logpdf(values[:, 0].numpy())
    close(fit, exact, 0.1)


def test_all_modes_are_visited():
    """Two orders of two states that are far apart: a chain alone never leaves its own."""
    pyro.set_rng_seed(0)
    levels = torch.tensor([-2.0, 2.0])[torch.arange(24) // 3 % 2]
    data = Sequences.from_list([levels + 0.3 * torch.randn(24)])
    module = TabularHMM(2, normal(0, 0.0, 0.2, 3.0, 1.0))
    options = {"num_chains": 4, "num_samples": 300, "warmup": 150}
    alone = fit_gibbs(module, data, **options).chains["module.emission.loc"]
    below = (alone[..., 0] < alone[..., 1]).double().mean(1)
    assert bool(((below == 0) | (below == 1)).all())
    fit = fit_gibbs(module, data, num_temperatures=8, **options)
    loc = fit.chains["module.emission.loc"]
    first = (loc[..., 0] < loc[..., 1]).double()
    assert int((first.mean(1) % 1 > 0).sum()) >= 3  # of four
    assert abs(first.mean() - 0.5) < 0.2
    ordered = loc.sort(-1).values.mean((0, 1))
    torch.testing.assert_close(ordered, alone.sort(-1).values.mean((0, 1)), rtol=0, atol=0.05)


def test_round_trips_are_counted_and_their_lack_is_noted():
    """From the prior to the posterior and back; swaps alone may look good beside a gap."""
    ladder = Ladder(2, 3, 0)
    for _ in range(24):  # all swap: each of three chains is back after six swaps
        ladder.swap(torch.full((6,), 9.0))
    assert ladder.trips.tolist() == [9, 9]  # one at every second swap, once all have set out
    data = Sequences.from_list(SEQUENCES)
    options = {"num_chains": 4, "num_temperatures": 4, "warmup": 10}
    mixed = fit_gibbs(TabularHMM(2, categorical(3)), data, num_samples=60, **options)
    assert mixed.tuning["round trips"] > 1
    assert not mixed.notes
    short = fit_gibbs(TabularHMM(2, categorical(3)), data, num_samples=4, **options)
    assert "hardly any chain has come from the prior" in short.notes[0]


def test_bennetts_ratio_of_normal_distributions():
    """Z of exp(-x^2 / 2) and of exp(-2 x^2): half."""
    torch.manual_seed(0)
    x, y = torch.randn(2, 20, 500, dtype=torch.float64)
    works = torch.stack([-1.5 * x**2, 1.5 * (y / 2) ** 2], -1).unsqueeze(-1)
    value, error = marginal_likelihood(works)
    assert abs(value - math.log(0.5)) < 4 * error < 0.05
    spread = torch.tensor([marginal_likelihood(part[None]).value for part in works]).std()
    assert error == pytest.approx(spread.item() / 20**0.5, rel=0.5)
