"""Compiled scaled messages of dense chains, for few states; and rows of tables.

With few states a step of the recursion costs less than the call of a torch operation, so the loop
itself is compiled. Arrays are time-major, ``T`` steps of ``G`` groups of ``n`` sequences with ``K``
states, flattened; the groups have transition matrices ``(1|T-1, G, K, K)``. What is computed is
said in :class:`pyrohmm.ops.operations.Backend`.
"""

from __future__ import annotations

import numpy as np

from ._numba_lanes import LANES as LANES
from ._numba_lanes import (
    _0,
    _1,
    _2,
    _3,
    _4,
    clear,
    load,
    multiply,
    multiply_row,
    pack,
    scale_lanes,
    store,
    sum_products,
    weigh,
)
from ._numba_math import exp, kernel, u64
from ._numba_math import run as run
from ._numba_math import share as share
from ._numba_math import threads_of as threads_of

ROWS = 128  # that are multiplied together
_ROWS, _BESIDE = u64(ROWS), u64(ROWS + 8)  # between columns: not a power of two, for the cache


@kernel
def _accumulate(logs, product, norm):
    """Multiply a norm into a product, which becomes part of the logarithm before it underflows."""
    if norm < 1e-100:  # even two of them might underflow
        logs += np.log(norm)
    else:
        product *= norm
    if product < 1e-200:
        logs += np.log(product)
        product = 1.0
    return logs, product


@kernel
def _watch(smallest, low, faint, scale, slack, arrived, seen, active, width, size, exact, start):
    """Note each sequence's smallest positive product; clear ``exact`` where mass was lost.

    And in ``low`` the least mass that arrives.
    """
    lanes = u64(LANES)
    for i in range(lanes):
        smallest[i] = low[i] = np.inf
    for k in range(size):
        for i in range(lanes):
            p, q = arrived[k * lanes + i], seen[k * lanes + i]
            low[i] = p if p < low[i] else low[i]
            product = p * q if p > 0 and q > 0 else np.inf
            smallest[i] = product if product < smallest[i] else smallest[i]
    for i in range(width):
        if faint[i] and active[i] and low[i] * scale[i] < slack:
            exact[start + i] = False


@kernel
def _activate(active, offsets, t, start, width, count, lengths, exact, size):
    """Which sequences of a tile have a step t, and where its states begin."""
    for i in range(LANES):
        active[i] = i < width and t < lengths[start + i] and exact[start + i]
        offsets[i] = u64(t * count + start + i) * size


@kernel
def _clear_end(alpha, total, row, begin, most, count, size):
    """Fill what comes after a sequence, or all of it where it is not exact."""
    clear(alpha, row, begin, most, count, size)
    for t in range(begin, most):
        total[t * count + row] = 1.0


@kernel
def forward_lanes(
    first, last, initial, transition, likelihood, lengths, least, floor, tiny, slack,
    alpha, total, evidence, exact,
):  # fmt: skip
    """Forward pass of many sequences at a time."""
    num_states = transition.shape[2]
    count, groups = lengths.shape[0], transition.shape[1]
    per, most = count // groups, total.shape[0] // count
    size, height = u64(num_states), u64((num_states + 3) // 4 * 4)
    norm = np.zeros(LANES, alpha.dtype)
    lanes = u64(LANES)
    packed = np.zeros(height * height, alpha.dtype)
    mass, arrived = np.zeros(height * lanes, alpha.dtype), np.zeros(height * lanes, alpha.dtype)
    seen = np.zeros(height * lanes, alpha.dtype)
    zero, one, low = alpha.dtype.type(0), alpha.dtype.type(1), alpha.dtype.type(floor)
    peak = np.zeros(LANES, alpha.dtype)
    smallest, low_mass = np.zeros(LANES, alpha.dtype), np.zeros(LANES, alpha.dtype)  # of a step
    faint = np.zeros(LANES, np.bool_)  # whether the step before may have lost something
    scale = np.zeros(LANES, alpha.dtype)
    product = np.zeros(LANES)  # of the norms of several steps
    offsets, active = np.zeros(LANES, np.uint64), np.zeros(LANES, np.bool_)
    current = -1  # which matrix is packed
    start = first
    while start < last:
        g = start // per
        width = min(LANES, last - start, (g + 1) * per - start)
        mass[:] = 0.0
        evidence[start : start + width] = 0.0
        product[:], scale[:], faint[:] = 1.0, 1.0, least < tiny
        for t in range(lengths[start : start + width].max()):
            _activate(active, offsets, t, start, width, count, lengths, exact, size)
            if t == 0:
                load(arrived, lanes, initial, offsets, active, size, zero)
            else:
                current = pack(packed, transition, t - 1, g, current, False)
                multiply(arrived, mass, packed, height)
            load(seen, lanes, likelihood, offsets, active, size, zero)
            weigh(seen, lanes, size, peak, low)
            if least >= 0.0:
                _watch(
                    smallest, low_mass, faint, scale, slack, arrived, seen, active, width, size,
                    exact, start,
                )  # fmt: skip
            sum_products(norm, mass, arrived, seen, lanes, size)
            for i in range(width):
                if not active[i]:
                    norm[i] = 1.0
                    continue
                row = start + i
                total[t * count + row] = norm[i]
                if not (norm[i] >= slack and norm[i] < np.inf):
                    exact[row] = False
                    norm[i] = np.inf  # so that its messages become zero
                    continue
                faint[i] = smallest[i] <= tiny or smallest[i] / norm[i] * least < tiny
                scale[i] = norm[i]
                logs = evidence[row] + peak[i]
                evidence[row], product[i] = _accumulate(logs, product[i], norm[i])
            for i in range(lanes):
                norm[i] = one / norm[i]
            scale_lanes(mass, norm, lanes, size)
            store(alpha, offsets, active, size, mass, lanes)
        for i in range(width):
            row = start + i
            evidence[row] += np.log(product[i])
            _clear_end(alpha, total, row, lengths[row] if exact[row] else 0, most, count, size)
        start += width


@kernel
def backward_lanes(
    first, last, transition, likelihood, lengths, factor, floor, alpha, total, exact,
    gamma, message,
):  # fmt: skip
    """Backward pass of many sequences at a time."""
    num_states = transition.shape[2]
    count, groups = lengths.shape[0], transition.shape[1]
    per, most = count // groups, total.shape[0] // count
    size, height = u64(num_states), u64((num_states + 3) // 4 * 4)
    norm = np.zeros(LANES, alpha.dtype)
    lanes = u64(LANES)
    packed = np.zeros(height * height, alpha.dtype)
    beta, later = np.zeros(height * lanes, alpha.dtype), np.zeros(height * lanes, alpha.dtype)
    here, probs = np.zeros(height * lanes, alpha.dtype), np.zeros(height * lanes, alpha.dtype)
    zero, one, low = alpha.dtype.type(0), alpha.dtype.type(1), alpha.dtype.type(floor)
    peak, weight = np.zeros(LANES, alpha.dtype), np.zeros(LANES, alpha.dtype)
    offsets, active = np.zeros(LANES, np.uint64), np.zeros(LANES, np.bool_)
    current = -1
    start = first
    while start < last:
        g = start // per
        width = min(LANES, last - start, (g + 1) * per - start)
        later[:] = 0.0
        weight[:width] = factor[start : start + width]
        longest = lengths[start : start + width].max()
        for t in range(longest - 1, -1, -1):
            _activate(active, offsets, t, start, width, count, lengths, exact, size)
            if t < longest - 1:
                current = pack(packed, transition, t, g, current, True)
                multiply(beta, later, packed, height)
            for i in range(width):
                if t == lengths[start + i] - 1:
                    for k in range(size):
                        beta[k * lanes + u64(i)] = 1.0
            load(here, lanes, alpha, offsets, active, size, zero)
            sum_products(norm, probs, here, beta, lanes, size)
            for i in range(width):
                if active[i] and not abs(norm[i] - one) < 1e-2:
                    exact[start + i] = False
                norm[i] = one / norm[i] if active[i] and exact[start + i] else zero
            load(later, lanes, likelihood, offsets, active, size, zero)
            weigh(later, lanes, size, peak, low)
            for i in range(width):
                peak[i] = norm[i] / total[t * count + start + i] if active[i] else zero
                norm[i] *= weight[i]
            scale_lanes(probs, norm, lanes, size)
            store(gamma, offsets, active, size, probs, lanes)
            scale_lanes(beta, peak, lanes, size)
            for k in range(size):
                for i in range(lanes):
                    p = k * lanes + i
                    later[p] = later[p] * beta[p] if here[p] > zero else zero
                    probs[p] = later[p] * weight[i]
            store(message, offsets, active, size, probs, lanes)
        for row in range(start, start + width):
            begin = lengths[row] if exact[row] else 0
            clear(gamma, row, begin, most, count, size)
            clear(message, row, begin, most, count, size)
        start += width


@kernel
def _peak_of_row(likelihood, offset, size, zero):
    """Largest log-likelihood of one step of one sequence; zero where all are -inf."""
    peak = likelihood[offset]
    for k in range(_1, size):
        x = likelihood[offset + k]
        peak = x if x > peak else peak
    return zero if peak == -np.inf else peak


@kernel
def _weigh_row(seen, likelihood, offset, size, low):
    """As :func:`weigh`, for one step of one sequence; returns the peak."""
    peak = _peak_of_row(likelihood, offset, size, low - low)
    for k in range(size):
        x = likelihood[offset + k] - peak
        value = exp(low if x < low else x)
        seen[k] = value * 0 if x == -np.inf else value
    return peak


@kernel
def forward_rows(
    first, last, initial, transition, likelihood, lengths, least, floor, tiny, slack,
    alpha, total, evidence, exact,
):  # fmt: skip
    """Forward pass of few sequences, one after the other."""
    num_states = transition.shape[2]
    count, groups = lengths.shape[0], transition.shape[1]
    per, most = count // groups, total.shape[0] // count
    size, height = u64(num_states), u64((num_states + 3) // 4 * 4)
    packed = np.zeros(height * height, alpha.dtype)
    mass, arrived = np.zeros(height, alpha.dtype), np.zeros(height, alpha.dtype)
    seen = np.zeros(height, alpha.dtype)
    zero, one, low = alpha.dtype.type(0), alpha.dtype.type(1), alpha.dtype.type(floor)
    current, several = -1, transition.shape[0] > 1  # which matrix is packed; are there many
    for row in range(first, last):
        product, logs = 1.0, 0.0  # of the norms of several steps
        faint, scale, smallest = least < tiny, one, zero
        for t in range(lengths[row]):
            if t == 0:
                for k in range(size):
                    arrived[k] = initial[u64(row) * size + k]
            else:
                if several or current != row // per:
                    current = pack(packed, transition, t - 1, row // per, current, False)
                multiply_row(arrived, mass, packed, height)
            offset = u64(t * count + row) * size
            peak = _weigh_row(seen, likelihood, offset, size, low)
            if least >= 0.0:
                smallest = seen[0] * 0 + alpha.dtype.type(np.inf)
                for k in range(size):
                    if faint and arrived[k] * scale < slack:
                        exact[row] = False
                    if arrived[k] > 0.0 and seen[k] > 0.0:
                        smallest = min(smallest, arrived[k] * seen[k])
            norm = zero
            for k in range(size):
                mass[k] = arrived[k] * seen[k]
                norm += mass[k]
            total[t * count + row] = norm
            if not (norm >= slack and norm < np.inf):
                exact[row] = False
            if not exact[row]:
                break
            faint, scale = smallest <= tiny or smallest / norm * least < tiny, norm
            logs, product = _accumulate(logs + peak, product, norm)
            inverse = one / norm
            for k in range(size):
                mass[k] *= inverse
                alpha[offset + k] = mass[k]
        evidence[row] = logs + np.log(product)
        _clear_end(alpha, total, row, lengths[row] if exact[row] else 0, most, count, size)


@kernel
def backward_rows(
    first, last, transition, likelihood, lengths, factor, floor, alpha, total, exact,
    gamma, message,
):  # fmt: skip
    """Backward pass of few sequences, one after the other."""
    num_states = transition.shape[2]
    count, groups = lengths.shape[0], transition.shape[1]
    per, most = count // groups, total.shape[0] // count
    size, height = u64(num_states), u64((num_states + 3) // 4 * 4)
    packed = np.zeros(height * height, alpha.dtype)
    beta, later = np.zeros(height, alpha.dtype), np.zeros(height, alpha.dtype)
    zero, one, low = alpha.dtype.type(0), alpha.dtype.type(1), alpha.dtype.type(floor)
    current, several = -1, transition.shape[0] > 1
    for row in range(first, last):
        weight = factor[row]
        for t in range(lengths[row] - 1 if exact[row] else -1, -1, -1):
            if t == lengths[row] - 1:
                for k in range(size):
                    beta[k] = 1
            else:
                if several or current != row // per:
                    current = pack(packed, transition, t, row // per, current, True)
                multiply_row(beta, later, packed, height)
            offset = u64(t * count + row) * size
            norm = zero
            for k in range(size):
                norm += alpha[offset + k] * beta[k]
            if not abs(norm - one) < 1e-2:
                exact[row] = False
                break
            peak = _peak_of_row(likelihood, offset, size, zero)
            inverse = one / norm
            strength = inverse * weight
            inverse /= total[t * count + row]
            for k in range(size):
                x = likelihood[offset + k] - peak
                value = exp(low if x < low else x)
                here = alpha[offset + k]
                gamma[offset + k] = here * beta[k] * strength
                value = value * (beta[k] * inverse)
                later[k] = value if here > zero and x > -np.inf else zero
                message[offset + k] = later[k] * weight
        begin = lengths[row] if exact[row] else 0
        clear(gamma, row, begin, most, count, size)
        clear(message, row, begin, most, count, size)


@kernel
def take_rows(first, last, table, rows, out):
    """Write ``table[rows]`` to ``out``, for rows ``first`` to ``last``."""
    for i in range(first, last):
        row = table[rows[i]]
        for k in range(out.shape[1]):
            out[i, k] = row[k]


@kernel
def add_rows(first, last, rows, values, out):
    """Add ``values[i]`` to ``out[rows[i]]``, where that lies between ``first`` and ``last``."""
    for i in range(rows.shape[0]):
        if first <= rows[i] < last:
            row = out[rows[i]]
            for k in range(out.shape[1]):
                row[k] += values[i, k]


@kernel
def _columns(tile, array, start, count):
    """Copy rows to a tile, whose columns are contiguous; zeros below them."""
    width, entries = u64(array.shape[1]), array.ravel()
    for k in range(width):
        offset, place = k * _BESIDE, u64(start) * width + k
        for i in range(count):
            tile[offset + i] = entries[place]
            place += width
        for i in range(count, _ROWS):
            tile[offset + i] = 0


@kernel
def add_products(first, last, weights, rows, out):
    """Add the products of ``weights`` ``(N, K)`` and ``rows`` ``(N, F)``, in float64."""
    height, width = u64(weights.shape[1] + 3) // _4 * _4, u64(rows.shape[1] + 1) // _2 * _2
    left, right = np.zeros(height * _BESIDE), np.zeros(width * _BESIDE)
    total = np.zeros((height, width))
    for start in range(first, last, ROWS):
        count = u64(min(ROWS, last - start))
        _columns(left, weights, start, count)
        _columns(right, rows, start, count)
        for j in range(_0, height, _4):
            for k in range(_0, width, _2):
                p, q = j * _BESIDE, k * _BESIDE
                a0, a1, b0, b1, c0, c1, d0, d1 = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
                for i in range(_ROWS):
                    x, y = right[q + i], right[q + _BESIDE + i]
                    a, b = left[p + i], left[p + _BESIDE + i]
                    c, d = left[p + _2 * _BESIDE + i], left[p + _3 * _BESIDE + i]
                    a0 += a * x
                    a1 += a * y
                    b0 += b * x
                    b1 += b * y
                    c0 += c * x
                    c1 += c * y
                    d0 += d * x
                    d1 += d * y
                total[j, k] += a0
                total[j, k + _1] += a1
                total[j + _1, k] += b0
                total[j + _1, k + _1] += b1
                total[j + _2, k] += c0
                total[j + _2, k + _1] += c1
                total[j + _3, k] += d0
                total[j + _3, k + _1] += d1
    for k in range(out.shape[0]):
        for f in range(out.shape[1]):
            out[k, f] += total[k, f]
