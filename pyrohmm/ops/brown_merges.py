"""Brown clustering of words (Brown et al., 1992).

With counts n, the mutual information of adjacent clusters is a sum of f(n) = n log n; all losses
are in it, so in nats times N.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy.sparse import csr_array
from scipy.special import xlogy
from tqdm import tqdm

from .._imports import imported

LISTED = 1 << 22  # numbers whose f is tabulated; above, it is computed each time
TIE = 1e-12  # nats of average mutual information; differences below it are none


class Terms:
    """f(n) = n log n of whole numbers up to N, as multiples of a step so that sums are exact."""

    def __init__(self, total: int) -> None:
        most = max(total * math.log(total), 1.0)
        self.steps = 2.0 ** math.floor(49 - math.log2(most))  # in a nat; no sum is above 8 f(N)
        self.tie = TIE * total
        numbers = np.arange(min(total, LISTED) + 1)
        self.table = np.rint(xlogy(numbers, numbers) * self.steps) / self.steps


class Words:
    """Bigram counts of words numbered by frequency rank, by first and by second word.

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
        """Counts of each of ``size`` clusters after and before a word, ``(2, size)``.

        Words whose label is -1 are in none of them.
        """
        counts = []
        for way in (0, 1):
            part = slice(*self.starts[way, word : word + 2])
            places = labels[self.others[way, part]] + 1
            counts.append(np.bincount(places, self.numbers[way, part], size + 1)[1:])
        return np.stack(counts).astype(np.int64)

    def table(self, labels: np.ndarray, size: int) -> np.ndarray:
        """Bigram counts of clusters, ``(size, size)``."""
        keys = labels[self.first] * size + labels[self.second]
        return np.bincount(keys, self.pairs, size * size).reshape(size, size).astype(np.int64)


def _loops() -> Any:
    """The compiled loops, without which clustering would take hours."""
    try:
        return imported("._numba_clusters", __package__)
    except ImportError as error:
        raise ImportError(
            "Brown clusters need Numba. Install it with pip install 'pyrohmm[compiled]'."
        ) from error


class Candidates:
    """Candidate clusters, and the mutual information lost by each pairwise merge.

    A cluster has a slot, of ``size``. ``counts[0][a, b]`` is how often b follows a, ``counts[1]``
    its transpose; way 0 looks at what follows, way 1 at what precedes.

    Attributes:
        counts: ``(2, size, size)``.
        marginals: ``(2, size)``, row sums of ``counts``.
        shared: ``(size, size)``, sums of f(m + n) - f(m) - f(n) over cells m, n of two rows.
        loss: ``(size, size)``, what a merge would lose; infinite where there are not two clusters.
        rank: ``(size,)``, of a cluster's most frequent word; -1 where there is no cluster.
    """

    def __init__(self, size: int, terms: Terms) -> None:
        self.counts, self.marginals = (np.zeros((2, *n), np.int64) for n in ((size, size), (size,)))
        self.shared, self.loss = np.zeros((size, size)), np.full((size, size), np.inf)
        self.rank = np.full(size, -1)
        self.terms, self._loops = terms, _loops()

    def enter(self, slot: int, beside: np.ndarray, rank: int) -> None:
        """Put a cluster into a slot; ``beside`` ``(2, size)`` is what follows and precedes."""
        self.rank[slot] = rank
        loops, terms = self._loops, self.terms
        loops.call(
            loops.change_cluster, self.counts, self.marginals, self.shared, self.loss, self.rank,
            terms.table, terms.steps, slot, beside,
        )  # fmt: skip

    def merge(self, keep: int, gone: int) -> None:
        """Merge a cluster into one of lower rank."""
        beside = self.counts[:, keep] + self.counts[:, gone]
        beside[:, keep] += beside[:, gone]
        beside[:, gone] = 0
        self.loss[gone] = self.loss[:, gone] = np.inf
        self.enter(gone, np.zeros_like(beside), -1)
        self.enter(keep, beside, int(self.rank[keep]))

    def best(self) -> tuple[int, int]:
        """Pair of clusters with the least merge loss, that with the more frequent word first."""
        loops = self._loops
        best: tuple[int, int] = loops.call(loops.best_merge, self.loss, self.rank, self.terms.tie)
        return best


def merge_words(words: Words, num_clusters: int, terms: Terms, disable: bool | None) -> np.ndarray:
    """Brown's clusters of words that enter by rank: ``(V,)`` labels, ordered by their ranks."""
    size = num_clusters + 1
    candidates = Candidates(size, terms)
    labels = np.full(len(words), -1)
    members: list[list[int]] = [[] for _ in range(size)]
    free = list(range(size))
    for word in tqdm(range(len(words)), "merges", disable=disable, leave=False):
        slot = free.pop()
        labels[word] = slot
        members[slot] = [word]
        candidates.enter(slot, words.beside(word, labels, size), word)
        if not free:
            keep, gone = candidates.best()
            candidates.merge(keep, gone)
            labels[members[gone]] = keep
            members[keep] += members[gone]
            free = [gone]
    _, first, labels = np.unique(labels, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[labels]


def exchange(
    words: Words,
    labels: np.ndarray,
    num_clusters: int,
    num_sweeps: int,
    terms: Terms,
    disable: bool | None,
) -> None:
    """Move words to better clusters, in place, until none moves or the sweeps are over."""
    loops = _loops()
    table = words.table(labels, num_clusters)
    counts = np.stack([table, table.T])
    marginals, sizes = counts.sum(2), np.bincount(labels)
    for _ in tqdm(range(num_sweeps), "sweeps", disable=disable, leave=False):
        changed = loops.call(
            loops.sweep_clusters, labels, counts, marginals, sizes, words.starts, words.others,
            words.numbers, terms.table, terms.steps, terms.tie,
        )  # fmt: skip
        if not changed:
            break


def tree(words: Words, labels: np.ndarray, num_clusters: int, terms: Terms) -> list[str]:
    """Merge the clusters to one; for each, its path from the root."""
    table = words.table(labels, num_clusters)
    candidates = Candidates(num_clusters, terms)
    ranks = np.full(num_clusters, len(labels))
    np.minimum.at(ranks, labels, np.arange(len(labels)))
    present = np.zeros(num_clusters, np.int64)
    for slot in range(num_clusters):
        present[slot] = 1
        candidates.enter(slot, np.stack([table[slot], table[:, slot]]) * present, ranks[slot])
    members = [[slot] for slot in range(num_clusters)]
    paths = [""] * num_clusters
    for _ in range(num_clusters - 1):
        keep, gone = candidates.best()
        for bit, slot in zip("01", (keep, gone)):
            for label in members[slot]:
                paths[label] = bit + paths[label]
        candidates.merge(keep, gone)
        members[keep] += members[gone]
    return paths
