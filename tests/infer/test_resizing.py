"""Merge and split of states, against the mixtures that they stand for."""

import pytest
import torch
from pyro.distributions import (
    Bernoulli,
    Categorical,
    MultivariateNormal,
    Normal,
    Poisson,
)

from pyrohmm import (
    HMM,
    merge_states,
    split_state,
)
from pyrohmm.distributions import Streams

K = 3
LENGTHS = torch.tensor([6, 4])
SOURCE = torch.Generator().manual_seed(0)


def rows(*shape):
    return torch.randn(*shape, generator=SOURCE).log_softmax(-1)


EMISSIONS = {
    "symbols": lambda: Categorical(probs=rows(K, 4).exp()),
    "logits": lambda: Categorical(logits=rows(K, 4)),
    "normal": lambda: Normal(torch.arange(3.0), torch.tensor([1.0, 2.0, 0.5])),
    "vectors": lambda: Normal(torch.randn(K, 2), torch.rand(K, 2) + 1).to_event(1),
    "full": lambda: MultivariateNormal(torch.randn(K, 2), scale_tril=torch.eye(2).repeat(K, 1, 1)),
    "counts": lambda: Poisson(torch.tensor([[1.0, 5.0], [2.0, 3.0], [9.0, 1.0]])).to_event(1),
    "binary": lambda: Bernoulli(probs=torch.rand(K, 2)).to_event(1),
    "streams": lambda: Streams([Categorical(logits=rows(K, 2)), Normal(torch.arange(3.0), 1.0)]),
}
SYMBOLS = "symbols", "logits"


def model(name):
    return HMM(rows(K), rows(K, K), EMISSIONS[name](), LENGTHS, validate_args=True)


@pytest.mark.parametrize("name", EMISSIONS)
def test_a_split_without_noise_has_the_same_density_and_is_undone_by_a_merge(name):
    hmm = model(name)
    values = hmm.sample()
    split = split_state(hmm, 1, noise=0.0)
    assert split.num_states == K + 1
    torch.testing.assert_close(split.log_prob(values), hmm.log_prob(values))
    again = merge_states(split, 1, K)
    torch.testing.assert_close(again.log_prob(values), hmm.log_prob(values))
    torch.testing.assert_close(again.log_transition.exp(), hmm.log_transition.exp())


@pytest.mark.parametrize("name", EMISSIONS)
def test_noise_makes_copies_differ_and_density_close(name):
    hmm = model(name)
    values = hmm.sample()
    split = split_state(hmm, 0, noise=0.01)
    assert (split.log_prob(values) - hmm.log_prob(values)).abs().max() < 0.3
    means = [
        chain.emission.probs if name in SYMBOLS else chain.emission.mean for chain in (split, hmm)
    ]
    assert not torch.equal(means[0][0], means[0][K])
    torch.testing.assert_close(means[0][1:K], means[1][1:], equal_nan=True)
    rows = split.log_transition.exp()
    torch.testing.assert_close(rows.sum(-1), torch.ones(K + 1))
    assert not torch.equal(rows[0], rows[K])


@pytest.mark.parametrize("name", ["symbols", "logits", "normal", "full", "counts", "binary"])
def test_a_merge_keeps_the_moments_of_a_step(name):
    """Of an observation of the stationary chain, whose usage weighs both states."""
    hmm = model(name)
    merged = merge_states(hmm, 2, 0)
    usage = hmm.stationary()
    assert merged.num_states == K - 1
    torch.testing.assert_close(merged.stationary(), torch.stack([usage[1], usage[0] + usage[2]]))

    def moments(hmm):
        weights = hmm.stationary()
        if name in ("symbols", "logits"):
            return (weights @ hmm.emission.probs,)
        mean = torch.tensordot(weights, hmm.emission.mean, 1)
        if name in ("counts", "binary"):
            return (mean,)
        away = hmm.emission.mean - mean
        return mean, torch.tensordot(weights, hmm.emission.variance + away**2, 1)

    torch.testing.assert_close(moments(merged), moments(hmm))


def test_usage_weighs_the_states():
    hmm = model("counts")
    merged = merge_states(hmm, 0, 1, usage=torch.tensor([3.0, 1.0, 0.0]))
    torch.testing.assert_close(merged.emission.mean[0], torch.tensor([1.25, 4.5]))
    row = 0.75 * hmm.log_transition.exp()[0] + 0.25 * hmm.log_transition.exp()[1]
    wanted = torch.stack([row[0] + row[1], row[2]])
    torch.testing.assert_close(merged.log_transition.exp()[0], wanted)
    never = merge_states(hmm, 0, 1, usage=torch.zeros(3))
    torch.testing.assert_close(never.emission.mean[0], torch.tensor([1.5, 4.0]))
