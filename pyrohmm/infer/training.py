"""What a fit by gradient steps trains and changes, and what it does to gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from pyro import poutine
from torch import Tensor, nn

from ..data.batches import Batches
from .validation import HeldOut


class ParametersRead(poutine.messenger.Messenger):
    """Notes the parameters that a function reads, also those of modules that it calls.

    A module has its parameters, and some that it has read may have been replaced since.
    """

    def __init__(self, called: Any) -> None:
        super().__init__()
        self.wanted = not isinstance(called, nn.Module)
        self.found: list[nn.Parameter] = []

    def _pyro_post_param(self, message: Any) -> None:
        value = message["value"]
        if self.wanted and hasattr(value, "unconstrained"):
            self.found.append(value.unconstrained())
        elif self.wanted and isinstance(value, nn.Parameter):  # which its module alone keeps
            self.found.append(value)


def trained(objective: nn.Module, met: list[nn.Parameter]) -> list[nn.Parameter]:
    """What is trained: parameters of modules, and those that model and guide have read."""
    found = {id(parameter): parameter for parameter in (*objective.parameters(), *met)}
    wanted = [parameter for parameter in found.values() if parameter.requires_grad]
    if not wanted:
        raise ValueError(
            "model and guide have no parameters to fit. Give the module PyroParam or "
            "torch.nn.Parameter attributes, or priors to a guide that has parameters."
        )
    return wanted


@dataclass
class State:
    """Everything a fit by gradient steps changes."""

    objective: nn.Module
    parameters: list[nn.Parameter]
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler | None
    batches: Batches
    averages: Average | None
    held_out: HeldOut | None

    def _tensors(self) -> list[Tensor]:
        return [*self.parameters, *self.objective.buffers()]

    @contextmanager
    def judged(self) -> Iterator[list[Tensor]]:
        """The tensors as they would be if the fit ended here: averages, if there are some."""
        with self.averages.lent() if self.averages is not None else nullcontext():
            yield self._tensors()

    def settle(self) -> None:
        """Let parameters be what the fit has found."""
        if self.held_out is not None:
            _copy(self.held_out.best, self._tensors())
        elif self.averages is not None:
            _copy(self.averages.values, self.parameters)

    def take(self, losses: list[Tensor], seconds: float) -> dict[str, Any]:
        """All of it, and how far the fit has come."""
        return {
            "losses": torch.stack(losses),
            "converged": False,
            "seconds": seconds,
            "tensors": self._tensors(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": None if self.scheduler is None else self.scheduler.state_dict(),
            "batches": self.batches.state(),
            "averages": None if self.averages is None else self.averages.values,
            "held_out": None if self.held_out is None else self.held_out.state(),
        }

    def restore(self, found: dict[str, Any]) -> tuple[list[Tensor], float]:
        """Set all of it to what was found, and return how far the fit had come."""
        _copy(found["tensors"], self._tensors())
        self.optimizer.load_state_dict(found["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(found["schedule"])
        self.batches.restore(found["batches"])
        device = self.parameters[0].device
        if self.averages is not None:
            self.averages.values = [each.to(device) for each in found["averages"]]
        if self.held_out is not None:
            self.held_out.restore(found["held_out"])
        losses = list(found["losses"].to(device))
        return losses, found["seconds"]


class Average:
    """A moving average of the parameters, which begins with those after the first step."""

    def __init__(self, parameters: list[nn.Parameter], decay: float) -> None:
        self.parameters, self.decay = parameters, decay
        self.values = [each.detach().clone() for each in parameters]

    def update(self, step: int) -> None:
        """Take in the parameters after ``step`` steps, counted from one."""
        decay = min(self.decay, (1 + step) / (10 + step)) if step > 1 else 0.0
        for mean, each in zip(self.values, self.parameters):
            mean.lerp_(each.detach(), 1.0 - decay)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """The parameters are their averages meanwhile."""
        own = [each.detach().clone() for each in self.parameters]
        _copy(self.values, self.parameters)
        try:
            yield
        finally:
            _copy(own, self.parameters)


def _copy(values: Iterable[Tensor], into: Iterable[Tensor]) -> None:
    with torch.no_grad():
        for own, value in zip(into, values):
            own.copy_(value)


def hold(parameters: list[nn.Parameter], failed: Tensor) -> None:
    """Let restarts that have failed stand where they are, so that their NaN do not spread."""
    if bool(failed.any()):
        for each in parameters:
            if each.grad is not None:
                each.grad[failed] = 0.0


def clip(parameters: list[nn.Parameter], limit: float, apart: bool) -> None:
    """Shrink the gradient to a norm of ``limit``; that of each restart by itself if ``apart``."""
    if not apart:
        nn.utils.clip_grad_norm_(parameters, limit)
        return
    gradients = [each.grad for each in parameters if each.grad is not None]
    norm = torch.stack([each.flatten(1).norm(dim=1) for each in gradients]).norm(dim=0)
    factor = (limit / norm.clamp(min=1e-30)).clamp(max=1.0)
    for each in gradients:
        each.mul_(factor.reshape(-1, *(1,) * (each.dim() - 1)))
