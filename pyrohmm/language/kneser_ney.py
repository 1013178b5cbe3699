r"""``ngram``: interpolated Kneser-Ney n-grams with three discounts, alone or for ``NGramMixture``.

V symbols. With c the count of an n-gram (of those shorter than the order, the number of distinct
symbols before it, but of those that begin a sequence their count), n_i the number of n-grams of
this length with count i, and h the symbols before x, of which h' are all but the first,

.. math::
    q(x | h) = \frac{c(h x) - D_{c(h x)}}{c(h \cdot)}
    + \frac{\sum_{x'} D_{c(h x')}}{c(h \cdot)} \, q(x | h'), \qquad
    D_i = i - (i + 1) \frac{n_1}{n_1 + 2 n_2} \frac{n_{i+1}}{n_i}, \quad i = 1, 2, 3,

with :math:`D_3` for all higher counts, and below unigrams the uniform distribution 1 / V. Nothing
is cut off, and nothing is tuned. The start of a sequence is a symbol of its own before it, which is
never predicted; n-grams do not span sequences.

References:
    An Empirical Study of Smoothing Techniques for Language Modeling (Chen and Goodman, 1999)
    Scalable Modified Kneser-Ney Language Model Estimation (Heafield et al., 2013), for n-grams at
    the start of a sentence.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from .._checks import check_integers, check_range, check_shape, check_size
from ..analysis.metrics import Perplexity
from ..data.sequences import Sequences, check_sequences
from ..ops.blocks.states import Blocks

QUARTERS = (0.25, 0.5, 0.75)  # where classes of back-off weights and of shares end


class Level(NamedTuple):
    """The n-grams of one length.

    Attributes:
        keys: V + 1 times the number of the first n - 1 symbols among the shorter n-grams, plus the
            last symbol; sorted.
        share: Discounted count of each n-gram, divided by the total count of its context; and a
            zero at the end, for n-grams that do not occur.
        rest: Back-off weight of each shorter n-gram, and a one.
    """

    keys: np.ndarray
    share: np.ndarray
    rest: np.ndarray


class NGram:
    """Interpolated Kneser-Ney n-gram, as :func:`ngram` counts it.

    Attributes:
        levels: The n-grams of length 1, 2, ..., the order.
        num_symbols: V.
    """

    def __init__(self, levels: list[Level], num_symbols: int) -> None:
        self.levels, self.num_symbols = levels, num_symbols

    def __repr__(self) -> str:
        counts = ", ".join(f"{len(level.keys):,}" for level in self.levels)
        return f"NGram({counts} n-grams of length 1 to {self.order})"

    @property
    def order(self) -> int:
        """Length of the longest n-grams."""
        return len(self.levels)

    @property
    def num_classes(self) -> int:
        """Number of classes of either kind in :meth:`with_blocks`."""
        return 4 * self.order

    def log_prob(self, data: Sequences) -> Tensor:
        """Log-probability of each sequence, ``(N,)`` float64, in nats.

        Raises:
            ValueError: If a step is missing, or a symbol is not below V.

        Example:
            >>> words = Sequences.from_list([[0, 1, 2], [0, 2, 1, 2], [1, 2]])
            >>> found = language.ngram(words, num_symbols=3, order=2)
            >>> found.log_prob(Sequences.from_list([[1], [2]])).exp()  # after the start
            tensor([0.2870, 0.2037], dtype=torch.float64)
        """
        text = _with_starts(data, self.num_symbols)
        probs = np.full(len(text), 1 / self.num_symbols)
        for level, before, codes in self._walk(text):
            probs = level.share[codes] + level.rest[before] * probs
        sums = np.add.reduceat(np.log(probs[text < self.num_symbols]), data.firsts.cpu().numpy())
        return torch.from_numpy(sums).to(data.values.device)

    def perplexity(self, data: Sequences) -> Perplexity:
        """Perplexity per symbol.

        Example:
            >>> words = Sequences.from_list([[0, 1, 2], [0, 2, 1, 2], [1, 2]])
            >>> print(language.ngram(words, num_symbols=3, order=3).perplexity(words))
            perplexity 1.72 over 9 tokens
        """
        return Perplexity.of(self.log_prob(data).sum().item(), data.num_observed)

    def with_blocks(self, data: Sequences, blocks: Blocks) -> Sequences:
        """The data with the n-gram as covariates, for an :class:`NGramMixture` with these blocks.

        Classes of what is before a symbol are, for its block, the length of the longest context
        that occurs and the back-off weight from it, in quarters; for the symbol in its block, the
        longest context in which a symbol of the block occurs and the share of these in the
        probability of the block, in quarters: :attr:`num_classes` of each.

        Args:
            data: Sequences that the n-gram has not counted: of those it has, it is far too sure.
            blocks: Of the states, as of ``NeuralHMM(..., blocks=...)``.

        Returns:
            The sequences of symbols, with covariates ``(N, T, 4)``, the columns of
            :class:`~pyrohmm.language.NGramProbs`.

        Raises:
            ValueError: If a step is missing, a symbol is not below V, or the blocks are not of V
                symbols.

        Example:
            >>> words = Sequences.from_list([[0, 1, 2], [0, 2, 1, 2], [1, 2]])
            >>> found = language.ngram(words, num_symbols=3, order=2)
            >>> two = blocks.from_clusters(torch.tensor([0, 0, 1]), 2)
            >>> found.with_blocks(Sequences.from_list([[1], [2]]), two).covariates[:, 0, :2].exp()
            tensor([[0.7963, 0.3605],
                    [0.2037, 1.0000]])
        """
        symbol_block = blocks.symbol_block
        check_shape("blocks.symbol_block", symbol_block, (self.num_symbols,), "(V,)")
        of, count, size = symbol_block.numpy(), blocks.num_blocks, self.num_symbols + 1
        text = _with_starts(data, self.num_symbols)
        target = np.append(of, 0)[text]  # anything at starts
        probs = np.full(len(text), 1 / self.num_symbols)
        block_probs = probs * np.bincount(of)[target]
        known, rest, inside, share = np.zeros((4, len(text)))
        for length, (level, before, codes) in enumerate(self._walk(text)):
            back_off = level.rest[before]
            probs = level.share[codes] + back_off * probs
            pairs = level.keys // size * count + of[level.keys % size]
            kinds, place = np.unique(pairs, return_inverse=True)
            sums = np.append(np.bincount(place, level.share[:-1]), 0.0)
            found = _find(kinds, before * count + target, before >= 0)
            block_probs = sums[found] + back_off * block_probs
            longer = (before >= 0) & (back_off < 1)
            known, rest = np.where(longer, length, known), np.where(longer, back_off, rest)
            inside = np.where(found >= 0, length, inside)
            share = np.where(found >= 0, sums[found] / block_probs, share)
        columns = [
            np.log(block_probs),
            np.log(probs / block_probs),
            4 * known + np.digitize(rest, QUARTERS),
            4 * inside + np.digitize(share, QUARTERS),
        ]
        covariates = torch.from_numpy(np.stack(columns, -1)[text < self.num_symbols])
        covariates = covariates.to(data.values.device, torch.get_default_dtype())
        values = cast(Tensor, data.packed("values"))
        return Sequences.from_concatenated(values, data.lengths, covariates=covariates)

    def _walk(self, text: np.ndarray) -> Iterator[tuple[Level, np.ndarray, np.ndarray]]:
        """Each level, with the contexts and the n-grams ``(M,)`` of a text; -1 if there is none."""
        codes = text
        yield self.levels[0], np.zeros(len(text), int), text
        for level in self.levels[1:]:
            before = np.append(-1, codes[:-1])
            codes = _find(level.keys, before * (self.num_symbols + 1) + text, before >= 0)
            yield level, before, codes


def ngram(data: Sequences, num_symbols: int, order: int = 5) -> NGram:
    r"""Count an interpolated Kneser-Ney n-gram with three discounts of each length.

    The perplexity of the Penn Treebank by its 5-gram is 141.2, as published. It is the usual
    baseline of a language model, and mixed with one (:class:`NGramMixture`) it lowers the
    perplexity of both.

    Where few n-grams of a length have counts of 1 to 3, so that the formula has no discounts
    between 0 and i, they are 0.5, 1 and 1.5.

    Args:
        data: Sequences of symbols, all observed; of sentences, with their ``<eos>``.
        num_symbols: V, of the vocabulary: symbols that do not occur have a probability as well.
        order: Length of the longest n-grams.

    Raises:
        TypeError: If the values are not integers.
        ValueError: If a step is missing, or a symbol is not below V.

    Example:
        >>> words = Sequences.from_list([[0, 1, 2], [0, 2, 1, 2], [1, 2]])
        >>> language.ngram(words, num_symbols=4, order=3)
        NGram(4, 6, 6 n-grams of length 1 to 3)
    """
    check_size("order", order)
    check_size("num_symbols", num_symbols)
    text, size = _with_starts(data, num_symbols), num_symbols + 1
    codes, keys = text, np.arange(num_symbols)
    counts = np.bincount(text, minlength=size)[:-1]
    levels = list[Level]()
    for _ in range(order - 1):
        before = np.append(-1, codes[:-1])
        exists = (before >= 0) & (text < num_symbols)
        longer, numbers = np.unique((before * size + text)[exists], return_inverse=True)
        suffixes = np.empty(len(longer), int)
        suffixes[numbers] = codes[exists]
        preceding = np.bincount(suffixes, minlength=len(keys))
        levels.append(_level(keys, np.where(preceding > 0, preceding, counts), levels, size))
        codes = np.full(len(text), -1)
        codes[exists] = numbers
        keys, counts = longer, np.bincount(numbers)
    return NGram([*levels, _level(keys, counts, levels, size)], num_symbols)


def _with_starts(data: Sequences, num_symbols: int) -> np.ndarray:
    """All symbols one after another, with V before each sequence."""
    check_sequences("data", data)
    check_integers("values of data", data.known_values)
    if len(data.shape) != 2 or data.has_gaps:
        text = f"data must be (N, T) symbols, all observed; got {data.shape}"
        gaps = " with missing steps" if data.has_gaps else ""
        raise ValueError(f"{text}{gaps}. Cut sequences where a step is missing.")
    check_range("values of data", data.known_values, num_symbols, "V - 1")
    values, firsts = (part.cpu().numpy() for part in (data.known_values, data.firsts))
    return np.insert(values.astype(np.int64), firsts, num_symbols)


def _level(keys: np.ndarray, counts: np.ndarray, shorter: list[Level], size: int) -> Level:
    """Shares and back-off weights of n-grams with these counts."""
    discounts = _discounts(counts)[np.minimum(counts, 3)]
    parents = keys // size
    num_parents = 1 if not shorter else size if len(shorter) == 1 else len(shorter[-1].keys)
    totals = np.bincount(parents, counts, num_parents)
    rest = np.ones(num_parents + 1)
    np.divide(np.bincount(parents, discounts, num_parents), totals, rest[:-1], where=totals > 0)
    return Level(keys, np.append((counts - discounts) / totals.clip(min=1)[parents], 0.0), rest)


def _discounts(counts: np.ndarray) -> np.ndarray:
    """Discounts of the counts 0, 1, 2, and 3 or more."""
    of = np.bincount(counts, minlength=5)[:5]  # counts of counts
    small = np.arange(1, 4)
    ones = of[1] / max(of[1] + 2 * of[2], 1)
    discounts = small - (small + 1) * ones * of[2:] / np.maximum(of[1:4], 1)
    if not (of[1:4] > 0).all() or not ((discounts > 0) & (discounts <= small)).all():
        discounts = 0.5 * small
    return np.append(0.0, discounts)


def _find(keys: np.ndarray, wanted: np.ndarray, possible: np.ndarray) -> np.ndarray:
    """Place of each wanted number among sorted ``keys``; -1 if it is not there."""
    if len(keys) == 0:
        return np.full(len(wanted), -1)
    places = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
    return np.where((keys[places] == wanted) & possible, places, -1)
