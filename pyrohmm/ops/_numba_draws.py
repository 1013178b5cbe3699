"""Compiled loop that filters a sequence and samples a path of it, by many parameters at once."""

from __future__ import annotations

import numpy as np

from ._numba_math import kernel
from ._numba_math import run as run

SMALL = 1e-100  # mass of a step, below which it is scaled to one
LEAST = 1e-130  # that below which what is a 1e-178th of it may be lost


@kernel
def sample_paths(
    first, last, initial, transition, transposed, table, offsets, rows, lengths, uniform, states,
    evidence,
):  # fmt: skip
    """Sample a path of each sequence under parameters ``first`` to ``last``, and its log evidence.

    Row ``rows[b, t]`` of ``table`` holds the likelihoods of the step over their largest, whose
    logarithm is in ``offsets``; a step of row -1 is missing. Where the mass is too small the
    evidence is NaN.
    """
    size, num_states = rows.shape[0], initial.shape[1]
    filtered = np.empty((rows.shape[1], num_states))
    sums = np.empty(num_states)
    for i in range(first * size, last * size):
        g, b = i // size, i % size
        total, logs = 1.0, 0.0
        for t in range(lengths[b]):
            row = rows[b, t]
            if t == 0:
                for k in range(num_states):
                    filtered[t, k] = initial[g, k]
            else:
                for k in range(num_states):
                    filtered[t, k] = 0.0
                for j in range(num_states):
                    mass = filtered[t - 1, j]
                    for k in range(num_states):
                        filtered[t, k] += mass * transition[g, j, k]
            total = 0.0
            if row >= 0:
                logs += offsets[g, row]
                for k in range(num_states):
                    filtered[t, k] *= table[g, row, k]
            for k in range(num_states):
                total += filtered[t, k]
            if not total > LEAST:
                total = np.nan
                break
            if total < SMALL:
                logs += np.log(total)
                for k in range(num_states):
                    filtered[t, k] /= total
                total = 1.0
        evidence[g, b] = logs + np.log(total)
        if total != total:
            continue
        state = 0
        for t in range(lengths[b] - 1, -1, -1):
            total = 0.0
            for k in range(num_states):
                total += (
                    filtered[t, k] * transposed[g, state, k]
                    if t < lengths[b] - 1
                    else filtered[t, k]
                )
                sums[k] = total
            bound = uniform[g, b, t] * total
            state = 0
            while state < num_states - 1 and not sums[state] > bound:
                state += 1
            states[g, b, t] = state
