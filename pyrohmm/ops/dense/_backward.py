"""Compiled backward pass of Markov chains over whole sequences.

Expected transitions and counts of symbols are added up in the loop itself.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .._numba_math import inner, kernel, u64
from ._forward import Messages
from ._lanes import (
    _LANES,
    LANES,
    READ,
    Data,
    _0,
    _1,
    _2,
    _3,
    _4,
    add_rows,
    begin_step,
    multiply,
    multiply_row,
    read,
    read_rows,
    scale_lanes,
    scratch,
    store,
    sum_products,
    tile_of,
)

STEPS = 8  # whose transitions are added up together
_STEPS = u64(STEPS)
_ALL = u64(STEPS * LANES + 16)  # between rows: not a power of two, for the cache


@inner
def _add_transitions(counts, before, after, height, width, stride):
    """Add the products of states before and after, summed over ``width`` steps of sequences."""
    zero = before.dtype.type(0)
    for j in range(_0, height, _4):
        for k in range(_0, height, _2):
            p, q = j * stride, k * stride
            a0, a1, b0, b1, c0, c1, d0, d1 = zero, zero, zero, zero, zero, zero, zero, zero
            for i in range(width):
                x, y = after[q + i], after[q + stride + i]
                a, b = before[p + i], before[p + stride + i]
                c, d = before[p + _2 * stride + i], before[p + _3 * stride + i]
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


class Back(NamedTuple):
    """Arguments and results of a backward pass, as arrays.

    Attributes:
        transposed: ``(S, G, height, height)``, those of :class:`Data`, transposed.
        weights: ``(N,)``, of each sequence.
        exact: ``(N,)``, which sequences to go through; cleared where numbers left their range.
        most: If positive, only ``exact`` is of interest: it is cleared where more than ``most``
            of the evidence may have been lost. Every transition is then larger by what a product
            may lose.
        starts: ``(N, K)``, the posterior of first states.
        gamma: ``(N T, K)``, that of all states; with symbols it has no rows.
    """

    transposed: np.ndarray
    weights: np.ndarray
    exact: np.ndarray
    most: float
    starts: np.ndarray
    gamma: np.ndarray


def begin_back(data: Data, exact: np.ndarray, weights: np.ndarray) -> Back:
    """Arguments of a backward pass, with results allocated."""
    (count, size), real = data.initial.shape, data.initial.dtype
    rows = count * data.steps if len(data.likelihood) else 0
    return Back(
        np.ascontiguousarray(data.matrices.swapaxes(2, 3)), weights, exact.copy(), 0.0,
        np.zeros((count, size), real), np.zeros((rows, size), real),
    )  # fmt: skip


@kernel
def finish(counts, emitted, matrices, pairs, symbols):
    """Write expected transitions, ``counts`` times probabilities, and counts of symbols.

    Transitions to what cannot be reached are none: messages to it may be huge.

    Args:
        counts: ``(S, G|N, height, height)``.
        emitted: ``(G, V + 1, height)``; no rows without symbols.
        matrices: ``(S, G, height, height)``.
        pairs: ``(S, G|N, K, K)``, written.
        symbols: ``(G, K, V)``, written.

    Returns:
        Whether all are finite.
    """
    (steps, owners, size, _), finite = pairs.shape, True
    share = owners // matrices.shape[1]
    for s, n, j in np.ndindex(steps, owners, size):
        for k in range(size):
            prob = matrices[s, n // share, j, k]
            value = counts[s, n, j, k] * prob if prob > 0 else 0.0
            finite &= abs(value) < np.inf
            pairs[s, n, j, k] = value
    for g in range(symbols.shape[0]):
        symbols[g] = emitted[g, : symbols.shape[2], :size].T
    return finite


@kernel
def backward_tiles(first, last, data, found, back, counts, emitted):
    """Backward pass of several tiles; returns how many sequences over- or underflowed.

    Adds to ``counts``, of the shape of the matrices, expected transitions over their probabilities,
    and to ``emitted``, of the shape of the tables, those of symbols.
    """
    data, found, back, lost = Data(*data), Messages(*found), Back(*back), 0
    for tile in range(first, last):
        lost += _backward_tile(tile, data, found, back, counts, emitted)
    return lost


@inner
def _backward_tile(tile, data, found, back, counts, emitted):
    """Backward pass over one tile of sequences."""
    matrices, lengths, (_, low, tiny, _) = data.matrices, data.lengths, data.limits
    real, several, exact = matrices.dtype, matrices.shape[0] > 1, back.exact
    size, height = u64(data.initial.shape[1]), u64(matrices.shape[2])
    g, start, width = tile_of(data, tile)
    if not exact[start : start + width].any():
        return 0
    steps, bounding = data.steps, back.most > 0.0
    entries, peaks, sums = data.tables[g].ravel(), data.peaks[g], emitted[g].ravel()
    symbols, likelihood = data.symbols, data.likelihood
    starts, along, missing = data.first, data.along, u64(data.peaks.shape[1] - 1)
    gamma = back.gamma.ravel()
    beta, later = scratch(height * _LANES, real), scratch(height * _LANES, real)
    seen, probs = scratch(height * _LANES, real), scratch(height * _LANES, real)
    before, after = np.zeros(height * _ALL, real), np.zeros(height * _ALL, real)
    norm, peak, weight = np.zeros(LANES, real), np.zeros(LANES, real), np.zeros(LANES, real)
    loss, every = np.zeros(LANES), np.zeros(LANES, real)
    rows, active = np.zeros(LANES, np.uint64), np.zeros(LANES, np.bool_)
    places = np.zeros(LANES, np.uint64)
    zero, one, lowest = real.type(0), real.type(1), real.type(low)
    for i in range(width):
        weight[i] = back.weights[start + i]
    longest, shortest = lengths[start : start + width].max(), lengths[start : start + width].min()
    filled, lost = _0, 0
    for t in range(longest - 1, -1, -1):
        begin_step(
            rows, active, symbols, starts, along, lengths, t, start, width, missing, exact
        )  # fmt: skip
        if t < longest - 1:
            if several or t == longest - 2:
                matrix = back.transposed[t if several else 0, g].ravel()
            multiply(beta, later, matrix, height)
        if t >= shortest - 1:
            _begin_back(beta, lengths, t, start, width, size)
        place = u64(tile * steps + t) * _LANES
        offset = place * size
        here, total = found.alpha[offset : offset + size * _LANES], found.total[place:]
        sum_products(norm, probs, here, beta, _LANES, size)
        if bounding:
            _add_losses(loss, every, beta, norm, total, active, (size + 4) * tiny, size)
        for i in range(LANES):
            far = bounding and not loss[i] <= back.most
            if active[i] and (far or not abs(norm[i] - one) < 1e-2):
                exact[start + i] = False
                active[i] = False
                lost += 1
            norm[i] = one / norm[i] if active[i] else zero
            peak[i] = norm[i] * weight[i]
        scale_lanes(probs, peak, _LANES, size)
        if symbols.shape[0]:
            for i in range(LANES):
                places[i] = rows[i] * height
            add_rows(sums, places, height, probs, _LANES)
        else:
            for i in range(LANES):
                places[i] = u64((start + i) * steps + t) * size
            store(gamma, places, active, size, probs, _LANES)
        if t == 0:
            for i in range(width):
                for k in range(size):
                    back.starts[start + i, k] = probs[k * _LANES + u64(i)]
            break
        read(seen, peak, rows, active, symbols, entries, peaks, likelihood, size, height, lowest)
        for i in range(LANES):
            peak[i] = norm[i] / total[i] if active[i] else zero
        earlier, row = found.alpha[offset - size * _LANES :], filled * _LANES
        for p in range(_0, size * _LANES, _LANES):
            for i in range(_LANES):
                value = seen[p + i] * beta[p + i] * peak[i]
                later[p + i] = value if here[p + i] > zero or bounding else zero
        _note_step(before, after, earlier, later, weight, row, size)
        filled += _1
        if filled == _STEPS or t == 1 or several:
            target = counts[t - 1 if several else 0, g]
            _add_transitions(target, before, after, height, filled * _LANES, _ALL)
            filled = _0
    return lost


@inner
def _begin_back(beta, lengths, t, start, width, size):
    """Set backward messages to one for the sequences that end at step t."""
    for i in range(width):
        if t == lengths[start + i] - 1:
            for k in range(size):
                beta[k * _LANES + u64(i)] = 1


@inner
def _note_step(before, after, earlier, later, weight, row, size):
    """Copy a step's forward and weighted backward messages into the buffers of several steps."""
    for k in range(size):
        p, q = k * _LANES, k * _ALL + row
        for i in range(_LANES):
            after[q + i] = later[p + i] * weight[i]
            before[q + i] = earlier[p + i]


@inner
def _add_losses(loss, every, beta, norm, total, active, tiny, size):
    """Add one step to the bound on each sequence's underflow losses."""
    for i in range(_LANES):
        every[i] = 0
    for k in range(size):
        for i in range(_LANES):
            every[i] += beta[k * _LANES + i]
    for i in range(_LANES):
        if active[i]:
            loss[i] += tiny * np.float64(every[i]) / (np.float64(norm[i]) * np.float64(total[i]))


@kernel
def backward_rows(first, last, data, found, back, counts, emitted):
    """Backward pass, one sequence at a time.

    ``counts`` may be of each sequence, ``(S, N, height, height)``.
    """
    data, found, back, lost = Data(*data), Messages(*found), Back(*back), 0
    real, height = data.matrices.dtype, data.matrices.shape[2]
    stride = min(data.steps, STEPS * LANES) + 16  # between rows: no power of two, for the cache
    before, after = np.zeros(height * stride, real), np.zeros(height * stride, real)
    for row in range(first, last):
        lost += _backward_row(row, data, found, back, counts, emitted, before, after)
    return lost


@inner
def _backward_row(row, data, found, back, counts, emitted, before, after):
    """Backward pass over one sequence."""
    matrices, lengths, (_, low, tiny, _) = data.matrices, data.lengths, data.limits
    real, several, exact = matrices.dtype, matrices.shape[0] > 1, back.exact
    size, height = u64(data.initial.shape[1]), u64(matrices.shape[2])
    g, steps = row * matrices.shape[1] // lengths.shape[0], data.steps
    symbols, entries, peaks = data.symbols, data.tables[g].ravel(), data.peaks[g]
    likelihood, begin, along = data.likelihood, data.first[row], data.along
    stride, alpha, totals = u64(len(before)) // height, found.alpha, found.total
    beta, later = scratch(height, real), scratch(height, real)
    seen, peak = scratch(size * u64(READ), real), np.zeros(READ, real)
    probs = scratch(height, real)
    zero, one, lowest, loss = real.type(0), real.type(1), real.type(low), 0.0
    bounding, weight = back.most > 0.0, real.type(back.weights[row])
    filled, owner = _0, row * counts.shape[1] // lengths.shape[0]
    for k in range(size):
        beta[k] = 1
    for t in range(lengths[row] - 1 if exact[row] else -1, -1, -1):
        at, place = row * steps + t, begin + t * along
        offset = u64(at) * size
        norm = every = zero
        for k in range(size):
            probs[k] = alpha[offset + k] * beta[k]
            norm += probs[k]
            every += beta[k]
        total = totals[at]
        if bounding:
            loss += (size + 4) * tiny * np.float64(every) / (np.float64(norm) * np.float64(total))
        if not abs(norm - one) < 1e-2 or (bounding and not loss <= back.most):
            exact[row] = False
            return 1
        inverse = weight / norm
        for k in range(size):
            probs[k] *= inverse
        if symbols.shape[0]:
            for k in range(size):
                emitted[g, symbols[place], k] += probs[k]
        else:
            for k in range(size):
                back.gamma[at, k] = probs[k]
        if t == 0:
            for k in range(size):
                back.starts[row, k] = probs[k]
            break
        step = t % READ
        if step == READ - 1 or t == lengths[row] - 1:
            read_rows(
                seen, peak, place - step * along, step + 1, along, symbols, entries, peaks,
                likelihood, size, height, lowest,
            )  # fmt: skip
        inverse = one / (norm * total)
        for k in range(size):
            value = seen[u64(step) * size + k] * beta[k] * inverse
            later[k] = value if alpha[offset + k] > zero or bounding else zero
            before[k * stride + filled] = alpha[offset - size + k]
            after[k * stride + filled] = later[k] * weight
        filled += _1
        if filled == _STEPS * _LANES or t == 1 or several:
            target = counts[t - 1 if several else 0, owner]
            _add_transitions(target, before, after, height, filled, stride)
            filled = _0
        if several or t == lengths[row] - 1:
            matrix = back.transposed[t - 1 if several else 0, g].ravel()
        multiply_row(beta, later, matrix, height)
    return 0
