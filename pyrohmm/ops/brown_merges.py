"""How the clusters of Brown et al. (1992) are found: see :func:`pyrohmm.clusters.brown`."""

from __future__ import annotations

import math

import numpy as np
from scipy.sparse import csr_array
from scipy.special import xlogy
from tqdm import tqdm

from . import lookup

LISTED = 1 << 22  # numbers whose f is listed; above, it is computed each time
TIE = 1e-12  # nats of average mutual information; merges and moves that differ by less are equal


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
        found = []
        for way in (0, 1):
            part = slice(*self.starts[way, word : word + 2])
            places = labels[self.others[way, part]] + 1
            found.append(np.bincount(places, self.numbers[way, part], size + 1)[1:])
        return np.stack(found).astype(np.int64)

    def table(self, labels: np.ndarray, size: int) -> np.ndarray:
        """How often each cluster follows each, ``(size, size)``."""
        keys = labels[self.first] * size + labels[self.second]
        found = np.bincount(keys, self.pairs, size * size)
        return found.reshape(size, size).astype(np.int64)


class Window:
    """Some clusters, and what the merge of any two would lose: f is summed, so nats times N.

    A cluster has a slot, of ``size``. ``counts[0][a, b]`` is how often b follows a, ``counts[1]``
    its transpose; way 0 is to look at what follows, way 1 at what precedes.

    ``counts``     ``(2, size, size)``
    ``marginals``  ``(2, size)``     row sums of ``counts``
    ``shared``     ``(size, size)``  sums of f(m + n) - f(m) - f(n) over cells m, n of two rows
    ``loss``       ``(size, size)``  what a merge would lose; infinite where there are not two
    ``rank``       ``(size,)``       of a cluster's most frequent word; -1 where there is none
    """

    def __init__(self, size: int, terms: Terms) -> None:
        self.terms = terms
        self.counts = np.zeros((2, size, size), np.int64)
        self.marginals = np.zeros((2, size), np.int64)
        self.shared = np.zeros((size, size))
        self.loss = np.full((size, size), np.inf)
        self.rank = np.full(size, -1)
        self._least, self._stale = np.full(size, np.inf), np.zeros(size, np.bool_)
        self._compiled = lookup.kernels("_numba_clusters")

    def _arrays(self) -> tuple[np.ndarray, ...]:
        tables = self.counts, self.marginals, self.shared, self.loss, self.rank
        return *tables, self._least, self._stale

    def enter(self, slot: int, beside: np.ndarray, rank: int) -> None:
        """Put a cluster into a free slot; ``beside`` ``(2, size)`` is what follows and precedes."""
        self.rank[slot] = rank
        for way in (0, 1):
            self.counts[way, slot] = beside[way]
            self.counts[way, :, slot] = beside[1 - way]
        if self._compiled is not None:
            self._compiled.enter_cluster(*self._arrays(), self.terms.table, self.terms.steps, slot)
        else:
            self._enter(slot)

    def merge(self, keep: int, gone: int) -> None:
        """Merge a cluster into one of lower rank."""
        if self._compiled is not None:
            self._compiled.merge_clusters(
                *self._arrays(), self.terms.table, self.terms.steps, keep, gone
            )
        else:
            self._merge(keep, gone)

    def best(self) -> tuple[int, int]:
        """The two clusters whose merge loses least, that with the more frequent word first."""
        if self._compiled is not None:
            return self._compiled.best_merge(*self._arrays()[3:], self.terms.tie)
        low, high = np.nonzero(self.loss <= self.loss.min() + self.terms.tie)
        first = np.lexsort((self.rank[high], self.rank[low]))[0]
        return int(low[first]), int(high[first])

    def _enter(self, slot: int) -> None:
        shared = self.terms.shared
        total = np.zeros(len(self.rank))
        for way in (0, 1):
            contexts, sums = self.counts[1 - way], self.marginals[way]
            more = contexts[slot]  # of each row's cells, the new one
            rows = np.flatnonzero(more)
            rows = rows[rows != slot]
            gain = shared(more[rows, None], more)
            grown = sums + more
            self._add(rows, gain, shared(sums[rows, None], sums) - shared(grown[rows, None], grown))
            sums[:] = grown
            row = self.counts[way, slot]
            sums[slot] = row.sum()
            cells = np.flatnonzero(row)
            total += shared(row[cells, None], contexts[cells]).sum(0)
        self._price(slot, total)

    def _merge(self, keep: int, gone: int) -> None:
        shared = self.terms.shared
        total = self.shared[keep].copy()
        for way in (0, 1):
            contexts = self.counts[1 - way]
            one, other = contexts[[keep, gone]]  # two cells of each row, which become one
            rows = self._beside(other, keep, gone)
            gain = (
                shared((one + other)[rows, None], one + other)
                - shared(one[rows, None], one)
                - shared(other[rows, None], other)
            )
            self._add(rows, gain, 0.0)
            row, more = self.counts[way, [keep, gone]]  # two rows, which become one
            cells = self._beside(more, keep, gone)
            old, new = row[cells, None], (row + more)[cells, None]
            total += (shared(new, contexts[cells]) - shared(old, contexts[cells])).sum(0)
            inside = (row + more)[[keep, gone]].sum()
            total += shared(inside, one + other) - shared(row[keep], one) - shared(row[gone], other)
        for table in self.counts:
            table[keep] += table[gone]
            table[:, keep] += table[:, gone]
            table[gone] = table[:, gone] = 0
        self.marginals[:, keep] += self.marginals[:, gone]
        self.marginals[:, gone] = 0
        self.loss[gone] = self.loss[:, gone] = np.inf
        self.rank[gone] = -1
        self._price(keep, total)

    def _beside(self, cells: np.ndarray, keep: int, gone: int) -> np.ndarray:
        found = np.flatnonzero(cells)
        return found[(found != keep) & (found != gone)]

    def _add(self, rows: np.ndarray, gain: np.ndarray, rise: np.ndarray | float) -> None:
        """Add to what ``rows`` share with all, ``(R, size)``, and to what their merges keep."""
        self.shared[rows] += gain
        self.shared[:, rows] = self.shared[rows].T
        self.loss[rows] -= gain + rise
        self.loss[:, rows] = self.loss[rows].T

    def _price(self, slot: int, total: np.ndarray) -> None:
        """Write what a cluster shares with each, and what their merges would lose."""
        f, shared = self.terms, self.terms.shared
        own, (after, before) = self.counts[0, slot, slot], self.counts[:, slot]
        inner = self.counts[0].diagonal()
        loss = sum(shared(sums[slot], sums) for sums in self.marginals) - total
        # the four cells of the two become one, which are not pairs of cells of two rows
        loss += f(own + before) + f(own + after) + f(inner + before) + f(inner + after)
        loss -= f(own) + f(before) + f(after) + f(inner) + f(own + before + after + inner)
        loss[self.rank < 0] = loss[slot] = np.inf
        self.shared[slot] = self.shared[:, slot] = total
        self.loss[slot] = self.loss[:, slot] = loss


def merge_words(words: Words, num_clusters: int, terms: Terms, disable: bool | None) -> np.ndarray:
    """Brown's clusters of words that enter by rank: ``(V,)`` labels, ordered by their ranks."""
    size = num_clusters + 1
    window = Window(size, terms)
    labels = np.full(len(words), -1)
    members: list[list[int]] = [[] for _ in range(size)]
    free = list(range(size))
    for word in tqdm(range(len(words)), "merges", disable=disable, leave=False):
        slot = free.pop()
        labels[word] = slot
        members[slot] = [word]
        window.enter(slot, words.beside(word, labels, size), word)
        if not free:
            keep, gone = window.best()
            window.merge(keep, gone)
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
    compiled = lookup.kernels("_numba_clusters")
    table = words.table(labels, num_clusters)
    counts = np.stack([table, table.T])
    marginals = counts.sum(2)
    sizes = np.bincount(labels)
    for _ in tqdm(range(num_sweeps), "sweeps", disable=disable, leave=False):
        if compiled is not None:
            moved = compiled.sweep_clusters(
                labels, counts, marginals, sizes, words.starts, words.others, words.numbers,
                terms.table, terms.steps, terms.tie,
            )  # fmt: skip
        else:
            moved = _sweep(words, labels, counts, marginals, sizes, terms)
        if moved == 0:
            break


def _sweep(
    words: Words,
    labels: np.ndarray,
    counts: np.ndarray,
    marginals: np.ndarray,
    sizes: np.ndarray,
    f: Terms,
) -> int:
    """Give each word in turn its best cluster; the number of those that moved."""
    moved = 0
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
        moved += new != old
    return moved


def _shift(
    counts: np.ndarray, marginals: np.ndarray, label: int, beside: np.ndarray, own: int, sign: int
) -> None:
    """Add a word to a cluster, or take it out."""
    for way in (0, 1):
        counts[way, label] += sign * beside[way]
        counts[way, :, label] += sign * beside[1 - way]
        counts[way, label, label] += sign * own
        marginals[way, label] += sign * (beside[way].sum() + own)


def tree(words: Words, labels: np.ndarray, num_clusters: int, terms: Terms) -> list[str]:
    """Merge the clusters to one; for each, its path from the root."""
    table = words.table(labels, num_clusters)
    window = Window(num_clusters, terms)
    ranks = np.full(num_clusters, len(labels))
    np.minimum.at(ranks, labels, np.arange(len(labels)))
    present = np.zeros(num_clusters, np.int64)
    for slot in range(num_clusters):
        present[slot] = 1
        window.enter(slot, np.stack([table[slot], table[:, slot]]) * present, ranks[slot])
    members = [[slot] for slot in range(num_clusters)]
    paths = [""] * num_clusters
    for _ in range(num_clusters - 1):
        keep, gone = window.best()
        for bit, slot in zip("01", (keep, gone)):
            for label in members[slot]:
                paths[label] = bit + paths[label]
        window.merge(keep, gone)
        members[keep] += members[gone]
    return paths
