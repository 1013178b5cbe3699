"""EM under a diversity prior: the chain is the only part that changes, and nothing ever falls."""

from itertools import pairwise

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyrohmm import (
    HMM,
    DenseHMM,
    DiversityPrior,
    MarginalModel,
    Sequences,
    TabularHMM,
    bernoulli,
    categorical,
    datasets,
    dpp,
    fit_em,
    msteps,
    normal,
    scale_priors,
)


def symbols(num_symbols=4, seed=0, count=12):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (count,), generator=generator)
    return Sequences(torch.randint(num_symbols, (count, 8), generator=generator), lengths)


def reals(seed=0, count=12):
    data = symbols(3, seed, count)
    noise = torch.randn(data.values.shape, generator=torch.Generator().manual_seed(seed))
    return Sequences(data.values + 0.5 * noise, data.lengths)


def pixels(seed=0, count=12):
    data = symbols(2, seed, count)
    generator = torch.Generator().manual_seed(seed)
    values = (torch.rand((*data.values.shape, 3), generator=generator) < 0.5).double()
    return Sequences(values, data.lengths)


FAMILIES = {
    "categorical": (lambda: categorical(4, 1.1), symbols),
    "normal": (lambda: normal(0), reals),
    "bernoulli": (lambda: bernoulli(3), pixels),
}


@pytest.fixture(params=FAMILIES)
def case(request):
    family, data = FAMILIES[request.param]
    return family(), data()


@pytest.mark.parametrize("restarts", [1, 3])
@pytest.mark.parametrize("alpha", [0.5, 20.0])
def test_the_objective_never_falls_and_is_what_it_should_be(case, restarts, alpha):
    family, data = case
    prior = DiversityPrior(alpha)
    fit = fit_em(TabularHMM(3, family), data, log_prior=prior, restarts=restarts, num_iterations=40)
    fall = fit.losses[:-1] - fit.losses[1:]
    assert bool((fall > -1e-9 * fit.losses[0].abs()).all())
    assert not [note for note in fit.notes if "rose" in note]
    module = TabularHMM(3, family)
    scale_priors(module, data)  # as the fit has done with its copy
    model = MarginalModel(module, prior)
    trace = pyro.poutine.trace(pyro.condition(model, data=fit.parameters)).get_trace(data)
    assert fit.losses[-1].item() == pytest.approx(-trace.log_prob_sum().item())


@pytest.mark.parametrize(
    "step",
    [msteps.FixedPoint(), msteps.LogitGradient()],
    ids=lambda step: type(step).__name__,
)
def test_the_end_is_stationary(step):
    """A_ij (n_i + alpha) = c_ij + alpha M_ij, with the counts of the fit itself."""
    data, alpha = symbols(3, count=30), 5.0
    pyro.set_rng_seed(3)
    module = TabularHMM(2, categorical(3, 1.5), 1.5, 1.5)
    fit = fit_em(
        module,
        data,
        log_prior=DiversityPrior(alpha),
        transition_step=step,
        num_iterations=3000,
        tolerance=1e-14,
    )
    hmm = fit.hmm(data)
    counts = hmm.expected_counts(data.values).counts["log_transition"] + 0.5
    rows = hmm.log_transition.exp()
    gains = rows.sqrt() * torch.linalg.inv(rows.sqrt()).mT
    right = (counts + alpha * gains) / (counts.sum(-1, keepdim=True) + alpha)
    torch.testing.assert_close(rows, right, rtol=0, atol=1e-4)


def test_without_weight_it_is_plain_em(case):
    family, data = case
    found = []
    for prior in (None, DiversityPrior(0.0)):
        pyro.set_rng_seed(0)
        found.append(fit_em(TabularHMM(3, family), data, log_prior=prior, num_iterations=15))
    torch.testing.assert_close(found[0].losses, found[1].losses)


def test_labelled_sequences_are_counted_once():
    """Supervised: one step, and the chain is the mode of its counts and the prior."""
    data = datasets.diverse_toy(50, generator=torch.Generator().manual_seed(0))
    data = Sequences(data.values.double(), data.lengths, labels=data.labels)
    prior = DiversityPrior(10.0)
    fit = fit_em(
        TabularHMM(5, normal(0)), data, log_prior=prior, num_iterations=30, tolerance=1e-12
    )
    counts = torch.zeros(5, 5)
    for row in data.labels.tolist():
        for a, b in pairwise(row):
            counts[a, b] += 1
    start = fit.hmm(data).log_transition.exp().unsqueeze(0)
    exact = msteps.FixedPoint(5000)(start, counts.unsqueeze(0), prior)
    torch.testing.assert_close(start, exact, rtol=0, atol=1e-10)
    assert len(fit.losses) < 12


def test_zeros_of_an_hmm_stay_and_other_entries_change():
    rows = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5], [0.3, 0.3, 0.4]])
    emission = dist.Categorical(torch.rand(3, 4).add(0.1).log_softmax(-1).exp())
    hmm = HMM(torch.full((3,), 1 / 3).log(), rows.log(), emission, torch.tensor([3]))
    fit = fit_em(hmm, symbols(), log_prior=DiversityPrior(10.0), num_iterations=10)
    found = fit.hmm(symbols()).log_transition.exp()
    assert found[0, 2] == 0
    assert (found - rows).abs().max() > 0.05


def test_a_dense_chain_follows_by_gradient_and_its_emission_in_closed_form():
    data = reals(count=30)
    found = []
    for alpha in (0.0, 50.0):
        pyro.set_rng_seed(0)
        module = DenseHMM(3, None, 3, emission=normal(0))
        fit = fit_em(module, data, log_prior=DiversityPrior(alpha), num_iterations=25)
        fall = fit.losses[:-1] - fit.losses[1:]
        assert bool((fall > -1e-9 * fit.losses[0].abs()).all())
        found.append(dpp.log_diversity(fit.hmm(data).log_transition.exp()).item())
    assert found[1] > found[0]
