"""``TabularHSMM`` and its families of durations: densities, closed forms, fits."""

import numpy as np
import pytest
import torch
from pyro import poutine
from pyro.distributions import Binomial, Normal, Poisson
from pyro.infer import Trace_ELBO, TraceEnum_ELBO
from pyro.infer.autoguide import AutoDelta, init_to_sample
from pyro.nn import PyroParam
from scipy import stats
from torch.distributions import constraints

from pyrohmm import (
    HSMM,
    EnumeratedModel,
    MarginalModel,
    Sequences,
    TabularHMM,
    TabularHSMM,
    categorical,
    fit_em,
    free_durations,
    freeze,
    geometric_durations,
    negative_binomial_durations,
    normal,
    parametric_durations,
    poisson_durations,
)
from pyrohmm.nn.durations import truncated_log_probs

FAMILIES = {
    "free": free_durations(5, 1.5),
    "geometric": geometric_durations(5, 1.5, 2.0),
    "poisson": poisson_durations(5, 1.5, 0.5),
    "negative binomial": negative_binomial_durations(5, 1.5, 0.5),
    "any": parametric_durations(Binomial(6, torch.tensor([0.2, 0.5, 0.7], dtype=torch.float64)), 5),
}


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


CLOSED = ["free", "geometric", "poisson", "negative binomial"]


def hidden(max_duration=8):
    """A model whose durations are far from geometric."""
    durations = torch.full((2, max_duration), 1e-3)
    durations[0, 5], durations[1, 2] = 1.0, 1.0
    durations = durations / durations.sum(-1, keepdim=True)
    swap = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    return torch.full((2,), 0.5).log(), swap.log(), durations.log()


@pytest.fixture
def data():
    lengths = torch.tensor([30, 12, 19])
    hsmm = HSMM(*hidden(), Normal(torch.tensor([0.0, 3.0]), 1.0), lengths)
    return Sequences(hsmm.sample(), lengths)


@pytest.fixture
def symbols():
    return Sequences(torch.tensor([[0, 1, 1, 2], [2, 1, 0, 0]]), torch.tensor([4, 3]))


def test_tables_are_those_of_scipy():
    counts = np.arange(6)
    negative = negative_binomial_durations(6)(2)
    freeze(negative, "average", torch.tensor([2.0, 5.0]))
    freeze(negative, "shape", torch.tensor([0.7, 3.0]))
    rate = poisson_durations(6)(2)
    freeze(rate, "rate", torch.tensor([0.5, 4.0]))
    for k, (mean, shape, mu) in enumerate([(2.0, 0.7, 0.5), (5.0, 3.0, 4.0)]):
        wanted = stats.nbinom.pmf(counts, shape, shape / (shape + mean))
        np.testing.assert_allclose(negative()[k].exp(), wanted / wanted.sum())
        wanted = stats.poisson.pmf(counts, mu)
        np.testing.assert_allclose(rate()[k].exp(), wanted / wanted.sum())


def test_geometric_durations_are_a_tabular_hmm():
    """The same density of the data, with the longest duration that of the sequences."""
    lengths = torch.tensor([7, 4])
    values = torch.tensor([[0, 1, 1, 2, 0, 1, 2], [2, 2, 1, 0, 0, 0, 0]])
    leave = torch.tensor([0.1, 0.5, 1.0])
    others = torch.rand(3, 3).fill_diagonal_(0.0)
    others = others / others.sum(-1, keepdim=True)
    semi = TabularHSMM(3, categorical(3), geometric_durations(7))
    markov = TabularHMM(3, categorical(3))
    initial, probs = torch.rand(3).softmax(-1), torch.rand(3, 3).softmax(-1)
    for module in (semi, markov):
        freeze(module, "initial", initial)
        freeze(module, "emission.probs", probs)
    freeze(semi, "transition", others)
    freeze(semi, "duration.leave", leave)
    freeze(markov, "transition", others * leave.unsqueeze(-1) + (1 - leave).diag())
    found, wanted = semi(lengths), markov(lengths)
    torch.testing.assert_close(found.log_prob(values), wanted.log_prob(values))
    torch.testing.assert_close(
        found.posterior(values).state_probs, wanted.posterior(values).state_probs
    )
    torch.testing.assert_close(found.filtered(values), wanted.filtered(values))
    assert torch.equal(found.viterbi(values), wanted.viterbi(values))
    mean = found.forecast(values, 1).probs  # longer ones would leave at D
    torch.testing.assert_close(mean[1], wanted.forecast(values, 1).probs[1])


@pytest.mark.parametrize("family", ["free", "negative binomial"])
def test_both_models_agree_in_loss_and_gradient(family, symbols):
    module = TabularHSMM(3, categorical(3), FAMILIES[family])
    guide = AutoDelta(MarginalModel(module), init_loc_fn=init_to_sample)
    guide(symbols)
    found = []
    for form, elbo in ((MarginalModel, Trace_ELBO), (EnumeratedModel, TraceEnum_ELBO)):
        loss = elbo(max_plate_nesting=1).differentiable_loss(form(module), guide, symbols)
        gradient = torch.autograd.grad(loss, [*guide.parameters()])
        found.append((loss.detach(), gradient))
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize(
    ("name", "left_censored"),
    [*((name, False) for name in CLOSED), ("free", True), ("negative binomial", True)],
)
def test_em_never_lowers_the_density_and_ends_at_a_mode(data, name, left_censored):
    module = TabularHSMM(2, normal(0), FAMILIES[name], censored_start=left_censored)
    fit = fit_em(module, data, num_iterations=1000, tolerance=1e-13)
    assert (fit.losses.diff() <= 1e-9 * fit.losses.abs().max()).all()
    assert fit.information(data).decrement < 1e-6


@pytest.mark.parametrize("left_censored", [False, True], ids=["begins", "left_censored"])
@pytest.mark.parametrize("name", CLOSED)
def test_the_m_step_is_where_the_gradient_vanishes(name, left_censored):
    """Of the expected log-likelihood of whole durations and the prior, written out."""
    counts = torch.rand(2, 3, 5) * torch.tensor([2.0, 8.0, 3.0, 1.0, 0.5])
    first = counts[..., 0] if left_censored else None  # less than there are
    durations = FAMILIES[name](3)
    mode, notes = durations.m_step(durations.statistics(counts, first))
    assert notes == []

    def expected(logs):
        total = (counts[0] * logs).sum()
        mean = (logs.exp() * torch.arange(1.0, 6.0)).sum(-1)
        return total if first is None else total - (first[0] * mean.log()).sum()

    leaves = {site: value[0].clone().requires_grad_() for site, value in mode.items()}
    with poutine.condition(data={**leaves}):
        trace = poutine.trace(durations).get_trace()
    log_prior = sum(trace.nodes[site]["fn"].log_prob(leaves[site]).sum() for site in leaves)
    total = expected(trace.nodes["_RETURN"]["value"]) + log_prior
    for site, slope in zip(leaves, torch.autograd.grad(total, [*leaves.values()])):
        if site == "probs":  # on the simplex: the same for all
            slope = (slope - slope.mean(-1, keepdim=True)) * leaves[site].detach()
        assert slope.abs().max() < 1e-6


def test_an_m_step_keeps_what_is_held_and_says_what_nothing_determines():
    module = negative_binomial_durations(6)(2)
    freeze(module, "shape", torch.tensor([1.0, 4.0]))
    counts = torch.rand(1, 2, 6)
    mode, _ = module.m_step(module.statistics(counts, None))
    assert set(mode) == {"average"}

    def score(average):
        logs = module.at({"shape": module.shape, "average": average}).forward()
        return (counts * logs).sum() + module.prior("average").log_prob(average).sum()

    best = mode["average"]
    assert max(score(0.99 * best), score(1.01 * best)) < score(best)
    module = poisson_durations(6)(2)
    module.rate = PyroParam(torch.tensor([1.0, 2.0]), constraints.positive)
    counts[0, 1] = 0.0
    rate = module.m_step(module.statistics(counts, None))[0]["rate"]
    assert rate.isnan().tolist() == [[False, True]]
    logs = truncated_log_probs(Poisson(rate[0, :1]), 6)
    steps = torch.arange(6.0)
    torch.testing.assert_close(
        (logs.exp() * steps).sum(), (counts[0, 0] * steps).sum() / counts[0, 0].sum()
    )


def test_the_closed_m_step_is_the_mode_of_counts_and_prior():
    counts = torch.tensor([[[3.0, 1.0, 0.0], [0.0, 0.0, 0.0]]])
    module = free_durations(3, 2.0)(2)
    mode, notes = module.m_step(module.statistics(counts, None))
    wanted = torch.tensor([[[4 / 7, 2 / 7, 1 / 7], [1 / 3, 1 / 3, 1 / 3]]])
    torch.testing.assert_close(mode["probs"], wanted)
    assert notes == []
    module = geometric_durations(3, 2.0, 3.0)(2)
    mode, _ = module.m_step(module.statistics(counts, None))
    # leaves 4 and 1 of the prior; stays 1 and 2 of the prior
    torch.testing.assert_close(mode["leave"], torch.tensor([[5 / 8, 1 / 3]]))


def test_modes_of_a_single_precision_module_are_those_of_double_precision():
    """The priors are of the module's precision, the counts of double: no slope is rounded."""
    family = negative_binomial_durations(120, shape_concentration=1.5, shape_rate=0.1)
    counts = torch.poisson(torch.full((4, 3, 120), 0.7))
    single, double = (family(3).to(dtype)._mode(counts) for dtype in (torch.float32, torch.float64))
    for name, value in double.items():
        torch.testing.assert_close(single[name], value, rtol=1e-6, atol=1e-9)
