"""The merges and exchanges of Brown clustering (Brown et al., 1992) by numpy.

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
        least: ``(size,)``, the least loss of a merge with a lower rank; for compiled loops only.
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


def best_merge(tables: Tables, terms: Terms) -> tuple[int, int]:
    """The two clusters whose merge loses least, that with the more frequent word first."""
    low, high = np.nonzero(tables.loss <= tables.loss.min() + terms.tie)
    first = np.lexsort((tables.rank[high], tables.rank[low]))[0]
    return int(low[first]), int(high[first])


def enter_cluster(tables: Tables, terms: Terms, slot: int) -> None:
    """Update the tables for a new cluster whose counts stand in ``slot``."""
    shared = terms.shared
    total = np.zeros(len(tables.rank))
    for way in (0, 1):
        contexts, sums = tables.counts[1 - way], tables.marginals[way]
        more = contexts[slot]  # of each row's cells, the new one
        rows = np.flatnonzero(more)
        rows = rows[rows != slot]
        gain = shared(more[rows, None], more)
        grown = sums + more
        _add(tables, rows, gain, shared(sums[rows, None], sums) - shared(grown[rows, None], grown))
        sums[:] = grown
        row = tables.counts[way, slot]
        sums[slot] = row.sum()
        cells = np.flatnonzero(row)
        total += shared(row[cells, None], contexts[cells]).sum(0)
    _price(tables, terms, slot, total)


def merge_clusters(tables: Tables, terms: Terms, keep: int, gone: int) -> None:
    """Merge cluster ``gone`` into ``keep``."""
    shared = terms.shared
    total = tables.shared[keep].copy()
    for way in (0, 1):
        contexts = tables.counts[1 - way]
        one, other = contexts[[keep, gone]]  # two cells of each row, which become one
        rows = _beside(other, keep, gone)
        gain = (
            shared((one + other)[rows, None], one + other)
            - shared(one[rows, None], one)
            - shared(other[rows, None], other)
        )
        _add(tables, rows, gain, 0.0)
        row, more = tables.counts[way, [keep, gone]]  # two rows, which become one
        cells = _beside(more, keep, gone)
        old, new = row[cells, None], (row + more)[cells, None]
        total += (shared(new, contexts[cells]) - shared(old, contexts[cells])).sum(0)
        inside = (row + more)[[keep, gone]].sum()
        total += shared(inside, one + other) - shared(row[keep], one) - shared(row[gone], other)
    for table in tables.counts:
        table[keep] += table[gone]
        table[:, keep] += table[:, gone]
        table[gone] = table[:, gone] = 0
    tables.marginals[:, keep] += tables.marginals[:, gone]
    tables.marginals[:, gone] = 0
    tables.loss[gone] = tables.loss[:, gone] = np.inf
    tables.rank[gone] = -1
    _price(tables, terms, keep, total)


def _beside(cells: np.ndarray, keep: int, gone: int) -> np.ndarray:
    """Where ``cells`` are not zero, except at two."""
    places = np.flatnonzero(cells)
    return places[(places != keep) & (places != gone)]


def _add(tables: Tables, rows: np.ndarray, gain: np.ndarray, rise: np.ndarray | float) -> None:
    """Add to what ``rows`` share with all, ``(R, size)``, and to what their merges keep."""
    tables.shared[rows] += gain
    tables.shared[:, rows] = tables.shared[rows].T
    tables.loss[rows] -= gain + rise
    tables.loss[:, rows] = tables.loss[rows].T


def _price(tables: Tables, terms: Terms, slot: int, total: np.ndarray) -> None:
    """Write what a cluster shares with each, and what their merges would lose."""
    f, shared = terms, terms.shared
    own, (after, before) = tables.counts[0, slot, slot], tables.counts[:, slot]
    inner = tables.counts[0].diagonal()
    loss = sum(shared(sums[slot], sums) for sums in tables.marginals) - total
    # the four cells of the two become one, which are not pairs of cells of two rows
    loss += f(own + before) + f(own + after) + f(inner + before) + f(inner + after)
    loss -= f(own) + f(before) + f(after) + f(inner) + f(own + before + after + inner)
    loss[tables.rank < 0] = loss[slot] = np.inf
    tables.shared[slot] = tables.shared[:, slot] = total
    tables.loss[slot] = tables.loss[:, slot] = loss


def sweep_clusters(
    words: Words,
    labels: np.ndarray,
    counts: np.ndarray,
    marginals: np.ndarray,
    sizes: np.ndarray,
    f: Terms,
) -> int:
    """Give each word in turn its best cluster; the number of those that changed."""
    changed = 0
    for word in range(len(words)):
        old = labels[word]
        if sizes[old] == 1:
            continue
        labels[word] = len(sizes)  # apart from the others
        beside = words.beside(word, labels, len(sizes) + 1)
        own, beside = beside[0, -1], beside[:, :-1]
        totals = beside.sum(1) + own
        _shift(counts, marginals, old, beside, own, -1)
        inner = counts[0].diagonal()
        gain = f(inner + beside.sum(0) + own) - f(inner)
        for way in (0, 1):
            near = np.flatnonzero(beside[way])
            cells = counts[1 - way, near]
            gain += (f(cells + beside[way, near, None]) - f(cells)).sum(0)
            gain -= f(inner + beside[way]) - f(inner)  # the cell that is in gain already
            gain -= f(marginals[way] + totals[way]) - f(marginals[way])
        new = int((gain >= gain.max() - f.tie).argmax())
        if gain[new] <= gain[old] + f.tie:
            new = old
        _shift(counts, marginals, new, beside, own, 1)
        labels[word] = new
        sizes[old] -= 1
        sizes[new] += 1
        changed += new != old
    return changed


def _shift(
    counts: np.ndarray, marginals: np.ndarray, label: int, beside: np.ndarray, own: int, sign: int
) -> None:
    """Add a word to a cluster, or take it out."""
    for way in (0, 1):
        counts[way, label] += sign * beside[way]
        counts[way, :, label] += sign * beside[1 - way]
        counts[way, label, label] += sign * own
        marginals[way, label] += sign * (beside[way].sum() + own)
