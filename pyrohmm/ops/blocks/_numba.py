"""Compiled recursions over blocks of states.

What they compute is said in :mod:`pyrohmm.ops.blocks.recursions`; most arguments are parts of a
``Plan``. Messages are float64, transition probabilities of any dtype. A kernel works on the items
``first`` to ``last`` of ``schedule``, which mixes large and small ones, so that threads have equal
work; it releases Python's lock.
"""

from __future__ import annotations

import numpy as np

from .._numba_math import exp, kernel, u64
from .._numba_math import run as run


@kernel
def _row_softmax(row, width, low):
    """Softmax in place, floored at the exponential of ``low``; whether an entry was floored."""
    peak = least = row[0]
    for j in range(u64(1), width):
        peak = row[j] if row[j] > peak else peak
        least = row[j] if row[j] < least else least
    total = peak * 0
    for j in range(width):
        x = row[j] - peak
        value = exp(low if x < low else x)
        row[j] = value
        total += value
    scale = 1 / total
    for j in range(width):
        row[j] *= scale
    return least - peak < low


@kernel
def softmax_of_pairs(
    first, last, schedule, pairs_of, source, target, sizes, base, stride, low, scores, raised
):
    """Replace the scores of each pair of blocks by the softmax of each row."""
    for q in range(first, last):
        u = schedule[q]
        for i in range(sizes[source[pairs_of[u]]]):
            for p in range(pairs_of[u], pairs_of[u + 1]):
                begin = base[p] + i * stride[p]
                width = sizes[target[p]]
                row = scores[begin : begin + width]
                if _row_softmax(row, u64(width), scores.dtype.type(low)):
                    raised[p] = True


@kernel
def exp_of_pairs(first, last, schedule, source, target, sizes, base, stride, low, logs, raised):
    """Exponentiate the logs of each pair of blocks in place, floored at ``low``; zeros stay."""
    least = logs.dtype.type(low)
    for q in range(first, last):
        p = schedule[q]
        for i in range(sizes[source[p]]):
            begin = base[p] + i * stride[p]
            for j in range(begin, begin + sizes[target[p]]):
                x = logs[j]
                if x == -np.inf:
                    logs[j] = 0
                else:
                    logs[j] = np.exp(least if x < least else x)
                    if x < least:
                        raised[p] = True


@kernel
def forward(
    first, last, schedule, lengths, block, sizes, offsets, pair, base, stride, probs,
    block_probs, initial, seen, least, alpha, norm, evidence, exact,
):  # fmt: skip
    """Forward pass; a sequence is ``exact`` if no message over- or underflowed."""
    two_levels = block_probs.shape[0] > 0
    mass = np.empty(alpha.shape[2])
    for q in range(first, last):
        r = schedule[q]
        for t in range(lengths[r]):
            now, before = block[r, t], block[r, t - 1]
            size = sizes[now]
            width = u64(size)
            here, weight = alpha[r, t], seen[r, t]
            if t == 0:
                for j in range(width):
                    here[j] = initial[r, j]
            else:
                height = sizes[before]
                there, begin = alpha[r, t - 1], offsets[before]
                for i in range(height):
                    mass[i] = there[i]
                    if two_levels:
                        mass[i] *= block_probs[now, begin + i]
                for j in range(width):
                    here[j] = 0
                p = pair[r, t]
                for i in range(height):
                    begin = base[p] + i * stride[p]
                    row, a = probs[begin : begin + size], mass[i]
                    for j in range(width):
                        here[j] += a * row[j]
            whole = 0.0
            for j in range(width):
                here[j] *= weight[j]
                whole += here[j]
            if not (whole > 0 and whole < np.inf):
                exact[r] = False
                break
            scale = 1 / whole
            lowest = 1.0
            for j in range(width):
                here[j] *= scale
                lowest = here[j] if here[j] > 0 and here[j] < lowest else lowest
            if lowest < least:
                exact[r] = False
                break
            norm[r, t] = whole
            evidence[r] += np.log(whole)


@kernel
def backward(
    first, last, schedule, lengths, block, sizes, offsets, pair, base, stride, probs,
    block_probs, raised, seen, alpha, norm, exact, weights, gamma, message, uses,
):  # fmt: skip
    """Backward pass: smoothed marginals ``gamma`` and messages, times ``weights``.

    In ``uses`` a bound on the expected number of transitions within pairs of blocks with
    probabilities that were ``raised``, over what they were raised to.
    """
    two_levels = block_probs.shape[0] > 0
    beta, sent = np.empty(alpha.shape[2]), np.empty(alpha.shape[2])
    for q in range(first, last):
        r = schedule[q]
        if not exact[r]:
            continue
        weight = weights[r]
        beta[:] = 1
        for t in range(lengths[r] - 1, -1, -1):
            now, before = block[r, t], block[r, t - 1]
            size = sizes[now]
            width = u64(size)
            here, smoothed, factor, out = alpha[r, t], gamma[r, t], seen[r, t], message[r, t]
            for j in range(width):
                smoothed[j] = here[j] * beta[j] * weight
            if t == 0:
                break
            inverse, total = 1 / norm[r, t], 0.0
            for j in range(width):
                value = factor[j] * beta[j] * inverse
                value = value if here[j] > 0 else 0.0
                sent[j] = value
                out[j] = value * weight
                total += value
            p = pair[r, t]
            if raised[p]:
                uses[r] += total
            for i in range(sizes[before]):
                begin = base[p] + i * stride[p]
                row, value = probs[begin : begin + size], 0.0
                for j in range(width):
                    value += row[j] * sent[j]
                if two_levels:
                    value *= block_probs[now, offsets[before] + i]
                beta[i] = value


@kernel
def gradients_of_pairs(
    first, last, schedule, steps_of, steps, source_of, target_of, sizes, offsets, base, stride,
    tiny, alpha, message, block_probs, probs, by_block,
):  # fmt: skip
    """Replace the probabilities of each pair of blocks by gradients.

    With block probabilities, by the scores of which they are the softmax; without, by their
    logarithms. Those below ``tiny`` are zero: arithmetic with such numbers takes many times as
    long.
    """
    two_levels = block_probs.shape[0] > 0
    row = np.empty(alpha.shape[1])
    for q in range(first, last):
        p = schedule[q]
        source, target = source_of[p], target_of[p]
        width, size = u64(sizes[target]), sizes[target]
        for i in range(sizes[source]):
            for j in range(width):
                row[j] = 0
            for n in range(steps_of[p], steps_of[p + 1]):
                now = steps[n]
                a, sent = alpha[now - 1, i], message[now]
                for j in range(width):
                    row[j] += a * sent[j]
            begin = base[p] + i * stride[p]
            old, total, weight = probs[begin : begin + size], 0.0, 1.0
            if two_levels:
                for j in range(width):
                    total += row[j] * old[j]
                state = offsets[source] + i
                by_block[target, state] = total
                weight = block_probs[target, state]
            for j in range(width):
                value = weight * old[j] * (row[j] - total)
                old[j] = value if value > tiny or value < -tiny else 0.0
