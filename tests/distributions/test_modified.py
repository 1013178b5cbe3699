"""Censored and truncated distributions in their tails, against SciPy."""

import math

import numpy as np
import pytest
import torch
from pyro.distributions import LogNormal, NegativeBinomial, Normal, Poisson, Weibull
from scipy import stats

from pyrohmm.distributions import Censored, Truncated, WrappedCauchy


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CASES)
def test_density_in_the_tails(name, dtype):
    make, value, expected = CASES[name]
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        found = make().log_prob(torch.tensor(value)).item()
    finally:
        torch.set_default_dtype(default)
    assert found == pytest.approx(expected, rel=1e-5 if dtype == torch.float32 else 1e-10)


def test_angles_of_no_direction_are_uniform():
    torch.manual_seed(0)
    found = WrappedCauchy(torch.zeros(20_000), torch.tensor(0.0)).sample()
    assert bool((found.abs() <= math.pi + 1e-6).all())
    assert abs(found.cos().mean()) < 0.03
    assert abs(found.sin().mean()) < 0.03
