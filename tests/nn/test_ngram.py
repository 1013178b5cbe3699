"""A neural HMM mixed with an n-gram, which comes with the data as covariates."""

import math

import pyro
import pytest
import torch

from pyrohmm import (
    MarginalModel,
    NeuralHMM,
    NGramMixture,
    ScalarHMM,
    Sequences,
    TabularHMM,
    blocks,
    categorical,
    fit_map,
    metrics,
)

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
        MarginalModel(module), data, num_steps=30, learning_rate=0.4, batch_size=3,
        tolerance=None, validation=held_out,
    )  # fmt: skip
    assert metrics.perplexity(fit, held_out).value < 1.05
    plain = fit.hmm(held_out).words.log_prob(held_out.values).sum() / held_out.num_observed
    assert math.exp(-plain) > 1.2


def test_weights_are_sums_of_classes_and_blocks():
    pyro.set_rng_seed(0)
    data = text(2, 3, 0.5)
    module = NGramMixture(NeuralHMM(4, 3, hidden_dim=4, blocks=BLOCKS), 2, 3, weight=0.5)
    with torch.no_grad():
        module.block_before[-1] = 2.0
        module.symbol_class[1] = 1.0
    weights = module(data.lengths, None, data.covariates).weights
    assert weights.block.tolist() == [[0.0, 0.0, 2.0]] * 2
    assert weights.symbol.tolist() == [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0]]


def test_bad_arguments_are_refused():
    neural = NeuralHMM(4, 3, hidden_dim=4, blocks=BLOCKS)
    module, data = NGramMixture(neural), text(2, 3, 0.5)
    with pytest.raises(ValueError, match="covariates must be given"):
        module(data.lengths)
    with pytest.raises(ValueError, match=r"covariates must have shape .* = \(2, 4, 4\)"):
        module(data.lengths, None, data.covariates[..., :2])
    with pytest.raises(ValueError, match="observed at every step"):
        module(data.lengths, data.exists & (data.values < 2), data.covariates)
    with pytest.raises(ValueError, match="InnerProductTransition"):
        NGramMixture(ScalarHMM(4, 3, blocks=BLOCKS))(data.lengths, None, data.covariates)
    with pytest.raises(ValueError, match="blocks"):
        NGramMixture(TabularHMM(2, categorical(3)))
    with pytest.raises(ValueError, match="weight must lie between"):
        NGramMixture(neural, weight=1.0)


@pytest.mark.parametrize("wrong", [0.5, 2.0, -1.0, math.nan, math.inf])
def test_what_is_no_class_is_refused_where_it_is_read(wrong):
    module, data = NGramMixture(NeuralHMM(4, 3, hidden_dim=4, blocks=BLOCKS), 1, 2), text(2, 3, 0.9)
    assert data.lengths.tolist() == [3, 4]
    covariates = data.covariates.clone()
    covariates[0, 3] = wrong  # padded
    found = module(data.lengths, None, covariates).log_prob(data.values)
    assert torch.equal(found, module(data.lengths, None, data.covariates).log_prob(data.values))
    covariates[0, 2, 3] = wrong
    with pytest.raises(ValueError, match=r"covariates must hold classes in column 3, .* 0 to 1"):
        module(data.lengths, None, covariates)
