"""The figure scripts: what they compute themselves, their results and their pictures."""

import importlib
import itertools
import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from pyrohmm import (
    DiversityPrior,
    NeuralHMM,
    Sequences,
    TabularHMM,
    bernoulli,
    blocks,
    dense,
    distributions,
    fit_em,
    msteps,
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


def test_a_fit_as_in_the_code_stops_where_its_loss_is_constant(matrix_fit, monkeypatch):
    """At the minimum for vectors of length one; Adam alone would not stop there."""
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


def test_published_log_likelihoods_are_ours_to_the_digits_printed():
    rows = json.loads((FIGURES / "published.json").read_text())["rows"]
    same = [row for row in rows if row.get("doubled", True)]
    assert len(same) == 5
    for row in same:
        rounding = max(0.5 * 10.0 ** -len(str(row["published"]).split(".")[1]), 2e-6)
        assert abs(row["log_likelihood"] - row["published"]) < rounding
        assert row.get("gap", 0.0) < 1e-3  # coefficients that they print


def test_a_step_goes_through_no_more_of_the_package_than_before(monkeypatch):
    """Bounds are what was reached; of calls and functions, which vary, a tenth more."""
    monkeypatch.syspath_prepend(FIGURES)
    most = {"fit_em": (1807, 349, 47), "fit_map": (882, 302, 45), "HMM.log_prob": (138, 86, 20)}
    for row in importlib.import_module("walk").rows():
        calls, functions, files = most[row["way"]]
        assert row["calls"] <= 1.1 * calls
        assert row["functions"] <= 1.1 * functions
        assert row["files"] <= files


# Language models ----------------------------------------------------------------------------------


def test_kneser_ney_is_its_formula_and_sums_to_one(monkeypatch):
    """Of pairs, as Chen and Goodman write it; of four symbols, over all that may follow."""
    monkeypatch.syspath_prepend(FIGURES)
    baselines = importlib.import_module("common.baselines")
    rng = np.random.default_rng(0)
    text, test = (np.append(rng.geometric(0.3, size).clip(max=8), 0) for size in (99, 20))
    pairs = Counter(itertools.pairwise([0, *text.tolist()]))

    def discounted(counts):
        ones, *more = (sum(count == k for count in counts.values()) for k in (1, 2, 3, 4))
        share = ones / max(ones + 2 * more[0], 1)
        cuts = [k - (k + 1) * share * n / max(m, 1)
                for k, (m, n) in enumerate(itertools.pairwise([ones, *more]), 1)]  # fmt: skip
        return {key: min(max(cuts[min(n, 3) - 1], 0), min(n, 3)) for key, n in counts.items()}

    before = Counter(word for _, word in pairs)  # different ones
    cut, total = discounted(before), len(pairs)
    single = {w: (before[w] - cut[w] + sum(cut.values()) / 9) / total for w in before}
    cut, wanted = discounted(pairs), []
    for first, word in itertools.pairwise([0, *test.tolist()]):
        rows = [pair for pair in pairs if pair[0] == first]
        rest = sum(cut[pair] for pair in rows) * single[word]
        counted = pairs[first, word] - cut.get((first, word), 0.0)
        wanted.append((counted + rest) / sum(pairs[pair] for pair in rows))
    found = baselines.KneserNey(text, 9, eos=0, order=2).log_probs(test)
    np.testing.assert_allclose(np.exp(found), wanted, rtol=1e-12)
    model = baselines.KneserNey(text, 9, eos=0, order=4)
    for start in range(5):
        ends = [model.log_probs(np.append(test[: start + 3], word))[-1] for word in range(9)]
        assert np.exp(ends).sum() == pytest.approx(1.0)


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
    step = msteps.FixedPoint(1000)  # from this start alone, as there
    whole = fit_em(module, train, log_prior=prior, start=start, transition_step=step).hmm(test)
    chain = ocr.first_order(train, 0.5, 0.5, prior)
    torch.testing.assert_close(chain.initial, whole.log_initial.exp())
    torch.testing.assert_close(chain.transition, whole.log_transition.exp(), atol=1e-10, rtol=0)
    table = ocr.naive_bayes(train, test).table
    torch.testing.assert_close(table, distributions.log_prob_per_state(whole.emission, test.values))
    assert ocr.by_path(chain, table, test) == ocr.accuracy(whole.viterbi(test.values), test)


def test_one_style_of_pixels_is_naive_bayes_and_styles_are_mixtures(ocr, words):
    """A letter that is absent has the distribution of all; the others have pseudo-counts of one."""
    train, test = words[:30], words[30:]
    known = train.labels[train.exists].bincount(minlength=26) > 0
    assert not known.all()
    found = ocr.table_of(train, test, ocr.Look("", 1), 5)[test.exists]
    expected = ocr.naive_bayes(train, test).table[test.exists]
    torch.testing.assert_close(found[:, known], expected[:, known])
    assert (found[:, ~known] == found[:, ~known][:, :1]).all()


def test_the_optimised_hmm_has_the_best_setting_on_held_out_words(ocr, words, monkeypatch):
    monkeypatch.setattr(ocr, "SMOOTHINGS", (0.0, 1000.0))
    monkeypatch.setattr(ocr, "POWERS", (0.001, 0.5))
    train, held = words[:25], words[25:]
    table = ocr.naive_bayes(train, held).table
    shares = {}
    for smoothing, power in itertools.product(ocr.SMOOTHINGS, ocr.POWERS):
        chain = ocr.first_order(train, *[smoothing or ocr.HARDLY] * 2)
        logs = chain.initial.log(), chain.transition.log()[None], power * table
        states = recursions.viterbi(*logs, held.lengths)
        shares[smoothing, power] = (states == held.labels)[held.exists].double().mean().item()
    assert shares[ocr.tune(train, held)] == max(shares.values()) > min(shares.values())


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


def test_a_lexicon_writes_its_words_and_no_other(ocr, words):
    chain = ocr.lexicon(words)
    path = recursions.viterbi(
        chain.initial.log(),
        chain.transition.log().unsqueeze(0),
        torch.randn(*words.exists.shape, len(chain.letters)),
        words.lengths,
    )
    spelt = ocr.spelt(words)
    prefixes = {word[: len(other)] for word in spelt for other in spelt}
    for states, length in zip(path, words.lengths.tolist()):
        written = tuple(chain.letters[states[:length]].tolist())
        assert any(written[: len(prefix)] == prefix for prefix in prefixes)


# Music --------------------------------------------------------------------------------------------


@pytest.fixture
def music(monkeypatch):
    """The script, and some chords of three keys; a fourth one is never down in training."""
    monkeypatch.syspath_prepend(FIGURES)
    script = importlib.import_module("music")
    chords = (torch.rand(9, 5, 4) < torch.tensor([0.3, 0.5, 0.7, 0.0])).double()
    lengths = torch.tensor([5, 4, 2] * 3)
    splits = {name: Sequences(chords[i : i + 3], lengths[:3])
              for i, name in ((0, "train"), (3, "valid"), (6, "test"))}  # fmt: skip
    return script, script.Music(splits)


# Pictures of large models -------------------------------------------------------------------------


@pytest.fixture
def figure(monkeypatch, tmp_path):
    """Import a script and redirect its pictures to ``tmp_path``."""
    monkeypatch.syspath_prepend(FIGURES)

    def load(name):
        script = importlib.import_module(name)
        monkeypatch.setattr(script, "FOLDER", tmp_path)
        return script

    return load


@pytest.mark.parametrize(
    "name",
    [
        "block_switches", "brown_clusters", "cooccurrence_scaling", "densehmm_matrix_fit",
        "diversified_beyond", "diversified_ocr", "diversified_tagging", "diversified_toy",
        "language_models", "large_hmm_speed", "music", "num_states", "starts", "tagging",
        "throughput",
    ],
)  # fmt: skip
def test_a_picture_is_redrawn_from_the_results_alone(figure, monkeypatch, tmp_path, name):
    script = figure(name)
    monkeypatch.setattr(sys, "argv", [name, "--draw"])
    script.main()
    assert [path.name for path in tmp_path.iterdir()] == [f"{name}.png"]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_the_straightforward_way_has_our_loss_and_our_gradient(figure, dropout):
    script = figure("large_hmm_speed")
    torch.manual_seed(0)
    three = blocks.from_clusters(torch.tensor([0, 1, 1, 2, 2, 0]), 4)
    module = NeuralHMM(12, 6, 8, blocks=three, dropout=dropout).double()
    batch = Sequences.from_list([[0, 3, 1, 5, 2], [4], [2, 2, 3]])
    found = []
    for loss in (
        lambda: script.plain_loss(module, batch),
        lambda: -module(batch.lengths).log_prob(batch.values).sum() / batch.num_observed,
    ):
        torch.manual_seed(1)
        found.append((*torch.autograd.grad(loss(), [*module.parameters()]), loss().detach()))
    torch.testing.assert_close(*found)


def test_words_that_are_kept_have_the_cluster_of_what_would_replace_them(figure):
    script = figure("tagging")
    short, whole = script.read("toy"), script.read("toy", False)
    texts = [[task.train, *task.parts.values()] for task in (short, whole)]
    for replaced, kept in zip(*texts):
        assert whole.kinds[kept.values].equal(replaced.values)
        assert kept.labels.equal(replaced.labels)
    of_symbols, of_words = script.clusters_of(short, 4), script.clusters_of(whole, 4)
    assert of_words.equal(of_symbols[whole.kinds])
    corpus, kept = script.toy(), whole.parts["test"]
    assert whole.vocabulary.decode(kept.values[kept.exists]) == corpus.vocabulary.decode(
        corpus.data.values[90:].flatten()
    )


# Baseline language models -------------------------------------------------------------------------


@pytest.fixture
def baselines(monkeypatch):
    monkeypatch.syspath_prepend(FIGURES)
    return importlib.import_module("common.baselines")


def test_the_kneser_ney_5_gram_of_the_penn_treebank_is_that_of_mikolov():
    rows = json.loads((FIGURES / "language_model_baselines.json").read_text())["rows"]
    tokens = {"Penn Treebank": (73_760, 82_430), "WikiText-2": (217_646, 245_569)}
    assert all((row["valid_tokens"], row["test_tokens"]) == tokens[row["data"]] for row in rows)
    (row,) = (row for row in rows if row["part"] == "kneser-ney-ptb")
    assert round(row["test_perplexity"], 1) == row["paper_test"]


def test_an_ngram_of_blocks_is_that_of_its_words(monkeypatch):
    """The probability of a block is the sum over its words, and that of a word the product."""
    monkeypatch.syspath_prepend(FIGURES)
    script = importlib.import_module("ngram_emission")
    text = np.random.default_rng(0).integers(0, 6, 200)  # 0 ends sentences
    block = np.array([0, 1, 2, 1, 2, 1])
    ngram, context = script.BlockNGram(text, block, 0), np.array([3, 1, 0, 2, 4])
    columns = ngram.columns(text)
    np.testing.assert_allclose(columns[:, :2].sum(-1), ngram.log_probs(text))
    for length in range(len(context) + 1):
        ends = [np.append(context[:length], word) for word in range(6)]
        of_words = np.exp([ngram.log_probs(end)[-1] for end in ends])
        last = np.stack([ngram.columns(end)[-1] for end in ends])
        np.testing.assert_allclose(np.exp(last[:, 0]), np.bincount(block, of_words)[block])
        assert len(set(last[:, 2])) == 1  # the class of what is before knows nothing of the word
        assert all(len(set(last[block == b, 3])) == 1 for b in range(3))
