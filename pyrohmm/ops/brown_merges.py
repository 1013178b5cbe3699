"""Clusters of words by Brown et al. (1992): see :func:`pyrohmm.clusters.brown`."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import numpy as np
from tqdm import tqdm

from .cluster_tables import Tables
from .cluster_tables import Terms as Terms
from .cluster_tables import Words as Words


def _loops() -> ModuleType:
    """The compiled loops, without which clustering would take hours."""
    try:
        return import_module("._numba_clusters", __package__)
    except ImportError as error:
        raise ImportError(
            "Brown clusters need Numba. Install it with pip install 'pyrohmm[compiled]'; "
            "clusters.read_paths reads clusters that were made elsewhere."
        ) from error


class Window:
    """Some clusters, and what the merge of any two would lose: see :class:`.Tables`."""

    def __init__(self, size: int, terms: Terms) -> None:
        self.tables, self.terms = Tables.empty(size), terms
        self._loops = _loops()

    def enter(self, slot: int, beside: np.ndarray, rank: int) -> None:
        """Put a cluster into a free slot; ``beside`` ``(2, size)`` is what follows and precedes."""
        self.tables.rank[slot] = rank
        for way in (0, 1):
            self.tables.counts[way, slot] = beside[way]
            self.tables.counts[way, :, slot] = beside[1 - way]
        self._loops.enter_cluster(*self.tables, self.terms.table, self.terms.steps, slot)

    def merge(self, keep: int, gone: int) -> None:
        """Merge a cluster into one of lower rank."""
        self._loops.merge_clusters(*self.tables, self.terms.table, self.terms.steps, keep, gone)

    def best(self) -> tuple[int, int]:
        """The two clusters whose merge loses least, that with the more frequent word first."""
        best: tuple[int, int] = self._loops.best_merge(*self.tables[3:], self.terms.tie)
        return best


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
    """Give words better clusters, in place, until none changes or the sweeps are over."""
    loops = _loops()
    table = words.table(labels, num_clusters)
    counts = np.stack([table, table.T])
    marginals, sizes = counts.sum(2), np.bincount(labels)
    for _ in tqdm(range(num_sweeps), "sweeps", disable=disable, leave=False):
        changed = loops.sweep_clusters(
            labels, counts, marginals, sizes, words.starts, words.others, words.numbers,
            terms.table, terms.steps, terms.tie,
        )  # fmt: skip
        if not changed:
            break


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
