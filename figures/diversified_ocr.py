"""Handwritten letters: section 4.2.2 of the diversified HMM paper, Figs 10 to 12, and beyond.

Words of Kassel's data set, 128 pixels per letter, are labelled by HMMs of 26 states fitted to
labelled words: ten folds, nine for training and one for testing. The set has 6,877 images of words
but only 55 distinct words. The folds of the file share all of them, so a chain may memorise the
test words; *words apart* are folds that share none.

``baselines`` is naive Bayes, which ignores the neighbours; an HMM whose transition probabilities
are counts with pseudo-counts (``smoothing``); and an *optimised HMM*. The paper takes one of that
name from E. Krevat and E. Cuzzillo (2006), Improving Off-line Handwritten Character Recognition
with Hidden Markov Models, and says of it "with other tricks" and no more. Ours has the two tricks
that a plain HMM allows: the pseudo-counts of the chain, and a power of the likelihood of the
pixels, which naive Bayes takes for independent and so for too certain.

``diversity`` adds the determinantal
prior with weight ``alpha``, and the paper's penalty ``anchor_weight`` on the squared distance from
A_0. A_0 is the mode for ``alpha`` of zero; or, where ``anchor`` says so, counts with a pseudo-count
of one, while the likelihood has none. ``alpha`` is that of the objective; the gradient in the paper
is half of the objective's, so its alpha of 10 is 5 here. ``neighbours`` is Fig. 12: distances of
the rows of the letters x and y from those of the others.

``better`` is how well an HMM can do: several styles per letter (a mixture whose label determines
the letter only), of pixels or of normal vectors with full covariances, which are principal
components of blurred images; pseudo-counts that are uniform, proportional to letter frequencies, or
to transitions in English words; chains on pairs of letters; and, to show what the folds of the file
measure, a chain that generates its training words only. Settings are chosen for each fold by
holding out the next one of its training folds.

Decoding is the Viterbi path, but in ``better`` the most probable letter at each step. Accuracies
are shares of letters; ``low`` and ``high`` are the worst and the best fold.

Writes ``diversified_ocr.json`` and ``diversified_ocr.png``; ``better`` takes fifty minutes on one
core, and the others ten.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pyro
import torch
from common import arguments, earlier, public_files, pyplot, save, write
from common.papers import Letters, read_ocr_letters
from torch import Tensor
from torch.nn.functional import one_hot

from pyrohmm import (
    Sequences,
    TabularHMM,
    bernoulli,
    categorical,
    datasets,
    distributions,
    dpp,
    fit_em,
    metrics,
    msteps,
    normal_full,
    readers,
    recursions,
)

NAME = "diversified_ocr"
FILE, APART = SPLITS = ("folds of the file", "words apart")
TITLES = {FILE: "folds of the file, which share words", APART: "no word in both parts"}
NUM_LETTERS, HEIGHT, WIDTH = 26, 16, 8
HARDLY = 1e-6  # in place of no pseudo-counts; it determines rows without counts
SMOOTHINGS = (0.0, 0.001, 1.0, 10.0, 100.0)
POWERS = (0.25, 0.5, 0.75, 1.0, 1.5)  # of the likelihood of pixels, in the optimised HMM
ALPHAS = (0.0, 0.1, 1.0, 5.0, 10.0, 100.0, 1000.0)
ANCHOR_WEIGHTS = (0.0, 1e2, 1e5)
SMOOTHED = "pseudo-counts of one"  # in A_0 alone
OPTIMISED = "optimised HMM"

PAPER_BARS = {"naive Bayes": (0.627, 0.011), "HMM": (0.706, 0.013), "dHMM": (0.7206, 0.022)}
PAPER_ALPHAS = {0.0: 0.7102, 5.0: 0.7203}  # of Fig. 10, by alpha of the objective
PAPER_FARTHER = {"x": "gj", "y": "f"}  # from which the dHMM takes these letters further away


class Budget(NamedTuple):
    """How much is run."""

    folds: int
    alphas: tuple[float, ...]
    anchor_weights: tuple[float, ...]
    looks: tuple[Look, ...]
    iterations: int
    english: int | None = None  # number of words; all


class Look(NamedTuple):
    """The emission model: a mixture of styles, of pixels or of normal vectors."""

    name: str
    styles: int
    normal: bool = False
    pairs: bool = False  # whether to fit chains of second order too


class Chain(NamedTuple):
    """A Markov chain of letters.

    Attributes:
        initial: ``(K,)``, probabilities of the first state.
        transition: ``(K, K)``, transition probabilities.
        letters: ``(K,)``, the letter of each state.
    """

    initial: Tensor
    transition: Tensor
    letters: Tensor


LOOKS = (
    Look("pixels, 1 style", 1, pairs=True),
    Look("pixels, 16 styles", 16),
    Look("normal, 1 style", 1, normal=True),
    Look("normal, 16 styles", 16, normal=True, pairs=True),
)
FULL = Budget(10, ALPHAS, ANCHOR_WEIGHTS, LOOKS, 10)
QUICK = Budget(
    folds=2,
    alphas=(0.0, 10.0),
    anchor_weights=(0.0, 1e5),
    looks=(LOOKS[0]._replace(pairs=False), Look("normal, 2 styles", 2, normal=True, pairs=True)),
    iterations=2,
    english=1000,
)


# Words and their folds ----------------------------------------------------------------------------


def letters_of(quick: bool) -> Letters:
    """The words; a quick run uses four hundred of them, or synthetic ones if there are no data."""
    if quick and "PYROHMM_DATA" not in os.environ:
        return made_up()
    letters = read_ocr_letters(public_files.find("ocr-letters"))
    if not quick:
        return letters
    few = torch.randperm(len(letters.data), generator=torch.Generator().manual_seed(0))[:400]
    return letters._replace(data=letters.data[few], folds=letters.folds[few])


def made_up() -> Letters:
    """Frequent words of an English text, each letter a fixed image with flipped pixels."""
    generator = torch.Generator().manual_seed(0)
    tags = readers.Vocabulary(readers.LETTERS)
    shapes = torch.rand(NUM_LETTERS, HEIGHT * WIDTH, generator=generator) < 0.3
    words = [word for word, _ in Counter(english_endings()).most_common(30) if len(word) > 2]
    chosen = torch.randint(len(words), (200,), generator=generator).tolist()
    spelt = [tags.encode(words[number]) for number in chosen]
    images = []
    for word in spelt:
        turned = torch.rand(len(word), HEIGHT * WIDTH, generator=generator) < 0.2
        images.append((shapes[word] ^ turned).float())
    data = Sequences.from_list(images, labels=spelt)
    return Letters(data, tags, torch.arange(len(data)) % 10)


@cache
def english_endings() -> tuple[str, ...]:
    """Words of an English text, less their first letters, which the set does not have either."""
    return tuple(word[1:] for word in re.findall("[a-z]{2,}", datasets.english_text().lower()))


def spelt(words: Sequences) -> list[tuple[int, ...]]:
    """The letters of each word."""
    return [
        tuple(row[:length]) for row, length in zip(words.labels.tolist(), words.lengths.tolist())
    ]


def folds_of(letters: Letters) -> dict[str, Tensor]:
    """Two splits: the folds of the file, and with all copies of a word in one fold."""
    known = spelt(letters.data)
    distinct = sorted(set(known))
    order = torch.randperm(len(distinct), generator=torch.Generator().manual_seed(0)).tolist()
    place = {word: order[number] % 10 for number, word in enumerate(distinct)}
    return {FILE: letters.folds, APART: torch.tensor([place[word] for word in known])}


# Chains -------------------------------------------------------------------------------------------


def as_values(words: Sequences) -> Sequences:
    """The letters as observations, which suffice to fit the chain."""
    return Sequences(words.labels.clamp(min=0), words.lengths, labels=words.labels)


def first_order(
    words: Sequences,
    first: float | Tensor,
    transitions: float | Tensor,
    prior: dpp.DiversityPrior | None = None,
) -> Chain:
    """Posterior mode of the chain of letters given labelled words.

    With all letters known it does not depend on the images.

    Args:
        words: Labelled.
        first: Pseudo-counts of first letters.
        transitions: Pseudo-counts of transitions.
        prior: Of the diversity of rows.
    """
    module = TabularHMM(NUM_LETTERS, categorical(NUM_LETTERS), 1 + first, 1 + transitions)
    data = as_values(words)
    diverse = {} if prior is None else {"transition_step": msteps.FixedPoint(1000)}
    even = torch.full((NUM_LETTERS,), 1 / NUM_LETTERS)
    start = {  # counts would be a better start, except where two rows are equal
        "initial": even,
        "transition": 0.5 * torch.eye(NUM_LETTERS) + 0.5 * even,
        "emission.probs": even.expand(NUM_LETTERS, -1),
    }
    # all counts are known: a single iteration with a converged M-step suffices
    fit = fit_em(
        module, data, log_prior=prior, start=start, num_iterations=1, tolerance=None, **diverse
    )
    hmm = fit.hmm(data[:1])
    return Chain(hmm.log_initial.exp(), hmm.log_transition.exp(), torch.arange(NUM_LETTERS))


def shares_of_letters(words: Sequences) -> Tensor:
    """Letter frequencies, ``(26,)``."""
    counts = words.labels[words.exists].bincount(minlength=NUM_LETTERS) + 0.5
    return counts / counts.sum()


def english(count: int | None) -> Sequences:
    """The first so many words of an English text, less their first letters, labelled."""
    tags = readers.Vocabulary(readers.LETTERS)
    codes = [tags.encode(word) for word in english_endings()[:count]]
    return Sequences.from_list(codes, labels=codes)


def second_order(words: Sequences, initial: Tensor, like: Tensor, weight: float) -> Chain:
    """A chain on pairs of letters: state (a, b) is b after a, where a = 26 before a word.

    All states are known, so fitting is counting.

    Args:
        words: Labelled.
        initial: ``(26,)``, probabilities of the first letter.
        like: ``(26, 26)`` or ``(27, 26, 26)``, prior transition probabilities of pairs.
        weight: Number of pseudo-counts of each pair.
    """
    size = NUM_LETTERS
    counts = torch.zeros(size + 1, size, size)
    for word, number in Counter(spelt(words)).items():
        for a, b, c in zip((size, *word), word, word[1:]):
            counts[a, b, c] += number
    rows = counts + weight * like
    rows = rows / rows.sum(-1, keepdim=True)
    transitions = torch.zeros(size + 1, size, size + 1, size)
    for b in range(size):
        transitions[:, b, b] = rows[:, b]
    first = torch.zeros(size + 1, size)
    first[size] = initial
    count = (size + 1) * size
    return Chain(first.flatten(), transitions.reshape(count, count), torch.arange(count) % size)


def lexicon(words: Sequences) -> Chain:
    """A chain that generates these words only."""
    numbers = Counter(spelt(words))
    states = [(word, place) for word in sorted(numbers) for place in range(len(word))]
    index = {state: k for k, state in enumerate(states)}
    initial, transitions = torch.zeros(len(states)), torch.zeros(len(states), len(states))
    for (word, place), k in index.items():
        if place == 0:
            initial[k] = numbers[word] / len(words)
        transitions[k, index.get((word, place + 1), k)] = (
            1.0  # the last letter of a word is absorbing
        )
    return Chain(initial, transitions, torch.tensor([word[place] for word, place in states]))


# Letters ------------------------------------------------------------------------------------------


def one_by_one(images: Tensor, labels: Tensor | None = None) -> Sequences:
    """Images ``(M, D)`` as sequences of one step."""
    ones = torch.ones(len(images), dtype=torch.long)
    return Sequences(images.unsqueeze(1), ones, labels=None if labels is None else labels[:, None])


class Bayes(NamedTuple):
    """Naive Bayes.

    Attributes:
        prior: ``(26,)``, shares of letters.
        table: ``(N, T, 26)``, log-likelihoods of letters at each step of the test words.
    """

    prior: Tensor
    table: Tensor


def naive_bayes(train: Sequences, test: Sequences) -> Bayes:
    """An HMM of single letters; pixels have pseudo-counts of one."""
    size, pixels = NUM_LETTERS, train.values.size(-1)
    seen = train.exists
    data = one_by_one(train.values[seen], train.labels[seen])
    start = {  # all states are labelled: one iteration from any start suffices
        "initial": torch.full((size,), 1 / size),
        "transition": torch.full((size, size), 1 / size),
        "emission.probs": torch.full((size, pixels), 0.5),
    }
    module = TabularHMM(size, bernoulli(pixels, 2.0, 2.0), 1 + HARDLY)
    hmm = fit_em(module, data, start=start, num_iterations=1, tolerance=None).hmm(data[:1])
    return Bayes(hmm.log_initial.exp(), distributions.log_prob_per_state(hmm.emission, test.values))


def projection(train: Sequences, dim: int = 30, width: float = 0.7) -> Tensor:
    """Principal components of blurred images, ``(128, dim)``: ``images @ projection``.

    Args:
        train: Training words.
        dim: Number of components.
        width: Standard deviation of the blur, in pixels.
    """

    def blur(size: int) -> Tensor:
        places = torch.arange(size)
        weights = (-((places - places[:, None]) ** 2) / (2 * width**2)).exp()
        return weights / (width * math.sqrt(2 * math.pi))

    blurred = torch.kron(blur(HEIGHT), blur(WIDTH))
    covariance = torch.cov((train.values[train.exists].double() @ blurred).T)
    return blurred @ torch.linalg.eigh(covariance).eigenvectors[:, -dim:]


def table_of(train: Sequences, test: Sequences, look: Look, iterations: int) -> Tensor:
    """Log-likelihoods ``(N, T, 26)`` of letters at each step of the test words.

    The styles of a letter are the states of an HMM of its single images, whose evidence is the
    likelihood. A letter that is absent from the training words has the distribution of all.
    """
    images, labels = train.values[train.exists].double(), train.labels[train.exists]
    queried = test.values[test.exists].double()
    if look.normal:
        matrix = projection(train)
        images, queried = images @ matrix, queried @ matrix
        middle = images.mean(0)
        within = torch.zeros(len(middle), len(middle))
        for letter in labels.unique():
            centred = images[labels == letter] - images[labels == letter].mean(0)
            within += centred.T @ centred / len(images)
        within = (within + within.T) / 2
    table = torch.zeros(*test.exists.shape, NUM_LETTERS)
    for letter in range(NUM_LETTERS):
        selected = images[labels == letter]
        styles = max(1, min(look.styles, len(selected) // 10))
        if len(selected) == 0:
            selected = images
        if look.normal:  # a prior worth a hundred images
            degrees = 100.0 - selected.size(-1) - 2
            family = normal_full(selected.size(-1), middle, degrees=degrees, scale=100.0 * within)
        else:
            family = bernoulli(selected.size(-1), *((2.0, 2.0) if look.styles == 1 else (1.2, 1.2)))
        module = TabularHMM(styles, family, 2.0)
        fit = fit_em(module, one_by_one(selected), num_iterations=iterations, tolerance=1e-4)
        table[..., letter][test.exists] = metrics.log_evidence(fit, one_by_one(queried), 2000)
    return table


# Accuracy -----------------------------------------------------------------------------------------


def accuracy(decoded: Tensor, words: Sequences) -> float:
    """Share of letters that are right."""
    return (decoded == words.labels)[words.exists].double().mean().item()


def by_path(chain: Chain, table: Tensor, words: Sequences) -> float:
    """Accuracy of the most probable path."""
    logs = chain.initial.log(), chain.transition.log().unsqueeze(0), table[..., chain.letters]
    return accuracy(chain.letters[recursions.viterbi(*logs, words.lengths)], words)


def by_step(chain: Chain, table: Tensor, words: Sequences) -> float:
    """Accuracy of the most probable letter at each step."""
    logs = chain.initial.log(), chain.transition.log().unsqueeze(0), table[..., chain.letters]
    states = recursions.expected_counts(*logs, words.lengths).state_probs
    member = one_hot(chain.letters, NUM_LETTERS).to(states)
    return accuracy((states @ member).argmax(-1), words)


def alone(prior: Tensor, table: Tensor, words: Sequences) -> float:
    """Accuracy without a chain."""
    return accuracy((table + prior.log()).argmax(-1), words)


class Score:
    """Numbers by their description, one for each fold."""

    def __init__(self) -> None:
        self.values: dict[tuple[tuple[str, Any], ...], list[float]] = {}

    def add(self, value: float, **what: Any) -> None:
        """Append the number of a fold."""
        self.values.setdefault(tuple(what.items()), []).append(value)

    def rows(self) -> list[dict[str, Any]]:
        """Means, extremes and standard deviations."""
        return [
            dict(what) | {
                "ours": float(np.mean(values)), "low": min(values), "high": max(values),
                "sd": float(np.std(values, ddof=1)), "runs": len(values),
            }
            for what, values in self.values.items()
        ]  # fmt: skip


class Task(NamedTuple):
    """One fold: training and test words, and a split of the training words."""

    split: str
    train: Sequences
    test: Sequences
    held_out: tuple[Sequences, Sequences]  # a split of ``train``


def tasks(letters: Letters, budget: Budget) -> Iterable[Task]:
    """All folds of both splits."""
    for split, fold in folds_of(letters).items():
        for number in range(budget.folds):
            test, inner = fold == number, fold == (number + 1) % 10
            parts = [letters.data[each] for each in (~test, test, ~(test | inner), inner)]
            yield Task(split, parts[0], parts[1], (parts[2], parts[3]))


# The parts ----------------------------------------------------------------------------------------


class Tuning(NamedTuple):
    """Settings of the optimised HMM: pseudo-counts, and a power of the likelihood of pixels."""

    smoothing: float
    power: float


def tune(train: Sequences, held: Sequences) -> Tuning:
    """The settings of the optimised HMM with the best accuracy on held-out words."""
    table = naive_bayes(train, held).table
    shares = {}
    for smoothing in SMOOTHINGS:
        chain = first_order(train, smoothing or HARDLY, smoothing or HARDLY)
        for power in POWERS:
            shares[Tuning(smoothing, power)] = by_path(chain, power * table, held)
    return best(shares)


def baselines(letters: Letters, budget: Budget) -> list[dict[str, Any]]:
    """Naive Bayes, HMMs with transition counts, and the optimised HMM."""
    score = Score()
    chosen: dict[str, Counter[str]] = {split: Counter() for split in SPLITS}
    for split, train, test, held_out in tasks(letters, budget):
        prior, table = naive_bayes(train, test)
        even = torch.ones_like(prior)
        score.add(alone(prior, table, test), split=split, model="naive Bayes")
        score.add(alone(even, table, test), split=split, model="naive Bayes, letters alike")
        for smoothing in SMOOTHINGS:
            chain = first_order(train, smoothing or HARDLY, smoothing or HARDLY)
            what = {"split": split, "model": "HMM", "smoothing": smoothing}
            score.add(by_path(chain, table, test), **what, decoding="path")
            score.add(by_step(chain, table, test), **what, decoding="step")
        tuned = tune(*held_out)
        chosen[split][f"pseudo-counts: {tuned.smoothing:g}, power: {tuned.power:g}"] += 1
        chain = first_order(train, tuned.smoothing or HARDLY, tuned.smoothing or HARDLY)
        score.add(by_path(chain, tuned.power * table, test), split=split, model=OPTIMISED)
    rows = score.rows()
    for row in rows:
        listed = row["split"] == FILE and row["model"] in PAPER_BARS
        same = listed and row.get("smoothing", 1.0) == 1.0 and row.get("decoding") != "step"
        row["paper"], row["paper_sd"] = PAPER_BARS[row["model"]] if same else (None, None)
        if row["model"] == OPTIMISED:
            row["choices"] = dict(chosen[row["split"]])
    return rows


def variants(budget: Budget) -> list[tuple[float, str, float]]:
    """Pseudo-counts, the choice of A_0, and the weight of the distance from it."""
    mode = "the mode without diversity"
    anchored = itertools.product((0.0, 1.0), (mode,), budget.anchor_weights)
    weights = [weight for weight in budget.anchor_weights if weight > 0]
    return [*anchored, *((0.0, SMOOTHED, weight) for weight in weights)]


def diversity(letters: Letters, budget: Budget) -> list[dict[str, Any]]:
    """HMMs under the determinantal prior: Fig. 10."""
    score = Score()
    for split, train, test, _ in tasks(letters, budget):
        table = naive_bayes(train, test).table
        modes = {s: first_order(train, s or HARDLY, s or HARDLY) for s in (0.0, 1.0)}
        for smoothing, anchor, weight in variants(budget):
            at = modes[1.0 if anchor == SMOOTHED else smoothing].transition if weight else None
            without = 0.0
            for alpha in budget.alphas:
                prior = dpp.DiversityPrior(alpha, anchor=at, anchor_weight=weight)
                chain = first_order(train, smoothing or HARDLY, smoothing or HARDLY, prior)
                what = {
                    "split": split, "smoothing": smoothing, "anchor": anchor,
                    "anchor_weight": weight, "alpha": alpha,
                }  # fmt: skip
                share = by_path(chain, table, test)
                without = share if alpha == 0 else without
                score.add(share, **what, measure="accuracy")
                score.add(share - without, **what, measure="gain over alpha = 0")
                spread = dpp.log_diversity(chain.transition).item()
                score.add(spread, **what, measure="log diversity")
    rows = score.rows()
    for row in rows:
        shown = (row["split"], row["measure"], row["anchor_weight"], row["anchor"])
        as_there = shown == (FILE, "accuracy", 1e5, SMOOTHED)
        row["paper"] = PAPER_ALPHAS.get(row["alpha"]) if as_there else None
    return rows


def neighbours(letters: Letters, budget: Budget) -> list[dict[str, Any]]:
    """Distances of the rows of x and y from those of the other letters: Fig. 12.

    All words of the file are used. The HMM has pseudo-counts of one: without any, most pairs of
    rows are disjoint and their distance is infinite. The others are anchored to it (weight 1e5).
    """
    words = letters.data
    plain = first_order(words, 1.0, 1.0)

    def close(alpha: float, smoothing: float) -> Chain:
        prior = dpp.DiversityPrior(alpha, anchor=plain.transition, anchor_weight=1e5)
        return first_order(words, smoothing, smoothing, prior)

    chains = {
        "HMM": plain,
        "dHMM": close(5.0, 1.0),
        "dHMM, pseudo-counts in A_0 alone": close(5.0, HARDLY),
        "the same without diversity": close(0.0, HARDLY),
    }
    rows = []
    for model, chain in chains.items():
        apart = metrics.bhattacharyya(chain.transition)
        for letter, farther in PAPER_FARTHER.items():
            distances = apart[letters.tags.encode([letter])[0]]
            rows += [
                {
                    "model": model, "letter": letter, "other": other,
                    "ours": distances[number].item(), "paper": None, "runs": 1,
                    "paper_says_farther": other in farther,
                }
                for number, other in enumerate(letters.tags) if other != letter
            ]  # fmt: skip
        rows.append(
            {
                "model": model, "measure": "mean of all pairs", "paper": None, "runs": 1,
                "ours": metrics.diversity(chain.transition).item(),
            }
        )  # fmt: skip
    return rows


class English(NamedTuple):
    """Markov chains of the letters of English words.

    Attributes:
        first: Chain of first order.
        pairs: ``(27, 26, 26)``, probabilities of the next letter after two.
    """

    first: Chain
    pairs: Tensor


def english_chains(count: int | None) -> English:
    """Chains of both orders, each smoothed by the lower one, of the first ``count`` words."""
    words = english(count)
    first = first_order(words, 1.0, 1.0)
    pairs = second_order(words, first.initial, first.transition, 10.0).transition
    after = pairs.reshape(NUM_LETTERS + 1, NUM_LETTERS, NUM_LETTERS + 1, NUM_LETTERS)
    return English(first, after.sum(2))


def pseudo_counts(words: Sequences, text: English) -> dict[str, tuple[Any, Any]]:
    """Pseudo-counts of first letters and transitions: uniform, by letter frequency, by English."""
    shares = shares_of_letters(words)
    counts: dict[str, tuple[Any, Any]] = {
        f"even, {each:g} each": (each, each) for each in (HARDLY, 0.1, 1.0, 10.0)
    }
    for total in (300.0, 3000.0, 30000.0):
        rows = total * shares.expand(NUM_LETTERS, -1)
        counts[f"letters, {total:g} a row"] = total * shares, rows
        rows = total * text.first.transition
        counts[f"English, {total:g} a row"] = total * text.first.initial, rows
    return counts


def maker(words: Sequences, text: English) -> Callable[[str, float], Chain]:
    """A function from the name of pseudo-counts and a weight of diversity to a chain."""
    known = pseudo_counts(words, text)

    @cache
    def make(name: str, alpha: float) -> Chain:
        return first_order(words, *known[name], dpp.DiversityPrior(alpha) if alpha else None)

    return make


def best(choices: dict[Any, float]) -> Any:
    """The key of the largest number; the first among equals."""
    return max(choices, key=lambda each: choices[each])


def better(letters: Letters, budget: Budget) -> list[dict[str, Any]]:
    """The best accuracy of an HMM, with settings chosen on the training words."""
    score, text = Score(), english_chains(budget.english)
    chosen: Counter[tuple[str, str, str]] = Counter()
    for number, (split, train, test, (learnt, held)) in enumerate(tasks(letters, budget)):
        start_time = time.process_time()
        inside, outside = maker(learnt, text), maker(train, text)
        accuracies: dict[tuple[str, str], tuple[float, float]] = {}  # inside, outside
        for place, look in enumerate(budget.looks):
            pyro.set_rng_seed(100 * number + place)
            trial = table_of(learnt, held, look, budget.iterations)
            table = table_of(train, test, look, budget.iterations)
            accuracies[look.name, "no chain"] = (
                alone(shares_of_letters(learnt), trial, held),
                alone(shares_of_letters(train), table, test),
            )
            shares = {
                name: by_step(inside(name, 0.0), trial, held) for name in pseudo_counts(train, text)
            }
            name = best(shares)
            chosen[split, look.name, f"pseudo-counts: {name}"] += 1
            accuracies[look.name, "first order"] = (
                shares[name], by_step(outside(name, 0.0), table, test)
            )  # fmt: skip
            diverse = {alpha: by_step(inside(name, alpha), trial, held) for alpha in budget.alphas}
            alpha = best(diverse)
            chosen[split, look.name, f"alpha: {alpha:g}"] += 1
            accuracies[look.name, "first order, diversity"] = (
                diverse[alpha], by_step(outside(name, alpha), table, test)
            )  # fmt: skip
            if not look.pairs:
                continue

            def pairs(make: Any, words: Sequences, kind: str, weight: float, name: str = name):
                chain = make(name, 0.0)
                like = chain.transition if kind == "first order" else text.pairs
                return second_order(words, chain.initial, like, weight)

            kinds = [
                ("first order", HARDLY),
                ("first order", 10.0),
                ("English", 100.0),
                ("English", 3000.0),
            ]
            paired = {kind: by_step(pairs(inside, learnt, *kind), trial, held) for kind in kinds}
            kind = best(paired)
            chosen[split, look.name, f"pairs: {kind[0]}, {kind[1]:g}"] += 1
            accuracies[look.name, "second order"] = (
                paired[kind], by_step(pairs(outside, train, *kind), table, test)
            )  # fmt: skip
            score.add(
                by_step(lexicon(train), table, test),
                split=split, look=look.name, model="words by heart",
            )  # fmt: skip
        for (name, model), (_, share) in accuracies.items():
            score.add(share, split=split, look=name, model=model)
        for models in (["no chain"], ["first order"], ["first order", "second order"]):
            pick = best({key: share[0] for key, share in accuracies.items() if key[1] in models})
            score.add(accuracies[pick][1], split=split, look="chosen", model=" or ".join(models))
            chosen[split, "chosen", f"{' or '.join(models)}: {', '.join(pick)}"] += 1
        print(f"{time.process_time() - start_time:6.0f} s  {split}, fold {number % budget.folds}",
              flush=True)  # fmt: skip
    rows = [row | {"paper": None} for row in score.rows()]
    for row in rows:
        row["choices"] = {
            what: count
            for (split, look, what), count in chosen.items()
            if (split, look) == (row["split"], row["look"])
        }
    return rows


# Picture ------------------------------------------------------------------------------------------


def draw(rows: list[dict[str, Any]]) -> None:
    """Accuracy by alpha; by model; distances of rows."""
    plt = pyplot()
    figure, axes = plt.subplot_mosaic(
        [[*SPLITS], ["models"] * 2, *([letter] * 2 for letter in PAPER_FARTHER)],
        figsize=(10, 13), layout="constrained", height_ratios=[1.1, 1, 0.9, 0.9],
    )  # fmt: skip
    swept = [row for row in rows if row["part"] == "diversity" and row["measure"] == "accuracy"]
    lines = [
        (1.0, 0.0, False, "counts + 1, no penalty", "C0-o"),
        (1.0, 1e5, False, r"counts + 1, $\alpha_A = 10^5$", "C0:s"),
        (0.0, 0.0, False, "counts, no penalty", "C2-o"),
        (0.0, 1e5, False, r"counts, $\alpha_A = 10^5$", "C2:s"),
        (0.0, 1e5, True, r"counts, $A_0$ of counts + 1, $\alpha_A = 10^5$", "C1:^"),
    ]
    for split in SPLITS:
        panel = axes[split]
        for smoothing, weight, aside, label, style in lines:
            selected = [
                row for row in swept
                if (row["split"], row["smoothing"], row["anchor_weight"])
                == (split, smoothing, weight) and (row["anchor"] == SMOOTHED) == aside
            ]  # fmt: skip
            panel.plot(
                [2 * row["alpha"] for row in selected], [100 * row["ours"] for row in selected],
                style, label=label,
            )  # fmt: skip
        if split == FILE:
            panel.plot(
                [2 * alpha for alpha in PAPER_ALPHAS],
                [100 * share for share in PAPER_ALPHAS.values()],
                "k*--", markersize=10, label="paper, Fig. 10", linewidth=0.8,
            )  # fmt: skip
        panel.set_xscale("symlog", linthresh=0.2)
        ticks = [2 * alpha for alpha in ALPHAS if alpha != 1.0]
        panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        panel.set_xlabel(r"$\alpha$, in the convention of the paper")
        panel.set_ylabel("letter accuracy, %, mean of ten folds")
        panel.set_title(TITLES[split])
    # where the other panel leaves room
    axes[APART].legend(*axes[FILE].get_legend_handles_labels(), loc=(0.02, 0.48))
    _models(axes["models"], rows)
    distances = [row for row in rows if row["part"] == "neighbours" and "letter" in row]
    models = list(dict.fromkeys(row["model"] for row in distances))
    labels = {"the same without diversity": r"the same with $\alpha = 0$"}
    for letter in PAPER_FARTHER:
        panel = axes[letter]
        for place, model in enumerate(models):
            selected = [
                row for row in distances if (row["model"], row["letter"]) == (model, letter)
            ]
            panel.plot(
                np.arange(len(selected)) + 0.2 * (place - 1.5),
                [row["ours"] for row in selected], "soD^"[place], markersize=4,
                label=labels.get(model, model).replace("A_0", "$A_0$"),
            )  # fmt: skip
        panel.set_xticks(range(len(selected)), [row["other"] for row in selected])
        for place, row in enumerate(selected):
            if row["paper_says_farther"]:
                panel.axvspan(place - 0.5, place + 0.5, color="0.85", zorder=0,
                              label="farther away in the paper")  # fmt: skip
        panel.set(xlim=(-0.6, len(selected) - 0.4), ylabel="nats")
        panel.set_title(
            f"Bhattacharyya distance of the row of {letter} from those of other letters"
        )
        panel.grid(visible=False, axis="x")
    handles = dict(zip(*axes["x"].get_legend_handles_labels()[::-1]))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=5)
    save(figure, NAME)


def _models(panel: Any, rows: list[dict[str, Any]]) -> None:
    """Accuracies of models, on both splits, beside those of the paper."""
    names = {
        "naive Bayes": {"part": "baselines", "model": "naive Bayes"},
        "HMM, counts + 1": {"part": "baselines", "smoothing": 1.0, "decoding": "path"},
        "HMM, counts": {"part": "baselines", "smoothing": 0.0, "decoding": "path"},
        OPTIMISED: {"part": "baselines", "model": OPTIMISED},
        "16 styles\nof pixels": {"look": "pixels, 16 styles", "model": "first order"},
        "16 normal\nstyles": {"look": "normal, 16 styles", "model": "first order"},
        "normal styles,\n2nd order": {"look": "normal, 16 styles", "model": "second order"},
    }
    for split, colour, marker, shift in ((FILE, "C0", "o", -0.12), (APART, "C1", "s", 0.12)):
        for place, what in enumerate(names.values()):
            for row in rows:
                if all(row.get(key) == value for key, value in ({"split": split} | what).items()):
                    panel.errorbar(
                        place + shift, 100 * row["ours"], 100 * row["sd"], fmt=marker, ms=6,
                        color=colour, label=TITLES[split] if place == 0 else None,
                    )  # fmt: skip
    for model, (mean, sd) in PAPER_BARS.items():
        place, marker = {"naive Bayes": (-0.3, "*"), "HMM": (0.68, "*"), "dHMM": (0.56, "P")}[model]
        panel.errorbar(
            place, 100 * mean, 100 * sd, fmt=marker, color="k", markersize=8,
            label={"HMM": "paper, without the prior", "dHMM": "paper, with it"}.get(model),
        )  # fmt: skip
    panel.set_xticks(range(len(names)), list(names))
    panel.set_xlim(-0.6, len(names) - 0.4)
    panel.set_ylabel("letter accuracy, %, and\ndeviation over ten folds")
    panel.legend(loc="upper left")
    panel.grid(visible=False, axis="x")


def main() -> None:
    """Fit and test, then write."""
    parts = (baselines, diversity, neighbours, better)
    options = arguments(__doc__, [part.__name__ for part in parts])
    if options.draw:
        draw(earlier(NAME))
        return
    pyro.enable_validation(False)
    torch.set_default_dtype(torch.float64)
    letters, budget = letters_of(options.quick), QUICK if options.quick else FULL
    old = earlier(NAME)
    rows = []
    for part in parts:
        results = [row for row in old if row["part"] == part.__name__]
        old = [row for row in old if row["part"] != part.__name__]
        if part.__name__ in options.only:
            pyro.set_rng_seed(0)
            results = [{"part": part.__name__, **row} for row in part(letters, budget)]
            print(f"{part.__name__}: {len(results)} rows")
        rows += results
        if not options.quick:
            write(NAME, rows + old)  # each part as soon as it is there
    print(f"{sum(os.times()[:4]):.0f} seconds of processor time")
    if not options.quick:
        draw(rows)


if __name__ == "__main__":
    main()
