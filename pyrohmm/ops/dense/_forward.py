"""Compiled forward pass of chains over whole sequences.

What a sum over paths needs is done in the loop itself: symbols are looked up, and nothing of size
N T K is written but the messages, and those only where a gradient is wanted. Probabilities of
symbols are scaled by the largest of each symbol, log-likelihoods by that of each step; how numbers
are watched is said in :mod:`.recursions`. K is rounded up to a multiple of four, with zeros.

A tile is ``LANES`` sequences of one group side by side: entry k of sequence i lies at
``LANES * k + i``. Few sequences go one after the other instead, along their states.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .._numba_math import inner, kernel, u64
from ._lanes import (
    _LANES,
    LANES,
    READ,
    Data,
    _0,
    accumulate,
    begin_step,
    multiply,
    multiply_row,
    read,
    read_rows,
    scale_lanes,
    scratch,
    sum_products,
    take,
    tile_of,
    watch,
)


class Messages(NamedTuple):
    """Scaled messages and norms that a forward pass writes and a backward pass reads.

    Attributes:
        evidence: ``(N,)``, log.
        exact: ``(N,)``, cleared where numbers left their range.
        sure: ``(N,)``, cleared where a step that is watched may have lost something.
        alpha: Filtered probabilities, flat: by tiles, steps, states, sequences; or by sequences,
            steps, states. Empty if no message is to be kept.
        total: Their sums before they were scaled, flat.
    """

    evidence: np.ndarray
    exact: np.ndarray
    sure: np.ndarray
    alpha: np.ndarray
    total: np.ndarray


@kernel
def forward_tiles(first, last, data, kept, found):
    """Forward pass of several tiles of sequences; messages are written if ``kept``."""
    data, found = Data(*data), Messages(*found)
    for tile in range(first, last):
        _forward_tile(tile, data, kept, found)


@inner
def _forward_tile(tile, data, kept, found):
    """Forward pass over one tile of sequences."""
    matrices, lengths, (least, low, tiny, slack) = data.matrices, data.lengths, data.limits
    real, several = matrices.dtype, matrices.shape[0] > 1
    size, height = u64(data.initial.shape[1]), u64(matrices.shape[2])
    g, start, width = tile_of(data, tile)
    steps, entries, peaks = data.steps, data.tables[g].ravel(), data.peaks[g]
    symbols, likelihood, exact = data.symbols, data.likelihood, found.exact
    starts, along, missing = data.first, data.along, u64(data.peaks.shape[1] - 1)
    mass, arrived = scratch(height * _LANES, real), scratch(height * _LANES, real)
    seen = scratch(height * _LANES, real)
    norm, peak = np.zeros(LANES, real), np.zeros(LANES, real)
    smallest, low_mass = np.zeros(LANES, real), np.zeros(LANES, real)
    scale = np.ones(LANES, real)
    faint = np.zeros(LANES, np.bool_)
    product, logs = np.ones(LANES), np.zeros(LANES)
    rows, active = np.zeros(LANES, np.uint64), np.zeros(LANES, np.bool_)
    one, lowest = real.type(1), real.type(low)
    faint[:] = least < tiny
    for t in range(lengths[start : start + width].max()):
        begin_step(
            rows, active, symbols, starts, along, lengths, t, start, width, missing, exact
        )  # fmt: skip
        read(seen, peak, rows, active, symbols, entries, peaks, likelihood, size, height, lowest)
        if t == 0:
            for i in range(LANES):  # those that are not there as the first, so that none is zero
                row = start + i if i < width else start
                for k in range(size):
                    arrived[k * _LANES + u64(i)] = data.initial[row, k]
        else:
            if several or t == 1:
                matrix = matrices[t - 1, g].ravel()
            multiply(arrived, mass, matrix, height)
        if least >= 0.0:
            watch(
                smallest, low_mass, faint, scale, slack, arrived, seen, active, width, size,
                found.sure, start,
            )  # fmt: skip
        sum_products(norm, mass, arrived, seen, _LANES, height)
        if take(norm, peak, active, logs, product, slack) > 0:
            for i in range(LANES):
                if not (norm[i] >= slack and norm[i] < np.inf):
                    if active[i]:
                        found.exact[start + i] = False
                    norm[i] = np.inf  # so that its messages become zero
                    for k in range(size):  # as NaN would remain
                        mass[k * _LANES + u64(i)] = 0
        if least >= 0.0:
            for i in range(LANES):
                faint[i] = smallest[i] <= tiny or smallest[i] / norm[i] * least < tiny
                scale[i] = norm[i]
        at = u64(tile * steps + t) * _LANES
        for i in range(_LANES if kept else _0):
            found.total[at + i] = norm[i]
        for i in range(_LANES):
            norm[i] = one / norm[i]
        scale_lanes(mass, norm, _LANES, height)
        for k in range(size * _LANES if kept else _0):
            found.alpha[at * size + k] = mass[k]
    for i in range(width):
        found.evidence[start + i] = logs[i] + np.log(product[i])


@kernel
def forward_rows(first, last, data, kept, found):
    """Forward pass over sequences one after the other."""
    data, found = Data(*data), Messages(*found)
    for row in range(first, last):
        _forward_row(row, data, kept, found)


@inner
def _forward_row(row, data, kept, found):
    """Forward pass over one sequence."""
    matrices, lengths, (least, low, tiny, slack) = data.matrices, data.lengths, data.limits
    real, several = matrices.dtype, matrices.shape[0] > 1
    size, height = u64(data.initial.shape[1]), u64(matrices.shape[2])
    g, steps = row * matrices.shape[1] // lengths.shape[0], data.steps
    symbols, entries, peaks = data.symbols, data.tables[g].ravel(), data.peaks[g]
    likelihood, begin, along = data.likelihood, data.first[row], data.along
    mass, arrived = scratch(height, real), scratch(height, real)
    seen, peak = scratch(size * u64(READ), real), np.zeros(READ, real)
    zero, one, lowest = real.type(0), real.type(1), real.type(low)
    product, logs, alpha, totals = 1.0, 0.0, found.alpha, found.total  # of several steps
    faint, scale, smallest = least < tiny, one, zero
    for t in range(lengths[row]):
        at, step = row * steps + t, t % READ
        if step == 0:
            read_rows(
                seen, peak, begin + t * along, min(READ, lengths[row] - t), along, symbols, entries,
                peaks, likelihood, size, height, lowest,
            )  # fmt: skip
        now = u64(step) * size
        if t == 0:
            for k in range(size):
                arrived[k] = data.initial[row, k]
        else:
            if several or t == 1:
                matrix = matrices[t - 1, g].ravel()
            multiply_row(arrived, mass, matrix, height)
        if least >= 0.0:
            smallest = zero + real.type(np.inf)
            for k in range(size):
                if faint and arrived[k] * scale < slack:
                    found.sure[row] = False
                if arrived[k] > zero and seen[now + k] > zero:
                    smallest = min(smallest, arrived[k] * seen[now + k])
        norm = zero
        for k in range(size):
            mass[k] = arrived[k] * seen[now + k]
            norm += mass[k]
        if not (norm >= slack and norm < np.inf):
            found.exact[row] = False
            break
        faint, scale = smallest <= tiny or smallest / norm * least < tiny, norm
        logs, product = accumulate(logs + peak[step], product, norm)
        inverse = one / norm
        for k in range(size):
            mass[k] *= inverse
        if kept:
            totals[at] = norm
            offset = u64(at) * size
            for k in range(size):
                alpha[offset + k] = mass[k]
    found.evidence[row] = logs + np.log(product)
