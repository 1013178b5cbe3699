"""A neural HMM mixed with an n-gram, which comes with the data as covariates."""

import math

import pyro
import pytest
import torch

from pyrohmm import (
    MarginalModel,
    NeuralHMM,
    Sequences,
    blocks,
    fit_map,
    metrics,
)
from pyrohmm.language import NGramMixture

CYCLE = torch.tensor([0, 1, 0, 2, 1, 2])  # in which a word says little of the next, and two all
BLOCKS = blocks.from_clusters(torch.tensor([0, 0, 1]), 2)


def text(count, length, sure):
    """Sentences that go round, and what a trigram says that is right with probability ``sure``."""
    sentences = [CYCLE.roll(-n).repeat(length)[: length + n % 2] for n in range(count)]
    other = (1 - sure) / 2
    columns = []
    for words in sentences:
        first = words < 2
        log_block = torch.where(first, sure + other, sure).log()
        log_word = torch.where(first, sure / (sure + other), 1.0).log()
        columns.append(torch.stack([log_block, log_word, *torch.zeros(2, len(words))], -1))
    return Sequences.from_list(sentences, covariates=columns)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_fit_in_minibatches_learns_how_much_to_trust_the_ngram(dropout):
    """Of a chain whose states know less than the n-gram."""
    pyro.set_rng_seed(0)
    data, held_out = text(8, 9, 0.98), text(4, 7, 0.98)
    neural = NeuralHMM(4, 3, hidden_dim=4, blocks=BLOCKS, two_level=True, dropout=dropout)
    module = NGramMixture(neural)
    assert module.block_class.sigmoid().item() == pytest.approx(0.3)
    fit = fit_map(
        MarginalModel(module), data, num_iterations=30, learning_rate=0.4, batch_size=3,
        tolerance=None, validation=held_out,
    )  # fmt: skip
    assert metrics.perplexity(fit, held_out).value < 1.05
    plain = fit.hmm(held_out).words.log_prob(held_out.values).sum() / held_out.num_observed
    assert math.exp(-plain) > 1.2


@pytest.mark.parametrize("sure", [0.4, 0.98])
def test_weights_reach_a_maximum_of_evidence_and_prior(sure):
    """The gradient vanishes there, and what requires no gradient stays."""
    pyro.set_rng_seed(0)
    data = text(12, 9, sure)
    module = NGramMixture(NeuralHMM(4, 3, hidden_dim=4, blocks=BLOCKS)).requires_grad_(False)
    module.block_class.requires_grad_(True)
    module.symbol_class.requires_grad_(True)
    assert module.fit_weights(data, num_rounds=30, batch_tokens=20) is module
    assert module.block_before.abs().max() == module.symbol_block.abs().max() == 0
    fitted = [module.block_class, module.symbol_class]
    evidence = module(data.lengths, None, data.covariates).log_prob(data.values).sum()
    for part, slope in zip(fitted, torch.autograd.grad(evidence, fitted)):
        assert slope.item() == pytest.approx(part.item(), abs=1e-3)  # of a standard normal
