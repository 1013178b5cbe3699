"""Batched device-to-host reads: the host waits for an accelerator once, not for each value.

Python must know some values to go on: whether numbers have left their range, whether components are
missing. Each such question makes the host wait until the accelerator has computed all it was given.
Within :func:`guessing`, answers are guessed to be the usual ones; at the end all are read at
once, and what was computed by a wrong guess is to be computed again, outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from operator import attrgetter
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


class Guesses:
    """Comparisons of device scalars answered by a guess, all checked later in one wait."""

    def __init__(self) -> None:
        self._values: list[Tensor] = []
        self._bounds: list[float] = []

    def add(self, value: Tensor, bound: float) -> None:
        """Record the guess that ``value`` exceeds ``bound``."""
        self._values.append(value)
        self._bounds.append(bound)

    def margin(self) -> Tensor | None:
        """By how much the values exceed their bounds at least, on the device; None without any."""
        apart = [
            value.detach().double() - bound for value, bound in zip(self._values, self._bounds)
        ]
        return torch.stack(apart).amin() if apart else None

    def read(self, *others: Tensor) -> tuple[bool, list[Tensor]]:
        """Check all guesses and copy ``others`` to the CPU, in one wait for the device."""
        values = [*self._values, *others]
        if len(values) == 1 and not others:
            return values[0].item() > self._bounds[0], []
        on_host = {"cpu"}.issuperset(map(attrgetter("device.type"), others))
        if not self._values and (len(others) == 1 or on_host):
            return True, [other.detach().double().cpu() for other in others]
        device = max((value.device for value in values), key=lambda device: device.type != "cpu")
        flat = torch.cat([value.detach().to(device).double().reshape(-1) for value in values]).cpu()
        guessed, *read = flat.split([len(self._bounds), *(other.numel() for other in others)])
        right = bool((guessed > torch.tensor(self._bounds, dtype=torch.float64)).all())
        return right, [part.reshape(other.shape) for part, other in zip(read, others)]


_guesses: ContextVar[Guesses | None] = ContextVar("pyrohmm_guesses", default=None)


@contextmanager
def guessing() -> Iterator[Guesses]:
    """Context in which :func:`exceeds` guesses, and does not wait for the device."""
    guesses = Guesses()
    token = _guesses.set(guesses)
    try:
        yield guesses
    finally:
        _guesses.reset(token)


def exceeds(value: Tensor, bound: float) -> bool:
    """Whether the scalar ``value`` is greater than ``bound``, which NaN is not.

    Within :func:`guessing` it is said to be, of a tensor that is not on the CPU.
    """
    guesses = _guesses.get()
    if guesses is None or value.device.type == "cpu":
        return value.item() > bound
    guesses.add(value, bound)
    return True


def is_guessing(device: torch.device) -> bool:
    """Whether :func:`exceeds` guesses for tensors on ``device``."""
    return _guesses.get() is not None and device.type != "cpu"


def with_one_wait(compute: Callable[[], Result], device: torch.device | None = None) -> Result:
    """Run ``compute()`` on guesses, and again where one was wrong; waits for the device once.

    On the CPU, if that is the ``device``, there is nothing to wait for.
    """
    if _guesses.get() is not None or (device is not None and device.type == "cpu"):
        return compute()
    try:
        with guessing() as guesses:
            result = compute()
        right = guesses.read()[0]
    except ValueError:  # a check of numbers that a wrong guess has made
        right = False
    return result if right else compute()


def read_with_one_wait(compute: Callable[[], list[Tensor]]) -> list[Tensor]:
    """Results of ``compute()`` copied to the CPU in float64, with one wait."""
    with guessing() as guesses:
        found = compute()
    right, read = guesses.read(*found)
    return read if right else [tensor.double().cpu() for tensor in compute()]
