"""The recursions compiled by Numba, for chains on the CPU whose matrices are small.

With few states a step of the recursion costs less than the call of a torch operation, so the
loop itself is compiled. Numba is optional (extra ``compiled``); without it
:mod:`pyrohmm.recursions` does the same with torch operations.

Arrays are time-major, ``T`` steps of ``G`` groups of ``n`` sequences with ``K`` states; the
groups have a transition matrix of their own each, ``(1|T-1, G, K, K)``. A kernel works on the
sequences ``first`` to ``last`` of the ``G * n``, so that threads can share the work; it releases
Python's lock. See :mod:`pyrohmm.recursions` for what is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

_kernel = njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract", "reassoc", "nsz"})


@cache
def _pool(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, thread_name_prefix="pyrohmm")


def run(kernel: Callable[..., None], count: int, work: int, *arguments: Any) -> None:
    """Run ``kernel(first, last, *arguments)`` over ``count`` sequences on torch's threads.

    Args:
        kernel: One of the kernels below.
        count: Number of sequences.
        work: Multiplications a sequence needs; little work is not worth a second thread.
        *arguments: Tensors on the CPU, passed as arrays that share their memory, or scalars.
    """
    passed = [item.numpy() if isinstance(item, Tensor) else item for item in arguments]
    threads = min(torch.get_num_threads(), count, 1 + count * work // 100_000)
    bounds = [count * part // threads for part in range(threads + 1)]
    tasks = [
        _pool(threads - 1).submit(kernel, bounds[part], bounds[part + 1], *passed)
        for part in range(1, threads)
    ]
    kernel(bounds[0], bounds[1], *passed)
    for task in tasks:
        task.result()


@_kernel
def _product(out, row, matrix):
    """Write ``row @ matrix`` to ``out``; four rows at a time keep the processor's units busy."""
    size = out.shape[0]
    out[:] = 0.0
    whole = size - size % 4
    for j in range(0, whole, 4):
        a, b, c, d = row[j], row[j + 1], row[j + 2], row[j + 3]
        first, second, third, fourth = matrix[j], matrix[j + 1], matrix[j + 2], matrix[j + 3]
        for k in range(size):
            out[k] += a * first[k] + b * second[k] + c * third[k] + d * fourth[k]
    for j in range(whole, size):
        a, first = row[j], matrix[j]
        for k in range(size):
            out[k] += a * first[k]


@_kernel
def forward(  # documented in recursions._forward
    first, last, initial, transition, weight, lengths, least, tiny, slack, alpha, total, exact
):
    num_states = alpha.shape[3]
    size = alpha.shape[2]
    steps = transition.shape[0]
    for i in range(first, last):
        g = i // size
        b = i % size
        product = 1.0  # smallest of the previous step, among the states that can be occupied
        smallest = 1.0  # the same, scaled
        scale = 1.0
        for t in range(lengths[g, b]):
            row = alpha[t, g, b]
            if t == 0:
                row[:] = initial[g, b]
            else:
                matrix = transition[0 if steps == 1 else t - 1, g]
                previous = alpha[t - 1, g, b]
                _product(row, previous, matrix)
            seen = weight[t, g, b]
            if least >= 0.0:
                faint = product <= tiny or smallest * least < tiny
                product = np.inf
                for k in range(num_states):
                    if faint and row[k] * scale < slack:
                        exact[g, b] = False
                    if row[k] > 0.0 and seen[k] > 0.0:
                        product = min(product, row[k] * seen[k])
            norm = row[0] * 0.0
            for k in range(num_states):
                row[k] *= seen[k]
                norm += row[k]
            total[t, g, b] = norm
            scale = norm
            if not (norm >= slack and norm < np.inf):
                exact[g, b] = False
            if not exact[g, b]:
                break
            smallest = product / norm
            inverse = 1 / norm
            for k in range(num_states):
                row[k] *= inverse


@_kernel
def backward(  # documented in recursions._backward
    first, last, transposed, weight, lengths, alpha, total, exact, gamma, message
):
    num_states = alpha.shape[3]
    size = alpha.shape[2]
    steps = transposed.shape[0]
    for i in range(first, last):
        g = i // size
        b = i % size
        if not exact[g, b]:
            continue
        end = lengths[g, b] - 1
        gamma[end, g, b] = alpha[end, g, b]
        beta = np.ones(num_states, alpha.dtype)
        for t in range(end - 1, -1, -1):
            later = message[t + 1, g, b]
            reached = alpha[t + 1, g, b]
            seen = weight[t + 1, g, b]
            inverse = 1 / total[t + 1, g, b]
            for k in range(num_states):
                value = seen[k] * beta[k] * inverse
                later[k] = value if reached[k] > 0.0 else 0.0
            _product(beta, later, transposed[0 if steps == 1 else t, g])
            here = gamma[t, g, b]
            norm = here[0] * 0.0
            for k in range(num_states):
                here[k] = alpha[t, g, b, k] * beta[k]
                norm += here[k]
            if not abs(norm - 1.0) < 1e-2:
                exact[g, b] = False
                break
            inverse = 1 / norm
            for k in range(num_states):
                here[k] *= inverse
                later[k] *= inverse
                beta[k] *= inverse


@_kernel
def log_space(  # documented in recursions._log_space
    first, last, initial, transition, transposed, likelihood, lengths, smooth,
    messages, evidence, gamma, moves,
):  # fmt: skip
    num_states = likelihood.shape[3]
    size = likelihood.shape[2]
    steps = transition.shape[0]
    scores = np.empty(num_states)
    beta = np.empty(num_states)
    later = np.empty(num_states)
    for i in range(first, last):
        g = i // size
        b = i % size
        end = lengths[g, b] - 1
        for k in range(num_states):
            messages[0, g, b, k] = initial[g, b, k] + likelihood[0, g, b, k]
        for t in range(1, end + 1):
            matrix = transposed[0 if steps == 1 else t - 1, g]
            for k in range(num_states):
                for j in range(num_states):
                    scores[j] = messages[t - 1, g, b, j] + matrix[k, j]
                messages[t, g, b, k] = _logsumexp(scores) + likelihood[t, g, b, k]
        whole = _logsumexp(messages[end, g, b])
        evidence[g, b] = whole
        if not smooth or not (whole > -np.inf and whole < np.inf):
            if not whole < np.inf:  # NaN or inf: no law, and it must not look like one
                gamma[:, g, b] = np.nan
                moves[:, i] = np.nan
            continue
        beta[:] = 0.0
        for t in range(end, -1, -1):
            if t < end:
                matrix = transition[0 if steps == 1 else t, g]
                for k in range(num_states):
                    later[k] = likelihood[t + 1, g, b, k] + beta[k]
                for j in range(num_states):
                    for k in range(num_states):
                        scores[k] = matrix[j, k] + later[k]
                        flow = messages[t, g, b, j] + scores[k] - whole
                        if flow > -745.0:
                            moves[0 if steps == 1 else t, i, j, k] += np.exp(flow)
                    beta[j] = _logsumexp(scores)
            for k in range(num_states):
                gamma[t, g, b, k] = np.exp(messages[t, g, b, k] + beta[k] - whole)


@njit(cache=True, nogil=True, error_model="numpy")
def _logsumexp(scores):
    peak = scores[0]
    for k in range(1, scores.shape[0]):
        if not scores[k] <= peak:  # NaN wins
            peak = scores[k]
    if not (peak > -np.inf and peak < np.inf):
        return peak
    total = 0.0
    for k in range(scores.shape[0]):
        total += np.exp(scores[k] - peak)
    return peak + np.log(total)


@_kernel
def viterbi(first, last, initial, transition, transposed, likelihood, lengths, delta, best):
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


@_kernel
def sample_states(first, last, messages, transposed, lengths, uniform, states):
    num_states = messages.shape[3]
    size = messages.shape[2]
    steps = transposed.shape[0]
    mass = np.empty(num_states, messages.dtype)
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
                if not peak > -np.inf:  # an impossible sequence has no law: any path will do
                    mass[:] = 0.0
                    peak = mass[0]
                total = uniform[s, t, g, b] * 0.0
                for k in range(num_states):
                    total += np.exp(mass[k] - peak)
                    mass[k] = total
                state = 0
                while state < num_states - 1 and not mass[state] > uniform[s, t, g, b] * total:
                    state += 1
                states[s, t, g, b] = state


@_kernel
def take_rows(first, last, table, rows, out):
    """Write ``table[rows]`` to ``out``, for rows ``first`` to ``last``."""
    for i in range(first, last):
        row = table[rows[i]]
        for k in range(out.shape[1]):
            out[i, k] = row[k]


@_kernel
def add_rows(first, last, rows, values, out):
    """Add ``values[i]`` to ``out[rows[i]]``, where that lies between ``first`` and ``last``."""
    for i in range(rows.shape[0]):
        if first <= rows[i] < last:
            row = out[rows[i]]
            for k in range(out.shape[1]):
                row[k] += values[i, k]
