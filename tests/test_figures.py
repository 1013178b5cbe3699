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
from pyro.distributions import Bernoulli

from pyrohmm import (
    HMM,
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
    known = ocr.metrics.state_histogram(train.labels[train.exists], 26) > 0
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
    spelt = ocr.spelt(words)
    prefixes = {word[: len(other)] for word in spelt for other in spelt}
    for states, length in zip(path, words.lengths.tolist()):
        written = tuple(chain.letters[states[:length]].tolist())
        assert any(written[: len(prefix)] == prefix for prefix in prefixes)


def test_words_apart_share_no_word(ocr):
    letters = ocr.made_up()
    apart = ocr.folds_of(letters)[ocr.APART]
    spelt = ocr.spelt(letters.data)
    homes = {}
    for word, fold in zip(spelt, apart.tolist()):
        homes.setdefault(word, set()).add(fold)
    assert all(len(each) == 1 for each in homes.values())
    assert len({fold for each in homes.values() for fold in each}) == 10


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


def test_columns_of_a_key_make_it_depend_on_its_last_value(music):
    _, data = music
    chords = data.splits["test"]
    up, down = torch.rand(2, 2, data.num_keys)
    initial, transition = torch.rand(2).log_softmax(-1), torch.rand(2, 2).log_softmax(-1)
    emission = Bernoulli(torch.cat([up, down], -1)).to_event(1)
    told = data.told_apart("test")
    found = HMM(initial, transition, emission, told.lengths).log_prob(told.values)
    scores = torch.zeros(3, 5, 2)
    for n, t, k, d in itertools.product(range(3), range(5), range(2), range(data.num_keys)):
        was_down = t > 0 and chords.values[n, t - 1, d] == 1
        prob = (down if was_down else up)[k, d]
        scores[n, t, k] += (prob if chords.values[n, t, d] == 1 else 1 - prob).log()
    wanted = recursions.log_evidence(initial, transition.unsqueeze(0), scores, chords.lengths)
    torch.testing.assert_close(found, wanted)


def test_both_forms_of_the_example_take_the_same_steps(music, monkeypatch):
    script, data = music
    monkeypatch.setattr(script, "EXAMPLE_BATCH", 2)
    monkeypatch.setattr(script, "MORE", 2)
    rows = script.by_example(data, "example", 2, 4)
    theirs, ours, longer = rows.values()
    assert theirs["first_and_last_loss"] == pytest.approx(ours["first_and_last_loss"], rel=1e-6)
    assert theirs["test"] == pytest.approx(ours["test"], rel=1e-4)
    assert (theirs["steps"], ours["steps"], longer["steps"]) == (4, 4, 8)
    assert longer["valid"] <= ours["valid"]


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
        "language_models", "large_hmm_speed", "music", "num_states", "tagging", "throughput",
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


def some_sentences(num_sentences, num_symbols, seed):
    """Lists of symbols, the last of which is 0 and no other; some are of nothing else."""
    rng = np.random.default_rng(seed)
    drawn = (rng.geometric(0.35, rng.integers(0, 7)) for _ in range(num_sentences))
    return [[*row.clip(1, num_symbols - 1).tolist(), 0] for row in drawn]


def by_recursion(sentences, num_symbols, order):
    """Kneser-Ney probabilities as the textbook has them, with a mark for where sentences begin."""
    begin = -1
    raw = [Counter() for _ in range(order + 1)]
    left = [{} for _ in range(order + 1)]
    for row in sentences:
        row = [begin, *row]
        for n in range(1, order + 1):
            for t in range(len(row) - n + 1):
                gram = tuple(row[t : t + n])
                raw[n][gram] += 1
                left[n].setdefault(gram, set()).add(row[t - 1] if t else None)
    counts = [{}] * (order + 1)
    for n in range(1, order + 1):
        counts[n] = {
            gram: number if n == order or gram[0] == begin else len(left[n][gram])
            for gram, number in raw[n].items()
            if gram != (begin,)
        }

    def discount(n, count):
        of = Counter(counts[n].values())
        m = min(count, 3)
        left_of_ones = of[1] / max(of[1] + 2 * of[2], 1)
        return min(max(m - (m + 1) * left_of_ones * of[m + 1] / max(of[m], 1), 0), m)

    def prob(word, context):
        n = len(context) + 1
        lower = prob(word, context[1:]) if context else 1 / num_symbols
        alike = {gram[-1]: c for gram, c in counts[n].items() if gram[:-1] == context}
        if not alike:
            return lower
        taken = sum(discount(n, count) for count in alike.values())
        own = alike.get(word, 0)
        own -= discount(n, own) if own else 0
        return (own + taken * lower) / sum(alike.values())

    return lambda row: [
        prob(row[t], tuple([begin, *row[:t]][-(order - 1) :])) for t in range(len(row))
    ]


@pytest.mark.parametrize("order", [2, 3, 5])
def test_kneser_ney_is_the_recursion_of_the_textbook(baselines, order):
    train, test = some_sentences(40, 7, 1), some_sentences(30, 8, 2)
    model = baselines.KneserNey(np.concatenate(train), 8, 0, order)
    probs = by_recursion(train, 8, order)
    expected = np.concatenate([probs(row) for row in test])
    np.testing.assert_allclose(np.exp(model.log_probs(np.concatenate(test))), expected)
    assert model.perplexity(np.concatenate(test)) == pytest.approx(np.exp(-np.log(expected).mean()))


@pytest.fixture
def networks(baselines):
    torch.manual_seed(0)
    return {
        "feed-forward": baselines.FeedForward(7, 0, dim=4),
        "lstm": baselines.LSTM(7, dim=4),
    }


@pytest.fixture
def text():
    return torch.tensor(np.concatenate(some_sentences(60, 7, 7)))


@pytest.mark.parametrize("name", ["feed-forward", "lstm"])
def test_networks_read_a_text_in_windows_as_they_read_it_whole(networks, text, name):
    model, rows = networks[name].eval(), text[:120].view(3, 40)
    whole, _ = model(rows)
    parts, earlier = [], None
    for part in rows.split([1, 2, 20, 17], 1):
        scores, earlier = model(part, earlier)
        parts.append(scores)
    torch.testing.assert_close(torch.cat(parts, 1), whole)


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
