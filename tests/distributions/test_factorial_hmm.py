"""``FactorialHMM`` against the sum over all paths of product states, and the chain of them."""

import math

import pytest
import torch
from pyro.distributions import Normal
from pyro.infer.autoguide import AutoNormal

from pyrohmm import (
    HMM,
    FactorialHMM,
    MarginalModel,
    Sequences,
    TabularFactorialHMM,
    TabularHMM,
    additive_bernoulli,
    bernoulli,
    fit_em,
    fit_map,
    fit_svi,
    metrics,
    queries,
)
from pyrohmm.chains import ProductChain

SIZES = (2, 3)
K, T = 6, 5
LENGTHS = torch.tensor([5, 1, 3, 4])


def parameters(*batch, sizes=SIZES, zero=False, seed=1):
    source = torch.Generator().manual_seed(seed)
    initials = [torch.randn(*batch, k, generator=source) for k in sizes]
    transitions = [torch.randn(*batch, k, k, generator=source) for k in sizes]
    if zero:
        transitions[1][..., 0, 2] = -torch.inf
    return [[part.log_softmax(-1) for part in parts] for parts in (initials, transitions)]


def model(zero=False, observed=True, **options):
    seen = torch.rand(4, T, generator=torch.Generator().manual_seed(2)) < 0.8
    return FactorialHMM(
        *parameters(zero=zero), Normal(torch.arange(6.0), 1.5), LENGTHS,
        seen if observed else None, validate_args=True, **options,
    )  # fmt: skip


@pytest.fixture
def values():
    return torch.randn(4, T) + 3


@pytest.fixture(params=[False, True], ids=["full", "zeros"])
def hmm(request):
    return model(request.param)


def test_it_is_the_product_chain(hmm, values):
    large = hmm.expanded()
    torch.testing.assert_close(hmm.log_prob(values), large.log_prob(values))
    torch.testing.assert_close(hmm.stationary(), large.stationary())
    found, wanted = hmm.posterior(values), large.posterior(values)
    moves, states = (
        wanted.transitions.reshape(4, 2, 3, 2, 3),
        wanted.state_probs.reshape(4, T, 2, 3),
    )
    for chain, axes in enumerate([(2, 4), (1, 3)]):
        torch.testing.assert_close(found.transitions[chain], moves.sum(axes))
        torch.testing.assert_close(found.chains[chain], states.sum(3 - chain))
    data = Sequences(values, LENGTHS, hmm.observed)
    for ask in (
        lambda each: each.forecast(values, 3).mean,
        lambda each: metrics.state_usage(each, data).counts,
        queries.dwell_time_mean,
    ):
        torch.testing.assert_close(ask(hmm), ask(large))
    states = hmm.viterbi(values)
    torch.testing.assert_close(hmm.log_joint(values, states), large.log_joint(values, states))
    assert torch.equal(hmm.product_states(hmm.chain_states(states)), states)


def test_nothing_leaves_the_range_of_numbers():
    """Evidence of 1e6 nats, and a state of e^-3000 that becomes the only one possible."""
    stay = torch.eye(2).log()
    coin = torch.full((2, 2), 0.5).log()
    seen = torch.full((1, 3, 4), -1e6 / 3)
    seen[0, 0, 2:] -= 3000.0
    seen[0, 2, :2] = -torch.inf
    chain = ProductChain([coin[0], coin[0]], [stay, coin])
    found = chain.log_evidence(seen, torch.tensor([3]))
    assert found.item() == pytest.approx(-1e6 - 3000 + math.log(0.5), abs=1e-6)


def test_labels_of_some_chains(hmm, values):
    labels = torch.full((4, T, 2), -1)
    labels[:, 0, 1], labels[0, 2, 0] = 1, 1
    known = hmm.restrict_chains(labels)
    torch.testing.assert_close(known.log_prob(values), known.expanded().log_prob(values))
    for states in (known.sample_states(values), known.sample_with_states()[1]):
        chains = known.chain_states(states)
        assert (chains[:, 0, 1] == 1).all()
        assert chains[0, 2, 0] == 1
    with pytest.raises(ValueError, match="labels of chain 0"):
        hmm.restrict_chains(labels.masked_fill(labels == 1, 2))


def test_logits_that_add_are_fitted_by_every_method():
    data = Sequences((torch.randn(4, T, 3) > 0).double(), LENGTHS)
    module = TabularFactorialHMM((2, 2), additive_bernoulli((2, 2), 3))
    fit = fit_em(module, data, num_iterations=5)
    assert fit.losses[-1] < fit.losses[0]
    best = fit_map(MarginalModel(module), data, num_iterations=60, learning_rate=0.1)
    assert best.losses[-1] < best.losses[0]
    hmm = best.hmm(data)
    first, second = best.parameters["module.emission.effects"].split(2)
    wanted = first.repeat_interleave(2, 0) + second.repeat(2, 1)
    torch.testing.assert_close(hmm.emission.base_dist.logits, wanted)
    guide = AutoNormal(MarginalModel(module))
    assert fit_svi(MarginalModel(module), guide, data, num_iterations=3).losses.isfinite().all()


def test_free_emissions_of_one_chain_are_a_plain_hmm():
    data = Sequences((torch.randn(4, T, 3) > 0).double(), LENGTHS)
    start = {
        "initial": torch.tensor([0.4, 0.6]),
        "transition": torch.tensor([[0.7, 0.3], [0.2, 0.8]]),
        "emission.probs": torch.rand(2, 3),
    }
    renamed = {name + "_0" if "." not in name else name: p for name, p in start.items()}
    plain = fit_em(TabularHMM(2, bernoulli(3)), data, num_iterations=5, start=start)
    alike = fit_em(TabularFactorialHMM((2,), bernoulli(3)), data, num_iterations=5, start=renamed)
    torch.testing.assert_close(alike.losses, plain.losses)


def test_long_chains_with_states_ruled_out_keep_their_transitions():
    """Where no path comes to a state, nothing is taken times infinity."""
    half = torch.full((2,), 0.5).log()
    matrix = torch.tensor([[0.9, 0.1], [0.2, 0.8]]).log()
    emission = Normal(torch.zeros(4), 0.001)  # evidence below the range of exponentials
    hmm = FactorialHMM([half, half], [matrix, matrix], emission, torch.tensor(9))
    labels = torch.full((9, 2), -1)
    labels[0, 1] = 0
    restricted, values = hmm.restrict_chains(labels), torch.full((9,), 0.1)
    found = restricted.posterior(values)
    wanted = restricted.expanded().posterior(values)
    pairs = wanted.transitions.reshape(2, 2, 2, 2)
    torch.testing.assert_close(found.transitions[0], pairs.sum((1, 3)), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.transitions[1], pairs.sum((0, 2)), rtol=1e-4, atol=1e-4)


def test_one_chain_has_its_own_transitions():
    initial, transition = (
        torch.tensor([0.5, 0.5]).log(),
        torch.tensor([[0.9, 0.1], [0.2, 0.8]]).log(),
    )
    emission, values = Normal(torch.tensor([0.0, 3.0]), 1.0), torch.randn(4, T)
    found = FactorialHMM([initial], [transition], emission, LENGTHS).posterior(values)
    wanted = HMM(initial, transition, emission, LENGTHS).posterior(values)
    torch.testing.assert_close(found.transitions, (wanted.transitions,))
    torch.testing.assert_close(found.chains, (wanted.state_probs,))
