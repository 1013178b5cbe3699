"""Compiled bound of what a forward pass has lost, as :mod:`.message_passing` derives it."""

from __future__ import annotations

import numpy as np

from ._numba_evidence import _multiply_row, _read_row
from ._numba_math import kernel, u64


@kernel
def bound_losses(rows, data, transposed, alpha, total, width, most, exact):
    """Clear ``exact`` of sequences of which more than ``most`` of the evidence may be lost.

    ``alpha`` and ``total`` are those of a forward pass in tiles of ``width`` sequences.
    """
    for row in rows:
        _bound_losses(row, data, transposed, alpha, total, width, most, exact)


@kernel
def _bound_losses(row, data, transposed, alpha, total, width, most, exact):
    """As :func:`bound_losses`, of one sequence."""
    table, lengths, (_, low, tiny, slack) = data.table, data.lengths, data.limits
    size, height = u64(alpha.shape[0] // total.shape[0]), u64(transposed.shape[0])
    count, matrix, lanes = lengths.shape[0], transposed.ravel(), u64(width)
    steps = total.shape[0] // ((count + width - 1) // width * width)
    zero, one, lowest = table.dtype.type(0), table.dtype.type(1), table.dtype.type(low)
    floor, least = table.dtype.type((size + 2) * tiny), table.dtype.type(slack)
    beta, later = np.zeros(height, table.dtype), np.zeros(height, table.dtype)
    seen, lost = np.zeros(height, table.dtype), 0.0
    for k in range(size):
        beta[k] = one
    for t in range(lengths[row] - 1, -1, -1):
        place = u64(row // width * steps + t)
        offset = place * size * lanes + u64(row % width)
        every, both = zero, zero
        for k in range(size):
            every += beta[k]
            both += alpha[offset + k * lanes] * beta[k]
        norm = total[place * lanes + u64(row % width)]
        lost += (size + 4) * tiny * np.float64(every) / (np.float64(both) * np.float64(norm))
        if t == 0 or not lost <= most:
            break
        _read_row(seen, data.first[row] + t * data.along, data, size, lowest)
        norm = zero
        for k in range(size):
            norm += seen[k] * beta[k]
        if not norm >= least:
            lost = np.inf
            break
        inverse = one / norm
        for k in range(size):
            later[k] = beta[k] * (seen[k] * inverse)
        _multiply_row(beta, later, matrix, height)
        for k in range(size):
            beta[k] += floor
    if not lost <= most:
        exact[row] = False
