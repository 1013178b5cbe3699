"""The two engines: loops compiled by Numba, on a CPU where it is installed, or torch.

Example:
    >>> with use(TORCH):  # this thread, whatever is installed
    ...     pick(torch.device("cpu"))
    <Backend.TORCH: 'operations of torch'>
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from functools import cache
from types import ModuleType

import torch

from .._imports import imported


class Backend(Enum):
    """Engine of a computation: compiled loops, or torch operations."""

    TORCH = "operations of torch"
    NUMBA = "compiled loops"


TORCH, NUMBA = Backend.TORCH, Backend.NUMBA
CPU = torch.device("cpu")
_forced: ContextVar[Backend] = ContextVar("pyrohmm_backend", default=NUMBA)


def pick(device: torch.device, fits: bool = True) -> Backend:
    """Engine for ``device``; torch where loops do not fit: see ``_choices``."""
    compiled = fits and device.type == "cpu" and _forced.get() is NUMBA and has_numba()
    return NUMBA if compiled else TORCH


@cache
def compiled(name: str) -> ModuleType:
    """Import a module of compiled loops in this package."""
    module: ModuleType = imported(f".{name}", __package__)
    return module


@contextmanager
def use(backend: Backend) -> Iterator[None]:
    """Compute by ``backend`` within a ``with`` statement, in this thread.

    Args:
        backend: ``TORCH``, or ``NUMBA`` for what is chosen without this context.

    Raises:
        ImportError: If it is ``NUMBA``, and Numba is not installed.
    """
    if Backend(backend) is NUMBA and not has_numba():
        raise ImportError("NUMBA needs Numba. Install it with pip install 'pyrohmm[compiled]'.")
    token = _forced.set(backend)
    try:
        yield
    finally:
        _forced.reset(token)


@cache
def has_numba() -> bool:
    """Whether Numba can be imported; the first call imports it."""
    try:
        imported("._numba_math", __package__)
    except ImportError:
        return False
    return True


@cache
def advise_numba() -> None:
    """Say, once, that loops would be faster than operations of torch, where Numba is missing."""
    if not has_numba():
        logging.getLogger("pyrohmm").warning(
            "Numba is not installed: with pip install 'pyrohmm[compiled]', fits of up to 128 "
            "states are several times faster on a CPU."
        )
