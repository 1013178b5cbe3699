"""Shared parts of compiled loops: compiler options, threads, exponentials; and small loops.

A kernel works on the items ``first`` to ``last`` of its data, so that threads can share it, and
releases Python's lock.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.core import event
from numba.extending import intrinsic, overload
from torch import Tensor

from .._choices import WORTH, flushed
from .._imports import signals_delayed

FAST = {"contract", "reassoc", "nsz"}
LOOP: dict[str, Any] = {"no_cfunc_wrapper": True, "nogil": True, "fastmath": FAST}
LOOP["error_model"] = "numpy"
# For what kernels alone call: without what Python needs it compiles faster. It is not cached: its
# arguments are of classes of this package, and an index that names one that moved cannot be read.
inner = njit(no_cpython_wrapper=True, **LOOP)
# for rounding that is meant; if it were not said, it would be as the caller has it
exactly = njit(cache=True, nogil=True, error_model="numpy", fastmath=False)


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a loop to be called from Python, at its first call, with signals delayed.

    A compiler that is broken off is not whole afterwards; and LLVM, where it calls Python, drops
    what a signal raises.
    """
    loop = njit(function, cache=True, **LOOP)
    loop._compile_for_args = signals_delayed()(loop._compile_for_args)
    return loop


u64 = np.uint64  # offsets without a sign need no test for a negative one, so that loops vectorise


class _Announcement(event.Listener):
    """Message, once, that a loop is being compiled and the first fit takes longer."""

    def on_start(self, event: Any) -> None:
        logging.getLogger("pyrohmm").warning(
            "Compiling loops, once after an installation: 10 to 20 s at the first fit, 2 to 6 s "
            "at the first call of viterbi or posterior."
        )
        _unregister()

    def on_end(self, event: Any) -> None:
        pass


_announcement = _Announcement()
event.register("numba:compile", _announcement)


@cache  # for once: what is compiled may itself need something
def _unregister() -> None:
    event.unregister("numba:compile", _announcement)


@cache
def _pool(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, thread_name_prefix="pyrohmm")


if hasattr(os, "register_at_fork"):  # a child has none of the threads
    os.register_at_fork(after_in_child=_pool.cache_clear)


def threads_of(count: int, work: int) -> int:
    """Number of threads for ``count`` pieces with ``work`` multiplications in all."""
    return min(torch.get_num_threads(), count, 1 + work // WORTH)


def call(loop: Callable[..., Any], *arguments: Any) -> Any:
    """``loop(*arguments)``: the one place where compiled loops are called.

    Arguments and results are arrays, numbers and tuples of them: a ``NamedTuple`` is made by
    Python, which then raises what a signal asks for, such as Ctrl-C, and Numba does not look.

    Raises:
        BaseException: What a signal raised, where Numba calls it an error of its own.
    """
    try:
        return loop(*arguments)
    except SystemError as error:
        if error.__cause__ is None:
            raise
        raise error.__cause__ from None


def run(loop: Callable[..., None], count: int, work: int, *arguments: Any) -> None:
    """Run ``loop(first, last, *arguments)`` over ``count`` sequences on torch's threads.

    Args:
        loop: A compiled kernel.
        count: Number of sequences.
        work: Multiplications per sequence; little work is not worth a second thread.
        *arguments: Tensors on the CPU, passed as arrays that share their memory, or scalars.
    """
    if count == 0:
        return
    passed = [item.numpy() if isinstance(item, Tensor) else item for item in arguments]
    threads = threads_of(count, count * work)

    def run_part(part: int) -> None:
        call(loop, count * part // threads, count * (part + 1) // threads, *passed)

    share(run_part, threads)


def share(run: Callable[[int], Any], parts: int) -> list[Any]:
    """Call ``run`` on several parts of the work, on threads; returns the results.

    Subnormal numbers are zero meanwhile.
    """
    if parts == 1:
        return [flushed(run, 0)]
    tasks = [_pool(parts - 1).submit(flushed, run, part) for part in range(1, parts)]
    return [flushed(run, 0), *(task.result() for task in tasks)]


@inner
def copy(out, values):
    """Copy a vector: ``out[:] = values`` compiles three seconds longer, for its error message."""
    for k in range(len(out)):
        out[k] = values[k]


def sum_products(rows: Tensor, weights: Tensor) -> Tensor:
    """Sums in float64 of the products of ``rows`` ``(N, F)`` and ``weights`` ``(N, K)``."""
    count, shape = len(rows), (rows.size(1), weights.size(1))
    threads = threads_of(count, rows.numel() * weights.size(1))
    ends = [count * part // threads for part in range(threads + 1)]
    arrays, sums = (rows.numpy(), weights.numpy()), np.zeros((threads, *shape))
    share(lambda part: call(_add_products, *ends[part : part + 2], *arrays, sums[part]), threads)
    return torch.from_numpy(sums.sum(0))


@kernel
def _add_products(first, last, rows, weights, out):
    """Add the products of rows and weights ``first`` to ``last`` to ``out``."""
    for i in range(first, last):
        for f in range(rows.shape[1]):
            value = np.float64(rows[i, f])
            for k in range(weights.shape[1]):
                out[f, k] += value * weights[i, k]


# The exponential, as Numba would call it one number at a time ------------------------------------


@intrinsic
def _from_bits(_, bits):
    real, kind = types.float64, ir.DoubleType()
    if bits == types.int32:
        real, kind = types.float32, ir.FloatType()
    return real(bits), lambda _, builder, __, arguments: builder.bitcast(arguments[0], kind)


def exp(x):  # of x from the log of the smallest normal number to 0
    raise NotImplementedError


def _exponential(real, degree, high, low, integer, bias, digits):
    """2^n exp(r) with |r| <= log(2) / 2, by the Taylor series up to ``degree``.

    ``high`` and ``low`` sum to log(2); a number has an exponent with a ``bias`` before ``digits``.
    """
    inverse, half = real(1.4426950408889634), real(0.5)
    first, *rest = (real(1 / math.factorial(k)) for k in range(degree, -1, -1))
    others = tuple(rest)

    @exactly
    def exponential(x):
        n = np.floor(x * inverse + half)
        r = (x - n * high) - n * low
        p = first
        for term in others:
            p = p * r + term
        return p * _from_bits(integer((integer(n) + bias) << digits))

    return exponential


_exp_single = _exponential(
    np.float32, 7, np.float32(0.693359375), np.float32(-2.12194440054690583e-4), np.int32, 127, 23
)
_exp_double = _exponential(
    np.float64, 13, 0.693145751953125, 1.4286068203094172e-6, np.int64, 1023, 52
)


@overload(exp)
def _overload_exp(x):
    implementation = _exp_single if x == types.float32 else _exp_double
    return lambda x: implementation(x)


@exactly
def logsumexp(scores):
    """Log of the sum of exponentials of an array."""
    peak = scores[0]
    for k in range(1, scores.shape[0]):
        if scores[k] > peak or scores[k] != scores[k]:  # the first NaN stays
            peak = scores[k]
    if not (peak > -np.inf and peak < np.inf):
        return peak
    total = 0.0
    for k in range(scores.shape[0]):
        total += np.exp(scores[k] - peak)
    return peak + np.log(total)


@kernel
def follow(first, last, sums, groups, uniform, states):
    """Sample paths ``states`` ``(N, T)`` from their first states on, by inverting cumulative sums.

    These are ``(G, S, M, K)``, those of path i at ``groups[i]``; of M > K rows the first K are of
    a first state, the others of pairs, the later one fastest.
    """
    _, steps, rows, size = sums.shape
    for i in range(first, last):
        row = states[i, 0]
        for t in range(1, states.shape[1]):
            upto = sums[groups[i], min(t, steps) - 1, row]
            bound, low, high = uniform[i, t] * upto[size - 1], 0, size - 1
            while low < high:
                middle = (low + high) // 2
                if upto[middle] > bound:
                    high = middle
                else:
                    low = middle + 1
            states[i, t] = low
            row = low if rows == size else (row % size + 1) * size + low
