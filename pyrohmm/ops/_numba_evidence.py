"""Compiled evidence of many sequences that share one matrix, and its gradient, in one pass each.

What a sum over paths needs is done in the loop itself: symbols are looked up, and expected
transitions and counts of symbols added up, so that nothing of size N T K is written but the
forward messages, and those only where a gradient is wanted. Probabilities of symbols are scaled by
the largest of each symbol, log-likelihoods by that of each step. K is rounded up to a multiple of
four, with zeros.

A tile is ``LANES`` sequences side by side: entry k of sequence i lies at ``LANES * k + i``. Few
sequences go one after the other instead, along their states.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ._numba_chain import _accumulate, _watch
from ._numba_lanes import LANES as LANES
from ._numba_lanes import (
    _0,
    _1,
    _2,
    _3,
    _4,
    add_rows,
    load,
    multiply,
    multiply_row,
    scale_lanes,
    scale_rows,
    store,
    sum_products,
    sum_rows,
    weigh,
)
from ._numba_math import exp, kernel, u64
from ._numba_math import share as share

STEPS = 8  # whose transitions are added up together
_STEPS, _LANES = u64(STEPS), u64(LANES)
_ALL = u64(STEPS * LANES + 16)  # between rows: not a power of two, for the cache


class Data(NamedTuple):
    """Arguments of both passes; ``symbols`` or ``likelihood`` is empty.

    Attributes:
        symbols: Their numbers, flat.
        table: ``(V + 1, height)``, probabilities of symbols, scaled; the last row is for missing
            ones.
        peaks: ``(V + 1,)``, logarithms of the scales.
        likelihood: Log-likelihoods, flat.
        first: ``(n,)``, the row of the first step of each sequence.
        along: How many rows further each next step is.
        lengths: ``(n,)``.
        limits: The smallest positive probability of the chain, or -1 if no step is watched; the
            logarithm of the smallest normal number; twice that number, above which nothing was
            raised to it; what a product must be above to be surely exact.
    """

    symbols: np.ndarray
    table: np.ndarray
    peaks: np.ndarray
    likelihood: np.ndarray
    first: np.ndarray
    along: int
    lengths: np.ndarray
    limits: tuple[float, float, float, float]


@kernel
def _begin_step(rows, active, data, t, start, width, exact):
    """Which sequences of a tile have a step t, and their rows: of the table, or of all steps."""
    missing = u64(data.peaks.shape[0] - 1)
    for i in range(LANES):
        here = i < width and t < data.lengths[start + i] and exact[start + i]
        active[i] = here
        rows[i] = missing
        if here:
            row = data.first[start + i] + t * data.along
            rows[i] = u64(data.symbols[row]) if data.symbols.shape[0] else u64(row)


@kernel
def _read(seen, peak, rows, active, data, size, height, low):
    """Write the likelihoods of a step over their largest, and the logarithms of those."""
    if data.symbols.shape[0]:
        entries = data.table.ravel()
        for i in range(LANES):
            peak[i] = data.peaks[rows[i]]
            rows[i] *= height
        load(seen, _LANES, entries, rows, active, height, entries.dtype.type(1))
        return
    for i in range(_LANES):
        rows[i] *= size
    load(seen, _LANES, data.likelihood, rows, active, size, low - low)
    weigh(seen, _LANES, size, peak, low)


@kernel
def _take(norm, peak, active, logs, product, slack):
    """Multiply the norms of a step into the products; returns how many are out of range.

    A product becomes part of the logarithm before it underflows.
    """
    lost, small = 0, 0
    for i in range(_LANES):
        lost += not (norm[i] >= slack and norm[i] < np.inf)
        small += norm[i] < 1e-100 or product[i] < 1e-150
    if small > 0:
        for i in range(LANES):
            if active[i]:
                logs[i], product[i] = _accumulate(logs[i] + peak[i], product[i], norm[i])
        return lost
    for i in range(_LANES):
        product[i] *= norm[i] if active[i] else 1.0
        logs[i] += peak[i] if active[i] else 0.0
    return lost


@kernel
def forward_tiles(
    first, last, data, initial, packed, kept, alpha, total, evidence, exact, sure, ends
):
    """Forward pass of several tiles of sequences; messages are written if ``kept``.

    ``initial`` ``(n, K)`` is of each sequence; so are the last messages, written to ``ends`` unless
    that is empty. ``exact`` is cleared where numbers left their range, ``sure`` where a step that
    is watched may have lost something.
    """
    for tile in range(first, last):
        _forward_tile(tile, data, initial, packed, kept, alpha, total, evidence, exact, sure, ends)


@kernel
def _forward_tile(tile, data, initial, packed, kept, alpha, total, evidence, exact, sure, ends):
    """Forward pass over one tile of sequences."""
    table, lengths, (least, low, tiny, slack) = data.table, data.lengths, data.limits
    count, size, height = lengths.shape[0], u64(initial.shape[1]), u64(packed.shape[0])
    steps = total.shape[0] // ((count + LANES - 1) // LANES * LANES)
    start = tile * LANES
    width = min(LANES, count - start)
    matrix = packed.ravel()
    mass, arrived = np.zeros(height * _LANES, table.dtype), np.zeros(height * _LANES, table.dtype)
    seen = np.zeros(height * _LANES, table.dtype)
    norm, peak = np.zeros(LANES, table.dtype), np.zeros(LANES, table.dtype)
    smallest, low_mass = np.zeros(LANES, table.dtype), np.zeros(LANES, table.dtype)
    scale = np.ones(LANES, table.dtype)
    faint = np.zeros(LANES, np.bool_)
    product, logs = np.ones(LANES), np.zeros(LANES)
    rows, active = np.zeros(LANES, np.uint64), np.zeros(LANES, np.bool_)
    one = table.dtype.type(1)
    lowest = table.dtype.type(low)
    faint[:] = least < tiny
    shortest = lengths[start : start + width].min()
    for t in range(lengths[start : start + width].max()):
        _begin_step(rows, active, data, t, start, width, exact)
        _read(seen, peak, rows, active, data, size, height, lowest)
        if t == 0:
            for i in range(LANES):  # those that are not there as the first, so that none is zero
                row = start + i if i < width else start
                for k in range(size):
                    arrived[k * _LANES + u64(i)] = initial[row, k]
        else:
            multiply(arrived, mass, matrix, height)
        if least >= 0.0:
            _watch(
                smallest, low_mass, faint, scale, slack, arrived, seen, active, width, size, sure,
                start,
            )  # fmt: skip
        sum_rows(norm, mass, arrived, seen, height)
        if _take(norm, peak, active, logs, product, slack) > 0:
            for i in range(LANES):
                if active[i] and not (norm[i] >= slack and norm[i] < np.inf):
                    exact[start + i] = False
                if not (norm[i] >= slack and norm[i] < np.inf):
                    norm[i] = np.inf  # so that its messages become zero
                    for k in range(size):  # as NaN would remain
                        mass[k * _LANES + u64(i)] = 0
        if least >= 0.0:
            for i in range(LANES):
                faint[i] = smallest[i] <= tiny or smallest[i] / norm[i] * least < tiny
                scale[i] = norm[i]
        at = u64(tile * steps + t) * _LANES
        for i in range(_LANES if kept else _0):
            total[at + i] = norm[i]
        for i in range(_LANES):
            norm[i] = one / norm[i]
        scale_rows(mass, norm, height)
        for k in range(size * _LANES if kept else _0):
            alpha[at * size + k] = mass[k]
        for i in range(width if ends.shape[0] > 0 and t >= shortest - 1 else 0):
            if t == lengths[start + i] - 1:
                for k in range(size):
                    ends[start + i, k] = mass[k * _LANES + u64(i)]
    for i in range(width):
        evidence[start + i] = logs[i] + np.log(product[i])


@kernel
def _add_transitions(counts, before, after, height):
    """Add the products of states before and after several steps, summed over the sequences."""
    zero = before.dtype.type(0)
    for j in range(_0, height, _4):
        for k in range(_0, height, _2):
            p, q = j * _ALL, k * _ALL
            a0, a1, b0, b1, c0, c1, d0, d1 = zero, zero, zero, zero, zero, zero, zero, zero
            for i in range(_STEPS * _LANES):
                x, y = after[q + i], after[q + _ALL + i]
                a, b = before[p + i], before[p + _ALL + i]
                c, d = before[p + _2 * _ALL + i], before[p + _3 * _ALL + i]
                a0 += a * x
                a1 += a * y
                b0 += b * x
                b1 += b * y
                c0 += c * x
                c1 += c * y
                d0 += d * x
                d1 += d * y
            counts[j, k] += a0
            counts[j, k + _1] += a1
            counts[j + _1, k] += b0
            counts[j + _1, k + _1] += b1
            counts[j + _2, k] += c0
            counts[j + _2, k + _1] += c1
            counts[j + _3, k] += d0
            counts[j + _3, k + _1] += d1


@kernel
def backward_tiles(
    first,
    last,
    data,
    transposed,
    weights,
    alpha,
    total,
    exact,
    starts,
    gamma,
    ends,
    counts,
    emitted,
):
    """Backward pass of several tiles: adds to the expected counts of transitions and symbols.

    The posterior of each sequence's first state is written to ``starts`` ``(n, K)``. ``ends``
    ``(n, K)`` says what follows their last steps: ones if it is nothing. Returns how many sequences
    left the range of numbers.
    """
    lost = 0
    for tile in range(first, last):
        lost += _backward_tile(
            tile, data, transposed, weights, alpha, total, exact, starts, gamma, ends, counts,
            emitted,
        )  # fmt: skip
    return lost


@kernel
def _backward_tile(
    tile, data, transposed, weights, alpha, total, exact, starts, gamma, ends, counts, emitted
):
    """Backward pass over one tile of sequences."""
    table, lengths, low = data.table, data.lengths, data.limits[1]
    count, size, height = lengths.shape[0], u64(starts.shape[1]), u64(transposed.shape[0])
    steps = total.shape[0] // ((count + LANES - 1) // LANES * LANES)
    start = tile * LANES
    width = min(LANES, count - start)
    matrix = transposed.ravel()
    beta, later = np.zeros(height * _LANES, table.dtype), np.zeros(height * _LANES, table.dtype)
    seen, probs = np.zeros(height * _LANES, table.dtype), np.zeros(height * _LANES, table.dtype)
    before, after = np.zeros(height * _ALL, table.dtype), np.zeros(height * _ALL, table.dtype)
    norm, peak = np.zeros(LANES, table.dtype), np.zeros(LANES, table.dtype)
    weight = np.zeros(LANES, table.dtype)
    rows, active = np.zeros(LANES, np.uint64), np.zeros(LANES, np.bool_)
    places = np.zeros(LANES, np.uint64)
    zero, one = table.dtype.type(0), table.dtype.type(1)
    lowest = table.dtype.type(low)
    for i in range(width):
        weight[i] = weights[start + i]
    longest, shortest = lengths[start : start + width].max(), lengths[start : start + width].min()
    filled, lost = _0, 0
    for t in range(longest - 1, -1, -1):
        _begin_step(rows, active, data, t, start, width, exact)
        if t < longest - 1:
            multiply(beta, later, matrix, height)
        for i in range(width if t >= shortest - 1 else 0):
            if t == lengths[start + i] - 1:
                for k in range(size):
                    beta[k * _LANES + u64(i)] = ends[start + i, k]
        offset = u64(tile * steps + t) * size * _LANES
        here = alpha[offset : offset + size * _LANES]
        sum_products(norm, probs, here, beta, _LANES, size)
        for i in range(LANES):
            if active[i] and not abs(norm[i] - one) < 1e-2:
                exact[start + i] = False
                active[i] = False
                lost += 1
            norm[i] = one / norm[i] if active[i] else zero
            peak[i] = norm[i] * weight[i]
        scale_lanes(probs, peak, _LANES, size)
        if data.symbols.shape[0]:
            for i in range(LANES):
                places[i] = rows[i] * height
            add_rows(emitted.ravel(), places, height, probs, _LANES)
        else:
            for i in range(LANES):
                places[i] = rows[i] * size
            store(gamma.ravel(), places, active, size, probs, _LANES)
        if t == 0:
            for i in range(width):
                for k in range(size):
                    starts[start + i, k] = probs[k * _LANES + u64(i)]
            break
        _read(seen, peak, rows, active, data, size, height, lowest)
        for i in range(LANES):
            peak[i] = norm[i] / total[(tile * steps + t) * LANES + i] if active[i] else zero
        q, row = offset - size * _LANES, filled * _LANES
        for k in range(size):
            p = k * _LANES
            for i in range(_LANES):
                value = seen[p + i] * beta[p + i] * peak[i]
                value = value if here[p + i] > zero else zero
                later[p + i] = value
                after[k * _ALL + row + i] = value * weight[i]
                before[k * _ALL + row + i] = alpha[q + p + i]
        filled += _1
        if filled == _STEPS or t == 1:
            for k in range(size):
                for i in range(filled * _LANES, _STEPS * _LANES):
                    after[k * _ALL + i] = 0
            _add_transitions(counts, before, after, height)
            filled = _0
    return lost


@kernel
def _read_row(seen, row, data, size, low):
    """As :func:`_read`, for one step of one sequence; returns the logarithm of the largest."""
    if data.symbols.shape[0]:
        symbol = data.symbols[row]
        for k in range(size):
            seen[k] = data.table[symbol, k]
        return data.peaks[symbol]
    offset, zero = u64(row) * size, low - low
    peak = data.likelihood[offset]
    for k in range(_1, size):
        x = data.likelihood[offset + k]
        peak = x if x > peak else peak
    peak = zero if peak == -np.inf else peak
    for k in range(size):
        x = data.likelihood[offset + k] - peak
        value = exp(low if x < low else x)
        seen[k] = zero if x == -np.inf else value
    return peak


@kernel
def forward_rows(
    first, last, data, initial, packed, kept, alpha, total, evidence, exact, sure, ends
):
    """Forward pass over sequences one after the other."""
    for row in range(first, last):
        _forward_row(row, data, initial, packed, kept, alpha, total, evidence, exact, sure, ends)


@kernel
def _forward_row(row, data, initial, packed, kept, alpha, total, evidence, exact, sure, ends):
    """Forward pass over one sequence."""
    table, lengths, (least, low, tiny, slack) = data.table, data.lengths, data.limits
    count, size, height = lengths.shape[0], u64(initial.shape[1]), u64(packed.shape[0])
    steps = total.shape[0] // count
    matrix = packed.ravel()
    mass, arrived = np.zeros(height, table.dtype), np.zeros(height, table.dtype)
    seen = np.zeros(height, table.dtype)
    zero, one, lowest = table.dtype.type(0), table.dtype.type(1), table.dtype.type(low)
    product, logs = 1.0, 0.0  # of the norms of several steps
    faint, scale, smallest = least < tiny, one, zero
    for t in range(lengths[row]):
        at = row * steps + t
        peak = _read_row(seen, data.first[row] + t * data.along, data, size, lowest)
        if t == 0:
            for k in range(size):
                arrived[k] = initial[row, k]
        else:
            multiply_row(arrived, mass, matrix, height)
        if least >= 0.0:
            smallest = zero + table.dtype.type(np.inf)
            for k in range(size):
                if faint and arrived[k] * scale < slack:
                    sure[row] = False
                if arrived[k] > zero and seen[k] > zero:
                    smallest = min(smallest, arrived[k] * seen[k])
        norm = zero
        for k in range(size):
            mass[k] = arrived[k] * seen[k]
            norm += mass[k]
        if not (norm >= slack and norm < np.inf):
            exact[row] = False
        if not exact[row]:
            break
        faint, scale = smallest <= tiny or smallest / norm * least < tiny, norm
        logs, product = _accumulate(logs + peak, product, norm)
        inverse = one / norm
        for k in range(size):
            mass[k] *= inverse
        if kept:
            total[at] = norm
            offset = u64(at) * size
            for k in range(size):
                alpha[offset + k] = mass[k]
    evidence[row] = logs + np.log(product)
    for k in range(size if ends.shape[0] > 0 else _0):
        ends[row, k] = mass[k]


@kernel
def backward_rows(
    first, last, data, transposed, weights, alpha, total, exact, starts, gamma, ends, message,
    emitted,
):  # fmt: skip
    """Backward pass of sequences one after the other, as :func:`backward_tiles`.

    ``message``, times the forward messages of the step before, is expected transitions over their
    probabilities.
    """
    lost = 0
    for row in range(first, last):
        lost += _backward_row(
            row, data, transposed, weights, alpha, total, exact, starts, gamma, ends, message,
            emitted,
        )  # fmt: skip
    return lost


@kernel
def _backward_row(
    row, data, transposed, weights, alpha, total, exact, starts, gamma, ends, message, emitted
):
    """Backward pass over one sequence."""
    table, lengths, low = data.table, data.lengths, data.limits[1]
    count, size, height = lengths.shape[0], u64(starts.shape[1]), u64(transposed.shape[0])
    steps = total.shape[0] // count
    matrix, weight = transposed.ravel(), weights[row]
    beta, later = np.zeros(height, table.dtype), np.zeros(height, table.dtype)
    seen, probs = np.zeros(height, table.dtype), np.zeros(height, table.dtype)
    zero, one, lowest = table.dtype.type(0), table.dtype.type(1), table.dtype.type(low)
    for k in range(size):
        beta[k] = ends[row, k]
    for t in range(lengths[row] - 1 if exact[row] else -1, -1, -1):
        at, read = row * steps + t, data.first[row] + t * data.along
        offset = u64(at) * size
        here = alpha[offset : offset + size]
        norm = zero
        for k in range(size):
            probs[k] = here[k] * beta[k]
            norm += probs[k]
        if not abs(norm - one) < 1e-2:
            exact[row] = False
            return 1
        inverse = weight / norm
        for k in range(size):
            probs[k] *= inverse
        if data.symbols.shape[0]:
            target = emitted[data.symbols[read]]
            for k in range(size):
                target[k] += probs[k]
        else:
            for k in range(size):
                gamma[read, k] = probs[k]
        if t == 0:
            for k in range(size):
                starts[row, k] = probs[k]
            break
        _read_row(seen, read, data, size, lowest)
        inverse = one / (norm * total[at])
        for k in range(size):
            value = seen[k] * beta[k] * inverse
            later[k] = value if here[k] > zero else zero
        for k in range(size):
            message[at, k] = later[k] * weight
        multiply_row(beta, later, matrix, height)
    return 0
