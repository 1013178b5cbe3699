"""The recursions over blocks of states, compiled by Numba, for models on the CPU.

What they compute is documented in :mod:`pyrohmm._blockwise`, and most of their arguments are parts
of a ``Plan``. A kernel works on the items ``first`` to ``last`` of ``schedule``, which mixes
large and small ones, so that threads have equal work; it releases Python's lock.
"""

from __future__ import annotations

import numpy as np

from ._numba_chain import _exp, _kernel
from ._numba_chain import run as run

_u = np.uint64  # offsets without a sign need no test for a negative one, so that loops vectorise


# Numbers below ``least``, whose logarithm is ``low``, are zero: arithmetic with numbers below the
# smallest normal one takes many times as long.


@_kernel
def _raised(x, low):
    """The exponential, of x up to 0."""
    value = _exp(low if x < low else x)
    return value if x > low else value * 0


@_kernel
def _row_softmax(row, width, low):
    """Softmax in place; the least of it."""
    peak = row[0]
    for j in range(_u(1), width):
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


@_kernel
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
                found = _row_softmax(row, _u(width), scores.dtype.type(low))
                lowest[p] = found if i == 0 or found < lowest[p] else lowest[p]


@_kernel
def exp_of_pairs(first, last, schedule, source, target, sizes, base, stride, low, logs, lowest):
    """Replace the logarithms of each pair of blocks by their exponentials; note the least.

    It is 0 if one that is positive is not kept, and below 0, the least positive one, if some are
    zero by themselves.
    """
    least = logs.dtype.type(low)
    for q in range(first, last):
        p = schedule[q]
        found, zeros, cut = np.inf, False, False
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
                    found = min(found, logs[j])
        found = min(found, 1.0)
        lowest[p] = 0.0 if cut else -found if zeros else found


@_kernel
def sums_of_blocks(first, last, scores, starts, low, out):
    """Logarithms of the sums over each block, of rows ``scores`` ``(R, K)``, ``out`` ``(R, B)``."""
    least = scores.dtype.type(low)
    for i in range(first, last):
        for b in range(starts.shape[0] - 1):
            row, width = scores[i, starts[b] : starts[b + 1]], _u(starts[b + 1] - starts[b])
            peak = row[0]
            for j in range(_u(1), width):
                peak = row[j] if row[j] > peak else peak
            total = peak * 0
            for j in range(width):
                total += _raised(row[j] - peak, least)
            out[i, b] = peak + np.log(total)


@_kernel
def weighted_softmax_of_blocks(first, last, scores, starts, low, sums, weights):
    """Replace rows of scores ``(R, K)`` by softmax in each block times a weight ``(R, B)``."""
    least = scores.dtype.type(low)
    tiny = scores.dtype.type(np.exp(low))
    for i in range(first, last):
        for b in range(starts.shape[0] - 1):
            row, width = scores[i, starts[b] : starts[b + 1]], _u(starts[b + 1] - starts[b])
            total, weight = sums[i, b], weights[i, b]
            for j in range(width):
                x = row[j] - total
                value = _raised(x if x < 0 else x * 0, least) * weight
                row[j] = value if value > tiny or value < -tiny else value * 0


@_kernel
def forward(
    first, last, schedule, lengths, begins, block, sizes, offsets, pair, base, stride, laws, lowest,
    shares, least, tiny, eps, initial, seen, cut, alpha, norm, evidence, lost, sound,
):  # fmt: skip
    shared = shares.shape[0] > 0
    mass = np.empty(alpha.shape[1], alpha.dtype)
    most = alpha.dtype.type(1)
    for q in range(first, last):
        r = schedule[q]
        total = 0.0
        old = fresh = 0.0
        before = 0
        for t in range(lengths[r]):
            now = begins[t] + r
            width = _u(sizes[block[now]])
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
                if shared:
                    share = shares[block[now], offsets[block[before]] : offsets[block[before] + 1]]
                    for i in range(_u(height)):
                        mass[i] *= share[i]
                whole = mass[0] * 0
                for i in range(_u(height)):
                    whole += mass[i]
                    smallest = mass[i] if there[i] > 0 and mass[i] < smallest else smallest
                p = pair[now]
                for i in range(height):
                    row = laws[
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


@_kernel
def backward(
    first, last, schedule, lengths, begins, block, sizes, offsets, pair, base, stride, laws, shares,
    least, seen, alpha, norm, weights, gamma, message, sound,
):  # fmt: skip
    shared = shares.shape[0] > 0
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
            width = _u(sizes[block[now]])
            here, law, factor = alpha[now], gamma[now], seen[now]
            total = here[0] * 0
            for j in range(width):
                law[j] = here[j] * beta[j]
                total += law[j]
            # it is one, but for a drift by rounding
            if not (total > 0.99 and total < 1.01):
                sound[r] = False
                break
            scale = weight / total
            for j in range(width):
                law[j] *= scale
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
                row = laws[base[p] + i * stride[p] : base[p] + i * stride[p] + sizes[block[now]]]
                value = row[0] * 0
                for j in range(width):
                    value += row[j] * sent[j]
                beta[i] = value
            if shared:
                share = shares[block[now], offsets[block[before]] : offsets[block[before] + 1]]
                for i in range(_u(height)):
                    beta[i] *= share[i]


@_kernel
def gradients_of_pairs(
    first, last, schedule, tokens_of, tokens, before, block, sizes, offsets, base, stride, least,
    alpha, message, shares, laws, moved, changed,
):  # fmt: skip
    """Write gradients of the laws of each pair of blocks to ``moved``, which may be ``laws``.

    And those of ``shares`` to ``changed``. With shares, gradients are those by the scores of which
    the laws are the softmax; without, by the logarithms of the laws.
    """
    shared = shares.shape[0] > 0
    row = np.empty(alpha.shape[1], alpha.dtype)
    for q in range(first, last):
        p = schedule[q]
        one = tokens[tokens_of[p]]
        source, target = block[before[one]], block[one]
        width, size = _u(sizes[target]), sizes[target]
        for i in range(sizes[source]):
            for j in range(width):
                row[j] = 0
            for n in range(tokens_of[p], tokens_of[p + 1]):
                now = tokens[n]
                a = alpha[before[now], i]
                sent = message[now]
                for j in range(width):
                    row[j] += a * sent[j]
            begin = base[p] + i * stride[p]
            law, out = laws[begin : begin + size], moved[begin : begin + size]
            if shared:
                total = row[0] * 0
                for j in range(width):
                    total += row[j] * law[j]
                state = offsets[source] + i
                changed[target, state] = total
                share = shares[target, state]
                for j in range(width):
                    value = share * law[j] * (row[j] - total)
                    out[j] = value if value > least or value < -least else value * 0
            else:
                for j in range(width):
                    value = law[j] * row[j]
                    out[j] = value if value > least or value < -least else value * 0
