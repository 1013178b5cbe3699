"""A neural HMM mixed with an n-gram, which comes with the data as covariates."""

import math

import pyro
import pytest
import torch

from pyrohmm import (
    MarginalModel,
    NeuralHMM,
    NGramMixture,
    Sequences,
    blocks,
    datasets,
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
        MarginalModel(module), data, num_iterations=30, learning_rate=0.4, batch_size=3,
        tolerance=None, validation=held_out,
    )  # fmt: skip
    assert metrics.perplexity(fit, held_out).value < 1.05
    plain = fit.hmm(held_out).words.log_prob(held_out.values).sum() / held_out.num_observed
    assert math.exp(-plain) > 1.2


def nats(hmm, data):
    return -hmm.log_prob(data.values).sum().item() / data.num_observed


def letters():
    """Letters of English in three parts, with an n-gram of two before; and their blocks."""
    corpus = datasets.english_letters(12_000, chunk=40)
    num, paths = len(corpus.vocabulary), corpus.data.values
    cut = len(paths) // 2
    clusters = torch.arange(num) % 4
    counts = torch.zeros(num, num, num)
    before, last, now = (paths[:cut, k : k - 2 or None].flatten() for k in range(3))
    counts.index_put_((before, last, now), torch.tensor(1.0), True)
    single = torch.bincount(paths[:cut].flatten(), minlength=num).float() + 1
    pairs = counts.sum(0) + 5 * single / single.sum()
    pairs = pairs / pairs.sum(-1, keepdim=True)
    triples = counts + 5 * pairs
    triples = triples / triples.sum(-1, keepdim=True)

    def of(part):
        rows = torch.cat(
            [(single / single.sum()).expand(len(part), 1, -1), pairs[part[:, :1]],
             triples[part[:, :-2], part[:, 1:-1]]], 1
        )  # fmt: skip
        of_block = rows @ torch.nn.functional.one_hot(clusters).to(rows)
        block = of_block.gather(-1, clusters[part][..., None])
        word = rows.gather(-1, part[..., None]) / block
        columns = torch.cat([block.log(), word.log(), torch.zeros(*part.shape, 2)], -1)
        return Sequences(part, torch.full((len(part),), part.size(1)), covariates=columns)

    half = (cut + len(paths)) // 2
    parts = of(paths[:cut]), of(paths[cut:half]), of(paths[half:])
    return parts, num, blocks.from_clusters(clusters, 8)


def test_weights_of_held_out_text_make_the_mixture_better_than_both_parts():
    """On text that nothing was fitted to, in the way of the guide."""
    pyro.set_rng_seed(0)
    (train, held_out, test), num, partition = letters()
    network = NeuralHMM(32, num, hidden_dim=16, blocks=partition, two_level=True)
    fit_map(
        MarginalModel(network), Sequences(train.values, train.lengths), num_iterations=80,
        batch_size=64, learning_rate=0.02, tolerance=None,
    )  # fmt: skip
    kept = [part.detach().clone() for part in network.parameters()]
    mixture = NGramMixture(network)
    first = nats(mixture(held_out.lengths, None, held_out.covariates), held_out)
    assert mixture.fit_weights(held_out, batch_tokens=1000) is mixture
    assert nats(mixture(held_out.lengths, None, held_out.covariates), held_out) < first
    assert all(map(torch.equal, kept, network.parameters()))
    mixed = nats(mixture(test.lengths, None, test.covariates), test)
    ngram = -test.covariates[..., :2].sum().item() / test.num_observed
    assert mixed < min(ngram, nats(network(test.lengths), test)) - 0.02


@pytest.mark.parametrize("sure", [0.4, 0.98])
def test_weights_reach_a_maximum_of_evidence_and_prior(sure):
    """The gradient vanishes there, and what requires no gradient stays."""
    pyro.set_rng_seed(0)
    data = text(12, 9, sure)
    module = NGramMixture(NeuralHMM(4, 3, hidden_dim=4, blocks=BLOCKS)).requires_grad_(False)
    module.block_class.requires_grad_(True)
    module.symbol_class.requires_grad_(True)
    module.fit_weights(data, num_rounds=30, batch_tokens=20)
    assert module.block_before.abs().max() == module.symbol_block.abs().max() == 0
    fitted = [module.block_class, module.symbol_class]
    evidence = module(data.lengths, None, data.covariates).log_prob(data.values).sum()
    for part, slope in zip(fitted, torch.autograd.grad(evidence, fitted)):
        assert slope.item() == pytest.approx(part.item(), abs=1e-3)  # of a standard normal
