"""Compiled joining of the passes over pieces of long sequences, each from all states before it."""

from __future__ import annotations

import numpy as np

from ._numba_math import kernel


@kernel
def join(heads, later, initial, packed, evidence, ends, least, starts, finish, total):
    """Join the forward passes of pieces of sequences; returns whether no state was lost.

    Args:
        heads: ``(P + 1,)``, each piece's first row of ``evidence`` and ``ends``.
        later: ``(P,)``, whether it has K rows, for each state before it; else it begins a sequence.
        initial: ``(K,)``.
        packed: Transition probabilities.
        evidence: Log evidence of each row.
        ends: ``(., K)``, last messages of the rows.
        least: What no state may fall below at the end of a piece, lest it is lost.
        starts: ``(P, K)``: probabilities of first states given all before, to be written.
        finish: ``(P, K)``: last messages given all before, to be written.
        total: ``(P,)``: log evidence up to the end of each piece, to be written.
    """
    size = initial.shape[0]
    mass, kept = np.zeros(size), True
    for p in range(heads.shape[0] - 1):
        a = heads[p]
        if not later[p]:
            total[p] = evidence[a]
            for k in range(size):
                starts[p, k] = initial[k]
                finish[p, k] = ends[a, k]
            continue
        peak = -np.inf
        for i in range(size):
            kept = kept and finish[p - 1, i] >= least
            if finish[p - 1, i] > 0.0:  # states that cannot be there explain nothing
                peak = max(peak, np.log(finish[p - 1, i]) + evidence[a + i])
        for k in range(size):
            mass[k] = 0.0
            starts[p, k] = 0.0
        for i in range(size):
            before = finish[p - 1, i]
            if before > 0.0:
                weight = np.exp(np.log(before) + evidence[a + i] - peak)
                for k in range(size):
                    mass[k] += weight * ends[a + i, k]
                    starts[p, k] += before * packed[i, k]
        norm = mass.sum()
        total[p] = total[p - 1] + peak + np.log(norm)
        for k in range(size):
            finish[p, k] = mass[k] / norm
    return kept


@kernel
def look_back(heads, later, evidence, ends, finish, after):
    """Write what follows the last step of each piece, as :func:`backward_tiles` wants it.

    The arguments are those of :func:`join`; ``after`` is ``(P, K)``.
    """
    count, size = finish.shape
    for p in range(count - 1, -1, -1):
        a = heads[p + 1]
        if p + 1 == count or not later[p + 1]:  # a sequence ends
            for k in range(size):
                after[p, k] = 1
            continue
        peak, norm = -np.inf, 0.0
        for i in range(size):
            if finish[p, i] > 0.0:
                peak = max(peak, np.log(finish[p, i]) + evidence[a + i])
        for i in range(size):
            value = 0.0
            for k in range(size):
                value += ends[a + i, k] * after[p + 1, k]
            value *= np.exp(evidence[a + i] - peak) if finish[p, i] > 0.0 else 0.0
            after[p, i] = value
            norm += finish[p, i] * value
        for k in range(size):
            after[p, k] /= norm
