"""One training loop for any pair of model and guide: MAP and SVI are two such pairs.

Pyro's global parameter store is set aside during a fit and restored after it: otherwise a second
fit with the same names would start, silently, where the first one ended.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pyro
import torch
from pyro.infer.autoguide import AutoGuide
from pyro.nn import PyroModule
from torch import Tensor
from tqdm import tqdm

from .._threads import threads_for
from ..data.parts import Parts, parts_of
from ..data.sequences import Sequences
from ..io.checkpoints import Checkpoint
from ..nn.base import HMMModule, in_mode
from .models import scale_priors
from .plates import marks_of
from .process_group import ProcessGroup
from .results import WINDOW, Fit, uses_labels
from .training import Settings, State

_guides = count()


def train(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    data: Sequences | Parts,
    settings: Settings,
    method: str,
    batched: bool = False,
) -> Fit:
    """Minimise the loss of ``model`` and ``guide`` on ``data`` by gradient steps.

    Args:
        model: The Pyro model; with ``batched``, of restarts in a plate.
        guide: The Pyro guide.
        data: The sequences.
        settings: All else that fits take.
        method: "MAP" or "SVI".
        batched: Whether there is one loss for each of R restarts.
    """
    check_model_and_data(model, data)
    if isinstance(guide, AutoGuide):
        _rename(guide)
    asked = inspect.unwrap(model)
    module = getattr(asked, "module", None)
    with (
        pyro.get_param_store().scope() as store,
        in_mode(True, model, guide),
        _scaled_priors(module, data) as units,
    ):
        state = State(model, guide, data, settings, batched)
        checkpoint = None
        if settings.checkpoint is not None:
            checkpoint = Checkpoint(
                settings.checkpoint, state.identity(), (settings.generator,), state.group.is_first
            )
            checkpoint.resume(state.restore, state.tensors())
        if state.group.size > 1:
            state.check_ranks()
        state.begin()
        try:
            descend(state, checkpoint, units)
            losses, values = state.finish(), state.values()
        except (FloatingPointError, ValueError):
            state.give_back()
            raise
    return Fit(
        model, guide, losses, state.converged, state.reason, state.seconds, data.num_observed,
        names=list(state.objective.supports), params=dict(store),
        notes=uses_labels(data) if isinstance(module, HMMModule) else [],
        method=method, validation=[] if state.held_out is None else state.held_out.history,
        supports=state.objective.supports, values=values, plates=state.objective.plates,
        fitted=torch.cat([*map(marks_of, parts_of(data))]) if state.objective.plates else None,
    )  # fmt: skip


@contextmanager
def _scaled_priors(module: Any, data: Sequences | Parts) -> Iterator[float]:
    """Priors in the units of ``data``, which are those of before again at the end."""
    if not isinstance(module, HMMModule):
        yield 0.0
        return
    emission: Any = module.emission_module()
    parts = list(emission.modules()) if isinstance(emission, PyroModule) else []
    kept = [dict(part._buffers) for part in parts]
    try:
        yield scale_priors(module, data)
    finally:
        for part, buffers in zip(parts, kept):
            part._buffers.update(buffers)


def descend(state: State, checkpoint: Checkpoint | None, units: float) -> None:
    """Take gradient steps until a test ends the fit, or all are taken.

    Args:
        state: All of the fit.
        checkpoint: Where to save it.
        units: What the unit of the data adds to the loss.
    """
    settings, objective, batches = state.settings, state.objective, state.batches
    losses, descent, held_out, group = state.losses, state.descent, state.held_out, state.group
    steps = range(len(losses), len(losses) if state.converged else settings.num_steps)
    with Progress(settings, len(losses), group) as progress:
        for step in steps:
            with threads_for(objective.cost * batches.steps_at_once):
                descent.optimizer.zero_grad()
                try:
                    loss, batch = state.backward(batches.take())
                except ValueError as error:
                    batches.explain(error)
                    objective.explain(error, step)
                    raise
                losses.append(group.mean(loss))
                if loss.device.type == "cpu" or step % WINDOW == 0:  # or the host would wait
                    objective.check_finite(losses[-1], step, batch)
                descent.step(losses[-1], group, step + 1)
            progress.bar.update()
            ended = None
            if held_out is not None and held_out.is_due(step + 1, batches.at_end_of_round):
                nats = state.validate(held_out)
                progress.show("held_out", nats)
                if descent.plateau is not None:
                    descent.plateau.step(nats)
                ended = held_out.why_ended
            if (step + 1) % WINDOW == 0:
                level = torch.stack(losses[-WINDOW:]).mean(0).min().item()
                progress.show("nats_per_step", level / state.num_observed)
            if ended := why_converged(losses, settings.tolerance, units) or ended:
                state.converged, state.reason = True, ended
                break
            if checkpoint is not None and checkpoint.is_due():
                checkpoint.save(state.take())
    if checkpoint is not None and len(steps):
        checkpoint.save(state.take())
    group.wait()  # for the file, which another fit may ask for


class Progress:
    """A progress bar on stderr, in the first process."""

    def __init__(self, settings: Settings, done: int, group: ProcessGroup) -> None:
        hidden = None if settings.progress is None else not settings.progress
        self.bar = tqdm(
            total=settings.num_steps, initial=done, disable=not group.is_first or hidden
        )
        self.shown: dict[str, str] = {}

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def show(self, name: str, value: float) -> None:
        """Show a number beside the bar."""
        self.shown[name] = f"{value:.4f}"
        self.bar.set_postfix(self.shown)


def why_converged(losses: list[Tensor], tolerance: float | None, units: float = 0.0) -> str | None:
    """The reason to end a fit whose loss no longer falls, if that is so.

    The mean of the last 25 losses is compared with that of the 25 before, every 25 steps. What
    the ``units`` of the data add to a loss is not counted.
    """
    if tolerance is None or len(losses) % WINDOW or len(losses) < 2 * WINDOW:
        return None
    mean = torch.stack(losses[-WINDOW:]).mean(0)
    before = torch.stack(losses[-2 * WINDOW : -WINDOW]).mean(0)
    if bool((before - mean >= tolerance * (mean - units).abs()).any()):  # in any restart
        return None
    return f"over {WINDOW} steps the loss fell by less than {tolerance:g} of itself"


def check_model_and_data(model: Any, data: Any) -> None:
    """Raise unless ``model`` is a Pyro model and ``data`` are sequences."""
    if isinstance(model, HMMModule):
        raise TypeError(
            f"model must be a Pyro model of the data; got the HMMModule {type(model).__name__}. "
            "Put it into one: MarginalModel(module)."
        )
    if isinstance(model, PyroModule) and model._pyro_context.active:
        raise ValueError(
            "model is in use by the fit around this one, which would lend it its values. Fit a "
            "copy: copy.deepcopy(model)."
        )
    if not isinstance(data, Sequences | Parts):
        raise TypeError(
            f"data must be Sequences; got {type(data).__name__}. Build them with "
            "Sequences.from_list, or Sequences(values, lengths)."
        )


def _rename(guide: AutoGuide) -> None:
    """Give an autoguide a unique name: Pyro keeps parameters by name, and would mix guides."""
    if "_of_fit_" not in guide._pyro_name:
        unique = f"{guide._pyro_name}_of_fit_{next(_guides)}"
        for name, part in guide.named_modules():
            if isinstance(part, PyroModule):
                part._pyro_name = f"{unique}.{name}" if name else unique
