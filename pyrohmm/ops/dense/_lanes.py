"""Arithmetic of the compiled recursions along many sequences, or along the states of one.

A tile holds entry k of sequence i at L k + i: arithmetic runs along its L = ``LANES`` sequences, so
that few states are no waste. Where there are few sequences it runs along the states instead.
K is rounded up to a multiple of four, with zeros.
"""

from __future__ import annotations

import numpy as np

from .._numba_math import exp, inner, u64

LANES = 32  # sequences that go through a matrix together, if there are so many
_0, _1, _2, _3, _4, _LANES = (u64(i) for i in (0, 1, 2, 3, 4, LANES))


@inner
def scratch(size, real):
    """Zeros with space around them.

    Compiled loops over several arrays take another way, with other rounding, where these might
    overlap; what is near in memory might. Results would depend on where the arrays lie.
    """
    around = u64(4) * size + u64(64)
    return np.zeros(size + around + around, real)[around : around + size]


@inner
def load_block(tile, at, stride, array, a, b, c, d):
    """Write four numbers each, from ``a``, ``b``, ``c`` and ``d`` on, to four lanes of a tile."""
    for k in range(_4):
        o = at + k * stride
        tile[o], tile[o + _1] = array[a + k], array[b + k]
        tile[o + _2], tile[o + _3] = array[c + k], array[d + k]


@inner
def store_block(array, a, b, c, d, tile, at, stride):
    """Write four lanes of a tile into rows of an array."""
    for k in range(_4):
        o = at + k * stride
        array[a + k], array[b + k] = tile[o], tile[o + _1]
        array[c + k], array[d + k] = tile[o + _2], tile[o + _3]


@inner
def add_block(array, a, b, c, d, tile, at, stride):
    """Add four lanes of a tile to rows of an array, which may be the same."""
    for k in range(_4):
        o = at + k * stride
        array[a + k] += tile[o]
        array[b + k] += tile[o + _1]
        array[c + k] += tile[o + _2]
        array[d + k] += tile[o + _3]


@inner
def add_rows(array, offsets, size, tile, lanes):
    """Add the sequences of a tile to rows of ``array``; ``size`` is a multiple of four."""
    for i in range(_0, lanes, _4):
        a, b, c, d = offsets[i], offsets[i + _1], offsets[i + _2], offsets[i + _3]
        for k in range(_0, size, _4):
            add_block(array, a + k, b + k, c + k, d + k, tile, k * lanes + i, lanes)


@inner
def load(tile, lanes, array, offsets, active, size, other):
    """Copy rows of ``array`` to the sequences of a tile; to those not active, ``other``."""
    whole = size // _4 * _4
    for i in range(_0, lanes, _4):
        a, b, c, d = offsets[i], offsets[i + _1], offsets[i + _2], offsets[i + _3]
        done = _0
        if active[i] and active[i + _1] and active[i + _2] and active[i + _3]:
            done = whole
            for k in range(_0, whole, _4):
                load_block(tile, k * lanes + i, lanes, array, a + k, b + k, c + k, d + k)
        for j in range(i, i + _4):
            if active[j]:
                for k in range(done, size):
                    tile[k * lanes + j] = array[offsets[j] + k]
            else:
                for k in range(size):
                    tile[k * lanes + j] = other


@inner
def store(array, offsets, active, size, tile, lanes):
    """Copy the active sequences of a tile to rows of ``array``."""
    whole = size // _4 * _4
    for i in range(_0, lanes, _4):
        a, b, c, d = offsets[i], offsets[i + _1], offsets[i + _2], offsets[i + _3]
        done = _0
        if active[i] and active[i + _1] and active[i + _2] and active[i + _3]:
            done = whole
            for k in range(_0, whole, _4):
                store_block(array, a + k, b + k, c + k, d + k, tile, k * lanes + i, lanes)
        for j in range(i, i + _4):
            if active[j]:
                for k in range(done, size):
                    array[offsets[j] + k] = tile[k * lanes + j]


@inner
def weigh(seen, lanes, size, peak, low):
    """Replace log-likelihoods by likelihoods over their ``peak``, whose logarithm is kept.

    What is not zero becomes at least the smallest normal number, the exponential of ``low``.
    """
    for i in range(lanes):
        peak[i] = seen[i]
    for k in range(_1, size):
        for i in range(lanes):
            x = seen[k * lanes + i]
            peak[i] = x if x > peak[i] else peak[i]
    for i in range(lanes):
        peak[i] = low - low if peak[i] == -np.inf else peak[i]
    for k in range(size):
        for i in range(lanes):
            x = seen[k * lanes + i] - peak[i]
            value = exp(low if x < low else x)
            seen[k * lanes + i] = value * 0 if x == -np.inf else value


@inner
def multiply(out, tile, packed, height):
    """Write the product of a tile of ``LANES`` messages with a matrix."""
    for j in range(_0, height, _4):
        q = j * _LANES
        for k in range(_0, height, _4):
            o = k * _LANES
            m = j * height + k
            a0, a1, a2, a3 = packed[m], packed[m + _1], packed[m + _2], packed[m + _3]
            m += height
            b0, b1, b2, b3 = packed[m], packed[m + _1], packed[m + _2], packed[m + _3]
            m += height
            c0, c1, c2, c3 = packed[m], packed[m + _1], packed[m + _2], packed[m + _3]
            m += height
            d0, d1, d2, d3 = packed[m], packed[m + _1], packed[m + _2], packed[m + _3]
            if j == _0:
                for i in range(_LANES):
                    a, b = tile[q + i], tile[q + _LANES + i]
                    c, d = tile[q + _2 * _LANES + i], tile[q + _3 * _LANES + i]
                    out[o + i] = a * a0 + b * b0 + c * c0 + d * d0
                    out[o + _LANES + i] = a * a1 + b * b1 + c * c1 + d * d1
                    out[o + _2 * _LANES + i] = a * a2 + b * b2 + c * c2 + d * d2
                    out[o + _3 * _LANES + i] = a * a3 + b * b3 + c * c3 + d * d3
            else:
                for i in range(_LANES):
                    a, b = tile[q + i], tile[q + _LANES + i]
                    c, d = tile[q + _2 * _LANES + i], tile[q + _3 * _LANES + i]
                    out[o + i] += a * a0 + b * b0 + c * c0 + d * d0
                    out[o + _LANES + i] += a * a1 + b * b1 + c * c1 + d * d1
                    out[o + _2 * _LANES + i] += a * a2 + b * b2 + c * c2 + d * d2
                    out[o + _3 * _LANES + i] += a * a3 + b * b3 + c * c3 + d * d3


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
def reach(out, origin, tile, packed, height):
    """Max-plus product of rows and a matrix, in lanes: see :func:`multiply`.

    ``origin`` is the number of the state that the largest comes from, the first of equal ones.
    """
    for i in range(height * _LANES):
        out[i] = -np.inf
        origin[i] = 0
    for j in range(_0, height, _4):
        q, first = j * _LANES, origin.dtype.type(j)
        second, third = first + origin.dtype.type(1), first + origin.dtype.type(2)
        fourth = first + origin.dtype.type(3)
        for k in range(height):
            o, m = k * _LANES, j * height + k
            a, b = packed[m], packed[m + height]
            c, d = packed[m + _2 * height], packed[m + _3 * height]
            for i in range(_LANES):
                w, x = tile[q + i] + a, tile[q + _LANES + i] + b
                y, z = tile[q + _2 * _LANES + i] + c, tile[q + _3 * _LANES + i] + d
                low, high = second if x > w else first, fourth if z > y else third
                w, y = x if x > w else w, z if z > y else y
                low, w = high if y > w else low, y if y > w else w
                top = out[o + i]
                origin[o + i] = low if w > top else origin[o + i]
                out[o + i] = w if w > top else top
