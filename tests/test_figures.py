"""What the scripts of ``figures/`` compute beside the package, and what their results claim."""

import importlib
import json
from pathlib import Path

import pytest
import torch

from pyrohmm import (
    DiversityPrior,
    Sequences,
    TabularHMM,
    bernoulli,
    dense,
    distributions,
    fit_em,
    recursions,
)

FIGURES = Path(__file__).resolve().parent.parent / "figures"


@pytest.fixture
def matrix_fit(monkeypatch):
    monkeypatch.syspath_prepend(FIGURES)
    return importlib.import_module("densehmm_matrix_fit")


@pytest.mark.parametrize("name", ["SOFTMAX", "NORM_ABS_LIN"])
def test_the_gradient_of_the_matrix_fit_is_that_of_the_package(matrix_fit, name):
    factorisation = getattr(matrix_fit, name)
    embeddings = torch.randn(2, 6, 4, 3, dtype=torch.float64, requires_grad=True)
    truth = torch.randn(6, 4, 4, dtype=torch.float64).softmax(-1)
    probs = dense.log_rows(factorisation.kernel, embeddings[0], embeddings[1]).exp()
    sizes = torch.linalg.matrix_norm(truth)
    expected = torch.linalg.matrix_norm(probs - truth) / sizes
    (slopes,) = torch.autograd.grad(expected.sum(), embeddings)
    found = torch.empty_like(embeddings)
    targets = truth.permute(1, 2, 0)
    losses = matrix_fit.gradient(factorisation, embeddings.detach(), targets, sizes, found)
    torch.testing.assert_close(losses, expected.detach())
    torch.testing.assert_close(found, slopes)


def test_a_fit_as_in_the_code_ends_where_its_loss_does_not_change(matrix_fit, monkeypatch):
    """At the least loss that vectors of length one can have; Adam would move on all the same."""
    monkeypatch.setattr(matrix_fit, "NEVER_BEFORE", 20)
    targets = torch.eye(2).unsqueeze(-1)
    starts = torch.tensor([1.0, 1.2, 1.0, 1.5]).view(2, 1, 2, 1)
    schedules = [matrix_fit.AS_IN_CODE, matrix_fit.AS_IN_CODE._replace(stops=False)]
    short, long = (
        matrix_fit.fit(matrix_fit.NORM_ABS_LIN, targets, starts, schedules, num_steps)
        for num_steps in (300, 310)
    )
    assert short[0].equal(long[0])
    assert not short[1].equal(long[1])


def test_the_matrix_fits_are_at_or_below_those_of_the_paper_in_every_row():
    rows = json.loads((FIGURES / "densehmm_matrix_fit.json").read_text())["rows"]
    ours = [
        row
        for row in rows
        if row["quantity"] == "relative error"
        and (row["factorisation"], row["schedule"]) == ("softmax", "decaying")
    ]
    assert len(ours) == 12
    assert all(row["ours"] <= row["paper"] for row in ours)


# Handwritten letters ------------------------------------------------------------------------------


@pytest.fixture
def ocr(monkeypatch):
    monkeypatch.syspath_prepend(FIGURES)
    return importlib.import_module("diversified_ocr")


@pytest.fixture
def words(ocr):
    return ocr.made_up().data[:40]


@pytest.mark.parametrize("alpha", [0.0, 3.0])
def test_letters_and_their_order_fitted_apart_are_those_of_one_labelled_fit(ocr, words, alpha):
    train, test = words[:30], words[30:]
    prior = DiversityPrior(alpha)
    module = TabularHMM(26, bernoulli(128, 2.0, 2.0), 1.5, 1.5)
    even = torch.full((26,), 1 / 26)
    start = {
        "initial": even,
        "transition": 0.5 * torch.eye(26) + 0.5 * even,
        "emission.probs": torch.full((26, 128), 0.5),
    }
    whole = fit_em(module, train, log_prior=prior, start=start).draw(test)
    chain = ocr.first_order(train, 0.5, 0.5, prior)
    torch.testing.assert_close(chain.initial, whole.log_initial.exp())
    torch.testing.assert_close(chain.transition, whole.log_transition.exp(), atol=1e-6, rtol=0)
    table = ocr.naive_bayes(train, test).table
    torch.testing.assert_close(table, distributions.in_each_state(whole.emission, test.values))
    assert ocr.by_path(chain, table, test) == ocr.accuracy(whole.viterbi(test.values), test)


def test_one_style_of_pixels_is_naive_bayes_and_styles_are_mixtures(ocr, words):
    """A letter without words of its own looks like any; the others have pseudo-counts of one."""
    train, test = words[:30], words[30:]
    known = ocr.metrics.state_histogram(train.labels[train.exists], 26) > 0
    assert not known.all()
    found = ocr.table_of(train, test, ocr.Look("", 1), 5)[test.exists]
    expected = ocr.naive_bayes(train, test).table[test.exists]
    torch.testing.assert_close(found[:, known], expected[:, known])
    assert (found[:, ~known] == found[:, ~known][:, :1]).all()


def test_a_chain_of_pairs_that_knows_no_counts_is_the_chain_of_letters(ocr, words):
    first = ocr.first_order(words, 1.0, 1.0)
    pairs = ocr.second_order(words, first.initial, first.transition, 1e15)
    table = torch.randn(*words.exists.shape, 26)
    evidence = [
        recursions.log_evidence(
            chain.initial.log(),
            chain.transition.log().unsqueeze(0),
            table[..., chain.letters],
            words.lengths,
        )
        for chain in (first, pairs)
    ]
    torch.testing.assert_close(*evidence)
    assert ocr.by_step(first, table, words) == ocr.by_step(pairs, table, words)


def test_pairs_are_counted_from_the_beginning_of_a_word(ocr):
    words = Sequences.from_list([[0, 1, 2], [0, 1, 3]], labels=[[0, 1, 2], [0, 1, 3]])
    chain = ocr.second_order(words, torch.ones(26) / 26, torch.ones(26, 26) / 26, 1e-9)
    rows = chain.transition.view(27, 26, 27, 26)
    assert rows[26, 0, 0, 1].item() == pytest.approx(1.0)  # b after an a that begins a word
    assert rows[0, 1, 1, [2, 3]].tolist() == pytest.approx([0.5, 0.5])  # c or d after a, b
    torch.testing.assert_close(rows.sum((2, 3)), torch.ones(27, 26))


def test_a_lexicon_writes_its_words_and_no_other(ocr, words):
    chain = ocr.lexicon(words)
    path = recursions.viterbi(
        chain.initial.log(),
        chain.transition.log().unsqueeze(0),
        torch.randn(*words.exists.shape, len(chain.letters)),
        words.lengths,
    )
    begin = {word[: len(own)] for word in ocr.spelt(words) for own in ocr.spelt(words)}
    for states, length in zip(path, words.lengths.tolist()):
        written = tuple(chain.letters[states[:length]].tolist())
        assert any(written[: len(each)] == each for each in begin)


def test_words_apart_share_no_word(ocr):
    letters = ocr.made_up()
    apart = ocr.folds_of(letters)[ocr.APART]
    spelt = ocr.spelt(letters.data)
    homes = {}
    for word, fold in zip(spelt, apart.tolist()):
        homes.setdefault(word, set()).add(fold)
    assert all(len(each) == 1 for each in homes.values())
    assert len({fold for each in homes.values() for fold in each}) == 10
