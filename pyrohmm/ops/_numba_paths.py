"""Compiled recursions of dense chains in logarithms: log space, Viterbi, sampling of paths."""

from __future__ import annotations

import numpy as np

from ._numba_lanes import LANES, load, pack, reach
from ._numba_math import exp, kernel, logsumexp, u64
from ._numba_math import run as run

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
    num_states = likelihood.shape[3]
    size = likelihood.shape[2]
    steps = transition.shape[0]
    sure = SURE
    for value in probs.flat:  # potentials may be above one
        sure = max(sure, SURE * value)
    scores, mass, sums = np.empty(num_states), np.empty(num_states), np.empty(num_states)
    beta, later = np.empty(num_states), np.empty(num_states)
    for i in range(first, last):
        g = i // size
        b = i % size
        end = lengths[g, b] - 1
        for k in range(num_states):
            messages[0, g, b, k] = initial[g, b, k] + likelihood[0, g, b, k]
        for t in range(1, end + 1):
            here = 0 if steps == 1 else t - 1
            matrix = transposed[here, g]
            peak = _over_largest(mass, messages[t - 1, g, b])
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
                        scores[j] = messages[t - 1, g, b, j] + matrix[k, j]
                    value = logsumexp(scores)
                messages[t, g, b, k] = value + likelihood[t, g, b, k]
        whole = logsumexp(messages[end, g, b])
        evidence[g, b] = whole
        if not with_posterior or not (whole > -np.inf and whole < np.inf):
            if not whole < np.inf:  # NaN or inf: there is no posterior
                gamma[:, g, b] = np.nan
                counts[:, i] = np.nan
            continue
        beta[:] = 0.0
        for t in range(end, -1, -1):
            if t < end:
                here = 0 if steps == 1 else t
                matrix, flows = transition[here, g], counts[here, i]
                for k in range(num_states):
                    later[k] = likelihood[t + 1, g, b, k] + beta[k]
                peak = _over_largest(mass, later)
                for j in range(num_states):
                    total = 0.0
                    for k in range(num_states):
                        scores[k] = probs[here, g, j, k] * mass[k]
                        total += scores[k]
                    if sure <= total < np.inf:
                        beta[j] = peak + np.log(total)
                        share = np.exp(messages[t, g, b, j] + beta[j] - whole) / total
                        for k in range(num_states):
                            flows[j, k] += share * scores[k]
                        continue
                    for k in range(num_states):
                        scores[k] = matrix[j, k] + later[k]
                        flow = messages[t, g, b, j] + scores[k] - whole
                        if flow > -745.0:
                            flows[j, k] += np.exp(flow)
                    beta[j] = logsumexp(scores)
            for k in range(num_states):
                gamma[t, g, b, k] = np.exp(messages[t, g, b, k] + beta[k] - whole)


@kernel
def viterbi_lanes(first, last, initial, transition, likelihood, lengths, best):
    """Most probable paths of many sequences, of up to 256 states."""
    num_states = transition.shape[2]
    count, groups = lengths.shape[0], transition.shape[1]
    per = count // groups
    size, height, lanes = u64(num_states), u64((num_states + 3) // 4 * 4), u64(LANES)
    packed = np.full(height * height, -np.inf, likelihood.dtype)
    score = np.full(height * lanes, -np.inf, likelihood.dtype)
    reached = np.full(height * lanes, -np.inf, likelihood.dtype)
    origin = np.zeros(height * lanes, likelihood.dtype)
    back = np.zeros(u64(best.shape[0]) * size * lanes, np.uint8)
    seen, peak = np.zeros(height * lanes, likelihood.dtype), np.zeros(LANES, likelihood.dtype)
    zero = likelihood.dtype.type(0)
    offsets, active = np.zeros(LANES, np.uint64), np.zeros(LANES, np.bool_)
    states = np.zeros(LANES, np.uint64)
    current = -1
    start = first
    while start < last:
        g = start // per
        width = min(LANES, last - start, (g + 1) * per - start)
        longest = lengths[start : start + width].max()
        for t in range(longest):
            for i in range(LANES):
                active[i] = i < width and t < lengths[start + i]
                offsets[i] = u64(t * count + start + i) * size
            if t == 0:
                load(reached, lanes, initial, offsets, active, size, zero)
            else:
                current = pack(packed, transition, t - 1, g, current, False)
                reach(reached, origin, score, packed, height)
                row = u64(t) * size * lanes
                for k in range(size * lanes):
                    back[row + k] = np.uint8(origin[k])
            load(seen, lanes, likelihood, offsets, active, size, zero)
            for i in range(lanes):
                peak[i] = -np.inf
            for k in range(size):
                for i in range(lanes):
                    x = reached[k * lanes + i] + seen[k * lanes + i]
                    score[k * lanes + i] = x
                    peak[i] = x if x > peak[i] else peak[i]
            for i in range(lanes):
                peak[i] = peak[i] if peak[i] > -np.inf else zero
            for k in range(size):
                for i in range(lanes):
                    score[k * lanes + i] -= peak[i]
            for i in range(width):
                if t == lengths[start + i] - 1:
                    lane, state = u64(i), u64(0)
                    for k in range(size):
                        if score[u64(k) * lanes + lane] > score[state * lanes + lane]:
                            state = u64(k)
                    states[i] = state
                    best[t, start + i] = state
        for t in range(longest - 1, 0, -1):
            for i in range(width):
                if t < lengths[start + i]:
                    state = u64(back[(u64(t) * size + states[i]) * lanes + u64(i)])
                    states[i] = state
                    best[t - 1, start + i] = state
        start += width


@kernel
def viterbi_rows(first, last, initial, transition, transposed, likelihood, lengths, delta, best):
    """Most probable paths of few sequences; ``delta`` becomes their scores."""
    num_states = likelihood.shape[3]
    size = likelihood.shape[2]
    steps = transition.shape[0]
    for i in range(first, last):
        g = i // size
        b = i % size
        end = lengths[g, b] - 1
        for t in range(end + 1):
            row = delta[t, g, b]
            if t == 0:
                row[:] = initial[g, b]
            else:
                matrix = transition[0 if steps == 1 else t - 1, g]
                row[:] = -np.inf
                for j in range(num_states):
                    score = delta[t - 1, g, b, j]
                    origin = matrix[j]
                    for k in range(num_states):
                        reached = score + origin[k]
                        row[k] = reached if reached > row[k] else row[k]
            for k in range(num_states):
                row[k] += likelihood[t, g, b, k]
            peak = row[0]
            for k in range(1, num_states):
                peak = row[k] if row[k] > peak else peak
            if peak > -np.inf:
                for k in range(num_states):
                    row[k] -= peak
        state = 0
        for t in range(end, -1, -1):
            row = delta[t, g, b]
            after = transposed[0 if steps == 1 else t, g, state] if t < end else row
            top = row[0] + after[0] if t < end else row[0]
            choice = 0
            for k in range(1, num_states):
                score = row[k] + after[k] if t < end else row[k]
                if score > top:
                    top = score
                    choice = k
            state = choice
            best[t, g, b] = state


@kernel
def sample_states(first, last, messages, transposed, lengths, low, uniform, states):
    """Sample paths backwards from log filtered ``messages``.

    A state less probable than the exponential of ``low``, relative to another, is not sampled.
    """
    num_states = messages.shape[3]
    size = messages.shape[2]
    steps = transposed.shape[0]
    mass = np.empty(num_states, messages.dtype)
    lowest, zero = messages.dtype.type(low), messages.dtype.type(0)
    for i in range(first, last):
        g = i // size
        b = i % size
        end = lengths[g, b] - 1
        for s in range(states.shape[0]):
            state = 0
            for t in range(end, -1, -1):
                row = messages[t, g, b]
                after = transposed[0 if steps == 1 else t, g, state] if t < end else row
                for k in range(num_states):
                    mass[k] = row[k] + after[k] if t < end else row[k]
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
                while state < num_states - 1 and not mass[state] > uniform[s, t, g, b] * total:
                    state += 1
                states[s, t, g, b] = state
