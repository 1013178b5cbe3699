"""Compiled loops of Brown clustering.

Tables are those of :class:`.brown_merges.Tables`; ``table`` lists f(n) = n log n, rounded to
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
def enter_cluster(counts, marginals, shared, loss, rank, table, steps, slot):
    """Update the tables for a new cluster whose counts stand in ``slot``."""
    total, changed = np.zeros(rank.size), np.zeros(rank.size, np.bool_)
    for way in range(2):
        more = counts[1 - way, slot]  # the cells of the others beside the new cluster
        others = np.flatnonzero(more)
        for x in others:
            if x == slot:
                continue
            changed[x] = True
            marginals[way, x] += more[x]
            for y in others:
                if y < x and y != slot:
                    shared[x, y] += _shared(table, steps, more[x], more[y])
                    shared[y, x] = shared[x, y]
        row = counts[way, slot]
        marginals[way, slot] = row.sum()
        for z in np.flatnonzero(row):
            cells = counts[1 - way, z]
            for other in range(rank.size):
                total[other] += _shared(table, steps, row[z], cells[other])
    shared[slot] = shared[:, slot] = total
    changed[slot] = True
    for x in np.flatnonzero(changed):
        _price(counts, marginals, shared, loss, rank, table, steps, x)


@kernel
def merge_clusters(counts, marginals, shared, loss, rank, table, steps, keep, gone):
    """Merge cluster ``gone`` into ``keep``."""
    size = rank.size
    total = shared[keep].copy()
    for way in range(2):
        contexts = counts[1 - way]
        one, other = contexts[keep], contexts[gone]
        for x in np.flatnonzero(other):
            if x == keep or x == gone:
                continue
            a, b = one[x], other[x]
            for y in range(size):
                c, d = one[y], other[y]
                if c + d == 0 or y == keep or y == gone or y == x or (d > 0 and y < x):
                    continue
                gain = (
                    _shared(table, steps, a + b, c + d)
                    - _shared(table, steps, a, c)
                    - _shared(table, steps, b, d)
                )
                shared[x, y] += gain
                shared[y, x] = shared[x, y]
                loss[x, y] -= gain
                loss[y, x] = loss[x, y]
        row, more = counts[way, keep], counts[way, gone]
        for z in np.flatnonzero(more):
            if z == keep or z == gone:
                continue
            cells, n, m = contexts[z], row[z], row[z] + more[z]
            for y in range(size):
                total[y] += _shared(table, steps, m, cells[y]) - _shared(table, steps, n, cells[y])
        inside = row[keep] + row[gone] + more[keep] + more[gone]
        for y in range(size):
            total[y] += (
                _shared(table, steps, inside, one[y] + other[y])
                - _shared(table, steps, row[keep], one[y])
                - _shared(table, steps, row[gone], other[y])
            )
    for way in range(2):
        counts[way, keep] += counts[way, gone]
        counts[way, gone] = 0
        counts[way, :, keep] += counts[way, :, gone]
        counts[way, :, gone] = 0
        marginals[way, keep] += marginals[way, gone]
        marginals[way, gone] = 0
    shared[keep] = shared[:, keep] = total
    loss[gone] = loss[:, gone] = np.inf
    rank[gone] = -1
    _price(counts, marginals, shared, loss, rank, table, steps, keep)


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
