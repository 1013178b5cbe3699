"""Inputs of compiled recursions per step, and vector arithmetic along sequences or states.

A tile holds entry k of sequence i at L k + i: arithmetic runs along its L = ``LANES`` sequences, so
that few states are no waste. Where there are few sequences it runs along the states instead.
K is rounded up to a multiple of four, with zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .._numba_math import exp, inner, kernel, u64

LANES = 32  # sequences that go through a matrix together, if there are so many
READ = 32  # steps of one sequence that are read together: exponentials of few states are no loop
_0, _1, _2, _3, _4, _LANES = (u64(i) for i in (0, 1, 2, 3, 4, LANES))


@inner
def scratch(size, real):
    """Zero-filled working memory, padded on both sides.

    Compiled loops over several arrays take another way, with other rounding, where these might
    overlap; what is near in memory might. Results would depend on where the arrays lie.
    """
    around = u64(4) * size + u64(64)
    return np.zeros(size + around + around, real)[around : around + size]


@inner
def add_rows(array, offsets, size, tile, lanes):
    """Add the sequences of a tile to rows of ``array``."""
    for i in range(lanes):
        for k in range(size):
            array[offsets[i] + k] += tile[k * lanes + i]


@inner
def load(tile, lanes, array, offsets, active, size, other):
    """Copy rows of ``array`` to the sequences of a tile; to those not active, ``other``."""
    for k in range(size):
        for i in range(lanes):
            tile[k * lanes + i] = array[offsets[i] + k] if active[i] else other


@inner
def store(array, offsets, active, size, tile, lanes):
    """Copy the active sequences of a tile to rows of ``array``."""
    for i in range(lanes):
        if active[i]:
            for k in range(size):
                array[offsets[i] + k] = tile[k * lanes + i]


@inner
def multiply(out, tile, packed, height):
    """Write the product of a tile of ``LANES`` messages with a matrix."""
    for i in range(height * _LANES):
        out[i] = 0
    for j in range(_0, height, _4):
        q = j * _LANES
        for k in range(height):
            o, m = k * _LANES, j * height + k
            a, b = packed[m], packed[m + height]
            c, d = packed[m + _2 * height], packed[m + _3 * height]
            for i in range(_LANES):
                out[o + i] += (
                    tile[q + i] * a
                    + tile[q + _LANES + i] * b
                    + tile[q + _2 * _LANES + i] * c
                    + tile[q + _3 * _LANES + i] * d
                )


@inner
def multiply_row(out, mass, matrix, height):
    """Write the product of one message with a matrix."""
    for k in range(height):
        out[k] = 0
    for j in range(_0, height, _4):
        m = j * height
        a, b, c, d = mass[j], mass[j + _1], mass[j + _2], mass[j + _3]
        for k in range(height):
            out[k] += (
                a * matrix[m + k]
                + b * matrix[m + height + k]
                + c * matrix[m + _2 * height + k]
                + d * matrix[m + _3 * height + k]
            )


@inner
def sum_products(norm, product, first, second, lanes, size):
    """Write the product of two tiles, and its sum for each sequence."""
    for i in range(lanes):
        norm[i] = 0
    for k in range(size):
        for i in range(lanes):
            value = first[k * lanes + i] * second[k * lanes + i]
            product[k * lanes + i] = value
            norm[i] += value


@inner
def scale_lanes(tile, factor, lanes, size):
    """Multiply each sequence of a tile by its factor."""
    for k in range(size):
        for i in range(lanes):
            tile[k * lanes + i] *= factor[i]


@inner
def reach(out, tile, packed, height):
    """Write the max-plus product of a tile of ``LANES`` messages with a matrix."""
    for i in range(height * _LANES):
        out[i] = -np.inf
    for j in range(_0, height, _4):
        q = j * _LANES
        for k in range(height):
            o, m = k * _LANES, j * height + k
            a, b = packed[m], packed[m + height]
            c, d = packed[m + _2 * height], packed[m + _3 * height]
            for i in range(_LANES):
                w, x = tile[q + i] + a, tile[q + _LANES + i] + b
                y, z = tile[q + _2 * _LANES + i] + c, tile[q + _3 * _LANES + i] + d
                w, y = x if x > w else w, z if z > y else y
                w = y if y > w else w
                out[o + i] = w if w > out[o + i] else out[o + i]


# What a step reads, and sums of what is found ---------------------------------------------------


class Data(NamedTuple):
    """Arguments of both passes over N sequences in G groups; symbols or likelihoods are empty.

    Attributes:
        initial: ``(N, K)``, probabilities.
        matrices: ``(S, G, height, height)``, probabilities, S = 1 or T - 1.
        symbols: Their numbers, flat.
        tables: ``(G, V + 1, height)``, probabilities of symbols, scaled; the last row is for
            missing ones.
        peaks: ``(G, V + 1)``, logarithms of the scales.
        likelihood: Log-likelihoods, flat.
        first: ``(N,)``, where the first step of each sequence lies in those.
        along: How much further each next step lies.
        lengths: ``(N,)``.
        steps: T.
        limits: The smallest positive probability of the chain, or -1 if no step is watched; the
            logarithm of the smallest normal number; twice that number, above which nothing was
            raised to it; what a product must be above to be surely exact.
    """

    initial: np.ndarray
    matrices: np.ndarray
    symbols: np.ndarray
    tables: np.ndarray
    peaks: np.ndarray
    likelihood: np.ndarray
    first: np.ndarray
    along: int
    lengths: np.ndarray
    steps: int
    limits: tuple[float, float, float, float]


@kernel
def prepare(initial, transition, logs, low, high, eps, starts, matrices, tables, peaks):
    """Exponentiate log-probabilities into arrays; returns limits for the check of underflow.

    Args:
        initial: ``(N, K)``.
        transition: ``(S, G, K, K)``.
        logs: ``(G, K, V)``, of symbols; V = 0 if there are none.
        low: Logarithm of the smallest normal number.
        high: Logarithm of the largest number.
        eps: Relative precision.
        starts: ``initial`` of :class:`Data`, written.
        matrices: And these, zeros before.
        tables: And these, zeros before.
        peaks: And these, zeros before.

    Returns:
        ``limits`` of :class:`Data`.
    """
    real, (steps, groups, size) = initial.dtype, transition.shape[:3]
    least, most, zeros = real.type(0), real.type(1), False
    for row in range(len(initial)):
        least, most, zeros = _exponentials(starts[row], initial[row], low, high, least, most, zeros)
    for s, g, j in np.ndindex(steps, groups, size):
        out, given = matrices[s, g, j, :size], transition[s, g, j]
        least, most, zeros = _exponentials(out, given, low, high, least, most, zeros)
    _scale_tables(logs, low, tables, peaks)
    tiny, smallest = np.exp(low) * most, np.exp(least)
    slack = tiny * size / eps
    watched = zeros or not smallest * smallest >= slack
    return smallest if watched else -1.0, np.float64(low), 2 * tiny, slack


@inner
def _exponentials(out, logs, low, high, least, most, zeros):
    """Write exponentials; what is not zero becomes at least the smallest normal number.

    Returns ``least`` or a smaller logarithm, ``most`` or a larger probability, and whether there
    are zeros or NaN.
    """
    for k in range(logs.shape[0]):
        x = logs[k]
        zeros |= not x > -np.inf
        least = x if -np.inf < x < least else least
        value = exp(low if not x > low else high if x > high else x)
        value = np.inf if x > high else value
        value = 0 if x == -np.inf else x if x != x else value
        most = value if value > most else most
        out[k] = value
    return least, most, zeros


@inner
def _scale_tables(logs, low, tables, peaks):
    """Write symbol probabilities ``(G, V + 1, height)`` over their largest, and its logarithm."""
    groups, size, count = logs.shape
    for g in range(groups):
        peak = peaks[g]
        peak[:count] = -np.inf
        for k in range(size):
            for v in range(count):
                x = logs[g, k, v]
                peak[v] = x if x > peak[v] or x != x else peak[v]
        for v in range(count):
            peak[v] = 0 if peak[v] == -np.inf else peak[v]
        for k in range(size):
            for v in range(count):
                x = logs[g, k, v] - peak[v]
                value = exp(low if not x > low else x)
                tables[g, v, k] = 0 if x == -np.inf else x if x != x else value
        tables[g, count:, :size] = 1  # of a missing symbol


@kernel
def starts_of(groups, size, over_groups, over):
    """Memory offset of each sequence, ``(N,)``, from strides."""
    first = np.empty(groups * size, np.int64)
    for g, i in np.ndindex(groups, size):
        first[g * size + i] = g * over_groups + i * over
    return first


@inner
def accumulate(logs, product, norm):
    """Multiply a norm into a product, part of the logarithm before it leaves its range."""
    if norm < 1e-100 or norm > 1e100:  # even two of them might leave it
        logs += np.log(norm)
    else:
        product *= norm
    if product < 1e-200 or product > 1e200:
        logs += np.log(product)
        product = 1.0
    return logs, product


@inner
def tile_of(data, tile):
    """Group, first sequence and number of sequences of a tile."""
    count, groups = data.lengths.shape[0], data.matrices.shape[1]
    size = count // groups
    tiles = (size + LANES - 1) // LANES
    start = tile // tiles * size + tile % tiles * LANES
    return tile // tiles, start, min(LANES, (tile // tiles + 1) * size - start)


# Arrays are passed by themselves, for each that is in a tuple takes its time in every call.


@inner
def begin_step(rows, active, symbols, first, along, lengths, t, start, width, missing, exact):
    """Set the active sequences of a tile at step t, and their symbol or data row."""
    for i in range(LANES):
        here = i < width and t < lengths[start + i] and exact[start + i]
        active[i] = here
        rows[i] = missing
        if here:
            place = first[start + i] + t * along
            rows[i] = u64(symbols[place]) if symbols.shape[0] else u64(place)


@inner
def read(seen, peak, rows, active, symbols, entries, peaks, likelihood, size, height, low):
    """Write the likelihoods of a step over their largest, and the logarithms of those.

    What is not zero becomes at least the smallest normal number, the exponential of ``low``.
    """
    if symbols.shape[0]:
        for i in range(LANES):
            peak[i] = peaks[rows[i]]
            rows[i] *= height
        load(seen, _LANES, entries, rows, active, height, low * 0 + 1)
        return
    load(seen, _LANES, likelihood, rows, active, size, low - low)
    for i in range(_LANES):
        peak[i] = seen[i]
    for k in range(_1, size):
        for i in range(_LANES):
            x = seen[k * _LANES + i]
            peak[i] = x if x > peak[i] else peak[i]
    for i in range(_LANES):
        peak[i] = low - low if peak[i] == -np.inf else peak[i]
    for k in range(size):
        for i in range(_LANES):
            x = seen[k * _LANES + i] - peak[i]
            value = exp(low if x < low else x)
            seen[k * _LANES + i] = value * 0 if x == -np.inf else value


@inner
def watch(smallest, low, faint, scale, slack, arrived, seen, active, width, size, sure, start):
    """Note each sequence's smallest positive product; clear ``sure`` where mass may be lost.

    And in ``low`` the least mass that arrives.
    """
    for i in range(_LANES):
        smallest[i] = low[i] = np.inf
    for k in range(size):
        for i in range(_LANES):
            p, q = arrived[k * _LANES + i], seen[k * _LANES + i]
            low[i] = p if p < low[i] else low[i]
            product = p * q if p > 0 and q > 0 else np.inf
            smallest[i] = product if product < smallest[i] else smallest[i]
    for i in range(width):
        if faint[i] and active[i] and low[i] * scale[i] < slack:
            sure[start + i] = False


@inner
def take(norm, peak, active, logs, product, slack):
    """Multiply the norms of a step into the products; returns how many over- or underflowed.

    A product becomes part of the logarithm before it leaves its range.
    """
    lost, small = 0, 0
    for i in range(_LANES):
        lost += not (norm[i] >= slack and norm[i] < np.inf)
        small += norm[i] < 1e-100 or product[i] < 1e-150
        small += norm[i] > 1e100 or product[i] > 1e150
    if small > 0:
        for i in range(LANES):
            if active[i]:
                logs[i], product[i] = accumulate(logs[i] + peak[i], product[i], norm[i])
        return lost
    for i in range(_LANES):
        product[i] *= norm[i] if active[i] else 1.0
        logs[i] += peak[i] if active[i] else 0.0
    return lost


@inner
def read_rows(
    seen, peak, place, count, along, symbols, entries, peaks, likelihood, size, height, low
):
    """Read likelihoods ``(count, size)``, flat, of some steps of one sequence: see :func:`read`."""
    zero = low - low
    for step in range(count):
        row, offset = u64(step) * size, u64(place + step * along)
        if symbols.shape[0]:
            peak[step], offset = peaks[symbols[offset]], u64(symbols[offset]) * height
            for k in range(size):
                seen[row + k] = entries[offset + k]
            continue
        top = likelihood[offset]
        for k in range(_1, size):
            x = likelihood[offset + k]
            top = x if x > top else top
        peak[step] = zero if top == -np.inf else top
        for k in range(size):
            seen[row + k] = likelihood[offset + k] - peak[step]
    for i in range(_0 if symbols.shape[0] else u64(count) * size):
        x = seen[i]
        value = exp(low if x < low else x)
        seen[i] = zero if x == -np.inf else value
