"""The parts of a gradient fit, each with one job, and the arguments that all such fits share."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

import torch
from pyro import poutine
from pyro.infer import ELBO
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from .._checks import check_returned, check_size, check_tolerance
from .._precision import full_precision
from .._sync import with_one_wait
from ..data.batches import Batches
from ..data.parts import Parts, first_sequence, parts_of
from ..data.sequences import Sequences
from ..io.checkpoints import Fields
from ..io.identity import describe, digits, fingerprint
from ..nn.base import in_mode
from .guide_samples import point_of
from .models import to_model_device
from .objective import LEFT, Objective, check_shared, follow_batches
from .process_group import ProcessGroup
from .results import WINDOW, name_of
from .validation import HeldOut, Validation

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
ScheduleFactory = Callable[[torch.optim.Optimizer], LRScheduler]
Report = Callable[[Validation], object]

# What another call may change and still resume from a checkpoint: it changes no step, only how many
# there are (``tolerance`` and ``patience`` are tested anew), or what is shown and kept on the way.
FREE = ("num_steps", "tolerance", "patience", "progress", "report", "checkpoint")


class FitOptions(TypedDict, total=False):
    """Further arguments of gradient fits: :func:`fit_map`, :func:`fit_svi` and those above them.

    Attributes:
        patience: End after this many validations without an improvement.
        progress: Whether to show a progress bar on stderr; by default if that is a terminal.
        checkpoint: A file to save to and to resume from: see :func:`fit_svi`.
        name: Of the fit, which its checkpoint must have: choose another where your own code, or
            what it reads, has changed.
        batch_tokens: Largest number of steps in a minibatch, padding included, in place of
            ``batch_size``: sequences of similar length share a batch, each once per round, and a
            longer one is a batch alone. The mean loss of a round is that of the whole set.
        windows: ``(streams, steps)``, in place of both: the sequences of a round, concatenated,
            are split into so many streams, and each minibatch is the next so many steps of all.
            For a :class:`StatefulModel`.
        elbo: The objective; ``TraceEnum_ELBO`` if the model enumerates sites, else ``Trace_ELBO``.
        optimizer: Called with the parameters, returns a torch optimizer; Adam by default.
        schedule: Called with the optimizer, returns a torch learning-rate scheduler. It is stepped
            after every gradient step; a ``ReduceLROnPlateau`` after every validation.
        clip_norm: Largest norm of the whole gradient, per observed step.
        average: Decay below one of a moving average of the parameters, with which the fit ends and
            is validated. After step n the decay is (1 + n) / (10 + n) where that is less.
        validate_every: Number of steps between validations; by default one follows every round of
            minibatches, or every 25 steps without them. The last step is followed by one too.
        report: Called with each :class:`Validation`, in the first process, such as ``print``.
        generator: Source of randomness for minibatches; torch's global one by default.
        precision: ``torch.bfloat16`` computes networks, and inner products of large models, in
            that at every step, as ``torch.autocast`` does; parameters and probabilities keep
            theirs, and held-out data are evaluated in full precision.
    """

    patience: int | None
    progress: bool | None
    checkpoint: str | Path | None
    name: str | None
    batch_tokens: int | None
    windows: tuple[int, int] | None
    elbo: ELBO | None
    optimizer: OptimizerFactory | None
    schedule: ScheduleFactory | None
    clip_norm: float | None
    average: float | None
    validate_every: int | None
    report: Report | None
    generator: torch.Generator | None
    precision: torch.dtype | None


ALIASES = {  # of other packages
    "lr": "learning_rate", "n_iter": "num_steps", "max_iter": "num_steps", "tol": "tolerance",
    "steps": "num_steps", "n_restarts": "restarts", "verbose": "progress",
}  # fmt: skip


def check_names(fit: Callable[..., Any], options: Mapping[str, Any], but: Iterable[str]) -> None:
    """Raise unless ``options`` are those of :class:`FitOptions`, and none of ``but``."""
    plain = [name for name in inspect.signature(fit).parameters if name != "options"]
    known = {*plain, *FitOptions.__annotations__} - {*but}
    for name in options:
        if name not in known:
            near = get_close_matches(ALIASES.get(name, name), known, 1)
            cure = f" Did you mean {near[0]}?" if near else ""
            raise TypeError(f"{fit.__name__}() got an unexpected keyword argument {name!r}.{cure}")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The arguments that gradient fits share, checked: see :func:`fit_svi`, :class:`FitOptions`."""

    num_steps: int
    learning_rate: float
    tolerance: float | None
    batch_size: int | None
    validation: Sequences | None
    patience: int | None = None
    progress: bool | None = None
    checkpoint: str | Path | None = None
    name: str | None = None
    batch_tokens: int | None = None
    windows: tuple[int, int] | None = None
    elbo: ELBO | None = None
    optimizer: OptimizerFactory | None = None
    schedule: ScheduleFactory | None = None
    clip_norm: float | None = None
    average: float | None = None
    validate_every: int | None = None
    report: Report | None = None
    generator: torch.Generator | None = None
    precision: torch.dtype | None = None

    @property
    def in_one(self) -> bool:
        """Whether every step sees all the data."""
        return self.batch_size is None and self.batch_tokens is None and self.windows is None

    def __post_init__(self) -> None:
        check_size("num_steps", self.num_steps)
        check_tolerance(self.tolerance)
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate must be positive; got {self.learning_rate}.")
        for name in ("batch_size", "batch_tokens", "validate_every", "patience"):
            if getattr(self, name) is not None:
                check_size(name, getattr(self, name))
        if self.windows is not None:
            if not isinstance(self.windows, tuple) or len(self.windows) != 2:
                raise TypeError(f"windows must be a pair, (streams, steps); got {self.windows!r}.")
            check_size("the streams of windows", self.windows[0])
            check_size("the steps of windows", self.windows[1])
        if sum(size is not None for size in (self.batch_size, self.batch_tokens, self.windows)) > 1:
            raise ValueError(
                "batch_size, batch_tokens and windows exclude each other: a minibatch has a number "
                "of sequences, or of steps, or the next steps of streams. Give one of them."
            )
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"clip_norm must be positive; got {self.clip_norm}.")
        if self.average is not None and not 0 < self.average < 1:
            raise ValueError(f"average must be between 0 and 1, such as 0.999; got {self.average}.")
        if self.validation is not None and not isinstance(self.validation, Sequences):
            raise TypeError(f"validation must be Sequences; got {type(self.validation).__name__}.")
        if self.precision not in (None, torch.bfloat16, torch.float16):
            raise ValueError(
                "precision must be torch.bfloat16, torch.float16 or None, for that of the "
                f"parameters; got {self.precision!r}."
            )
        for name in ("validate_every", "patience", "report"):
            if getattr(self, name) is not None and self.validation is None:
                raise ValueError(f"{name} needs validation, the sequences that are held out.")


class Descent:
    """Gradient steps: the optimizer, its schedule, the clipping and the average of parameters."""

    def __init__(
        self, parameters: list[nn.Parameter], settings: Settings, num_observed: int
    ) -> None:
        self.parameters = parameters
        adam = partial(torch.optim.Adam, lr=settings.learning_rate)
        self.optimizer = (settings.optimizer or adam)(parameters)
        check_returned("optimizer", self.optimizer, torch.optim.Optimizer, "a torch optimizer")
        self.schedule = settings.schedule(self.optimizer) if settings.schedule else None
        self.plateau = self.schedule if isinstance(self.schedule, ReduceLROnPlateau) else None
        if self.plateau and (settings.validation is None or self.plateau.mode != "min"):
            raise ValueError(
                "schedule returned a ReduceLROnPlateau, which follows the nats per step of "
                "held-out data: give validation, and mode='min'; its mode is "
                f"{self.plateau.mode!r}."
            )
        self.limit = None if settings.clip_norm is None else settings.clip_norm * num_observed
        self.average = None if settings.average is None else Average(parameters, settings.average)

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
        factor = (limit / norm.clamp(min=1e-30)).clamp(max=1.0)
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


class State:
    """The state of a gradient fit: all that it changes, as a checkpoint keeps it."""

    def __init__(
        self,
        model: Callable[..., Any],
        guide: Callable[..., Any],
        data: Sequences | Parts,
        settings: Settings,
        batched: bool,
    ) -> None:
        self.start_time = time.perf_counter()
        self.model, self.guide, self.data, self.settings = model, guide, data, settings
        self.group = ProcessGroup.all()
        self.num_observed = max(data.num_observed, 1)
        if settings.windows is not None and self.group.size > 1:
            raise ValueError("windows continue each other, and cannot be shared by processes.")
        self.batches = Batches(
            data, settings.batch_size, settings.generator, batch_tokens=settings.batch_tokens,
            windows=settings.windows, shard=self.group.share, agree=self.group.from_first,
        )  # fmt: skip
        whole = self.batches.whole
        if isinstance(data, Parts):
            check_shared(model, next(iter(data)))
        in_memory = whole if isinstance(whole, Sequences) else first_sequence(data)
        self.probe = to_model_device(model, guide, in_memory)
        if whole is None and len(data) > 1:
            follow_batches(inspect.unwrap(model) if batched else model, guide, self.probe)
        self.objective = Objective(model, guide, self.probe, settings.elbo, batched)
        self.descent = Descent(self.objective.parameters, settings, self.num_observed)
        self.held_out = None
        if settings.validation is not None:
            every = settings.validate_every or (None if whole is None else WINDOW)
            self.held_out = HeldOut(
                model, guide, settings.validation, self.values, self.objective.plates, every,
                settings.patience, settings.report, self.group, settings.batch_size,
                settings.batch_tokens,
            )  # fmt: skip
        device = self.objective.parameters[0].device.type
        around = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        self.precision = device, settings.precision or around
        self.losses: list[Tensor] = []
        self.converged, self.reason = False, f"it took all {settings.num_steps} steps"
        self._tests = [settings.tolerance, settings.patience]  # which a resumed fit may change

    @property
    def seconds(self) -> float:
        """Since the start, with those before a checkpoint."""
        return time.perf_counter() - self.start_time

    def values(self) -> dict[str, Tensor]:
        """Latent variables by name, at the medians of the guide or at a sample of it."""
        data = self.probe
        if (
            self.objective.plates
            and self.batches.whole is None
            and isinstance(self.data, Sequences)
        ):
            data = to_model_device(self.model, self.guide, self.data)
        with torch.no_grad(), poutine.block(), in_mode(False, self.model, self.guide):
            found = point_of(self.guide, data)
        names = self.objective.supports
        return {name: found[name].detach().clone() for name in names if name in found}

    def tensors(self) -> list[Tensor]:
        """Parameters and buffers, which the fit changes."""
        return [*self.objective.parameters, *self.objective.module.buffers()]

    def lower_precision(self) -> torch.autocast:
        """A context for one step in lower precision, if that is asked for, here or around the fit.

        Without a cache: its weights would still be those of the first step at the last one.
        """
        device, dtype = self.precision
        return torch.autocast(device, dtype, enabled=dtype is not None, cache_enabled=False)

    def backward(self, batch: Sequences | Parts) -> tuple[Tensor, Sequences]:
        """Compute the gradient of the loss of a batch.

        Returns:
            The loss of this rank, and what it was computed for last.
        """
        parts, count = (
            (batch.scaled(), batch.num_parts) if isinstance(batch, Parts) else ([batch], 1)
        )
        total: Any = 0.0
        for part in parts:
            part = to_model_device(self.model, self.guide, part)
            with self.lower_precision():
                loss = with_one_wait(partial(self.objective.module, part)) / count
            with full_precision(loss):
                loss.sum().backward()
            total = total + loss.detach()
        return total, part

    def validate(self, held_out: HeldOut) -> float:
        """Evaluate held-out data where the fit would end now: at averages, if there are some."""
        average = self.descent.average
        applied = nullcontext() if average is None else average.applied()
        with applied, full_precision(self.objective.parameters[0]):
            try:
                return held_out.validate(len(self.losses), self.tensors())
            except ValueError as error:
                self.objective.explain(error, len(self.losses))
                raise

    def begin(self) -> None:
        """Keep the parameters that a fit begins with, which it gives back if it fails."""
        self._first = [tensor.detach().clone() for tensor in self.tensors()]

    def give_back(self) -> None:
        """Set the parameters to the best that were validated, or to the first ones."""
        held_out = self.held_out
        found = held_out is not None and any(math.isfinite(p.nats) for p in held_out.history)
        copy_values(held_out.best if held_out and found else self._first, self.tensors())

    def finish(self) -> Tensor:
        """Set the parameters to those that the fit ends with, and return all losses, checked."""
        if self.held_out is not None:
            if not self.held_out.history or self.held_out.history[-1].step != len(self.losses):
                self.validate(self.held_out)
            copy_values(self.held_out.best, self.tensors())
        elif self.descent.average is not None:
            copy_values(self.descent.average.values, self.objective.parameters)
        losses = torch.stack(self.losses).cpu()
        if losses.dim() > 1:  # a restart may fail
            return losses
        if not bool(losses.isfinite().all()):
            step = int((~losses.isfinite()).byte().argmax())
            self.objective.check_finite(losses[step], step, self.probe)
        pairs = zip(self.objective.parameters, self._first)  # a filter in a buffer may be -inf
        if any(bool((first.isfinite() & ~last.isfinite()).any()) for last, first in pairs):
            raise FloatingPointError(LEFT.format(len(losses)))
        return losses

    def take(self) -> dict[str, Any]:
        """All of it, for checkpoints."""
        schedule, average = self.descent.schedule, self.descent.average
        return {
            "losses": torch.stack(self.losses),
            "converged": self.converged,
            "reason": self.reason,
            "tests": self._tests,
            "seconds": self.seconds,
            "tensors": self.tensors(),
            "optimizer": self.descent.optimizer.state_dict(),
            "schedule": None if schedule is None else schedule.state_dict(),
            "batches": self.batches.state(),
            "averages": None if average is None else average.values,
            "held_out": None if self.held_out is None else self.held_out.state(),
        }

    def restore(self, saved: Fields) -> None:
        """Continue from a checkpoint."""
        copy_values(saved.tensors_like("tensors", self.tensors()), self.tensors())
        self.descent.optimizer.load_state_dict(saved["optimizer"])
        if self.descent.schedule is not None:
            self.descent.schedule.load_state_dict(saved["schedule"])
        self.batches.restore(saved["batches"])
        device = self.objective.parameters[0].device
        if self.descent.average is not None:
            averages = saved.tensors_like("averages", self.descent.average.values)
            self.descent.average.values = [value.to(device) for value in averages]
        if self.held_out is not None:
            held_out = Fields(saved["held_out"], saved, "held_out.")
            self.held_out.restore(held_out, self.tensors())
        self.losses = list(saved.losses(None).to(device))
        self.start_time -= saved["seconds"]
        if len(self.losses) > self.settings.num_steps:
            self.reason = f"checkpoint had taken {len(self.losses)} steps already"
        if saved["converged"] and saved["tests"] == self._tests:
            self.converged, self.reason = True, saved["reason"]

    def identity(self) -> dict[str, Any]:
        """Fingerprint of the fit, for checkpoints."""
        settings, optimizer, schedule = self.settings, self.descent.optimizer, self.descent.schedule
        model = inspect.unwrap(self.model)
        compared = {
            field.name: getattr(settings, field.name)
            for field in fields(settings)
            if field.name not in (*FREE, "optimizer", "schedule", "generator")
        } | {"precision": self.precision[1]}
        groups: dict[str, list[Any]] = {}
        for group in optimizer.param_groups:
            rate = group.get("initial_lr", group.get("lr"))  # before a schedule has changed it
            for name, value in (group | {"lr": rate}).items():
                if name not in ("params", "initial_lr"):
                    groups.setdefault(name, []).append(value)
        return {
            "fit": f"{name_of(self.guide)} on {name_of(model)}",
            "latent variables": list(self.objective.supports),
            "shapes": [list(parameter.shape) for parameter in self.objective.parameters],
            **{name: describe(value) for name, value in compared.items()},
            "optimizer": describe({"class": type(optimizer)} | groups),
            "schedule": schedule and _of_schedule(schedule, settings.schedule),
            "data": fingerprint(self.data),
            "seed of the generator": describe(settings.generator),
            "model": describe(model),
            "guide": describe(self.guide),
        }

    def check_ranks(self) -> None:
        """Raise unless all data-parallel ranks start alike, and share all latent variables."""
        check_shared(self.model, next(iter(parts_of(self.data))))
        generator = self.settings.generator
        random = [torch.get_rng_state(), None if generator is None else generator.get_state()]
        self.group.check_same(
            data=fingerprint(self.data),
            random_numbers=digits(random),
            parameters=digits(self.objective.parameters),
            checkpoints=len(self.losses),
        )


def copy_values(values: Iterable[Tensor], into: Iterable[Tensor]) -> None:
    """Copy tensors into others, in place."""
    with torch.no_grad():
        for target, value in zip(into, values):
            target.copy_(value)


def _of_schedule(schedule: LRScheduler, made_by: Any) -> Any:
    """Description of a schedule: all but its first rate, which follows from the rest."""
    state = {name: value for name, value in schedule.state_dict().items() if name != "_last_lr"}
    return describe(state | {"function": made_by})
