"""Compiled bound of what a forward pass has lost, as :mod:`.message_passing` derives it."""

from __future__ import annotations

import numpy as np

from ._numba_evidence import LANES, _begin_step, _read, _read_row
from ._numba_lanes import multiply, multiply_row
from ._numba_math import kernel, u64

_LANES = u64(LANES)


@kernel
def bound_tiles(first, last, data, transposed, alpha, total, most, unsure, exact):
    """Clear ``exact`` of unsure sequences of which more than ``most`` of the evidence may be lost.

    ``alpha`` and ``total`` are those of :func:`forward_tiles`.
    """
    for tile in range(first, last):
        width = min(LANES, data.lengths.shape[0] - tile * LANES)
        if unsure[tile * LANES : tile * LANES + width].any():
            _bound_tile(tile, width, data, transposed, alpha, total, most, unsure, exact)


@kernel
def _bound_tile(tile, width, data, transposed, alpha, total, most, unsure, exact):
    """Bound of what one tile of sequences has lost."""
    table, (_, low, tiny, slack), start = data.table, data.limits, tile * LANES
    size, height = u64(alpha.shape[0] // total.shape[0]), u64(transposed.shape[0])
    count, matrix = data.lengths.shape[0], transposed.ravel()
    steps = total.shape[0] // ((count + LANES - 1) // LANES * LANES)
    zero, one, lowest = table.dtype.type(0), table.dtype.type(1), table.dtype.type(low)
    floor, least = table.dtype.type((size + 2) * tiny), table.dtype.type(slack)
    beta, later = np.zeros(height * _LANES, table.dtype), np.zeros(height * _LANES, table.dtype)
    seen, peak = np.zeros(height * _LANES, table.dtype), np.zeros(LANES, table.dtype)
    every, both = np.zeros(LANES, table.dtype), np.zeros(LANES, table.dtype)
    rows, active, lost = np.zeros(LANES, np.uint64), np.zeros(LANES, np.bool_), np.zeros(LANES)
    longest = data.lengths[start : start + width].max()
    for t in range(longest - 1, -1, -1):
        _begin_step(rows, active, data, t, start, width, unsure)
        if t < longest - 1:
            multiply(beta, later, matrix, height)
        for i in range(_LANES):
            every[i] = both[i] = zero
        place = u64(tile * steps + t) * _LANES
        for k in range(size):
            for i in range(_LANES):
                beta[k * _LANES + i] += floor
        for i in range(width):
            if t == data.lengths[start + i] - 1:
                for k in range(size):
                    beta[k * _LANES + u64(i)] = one
        for k in range(size):
            for i in range(_LANES):
                p = k * _LANES + i
                every[i] += beta[p]
                both[i] += alpha[place * size + p] * beta[p]
        for i in range(LANES):
            if active[i]:
                loss = np.float64(both[i]) * np.float64(total[place + u64(i)])
                lost[i] += (size + 4) * tiny * np.float64(every[i]) / loss
        if t == 0:
            break
        _read(seen, peak, rows, active, data, size, height, lowest)
        for i in range(_LANES):
            every[i] = zero
        for k in range(size):
            for i in range(_LANES):
                every[i] += seen[k * _LANES + i] * beta[k * _LANES + i]
        for i in range(LANES):
            if active[i] and not every[i] >= least:
                lost[i] = np.inf
            every[i] = one / every[i] if active[i] and every[i] >= least else zero
        for k in range(size):
            for i in range(_LANES):
                p = k * _LANES + i
                later[p] = beta[p] * (seen[p] * every[i])
    for i in range(width):
        if unsure[start + i] and not lost[i] <= most:
            exact[start + i] = False


@kernel
def bound_rows(first, last, data, transposed, alpha, total, most, unsure, exact):
    """As :func:`bound_tiles`, of the messages of :func:`forward_rows`."""
    for row in range(first, last):
        if unsure[row]:
            _bound_row(row, data, transposed, alpha, total, most, exact)


@kernel
def _bound_row(row, data, transposed, alpha, total, most, exact):
    """Bound of what one sequence has lost."""
    table, lengths, (_, low, tiny, slack) = data.table, data.lengths, data.limits
    size, height = u64(alpha.shape[0] // total.shape[0]), u64(transposed.shape[0])
    matrix, steps = transposed.ravel(), total.shape[0] // lengths.shape[0]
    zero, one, lowest = table.dtype.type(0), table.dtype.type(1), table.dtype.type(low)
    floor, least = table.dtype.type((size + 2) * tiny), table.dtype.type(slack)
    beta, later = np.zeros(height, table.dtype), np.zeros(height, table.dtype)
    seen, lost = np.zeros(height, table.dtype), 0.0
    for k in range(size):
        beta[k] = one
    for t in range(lengths[row] - 1, -1, -1):
        place = u64(row * steps + t)
        every, both = zero, zero
        for k in range(size):
            every += beta[k]
            both += alpha[place * size + k] * beta[k]
        norm = total[place]
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
        multiply_row(beta, later, matrix, height)
        for k in range(size):
            beta[k] += floor
    if not lost <= most:
        exact[row] = False
