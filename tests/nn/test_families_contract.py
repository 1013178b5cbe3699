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
