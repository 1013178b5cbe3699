"""Which backend computes: Numba's compiled loops on the CPU where it is installed, else torch.

Example:
    >>> with use(TORCH):  # this thread, whatever is installed
    ...     backend_for(torch.device("cpu")) is TORCH
    True
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from types import FrameType
from typing import Any

import torch

from ._numba_backend import NUMBA as NUMBA
from .operations import TORCH as TORCH
from .operations import Backend as Backend

_chosen: ContextVar[Backend | None] = ContextVar("pyrohmm_backend", default=None)
CPU = torch.device("cpu")


def backend_for(device: torch.device) -> Backend:
    """The backend for tensors on ``device``."""
    chosen = _chosen.get()
    if chosen is None:
        return NUMBA if device.type == "cpu" and has_numba() else TORCH
    if chosen is NUMBA and device.type != "cpu":
        raise ValueError(
            f"NUMBA computes on the CPU only; got tensors on {device}. Use TORCH for them."
        )
    return chosen


@contextmanager
def use(backend: Backend) -> Iterator[None]:
    """Compute by ``backend`` within a ``with`` statement, in this thread.

    Args:
        backend: ``TORCH`` or ``NUMBA``.

    Raises:
        TypeError: If it is neither.
        ImportError: If it is ``NUMBA``, and Numba is not installed.
    """
    if backend not in (TORCH, NUMBA):
        raise TypeError(f"backend must be TORCH or NUMBA; got {backend!r}.")
    if backend is NUMBA and not has_numba():
        raise ImportError("NUMBA needs Numba. Install it with pip install 'pyrohmm[compiled]'.")
    token = _chosen.set(backend)
    try:
        yield
    finally:
        _chosen.reset(token)


@cache
def has_numba() -> bool:
    """Whether Numba can be imported; the first call imports it."""
    try:
        with _signals_delayed():
            NUMBA.load()
    except ImportError:
        return False
    return True


@contextmanager
def _signals_delayed() -> Iterator[None]:
    """A context at whose end signals are handled, such as Ctrl-C: half of Numba is of no use.

    An import that is broken off leaves some of its modules behind, on which a second one fails.
    Only the main thread handles signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
    for known in signal.valid_signals():
        if callable(handler := signal.getsignal(known)):
            handlers[int(known)] = handler
    arrived: list[tuple[int, FrameType | None]] = []
    for number in handlers:
        signal.signal(number, lambda number, frame: arrived.append((number, frame)))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number, frame in arrived:
            handlers[number](number, frame)
