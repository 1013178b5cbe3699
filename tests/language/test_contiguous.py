"""Sentences read as one text: scores, samples, training and the command."""

import itertools

import pyro
import pytest
import torch

from pyrohmm import BlockHMM, LanguageModel, Sequences, blocks
from pyrohmm.data.vocabulary import Vocabulary
from pyrohmm.language import model as language_models
from pyrohmm.language.text import as_text
from pyrohmm.ops.blocks.inner_products import InnerProductTransition

WORDS = Vocabulary(["<unk>", "<eos>", "a", "b"], "<unk>")


def tiny(**options):
    """A model of random parameters: blocks of 2, 3 and 2 states, the last that of the end."""
    pyro.set_rng_seed(0)
    each = blocks.from_clusters(torch.tensor([0, 2, 1, 0]), torch.tensor([2, 3, 2]))
    model = LanguageModel(WORDS, each, 4, contiguous=True, **options)
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.mul_(3.0)  # so that the end remembers what was before it
    return model


def alternating():
    """Sentences a and b in turn, which the state of the end alone remembers."""
    each = blocks.from_clusters(torch.tensor([1, 2, 0, 1]), torch.tensor([1, 1, 2]))
    following = torch.tensor([2, 3, 1, 0])  # a -> its end -> b -> its end -> a
    leave = 50.0 * torch.eye(4)[following]
    transition = InnerProductTransition(leave, torch.eye(4), each)
    emission = torch.tensor([[-torch.inf, -torch.inf], [0, 0], [0, -torch.inf], [0, -torch.inf]])
    first = torch.tensor([0.5, 0.5, 0, 0]).log()
    return BlockHMM(first, transition, emission, each, torch.tensor([1]))


@pytest.mark.parametrize(("two_level", "window"), [(False, 1024), (True, 1), (True, 4)])
def test_scores_in_order_are_those_of_the_whole_text(two_level, window, monkeypatch):
    """Each sentence has what it adds to the log-probability of a single dense sequence."""
    monkeypatch.setattr(language_models, "WINDOW", window)
    model = tiny(two_level=two_level)
    lines = ["a b", "", "b a a", "c", "", "a"]
    scores = model.score(lines)
    data = model.encode(lines)
    text = as_text(data)
    hmm = model.module.eval()(text.lengths).dense()
    ends = data.lengths.cumsum(0)
    whole = torch.stack(
        [hmm.replace(lengths=ends[n : n + 1]).log_prob(text.values[:, : ends[n]]) for n in range(6)]
    )
    whole = whole.flatten().double()
    torch.testing.assert_close(scores.cumsum(0), whole, rtol=1e-5, atol=1e-5)
    alone = model.module(data.lengths).log_prob(data.values).double()
    assert scores[0] == pytest.approx(alone[0].item(), rel=1e-5)
    assert (scores[1:] - alone[1:]).abs().max() > 0.05
    assert model.perplexity(lines).log_evidence == pytest.approx(whole[-1].item(), rel=1e-5)


def test_what_only_the_end_remembers_is_scored_and_sampled(monkeypatch):
    hmm, model = alternating(), tiny()
    monkeypatch.setattr(type(model.module), "forward", lambda self, lengths: hmm)
    data = Sequences.from_list([[2, 1], [3, 1], [2, 1], [3, 1]])
    expected = torch.tensor([0.5, 1.0, 1.0, 1.0], dtype=torch.double).log()
    torch.testing.assert_close(model.score(data), expected, rtol=0, atol=1e-5)
    drawn = model.generate(30, torch.Generator().manual_seed(0))
    assert {"a", "b"} == set(drawn)
    assert all(one != other for one, other in itertools.pairwise(drawn))


@pytest.mark.parametrize(
    ("pieces", "lengths"), [(1, [6]), (2, [3, 3]), (4, [2, 2, 2]), (9, [1] * 6)]
)
def test_a_text_is_cut_into_pieces_of_equal_length(pieces, lengths):
    found = as_text(Sequences.from_list([[3, 1], [1], [0, 2, 1]]), pieces)
    assert found.lengths.tolist() == lengths
    assert found.values[found.exists].tolist() == [3, 1, 1, 0, 2, 1]


def lines_in_turn(count):
    """Lines of one word, which is determined by the line before."""
    return ["ab"[n % 2] for n in range(count)]


def test_a_contiguous_model_learns_what_independent_sentences_do_not_have():
    """In turn there is nothing to guess at the beginning of a line but the first time."""
    lines = lines_in_turn(80)
    found = {}
    for contiguous in (False, True):
        pyro.set_rng_seed(1)
        data = tiny().encode(lines)
        model = LanguageModel(WORDS, tiny().blocks, 16, dropout=0.0, contiguous=contiguous)
        fit = model.fit(
            data, data[:20], num_epochs=40, batch_tokens=40, num_streams=2, learning_rate=0.05
        )
        assert len(fit.losses) == 40 * 4  # 160 tokens, in two streams of 20 steps if contiguous
        found[contiguous] = -model.score(lines).mean().item()
    assert found[False] > 0.68  # log 2, the first word of each line
    assert found[True] < 0.05
