"""Gradient steps: the optimizer, its schedule, averages, and held-out data that end them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from .._imports import imported
from ..data.batches import cut_by_steps
from ..data.sequences import Sequences
from ..io.checkpoints import describe
from ..nn.base import in_mode
from .models import to_model_device
from .options import Settings, Validation
from .plates import Plates, new_log_evidence
from .process_group import ProcessGroup


class Descent:
    """Gradient steps: the optimizer, its schedule, the clipping and the average of parameters."""

    def __init__(
        self, parameters: list[nn.Parameter], settings: Settings, num_observed: int
    ) -> None:
        self.parameters = parameters
        imported("torch._dynamo")  # an optimizer would, with signals
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
        for target, value in zip(into, values, strict=True):
            target.copy_(value)


def describe_schedule(schedule: LRScheduler, made_by: Any) -> Any:
    """Description of a schedule: all but its first rate, which follows from the rest."""
    state = {name: value for name, value in schedule.state_dict().items() if name != "_last_lr"}
    return describe(state | {"function": made_by})


LARGER = 4  # size of an evaluated batch, without a gradient, over that of a minibatch
BATCH_SIZE = 256  # sequences in an evaluated batch, if the fit has no minibatches
NUM_SAMPLES = 32  # of variables of which each sequence has one


class HeldOut:
    """Held-out sequences, their evidence so far, and the best parameters.

    Args:
        model: The Pyro model, which must return an HMM.
        guide: Its guide.
        settings: Of the fit: the sequences, whose labels are not used, and when to evaluate them.
        values: Returns values of the latent variables, as the fit has them now.
        plates: Of the variables of which each sequence has one; held-out sequences have others,
            which are averaged over their prior.
        every: Number of steps between validations; None for one after each round of minibatches.
        group: The data-parallel ranks.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        guide: Callable[..., Any],
        settings: Settings,
        values: Callable[[], dict[str, Tensor]],
        plates: Plates,
        every: int | None,
        group: ProcessGroup,
    ) -> None:
        data = cast(Sequences, settings["validation"])
        self.num_observed = data.num_observed
        if self.num_observed == 0:
            raise ValueError("validation has no observed step; there is nothing to average over.")
        order = data.lengths.argsort(stable=True)
        size, tokens = settings["batch_size"], settings["batch_tokens"]
        if tokens is not None:
            parts = cut_by_steps(data.lengths, order, LARGER * tokens)
        else:
            parts = list(order.split(LARGER * size if size else BATCH_SIZE))
        self.model, self.guide, self.group = model, guide, group
        self.values, self.plates = values, plates
        self.first = data[:1]
        self.parts = [data[part] for part in parts[group.rank :: group.size]]
        self.every, self.patience = every, settings["patience"]
        self.report = settings["report"] if group.is_first else None
        self.history: list[Validation] = []
        self.best: list[Tensor] = []  # parameters
        self._log_evidence([self.first])  # raises here what it would raise after hours

    def is_due(self, step: int, at_end_of_round: bool) -> bool:
        """Whether to validate after ``step`` gradient steps."""
        return at_end_of_round if self.every is None else step % self.every == 0

    def validate(self, step: int, tensors: list[Tensor]) -> float:
        """Minus the log evidence per observed step; a copy of the best ``tensors`` is kept."""
        total = self.group.mean(self._log_evidence(self.parts))
        nats = -self.group.size * total.item() / self.num_observed
        nats = math.inf if math.isnan(nats) else nats
        if nats < min((past.nats for past in self.history), default=math.inf):
            self.best = [tensor.detach().clone() for tensor in tensors]
        self.history.append(Validation(step, nats))
        if self.report is not None:
            self.report(self.history[-1])
        return nats

    @property
    def why_ended(self) -> str | None:
        """The reason to end the fit, once patience has run out."""
        if self.patience is None:
            return None
        values = [past.nats for past in self.history]
        if len(values) - 1 - values.index(min(values)) < self.patience:
            return None
        return f"{self.patience} validations in a row were no better than the best"

    def state(self) -> dict[str, Any]:
        """The validations so far, for checkpoints."""
        return {"trail": [list(past) for past in self.history], "best": self.best}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from the :meth:`state` of another one."""
        self.history = [Validation(*past) for past in state["trail"]]
        self.best = state["best"]

    def _log_evidence(self, parts: list[Sequences]) -> Tensor:
        """Log evidence of some data in ``eval()`` mode, at one value of each latent variable."""
        values, device = self.values(), self._placed(self.first).values.device
        total = torch.zeros((), dtype=torch.float64, device=device)
        with torch.no_grad(), in_mode(False, self.model):
            for part in map(self._placed, parts):
                total += new_log_evidence(self.model, values, part, self.plates, NUM_SAMPLES).sum()
        return total

    def _placed(self, data: Sequences) -> Sequences:
        """``data`` on the device of the fit."""
        return to_model_device(self.model, self.guide, data)
