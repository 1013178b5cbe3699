"""Kneser-Ney n-grams: the numbers of KenLM, the published formula, and sums over blocks."""

import itertools
import math
import random
from collections import Counter

import pytest
import torch

from pyrohmm import NeuralHMM, Sequences, blocks
from pyrohmm.language import NGramMixture, ngram

NUM_SYMBOLS = 364  # of the text below, with </s> and <unk>
KENLM = {  # log10 of the sentences of the second text, by lmplz and --discount_fallback
    2: [-2.29661, -16.96492, -7.59884, -11.87066, -7.05778, -15.77314],
    3: [-2.20986, -17.08123, -7.58418, -11.88806, -7.0259, -15.8481],
    4: [-2.24623, -17.07606, -7.58532, -12.03411, -7.02312, -16.20217],
}


def texts():
    """300 sentences of a skewed chain of words, and six more; each ends in </s>."""
    source, sentences = random.Random(7), []
    for _ in range(306):
        words, before = [], 0
        for _ in range(1 + int(9 * source.random())):
            before = (3 * before + int(400 * source.random() ** 9)) % 400
            words.append(before)
        sentences.append(words)
    number = {w: n for n, w in enumerate(sorted({w for s in sentences[:300] for w in s}))}
    assert len(number) == NUM_SYMBOLS - 2
    end, unknown = NUM_SYMBOLS - 2, NUM_SYMBOLS - 1
    coded = [[*(number.get(w, unknown) for w in words), end] for words in sentences]
    return Sequences.from_list(coded[:300]), Sequences.from_list(coded[300:])


@pytest.mark.parametrize("order", [2, 3, 4])
def test_it_has_the_numbers_of_kenlm(order):
    """Also where, at order 4, the discounts of the formula are of no use."""
    train, held_out = texts()
    found = ngram(train, NUM_SYMBOLS, order).log_prob(held_out) / torch.tensor(10.0).log()
    torch.testing.assert_close(found, torch.tensor(KENLM[order]).double(), rtol=0, atol=2e-5)


def by_formula(sentences, num_symbols, order):
    """q(x | h) as published, from dictionaries."""
    counts = Counter()
    for words in sentences:
        text = (-1, *words)  # the start is no word
        for n, end in itertools.product(range(1, order + 1), range(2, len(text) + 1)):
            if end >= n:
                counts[text[end - n : end]] += 1
    used = {}
    for n in range(1, order + 1):
        of_length = {gram: count for gram, count in counts.items() if len(gram) == n}
        if n < order:
            for gram in of_length:
                longer = sum(len(key) == n + 1 and key[1:] == gram for key in counts)
                of_length[gram] = longer or of_length[gram]
        used[n] = of_length

    def discount(n, count):
        several = Counter(used[n].values())
        if not all(several[i] for i in (1, 2, 3)):
            return 0.5 * min(count, 3)
        y = several[1] / (several[1] + 2 * several[2])
        each = [i - (i + 1) * y * several[i + 1] / several[i] for i in (1, 2, 3)]
        bad = not all(0 < d <= i for i, d in enumerate(each, 1))
        return 0.5 * min(count, 3) if bad else each[min(count, 3) - 1]

    def q(word, before):
        n = len(before) + 1
        lower = q(word, before[1:]) if before else 1 / num_symbols
        here = {gram: count for gram, count in used[n].items() if gram[:-1] == before}
        if not here:
            return lower
        own = here.get((*before, word), 0)
        total = sum(here.values())
        taken = sum(discount(n, count) for count in here.values())
        return ((own - discount(n, own) if own else 0) + taken * lower) / total

    return lambda words, place: q(words[place], (-1, *words)[max(0, place + 2 - order) : place + 1])


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_it_is_the_published_formula(order):
    sentences = [[n % 7 % 3, *[(n * k) % 5 % 4 for k in range(n % 6)]] for n in range(1, 60)]
    fresh = [[4], [0, 3, 4, 1, 0, 0], [2, 2], [3, 1, 0, 2]]
    q = by_formula(sentences, 5, order)
    expected = [sum(math.log(q(words, t)) for t in range(len(words))) for words in fresh]
    found = ngram(Sequences.from_list(sentences), 5, order).log_prob(Sequences.from_list(fresh))
    assert found.tolist() == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("order", [1, 2, 4])
def test_blocks_have_the_probabilities_of_their_symbols(order):
    """And those after any beginning sum to one."""
    sentences = [[n % 7 % 3, *[(n * k) % 5 % 4 for k in range(n % 6)]] for n in range(1, 60)]
    found, of = ngram(Sequences.from_list(sentences), 5, order), torch.tensor([0, 1, 0, 1, 1])
    for begin in ([], [4], [1, 3], [0, 0, 0, 1]):
        data = Sequences.from_list([[*begin, word] for word in range(5)])
        columns = found.with_blocks(data, blocks.from_clusters(of, 2)).covariates.double()[:, -1]
        probs = columns[:, :2].sum(-1).exp()
        assert probs.sum().item() == pytest.approx(1, abs=1e-6)
        sums = torch.zeros(2).double().index_add(0, of, probs)[of]
        torch.testing.assert_close(columns[:, 0].exp(), sums, atol=1e-6, rtol=1e-5)
        assert (columns[:, 2:] < found.num_classes).all()
        assert (columns[:, 2] == columns[0, 2]).all(), "the class depends on the symbol"
        assert all(len(set(columns[of == b, 3].tolist())) == 1 for b in range(2))


def test_a_mixture_takes_it():
    data = Sequences.from_list([[0, 1, 2, 4], [3, 4], [0, 2, 4]] * 5)
    found, parts = ngram(data, 5, 3), blocks.from_clusters(torch.tensor([0, 1, 0, 1, 1]), 2)
    mixture = NGramMixture(
        NeuralHMM(4, 5, hidden_dim=4, blocks=parts), found.num_classes, found.num_classes
    )
    held_out = found.with_blocks(data[:2], parts)
    alone = mixture.words(held_out.lengths).log_prob(held_out.values)
    mixed = mixture.fit_weights(held_out)(held_out.lengths, None, held_out.covariates)
    assert (mixed.log_prob(held_out.values) > alone).all()


def test_what_it_cannot_count_is_refused():
    gaps = Sequences.from_concatenated([0, None, 1], dtype=torch.long)
    with pytest.raises(ValueError, match=r"all observed; got .* with missing steps\. Cut"):
        ngram(gaps, 2)
    with pytest.raises(ValueError, match="V - 1"):
        ngram(Sequences.from_list([[0, 2]]), 2)
    with pytest.raises(ValueError, match="order"):
        ngram(Sequences.from_list([[0, 1]]), 2, order=0)
