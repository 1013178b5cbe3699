"""Copies of a model side by side: a parameter that lacks their dimension is refused, whatever R."""

import pyro
import pytest
import torch
from pyro.distributions import Beta, Dirichlet, Normal
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoNormal, init_to_sample
from pyro.nn import PyroSample

from pyrohmm import (
    HMM,
    HMMModule,
    MarginalModel,
    PosteriorDraws,
    Sequences,
    TabularHMM,
    fit_em,
    fit_gibbs,
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
    guide = AutoNormal(model, init_loc_fn=init_to_sample)
    return fit_svi(model, guide, data, num_iterations=2, elbo=elbo)


class Located(HMMModule):
    """Means of the states are a ``function`` of variables ``(K,)``, or of copies ``(R, 1, K)``."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.loc = PyroSample(Normal(torch.zeros(3), 2.0).to_event(1))
        self.matrix = PyroSample(Dirichlet(torch.ones(3, 3)).to_event(1))

    def forward(self, lengths, observed=None):
        even, means = torch.full((3,), 1 / 3).log(), self.function(self.loc)
        return HMM(even, self.matrix.log(), Normal(means, 1.0), lengths, observed)


FITS = {
    "em": lambda module, data: fit_em(module, data, restarts=STATES, num_iterations=2),
    "map": lambda module, data: fit_map(
        MarginalModel(module), data, restarts=STATES, num_iterations=2
    ),
    "mcmc": lambda module, data: fit_mcmc(
        MarginalModel(module), data, num_chains=STATES, num_samples=2, warmup=1
    ),
    "particles": by_particles,
    "gibbs": lambda module, data: fit_gibbs(
        module, data, num_chains=STATES, num_samples=2, warmup=1
    ),
}
MIXED = {  # all are right for one copy
    "maximum": lambda loc: 3 * loc / loc.abs().max(),
    "minimum": lambda loc: loc - loc.min(),
    "mean": lambda loc: loc - loc.mean(),
    "deviation": lambda loc: loc / loc.std(),
    "median": lambda loc: loc - loc.median(),
    "last": lambda loc: loc if loc.dim() == 1 else loc[-1].expand(loc.shape),
    "sum": lambda loc: loc.cumsum(0),
    "sum from the end": lambda loc: loc.flip(0).cumsum(0).flip(0),
    "flip": lambda loc: loc.flip(0),
    "sort": lambda loc: loc.sort(0).values,
    "next": lambda loc: loc.roll(1, 0),
    "softmax": lambda loc: 3 * loc.softmax(0),
    "sequences, not states": lambda loc: loc.cumsum(min(1, loc.dim() - 1)),
    "maximum and noise": lambda loc: loc / loc.abs().max() + torch.randn_like(loc),
}
APART = {  # each copy depends on its own values alone
    "softmax": lambda loc: 3 * loc.softmax(-1),
    "size": lambda loc: loc + torch.zeros(loc.shape[:-1]).unsqueeze(-1),
    "noise": lambda loc: loc + torch.randn_like(loc),
    "noise of all": lambda loc: loc + torch.randn(3),
    "dropout": lambda loc: torch.nn.functional.dropout(loc, 0.5),
}
SOME = Sequences(torch.linspace(-2.0, 2.0, 60).sin().reshape(3, 20))


@pytest.mark.parametrize("fit", FITS.values(), ids=FITS)
def test_as_many_copies_as_states_do_not_hide_a_wrong_model(fit):
    data = far_apart()
    assert fit(Sticky(wide=True), data).parameters
    with pytest.raises(ValueError, match=r"(?s)copies of the model.*matrix\[\.\.\., 0, :\]"):
        fit(Sticky(wide=False), data)


@pytest.mark.parametrize("fit", FITS.values(), ids=FITS)
@pytest.mark.parametrize("function", MIXED.values(), ids=MIXED)
def test_copies_that_are_mixed_are_refused(function, fit):
    pyro.set_rng_seed(0)
    with pytest.raises(ValueError, match=r"copies of the model.*another density than one alone"):
        fit(Located(function), SOME)


@pytest.mark.filterwarnings("ignore:the loss rose")  # by noise
@pytest.mark.parametrize("fit", FITS.values(), ids=FITS)
@pytest.mark.parametrize("function", APART.values(), ids=APART)
def test_copies_that_are_apart_are_fitted(function, fit):
    pyro.set_rng_seed(0)
    assert fit(Located(function), SOME).parameters


def test_a_prior_that_mixes_copies_is_refused():
    def mixed(hmm):
        stay = hmm.log_transition.exp().diagonal(dim1=-2, dim2=-1)
        return -stay.sum(-1) * hmm.log_transition.exp().max()

    with pytest.raises(ValueError, match="copies of the model"):
        fit_em(TabularHMM(2, normal(0)), SOME, num_iterations=2, restarts=3, log_prior=mixed)


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
