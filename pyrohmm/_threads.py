"""Threads of torch, for work that is worth them; and how a thread rounds.

torch shares some operations at any size: ``log_softmax``, products and factorisations of matrices.
Where other processes have the cores, each of these waits until its second thread is scheduled: tens
of milliseconds, for microseconds of work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

import torch

from ._choices import MILLISECOND

Value = TypeVar("Value")

_TINY, _HALF = torch.finfo(torch.float64).tiny, 0.5


@contextmanager
def threads_for(work: float) -> Iterator[None]:
    """Context in which torch has one thread, if ``work`` takes no more than a millisecond.

    Args:
        work: Number of multiplications.

    Example:
        >>> with threads_for(1000):
        ...     torch.get_num_threads()
        1
    """
    threads = torch.get_num_threads()
    if threads == 1 or work > MILLISECOND:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def flushed(function: Callable[..., Value], *arguments: Any, **options: Any) -> Value:
    """``function(*arguments, **options)``, with subnormal numbers as zero on this thread.

    Arithmetic with numbers below the smallest normal one, such as weights far from an observation
    have, takes a hundred times as long on many processors. Afterwards the thread does as before.

    Example:
        >>> tiny = torch.tensor(torch.finfo(torch.float32).tiny)
        >>> flushed(torch.mul, tiny, 0.5), bool(tiny * 0.5 > 0)
        (tensor(0.), True)
    """
    off = _TINY * _HALF > 0.0
    try:  # a signal may come between any two lines: nothing but the last one is to undo the first
        if off:
            torch.set_flush_denormal(True)
        return function(*arguments, **options)
    finally:
        if off:
            torch.set_flush_denormal(False)


def flushing(function: Callable[..., Value]) -> Callable[..., Value]:
    """Decorator: ``function`` by :func:`flushed`."""

    @wraps(function)
    def call(*arguments: Any, **options: Any) -> Value:
        return flushed(function, *arguments, **options)

    return call
