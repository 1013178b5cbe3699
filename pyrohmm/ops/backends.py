"""The engines: loops compiled by Numba on a CPU, by Triton on a CUDA device, or torch.

Numba and Triton are taken where they are installed and work.

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
    TRITON = "one kernel for all steps"


TORCH, NUMBA, TRITON = Backend
CPU = torch.device("cpu")
_forced: ContextVar[Backend] = ContextVar("pyrohmm_backend", default=NUMBA)


def pick(device: torch.device, fits: bool = True) -> Backend:
    """Engine for ``device``; torch where loops do not fit: see ``_choices``."""
    if not fits or _forced.get() is TORCH:
        return TORCH
    if device.type == "cpu":
        return NUMBA if has_numba() else TORCH
    return TRITON if device.type == "cuda" and has_triton(device) else TORCH


@cache
def compiled(name: str) -> ModuleType:
    """Import a module of compiled loops in this package."""
    module: ModuleType = imported(f".{name}", __package__)
    return module


@contextmanager
def use(backend: Backend) -> Iterator[None]:
    """Compute by ``backend`` within a ``with`` statement, in this thread.

    Args:
        backend: ``TORCH`` on any device, or ``NUMBA`` for what is chosen without this context:
            Numba on a CPU, Triton on a CUDA device.

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
def has_triton(device: torch.device) -> bool:
    """Whether Triton is installed and works on a CUDA device; the first call tries it there."""
    try:
        two = torch.zeros(2, 1, 1, 1, device=device)
        compiled("dense._triton").messages(two[0], two[:1], two, None, True)
    except ImportError:
        return False
    except Exception as error:  # there may be no C compiler, or the device may be too old
        logging.getLogger("pyrohmm").warning(
            "Triton does not work on %s, where chains of up to 128 states are much slower without "
            "it: %s", device, error,
        )  # fmt: skip
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
