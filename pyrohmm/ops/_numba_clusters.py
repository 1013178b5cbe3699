"""Compiled loops of Brown clustering.

Tables are those of :class:`.brown_merges.Tables`; ``table`` lists f(n) = n log n, rounded to
``steps`` in a nat; beyond it f is computed.
"""

from __future__ import annotations

import numpy as np

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
def _where(cells, without, other):
    """Places where ``cells`` are not zero, but for two."""
    places = np.empty(cells.size, np.int64)
    count = 0
    for x in range(cells.size):
        if cells[x] > 0 and x != without and x != other:
            places[count] = x
            count += 1
    return places[:count]


@kernel
def enter_cluster(counts, marginals, shared, loss, rank, least, stale, table, steps, slot):
    """Update the tables for a new cluster whose counts stand in ``slot``."""
    size = rank.size
    total, own = np.zeros(size), np.zeros(size)
    for way in range(2):
        contexts, sums = counts[1 - way], marginals[way]
        more = contexts[slot]
        for x in range(size):
            own[x] = _f(table, steps, sums[x] + more[x]) - _f(table, steps, sums[x])
        changed = _where(more, slot, slot)
        for y in range(size):
            if rank[y] < 0 or y == slot:
                continue
            for x in changed:
                if y == x or (more[y] > 0 and y < x):
                    continue
                gain = 0.0
                if more[y] > 0:
                    gain = _shared(table, steps, more[x], more[y])
                    shared[x, y] += gain
                    shared[y, x] = shared[x, y]
                both = sums[x] + sums[y]
                rise = _f(table, steps, both + more[x] + more[y]) - _f(table, steps, both)
                value = loss[y, x] - gain + (rise - own[x] - own[y])  # of the marginals
                _write(loss, rank, least, stale, x, y, value)
        row = counts[way, slot]
        for x in range(size):
            sums[x] += more[x]
        sums[slot] = row.sum()
        _share_cells(total, row, row, contexts, table, steps, -1, -1)
    _price(counts, marginals, shared, loss, rank, least, stale, table, steps, slot, total)


@kernel
def _share_cells(total, row, more, contexts, table, steps, keep, gone):
    """Add what each row shares with ``row``, at cells where there is ``more`` of it.

    Where that is another array it is not yet in ``row``, and what was shared before is taken off.
    """
    for z in range(row.size):
        if more[z] == 0 or z == keep or z == gone:
            continue
        cells, n = contexts[z], row[z]
        if keep < 0:
            for y in range(row.size):
                total[y] += _shared(table, steps, n, cells[y])
            continue
        m = n + more[z]
        rise = _f(table, steps, m) - _f(table, steps, n)
        for y in range(row.size):
            if cells[y] > 0:
                total[y] += _f(table, steps, m + cells[y]) - _f(table, steps, n + cells[y]) - rise


@kernel
def merge_clusters(
    counts, marginals, shared, loss, rank, least, stale, table, steps, keep, gone
):  # fmt: skip
    """Merge cluster ``gone`` into ``keep``."""
    size = rank.size
    total = shared[keep].copy()
    for way in range(2):
        contexts = counts[1 - way]
        one, other = contexts[keep], contexts[gone]
        changed = _where(other, keep, gone)
        for y in range(size):
            c, d = one[y], other[y]
            if c + d == 0 or y == keep or y == gone:
                continue
            for x in changed:
                if y == x or (d > 0 and y < x):
                    continue
                a, b = one[x], other[x]
                gain = (
                    _shared(table, steps, a + b, c + d)
                    - _shared(table, steps, a, c)
                    - _shared(table, steps, b, d)
                )
                shared[x, y] += gain
                shared[y, x] = shared[x, y]
                _write(loss, rank, least, stale, x, y, loss[y, x] - gain)
        row, more = counts[way, keep], counts[way, gone]
        _share_cells(total, row, more, contexts, table, steps, keep, gone)
        inside = row[keep] + row[gone] + more[keep] + more[gone]
        for y in range(size):
            total[y] += (
                _shared(table, steps, inside, one[y] + other[y])
                - _shared(table, steps, row[keep], one[y])
                - _shared(table, steps, row[gone], other[y])
            )
    for way in range(2):
        for z in range(size):
            counts[way, keep, z] += counts[way, gone, z]
            counts[way, gone, z] = 0
        for x in range(size):
            counts[way, x, keep] += counts[way, x, gone]
            counts[way, x, gone] = 0
        marginals[way, keep] += marginals[way, gone]
        marginals[way, gone] = 0
    for x in range(size):
        if x != gone:
            _write(loss, rank, least, stale, x, gone, np.inf)
    rank[gone], least[gone], stale[gone] = -1, np.inf, False
    _price(counts, marginals, shared, loss, rank, least, stale, table, steps, keep, total)


@kernel
def _price(counts, marginals, shared, loss, rank, least, stale, table, steps, slot, total):
    """Write what a cluster shares with each, and what their merges would lose."""
    own = counts[0, slot, slot]
    for y in range(rank.size):
        shared[slot, y] = shared[y, slot] = total[y]
        if y == slot or rank[y] < 0:
            continue
        after, before, inner = counts[0, slot, y], counts[1, slot, y], counts[0, y, y]
        value = -total[y]
        for way in range(2):
            value += _shared(table, steps, marginals[way, slot], marginals[way, y])
        if own + after + before + inner > 0:
            for n in (own + before, own + after, inner + before, inner + after):
                value += _f(table, steps, n)
            for n in (own, before, after, inner, own + before + after + inner):
                value -= _f(table, steps, n)
        _write(loss, rank, least, stale, slot, y, value)


@kernel
def _write(loss, rank, least, stale, x, y, value):
    """Write an entry and its mirror image.

    ``least`` is, unless ``stale``, what a cluster loses at least with those of lower rank: most
    merges are of the last cluster, and leave it as it is for the others.
    """
    old = loss[x, y]
    loss[x, y] = loss[y, x] = value
    row = x if rank[x] > rank[y] else y
    if value < least[row]:
        least[row] = value
    elif old == least[row]:
        stale[row] = True


@kernel
def best_merge(loss, rank, least, stale, tie):
    """The two clusters whose merge loses least, that with the more frequent word first."""
    size = rank.size
    for x in range(size):
        if stale[x]:
            least[x] = np.inf
            for y in range(size):
                if rank[y] < rank[x]:
                    least[x] = min(least[x], loss[x, y])
            stale[x] = False
    most = least.min() + tie
    keep = gone = -1
    for x in range(size):
        if least[x] > most:
            continue
        for y in range(size):
            if rank[y] < rank[x] and loss[x, y] <= most:
                earlier = keep < 0 or rank[y] < rank[keep]
                if earlier or (y == keep and rank[x] < rank[gone]):
                    keep, gone = y, x
    return keep, gone


@kernel
def sweep_clusters(
    labels, counts, marginals, sizes, starts, others, numbers, table, steps, tie
):  # fmt: skip
    """Give each word in turn its best cluster; the number of those that changed."""
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
