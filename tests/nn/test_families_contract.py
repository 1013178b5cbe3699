"""Every emission family keeps one contract; see :mod:`pyrohmm.testing`."""

import pytest
import torch

import pyrohmm
from pyrohmm.testing import check_emission

FAMILIES = {
    "categorical": (pyrohmm.categorical(4), lambda: torch.randint(4, (30,))),
    "normal": (pyrohmm.normal(0), lambda: torch.randn(30)),
    "normal of vectors": (pyrohmm.normal(2), lambda: torch.randn(30, 2)),
    "spherical": (pyrohmm.normal_spherical(2), lambda: torch.randn(30, 2)),
    "full": (pyrohmm.normal_full(2), lambda: torch.randn(30, 2)),
    "tied": (pyrohmm.normal_tied(2), lambda: torch.randn(30, 2)),
    "poisson": (pyrohmm.poisson(), lambda: torch.poisson(torch.full((30,), 3.0))),
    "poisson of vectors": (pyrohmm.poisson(2), lambda: torch.poisson(torch.full((30, 2), 3.0))),
    "gamma": (pyrohmm.gamma(), lambda: torch.rand(30) + 0.1),
    "gamma of vectors": (pyrohmm.gamma(2), lambda: torch.rand(30, 2) + 0.1),
    "von mises": (pyrohmm.von_mises(0), lambda: 4 * torch.randn(30)),
    "von mises of vectors": (pyrohmm.von_mises(2), lambda: 1 + torch.randn(30, 2)),
    "log-normal": (pyrohmm.log_normal(), lambda: 20 * torch.rand(30) + 0.1),
    "weibull": (pyrohmm.weibull(), lambda: torch.rand(30) + 0.1),
    "weibull of vectors": (pyrohmm.weibull(2), lambda: 10 * torch.rand(30, 2) + 0.1),
    "beta": (pyrohmm.beta(), lambda: 0.98 * torch.rand(30) + 0.01),
    "student t": (pyrohmm.student_t(), lambda: 5 + torch.randn(30) / torch.rand(30)),
    "negative binomial": (pyrohmm.negative_binomial(), lambda: torch.poisson(9 * torch.rand(30))),
    "wrapped Cauchy": (pyrohmm.wrapped_cauchy(), lambda: 1 + torch.randn(30)),
    "zero-inflated counts": (
        pyrohmm.zero_inflated(pyrohmm.poisson()),
        lambda: torch.poisson(4 * (torch.rand(30) > 0.3).float()),
    ),
    "zero-inflated numbers": (
        pyrohmm.zero_inflated(pyrohmm.gamma()),
        lambda: (torch.rand(30) - 0.2).clamp(min=0),
    ),
    "censored": (
        pyrohmm.censored(pyrohmm.normal(0), lower=-0.5, upper=0.8),
        lambda: torch.randn(30).clamp(-0.5, 0.8),
    ),
    "censored of vectors": (
        pyrohmm.censored(pyrohmm.weibull(2), upper=0.8),
        lambda: (torch.rand(30, 2) + 0.01).clamp(max=0.8),
    ),
    "truncated": (pyrohmm.truncated(pyrohmm.normal(0), lower=0.0), lambda: torch.rand(30)),
    "truncated counts": (
        pyrohmm.truncated(pyrohmm.poisson(), lower=1, upper=9),
        lambda: torch.randint(1, 10, (30,)).float(),
    ),
    "bernoulli": (pyrohmm.bernoulli(3), lambda: torch.randint(2, (30, 3)).double()),
}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("num_states", [1, 3])
def test_a_family_keeps_the_contract(name, num_states):
    family, values = FAMILIES[name]
    check_emission(family, values(), num_states)


def test_the_contract_sees_an_m_step_that_is_no_maximum(monkeypatch):
    kind = type(pyrohmm.poisson()(2))
    right = kind.m_step

    def wrong(self, statistics):
        mode, notes = right(self, statistics)
        return {name: 1.1 * value for name, value in mode.items()}, notes

    monkeypatch.setattr(kind, "m_step", wrong)
    with pytest.raises(AssertionError, match="a density of"):
        check_emission(pyrohmm.poisson(), torch.poisson(torch.full((30,), 3.0)))


def test_the_contract_sees_samples_of_another_distribution(monkeypatch):
    """Counts twice: too narrow, about the right place."""
    kind = type(pyrohmm.poisson()(2))
    right = kind.sample_parameters

    def wrong(self, statistics, current):
        return right(self, {name: 1.5 * value for name, value in statistics.items()}, current)

    monkeypatch.setattr(kind, "sample_parameters", wrong)
    with pytest.raises(AssertionError, match="samples of rate"):
        check_emission(pyrohmm.poisson(), torch.poisson(torch.full((30,), 3.0)))
