"""Default priors: weak in any unit and at any size, and yet no state runs away.

That the log-likelihood at the estimates is within 0.005 nats of its maximum means that no estimate
is a tenth of its standard error away: along each direction it falls by half of that square.
"""

import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from scipy import optimize, stats

import pyrohmm
from pyrohmm import MarginalModel, Sequences, TabularHMM, fit_em, fit_map

SIZE = 100


# a family, and its distribution by positive numbers
GAMMA = pyrohmm.gamma(), lambda shape, mean: stats.gamma(shape, scale=mean / shape)
WEIBULL = pyrohmm.weibull(), lambda shape, scale: stats.weibull_min(shape, scale=scale)
LOG_NORMAL = pyrohmm.log_normal(), lambda spread, scale: stats.lognorm(spread, scale=scale)
STUDENT = pyrohmm.student_t(), stats.t
BETA = pyrohmm.beta(), stats.beta
ANGLES = pyrohmm.von_mises(0), stats.vonmises
COUNTS = pyrohmm.poisson(), stats.poisson


def negative_binomial(size, mean):
    """Its variance exceeds that of Poisson counts by a hundredth: (1 / 100) ** 2 / 4 nats."""
    size = min(size, max(1e3, 100 * mean))
    return stats.nbinom(size, size / (size + mean))


CASES = [
    *((GAMMA, (shape, unit)) for shape in (0.1, 3.0, 400.0, 1e5) for unit in (1e-6, 1e6)),
    *((WEIBULL, (shape, unit)) for shape in (0.2, 2.0, 500.0) for unit in (1e-6, 1e6)),
    *((LOG_NORMAL, (spread, unit)) for spread in (1e-3, 0.3, 5.0) for unit in (1e-6, 1e6)),
    *((STUDENT, (df, 3 * unit, unit)) for df in (1.0, 4.0, 1e4) for unit in (1e-6, 1e6)),
    *((BETA, (0.6 * size, 0.4 * size)) for size in (1.0, 30.0, 5000.0)),
    *((ANGLES, (concentration, 1.0)) for concentration in (0.5, 35.0, 2000.0)),
    *((COUNTS, (rate,)) for rate in (0.1, 3.0, 500.0, 1e6)),
    *(
        ((pyrohmm.negative_binomial(), negative_binomial), (size, mean))
        for size in (0.5, 20.0)
        for mean in (1.0, 5000.0)
    ),
]


@pytest.mark.parametrize(("case", "truth"), CASES)
def test_no_estimate_moves_by_a_tenth_of_its_standard_error(case, truth):
    family, law = case
    values = law(*truth).rvs(SIZE, random_state=7)
    data = Sequences.from_list([torch.as_tensor(values).double()])
    fit = fit_em(TabularHMM(1, family).double(), data, tolerance=None, num_iterations=5)
    found = fit.hmm(data).log_prob(data.values).sum().item()

    def loss(logs):
        numbers = np.exp(np.clip(logs, -600, 600))
        if (
            case is STUDENT
        ):  # fits go to 1000: a kurtosis of 6 / df is 36 / (48 df ** 2) = 1e-6 nats
            numbers[0] = min(numbers[0], 1e3)
        made = law(*numbers)
        return -(made.logpdf if hasattr(made, "logpdf") else made.logpmf)(values).sum()

    best = optimize.minimize(
        loss, np.log(truth), method="Nelder-Mead",
        options={"xatol": 1e-9, "fatol": 1e-6, "maxiter": 4000, "maxfev": 8000},
    )  # fmt: skip
    assert -best.fun - found < 0.005


def test_poisson_counts_that_vary_less_than_chance_stay_so():
    """No shape is best there; the variance of a fit is that of its mean, but for a hundredth."""
    values = torch.as_tensor(stats.poisson(500).rvs(SIZE, random_state=3)).double()
    data = Sequences.from_list([values])
    fit = fit_em(TabularHMM(1, pyrohmm.negative_binomial()).double(), data)
    emission = fit.hmm(data).emission
    limit = max(values.var(correction=0).item(), 1.011 * values.mean().item())
    assert emission.variance.item() < 1.03 * limit


FAMILIES = {
    "gamma": (pyrohmm.gamma(), dist.Gamma(3.0, 2.0)),
    "weibull": (pyrohmm.weibull(), dist.Weibull(3.0, 2.0)),
    "log-normal": (pyrohmm.log_normal(), dist.LogNormal(3.0, 0.2)),
    "student t": (pyrohmm.student_t(), dist.StudentT(3.0, 10.0, 1.0)),
    "beta": (pyrohmm.beta(), dist.Beta(3.0, 2.0)),
    "negative binomial": (pyrohmm.negative_binomial(), dist.NegativeBinomial(3.0, 0.7)),
    "poisson": (pyrohmm.poisson(), dist.Poisson(9.0)),
    "von mises": (pyrohmm.von_mises(0), dist.VonMises(1.0, 3.0)),
    "wrapped Cauchy": (pyrohmm.wrapped_cauchy(), dist.VonMises(1.0, 3.0)),
    "zero-inflated": (pyrohmm.zero_inflated(pyrohmm.gamma()), dist.Gamma(3.0, 2.0)),
    "censored": (pyrohmm.censored(pyrohmm.weibull(), upper=1e4), dist.Weibull(3.0, 2.0)),
    "autoregressive": (pyrohmm.autoregressive_normal(1), dist.Normal(torch.zeros(1), 1.0)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "name",
    [  # samples of gamma shapes among zeros take minutes
        pytest.param(name, marks=[pytest.mark.slow] if name == "zero-inflated" else [])
        for name in FAMILIES
    ],
)
def test_no_state_runs_away(name, dtype):
    """One observation, ties, an outlier: all stays finite, and samples of it do."""
    torch.set_default_dtype(dtype)
    family, law = FAMILIES[name]
    pyro.set_rng_seed(2)
    values = law.sample((12,)).to(dtype)
    ties, outlier = values[[0] * 12], values.clone()
    if name not in ("beta", "von mises", "wrapped Cauchy"):
        outlier[5] *= 1000
    for part in (values[:1], ties, torch.cat([ties, values]), outlier):
        data = Sequences.from_list([part])
        for num_states in (1, 2):
            fit = fit_em(TabularHMM(num_states, family), data, num_iterations=30)
            assert bool(fit.losses.isfinite().all())
            assert all(bool(value.isfinite().all()) for value in fit.parameters.values())
            assert not any("EM must not do" in note for note in fit.notes)


@pytest.mark.parametrize("unit", [1e-6, 1e6])
@pytest.mark.parametrize("name", ["gamma", "weibull", "log-normal", "student t"])
def test_the_unit_does_not_matter(name, unit):
    family, law = FAMILIES[name]
    pyro.set_rng_seed(3)
    values = torch.cat([law.sample((40,)), 5 * law.sample((40,))])
    losses, paths = [], []
    for scale in (1.0, unit):
        pyro.set_rng_seed(4)
        data = Sequences.from_list([scale * values])
        fit = fit_em(TabularHMM(2, family), data, num_iterations=20, tolerance=None)
        hmm = fit.hmm(data)
        losses.append(hmm.log_prob(data.values).item() + len(values) * math.log(scale))
        paths.append(hmm.viterbi(data.values))
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    assert torch.equal(*paths)


@pytest.mark.parametrize("name", ["gamma", "weibull", "student t", "beta", "negative binomial"])
def test_gradient_fits_find_what_em_does(name):
    """Samples of priors that are all but flat would be no start."""
    family, law = FAMILIES[name]
    pyro.set_rng_seed(5)
    first = law.sample((150,))
    data = Sequences.from_list([torch.cat([first, (1 - first) ** 3 if name == "beta" else
                                           9 * law.sample((150,))])])  # fmt: skip
    em = fit_em(TabularHMM(2, family), data)
    fit = fit_map(MarginalModel(TabularHMM(2, family)), data, num_iterations=600)
    ends = [each.hmm(data).log_prob(data.values).sum().item() for each in (em, fit)]
    assert ends[1] > ends[0] - 0.5


def test_default_priors_of_rates_have_the_unit_of_times():
    pyro.set_rng_seed(6)
    symbols = (torch.arange(400) // 8 % 2).tolist()
    found = []
    for unit in (1e-6, 1.0, 1e6):
        times = unit * torch.arange(400.0).double()
        data = Sequences.from_list([symbols], times=[times])
        module = pyrohmm.TabularContinuousTimeHMM(2, pyrohmm.categorical(2)).double()
        start = {"initial": torch.tensor([0.5, 0.5]),
                 "rates": torch.tensor([[0, 0.1], [0.1, 0]]) / unit,
                 "emission.probs": torch.tensor([[0.9, 0.1], [0.1, 0.9]])}  # fmt: skip
        start = {name: value.double() for name, value in start.items()}
        fit = fit_em(module, data, start=start, tolerance=1e-10)
        found.append(fit.parameters["module.rates"] * unit)
    torch.testing.assert_close(found[0], found[1])
    torch.testing.assert_close(found[2], found[1])


# Maximum likelihood


@pytest.mark.parametrize("name", FAMILIES)
def test_without_priors_it_is_maximum_likelihood(name):
    """However strong they are: the priors of the chain, and of the emission, have no part."""
    family, law = FAMILIES[name]
    pyro.set_rng_seed(8)
    values = torch.cat([law.sample((60,)), law.sample((60,))])
    data = Sequences.from_list([values])
    module = TabularHMM(1, family, priors=False)
    fit = fit_em(module, data, tolerance=1e-12)
    asked = fit_em(TabularHMM(1, family), data, tolerance=1e-12, priors=False)
    assert bool((fit.history["log_prior"] == 0).all())
    torch.testing.assert_close(fit.losses[-1], asked.losses[-1])
    again = fit_em(fit.hmm(data), data, tolerance=1e-12)  # points, which have no priors
    assert again.losses[-1].item() == pytest.approx(fit.losses[-1].item(), abs=1e-6)


def test_strong_priors_count_unless_they_are_left_out():
    data = Sequences.from_list([[1.0, 2.0, 3.0]])
    module = TabularHMM(
        1, pyrohmm.poisson(concentration=50.0, rate=1.0), transition_concentration=9.0
    )
    assert fit_em(module, data).parameters["module.emission.rate"].item() > 5
    for fit in (
        fit_em(module, data, priors=False),
        fit_map(MarginalModel(module), data, priors=False, tolerance=1e-9),
    ):
        assert fit.parameters["module.emission.rate"].item() == pytest.approx(2.0, rel=1e-3)
    nodes = poutine.trace(module).get_trace(torch.tensor([3])).nodes  # is what it was
    (rate,) = (node for name, node in nodes.items() if name.endswith("emission.rate"))
    assert not isinstance(rate["fn"], dist.MaskedDistribution)


@pytest.mark.parametrize(
    "build",
    [
        lambda f: TabularHMM(2, f, transition_concentration=20.0, priors=False),
        lambda f: pyrohmm.TabularSecondOrderHMM(2, f, transition_concentration=20.0, priors=False),
        lambda f: pyrohmm.TabularHSMM(
            2, f, pyrohmm.poisson_durations(20, 300.0), priors=False, transition_concentration=20.0
        ),
        lambda f: pyrohmm.StationaryHMM(2, f, transition_concentration=20.0, priors=False),
    ],
)
def test_modules_without_priors_have_none(build):
    pyro.set_rng_seed(1)
    data = Sequences.from_list([[0, 0, 1, 1, 1, 0, 0, 0, 1, 1] * 8])
    fit = fit_em(build(pyrohmm.categorical(2, 30.0)), data, restarts=3, num_iterations=50)
    assert bool((fit.history["log_prior"] == 0).all())
    assert bool((fit.losses.diff() <= 1e-6).all())
