"""Compiled probabilities of the loops over whole sequences, from logarithms and back to counts."""

from __future__ import annotations

import numpy as np

from ._numba_math import exp, kernel, u64

_SOME = 64  # symbols, whose rows stay in the cache


@kernel
def probabilities(initial, transition, low, start, packed):
    """Write the exponentials of initial and transition logarithms.

    Returns:
        The smallest logarithm but -inf, whether that occurs, and the largest density of a
        transition, or one.
    """
    least, zeros, _ = _exponentials(initial, low, start)
    other, other_zeros, most = _exponentials(transition, low, packed)
    return min(least, other), zeros or other_zeros, most


@kernel
def _exponentials(logs, low, out):
    least, zero, zeros = out.dtype.type(np.inf), out.dtype.type(0), False
    most = out.dtype.type(1)
    for i in range(logs.shape[0]):
        for j in range(logs.shape[1]):
            x = logs[i, j]
            value = exp(low if x < low else x)
            out[i, j] = zero if x == -np.inf else value
            zeros = zeros or x == -np.inf
            least = x if zero - np.inf < x < least else least
            most = value if value > most else most
    return least, zeros, most


@kernel
def scaled_table(logs, low, table, peaks):
    """Probabilities ``(V + 1, height)`` over their largest, whose logarithms are kept.

    ``logs`` are ``(K, V)``; the last row is that of a missing symbol.
    """
    size, count = logs.shape
    zero = table.dtype.type(0)
    for v in range(count):
        peaks[v] = -np.inf
    for k in range(size):
        for v in range(count):
            x = logs[k, v]
            peaks[v] = x if x > peaks[v] or x != x else peaks[v]
    for v in range(count):
        peaks[v] = zero if peaks[v] == -np.inf else peaks[v]
    block, entries = np.empty(_SOME, table.dtype), table.ravel()  # contiguous, so it vectorises
    height = u64(table.shape[1])
    for first in range(0, count, _SOME):
        width = u64(min(_SOME, count - first))
        for k in range(size):
            row, scales = logs[k, first:], peaks[first:]
            for i in range(width):
                x = row[i] - scales[i]
                value = exp(low if x < low else x)
                block[i] = zero if x == -np.inf else value
            offset = u64(first) * height + u64(k)
            for i in range(width):
                entries[offset + i * height] = block[i]
    for k in range(size):
        table[count, k] = 1


@kernel
def finish(counts, packed, out):
    """Write expected transitions, from those over their probabilities; whether all are finite."""
    finite = True
    for j in range(out.shape[0]):
        for k in range(out.shape[1]):
            value = counts[j, k] * packed[j, k]
            value = value if packed[j, k] > 0 else 0.0  # a message to what cannot be reached
            finite = finite and abs(value) < np.inf
            out[j, k] = value
    return finite
