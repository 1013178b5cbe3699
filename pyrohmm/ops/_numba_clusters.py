"""Compiled loops of Brown clustering.

Tables are those of :class:`.brown_merges.Candidates`; ``table`` lists f(n) = n log n, rounded to
``steps`` in a nat; beyond it f is computed.
"""

from __future__ import annotations

import numpy as np

from ._numba_math import call as call
from ._numba_math import kernel


@kernel
def _f(table, steps, n):
    return table[n] if n < table.size else np.rint(n * np.log(n) * steps) / steps


@kernel
def _shared(table, steps, m, n):
    """Gain of joining two cells: f(m + n) - f(m) - f(n)."""
    if m == 0 or n == 0:
        return 0.0
    return _f(table, steps, m + n) - _f(table, steps, m) - _f(table, steps, n)


@kernel
def change_cluster(counts, marginals, shared, loss, rank, table, steps, slot, rows):
    """Replace the counts of the cluster in ``slot`` by ``rows``, and update the tables.

    ``rows`` ``(2, size)`` are zeros for a cluster that is taken out, whose rank is -1; losses then
    are those of the next cluster that takes its counts over.
    """
    changed = (counts[0, slot] != rows[0]) | (counts[1, slot] != rows[1])
    changed[slot] = True  # its own cell is one of those that differ from all others'
    size = rank.size
    for sign in (-1, 1):  # the terms of the old counts are taken out, those of the new put in
        for way in range(2):
            row = counts[way, slot]
            present = np.flatnonzero(row)
            for x in present:
                if not changed[x]:
                    continue
                cells = counts[1 - way, x]
                for y in range(size):
                    shared[slot, y] += sign * _shared(table, steps, row[x], cells[y])
                for z in present:
                    if x != slot and z != slot and (z < x or not changed[z]):
                        shared[x, z] += sign * _shared(table, steps, row[x], row[z])
                        shared[z, x] = shared[x, z]
        if sign < 0:
            for way in range(2):
                marginals[way] += rows[1 - way] - counts[1 - way, slot]
                marginals[way, slot] = rows[way].sum()
            for way in range(2):
                counts[way, slot] = counts[1 - way, :, slot] = rows[way]
    shared[:, slot] = shared[slot]
    for x in np.flatnonzero(changed):
        if rank[slot] >= 0:
            _price(counts, marginals, shared, loss, rank, table, steps, x)


@kernel
def _price(counts, marginals, shared, loss, rank, table, steps, slot):
    """Write the loss of mutual information of merging a cluster with each other one."""
    own = counts[0, slot, slot]
    for y in range(rank.size):
        if y == slot or rank[y] < 0:
            continue
        after, before, inner = counts[0, slot, y], counts[1, slot, y], counts[0, y, y]
        value = -shared[slot, y]
        for way in range(2):
            value += _shared(table, steps, marginals[way, slot], marginals[way, y])
        if own + after + before + inner > 0:
            for n in (own + before, own + after, inner + before, inner + after):
                value += _f(table, steps, n)
            for n in (own, before, after, inner, own + before + after + inner):
                value -= _f(table, steps, n)
        loss[slot, y] = loss[y, slot] = value


@kernel
def best_merge(loss, rank, tie):
    """Pair of clusters with the least merge loss, that with the more frequent word first."""
    most = np.inf
    for value in loss.flat:
        most = value if value < most else most
    most += tie
    keep = gone = -1
    for x in range(rank.size):
        for y in range(rank.size):
            if loss[x, y] <= most and rank[y] < rank[x]:
                earlier = keep < 0 or rank[y] < rank[keep]
                if earlier or (y == keep and rank[x] < rank[gone]):
                    keep, gone = y, x
    return keep, gone


@kernel
def sweep_clusters(
    labels, counts, marginals, sizes, starts, others, numbers, table, steps, tie
):  # fmt: skip
    """Move each word in turn to its best cluster; returns the number of moves."""
    size = sizes.size
    beside = np.zeros((2, size), np.int64)
    totals = np.zeros(2, np.int64)
    gain = np.zeros(size)
    changed = 0
    for word in range(labels.size):
        old = labels[word]
        if sizes[old] == 1:
            continue
        beside[:] = 0
        own = 0
        for way in range(2):
            totals[way] = 0
            for i in range(starts[way, word], starts[way, word + 1]):
                totals[way] += numbers[way, i]
                if others[way, i] == word:
                    own = numbers[way, i]
                else:
                    beside[way, labels[others[way, i]]] += numbers[way, i]
        _shift(counts, marginals, old, beside, totals, own, -1)
        for c in range(size):
            inner, after, before = counts[0, c, c], beside[0, c], beside[1, c]
            gain[c] = (
                _f(table, steps, inner + after + before + own)
                - _f(table, steps, inner + after)
                - _f(table, steps, inner + before)
                + _f(table, steps, inner)
            )
            for way in range(2):
                n = marginals[way, c]
                gain[c] -= _f(table, steps, n + totals[way]) - _f(table, steps, n)
        for way in range(2):
            for k in range(size):
                n = beside[way, k]
                if n > 0:
                    cells = counts[1 - way, k]
                    for c in range(size):
                        gain[c] += _shared(table, steps, cells[c], n)
        most = gain.max()
        new = 0
        while gain[new] < most - tie:
            new += 1
        if gain[new] <= gain[old] + tie:
            new = old
        _shift(counts, marginals, new, beside, totals, own, 1)
        labels[word] = new
        sizes[old] -= 1
        sizes[new] += 1
        changed += new != old
    return changed


@kernel
def _shift(counts, marginals, label, beside, totals, own, sign):
    """Add a word to a cluster, or take it out."""
    for way in range(2):
        for k in range(beside.shape[1]):
            counts[way, label, k] += sign * beside[way, k]
            counts[way, k, label] += sign * beside[1 - way, k]
        counts[way, label, label] += sign * own
        marginals[way, label] += sign * totals[way]
