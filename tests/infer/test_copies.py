"""Copies of a model side by side: a parameter that lacks their dimension is refused, whatever R."""

import pytest
import torch
from pyro.distributions import Beta, Normal
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroSample

from pyrohmm import (
    HMM,
    HMMModule,
    MarginalModel,
    PosteriorDraws,
    Sequences,
    fit_em,
    fit_map,
    fit_mcmc,
    fit_svi,
    normal,
)

STATES = 4  # and as many copies: a scalar of each, (R, 1), then broadcasts over a matrix (K, K)


class Sticky(HMMModule):
    """A probability of staying, the same in all states; wrong for copies unless it is ``wide``."""

    def __init__(self, wide):
        super().__init__()
        self.stay, self.wide = PyroSample(Beta(5.0, 1.0)), wide
        self.emission = normal(0)(STATES)

    def forward(self, lengths, observed=None):
        stay = self.stay[..., None, None] if self.wide else self.stay
        eye, even = torch.eye(STATES), torch.full((STATES,), 1 / STATES)
        matrix = stay * eye + (1 - stay) * (1 - eye) / (STATES - 1)
        return HMM(even.log(), matrix.log(), self.emission(), lengths, observed)


class WithoutObserved(Sticky):
    def forward(self, lengths):
        return super().forward(lengths)


def far_apart():
    """Sequences whose emissions make by far the most of the evidence."""
    states = torch.arange(STATES).repeat_interleave(50)
    return Sequences(Normal(400.0 * states, 1.0).sample(torch.Size([5])))


def by_particles(module, data):
    model = MarginalModel(module)
    elbo = Trace_ELBO(num_particles=STATES, vectorize_particles=True, max_plate_nesting=1)
    return fit_svi(model, AutoNormal(model), data, num_iterations=2, elbo=elbo)


FITS = {
    "em": lambda module, data: fit_em(module, data, restarts=STATES, num_iterations=2),
    "map": lambda module, data: fit_map(
        MarginalModel(module), data, restarts=STATES, num_iterations=2
    ),
    "mcmc": lambda module, data: fit_mcmc(
        MarginalModel(module), data, num_chains=STATES, num_samples=2, warmup=1
    ),
    "particles": by_particles,
}


@pytest.mark.parametrize("fit", FITS.values(), ids=FITS)
def test_as_many_copies_as_states_do_not_hide_a_wrong_model(fit):
    data = far_apart()
    assert fit(Sticky(wide=True), data).parameters
    with pytest.raises(ValueError, match=r"(?s)copies of the model.*matrix\[\.\.\., 0, :\]"):
        fit(Sticky(wide=False), data)


@pytest.mark.parametrize("count", [2, 3, STATES])
def test_as_many_draws_as_states_do_not_hide_a_wrong_model(count):
    data = far_apart()
    values = {
        "module.stay": torch.linspace(0.8, 0.801, count)[None],
        "module.emission.loc": (400.0 * torch.arange(STATES)).expand(1, count, -1),
        "module.emission.variance": torch.ones(1, count, STATES),
    }
    right, wrong = (MarginalModel(Sticky(wide)) for wide in (True, False))
    PosteriorDraws.of(values, right).hmm(data)
    with pytest.raises(ValueError, match="samples on the left"):
        PosteriorDraws.of(values, wrong).hmm(data)


def test_a_module_without_observed_is_told_what_forward_takes():
    with pytest.raises(TypeError, match=r"forward must take \(self, lengths, observed=None\)"):
        fit_em(WithoutObserved(wide=True), far_apart())
