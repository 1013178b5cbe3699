"""How many states are used."""

import math

import pyro
import pytest
import torch
from pyro.distributions import Categorical, Dirichlet

from pyrohmm import (
    HMM,
    NeuralHMM,
    Sequences,
    blocks,
    fit_map,
    metrics,
)


def large(two_level=True, num_states=12):
    """A block HMM with random parameters, and data for it."""
    pyro.set_rng_seed(0)
    three = blocks.from_clusters(torch.tensor([0, 1, 1, 2, 2, 0]), num_states // 3)
    module = NeuralHMM(num_states, 6, 8, blocks=three, two_level=two_level).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(2.0)
    data = Sequences.from_list([[0, 3, 1, 5, 2], [4], [2, 2, 3]])
    return module, data


@pytest.mark.parametrize("two_level", [False, True])
def test_steps_in_blocks_are_those_of_the_dense_posterior(two_level):
    module, data = large(two_level)
    hmm = module(data.lengths)
    found = metrics.state_usage(hmm, data)
    dense = metrics.state_usage(hmm.dense(), data)
    torch.testing.assert_close(found.counts, dense.counts, rtol=1e-4, atol=1e-6)
    assert found.counts.sum() == pytest.approx(data.num_observed, rel=1e-5)
    shares = dense.counts / dense.counts.sum()
    assert found.effective == pytest.approx(math.exp(-(shares * shares.log()).sum()), rel=1e-4)
    assert 1 < found.effective < 12


def test_usage_of_a_fit_whose_sequences_have_variables_of_their_own_does_not_depend_on_batches():
    def model(data):
        even = torch.full((2, 2), 0.5).log()
        with pyro.plate("subjects", data.total, subsample=data.indices):
            face = pyro.sample("face", Dirichlet(2 * torch.ones(2, 3)).to_event(1))
            hmm = HMM(even[0], even, Categorical(face), data.lengths)
            pyro.sample("x", hmm, obs=data.values)
        return hmm

    data = Sequences(torch.randint(3, (5, 6)), torch.full((5,), 6))
    fit = fit_map(model, data, num_iterations=10, progress=False)
    whole = metrics.state_usage(fit, data)
    torch.testing.assert_close(metrics.state_usage(fit, data, batch_size=2).counts, whole.counts)
