"""Threads of torch, for work that is worth them.

torch shares some operations at any size: ``log_softmax``, products and factorisations of matrices.
Where other processes have the cores, each of these waits until its second thread is scheduled: tens
of milliseconds, for microseconds of work.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ._choices import MILLISECOND


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
