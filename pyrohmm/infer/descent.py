"""Gradient steps: the arguments that fits share, the optimizer, averages, held-out data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, cast

import torch
from pyro.infer import ELBO
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from .._checks import check_kind, check_number, check_size, check_tolerance
from .._imports import imported
from ..data.batches import cut_by_steps
from ..data.sequences import Sequences
from ..nn.base import in_mode
from .models import to_model_device
from .plates import Plates, new_log_evidence

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
ScheduleFactory = Callable[[torch.optim.Optimizer], LRScheduler]
Report = Callable[["Validation"], object]

MINIBATCHES = ("batch_size", "batch_tokens", "windows")


class Validation(NamedTuple):
    """Held-out evidence at some step of a fit.

    Attributes:
        step: Number of gradient steps taken before.
        nats: Minus the log evidence per observed step; ``exp(nats)`` is the perplexity.
    """

    step: int
    nats: float


class RunOptions(TypedDict, total=False):
    """Arguments that do not depend on how a fit takes steps and minibatches.

    Attributes:
        patience: End after this many validations without an improvement.
        progress: Whether to show a progress bar on stderr; by default if that is a terminal.
        checkpoint: A file to save to and to resume from: see :func:`fit_svi`.
        name: Of the fit, which its checkpoint must have: choose another where your own code, or
            what it reads, has changed.
        elbo: The objective, any ``ELBO`` of Pyro, such as ``Trace_ELBO(num_particles=8)``;
            ``TraceEnum_ELBO`` if the model enumerates sites, else ``Trace_ELBO`` by default.
        average: Decay below one of a moving average of the parameters, with which the fit ends and
            is validated. After step n the decay is (1 + n) / (10 + n) where that is less.
        validate_every: Number of steps between validations; by default one follows every round of
            minibatches, or every 25 steps without them. The last step is followed by one too.
        report: Called with each :class:`Validation`, in the first process, such as ``print``.
        generator: Source of randomness for minibatches; torch's global one by default.
        precision: ``torch.bfloat16`` computes networks, and inner products of large models, in
            that at every step, as ``torch.autocast`` does; parameters and probabilities keep
            theirs, and held-out data are evaluated in full precision.
        group: The ranks that fit this model: a ``ProcessGroup`` of torch or a dimension of a
            ``DeviceMesh``; all of ``torch.distributed`` by default. One rank alone fits with
            ``torch.distributed.new_group([rank], use_local_synchronization=True)``.
    """

    patience: int | None
    progress: bool | None
    checkpoint: str | Path | None
    name: str | None
    elbo: ELBO | None
    average: float | None
    validate_every: int | None
    report: Report | None
    generator: torch.Generator | None
    precision: torch.dtype | None
    group: Any


class FitOptions(RunOptions, total=False):
    """Further arguments of gradient fits: :func:`fit_map`, :func:`fit_svi` and those above them.

    Attributes:
        batch_tokens: Largest number of steps in a minibatch, padding included, in place of
            ``batch_size``: sequences of similar length share a batch, each once per round, and a
            longer one is a batch alone. The mean loss of a round is that of the whole set.
        windows: ``(streams, steps)``, in place of both: the sequences of a round, concatenated,
            are split into so many streams, and each minibatch is the next so many steps of all.
            For a :class:`StatefulModel`.
        optimizer: Called with the parameters, returns a torch optimizer; Adam by default.
        schedule: Called with the optimizer, returns a torch learning-rate scheduler. It is stepped
            after every gradient step; a ``ReduceLROnPlateau`` after every validation.
        clip_norm: Largest norm of the whole gradient, per observed step.
        sharded: Whether, of several processes, each gives ``data`` of its own, its share of the
            whole: the fit is that of all shares together, and minibatches are of a process, as with
            torch's ``DistributedDataParallel``. By default all give the whole, and each takes its
            part of every minibatch.

    Those that any fit takes are explained at :class:`pyrohmm.infer.descent.RunOptions`.
    """

    batch_tokens: int | None
    windows: tuple[int, int] | None
    optimizer: OptimizerFactory | None
    schedule: ScheduleFactory | None
    clip_norm: float | None
    sharded: bool | None


class Settings(FitOptions):
    """All arguments of a gradient fit but model, guide and data."""

    num_iterations: int
    learning_rate: float
    tolerance: float | None
    batch_size: int | None
    validation: Sequences | None


def settings_of(arguments: dict[str, Any]) -> Settings:
    """Settings of a gradient fit: all arguments by name, None where not given.

    Args:
        arguments: Of the function that was called, and further ones as ``options``.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If a number is out of its range, or an argument excludes or needs another.
    """
    known = Settings.__annotations__
    settings: Any = {name: arguments.get(name) for name in known} | arguments["options"]
    check_tolerance(settings["tolerance"])
    check_kind("elbo", settings["elbo"], ELBO | None, "an ELBO of Pyro, such as Trace_ELBO()")
    for name in ("num_iterations", "batch_size", "batch_tokens", "validate_every", "patience"):
        if settings[name] is not None:
            check_size(name, settings[name])
    for name, most in (("learning_rate", math.inf), ("clip_norm", math.inf), ("average", 1.0)):
        if settings[name] is None:
            continue
        check_number(name, settings[name])
        if not 0 < settings[name] < most:
            below = f" and below {most:g}" if most < math.inf else ""
            raise ValueError(f"{name} must be positive{below}; got {settings[name]}.")
    sizes = [name for name in MINIBATCHES if settings[name] is not None]
    if len(sizes) > 1:
        raise ValueError(f"{' and '.join(sizes)} exclude each other: give one of them.")
    for name in ("validate_every", "patience", "report"):
        if settings[name] is not None and settings["validation"] is None:
            text = f"{name} needs validation, the sequences that are held out"
            raise ValueError(f"{text}. Hold some out, or leave it out.")
    return settings


class Descent:
    """Gradient steps: the optimizer, its schedule, the clipping and the average of parameters."""

    def __init__(
        self, parameters: list[nn.Parameter], settings: Settings, num_observed: int
    ) -> None:
        self.parameters = parameters
        imported("torch._dynamo")  # an optimizer would, with signals
        fused = all(parameter.is_cuda for parameter in parameters) or None
        adam = partial(torch.optim.Adam, lr=settings["learning_rate"], fused=fused)
        given: Any = settings.get("optimizer") or adam
        self.optimizer = given(parameters) if callable(given) else given
        wanted, cure = "a function that returns a torch optimizer", "Give partial(torch.optim.SGD"
        check_kind("optimizer", self.optimizer, torch.optim.Optimizer, wanted, f"{cure}, lr=0.1).")
        make, clip_norm = settings.get("schedule"), settings.get("clip_norm")
        self.schedule = make(self.optimizer) if make else None
        self.plateau = self.schedule if isinstance(self.schedule, ReduceLROnPlateau) else None
        if self.plateau and (settings["validation"] is None or self.plateau.mode != "min"):
            raise ValueError(
                "schedule returned a ReduceLROnPlateau, which follows the nats per step of "
                f"held-out data: give validation, and mode='min', not {self.plateau.mode!r}."
            )
        self.limit = None if clip_norm is None else clip_norm * num_observed
        decay = settings.get("average")
        self.average = None if decay is None else Average(parameters, decay)

    def step(self, mean: Tensor, number: int) -> None:
        """Take step ``number``, counted from one, along the gradient that was computed.

        Args:
            mean: Of the losses of all ranks, ``()``, or ``(R,)`` of batched restarts.
            number: Of the step.
        """
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
        """Zero the gradient of failed restarts, so that their NaN do not spread."""
        for parameter in self.parameters:
            if parameter.grad is not None and parameter.shape[:1] == failed.shape:
                rows = failed.reshape(-1, *(1,) * (parameter.dim() - 1))
                parameter.grad.masked_fill_(rows, 0.0)

    def _clip(self, limit: float, batched: bool) -> None:
        """Clip the gradient norm to ``limit``, separately for each restart if they are batched."""
        if not batched:
            nn.utils.clip_grad_norm_(self.parameters, limit)
            return
        gradients = [part.grad for part in self.parameters if part.grad is not None]
        norm = torch.stack([part.flatten(1).norm(dim=1) for part in gradients]).norm(dim=0)
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)  # as clip_grad_norm_
        for part in gradients:
            part.mul_(factor.reshape(-1, *(1,) * (part.dim() - 1)))


class Average:
    """Exponential moving average of the parameters, starting with those after the first step."""

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
        """Context in which the parameters are set to their moving averages."""
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


LARGER = 4  # size of an evaluated batch, without a gradient, over that of a minibatch
BATCH_SIZE = 256  # sequences in an evaluated batch, if the fit has no minibatches
NUM_SAMPLES = 32  # of variables of which each sequence has one


class HeldOut:
    """Held-out sequences, their evidence so far, and the best parameters.

    Args:
        fit: Its model, which must return an HMM, its guide, its arguments: the sequences, whose
            labels are not used, and when to evaluate them; and values of the latent variables.
        plates: Of the variables of which each sequence has one; held-out sequences have others,
            which are averaged over their prior.
        every: Number of steps between validations; None for one after each round of minibatches.
    """

    def __init__(self, fit: Any, plates: Plates, every: int | None) -> None:
        settings, group = fit.arguments, fit.group
        data = cast(Sequences, settings["validation"])
        self.num_observed = data.num_observed
        if self.num_observed == 0:
            text = "validation has no observed step; there is nothing to average over"
            raise ValueError(f"{text}. Give sequences with some.")
        order = data.lengths.argsort(stable=True)
        size, tokens = settings["batch_size"], settings["batch_tokens"]
        if tokens is not None:
            parts = cut_by_steps(data.lengths, order, LARGER * tokens)
        else:
            parts = list(order.split(LARGER * size if size else BATCH_SIZE))
        self.fit, self.group, self.plates = fit, group, plates
        chosen = [data[part] for part in parts[group.rank :: group.size]]
        self.parts = chosen if plates else [bucket for part in chosen for bucket in part.buckets]
        self.every, self.patience = every, settings["patience"]
        self.report = settings["report"] if group.is_first else None
        self.history: list[Validation] = []
        self.best: list[Tensor] = []  # parameters
        self._log_evidence([data[:1]])  # raises here what it would raise after hours

    def is_due(self, step: int, at_end_of_round: bool) -> bool:
        """Whether to validate after ``step`` gradient steps."""
        return at_end_of_round if self.every is None else step % self.every == 0

    def validate(self, step: int, tensors: list[Tensor]) -> float:
        """Minus the log evidence per observed step; a copy of the best ``tensors`` is kept."""
        total = self.group.mean_of(lambda: self._log_evidence(self.parts), 1)
        nats = -self.group.size * total.item() / self.num_observed
        nats = math.inf if math.isnan(nats) else nats
        if nats < min((past.nats for past in self.history), default=math.inf):
            self.best = [tensor.detach().clone() for tensor in tensors]
        self.history.append(Validation(step, nats))
        with self.group:
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
        """Checkpoint state: validations so far and the best parameters."""
        return {"trail": [list(past) for past in self.history], "best": self.best}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore validations and the best parameters from a checkpoint."""
        self.history = [Validation(*past) for past in state["trail"]]
        self.best = state["best"]

    def _log_evidence(self, parts: list[Sequences]) -> Tensor:
        """Log evidence of some data in ``eval()`` mode, at one value of each latent variable."""
        values, model, total = self.fit.values(), self.fit.model, torch.zeros(()).double()
        with torch.no_grad(), in_mode(False, model):
            for part in parts:
                placed = to_model_device(model, self.fit.guide, part)
                scores = new_log_evidence(model, values, placed, self.plates, NUM_SAMPLES)
                total = total.to(scores.device) + scores.sum()
        return total
