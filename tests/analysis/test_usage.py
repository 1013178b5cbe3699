"""How many states are used, and the singular values of the transitions."""

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
from pyrohmm.analysis import usage


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


@pytest.mark.parametrize("two_level", [False, True])
@pytest.mark.parametrize("chunk", [1, 50, 1 << 22])
def test_singular_values_are_those_of_the_whole_matrix(monkeypatch, two_level, chunk):
    monkeypatch.setattr(usage, "CHUNK", chunk)
    module, data = large(two_level)
    hmm = module(data.lengths)
    matrix = hmm.log_transition.detach().double().exp()
    expected = torch.linalg.svdvals(matrix)
    for same in (hmm, hmm.dense()):
        found = metrics.transition_spectrum(same, num_values=20)
        torch.testing.assert_close(found.singular_values, expected, rtol=1e-5, atol=1e-7)
        assert found.squares == pytest.approx(float(matrix.square().sum()), rel=1e-5)
        assert found.stable_rank == pytest.approx(
            float((expected.square().sum()) / expected[0] ** 2), rel=1e-5
        )


def test_the_largest_of_many_singular_values_are_found_without_the_matrix(monkeypatch):
    """No matrix is asked for, and never are more rows computed at once than were allowed."""
    monkeypatch.setattr(usage, "CHUNK", 90 * 20)
    module, data = large(num_states=90)
    hmm = module(data.lengths)
    expected = torch.linalg.svdvals(hmm.log_transition.detach().double().exp())
    sizes, rows = [], usage.InnerProductTransition.rows

    def spy(self, states):
        sizes.append(len(states))
        return rows(self, states)

    monkeypatch.setattr(usage.InnerProductTransition, "rows", spy)
    monkeypatch.setattr(usage.InnerProductTransition, "matrix", None)
    found = metrics.transition_spectrum(module(data.lengths), 6, 3)
    assert max(sizes) == 20
    assert sum(sizes) == 4 * 90
    torch.testing.assert_close(found.singular_values, expected[:6], rtol=1e-4, atol=0)
    shares = expected.square().cumsum(0) / expected.square().sum()
    for share in (0.5, 0.9, 1.0):
        rank = int((shares < share).sum()) + 1
        assert found.effective_rank(share) == (rank if rank <= 6 else None)
    assert found.effective_rank(1.0) is None


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
