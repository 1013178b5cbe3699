"""Gradient steps: the optimizer, its schedule, clipping, and averages of parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ..io.identity import describe
from .options import Settings
from .process_group import ProcessGroup


class Descent:
    """Gradient steps: the optimizer, its schedule, the clipping and the average of parameters."""

    def __init__(
        self, parameters: list[nn.Parameter], settings: Settings, num_observed: int
    ) -> None:
        self.parameters = parameters
        adam = partial(torch.optim.Adam, lr=settings["learning_rate"])
        self.optimizer = (settings.get("optimizer") or adam)(parameters)
        make, clip_norm = settings.get("schedule"), settings.get("clip_norm")
        self.schedule = make(self.optimizer) if make else None
        self.plateau = self.schedule if isinstance(self.schedule, ReduceLROnPlateau) else None
        if self.plateau and (settings["validation"] is None or self.plateau.mode != "min"):
            raise ValueError(
                "schedule returned a ReduceLROnPlateau, which follows the nats per step of "
                "held-out data: give validation, and mode='min'; its mode is "
                f"{self.plateau.mode!r}."
            )
        self.limit = None if clip_norm is None else clip_norm * num_observed
        decay = settings.get("average")
        self.average = None if decay is None else Average(parameters, decay)

    def step(self, mean: Tensor, group: ProcessGroup, number: int) -> None:
        """Take step ``number``, counted from one, along the gradient that was computed.

        Args:
            mean: Of the losses of all ranks, ``()``, or ``(R,)`` of batched restarts.
            group: The ranks, whose gradients are averaged.
            number: Of the step.
        """
        for parameter in self.parameters:  # a model without labels, say, may leave some out
            if parameter.grad is not None:
                group.mean(parameter.grad)
        if mean.dim():
            self._stop(~mean.isfinite())
        if self.limit is not None:
            self._clip(self.limit, batched=mean.dim() > 0)
        self.optimizer.step()
        if self.average is not None:
            self.average.update(number)
        if self.schedule is not None and self.plateau is None:
            self.schedule.step()

    def _stop(self, failed: Tensor) -> None:
        """Set the gradient of failed restarts to zero, so that their NaN do not spread."""
        for parameter in self.parameters:
            if parameter.grad is not None and parameter.shape[:1] == failed.shape:
                rows = failed.reshape(-1, *(1,) * (parameter.dim() - 1))
                parameter.grad.masked_fill_(rows, 0.0)

    def _clip(self, limit: float, batched: bool) -> None:
        """Shrink the gradient to a norm of ``limit``, that of each restart if they are batched."""
        if not batched:
            nn.utils.clip_grad_norm_(self.parameters, limit)
            return
        gradients = [part.grad for part in self.parameters if part.grad is not None]
        norm = torch.stack([part.flatten(1).norm(dim=1) for part in gradients]).norm(dim=0)
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)  # as clip_grad_norm_
        for part in gradients:
            part.mul_(factor.reshape(-1, *(1,) * (part.dim() - 1)))


class Average:
    """A moving average of the parameters, which starts with those after the first step."""

    def __init__(self, parameters: list[nn.Parameter], decay: float) -> None:
        self.parameters, self.decay = parameters, decay
        self.values = [parameter.detach().clone() for parameter in parameters]

    def update(self, step: int) -> None:
        """Include the parameters after ``step`` steps, counted from one."""
        decay = min(self.decay, (1 + step) / (10 + step)) if step > 1 else 0.0
        for mean, parameter in zip(self.values, self.parameters):
            mean.lerp_(parameter.detach(), 1.0 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within the context, the parameters are their averages."""
        current = [parameter.detach().clone() for parameter in self.parameters]
        copy_values(self.values, self.parameters)
        try:
            yield
        finally:
            copy_values(current, self.parameters)


def copy_values(values: Iterable[Tensor], into: Iterable[Tensor]) -> None:
    """Copy tensors into others, in place."""
    with torch.no_grad():
        for target, value in zip(into, values):
            target.copy_(value)


def describe_schedule(schedule: LRScheduler, made_by: Any) -> Any:
    """Description of a schedule: all but its first rate, which follows from the rest."""
    state = {name: value for name, value in schedule.state_dict().items() if name != "_last_lr"}
    return describe(state | {"function": made_by})
