"""Simulation-based calibration: the rank of the truth among samples of its posterior is uniform.

Talts, Betancourt, Simpson, Vehtari and Gelman (2018). Each chain begins at a sample of the prior of
its own and gives one sample, so that ranks are among independent samples.
"""

import pyro
import pytest
import torch
from scipy import stats

from pyrohmm import (
    MarginalModel,
    Sequences,
    TabularHMM,
    categorical,
    fit_gibbs,
    fit_mcmc,
    normal,
    poisson,
    sticky,
)
from pyrohmm.infer.starts import from_prior

EMISSIONS = {
    "categorical": lambda: categorical(3, torch.tensor([[4.0, 1.0, 1.0], [1.0, 1.0, 3.0]])),
    "normal": lambda: normal(0, torch.tensor([-1.0, 1.0]), 0.5, 3.0, 1.0),
    "poisson": lambda: poisson(0, torch.tensor([2.0, 8.0]), 1.0),
}
CHAINS = 15
LENGTHS = torch.tensor([7, 3, 1])


def simulated(module):
    """Parameters of the prior by name, and data of them."""
    with torch.no_grad():
        trace = pyro.poutine.trace(module).get_trace(LENGTHS)
        values = trace.nodes["_RETURN"]["value"].sample()
    truth = {f"module.{name}": trace.nodes[name]["value"] for name in trace.stochastic_nodes}
    return truth, Sequences(values, LENGTHS)


def ranks_of(name, sampler, count):
    """Ranks ``(count, parameters)`` of the truth among samples, the first entry of each site."""
    rows = []
    for _ in range(count):
        module = TabularHMM(2, EMISSIONS[name](), 1.5, sticky(2, 3.0))
        truth, data = simulated(module)
        chains = sampler(module, data)
        row = []
        for site, value in truth.items():
            samples = chains[site].flatten(0, 1).reshape(CHAINS, -1)
            row.append(int((samples[:, 0] < value.flatten()[0]).sum()))
        rows.append(row)
    return torch.tensor(rows)


def by_gibbs(module, data):
    options = {"num_chains": CHAINS, "num_samples": 1, "warmup": 30, "start": from_prior}
    return fit_gibbs(module, data, **options).chains


def by_hmc(module, data):
    start = {f"module.{n}": v.squeeze(1) for n, v in from_prior(module, data, CHAINS).items()}
    options = {"num_chains": CHAINS, "num_samples": 1, "warmup": 40, "start": start}
    return fit_mcmc(MarginalModel(module), data, **options).chains


def uniform(ranks):
    """The smallest p-value of chi-square tests of ranks 0 to CHAINS in eight bins."""
    bins = (ranks * 8) // (CHAINS + 1)
    counts = [torch.bincount(column, minlength=8).numpy() for column in bins.T]
    return min(stats.chisquare(count).pvalue for count in counts)


def test_ranks_are_uniform_under_gibbs():
    pyro.set_rng_seed(0)
    assert uniform(ranks_of("categorical", by_gibbs, 60)) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", EMISSIONS)
@pytest.mark.parametrize("sampler", [by_gibbs, by_hmc])
def test_ranks_of_many_data_sets_are_uniform(name, sampler):
    pyro.set_rng_seed(1)
    assert uniform(ranks_of(name, sampler, 400)) > 1e-4
