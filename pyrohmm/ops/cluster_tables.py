"""Counts that the merges and exchanges of Brown clustering (Brown et al., 1992) keep.

With counts n, the mutual information of adjacent clusters is a sum of f(n) = n log n; all losses
are in it, so in nats times N.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_array
from scipy.special import xlogy

LISTED = 1 << 22  # numbers whose f is tabulated; above, it is computed each time
TIE = 1e-12  # nats of average mutual information; differences below it are none


class Terms:
    """f(n) = n log n of whole numbers up to N, as multiples of a step so that sums are exact."""

    def __init__(self, total: int) -> None:
        most = max(total * math.log(total), 1.0)
        self.steps = 2.0 ** math.floor(49 - math.log2(most))  # in a nat; no sum is above 8 f(N)
        self.tie = TIE * total
        self.table = self._compute(np.arange(min(total, LISTED) + 1))
        self._all_listed = total <= LISTED

    def __call__(self, numbers: np.ndarray) -> np.ndarray:
        """``n log n`` of each of the numbers."""
        # what a cluster would share with itself may be above N, and is not used
        return self.table.take(numbers, mode="clip") if self._all_listed else self._compute(numbers)

    def shared(self, one: np.ndarray, other: np.ndarray) -> np.ndarray:
        """f(m + n) - f(m) - f(n), which is zero where m or n is."""
        return self(one + other) - self(one) - self(other)

    def _compute(self, numbers: np.ndarray) -> np.ndarray:
        return np.rint(xlogy(numbers, numbers) * self.steps) / self.steps


class Words:
    """The pairs of words that are numbered by rank, with those that follow and precede each.

    ``starts`` ``(2, V + 1)``, ``others`` and ``numbers`` ``(2, M)``: those that follow word w are
    ``others[0, starts[0, w] : starts[0, w + 1]]``, as often as ``numbers`` says; in row 1, those
    that precede it.
    """

    def __init__(
        self, first: np.ndarray, second: np.ndarray, numbers: np.ndarray, size: int
    ) -> None:
        ways = [
            csr_array((numbers, places), (size, size))
            for places in ((first, second), (second, first))
        ]
        self.first, self.second, self.pairs = first, second, numbers
        self.starts = np.stack([way.indptr for way in ways]).astype(np.int64)
        self.others = np.stack([way.indices for way in ways]).astype(np.int64)
        self.numbers = np.stack([way.data for way in ways])

    def __len__(self) -> int:
        return self.starts.shape[1] - 1

    def beside(self, word: int, labels: np.ndarray, size: int) -> np.ndarray:
        """How often each of ``size`` clusters follows and precedes a word, ``(2, size)``.

        Words whose label is -1 are in none of them.
        """
        counts = []
        for way in (0, 1):
            part = slice(*self.starts[way, word : word + 2])
            places = labels[self.others[way, part]] + 1
            counts.append(np.bincount(places, self.numbers[way, part], size + 1)[1:])
        return np.stack(counts).astype(np.int64)

    def table(self, labels: np.ndarray, size: int) -> np.ndarray:
        """How often each cluster follows each, ``(size, size)``."""
        keys = labels[self.first] * size + labels[self.second]
        counts = np.bincount(keys, self.pairs, size * size)
        return counts.reshape(size, size).astype(np.int64)


class Tables(NamedTuple):
    """Counts of some clusters, and what the merge of any two would lose.

    A cluster has a slot, of ``size``. ``counts[0][a, b]`` is how often b follows a, ``counts[1]``
    its transpose; way 0 looks at what follows, way 1 at what precedes.

    Attributes:
        counts: ``(2, size, size)``.
        marginals: ``(2, size)``, row sums of ``counts``.
        shared: ``(size, size)``, sums of f(m + n) - f(m) - f(n) over cells m, n of two rows.
        loss: ``(size, size)``, what a merge would lose; infinite where there are not two clusters.
        rank: ``(size,)``, of a cluster's most frequent word; -1 where there is no cluster.
        least: ``(size,)``, the least loss of a merge with a lower rank.
        stale: ``(size,)``, whether ``least`` must be computed again.
    """

    counts: np.ndarray
    marginals: np.ndarray
    shared: np.ndarray
    loss: np.ndarray
    rank: np.ndarray
    least: np.ndarray
    stale: np.ndarray

    @classmethod
    def empty(cls, size: int) -> Tables:
        """Tables without clusters."""
        return cls(
            np.zeros((2, size, size), np.int64), np.zeros((2, size), np.int64),
            np.zeros((size, size)), np.full((size, size), np.inf), np.full(size, -1),
            np.full(size, np.inf), np.zeros(size, np.bool_),
        )  # fmt: skip
