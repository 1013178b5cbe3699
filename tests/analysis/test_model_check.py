"""Checks of a fitted model, and the page about it."""

import math
import re
from itertools import cycle

import families
import matplotlib.pyplot as plt
import numpy as np
import pyro
import pytest
import torch
from pyro.distributions import Normal
from pyro.infer.autoguide import AutoNormal
from torch.distributions import constraints

from pyrohmm import (
    HMM,
    MarginalModel,
    PosteriorDraws,
    RegressionHMM,
    Sequences,
    TabularContinuousTimeHMM,
    TabularFactorialHMM,
    TabularHMM,
    TabularHSMM,
    TabularSecondOrderHMM,
    autoregressive_normal,
    categorical,
    censored,
    check_model,
    fit_em,
    fit_gibbs,
    fit_map,
    fit_mcmc,
    fit_svi,
    free_durations,
    normal,
    poisson,
    report,
    truncated,
    weibull,
)
from pyrohmm.analysis.model_check import autocorrelation, quantiles, residual_plots


def levels(num_sequences=4, num_steps=80):
    """Two persistent levels in noise, of which one sequence has gaps."""
    pyro.set_rng_seed(3)
    states = (torch.rand(num_sequences, num_steps) < 0.05).long().cumsum(-1) % 2
    values = 4.0 * states + torch.randn(num_sequences, num_steps)
    observed = torch.ones(num_sequences, num_steps, dtype=torch.bool)
    observed[0, 10:14] = False
    lengths = torch.tensor([num_steps] * (num_sequences - 1) + [1])
    return Sequences(values, lengths, observed & (torch.arange(num_steps) < lengths.unsqueeze(-1)))


def test_statistics_read_what_is_observed_and_nothing_else():
    values = torch.tensor([[1.0, 2.0, 3.0, 99.0], [4.0, 99.0, 99.0, 99.0]])
    observed = values < 99
    data = Sequences(values, torch.tensor([4, 1]), observed)
    assert quantiles(data)[2] == 2.5
    pairs = torch.tensor([[1.0, 2.0], [2.0, 3.0]])
    torch.testing.assert_close(autocorrelation(data), torch.corrcoef(pairs.T)[0, 1])
    assert autocorrelation(data[1:]).isnan()


def test_a_true_model_passes_and_a_wrong_one_does_not():
    data = levels()
    good = check_model(fit_em(TabularHMM(2, normal(0)), data, restarts=3), data)
    assert all(bool((p > 0.01).all()) for p in good.p_values.values())
    bad = check_model(fit_em(TabularHMM(1, normal(0)), data), data)
    assert bad.p_values["autocorrelation"] < 0.01
    assert "autocorrelation" in str(bad)
    assert bad.simulated["quantiles"].shape == (200, 5)


def test_samples_of_a_posterior_and_statistics_of_ones_own():
    data = Sequences.from_list([[0, 1, 1, 2], [1]])
    model = MarginalModel(TabularHMM(1, categorical(3)))
    fit = fit_svi(model, AutoNormal(model), data, num_iterations=5)
    draws = PosteriorDraws.of(fit, num_draws=50)
    check = check_model(draws, data, {"ones": lambda data: (data.values == 1).sum()})
    assert check.simulated["ones"].shape == (50,)
    assert check.observed["ones"] == 3
    axes = check.plot("ones")
    assert axes.get_xlabel() == "ones"
    plt.close("all")


def test_residuals_of_a_true_model_are_normal_and_independent():
    data = levels(6, 200)
    hmm = fit_em(TabularHMM(2, normal(0)), data, restarts=3).hmm(data)
    left, _, right = residual_plots(hmm, data.values)
    expected, found = left.lines[0].get_data()
    assert abs(expected - found)[20:-20].max() < 0.3
    heights = right.lines[0].get_ydata()
    assert max(abs(heights)) < 4 / math.sqrt(len(found))
    plt.close("all")


CHAINS = {
    "markov": lambda family: TabularHMM(3, family),
    "durations": lambda family: TabularHSMM(3, family, free_durations(2)),
    "pairs": lambda family: TabularSecondOrderHMM(3, family),
    "rates": lambda family: TabularContinuousTimeHMM(3, family),
    "product": lambda family: TabularFactorialHMM((3, 1), family),
    "covariates": lambda family: RegressionHMM(3, family, transition=[0, 1]),
    "many states": lambda family: TabularHMM(12, family),
}
OTHERS = {
    "censored": (
        lambda: censored(weibull(2), upper=0.8),
        lambda: torch.rand(3, 8, 2).clamp(max=0.8),
    ),
    "truncated": (lambda: truncated(poisson(), lower=1), lambda: torch.randint(1, 9, (3, 8)) * 1.0),
    "regression": (lambda: autoregressive_normal(2, 1), lambda: torch.randn(3, 8, 2)),
}


def page_of(fit, data, path):
    """The page about a fit, all of whose sections there are, and a check of the model."""
    page = report(fit, data, path / "fit.html").read_text()
    assert page.count("<h2>") == 9
    assert page.count("data:image/png") == 5
    assert re.findall("Not shown.*", page) == []
    assert not plt.get_fignums()
    return page


@pytest.mark.parametrize(("name", "chain"), [*zip([*families.CASES, *OTHERS], cycle(CHAINS))])
def test_there_is_a_page_of_every_chain_and_family(tmp_path, name, chain):
    if name in families.CASES:
        case, rng = families.CASES[name], np.random.default_rng(0)
        family, values = case.family(), torch.tensor(case.values(rng, 24))
        values = values.reshape(3, 8, *values.shape[1:])
    else:
        family, values = (make() for make in OTHERS[name])
    chain = "markov" if name == "sharing" else chain
    lengths = torch.tensor([8, 1, 5])
    observed = (torch.arange(8) < lengths.unsqueeze(-1)) & (torch.arange(8) != 7)
    data = Sequences(
        values, lengths, observed, torch.full((3, 8), -1).index_fill(1, torch.tensor(0), 2),
        times=torch.rand(3, 8).cumsum(-1) if chain == "rates" else None,
        covariates=torch.randn(3, 8, 2) if chain == "covariates" else None,
    )  # fmt: skip
    fit = fit_em(CHAINS[chain](family), data, num_iterations=2, tolerance=None)
    page_of(fit, data, tmp_path)
    assert len(residual_plots(fit.hmm(data), data.values)) == 3 * math.prod(values.shape[2:])
    plt.close("all")


def subjects(data):
    """Numbers about a level of each sequence."""
    spread = pyro.param("spread", torch.tensor(1.0), constraint=constraints.positive)
    with pyro.plate("subjects", len(data)):
        level = pyro.sample("level", Normal(torch.zeros((), dtype=spread.dtype), spread))
        zero = torch.zeros(1, dtype=level.dtype)
        emission = Normal(level.unsqueeze(-1), 1.0)
        hmm = HMM(zero, zero.unsqueeze(0), emission, data.lengths, data.observed)
        pyro.sample("x", hmm, obs=data.values)
    return hmm


few = {"num_iterations": 5}
FITS = {
    "MAP": lambda model, data: fit_map(model, data, **few),
    "SVI": lambda model, data: fit_svi(model, AutoNormal(model), data, **few),
    "Gibbs": lambda model, data: fit_gibbs(model.module, data, num_samples=8, num_chains=3),
    "HMC": lambda model, data: fit_mcmc(model, data, num_samples=8, warmup=8, num_chains=3),
}


@pytest.mark.parametrize("method", FITS)
def test_there_is_a_page_of_every_method(tmp_path, method):
    data = levels(3, 12)
    fit = FITS[method](MarginalModel(TabularHMM(2, normal(0))), data)
    page = page_of(fit, data, tmp_path)
    assert f"fitted by {method}" in page
    assert ("standard deviation" in page) == (method != "MAP")
    assert ("R-hat" in page) == (method in ("Gibbs", "HMC"))
