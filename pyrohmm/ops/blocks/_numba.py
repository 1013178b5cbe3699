"""Compiled recursions over blocks of states.

What they compute is said in :mod:`pyrohmm.ops.blocks.scaled`; most arguments are parts of a
``Plan``. A kernel works on the items ``first`` to ``last`` of ``schedule``, which mixes
large and small ones, so that threads have equal work; it releases Python's lock.
"""

from __future__ import annotations

import numpy as np

from .._numba_math import exp, kernel, u64
from .._numba_math import run as run

TOKENS = 64  # whose products are added up before they become part of a sum in float64

# Numbers below ``least``, whose logarithm is ``low``, are zero: arithmetic with numbers below the
# smallest normal one takes many times as long.


@kernel
def _raised(x, low):
    """The exponential, of x up to 0."""
    value = exp(low if x < low else x)
    return value if x > low else value * 0


@kernel
def _row_softmax(row, width, low):
    """Softmax in place; the least of it."""
    peak = row[0]
    for j in range(u64(1), width):
        peak = row[j] if row[j] > peak else peak
    total = peak * 0
    for j in range(width):
        value = _raised(row[j] - peak, low)
        row[j] = value
        total += value
    scale, lowest = 1 / total, total
    for j in range(width):
        value = row[j] * scale
        row[j] = value
        lowest = value if value < lowest else lowest
    return lowest


@kernel
def softmax_of_pairs(
    first, last, schedule, pairs_of, source, target, sizes, base, stride, low, scores, lowest
):
    """Replace the scores of each pair of blocks by the softmax of each row; note the least."""
    for q in range(first, last):
        u = schedule[q]
        height = sizes[source[pairs_of[u]]]
        for i in range(height):
            for p in range(pairs_of[u], pairs_of[u + 1]):
                begin = base[p] + i * stride[p]
                width = sizes[target[p]]
                row = scores[begin : begin + width]
                value = _row_softmax(row, u64(width), scores.dtype.type(low))
                lowest[p] = value if i == 0 or value < lowest[p] else lowest[p]


@kernel
def exp_of_pairs(first, last, schedule, source, target, sizes, base, stride, low, logs, lowest):
    """Replace the logarithms of each pair of blocks by their exponentials; note the least.

    It is 0 if one that is positive is not kept, and below 0, the least positive one, if some are
    zero by themselves.
    """
    least = logs.dtype.type(low)
    for q in range(first, last):
        p = schedule[q]
        smallest, zeros, cut = np.inf, False, False
        for i in range(sizes[source[p]]):
            begin = base[p] + i * stride[p]
            for j in range(begin, begin + sizes[target[p]]):
                x = logs[j]
                if x < least:
                    logs[j] = 0
                    zeros = zeros or x == -np.inf
                    cut = cut or x > -np.inf
                else:
                    logs[j] = np.exp(x)
                    smallest = min(smallest, logs[j])
        smallest = min(smallest, 1.0)
        lowest[p] = 0.0 if cut else -smallest if zeros else smallest


@kernel
def forward(
    first, last, schedule, lengths, begins, block, sizes, offsets, pair, base, stride, probs,
    lowest, block_probs, least, tiny, eps, initial, seen, cut, alpha, norm, evidence, lost, sound,
):  # fmt: skip
    """Forward pass, with a bound on the mass that was lost."""
    two_levels = block_probs.shape[0] > 0
    mass = np.empty(alpha.shape[1], alpha.dtype)
    most = alpha.dtype.type(1)
    for q in range(first, last):
        r = schedule[q]
        total = old = fresh = 0.0
        before = 0
        for t in range(lengths[r]):
            now = begins[t] + r
            width = u64(sizes[block[now]])
            here, weight = alpha[now], seen[now]
            smallest, faintest = most, most
            if t == 0:
                start = initial[r]
                height, arrived, low = 1, 1.0, 1.0
                for j in range(width):
                    here[j] = start[j]
                    smallest = start[j] if start[j] > 0 and start[j] < smallest else smallest
            else:
                height = sizes[block[before]]
                for j in range(width):
                    here[j] = 0
                there = alpha[before]
                for i in range(height):
                    mass[i] = there[i]
                if two_levels:
                    reached = block_probs[
                        block[now], offsets[block[before]] : offsets[block[before] + 1]
                    ]
                    for i in range(u64(height)):
                        mass[i] *= reached[i]
                whole = mass[0] * 0
                for i in range(u64(height)):
                    whole += mass[i]
                    smallest = mass[i] if there[i] > 0 and mass[i] < smallest else smallest
                p = pair[now]
                for i in range(height):
                    row = probs[
                        base[p] + i * stride[p] : base[p] + i * stride[p] + sizes[block[now]]
                    ]
                    a = mass[i]
                    for j in range(width):
                        here[j] += a * row[j]
                arrived, low = np.float64(whole), np.float64(lowest[p])
                if fresh > 0 and fresh < eps * arrived * low:
                    old += fresh / (arrived * low)
                    fresh = 0.0
            for j in range(width):
                faintest = weight[j] if weight[j] > 0 and weight[j] < faintest else faintest
            if cut[now] or low == 0:
                fresh += arrived * sizes[block[now]] * least
            if np.float64(smallest) * abs(low) * np.float64(faintest) < tiny:
                fresh += height * sizes[block[now]] * tiny
            whole = here[0] * 0
            for j in range(width):
                here[j] *= weight[j]
                whole += here[j]
            if not (whole >= tiny and whole < np.inf):
                sound[r] = False
                break
            scale = 1 / whole
            gone = whole * 0
            for j in range(width):
                value = here[j] * scale
                kept = value if value > least else value * 0
                here[j] = kept
                gone += value - kept
            fresh = fresh / np.float64(whole) + np.float64(gone)
            norm[now] = whole
            total += np.log(np.float64(whole))
            before = now
        evidence[r] += total
        lost[r] = fresh
        if not old + fresh < eps:
            sound[r] = False


@kernel
def backward(
    first, last, schedule, lengths, begins, block, sizes, offsets, pair, base, stride, probs,
    block_probs, least, seen, alpha, norm, weights, gamma, message, sound,
):  # fmt: skip
    """Backward pass: smoothed marginals ``gamma`` and messages, times ``weights``."""
    two_levels = block_probs.shape[0] > 0
    beta = np.empty(alpha.shape[1], alpha.dtype)
    sent = np.empty(alpha.shape[1], alpha.dtype)
    for q in range(first, last):
        r = schedule[q]
        if not sound[r]:
            continue
        weight = weights[r]
        beta[:] = 1
        for t in range(lengths[r] - 1, -1, -1):
            now = begins[t] + r
            width = u64(sizes[block[now]])
            here, smoothed, factor = alpha[now], gamma[now], seen[now]
            total = here[0] * 0
            for j in range(width):
                smoothed[j] = here[j] * beta[j]
                total += smoothed[j]
            # it is one, but for a drift by rounding
            if not (total > 0.99 and total < 1.01):
                sound[r] = False
                break
            scale = weight / total
            for j in range(width):
                smoothed[j] *= scale
            if t == 0:
                break
            inverse = 1 / (norm[now] * total)
            out = message[now]
            for j in range(width):
                value = factor[j] * beta[j] * inverse
                value = value if here[j] > 0 and value > least else value * 0
                sent[j] = value
                out[j] = value * weight
            before = begins[t - 1] + r
            height = sizes[block[before]]
            p = pair[now]
            for i in range(height):
                row = probs[base[p] + i * stride[p] : base[p] + i * stride[p] + sizes[block[now]]]
                value = row[0] * 0
                for j in range(width):
                    value += row[j] * sent[j]
                beta[i] = value
            if two_levels:
                reached = block_probs[
                    block[now], offsets[block[before]] : offsets[block[before] + 1]
                ]
                for i in range(u64(height)):
                    beta[i] *= reached[i]


@kernel
def gradients_of_pairs(
    first, last, schedule, tokens_of, tokens, before, block, sizes, offsets, base, stride, least,
    alpha, message, block_probs, probs, by_scores, by_block,
):  # fmt: skip
    """Gradients of each pair of blocks; ``by_scores`` may be ``probs``.

    With block probabilities, ``by_scores`` are those by the scores of which ``probs`` are the
    softmax; without, by the logarithms of ``probs``.
    """
    two_levels = block_probs.shape[0] > 0
    row, part = np.empty(alpha.shape[1]), np.empty(alpha.shape[1], alpha.dtype)
    for q in range(first, last):
        p = schedule[q]
        one = tokens[tokens_of[p]]
        source, target = block[before[one]], block[one]
        width, size = u64(sizes[target]), sizes[target]
        for i in range(sizes[source]):
            for j in range(width):
                row[j] = 0
            for start in range(tokens_of[p], tokens_of[p + 1], TOKENS):
                for j in range(width):
                    part[j] = 0
                for n in range(start, min(start + TOKENS, tokens_of[p + 1])):
                    now = tokens[n]
                    a = alpha[before[now], i]
                    sent = message[now]
                    for j in range(width):
                        part[j] += a * sent[j]
                for j in range(width):
                    row[j] += part[j]
            begin = base[p] + i * stride[p]
            old, out = probs[begin : begin + size], by_scores[begin : begin + size]
            if two_levels:
                total = row[0] * 0
                for j in range(width):
                    total += row[j] * old[j]
                state = offsets[source] + i
                by_block[target, state] = total
                weight = block_probs[target, state]
                for j in range(width):
                    value = weight * old[j] * (row[j] - total)
                    out[j] = value if value > least or value < -least else value * 0
            else:
                for j in range(width):
                    value = old[j] * row[j]
                    out[j] = value if value > least or value < -least else value * 0
