"""Hamiltonian Monte Carlo of many chains: known moments, other samplers, and what it refuses."""

import itertools

import pyro
import pytest
import torch
from pyro.distributions import Normal
from pyro.infer import MCMC, NUTS
from torch.distributions import constraints

from pyrohmm import (
    HMM,
    MarginalModel,
    PosteriorDraws,
    Sequences,
    TabularHMM,
    categorical,
    fit_gibbs,
    fit_mcmc,
    to_arviz,
)
from pyrohmm.infer import mcmc
from pyrohmm.infer.coordinates import coordinates
from pyrohmm.infer.sampled import Ladder, agreement


def following(log_density, start, warmup=0):
    """Chains of one variable ``x``, a vector."""
    support = constraints.independent(constraints.real, 1)
    ladder = Ladder(len(start), 1, warmup)
    return mcmc.Hamiltonian({"x": support}, {"x": start}, log_density, ladder)


def test_trajectories_are_leapfrog_steps_that_can_be_reversed(monkeypatch):
    """From the end, with the momentum turned round, to where it began; errors of second order."""
    start = torch.randn(5, 2, dtype=torch.float64)
    chains = following(lambda values: -values["x"].pow(4).sum(-1) / 4, start)
    chains.state = chains.at(start)
    given = torch.randn(5, 2, dtype=torch.float64)
    momentum = given
    monkeypatch.setattr(torch, "randn_like", lambda like: momentum)
    monkeypatch.setattr(torch, "rand_like", torch.zeros_like)  # all are accepted
    chains.state, moved = chains.trajectory(0.05, 8)
    momentum = -moved.momentum
    back, returned = chains.trajectory(0.05, 8)
    torch.testing.assert_close(back.place, start)
    torch.testing.assert_close(returned.momentum, -given)
    assert moved.accepted.min() > 0.99


def test_moments_and_tails_of_a_normal_distribution_in_unequal_units():
    """Correlated, with standard deviations from a hundredth to ten; the metric finds the units."""
    torch.manual_seed(0)
    units = torch.logspace(-2, 1, 6, dtype=torch.float64)
    matrix = (0.5 + 0.5 * torch.eye(6)).double() * units.unsqueeze(-1) * units
    mean, precision = 3 * units, torch.linalg.inv(matrix)

    def log_density(values):
        apart = values["x"] - mean
        return -0.5 * (apart @ precision * apart).sum(-1)

    chains = following(log_density, torch.zeros(32, 6, dtype=torch.float64), 300)
    chains.state, places = chains.at(chains.state.place), []
    for _ in range(600):
        chains.step()
        places.append(chains.state.place)
    found = chains.tuning.root[0] @ chains.tuning.root[0]
    torch.testing.assert_close(
        found / units.outer(units), matrix / units.outer(units), rtol=0, atol=0.1
    )
    samples = (torch.stack(places[300:], 1) - mean) / units
    for power, wanted in ((1, 0.0), (2, 1.0), (4, 3.0)):
        found = agreement(samples**power)
        assert found.rhat.max() < 1.02
        error = (samples**power).flatten(0, 1).std(0) / found.bulk.sqrt()
        assert bool(((samples**power).mean((0, 1)) - wanted).abs().lt(5 * error).all())


def test_a_matrix_without_a_root_ends_trajectories_and_not_the_run():
    """The density 1 - x^2 up to its edge, beyond which Cholesky's decomposition fails."""
    pyro.set_rng_seed(0)
    start = torch.zeros(3, 1, dtype=torch.float64)
    chains = following(
        lambda values: (
            2 * torch.linalg.cholesky(1 - values["x"].square()[..., None])[:, 0, 0].log()
        ),
        start,
    )
    chains.state, found = chains.at(start), []
    for _ in range(1500):
        chains.state, _ = chains.trajectory(0.4, 3)
        found.append(chains.state.place)
    torch.testing.assert_close(torch.stack(found).square().mean().item(), 0.2, rtol=0, atol=0.02)


def test_coordinates_of_rows_of_probabilities_have_their_volume_and_an_inverse():
    """Those of an even stick are normal; shares near one are not rounded."""
    torch.manual_seed(0)
    to = coordinates(constraints.independent(constraints.simplex, 1))
    free = 2 * torch.randn(7, 3, 4, dtype=torch.float64)
    rows = to(free)
    torch.testing.assert_close(to.inv(rows), free)
    for one, row, found in zip(free, rows, to.log_abs_det_jacobian(free, rows)):
        slope = torch.autograd.functional.jacobian(lambda x: to(x)[:, :-1].flatten(), one)
        wanted = torch.linalg.slogdet(slope.reshape(12, 12))[1]
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(row.sum(-1), torch.ones_like(row[:, 0]))
    x = torch.tensor([[[-5.0], [0.3], [5.0]]])
    torch.testing.assert_close(to.inv(to(x)), x, rtol=1e-4, atol=0)
    wanted = Normal(0.0, 1.0).log_prob(x).sum()
    torch.testing.assert_close(to.log_abs_det_jacobian(x, to(x)).sum(), wanted)


def test_it_agrees_with_gibbs_in_means_variances_and_tails():
    """Which the test of exact posteriors holds; the states are told apart by their priors."""
    pyro.set_rng_seed(0)
    data = Sequences.from_list([[0, 1, 1, 0, 2], [2, 0, 0]])
    strength = torch.tensor([[4.0, 1.0, 1.0], [1.0, 2.0, 3.0]])
    module = TabularHMM(2, categorical(3, strength), 1.5, torch.tensor([[3.0, 1.0], [1.0, 2.0]]))
    gibbs = fit_gibbs(module, data, num_samples=600, warmup=50)
    fit = fit_mcmc(MarginalModel(module), data, num_samples=120, warmup=120)
    assert max(part.rhat.max() for part in fit.agreement().values()) < 1.05
    assert 0.5 < fit.tuning["acceptance"] < 0.97
    for name, value in fit.chains.items():
        other = gibbs.chains[name].flatten(0, 1)
        value = value.flatten(0, 1)
        for statistic in (lambda x: x.mean(0), lambda x: x.std(0), lambda x: x.quantile(0.05, 0)):
            torch.testing.assert_close(statistic(value), statistic(other), rtol=0.1, atol=0.02)
    assert PosteriorDraws.of(fit).shape == (32, 120)
    converted = to_arviz(fit, data)
    assert converted["sample_stats"]["lp"].sizes["chain"] == 32


@pytest.mark.slow
def test_it_agrees_with_nuts_of_pyro_in_means_variances_and_tails():
    """Which takes its own trajectories, metric and step size, one chain at a time."""
    pyro.set_rng_seed(0)
    data = Sequences.from_list([[0, 1, 1, 0, 2], [2, 0, 0]])
    strength = torch.tensor([[4.0, 1.0, 1.0], [1.0, 2.0, 3.0]])
    module = TabularHMM(2, categorical(3, strength), 1.5, torch.tensor([[3.0, 1.0], [1.0, 2.0]]))
    model = MarginalModel(module)
    nuts = MCMC(NUTS(model, max_tree_depth=4), 700, 150, disable_progbar=True)
    nuts.run(data)
    wanted = nuts.get_samples(group_by_chain=True)
    fits = [
        fit_mcmc(model, data, num_samples=120, warmup=120),
        fit_gibbs(module, data, num_samples=400, warmup=50),
    ]
    for fit, (name, other) in itertools.product(fits, wanted.items()):
        found = fit.chains[name]
        ends = (found.flatten(0, 1).quantile(q, 0) for q in (0.05, 0.95))
        statistics = [
            lambda x: x,
            torch.square,
            *(lambda x, end=end: (x < end) + 0.0 for end in ends),
        ]
        for statistic in statistics:  # means, variances and both tails
            ours, theirs = statistic(found).double(), statistic(other).double()
            error = 0.0
            for part in (ours, theirs):
                error = error + part.flatten(0, 1).var(0) / agreement(part).bulk.nan_to_num(1.0)
            apart = (ours.mean((0, 1)) - theirs.mean((0, 1))).abs()
            assert bool((apart < 4.5 * error.sqrt() + 1e-6).all()), (fit.method, name)


def test_variables_of_sequences_keep_the_dimension_of_the_data():
    """And their moments are those of a conjugate posterior."""
    pyro.set_rng_seed(0)
    data = Sequences.from_list([torch.tensor([1.0, 2.0, 3.0]), torch.tensor([-1.0])])

    def model(data):
        one = torch.zeros(1)
        with pyro.plate("subjects", data.total, subsample=data.indices):
            level = pyro.sample("level", Normal(0.0, 1.0))
            emission = Normal(level[..., None, None].expand(*level.shape, 3, 1), 1.0)
            hmm = HMM(one, one.unsqueeze(-1), emission, data.lengths, emission_per_step=True)
            pyro.sample("x", hmm, obs=data.values)
        return hmm

    fit = fit_mcmc(model, data, num_samples=60, warmup=60)
    found = fit.samples()["level"]
    assert fit.chains["level"].shape == (32, 60, 2)
    torch.testing.assert_close(found.mean(0), torch.tensor([1.5, -0.5]), rtol=0, atol=0.08)
    torch.testing.assert_close(found.var(0), torch.tensor([0.25, 0.5]), rtol=0.2, atol=0)
