"""Training loop of gradient fits, MAP and SVI, for any pair of model and guide.

Pyro's global parameter store is set aside during a fit and restored after it: otherwise a second
fit with the same names would start, silently, where the first one ended.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import count
from typing import Any, cast

import pyro
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoGuide
from pyro.infer.mcmc.mcmc_kernel import MCMCKernel
from pyro.nn import PyroModule
from torch import Tensor

from .._checks import check_size, warn_caller
from .._choices import CACHED, first_values, threads_for
from .._precision import full_precision
from .._sync import with_one_wait
from ..data.batches import Batches
from ..data.parts import Parts, first_sequence, parts_of, weighted
from ..data.sequences import Sequences, check_sequences
from ..io.files import identity_of, random_states, set_random_states
from ..nn.base import HMMModule, in_mode
from .descent import Descent, HeldOut, Settings, copy_values, settings_of
from .graphs import GRAPHS, Replays, is_replayable
from .layouts import SIDE_BY_SIDE, arranged
from .loop import FitLoop
from .models import build, in_units, remarks, scale_priors, to_model_device
from .objective import LEFT, Objective, follow_batches
from .plates import marks_of, outside_modules, pieces_of, point_of, samples_of
from .process_group import ProcessGroup
from .results import WINDOW, Fit, name_of

_guides = count()


def train(
    arguments: dict[str, Any],
    model: Callable[..., Any],
    guide_of: Callable[..., Any],
    method: str,
    restarts: int = 1,
) -> Fit:
    """Minimise the loss of a model and a guide by gradient steps.

    Args:
        arguments: Of the function that was called, and further ones as ``options``.
        model: The Pyro model; with several restarts, in a plate of them.
        guide_of: Called with data and settings, returns the guide; priors are scaled by then.
        method: "MAP" or "SVI".
        restarts: R, of which each has a loss.
    """
    alone = inspect.unwrap(model)
    module = getattr(alone, "module", None)
    with ProcessGroup.of(arguments["options"].get("group")) as group:
        check_size("restarts", restarts)
        settings = settings_of(arguments)
        data = group.own(arguments["data"], settings["sharded"])
        check_model_and_data(alone, data)
        group.check_alike(settings | {"model": model, "restarts": restarts, "fit": method}, data)
    with ExitStack() as stack:
        store = stack.enter_context(pyro.get_param_store().scope())
        stack.enter_context(in_mode(True, model))
        with group:
            units = stack.enter_context(scaled_priors(module, data, group))
            guide = guide_of(data, settings)
            if isinstance(guide, type):
                got = f"the class {guide.__name__}"
                raise TypeError(f"guide must be of the model, as AutoNormal(model); got {got}.")
            _name_apart(guide)
            stack.enter_context(in_mode(True, guide))
            training = Training(model, guide, data, settings, restarts, units, group)
        doubts = [] if method == "MAP" or isinstance(module, HMMModule) else training.refusals()
        losses = training.run()
        values = training.objective.points() | training.values()
    plates, supports = training.objective.plates, training.objective.supports
    params = outside_modules(store, alone, guide)
    return Fit(
        model, guide, losses, training.reason is not None, training.reason or training.ended,
        training.seconds, data.num_observed, list(supports), params, method=method,
        notes=remarks(data, module) + doubts,
        validation=training.held_out.history if training.held_out else [],
        supports=supports, parameters=values, plates=plates, history=training.history(losses),
        marks=torch.cat([*map(marks_of, parts_of(data))]) if plates else None,
    )  # fmt: skip


def _name_apart(guide: Any) -> None:
    """Give an autoguide a name of its own, so that Pyro shares its parameters with no other."""
    if isinstance(guide, AutoGuide) and "_of_fit_" not in guide._pyro_name:
        unique = f"{guide._pyro_name}_of_fit_{next(_guides)}"
        for name, part in guide.named_modules():
            if isinstance(part, PyroModule):
                part._pyro_name = f"{unique}.{name}" if name else unique


@contextmanager
def scaled_priors(module: Any, data: Sequences | Parts, group: ProcessGroup) -> Iterator[float]:
    """Context: priors scaled to ``data``, alike in all ranks, restored on exit."""
    emission = module.emission_module() if isinstance(module, HMMModule) else None
    parts = list(emission.modules()) if isinstance(emission, PyroModule) else []
    parts += [module] if hasattr(module, "set_times") else []
    kept = [dict(part._buffers) for part in parts]
    try:
        in_units(module, data, group)
        yield scale_priors(module, data, group) if isinstance(module, HMMModule) else 0.0
    finally:
        in_units(module, None, group)
        for part, buffers in zip(parts, kept):
            part._buffers.update(buffers)


class Training(FitLoop):
    """State and steps of a gradient fit: parameters, optimizer, losses, validation.

    Args:
        model: The Pyro model.
        guide: The Pyro guide.
        data: The sequences.
        settings: All else.
        restarts: R, of which each has a loss.
        units: What the unit of the data adds to the loss.
        group: The data-parallel ranks.

    Attributes:
        parts: Log-likelihood and log-prior at each step, ``(2,)`` or ``(2, R)``, where the
            objective knows them.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        guide: Callable[..., Any],
        data: Sequences | Parts,
        settings: Settings,
        restarts: int,
        units: float,
        group: ProcessGroup,
    ) -> None:
        self.model, self.guide, self.data = model, guide, data
        self.units, self.restarts = units, restarts
        self.num_observed = max(data.num_observed, 1)
        batches = Batches(
            data, settings["batch_size"], settings["generator"], windows=settings["windows"],
            batch_tokens=settings["batch_tokens"], group=group,
        )  # fmt: skip
        super().__init__(batches, group, settings)
        whole, alone = batches.whole, inspect.unwrap(model)
        in_memory = whole if isinstance(whole, Sequences) else first_sequence(data)
        if settings["windows"] is not None:  # a text of any length
            in_memory = in_memory.truncate(settings["windows"][1])
        (self.probe, share), *_ = pieces_of(alone, to_model_device(model, guide, in_memory))
        # a window continues the one before
        self.at_once = settings["windows"] is not None or (whole is in_memory and share == 1)
        with first_values(self.probe.device):
            if whole is None and len(data) > 1:
                follow_batches(inspect.unwrap(model) if restarts > 1 else model, guide, self.probe)
            self.objective = Objective(model, guide, self.probe, settings["elbo"], restarts)
        plates = self.objective.plates
        self.at_once |= bool(plates)
        if plates and (isinstance(data, Parts) or group.size > 1):
            raise ValueError(
                f"site {min(plates)!r} has one value for each sequence, which are divided among "
                "processes, or parts of the data. Fit this model in one process, to one Sequences."
            )
        self.descent = Descent(self.objective.parameters, settings, self.num_observed)
        self.held_out = None
        if settings["validation"] is not None:
            every = settings["validate_every"] or (None if whole is None else WINDOW)
            self.held_out = HeldOut(self, plates, every)
        device = self.objective.parameters[0].device
        kind, pieces = device.type, self.objective.plates or settings["windows"] is not None
        around = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        self.precision = kind, settings["precision"] or around
        alike = isinstance(data, Sequences) and group.size == 1 and (whole is data or not pieces)
        alike &= kind in GRAPHS
        # one of the user's may keep gradients, which the next replay fills, or replace parameters
        alike &= type(self.descent.optimizer).__module__.startswith("torch.")
        fixed = alike and is_replayable(model, guide, settings["elbo"])
        self.replays = Replays(self._gradient, device) if fixed else None
        self.pieces: list[tuple[Sequences, float]] = []  # of a whole set
        self.parts: list[Tensor] = []
        self.error: Exception | None = None  # of this rank; the other ones learn of it
        self.failed = torch.zeros(())  # share of the ranks that have one
        self.shown: dict[str, str] = {}  # beside the progress bar

    def refusals(self) -> list[str]:
        """Warn, and note, if samples of the guide will not lie side by side in the model."""
        if not self.objective.supports:
            return []
        few = torch.arange(min(2, len(self.probe)))
        data = self.probe if self.objective.plates else self.probe.batch(few)
        with torch.no_grad(), poutine.block(), torch.random.fork_rng():
            try:
                with in_mode(False, self.model, self.guide):
                    values, _ = samples_of(self.guide, list(self.objective.supports), 3, data)
                arranged(self.model, values, 3, data)
            except Exception as error:  # the steps will say what else is wrong
                if SIDE_BY_SIDE in str(error):
                    note = f"{error} The fit goes on; check_model, to_arviz, draws will refuse it"
                    warn_caller(note)
                    return [note]
        return []

    def values(self) -> dict[str, Tensor]:
        """Latent variables by name, at the medians of the guide or at a sample of it."""
        data = self.probe
        if self.objective.plates and self.batches.whole is None:
            data = to_model_device(self.model, self.guide, cast(Sequences, self.data))
        with torch.no_grad(), poutine.block(), in_mode(False, self.model, self.guide):
            found = point_of(self.guide, data)
        names = self.objective.supports
        return {name: found[name].detach().clone() for name in names if name in found}

    def tensors(self) -> list[Tensor]:
        """Parameters and buffers, which the fit changes."""
        return [*self.objective.parameters, *self.objective.module.buffers()]

    def run(self) -> Tensor:
        """Take all steps; returns the losses.

        If it fails, the parameters are the best that were validated, or those before the fit.
        """
        parameters = self.objective.parameters
        shapes = [str((tuple(part.shape), part.dtype)) for part in self.tensors()]
        self.group.check_alike({"parameters": shapes})
        self.resume(self._identity, self.tensors())
        if self.group.size > 1:  # processors may differ in rounding
            copy_values(map(self.group.from_first, self.tensors()), self.tensors())
        first = [tensor.detach().clone() for tensor in self.tensors()]
        if self.replays is not None and self.batches.whole is None:
            self._check_values()
        try:
            self.take_steps()
            return self._finish(first)
        except (FloatingPointError, ValueError) as error:
            finite = all(bool(part.isfinite().all()) for part in parameters)
            invalid = not finite or "Expected parameter" in str(error)
            validated = self.held_out.best if self.held_out is not None else []
            copy_values(validated or first, self.tensors())
            if isinstance(error, ValueError) and invalid and self.losses:
                raise FloatingPointError(LEFT.format(len(self.losses))) from error
            raise
        finally:
            self.replays = None  # and its memory

    def _check_values(self) -> None:
        """Raise unless all values are in the support, which replays of minibatches do not ask."""
        data, random = cast(Sequences, self.data), random_states()
        module = inspect.unwrap(self.model).module
        with torch.no_grad(), poutine.block(), in_mode(False, self.model):
            for chosen in torch.arange(len(data)).split(max(1, CACHED // data.num_steps)):
                piece = to_model_device(self.model, self.guide, data.batch(chosen))
                build(module, piece).prepare_values(piece.values)
        set_random_states(random)

    def step(self) -> None:
        """Take a gradient step; validate where that is due, and test for convergence."""
        with threads_for(self.objective.cost * self.batches.steps_at_once):
            self._descend(len(self.losses))
        count, held_out, ended = len(self.losses), self.held_out, None
        if held_out is not None and held_out.is_due(count, self.batches.at_end_of_round):
            nats = self._validate(held_out)
            self.shown["held_out"] = f"{nats:.4f}"
            if self.descent.plateau is not None:
                self.descent.plateau.step(nats)
            ended = held_out.why_ended
        if count % WINDOW == 0:
            level = torch.stack(self.losses[-WINDOW:]).mean(0).min().item() / self.num_observed
            self.shown["nats_per_step"] = f"{level:.4f}"
            self.bar.set_postfix(self.shown)
        self.reason = why_converged(self.losses, self.arguments["tolerance"], self.units) or ended

    def _descend(self, step: int) -> None:
        """Step along the gradient of the loss of a batch."""
        self.descent.optimizer.zero_grad()
        try:
            with self.batches.explained():
                loss, parts, batch = self._backward(self.batches.take())
        except Exception as error:  # of whatever kind: the other ranks wait
            if self.group.size == 1:
                raise
            self.error = self.error or error
            shape = () if self.restarts == 1 else (self.restarts,)
            loss, parts, batch = torch.zeros(shape, device=self.probe.device), None, self.probe
        known = parts is not None
        if self.group.size > 1:
            loss, parts = self._reduced(loss, parts)
        self.losses.append(loss)
        if known:
            self.parts.append(parts)
        if loss.device.type == "cpu" or step % WINDOW == 0:  # or the host would wait
            self._check_ranks()
            self.objective.check_finite(self.losses[-1], step, batch)
        try:
            self.descent.step(self.losses[-1], step + 1)
        except Exception as error:  # the next message says it
            if self.group.size == 1:
                raise
            self.error = self.error or error

    def _reduced(self, loss: Tensor, parts: Tensor | None) -> tuple[Tensor, Tensor]:
        """Average the loss, its parts and the gradients over the ranks.

        One that has failed goes on until all have read that it did.
        """
        failed = torch.full_like(loss, self.error is not None)
        parts = torch.stack([failed, failed]) if parts is None else parts
        numbers = torch.stack([failed, loss, *parts.to(loss)]).double()
        numbers = self.group.mean_gradients(self.objective.parameters, numbers).to(loss.dtype)
        self.failed = numbers[0].sum()
        return numbers[1], numbers[2:]

    def _check_ranks(self) -> None:
        """Raise the error of a rank in all of them, if there is one."""
        if self.group.size > 1 and self.failed > 0:
            self.group.together(self.error)

    def _backward(self, batch: Sequences | Parts) -> tuple[Tensor, Any, Sequences]:
        """Compute the gradient of the loss of a batch.

        In lower precision, if that is asked for, here or around the fit; without a cache, whose
        weights would still be those of the first step at the last one.

        Returns:
            The loss of this rank, its parts if they are known, and what it was computed for last.
        """
        total: Any = 0.0
        parts: Any = 0.0
        random = None if len(self.pieces) == 1 else random_states()
        for number, (piece, weight) in enumerate(self._pieces(batch)):
            if number and random is not None:  # one sample of the guide for all pieces
                set_random_states(random)
            found = self.replays and self.replays(piece, weight, bool(self.pieces))
            loss, of_loss, gradient = found or self._gradient(piece, weight)
            total = total + loss
            parts = None if of_loss is None else parts + of_loss
            for parameter, slope in zip(self.objective.parameters, gradient):
                if slope is not None:
                    parameter.grad = slope if parameter.grad is None else parameter.grad + slope
        return total, parts, piece

    def _pieces(self, batch: Sequences | Parts) -> Iterable[tuple[Sequences, float]]:
        """Pieces of a batch on the device of the fit, and their weights; of a whole set once."""
        if self.pieces:
            return self.pieces
        pieces: Any = [(batch, 1.0)] if self.at_once else weighted(batch)
        moved = ((to_model_device(self.model, self.guide, x), weight) for x, weight in pieces)
        if batch is self.batches.whole and isinstance(batch, Sequences):
            self.pieces = [*moved]
        return self.pieces or moved

    def _gradient(self, piece: Sequences, weight: float) -> tuple[Tensor, Tensor | None, list[Any]]:
        """Loss of a piece, its parts, and its gradient, None by what it does not depend on."""
        device, dtype = self.precision
        with torch.autocast(device, dtype, enabled=dtype is not None, cache_enabled=False):
            loss = with_one_wait(partial(self.objective.module, piece)) * weight
        leaves, parts = self.objective.parameters, self.objective.parts
        with full_precision(loss):
            slopes = torch.autograd.grad(loss.sum(), leaves, allow_unused=True)
        gradient: list[Any] = []
        seen: set[int] = set()  # terms of a sum share a slope, which clipping would scale twice
        for x, leaf in zip(slopes, leaves):
            memory = 0 if x is None else x.untyped_storage()._cdata
            fits = x is None or (x.stride() == leaf.stride() and memory not in seen)
            gradient.append(x if fits else torch.empty_like(leaf).copy_(x))
            seen.add(memory)
        return loss.detach(), None if parts is None else parts * weight, gradient

    def _validate(self, held_out: HeldOut) -> float:
        """Evaluate held-out data at the averaged parameters, or else the current ones."""
        self._check_ranks()
        average = self.descent.average
        applied = nullcontext() if average is None else average.applied()
        with applied, full_precision(self.objective.parameters[0]):
            return held_out.validate(len(self.losses), self.tensors())

    def _finish(self, first: list[Tensor]) -> Tensor:
        """Set the final parameters, and return all losses, checked."""
        self.group.together(self.error)
        if self.held_out is not None:
            if not self.held_out.history or self.held_out.history[-1].step != len(self.losses):
                self._validate(self.held_out)
            copy_values(self.held_out.best, self.tensors())
        elif self.descent.average is not None:
            copy_values(self.descent.average.values, self.objective.parameters)
        losses = torch.stack(self.losses).cpu()
        if losses.dim() > 1:  # a restart may fail
            return losses
        if not bool(losses.isfinite().all()):
            step = int((~losses.isfinite()).byte().argmax())
            self.objective.check_finite(losses[step], step, self.probe)
        pairs = zip(self.objective.parameters, first)  # a filter in a buffer may be -inf
        if any(bool((before.isfinite() & ~last.isfinite()).any()) for last, before in pairs):
            raise FloatingPointError(LEFT.format(len(losses)))
        return losses

    def history(self, losses: Tensor) -> dict[str, Tensor]:
        """Parts of the loss by name, ``(num_iterations,)`` or ``(num_iterations, R)``."""
        if len(self.parts) < len(losses):
            return {}
        likelihood, prior = torch.stack(self.parts, 1).cpu()
        history = {"log_likelihood": likelihood, "log_prior": prior}
        return history | {"entropy": -losses - likelihood - prior}

    def state(self) -> dict[str, Any]:
        """Checkpoint state: loss parts, parameters, optimizer, schedule, averages, validation."""
        schedule, average = self.descent.schedule, self.descent.average
        return {
            "parts": self.parts,
            "tensors": self.tensors(),
            "optimizer": self.descent.optimizer.state_dict(),
            "schedule": None if schedule is None else schedule.state_dict(),
            "averages": None if average is None else average.values,
            "held_out": None if self.held_out is None else self.held_out.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore parameters, optimizer, schedule, averages and validation from a checkpoint."""
        copy_values(state["tensors"], self.tensors())
        self.descent.optimizer.load_state_dict(state["optimizer"])
        if self.descent.schedule is not None:
            self.descent.schedule.load_state_dict(state["schedule"])
        device = self.objective.parameters[0].device
        if self.descent.average is not None:
            self.descent.average.values = [value.to(device) for value in state["averages"]]
        if self.held_out is not None:
            self.held_out.restore(state["held_out"])
        self.losses = [loss.to(device) for loss in self.losses]
        self.parts = [part.to(device) for part in state["parts"]]

    def _identity(self) -> dict[str, Any]:
        """Fingerprint of the fit, for checkpoints."""
        model = inspect.unwrap(self.model)
        own = {"precision": self.precision[1], "data": self.data}
        return identity_of(
            f"{name_of(self.guide)} on {name_of(model)}", self.objective.parameters,
            {**self.arguments, **own, "model": model, "guide": self.guide},
        ) | {"latent variables": list(self.objective.supports)}  # fmt: skip


def why_converged(losses: list[Tensor], tolerance: float | None, units: float = 0.0) -> str | None:
    """The reason to end a fit whose mean loss falls by less than ``tolerance`` of itself; or None.

    The mean of the last 25 losses is compared with that of the 25 before, every 25 steps. What
    the ``units`` of the data add to a loss is not counted.
    """
    if tolerance is None or len(losses) % WINDOW or len(losses) < 2 * WINDOW:
        return None
    mean = torch.stack(losses[-WINDOW:]).mean(0)
    before = torch.stack(losses[-2 * WINDOW : -WINDOW]).mean(0)
    change = (before - mean).abs()  # where it rises steps are too long
    if bool((change >= tolerance * (mean - units).abs()).any()):  # in any restart
        return None
    return f"over {WINDOW} steps the loss fell by less than {tolerance:g} of itself"


def check_model_and_data(model: Any, data: Any) -> None:
    """Raise unless ``model`` is a Pyro model and ``data`` are sequences."""
    if isinstance(model, HMMModule):
        raise TypeError(
            f"model must be a Pyro model of the data; got the HMMModule {type(model).__name__}. "
            "Put it into one: MarginalModel(module)."
        )
    if isinstance(model, MCMCKernel) or not callable(model):
        text = f"model must be a Pyro model of the data; got {type(model).__name__}"
        raise TypeError(f"{text}. Give MarginalModel(module), or of a fit its fit.model.")
    if isinstance(model, PyroModule) and model._pyro_context.active:
        raise ValueError(
            "model must not be the one that the fit around this one trains, whose values it would "
            "have; got the same object. Fit a copy: copy.deepcopy(model)."
        )
    if not isinstance(data, Parts):
        check_sequences("data", data)
