"""Censored and truncated distributions, their tails and their moments, against SciPy."""

import math

import numpy as np
import pytest
import torch
from pyro.distributions import Gamma, LogNormal, NegativeBinomial, Normal, Poisson, Weibull
from scipy import stats

from pyrohmm.distributions import Censored, Truncated
from pyrohmm.distributions.forecast import cdf


def number(value):
    return torch.tensor(value)


def normal_between(loc):
    return stats.truncnorm(-loc / 0.1, (1 - loc) / 0.1, loc, 0.1).logpdf(0.99)


LONG = stats.norm.logsf(np.log(400))
CASES = {
    "normal far below": (
        lambda: Truncated(Normal(number(0.0), number(1.0)), -8.0, -6.0), -6.5,
        stats.truncnorm(-8, -6).logpdf(-6.5),
    ),
    **{
        f"normal at {loc}": (
            lambda loc=loc: Truncated(Normal(number(loc), number(0.1)), 0.0, 1.0), 0.99,
            normal_between(loc),
        )
        for loc in (2.0, 1.5, 0.5, -0.5)
    },
    "censored waits": (lambda: Censored(Weibull(number(1.0), number(1.0)), upper=20.0), 20.0, -20),
    "waits": (lambda: Truncated(Weibull(number(1.0), number(1.0)), lower=20.0), 21.0, -1.0),
    "censored sizes": (lambda: Censored(LogNormal(number(0.0), number(1.0)), upper=400.0), 400.0,
                       LONG),
    "sizes": (lambda: Truncated(LogNormal(number(0.0), number(1.0)), lower=400.0), 420.0,
              stats.norm.logpdf(np.log(420)) - np.log(420) - LONG),
    "censored counts": (lambda: Censored(Poisson(number(2.0)), upper=20.0), 20.0,
                        stats.poisson.logsf(19, 2)),
    "many counts": (lambda: Truncated(Poisson(number(1.0)), lower=12.0), 12.0,
                    stats.poisson.logpmf(12, 1) - stats.poisson.logsf(11, 1)),
    "no zero": (lambda: Truncated(Poisson(number(3.0)), lower=1.0), 2.0,
                stats.poisson.logpmf(2, 3) - stats.poisson.logsf(0, 3)),
    "few counts": (lambda: Truncated(Poisson(number(50.0)), lower=1.0, upper=20.0), 12.0,
                   stats.poisson.logpmf(12, 50)
                   - math.log(stats.poisson.cdf(20, 50) - stats.poisson.cdf(0, 50))),
    "spread counts": (
        lambda: Truncated(NegativeBinomial(number(2.0), probs=number(0.9)), lower=100.0), 101.0,
        stats.nbinom(2, 0.1).logpmf(101) - stats.nbinom(2, 0.1).logsf(99),
    ),
}  # fmt: skip
# logarithms of factorials, of which the density is the difference
TERMS = {"spread counts": 370, "many counts": 21}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CASES)
def test_density_in_the_tails(name, dtype):
    """To 1e-5 in float32, or what is lost of two large terms and their sum, a last digit each."""
    make, value, expected = CASES[name]
    lost = 3 * torch.finfo(dtype).eps * TERMS.get(name, 0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        found = make().log_prob(torch.tensor(value)).item()
    finally:
        torch.set_default_dtype(default)
    close = {"rel": 1e-5 if dtype == torch.float32 else 1e-10, "abs": lost}
    assert found == pytest.approx(expected, **close)


BASES = {
    "normal": (lambda: Normal(torch.ones(2), 2.0), stats.norm(1, 2)),
    "sizes": (lambda: LogNormal(torch.zeros(2), 0.5), stats.lognorm(0.5)),
    "waits": (lambda: Weibull(torch.ones(2), 0.7), stats.weibull_min(0.7)),
    "gamma": (lambda: Gamma(torch.ones(2) / 2, 1.0), stats.gamma(0.5)),
    "counts": (lambda: Poisson(3 * torch.ones(2)), stats.poisson(3)),
    "spread": (lambda: NegativeBinomial(2.0, 0.6 * torch.ones(2)), stats.nbinom(2, 0.4)),
}


@pytest.mark.parametrize("limits", [(1, None), (None, 2), (1, 3), (-2, 500)])
@pytest.mark.parametrize("name", BASES)
def test_moments_and_cumulative_probabilities(name, limits):
    """Of what is recorded, which is a function of many quantiles of the base."""
    make, base = BASES[name]
    low, high = limits[0] or -np.inf, limits[1] or np.inf
    quantiles = base.ppf((np.arange(400_000) + 0.5) / 400_000)
    recorded = {
        Censored: quantiles.clip(low, high),
        Truncated: quantiles[(quantiles >= low) & (quantiles <= high)],
    }
    for kind, values in recorded.items():
        found = kind(make(), *limits)
        for moment, wanted in ((found.mean, values.mean()), (found.variance, values.var())):
            assert moment.tolist() == pytest.approx([wanted] * 2, rel=1e-3), kind
        for point in (0.5, 1.0, 2.0, 3.0):
            at = number(point)
            assert found.cdf(at)[0].item() == pytest.approx((values <= point).mean(), abs=1e-5)
            below = cdf(found, at, below=True)[0].item()
            assert below == pytest.approx((values < point).mean(), abs=1e-5)


@pytest.mark.parametrize("default", [torch.float32, torch.float64])
def test_what_is_left_of_a_normal_far_in_its_tail(default):
    torch.set_default_dtype(default)
    far = Truncated(Normal(torch.zeros(()), 1.0), lower=1000.0)  # 1 / 1000 - 2 / 1000³ above it
    assert far.mean.item() == pytest.approx(1000.000999998, rel=torch.finfo(default).eps)
    assert far.variance.item() == pytest.approx(0.999994e-6, rel=1e-6)
    found = Truncated(Normal(number(-30.0).double(), 1.0), lower=0.0)
    wanted = stats.truncnorm(30, 99, -30)
    # in sixty digits by the ratio of density and tail; of its variance SciPy loses nine of sixteen
    assert found.mean.item() == pytest.approx(0.0332596674336770, rel=1e-9)
    assert found.variance.item() == pytest.approx(0.00110377151189009, rel=1e-7)
    torch.manual_seed(0)
    samples = found.sample((2000,))
    assert stats.kstest(samples.numpy(), wanted.cdf).pvalue > 1e-3
    few = Truncated(Poisson(number(0.01)), lower=2).sample((2000,))
    assert (few == 2).double().mean().item() == pytest.approx(0.9967, abs=0.01)
    assert bool((few >= 2).all())
