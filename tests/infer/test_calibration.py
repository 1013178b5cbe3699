"""Simulation-based calibration: the rank of the truth among samples of its posterior is uniform.

Talts, Betancourt, Simpson, Vehtari and Gelman (2018). Each chain begins at a sample of the prior of
its own and gives one sample, so that ranks are among independent samples.
"""

from functools import partial

import pyro
import pytest
import torch
from pyro.distributions import Normal
from scipy import stats

from pyrohmm import (
    HMM,
    MarginalModel,
    Sequences,
    TabularHMM,
    calibrate,
    categorical,
    fit_em,
    fit_gibbs,
    fit_mcmc,
    normal,
    poisson,
    sticky,
)
from pyrohmm.infer.starts import from_prior


def given(samples):
    """Ranks of the same samples of a rate for each data set."""
    module = TabularHMM(1, poisson(0, 2.0, 1.0))
    return calibrate(module, lambda module, data: {"emission.rate": samples}, COUNTS, 20)


EMISSIONS = {
    "categorical": lambda: categorical(3, torch.tensor([[4.0, 1.0, 1.0], [1.0, 1.0, 3.0]])),
    "normal": lambda: normal(0, torch.tensor([-1.0, 1.0]), 0.5, 3.0, 1.0),
    "poisson": lambda: poisson(0, torch.tensor([2.0, 8.0]), 1.0),
}
CHAINS = 15
LENGTHS = torch.tensor([7, 3, 1])


ONE = {"num_samples": 1, "start": from_prior}  # of each chain


def by_gibbs(module, data, values):
    options = ONE | {"num_chains": CHAINS * len(values), "values": values}
    return fit_gibbs(module, data, warmup=30, **options).samples()


def by_hmc(module, data):
    return fit_mcmc(MarginalModel(module), data, warmup=40, num_chains=CHAINS, **ONE).samples()


def least(name, sampler, *numbers):
    """The smallest p-value of the variables, and of their joint density."""
    module = TabularHMM(2, EMISSIONS[name](), 1.5, sticky(2, 3.0))
    values = calibrate(module, sampler, LENGTHS, *numbers).p_values()
    assert len(values) == (5 if name == "normal" else 4)
    return min(values.values())


def test_ranks_are_uniform_under_gibbs():
    """Of chains of several data sets in one batch; the last one has another number of them."""
    pyro.set_rng_seed(0)
    assert least("categorical", by_gibbs, 61, 20) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", EMISSIONS)
@pytest.mark.parametrize(("sampler", "together"), [(by_gibbs, 25), (by_hmc, 1)])
def test_ranks_of_many_data_sets_are_uniform(name, sampler, together):
    pyro.set_rng_seed(1)
    assert least(name, sampler, 400, together) > 1e-4


def test_a_pyro_model_with_covariates_whose_joint_density_finds_samples_of_the_prior():
    """The prior is a posterior that no parameter's rank can tell from the right one."""

    def model(data):
        slope = pyro.sample("slope", Normal(0.0, 1.0))
        zero, emission = torch.zeros(1), Normal(slope * data.covariates, 1.0)  # (N, T, K)
        hmm = HMM(zero, zero[None], emission, data.lengths, data.observed, emission_per_step=True)
        pyro.sample("x", hmm, obs=data.values)
        return hmm

    def exact(model, data):
        x = data.covariates.squeeze(-1)[data.observed]
        variance = 1 / (1 + x.square().sum())
        mean = variance * (x * data.values[data.observed]).sum()
        return {"slope": mean + variance.sqrt() * torch.randn(15)}

    pyro.set_rng_seed(5)
    x, observed = torch.randn(2, 4, 1), torch.tensor([[1, 0, 1, 1], [1, 1, 0, 0]]).bool()
    like = Sequences(torch.zeros(2, 4), torch.tensor([4, 2]), observed, covariates=x)
    found = calibrate(model, exact, like, 60).p_values()
    assert found.keys() == {"slope", "lp"}
    assert min(found.values()) > 1e-3
    of_prior = calibrate(model, lambda *_: {"slope": torch.randn(15)}, like, 80).p_values()
    assert of_prior["slope"] > 1e-3
    assert of_prior["lp"] < 1e-6


COUNTS = torch.tensor([3, 1])


def conjugate(module, data, strength=1.0):
    """Samples of the gamma posterior of one rate, of the data counted ``strength`` times."""
    total = strength * data.values[data.observed].sum()
    exposure = 1.0 + strength * data.num_observed
    return {"emission.rate": torch.distributions.Gamma(2.0 + total, exposure).sample((15, 1))}


def test_exact_samples_are_calibrated_and_too_narrow_ones_are_not():
    pyro.set_rng_seed(2)
    module = TabularHMM(1, poisson(0, 2.0, 1.0))
    right = calibrate(module, conjugate, COUNTS, 200)
    assert right.num_samples == 15
    assert right.ranks["emission.rate"].shape == (200,)
    (p,) = right.p_values().values()
    bins = torch.bincount(right.ranks["emission.rate"] // 2, minlength=8).numpy()
    assert p == pytest.approx(stats.chisquare(bins).pvalue)
    assert p > 1e-3
    narrow = calibrate(module, partial(conjugate, strength=10.0), COUNTS, 200)
    assert narrow.p_values()["emission.rate"] < 1e-6
    with pytest.raises(ValueError, match=r"num_bins must divide S . 1 = 16; got 5"):
        right.p_values(5)


def test_a_sampler_that_is_stuck_is_found_and_wrong_samples_are_named():
    assert given(torch.full((15, 1), 9.0)).p_values()["emission.rate"] < 1e-6
    with pytest.raises(ValueError, match=r"'module.emission.rate' must be finite"):
        given(torch.full((15, 1), torch.nan))


def test_a_guide_is_calibrated_like_a_sampler():
    """Laplace's approximation of a posterior that is nearly normal."""

    def laplace(module, data):
        fit = fit_em(module, data)
        rate = fit.parameters["module.emission.rate"]
        low, high = fit.intervals(data)["module.emission.rate"]
        spread = (high / low).log() / (2 * 1.96)
        return {"emission.rate": rate * (spread * torch.randn(15, 1)).exp()}

    pyro.set_rng_seed(3)
    module = TabularHMM(1, poisson(0, 400.0, 10.0))
    assert calibrate(module, laplace, COUNTS, 40).p_values(4)["emission.rate"] > 1e-3
