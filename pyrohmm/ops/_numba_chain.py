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
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload
from torch import Tensor

_kernel = njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract", "reassoc", "nsz"})


# for rounding that is meant; if it were not said, it would be as the caller has it
_exactly = njit(cache=True, nogil=True, error_model="numpy", fastmath=False)
LANES = 32  # sequences that go through a matrix side by side, if there are so many
_u = np.uint64  # offsets without a sign need no test for a negative one, so that loops vectorise
_0, _1, _2, _3, _4, _LANES = (_u(i) for i in (0, 1, 2, 3, 4, LANES))
_single = np.float32


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
    if count == 0:
        return
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


# The exponential, as Numba would call it one number at a time ------------------------------------


@intrinsic
def _from_bits(_, bits):
    real, kind = types.float64, ir.DoubleType()
    if bits == types.int32:
        real, kind = types.float32, ir.FloatType()
    return real(bits), lambda _, builder, __, arguments: builder.bitcast(arguments[0], kind)


def _exp(x):  # of x from the log of the smallest normal number to 0
    raise NotImplementedError


@_exactly
def _exp_single(x):  # 2^n exp(r) with |r| <= log(2) / 2, where seven terms of the series are enough
    n = np.floor(x * _single(1.4426950408889634) + _single(0.5))
    r = (x - n * _single(0.693359375)) + n * _single(2.12194440054690583e-4)
    p = _single(1 / 5040)
    p = p * r + _single(1 / 720)
    p = p * r + _single(1 / 120)
    p = p * r + _single(1 / 24)
    p = p * r + _single(1 / 6)
    p = p * r + _single(0.5)
    p = p * r + _single(1)
    p = p * r + _single(1)
    return p * _from_bits(np.int32((np.int32(n) + 127) << 23))


@_exactly
def _exp_double(x):
    n = np.floor(x * 1.4426950408889634 + 0.5)
    r = (x - n * 0.693145751953125) - n * 1.4286068203094172e-6
    p = 1 / 6227020800
    p = p * r + 1 / 479001600
    p = p * r + 1 / 39916800
    p = p * r + 1 / 3628800
    p = p * r + 1 / 362880
    p = p * r + 1 / 40320
    p = p * r + 1 / 5040
    p = p * r + 1 / 720
    p = p * r + 1 / 120
    p = p * r + 1 / 24
    p = p * r + 1 / 6
    p = p * r + 0.5
    p = p * r + 1.0
    p = p * r + 1.0
    return p * _from_bits(np.int64((np.int64(n) + 1023) << 52))


@overload(_exp)
def _overload_exp(x):
    implementation = _exp_single if x == types.float32 else _exp_double
    return lambda x: implementation(x)


# Scaled messages ----------------------------------------------------------------------------------
#
# A block holds entry k of sequence i at L k + i: all arithmetic runs along its L = LANES sequences,
# so that few states are no waste. Where there are few sequences it runs along the states instead.
# K is rounded up to a multiple of four, with zeros.


@_kernel
def _pack(packed, matrix, transposed):
    """Write ``matrix`` ``(K, K)``, or its transpose, with zeros around it."""
    size = matrix.shape[0]
    height = (size + 3) // 4 * 4
    for j in range(size):
        for k in range(size):
            packed[j * height + k] = matrix[k, j] if transposed else matrix[j, k]


@_kernel
def _clear(array, i, begin, end, count, size):
    """Zero the steps from ``begin`` to ``end`` of sequence ``i``."""
    for t in range(begin, end):
        offset = _u(t * count + i) * size
        for k in range(size):
            array[offset + k] = 0


@_kernel
def _load(block, lanes, array, offsets, active, size, other):
    """Copy rows of ``array`` to the sequences of a block; to those not active, ``other``."""
    for i in range(lanes):
        if active[i]:
            offset = offsets[i]
            for k in range(size):
                block[k * lanes + i] = array[offset + k]
        else:
            for k in range(size):
                block[k * lanes + i] = other


@_kernel
def _store(array, offsets, active, size, block, lanes, factor):
    """Copy the sequences of a block, each times its factor, to rows of ``array``."""
    for i in range(lanes):
        if active[i]:
            offset, strength = offsets[i], factor[i]
            for k in range(size):
                array[offset + k] = block[k * lanes + i] * strength


@_kernel
def _weigh(seen, lanes, size, peak, low):
    """Replace log-likelihoods by likelihoods over their ``peak``, whose logarithm is kept.

    What is not zero becomes at least the smallest normal number, the exponential of ``low``.
    """
    for i in range(lanes):
        peak[i] = seen[i]
    for k in range(_1, size):
        for i in range(lanes):
            x = seen[k * lanes + i]
            peak[i] = x if x > peak[i] else peak[i]
    for i in range(lanes):
        peak[i] = low - low if peak[i] == -np.inf else peak[i]
    for k in range(size):
        for i in range(lanes):
            x = seen[k * lanes + i] - peak[i]
            value = _exp(low if x < low else x)
            seen[k * lanes + i] = value * 0 if x == -np.inf else value


@_kernel
def _multiply(out, block, packed, height):
    """Write the product of a block of ``LANES`` messages with a matrix."""
    for i in range(height * _LANES):
        out[i] = 0
    for j in range(_0, height, _4):
        q = j * _LANES
        for k in range(_0, height, _4):
            o = k * _LANES
            m = j * height + k
            a0, a1, a2, a3 = packed[m], packed[m + _1], packed[m + _2], packed[m + _3]
            m += height
            b0, b1, b2, b3 = packed[m], packed[m + _1], packed[m + _2], packed[m + _3]
            m += height
            c0, c1, c2, c3 = packed[m], packed[m + _1], packed[m + _2], packed[m + _3]
            m += height
            d0, d1, d2, d3 = packed[m], packed[m + _1], packed[m + _2], packed[m + _3]
            for i in range(_LANES):
                a, b = block[q + i], block[q + _LANES + i]
                c, d = block[q + _2 * _LANES + i], block[q + _3 * _LANES + i]
                out[o + i] += a * a0 + b * b0 + c * c0 + d * d0
                out[o + _LANES + i] += a * a1 + b * b1 + c * c1 + d * d1
                out[o + _2 * _LANES + i] += a * a2 + b * b2 + c * c2 + d * d2
                out[o + _3 * _LANES + i] += a * a3 + b * b3 + c * c3 + d * d3


@_kernel
def _sum_products(norm, product, first, second, lanes, size):
    """Write the product of two blocks, and its sum for each sequence."""
    for i in range(lanes):
        norm[i] = 0
    for k in range(size):
        for i in range(lanes):
            value = first[k * lanes + i] * second[k * lanes + i]
            product[k * lanes + i] = value
            norm[i] += value


@_kernel
def _scale(block, factor, lanes, size):
    """Multiply each sequence of a block by its factor."""
    for k in range(size):
        for i in range(lanes):
            block[k * lanes + i] *= factor[i]


@_kernel
def forward_blocks(  # documented in _messages.forward
    first, last, initial, transition, likelihood, lengths, least, floor, tiny, slack,
    alpha, total, evidence, exact,
):  # fmt: skip
    steps, groups, num_states, _ = transition.shape
    count = lengths.shape[0]
    per = count // groups
    most = total.shape[0] // count
    size, height = _u(num_states), _u((num_states + 3) // 4 * 4)
    block = LANES
    norm = np.zeros(block, alpha.dtype)
    lanes = _u(block)
    packed = np.zeros(height * height, alpha.dtype)
    mass = np.zeros(height * lanes, alpha.dtype)
    arrived = np.zeros(height * lanes, alpha.dtype)
    seen = np.zeros(height * lanes, alpha.dtype)
    zero, one, low = alpha.dtype.type(0), alpha.dtype.type(1), alpha.dtype.type(floor)
    peak = np.zeros(block, alpha.dtype)
    ones = np.ones(block, alpha.dtype)
    smallest = np.zeros(block, alpha.dtype)  # product of a step
    faint = np.zeros(block, np.bool_)  # whether the step before may have lost something
    scale = np.zeros(block, alpha.dtype)
    product = np.zeros(block)  # of the norms of several steps
    offsets, active = np.zeros(block, np.uint64), np.zeros(block, np.bool_)
    current = -1  # which matrix is packed
    start = first
    while start < last:
        g = start // per
        width = min(block, last - start, (g + 1) * per - start)
        longest = 0
        mass[:] = 0.0
        for i in range(width):
            longest = max(longest, lengths[start + i])
            evidence[start + i] = 0.0
            product[i] = 1.0
            faint[i] = least < tiny
            scale[i] = 1.0
        for t in range(longest):
            for i in range(block):
                active[i] = i < width and t < lengths[start + i] and exact[start + i]
                offsets[i] = _u((t * count if t > 0 else 0) + start + i) * size
            if t == 0:
                _load(arrived, lanes, initial, offsets, active, size, zero)
            else:
                wanted = g if steps == 1 else (t - 1) * groups + g
                if wanted != current:
                    _pack(packed, transition[0 if steps == 1 else t - 1, g], False)
                    current = wanted
                _multiply(arrived, mass, packed, height)
            _load(seen, lanes, likelihood, offsets, active, size, zero)
            _weigh(seen, lanes, size, peak, low)
            if least >= 0.0:
                for i in range(width):
                    smallest[i] = np.inf
                    for k in range(size):
                        p, q = arrived[k * lanes + _u(i)], seen[k * lanes + _u(i)]
                        if faint[i] and active[i] and p * scale[i] < slack:
                            exact[start + i] = False
                        if p > 0.0 and q > 0.0:
                            smallest[i] = min(smallest[i], p * q)
            _sum_products(norm, mass, arrived, seen, lanes, size)
            for i in range(width):
                if not active[i]:
                    norm[i] = 1.0
                    continue
                total[t * count + start + i] = norm[i]
                if not (norm[i] >= slack and norm[i] < np.inf):
                    exact[start + i] = False
                    norm[i] = np.inf  # so that its messages become zero
                    continue
                faint[i] = smallest[i] <= tiny or smallest[i] / norm[i] * least < tiny
                scale[i] = norm[i]
                evidence[start + i] += peak[i]
                if norm[i] < 1e-100:  # even two of them might underflow
                    evidence[start + i] += np.log(norm[i])
                else:
                    product[i] *= norm[i]
                if product[i] < 1e-200:
                    evidence[start + i] += np.log(product[i])
                    product[i] = 1.0
            for i in range(lanes):
                norm[i] = one / norm[i]
            _scale(mass, norm, lanes, size)
            _store(alpha, offsets, active, size, mass, lanes, ones)
        for i in range(width):
            row = start + i
            evidence[row] += np.log(product[i])
            begin = lengths[row] if exact[row] else 0
            _clear(alpha, row, begin, most, count, size)
            for t in range(begin, most):
                total[t * count + row] = 1.0
        start += width


@_kernel
def backward_blocks(  # documented in _messages.backward
    first, last, transition, likelihood, lengths, factor, floor, alpha, total, exact,
    gamma, message,
):  # fmt: skip
    steps, groups, num_states, _ = transition.shape
    count = lengths.shape[0]
    per = count // groups
    most = total.shape[0] // count
    size, height = _u(num_states), _u((num_states + 3) // 4 * 4)
    block = LANES
    norm = np.zeros(block, alpha.dtype)
    lanes = _u(block)
    packed = np.zeros(height * height, alpha.dtype)
    beta = np.zeros(height * lanes, alpha.dtype)
    later = np.zeros(height * lanes, alpha.dtype)
    here = np.zeros(height * lanes, alpha.dtype)
    law = np.zeros(height * lanes, alpha.dtype)
    zero, one, low = alpha.dtype.type(0), alpha.dtype.type(1), alpha.dtype.type(floor)
    peak = np.zeros(block, alpha.dtype)
    weight = np.zeros(block, alpha.dtype)
    offsets, active = np.zeros(block, np.uint64), np.zeros(block, np.bool_)
    current = -1
    start = first
    while start < last:
        g = start // per
        width = min(block, last - start, (g + 1) * per - start)
        longest = 0
        later[:] = 0.0
        for i in range(width):
            longest = max(longest, lengths[start + i])
            weight[i] = factor[start + i]
        for t in range(longest - 1, -1, -1):
            for i in range(block):
                active[i] = i < width and t < lengths[start + i] and exact[start + i]
                offsets[i] = _u(t * count + start + i) * size
            if t < longest - 1:
                wanted = g if steps == 1 else t * groups + g
                if wanted != current:
                    _pack(packed, transition[0 if steps == 1 else t, g], True)
                    current = wanted
                _multiply(beta, later, packed, height)
            for i in range(width):
                if t == lengths[start + i] - 1:
                    for k in range(size):
                        beta[k * lanes + _u(i)] = 1.0
            _load(here, lanes, alpha, offsets, active, size, zero)
            _sum_products(norm, law, here, beta, lanes, size)
            for i in range(width):
                if active[i] and not abs(norm[i] - one) < 1e-2:
                    exact[start + i] = False
                norm[i] = one / norm[i] if active[i] and exact[start + i] else zero
            _load(later, lanes, likelihood, offsets, active, size, zero)
            _weigh(later, lanes, size, peak, low)
            for i in range(width):
                peak[i] = norm[i] / total[t * count + start + i] if active[i] else zero
            _scale(law, norm, lanes, size)
            _scale(beta, peak, lanes, size)
            for k in range(size * lanes):
                later[k] = later[k] * beta[k] if here[k] > zero else zero
            _store(gamma, offsets, active, size, law, lanes, weight)
            _store(message, offsets, active, size, later, lanes, weight)
        for i in range(width):
            row = start + i
            begin = lengths[row] if exact[row] else 0
            _clear(gamma, row, begin, most, count, size)
            _clear(message, row, begin, most, count, size)
        start += width


@_kernel
def forward_rows(  # the same, for few sequences, one after the other
    first, last, initial, transition, likelihood, lengths, least, floor, tiny, slack,
    alpha, total, evidence, exact,
):  # fmt: skip
    steps, groups, num_states, _ = transition.shape
    count = lengths.shape[0]
    per = count // groups
    most = total.shape[0] // count
    size, height = _u(num_states), _u((num_states + 3) // 4 * 4)
    packed = np.zeros(height * height, alpha.dtype)
    mass, arrived = np.zeros(height, alpha.dtype), np.zeros(height, alpha.dtype)
    seen = np.zeros(height, alpha.dtype)
    zero, one, low = alpha.dtype.type(0), alpha.dtype.type(1), alpha.dtype.type(floor)
    current = -1  # which matrix is packed
    for row in range(first, last):
        g = row // per
        product, logs = 1.0, 0.0  # of the norms of several steps
        faint, scale, smallest = least < tiny, one, zero
        for t in range(lengths[row]):
            if t == 0:
                for k in range(size):
                    arrived[k] = initial[_u(row) * size + k]
            else:
                wanted = g if steps == 1 else (t - 1) * groups + g
                if wanted != current:
                    _pack(packed, transition[0 if steps == 1 else t - 1, g], False)
                    current = wanted
                for k in range(height):
                    arrived[k] = 0
                for j in range(_0, height, _4):
                    m = j * height
                    a, b, c, d = mass[j], mass[j + _1], mass[j + _2], mass[j + _3]
                    for k in range(height):
                        arrived[k] += (
                            a * packed[m + k]
                            + b * packed[m + height + k]
                            + c * packed[m + _2 * height + k]
                            + d * packed[m + _3 * height + k]
                        )
            offset = _u(t * count + row) * size
            peak = likelihood[offset]
            for k in range(_1, size):
                x = likelihood[offset + k]
                peak = x if x > peak else peak
            if peak == -np.inf:
                peak = zero
            for k in range(size):
                x = likelihood[offset + k] - peak
                value = _exp(low if x < low else x)
                seen[k] = zero if x == -np.inf else value
            if least >= 0.0:
                smallest = seen[0] * 0 + alpha.dtype.type(np.inf)
                for k in range(size):
                    if faint and arrived[k] * scale < slack:
                        exact[row] = False
                    if arrived[k] > 0.0 and seen[k] > 0.0:
                        smallest = min(smallest, arrived[k] * seen[k])
            norm = zero
            for k in range(size):
                mass[k] = arrived[k] * seen[k]
                norm += mass[k]
            total[t * count + row] = norm
            if not (norm >= slack and norm < np.inf):
                exact[row] = False
            if not exact[row]:
                break
            faint, scale = smallest <= tiny or smallest / norm * least < tiny, norm
            logs += peak
            if norm < 1e-100:
                logs += np.log(norm)
            else:
                product *= norm
            if product < 1e-200:
                logs += np.log(product)
                product = 1.0
            inverse = one / norm
            for k in range(size):
                mass[k] *= inverse
                alpha[offset + k] = mass[k]
        evidence[row] = logs + np.log(product)
        begin = lengths[row] if exact[row] else 0
        _clear(alpha, row, begin, most, count, size)
        for t in range(begin, most):
            total[t * count + row] = 1.0


@_kernel
def backward_rows(
    first, last, transition, likelihood, lengths, factor, floor, alpha, total, exact,
    gamma, message,
):  # fmt: skip
    steps, groups, num_states, _ = transition.shape
    count = lengths.shape[0]
    per = count // groups
    most = total.shape[0] // count
    size, height = _u(num_states), _u((num_states + 3) // 4 * 4)
    packed = np.zeros(height * height, alpha.dtype)
    beta, later = np.zeros(height, alpha.dtype), np.zeros(height, alpha.dtype)
    zero, one, low = alpha.dtype.type(0), alpha.dtype.type(1), alpha.dtype.type(floor)
    current = -1
    for row in range(first, last):
        g = row // per
        weight = factor[row]
        for t in range(lengths[row] - 1 if exact[row] else -1, -1, -1):
            if t == lengths[row] - 1:
                for k in range(size):
                    beta[k] = 1
            else:
                wanted = g if steps == 1 else t * groups + g
                if wanted != current:
                    _pack(packed, transition[0 if steps == 1 else t, g], True)
                    current = wanted
                for k in range(height):
                    beta[k] = 0
                for j in range(_0, height, _4):
                    m = j * height
                    a, b, c, d = later[j], later[j + _1], later[j + _2], later[j + _3]
                    for k in range(height):
                        beta[k] += (
                            a * packed[m + k]
                            + b * packed[m + height + k]
                            + c * packed[m + _2 * height + k]
                            + d * packed[m + _3 * height + k]
                        )
            offset = _u(t * count + row) * size
            norm = zero
            for k in range(size):
                norm += alpha[offset + k] * beta[k]
            if not abs(norm - one) < 1e-2:
                exact[row] = False
                break
            inverse = one / norm
            strength = inverse * weight
            peak = likelihood[offset]
            for k in range(_1, size):
                x = likelihood[offset + k]
                peak = x if x > peak else peak
            if peak == -np.inf:
                peak = zero
            inverse /= total[t * count + row]
            for k in range(size):
                x = likelihood[offset + k] - peak
                value = _exp(low if x < low else x)
                here = alpha[offset + k]
                gamma[offset + k] = here * beta[k] * strength
                value = value * (beta[k] * inverse)
                later[k] = value if here > zero and x > -np.inf else zero
                message[offset + k] = later[k] * weight
        begin = lengths[row] if exact[row] else 0
        _clear(gamma, row, begin, most, count, size)
        _clear(message, row, begin, most, count, size)


def in_blocks(per: int) -> bool:
    """Whether groups of ``per`` sequences that share a matrix are many enough for blocks."""
    return per >= LANES // 2


def passes(per: int) -> tuple[Callable[..., None], Callable[..., None]]:
    """Forward and backward, for groups of ``per`` sequences that share a matrix."""
    if in_blocks(per):
        return forward_blocks, backward_blocks
    return forward_rows, backward_rows


# Log space, decoding, sampling -------------------------------------------------------------------


@_kernel
def log_space(  # documented in _messages.in_log_space
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


@_exactly
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
def score_blocks(first, last, initial, transition, likelihood, lengths, delta):
    """Write the score of the best path to each state and step, up to a constant, to ``delta``."""
    steps, groups, num_states, _ = transition.shape
    count = lengths.shape[0]
    per = count // groups
    size, height, lanes = _u(num_states), _u((num_states + 3) // 4 * 4), _u(LANES)
    packed = np.full(height * height, -np.inf, delta.dtype)
    score = np.full(height * lanes, -np.inf, delta.dtype)
    reached = np.full(height * lanes, -np.inf, delta.dtype)
    seen = np.zeros(height * lanes, delta.dtype)
    peak, ones = np.zeros(LANES, delta.dtype), np.ones(LANES, delta.dtype)
    zero = delta.dtype.type(0)
    offsets, active = np.zeros(LANES, np.uint64), np.zeros(LANES, np.bool_)
    current = -1
    start = first
    while start < last:
        g = start // per
        width = min(LANES, last - start, (g + 1) * per - start)
        longest = 0
        for i in range(width):
            longest = max(longest, lengths[start + i])
        for t in range(longest):
            for i in range(LANES):
                active[i] = i < width and t < lengths[start + i]
                offsets[i] = _u((t * count if t > 0 else 0) + start + i) * size
            if t == 0:
                _load(reached, lanes, initial, offsets, active, size, zero)
            else:
                wanted = g if steps == 1 else (t - 1) * groups + g
                if wanted != current:
                    _pack(packed, transition[0 if steps == 1 else t - 1, g], False)
                    current = wanted
                _reach(reached, score, packed, height)
            _load(seen, lanes, likelihood, offsets, active, size, zero)
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
            _store(delta, offsets, active, size, score, lanes, ones)
        start += width


@_kernel
def _reach(out, block, packed, height):
    """As :func:`_multiply`, with sums for products and the largest for the sum."""
    for i in range(height * _LANES):
        out[i] = -np.inf
    for j in range(height):
        q = j * _LANES
        for k in range(_0, height, _4):
            o = k * _LANES
            m = j * height + k
            a0, a1, a2, a3 = packed[m], packed[m + _1], packed[m + _2], packed[m + _3]
            for i in range(_LANES):
                x = block[q + i]
                y, z = x + a0, out[o + i]
                out[o + i] = y if y > z else z
                y, z = x + a1, out[o + _LANES + i]
                out[o + _LANES + i] = y if y > z else z
                y, z = x + a2, out[o + _2 * _LANES + i]
                out[o + _2 * _LANES + i] = y if y > z else z
                y, z = x + a3, out[o + _3 * _LANES + i]
                out[o + _3 * _LANES + i] = y if y > z else z


@_kernel
def viterbi(first, last, initial, transition, transposed, likelihood, lengths, scored, delta, best):
    num_states = likelihood.shape[3]
    size = likelihood.shape[2]
    steps = transition.shape[0]
    for i in range(first, last):
        g = i // size
        b = i % size
        end = lengths[g, b] - 1
        for t in range(0 if scored else end + 1):
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
