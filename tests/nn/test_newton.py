"""Families fitted by Newton's method: against SciPy's fits, sums and cumulative probabilities."""

import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy import integrate, optimize, stats

import pyrohmm
from pyrohmm import HMM, Sequences, TabularHMM, fit_em
from pyrohmm.distributions import Censored, Truncated, WrappedCauchy, ZeroInflated
from pyrohmm.distributions.modified import Angle, BetaWithCdf, StudentTWithCdf
from pyrohmm.ops import products
from pyrohmm.ops.newton import maximized, of_function

GENERATOR = np.random.default_rng(0)
FLAT = dist.Uniform(-1e30, 1e30)
WIDE = dist.Uniform(0.0, 1e30)
UNIT = dist.Uniform(0.0, 1.0)


def fitted(family, values):
    """Estimates of one state by name, and the log-likelihood."""
    data = Sequences.from_list([torch.as_tensor(values)])
    fit = fit_em(TabularHMM(1, family).double(), data, tolerance=1e-12)
    hmm = fit.hmm(data)
    return fit.parameters, hmm.log_prob(data.values).sum().item()


CASES = {
    "log-normal": (
        pyrohmm.log_normal(loc=FLAT, scale=WIDE),
        GENERATOR.lognormal(1.0, 0.5, 200),
        lambda p, x: stats.lognorm.logpdf(x, math.exp(p[1]), scale=math.exp(p[0])),
        [0.0, 0.0],
    ),
    "weibull": (
        pyrohmm.weibull(scale=WIDE, concentration=WIDE),
        3 * GENERATOR.weibull(1.7, 200),
        lambda p, x: stats.weibull_min.logpdf(x, math.exp(p[0]), scale=math.exp(p[1])),
        [0.0, 0.0],
    ),
    "beta": (
        pyrohmm.beta(concentration1=WIDE, concentration0=WIDE),
        GENERATOR.beta(2.0, 5.0, 200),
        lambda p, x: stats.beta.logpdf(x, math.exp(p[0]), math.exp(p[1])),
        [0.0, 0.0],
    ),
    "student t": (
        pyrohmm.student_t(df=WIDE, loc=FLAT, scale=WIDE),
        100 + 2 * GENERATOR.standard_t(3.0, 400),
        lambda p, x: stats.t.logpdf(x, math.exp(p[0]), p[1], math.exp(p[2])),
        [1.0, 100.0, 0.0],
    ),
    "negative binomial": (
        pyrohmm.negative_binomial(total_count=WIDE, probs=UNIT),
        GENERATOR.negative_binomial(3, 0.2, 300).astype(float),
        lambda p, x: stats.nbinom.logpmf(x, math.exp(p[0]), 1 / (1 + math.exp(-p[1]))),
        [0.0, 0.0],
    ),
    "wrapped Cauchy": (
        pyrohmm.wrapped_cauchy(loc=FLAT, concentration=UNIT),
        stats.wrapcauchy.rvs(0.6, size=300, random_state=1) - 1.0,
        lambda p, x: stats.wrapcauchy.logpdf(
            np.mod(x - p[1], 2 * np.pi), 1 / (1 + math.exp(-p[0]))
        ),
        [0.0, -1.0],
    ),
    "censored": (
        pyrohmm.censored(pyrohmm.weibull(scale=WIDE, concentration=WIDE), upper=4.0),
        np.minimum(3 * GENERATOR.weibull(1.7, 200), 4.0),
        lambda p, x: np.where(
            x < 4.0,
            stats.weibull_min.logpdf(x, math.exp(p[0]), scale=math.exp(p[1])),
            stats.weibull_min.logsf(4.0, math.exp(p[0]), scale=math.exp(p[1])),
        ),
        [0.0, 0.0],
    ),
    "truncated": (
        pyrohmm.truncated(
            pyrohmm.negative_binomial(total_count=WIDE, probs=UNIT), lower=1, upper=30
        ),
        np.clip(GENERATOR.negative_binomial(3, 0.2, 300), 1, 30).astype(float),
        lambda p, x: (
            stats.nbinom.logpmf(x, math.exp(p[0]), 1 / (1 + math.exp(-p[1])))
            - math.log(
                stats.nbinom.cdf(30, math.exp(p[0]), 1 / (1 + math.exp(-p[1])))
                - stats.nbinom.cdf(0, math.exp(p[0]), 1 / (1 + math.exp(-p[1])))
            )
        ),
        [1.0, -1.0],
    ),
    "zero-inflated": (
        pyrohmm.zero_inflated(pyrohmm.negative_binomial(total_count=WIDE, probs=UNIT), gate=UNIT),
        GENERATOR.negative_binomial(3, 0.2, 300) * (GENERATOR.random(300) < 0.7) * 1.0,
        lambda p, x: np.log(
            (x == 0) / (1 + math.exp(-p[2]))
            + stats.nbinom.pmf(x, math.exp(p[0]), 1 / (1 + math.exp(-p[1]))) / (1 + math.exp(p[2]))
        ),
        [1.0, -1.0, -1.0],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_maximum_is_that_of_scipy(name):
    family, values, log_density, start = CASES[name]
    _, ours = fitted(family, values)
    found = optimize.minimize(
        lambda p: -log_density(p, values).sum(), start, method="Nelder-Mead",
        options={"xatol": 1e-8, "fatol": 1e-10, "maxiter": 4000},
    )  # fmt: skip
    assert ours == pytest.approx(-found.fun, abs=1e-6)


def test_two_states_with_missing_components_climb_at_each_step():
    pyro.set_rng_seed(0)
    high = (torch.arange(60) // 10 % 2 == 1).unsqueeze(-1)
    values = torch.where(high, dist.Weibull(9.0, 3.0).sample((60, 2)),
                         dist.Weibull(1.0, 1.0).sample((60, 2)))  # fmt: skip
    values[3, 1] = values[20] = torch.nan
    data = Sequences.from_list([values.double()])
    for family in (pyrohmm.weibull(2), pyrohmm.censored(pyrohmm.weibull(2), upper=20.0)):
        fit = fit_em(TabularHMM(2, family).double(), data, restarts=3, tolerance=1e-10)
        assert bool((fit.losses.diff() <= 1e-9).all())
        assert fit.hmm(data).viterbi(data.values).shape == (1, 60)
    values[3, 1] = 1.0
    data = Sequences.from_list([values.double()])
    fit = fit_em(TabularHMM(2, family).double(), data, tolerance=1e-10)
    assert fit.information(data).decrement < 1e-6


@pytest.mark.parametrize(("level", "upper"), [(5, 5.0), (20_000, 1e6)])
def test_counts_that_vary_as_poisson_ones_have_their_likelihood(level, upper):
    """Without priors ``total_count`` then has no maximum, and log-densities lose their digits."""
    counts = stats.poisson.ppf((np.arange(40) + 0.5) / 40, level).clip(max=upper)

    def loss(rate):
        beyond = stats.poisson.logsf(upper - 1, rate)
        return -np.where(counts == upper, beyond, stats.poisson.logpmf(counts, rate)).sum()

    wanted = optimize.minimize_scalar(loss, bounds=(0.9 * level, 1.1 * level)).fun
    probs = torch.tensor([level / (level + 400.0)])
    emission = Censored(dist.NegativeBinomial(torch.tensor([400.0]), probs=probs), upper=upper)
    hmm = HMM(torch.zeros(1), torch.zeros(1, 1), emission, torch.tensor([40]))
    fit = fit_em(hmm, Sequences.from_list([torch.tensor(counts)]), num_iterations=20)
    assert fit.losses[-1].item() == pytest.approx(wanted, abs=0.05)


@pytest.mark.parametrize(
    "emission",
    [
        ZeroInflated(dist.Poisson(torch.tensor(2.0)), gate=torch.tensor(0.3)),
        Truncated(dist.Poisson(torch.tensor(2.0)), lower=1, upper=5),
        Censored(dist.Poisson(torch.tensor(2.0)), lower=1, upper=3),
    ],
)
def test_probabilities_of_counts_sum_to_one_and_samples_have_them(emission):
    low, high = getattr(emission, "lower", None), getattr(emission, "upper", None)
    counts = torch.arange(low or 0, (high or 40) + 1).float()
    probs = emission.log_prob(counts).exp()
    assert probs.sum().item() == pytest.approx(1.0, abs=1e-5)
    pyro.set_rng_seed(0)
    samples = emission.sample((20_000,))
    shares = (samples.unsqueeze(-1) == counts).double().mean(0)
    assert (shares - probs).abs().max() < 0.02


@pytest.mark.parametrize(
    ("emission", "ends"),
    [
        (Truncated(dist.Normal(torch.tensor(1.0), 2.0), lower=0.0), (0.0, 30.0)),
        (Truncated(dist.Weibull(torch.tensor(1.0), 2.0), upper=1.5), (0.0, 1.5)),
        (WrappedCauchy(torch.tensor(2.5), torch.tensor(0.6)), (-math.pi, math.pi)),
        (StudentTWithCdf(torch.tensor(3.0), 1.0, 2.0), (-400.0, 400.0)),
        (BetaWithCdf(torch.tensor(2.0), torch.tensor(3.0)), (0.0, 1.0)),
        (Angle(torch.tensor(2.5), torch.tensor(3.0)), (-math.pi, math.pi)),
    ],
)
def test_cumulative_probabilities_are_integrals_of_the_density(emission, ends):
    pyro.set_rng_seed(0)
    points = emission.sample((5,)).double()
    for point in points:
        wanted, _ = integrate.quad(
            lambda x: emission.log_prob(torch.tensor(x)).exp().item(), ends[0], point.item(),
            limit=200,
        )  # fmt: skip
        assert emission.cdf(point).item() == pytest.approx(wanted, abs=2e-3)
    assert emission.cdf(emission.sample((4000,))).mean().item() == pytest.approx(0.5, abs=0.03)


def test_limits_have_their_probabilities():
    emission = Censored(dist.Normal(torch.tensor([0.0, 1.0]), 1.0), lower=0.0, upper=2.0)
    between, _ = integrate.quad(stats.norm.pdf, 0.0, 2.0)
    ends = emission.log_prob(torch.tensor([[0.0], [2.0]])).exp().sum(0)
    assert 1 - ends[0].item() == pytest.approx(between, abs=1e-6)
    assert emission.cdf_below(torch.tensor(0.0))[0] == 0
    assert emission.cdf(torch.tensor(2.0))[0] == 1
    assert emission.cdf(torch.tensor(0.0))[0].item() == pytest.approx(0.5)


def test_residuals_of_zeros_among_positive_numbers_are_an_interval():
    data = Sequences.from_list([[0.0, 1.0, 0.0, 2.0, 3.0]])
    fit = fit_em(TabularHMM(1, pyrohmm.zero_inflated(pyrohmm.log_normal())), data)
    found = pyrohmm.queries.pseudo_residuals(fit.hmm(data), data.values)
    assert found.lower[0, 0] == 0
    assert found.upper[0, 0].item() == pytest.approx(0.4, abs=1e-3)
    assert found.lower[0, 1] == found.upper[0, 1] > 0.4


def test_beside_a_frozen_shape_the_scale_is_the_best():
    """A Weibull distribution of shape one is exponential: its scale is the mean."""
    values = torch.tensor([0.1, 0.4, 1.1, 2.0]).double()
    module = TabularHMM(1, pyrohmm.weibull()).double()
    pyrohmm.freeze(module, "emission.concentration", torch.ones(1).double())
    fit = fit_em(module, Sequences.from_list([values]), priors=False, tolerance=1e-12)
    assert fit.parameters["module.emission.scale"].item() == pytest.approx(values.mean().item())


def test_newton_climbs_where_a_function_is_not_concave():
    def value(x):
        return (-(x.square() - 1).square()).sum(-1) - 0.1 * x.sum(-1)

    ends = maximized(value, of_function(value), torch.tensor([[0.1], [-0.1], [2.0]]))
    slopes = torch.autograd.grad(value(ends.requires_grad_()).sum(), ends)[0]
    assert slopes.abs().max() < 1e-5
    held = maximized(value, of_function(value), torch.zeros(1, 2), torch.tensor([False, True]))
    assert held[0, 0] == 0
    assert held[0, 1] != 0


def test_von_mises_probabilities():
    found = Angle(torch.tensor(0.0), torch.tensor(2.0)).cdf(torch.tensor(0.0))
    assert found.item() == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("family", "value"),
    [
        (pyrohmm.student_t(), 1e5),
        (pyrohmm.student_t(), 0.0),
        (pyrohmm.log_normal(), 2.0),
        (pyrohmm.wrapped_cauchy(), 1.0),
        (pyrohmm.weibull(), 2.0),
        (pyrohmm.beta(), 0.3),
    ],
)
def test_a_state_of_equal_numbers_does_not_collapse(family, value):
    """No density is infinite there, and where it is highest is that number."""
    data = Sequences(torch.full((1, 50), value), torch.tensor([50]))
    fit = fit_em(TabularHMM(1, family), data)
    assert fit.converged
    emission = fit.hmm(data).emission
    around = emission.log_prob(value + torch.tensor([[0.0], [0.2]])).flatten()
    assert around[0].isfinite()
    assert around[0] > around[1]  # which may be less than the least number


def test_priors_of_student_t_have_the_unit_of_the_data():
    x = torch.from_numpy(GENERATOR.standard_t(3.0, 200)).float()
    for unit, dim in ((1e-3, 0), (1e4, 2)):
        values = x if dim == 0 else torch.stack([x, -x], -1)
        fits = [
            fit_em(TabularHMM(1, pyrohmm.student_t(dim)), Sequences.from_list([v]), tolerance=1e-9)
            for v in (values, unit * values)
        ]
        one, other = (fit.parameters for fit in fits)
        for name, scale in (("df", 1.0), ("loc", unit), ("scale", unit)):
            name = f"module.emission.{name}"
            torch.testing.assert_close(other[name], scale * one[name], rtol=1e-3, atol=1e-3 * scale)
        shift = fits[1].losses[-1] - fits[0].losses[-1]
        numbers = (200 + 2) * max(dim, 1)  # also those of the parameters, whose priors scale
        assert shift.item() == pytest.approx(numbers * math.log(unit), rel=1e-4)


def test_newton_steps_of_families_are_not_halved_by_rounding(monkeypatch):
    """Values, slopes and priors are all in double precision, and steps are few."""
    calls = []
    log_prob = StudentTWithCdf.log_prob
    monkeypatch.setattr(
        StudentTWithCdf, "log_prob", lambda self, x: calls.append(x.dtype) or log_prob(self, x)
    )
    x = torch.randn(200) + 3 * (torch.arange(200) // 20 % 2)
    data = Sequences.from_list([x])
    fit = fit_em(TabularHMM(2, pyrohmm.student_t()), data, num_iterations=10, restarts=1)
    double = sum(dtype == torch.float64 for dtype in calls)
    assert double < 30 * len(fit.losses)


def test_a_strong_prior_of_a_gamma_concentration_counts():
    """The mode of one state is that of the log joint density of SciPy."""
    values = stats.gamma(2.0, scale=0.5).rvs(30, random_state=1)
    data = Sequences.from_list([values.tolist()])
    family = pyrohmm.gamma(concentration=(50.0, 10.0), rate=(3.0, 2.0))
    fit = fit_em(TabularHMM(1, family).double(), data, tolerance=1e-12)

    def loss(logs):
        concentration, rate = np.exp(logs)
        priors = stats.gamma(50, scale=0.1).logpdf(concentration)
        priors += stats.gamma(3, scale=0.5).logpdf(rate)
        return -stats.gamma(concentration, scale=1 / rate).logpdf(values).sum() - priors

    wanted = np.exp(optimize.minimize(loss, [0.0, 0.0], method="Nelder-Mead", tol=1e-12).x)
    found = [fit.parameters[f"module.emission.{name}"].item() for name in ("concentration", "rate")]
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.parametrize("dim", [0, 2])
def test_closed_steps_of_zero_inflation_end_where_newton_does(dim):
    """A uniform prior is that of Beta(1, 1), but not known to have a closed form."""
    pyro.set_rng_seed(0)
    shape = (40, 40, dim) if dim else (40, 40)
    high = (torch.arange(40) // 8 % 2).double().reshape(1, 40, *(1,) * bool(dim))
    counts = torch.poisson((1.5 + 5 * high).expand(shape)) * (torch.rand(shape) < 0.7)
    counts[torch.rand(shape) < 0.05] = torch.nan
    seen = ~counts.isnan().reshape(40, 40, -1).all(-1)
    data = Sequences(counts, torch.full((40,), 40), seen)
    fits = []
    for gate in (dist.Beta(1.0, 1.0), UNIT):
        family = pyrohmm.zero_inflated(pyrohmm.poisson(dim), gate=gate)
        module = TabularHMM(2, family).double()
        options = {"start": pyrohmm.starts.by_kmeans, "restarts": 2, "tolerance": 1e-11}
        fits.append(fit_em(module, data, **options))
        assert bool((fits[-1].losses.diff() <= 1e-8).all())
    torch.testing.assert_close(fits[0].losses[-1], fits[1].losses[-1], rtol=1e-9, atol=0)
    rates = [fit.parameters["module.emission.part.rate"].sort(0).values for fit in fits]
    torch.testing.assert_close(*rates, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dim", [0, 2])
def test_a_step_on_sums_by_value_is_that_on_all_values(dim, monkeypatch):
    pyro.set_rng_seed(0)
    values = torch.poisson(dist.Gamma(2.0, 0.5).sample((900, 2)).double())[:, : dim or 1].reshape(
        900, -1
    )
    values[torch.rand(values.shape) < 0.1] = torch.nan
    values = values if dim else values.squeeze(-1)
    weights = torch.rand(2, 900, 3).double()
    module = pyrohmm.negative_binomial(dim)(3)
    ends = []
    for few in (0, 10**9):
        monkeypatch.setattr(products, "ADDED", few)
        found = module.statistics(values, weights, None)
        assert (len(found["each.values"]) < 100) == (few == 0)
        ends.append(module.m_step(found)[0])
    torch.testing.assert_close(*ends, rtol=1e-6, atol=1e-8)


def test_a_start_from_some_of_the_rows_weighs_them_alone():
    """Values and parameters so far, which are among the statistics, stay as they are."""
    pyro.set_rng_seed(0)
    high = torch.arange(15_000) // 10 % 2
    counts = torch.poisson(dist.Gamma(3.0, 1.0).sample((15_000,)) * (1 + 9 * high))
    data = Sequences.from_list([counts])
    fit = fit_em(
        TabularHMM(2, pyrohmm.negative_binomial()), data, num_iterations=60, restarts=1,
        start=pyrohmm.starts.by_kmeans,
    )  # fmt: skip
    assert fit.losses[0] < 1.1 * fit.losses[-1]


@pytest.mark.parametrize("frozen", [["gate"], ["part.rate"], ["gate", "part.rate"]])
def test_what_is_frozen_of_a_zero_inflated_family_stays(frozen):
    pyro.set_rng_seed(0)
    counts = torch.poisson(torch.tensor([1.5, 6.0]).repeat_interleave(5).repeat(60))
    data = Sequences.from_list([counts * (torch.rand(600) < 0.7)])
    module = TabularHMM(2, pyrohmm.zero_inflated(pyrohmm.poisson()))
    for name in frozen:
        value = torch.tensor([0.3, 0.3]) if name == "gate" else torch.tensor([1.5, 6.0])
        pyrohmm.freeze(module, f"emission.{name}", value)
    fit = fit_em(module, data)
    assert not {f"module.emission.{name}" for name in frozen} & fit.parameters.keys()
    assert bool((fit.losses.diff() <= 1e-2).all())
