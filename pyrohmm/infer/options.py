"""The arguments that gradient fits share, named and explained once, and their checks."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, TypeVar

import torch
from pyro.infer import ELBO
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from .._checks import check_size, check_tolerance
from ..data.sequences import Sequences

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
ScheduleFactory = Callable[[torch.optim.Optimizer], LRScheduler]
Report = Callable[["Validation"], object]
Fitting = TypeVar("Fitting", bound=Callable[..., Any])

# What another call may change and still resume from a checkpoint: it changes no step, only how many
# there are (``tolerance`` and ``patience`` are tested anew), or what is shown and kept on the way.
FREE = ("num_iterations", "tolerance", "patience", "progress", "report", "checkpoint")
MINIBATCHES = ("batch_size", "batch_tokens", "windows")
ALIASES = {  # of other packages
    "lr": "learning_rate", "n_iter": "num_iterations", "max_iter": "num_iterations",
    "tol": "tolerance", "steps": "num_iterations", "num_steps": "num_iterations",
    "n_restarts": "restarts", "n_init": "restarts", "n_samples": "num_samples",
    "n_chains": "num_chains", "init": "start", "verbose": "progress", "loss": "elbo",
    "num_particles": "elbo",
}  # fmt: skip


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

    Those that any fit takes are explained at :class:`pyrohmm.infer.options.RunOptions`.
    """

    batch_tokens: int | None
    windows: tuple[int, int] | None
    optimizer: OptimizerFactory | None
    schedule: ScheduleFactory | None
    clip_norm: float | None


class Settings(FitOptions):
    """All arguments of a gradient fit but model, guide and data: see :func:`fit_svi`."""

    num_iterations: int
    learning_rate: float
    tolerance: float | None
    batch_size: int | None
    validation: Sequences | None


def unknown_argument(fit: Callable[..., Any], name: str, known: Iterable[str]) -> TypeError:
    """The error that names the argument which ``name`` may be meant to be."""
    near = get_close_matches(ALIASES.get(name, name), known, 1)
    cure = f" Did you mean {near[0]}?" if near else ""
    return TypeError(f"{fit.__name__}() got an unexpected keyword argument {name!r}.{cure}")


def names_checked(fit: Fitting) -> Fitting:
    """A decorator of a fit that says which argument an unknown one may be meant to be."""
    known = inspect.signature(fit).parameters

    @wraps(fit)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs.keys() - known.keys():
            raise unknown_argument(fit, name, known)
        return fit(*args, **kwargs)

    return call  # type: ignore[return-value]


def settings_of(fit: Callable[..., Any], **given: Any) -> Settings:
    """All arguments by name, None where they were not given to ``fit``.

    Raises:
        TypeError: If there is no argument of such a name.
        ValueError: If a number is out of its range, or an argument excludes or needs another.
    """
    known = Settings.__annotations__
    for name in given:
        if name not in known:
            raise unknown_argument(fit, name, [*inspect.signature(fit).parameters, *known])
    settings: Any = dict.fromkeys(known) | given
    check_tolerance(settings["tolerance"])
    for name in ("num_iterations", "batch_size", "batch_tokens", "validate_every", "patience"):
        if settings[name] is not None:
            check_size(name, settings[name])
    for name, most in (("learning_rate", math.inf), ("clip_norm", math.inf), ("average", 1.0)):
        if settings[name] is not None and not 0 < settings[name] < most:
            below = f" and below {most:g}" if most < math.inf else ""
            raise ValueError(f"{name} must be positive{below}; got {settings[name]}.")
    sizes = [name for name in MINIBATCHES if settings[name] is not None]
    if len(sizes) > 1:
        raise ValueError(f"{' and '.join(sizes)} exclude each other: give one of them.")
    for name in ("validate_every", "patience", "report"):
        if settings[name] is not None and settings["validation"] is None:
            raise ValueError(f"{name} needs validation, the sequences that are held out.")
    return settings
