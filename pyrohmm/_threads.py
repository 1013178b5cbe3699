"""Threads of torch, for work that is worth them.

torch shares some operations at any size: ``log_softmax``, products and factorisations of matrices.
Where other processes have the cores, each of these waits until its second thread is scheduled: tens
of milliseconds, for microseconds of work.

Short queries in several threads of Python take turns. Each is a hundred operations of microseconds,
which all let go of the interpreter's lock and wait for it again: on idle cores they take
two or three times as long side by side as one after the other.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar, cast

import torch

MILLISECOND = 20_000_000  # multiplications, by compiled loops
SHARED = 1 << 15  # numbers, from which most operations of torch go to several threads


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


class _Turn:
    """A lock that a forked process has anew, whoever held it."""

    def __init__(self) -> None:
        self.renew()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.renew)

    def renew(self) -> None:
        """Make the lock."""
        self.lock = threading.RLock()


_turn = _Turn()
Query = TypeVar("Query", bound=Callable[..., Any])


def taking_turns(query: Query) -> Query:
    """Decorator of a query of an HMM given values: if it is short, one thread at a time runs it."""

    @wraps(query)
    def turn(self: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        alone = torch.compiler.is_compiling() or not isinstance(values, torch.Tensor)
        if alone or _steps(self, values) * self.num_states**2 > MILLISECOND:
            return query(self, values, *args, **kwargs)
        with _turn.lock:
            return query(self, values, *args, **kwargs)

    return cast(Query, turn)


def _steps(hmm: Any, values: torch.Tensor) -> int:
    """How many steps there are, at most: parameters may have more dimensions than values."""
    return max(values.numel(), hmm.batch_shape.numel() * hmm.num_steps)
