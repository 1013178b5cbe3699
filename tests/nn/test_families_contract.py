"""Every emission family keeps one contract; see :mod:`pyrohmm.testing`."""

import pyro
import pytest
import torch

import pyrohmm
from pyrohmm import MarginalModel, Sequences, TabularHMM, fit_em, fit_map
from pyrohmm.nn.normals import CentredEmission
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


FURTHER = {
    "streams": pyrohmm.streams(pyrohmm.normal(2), pyrohmm.categorical(3)),
    "tied": pyrohmm.tied(pyrohmm.normal_full(2), [0, 0, 1]),
    "autoregression": pyrohmm.autoregressive_normal(2, 1),
}


@pytest.mark.parametrize("family", [*(pair[0] for pair in FAMILIES.values()), *FURTHER.values()])
def test_a_state_from_before_priors_could_be_flat_is_loaded(family):
    """Priors of normal distributions were conjugate: they had no upper end."""
    pyro.set_rng_seed(1)
    module, saved = TabularHMM(3, family), TabularHMM(3, family).state_dict()
    normals = {n: p for n, p in module.named_modules() if isinstance(p, CentredEmission)}
    for name in normals:
        del saved[f"{name}.upper"]
    module.load_state_dict(saved)
    assert all(torch.equal(module.state_dict()[name], value) for name, value in saved.items())
    for part in normals.values():
        assert part.upper.isposinf().all()
        assert not part.flat


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("num_states", [1, 3])
def test_a_family_keeps_the_contract(name, num_states):
    family, values = FAMILIES[name]
    check_emission(family, values(), num_states)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("double", [False, True])
def test_a_family_takes_data_of_another_dtype(name, double):
    """As from NumPy and pandas: results and fits are of the dtype of the parameters."""
    family, values = FAMILIES[name]
    own, other = (torch.float64, torch.float32) if double else (torch.float32, torch.float64)
    kinds = [torch.int64, torch.int64] if name == "categorical" else [own, other]
    rows = values().reshape(3, 10, *values().shape[1:])
    alike, data = (Sequences(rows.to(kind), torch.tensor([10, 1, 7])) for kind in kinds)
    module = TabularHMM(2, family).to(own)
    for fit in (
        fit_em(module, data, num_iterations=2),
        fit_map(MarginalModel(module), data, num_iterations=2),
    ):
        assert {part.dtype for part in fit.parameters.values()} == {own}
        hmm = fit.hmm(data)
        for found, wanted in zip(answers(hmm, data.values), answers(hmm, alike.values)):
            assert found.dtype == wanted.dtype == own
            torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
        if name != "categorical":
            assert hmm.forecast(data.values, 2).mean.dtype == own


def answers(hmm, values):
    """Evidence, states and forecasts."""
    ahead = hmm.forecast(values, 2)
    states = hmm.posterior(values).state_probs
    density = ahead.log_prob(values[:1, :2])  # padding is in no support
    return hmm.log_prob(values), hmm.filtered(values), states, ahead.state_probs, density


def test_the_contract_sees_an_m_step_that_is_no_maximum(monkeypatch):
    kind = type(pyrohmm.poisson()(2))
    right = kind.m_step

    def wrong(self, statistics):
        mode, notes = right(self, statistics)
        return {name: 1.1 * value for name, value in mode.items()}, notes

    monkeypatch.setattr(kind, "m_step", wrong)
    with pytest.raises(AssertionError, match="a density of"):
        check_emission(pyrohmm.poisson(), torch.poisson(torch.full((30,), 3.0)))
