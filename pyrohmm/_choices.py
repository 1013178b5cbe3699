"""Computational choices: thresholds between two methods, threads, subnormal and random numbers.

Each constant has the measurement that set it: processor time of one thread on an EPYC with two
cores; ``figures/engine_ways.json`` holds the factors of the ways of :mod:`pyrohmm.ops`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

Value = TypeVar("Value")

_CPU = torch.device("cpu")

_TINY, _HALF = torch.finfo(torch.float64).tiny, 0.5

MILLISECOND = 20_000_000
"""Multiplications by compiled loops, up to which torch has one thread: about a millisecond.

Where other processes have the cores, a second thread is scheduled after tens of milliseconds.
"""

SHARED = 1 << 15
"""Numbers from which most operations of torch go to several threads: torch's own grain size."""

WORTH = 2_000_000
"""Multiplications for which a compiled loop is given one more thread: 0.3 to 1 ms."""

WIDEST = 128
"""States up to which compiled loops are faster than matrix products of torch, 64 sequences, and of
which the registers of a CUDA device hold a matrix."""

WIDEST_PATHS = 1 << 16
"""States up to which loops, which note a state in two bytes, find best paths: ten times at 256."""

FEW = 4
"""Sequences up to which loops are faster at any number of states: a product has few rows then."""

SIDE_BY_SIDE = 16
"""Sequences of a group from which arithmetic runs along them, 32 at a time, not along states."""

CHUNKS = 256, 1000
"""Fewest steps, and most sequences times K^2, that torch takes in chunks side by side: 2.4 to 24
times below, 1.2 to 1.6 there."""

CLOSE = 256
"""Rounding errors by which messages at the ends of chunks may differ from those of a scan."""

ADDED = 1 << 10
"""Numbers from which sums by index are by a compiled loop: 1.5 to 4.3 times from 40,000 on."""

THIN = 16
"""Columns of the narrower side up to which sums of products are by a compiled loop: 5 times for 2
columns and 32, 16 for 2 and 128."""

CACHED = 1 << 17
"""Numbers of float64 that are made at once on the CPU: they stay in the cache of a core."""

ON_DEVICE = 1 << 24
"""The same on an accelerator, where each piece is a launch."""

NARROW, BLOCK = 32, 512
"""States from which sums that do not cancel are in single precision over so many rows at a time:
half the time of float64, and 7e-6 wrong at most."""


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
    """Call ``function`` with subnormal numbers flushed to zero on this thread.

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
    """Decorator: flush subnormal numbers to zero during calls of ``function``."""
    return wraps(function)(partial(flushed, function))


class _DrawnOnHost(TorchDispatchMode):
    """Random numbers come from the CPU's generator, and are then moved."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        like = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        device = kwargs.get("device") or (like[0].device if like else _CPU)
        random = torch.Tag.nondeterministic_seeded in function.tags
        random |= "Generator" in str(function._schema)
        if not random or torch.device(device).type in {"cpu", "meta"}:
            return function(*args, **kwargs)
        some, options = tree_map_only(Tensor, Tensor.cpu, (args, kwargs))
        drawn = function(*some, **options | ({"device": _CPU} if "device" in options else {}))
        in_place = function.overloadpacket.__name__.endswith("_")
        return args[0].copy_(drawn) if in_place else drawn.to(device)


@contextmanager
def first_values(device: torch.device | None = None) -> Iterator[None]:
    """Context in which a seed gives the same random numbers on every ``device``.

    They are drawn on the CPU; for the first values of a fit, as those of each step stay where they
    are used. By default it is torch's default device, on which modules are made.

    Example:
        >>> with first_values(torch.device("cpu")):
        ...     number = torch.rand(())
    """
    device = torch.get_default_device() if device is None else device
    with nullcontext() if device.type in {"cpu", "meta"} else _DrawnOnHost():
        yield
