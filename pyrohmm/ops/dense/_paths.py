"""Compiled recursions of Markov chains in logarithms: log space, Viterbi, sampling of paths.

Arrays are of N sequences in groups that share matrices ``(S, G, K, K)``: log-likelihoods
``(N, T, K)``, initial ``(N, K)``.
"""

from __future__ import annotations

import numpy as np

from .._numba_math import copy, exp, kernel, logsumexp, u64
from ._lanes import _LANES, LANES, load, reach

SURE = 1e-280  # what a sum of products of numbers up to one is above if it loses only rounding


@kernel
def _over_largest(out, logs):
    """Write exponentials over their largest, whose logarithm is returned."""
    peak = logs[0]
    for k in range(1, logs.shape[0]):
        peak = logs[k] if logs[k] > peak else peak
    peak = peak if abs(peak) < np.inf else 0.0
    for k in range(logs.shape[0]):
        out[k] = np.exp(logs[k] - peak)
    return peak


@kernel
def log_space(
    first, last, initial, transition, transposed, probs, likelihood, lengths, with_posterior,
    messages, evidence, gamma, counts,
):  # fmt: skip
    """Forward-backward in log space: evidence, marginals and expected transition counts.

    Sums are products with ``probs``, those of ``transition``, where they surely lose nothing, and
    of logarithms where they might.
    """
    num_states, steps = likelihood.shape[2], transition.shape[0]
    size = lengths.shape[0] // transition.shape[1]
    sure = SURE
    for value in probs.flat:  # potentials may be above one
        sure = max(sure, SURE * value)
    scores, mass, sums = np.empty(num_states), np.empty(num_states), np.empty(num_states)
    beta, later = np.empty(num_states), np.empty(num_states)
    for i in range(first, last):
        g, end = i // size, lengths[i] - 1
        for k in range(num_states):
            messages[i, 0, k] = initial[i, k] + likelihood[i, 0, k]
        for t in range(1, end + 1):
            here = 0 if steps == 1 else t - 1
            matrix = transposed[here, g]
            peak = _over_largest(mass, messages[i, t - 1])
            sums[:] = 0.0
            for j in range(num_states):
                if mass[j] != 0.0:
                    for k in range(num_states):
                        sums[k] += mass[j] * probs[here, g, j, k]
            for k in range(num_states):
                if sure <= sums[k] < np.inf:
                    value = peak + np.log(sums[k])
                else:
                    for j in range(num_states):
                        scores[j] = messages[i, t - 1, j] + matrix[k, j]
                    value = logsumexp(scores)
                messages[i, t, k] = value + likelihood[i, t, k]
        whole = logsumexp(messages[i, end])
        evidence[i] = whole
        if not with_posterior or not (whole > -np.inf and whole < np.inf):
            if not whole < np.inf:  # NaN or inf: there is no posterior
                gamma[i] = np.nan
                counts[:, i] = np.nan
            continue
        beta[:] = 0.0
        for t in range(end, -1, -1):
            if t < end:
                here = 0 if steps == 1 else t
                matrix, flows = transition[here, g], counts[here, i]
                for k in range(num_states):
                    later[k] = likelihood[i, t + 1, k] + beta[k]
                peak = _over_largest(mass, later)
                for j in range(num_states):
                    total = 0.0
                    for k in range(num_states):
                        scores[k] = probs[here, g, j, k] * mass[k]
                        total += scores[k]
                    if sure <= total < np.inf:
                        beta[j] = peak + np.log(total)
                        share = np.exp(messages[i, t, j] + beta[j] - whole) / total
                        for k in range(num_states):
                            flows[j, k] += share * scores[k]
                        continue
                    for k in range(num_states):
                        scores[k] = matrix[j, k] + later[k]
                        flow = messages[i, t, j] + scores[k] - whole
                        if flow > -745.0:
                            flows[j, k] += np.exp(flow)
                    beta[j] = logsumexp(scores)
            for k in range(num_states):
                gamma[i, t, k] = np.exp(messages[i, t, k] + beta[k] - whole)


@kernel
def viterbi_lanes(first, last, initial, transition, likelihood, lengths, best):
    """Most probable paths of many sequences; a group is a unit of work."""
    steps, groups, num_states, _ = transition.shape
    size, height = u64(num_states), u64((num_states + 3) // 4 * 4)
    count, real = lengths.shape[0] // groups, likelihood.dtype
    packed = np.full(height * height, -np.inf, real)
    score, reached = (
        np.full(height * _LANES, -np.inf, real),
        np.full(height * _LANES, -np.inf, real),
    )
    origin, seen = np.zeros(height * _LANES, real), np.zeros(height * _LANES, real)
    back = np.zeros(u64(best.shape[1]) * size * _LANES, np.uint16)
    zero, peak = real.type(0), np.zeros(LANES, real)
    offsets, active = np.zeros(LANES, np.uint64), np.zeros(LANES, np.bool_)
    states = np.zeros(LANES, np.uint64)
    tiles, current = (count + LANES - 1) // LANES, -1  # which matrix is packed
    for tile in range(first, last):
        g, start = tile // tiles, tile // tiles * count + tile % tiles * LANES
        width = min(LANES, (g + 1) * count - start)
        longest = lengths[start : start + width].max()
        for t in range(longest):
            for i in range(LANES):
                active[i] = i < width and t < lengths[start + i]
                offsets[i] = u64((start + i) * best.shape[1] + t) * size
            if t == 0:
                for i in range(width):
                    for k in range(num_states):
                        reached[u64(k) * _LANES + u64(i)] = initial[start + i, k]
            else:
                wanted = g if steps == 1 else (t - 1) * groups + g
                if wanted != current:
                    current = wanted
                    for j in range(num_states):
                        for k in range(num_states):
                            packed[j * height + k] = transition[wanted // groups, g, j, k]
                reach(reached, origin, score, packed, height)
                row = u64(t) * size * _LANES
                for k in range(size * _LANES):
                    back[row + k] = np.uint16(origin[k])
            load(seen, _LANES, likelihood.ravel(), offsets, active, size, zero)
            for i in range(_LANES):
                peak[i] = -np.inf
            for k in range(size):
                for i in range(_LANES):
                    x = reached[k * _LANES + i] + seen[k * _LANES + i]
                    score[k * _LANES + i] = x
                    peak[i] = x if x > peak[i] else peak[i]
            for i in range(_LANES):
                peak[i] = peak[i] if peak[i] > -np.inf else zero
            for k in range(size):
                for i in range(_LANES):
                    score[k * _LANES + i] -= peak[i]
            for i in range(width):
                if t == lengths[start + i] - 1:
                    lane, state = u64(i), u64(0)
                    for k in range(size):
                        if score[u64(k) * _LANES + lane] > score[state * _LANES + lane]:
                            state = u64(k)
                    states[i] = state
                    best[start + i, t] = state
        for t in range(longest - 1, 0, -1):
            for i in range(width):
                if t < lengths[start + i]:
                    state = u64(back[(u64(t) * size + states[i]) * _LANES + u64(i)])
                    states[i] = state
                    best[start + i, t - 1] = state


@kernel
def viterbi_rows(first, last, initial, transition, likelihood, lengths, best):
    """Most probable paths of few sequences, one after the other."""
    steps, groups, num_states, _ = transition.shape
    size, longest = lengths.shape[0] // groups, likelihood.shape[1]
    scores = np.empty((longest, num_states), likelihood.dtype)
    for i in range(first, last):
        g, end = i // size, lengths[i] - 1
        for t in range(end + 1):
            row = scores[t]
            if t == 0:
                copy(row, initial[i])
            else:
                matrix = transition[0 if steps == 1 else t - 1, g]
                row[:] = -np.inf
                for j in range(num_states):
                    score = scores[t - 1, j]
                    origin = matrix[j]
                    for k in range(num_states):
                        reached = score + origin[k]
                        row[k] = reached if reached > row[k] else row[k]
            for k in range(num_states):
                row[k] += likelihood[i, t, k]
            peak = row[0]
            for k in range(1, num_states):
                peak = row[k] if row[k] > peak else peak
            if peak > -np.inf:
                for k in range(num_states):
                    row[k] -= peak
        state = 0
        for t in range(end, -1, -1):
            row, matrix = scores[t], transition[0 if steps == 1 else min(t, steps - 1), g]
            top, choice = row[0] + matrix[0, state] if t < end else row[0], 0
            for k in range(1, num_states):
                score = row[k] + matrix[k, state] if t < end else row[k]
                if score > top:
                    top, choice = score, k
            state = choice
            best[i, t] = state


@kernel
def sample_states(first, last, messages, transition, lengths, low, uniform, states):
    """Sample paths backwards from log filtered ``messages`` ``(N, T, K)``.

    A state less probable than the exponential of ``low``, relative to another, is not sampled.
    """
    steps, groups, num_states, _ = transition.shape
    size = lengths.shape[0] // groups
    mass = np.empty(num_states, messages.dtype)
    lowest, zero = messages.dtype.type(low), messages.dtype.type(0)
    for i in range(first, last):
        g, end = i // size, lengths[i] - 1
        for s in range(states.shape[0]):
            state = 0
            for t in range(end, -1, -1):
                row, matrix = messages[i, t], transition[0 if steps == 1 else min(t, steps - 1), g]
                for k in range(num_states):
                    mass[k] = row[k] + matrix[k, state] if t < end else row[k]
                peak = mass[0]
                for k in range(1, num_states):
                    peak = mass[k] if mass[k] > peak else peak
                if not peak > -np.inf:  # an impossible sequence has no posterior: any path will do
                    mass[:] = 0.0
                    peak = mass[0]
                for k in range(num_states):
                    x = mass[k] - peak
                    value = exp(x if x > lowest else lowest)
                    mass[k] = value if x > lowest else zero
                total = zero
                for k in range(num_states):
                    total += mass[k]
                    mass[k] = total
                state = 0
                while state < num_states - 1 and not mass[state] > uniform[s, i, t] * total:
                    state += 1
                states[s, i, t] = state
