"""One training loop for any pair of model and guide: MAP and SVI are two such pairs.

Pyro's global parameter store is set aside during a fit, and left as it was found: otherwise a
second fit with the same names would start, silently, where the first one ended.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.infer import ELBO, Trace_ELBO, TraceEnum_ELBO
from pyro.infer.autoguide import AutoDelta, AutoGuide, init_to_sample
from pyro.nn import PyroModule
from pyro.poutine.util import site_is_subsample
from torch import Tensor, nn
from torch.distributions import constraints
from tqdm import tqdm

from .._checks import check_size
from .._precision import full_precision
from ..data.batches import Batches
from ..data.process_group import ProcessGroup
from ..data.sequences import Sequences
from ..distributions.sparse_dirichlet import interior
from ..io.checkpoints import Checkpoint, constants, digits, fingerprint, settings
from ..nn.base import HMMModule, in_mode
from .models import to_model_device
from .results import WINDOW, Fit, Point, Restarts, name_of, uses_labels
from .training import Average, ParametersRead, State, clip, hold, trained
from .validation import HeldOut, Validation

_guides = count()

WHEN_IMPOSSIBLE = (
    "a sequence has probability zero: check for symbols or transitions that no path allows"
)
Plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
ScheduleFactory = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


def fit_map(
    model: Callable[..., Any],
    data: Sequences,
    *,
    num_steps: int = 1000,
    learning_rate: float = 0.05,
    tolerance: float | None = 1e-5,
    init: Callable[..., Any] = init_to_sample,
    restarts: int = 1,
    **options: Any,
) -> Fit:
    """Find the most probable parameters: :func:`fit_svi` with a guide that is a single point.

    The point maximises the density in the constrained space (of the probabilities themselves, not
    of their logits). Parameters without a prior, such as the weights of a network, are fitted by
    maximum likelihood at the same time.

    Args:
        model: A Pyro model that takes ``data``, such as :class:`MarginalModel`.
        data: The sequences.
        num_steps: Largest number of gradient steps.
        learning_rate: Of Adam.
        tolerance: See :func:`fit_svi`.
        init: Where the point starts, as for Pyro's autoguides. The default draws from the prior,
            which makes states differ from each other, as they must.
        restarts: R, from how many starts; they run side by side, in a plate ``restarts`` around the
            model, which must accept dimensions ``(R, 1)`` on the left of every latent variable, as
            all of this package do. The best is kept, all are in ``Fit.restarts``.
        **options: Those of :func:`fit_svi`.

    Raises:
        FloatingPointError: If the loss becomes infinite or NaN.
        TypeError, ValueError: As :func:`fit_svi`.

    Example:
        >>> _ = pyro.set_rng_seed(0)
        >>> data = Sequences.from_list([[0, 1] * 10, [1, 0] * 10])
        >>> model = MarginalModel(TabularHMM(2, categorical(2)))
        >>> fit = fit_map(model, data, num_steps=200, learning_rate=0.2)
        >>> fit.hmm(data).log_prob(data.values).sum().round(decimals=1)  # 2 log 1/2
        tensor(-1.4000)
    """

    def inside(site: dict[str, Any] | None = None) -> Any:  # where gradient steps can begin
        if site is None:
            return inside
        return interior(site["fn"].support, init(site)).clone()  # which moves in place

    options |= {"num_steps": num_steps, "learning_rate": learning_rate, "tolerance": tolerance}
    check_size("restarts", restarts)
    if restarts == 1:
        guide = AutoDelta(poutine.block(model, hide_fn=_is_enumerated), init_loc_fn=inside)
        return replace(fit_svi(model, guide, data, **options), method="MAP")
    _check(model, data, num_steps)
    if options.get("validation") is not None:
        raise ValueError("validation is that of one fit; give restarts=1, and go on from the best "
                         "of several: init=init_to_value(values=fit.start).")  # fmt: skip
    if isinstance(model, nn.Module) and any(each.requires_grad for each in model.parameters()):
        raise ValueError(
            "restarts need every parameter to have a prior, so that each restart has its own; "
            f"{type(model).__name__} has parameters without one. Fit it once for each start."
        )

    with poutine.block(), torch.no_grad(), pyro.get_param_store().scope():
        probe = to_model_device(model, None, data[:1])
        with ParametersRead(model) as met:
            supports, enumerated = _sites(model, probe)
        if any(each.requires_grad for each in met.found):
            raise ValueError(
                "restarts need every parameter to have a prior, so that each restart has its own; "
                "model reads parameters without one. Fit it once for each start."
            )
        if enumerated:
            raise ValueError(
                "restarts need a model whose states are summed out, such as MarginalModel; this "
                "one enumerates them."
            )
        nodes = poutine.trace(model).get_trace(probe).nodes
        check_events({n: nodes[n]["fn"] for n in supports if not nodes[n]["cond_indep_stack"]})

    def side_by_side(batch: Sequences) -> Any:
        with pyro.plate("restarts", restarts, dim=-2):
            return model(batch)

    side_by_side.__wrapped__ = model  # type: ignore[attr-defined]  # whose constants are its own
    guide = AutoDelta(side_by_side, init_loc_fn=inside)
    fit = fit_svi(side_by_side, guide, data, elbo=_EachRestart(), **options)
    if isinstance(getattr(model, "module", None), HMMModule):
        fit.notes += uses_labels(data)
    return _best(fit, model)


def check_events(sites: dict[str, Any]) -> None:
    """Raise unless each latent variable is one event: what is to its left are restarts."""
    for name, distribution in sites.items():
        if distribution.batch_shape:
            raise ValueError(
                f"site {name!r} must be one event, whose dimensions are its own; it has batch "
                f"shape {tuple(distribution.batch_shape)}. Call "
                f".to_event({len(distribution.batch_shape)}) on its distribution."
            )


class _EachRestart:
    """The loss of each restart by itself: what ``elbo`` is to one fit."""

    def __call__(self, model: Any, guide: Any) -> nn.Module:
        return _RestartLosses(model, guide)

    def loss(self, model: Any, guide: Any, batch: Sequences) -> float:
        return _RestartLosses(model, guide)(batch).min().item()


class _RestartLosses(nn.Module):
    """Minus the log joint density of each restart, ``(R,)``."""

    def __init__(self, model: Any, guide: nn.Module) -> None:
        super().__init__()
        self.model, self.guide = model, guide

    def forward(self, batch: Sequences) -> Tensor:
        """Run the guide, and the model against it."""
        point = poutine.trace(self.guide).get_trace(batch)
        trace = poutine.trace(poutine.replay(self.model, trace=point)).get_trace(batch)
        trace.compute_log_prob()
        total: Any = 0.0
        for site in trace.nodes.values():
            if site["type"] == "sample" and not site_is_subsample(site):
                scores = site["log_prob"]
                if scores.dim() < 2:
                    raise ValueError(
                        f"site {site['name']!r} is the same in all restarts; its parameters must "
                        "keep the dimensions to the left of their own."
                    )
                total = total - scores.sum(-1).reshape(-1, scores.size(-2)).sum(0)
        return total


def _best(fit: Fit, model: Callable[..., Any]) -> Fit:
    """The best of several restarts, with all of them beside it."""
    history = fit.losses.T  # (R, steps)
    history = history.masked_fill(~history.isfinite(), torch.inf)
    final = history[:, -1] if history.size(1) < WINDOW else history[:, -WINDOW:].mean(-1)
    values = {name: value.squeeze(1) for name, value in fit.values.items()}
    best = int(final.argmin())
    guide = Point({name: value[best] for name, value in values.items()})
    every = Restarts(model, history, final, values, best)
    failed = int((~final.isfinite()).sum())
    notes = [f"{failed} of {len(final)} restarts ended at infinity"] if failed else []
    notes = fit.notes + notes
    return replace(
        fit,
        model=model,
        guide=guide,
        losses=history[best],
        restarts=every,
        notes=notes,
        method="MAP",
    )


def fit_svi(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    data: Sequences,
    *,
    num_steps: int = 1000,
    learning_rate: float = 0.01,
    batch_size: int | None = None,
    batch_tokens: int | None = None,
    windows: tuple[int, int] | None = None,
    elbo: ELBO | _EachRestart | None = None,
    optimizer: OptimizerFactory | None = None,
    schedule: ScheduleFactory | None = None,
    clip_norm: float | None = None,
    average: float | None = None,
    tolerance: float | None = None,
    validation: Sequences | None = None,
    validate_every: int | None = None,
    patience: int | None = None,
    report: Callable[[Validation], object] | None = None,
    generator: torch.Generator | None = None,
    progress: bool | None = None,
    checkpoint: str | Path | None = None,
) -> Fit:
    """Maximise the evidence lower bound by gradient steps.

    The fit runs where the parameters are. With minibatches the data may stay on the host: each is
    moved as it is used. Two runs after the same ``pyro.set_rng_seed`` are equal. Modules are in
    ``train()`` mode while steps are taken, in ``eval()`` mode where held-out data are evaluated and
    where a :class:`Fit` is used, and each in its own mode at the end.

    With ``checkpoint`` the fit saves where it stands every ten seconds and at its end. The same
    call goes on from there: after the process was killed, or with more ``num_steps``. On a CPU it
    ends with the same bits as one that was never killed. A file of a call that takes other steps
    is refused, that of a schedule made for another number of them included; what the parameters
    were before the first one is not compared.

    Where ``torch.distributed`` has been initialised, as ``torchrun`` does, all processes make the
    same call, with the same seed and the whole data, and each takes its share of every batch. They
    find what one process finds, to rounding; the first one writes files and shows progress.

    Args:
        model: A Pyro model that takes a :class:`Sequences`.
        guide: A Pyro guide that takes the same, such as ``AutoNormal(model)``. If the model
            enumerates states, build the guide over ``poutine.block`` of it, as Pyro asks for. An
            autoguide gets a name of its own, so that parameters of two guides never meet.
        data: The sequences.
        num_steps: Largest number of gradient steps.
        learning_rate: Of Adam, if there is no ``optimizer``.
        batch_size: Number of sequences in a minibatch; all of them by default. The likelihood is
            scaled by total over batch size, priors are not.
        batch_tokens: Largest number of steps in a minibatch, padding included, in place of
            ``batch_size``: sequences of similar length come together, each once in every round, and
            a longer one is a batch alone. The mean loss of a round is that of the whole set.
        windows: ``(streams, steps)``, in place of both: the sequences of a round, one after the
            other, are parted into so many streams, and each minibatch is the next so many steps of
            all. For a :class:`pyrohmm.StatefulModel`.
        elbo: The objective; ``TraceEnum_ELBO`` if the model enumerates sites, else ``Trace_ELBO``.
        optimizer: Called with the parameters, returns a torch optimizer.
        schedule: Called with the optimizer, returns a torch learning-rate scheduler, which is
            stepped once after every gradient step; a ``ReduceLROnPlateau`` instead after every
            validation, with its nats per step.
        clip_norm: Largest norm of the whole gradient, per observed step; no limit by default.
        average: Decay of a moving average of the parameters, below one: the fit ends at it, and
            validates it. It begins with those after the first step; after step n the decay is
            (1 + n) / (10 + n) where that is less, so that it soon forgets the beginning.
        tolerance: End when the mean loss of 25 steps is not below that of the 25 before by this
            share of itself. None runs all steps, which noisy losses may need.
        validation: Held-out sequences. The fit ends with the parameters that predict them best:
            at the medians of latent variables where the guide knows them, else at a draw.
        validate_every: After how many gradient steps to do so; by default after every round of
            minibatches, and after 25 steps without them. The last step is followed by one too.
        patience: End after this many validations none of which was better than those before.
        report: Called with the :class:`Validation` after each, in the first process: ``print``, or
            what writes to your log.
        generator: Source of randomness for minibatches; torch's global one by default.
        progress: Whether to show a progress bar on stderr; by default if that is a terminal.
        checkpoint: A file to save to and to go on from.

    Raises:
        FloatingPointError: If the loss becomes infinite or NaN.
        FileNotFoundError: If the directory of ``checkpoint`` does not exist.
        TypeError: If ``data`` are not :class:`Sequences`, ``model`` is a module that builds an
            HMM, a number is of the wrong type, or the model returns no HMM for ``validation``.
        ValueError: If a number is out of range, two options exclude each other or one needs
            another, there is nothing to fit, processes begin differently, or ``checkpoint`` is
            damaged or belongs to another fit.

    Example:
        A network without priors, its best parameters on held-out data, and when to halve its steps:

        >>> class Coin(HMMModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.logits = torch.nn.Parameter(torch.zeros(2, 2))
        ...
        ...     def forward(self, lengths, observed=None):
        ...         even = torch.full((2, 2), 0.5).log()
        ...         return HMM(even[0], even, Categorical(logits=self.logits), lengths, observed)
        >>> data = Sequences.from_list([[1, 1, 0, 1]] * 9 + [[1, 0]] * 9)
        >>> fit = fit_map(
        ...     MarginalModel(Coin()), data[::2], validation=data[1::2], batch_tokens=16,
        ...     optimizer=lambda given: torch.optim.AdamW(given, lr=0.1), patience=9,
        ...     schedule=lambda it: torch.optim.lr_scheduler.ReduceLROnPlateau(it, factor=0.5),
        ... )
        >>> best = min(fit.validation, key=lambda found: found.nats)
        >>> math.exp(best.nats) < 1.91  # perplexity; that of a fair coin is 2
        True
    """
    _check(model, data, num_steps, clip_norm, average)
    _check_batches(batch_size, batch_tokens, windows)
    _check_validation(validation, validate_every, patience, report)
    if isinstance(guide, AutoGuide):
        _rename(guide)
    start_time = time.perf_counter()
    tokens = max(data.num_observed, 1)
    processes = ProcessGroup.all()
    with pyro.get_param_store().scope() as store, in_mode(True, model, guide):
        batches = Batches(
            data,
            batch_size,
            generator,
            batch_tokens=batch_tokens,
            windows=windows,
            processes=processes,
        )
        probe = to_model_device(model, guide, data[:1] if batches.whole is None else batches.whole)
        with poutine.block(), torch.no_grad():
            with ParametersRead(model) as met:
                supports, enumerated = _sites(model, probe)
            names = list(supports)
            with ParametersRead(guide) as read:
                guide(probe)  # an autoguide makes its parameters here
        elbo = elbo or (TraceEnum_ELBO() if enumerated else Trace_ELBO())
        objective = elbo(model, guide)
        parameters = trained(objective, [*met.found, *read.found])
        stepper = (
            torch.optim.Adam(parameters, lr=learning_rate) if optimizer is None
            else optimizer(parameters)
        )  # fmt: skip
        scheduler = schedule(stepper) if schedule else None
        every = WINDOW if batches.whole is not None and validate_every is None else validate_every
        held_out = None
        if validation is not None:
            held_out = HeldOut(validation, batch_size, batch_tokens, patience, processes, report)
            held_out.check(model, guide)  # now rather than after hours
        if isinstance(scheduler, Plateau) and (held_out is None or scheduler.mode != "min"):
            raise ValueError(
                "schedule returned a ReduceLROnPlateau, which follows the nats per step of "
                f"held-out data: give validation, and mode='min'; its mode is {scheduler.mode!r}."
            )
        averages = None if average is None else Average(parameters, average)
        losses: list[Tensor] = []
        converged, reason = False, f"it took all {num_steps} steps"
        keeper = None
        state = State(objective, parameters, stepper, scheduler, batches, averages, held_out)
        if checkpoint is not None:
            others = {name: each for name, each in stepper.defaults.items() if name != "lr"}
            identity = {
                "fit": f"{name_of(guide)} on {name_of(model)}",
                "latent variables": names,
                "shapes": [list(each.shape) for each in parameters],
                "priors and frozen parameters": constants(inspect.unwrap(model), guide),
                "optimizer": type(stepper).__name__,
                "learning_rate": settings(stepper.defaults.get("lr")),
                "settings of the optimizer": settings(others),
                "schedule": None if scheduler is None else settings(scheduler.state_dict()),
                "clip_norm": clip_norm,
                "batch_size": batch_size,
                "batch_tokens": batch_tokens,
                "windows": None if windows is None else list(windows),
                "average": average,
                "data": fingerprint(data),
                "validation": None if validation is None else fingerprint(validation),
                "validate_every": validate_every,
                "seed of the generator": None if generator is None else generator.initial_seed(),
            }
            keeper = Checkpoint(checkpoint, identity, (generator,), writes=processes.is_first)
            found = keeper.load()
            if found is not None:
                losses, earlier = state.restore(found)
                start_time -= earlier
                if len(losses) > num_steps:
                    reason = f"checkpoint had taken {len(losses)} steps already"
                if found["converged"] and found["tests"] == [tolerance, patience]:
                    converged, reason = True, found["reason"]
        if processes.size > 1:
            _check_shared(model, data)
            random = [torch.get_rng_state(), None if generator is None else generator.get_state()]
            processes.check_same(
                data=fingerprint(data),
                random_numbers=digits(random),
                parameters=digits(parameters),
                checkpoints=len(losses),
            )
        steps = range(0) if converged else range(len(losses), num_steps)
        with tqdm(
            total=num_steps,
            initial=len(losses),
            disable=not processes.is_first or (None if progress is None else not progress),
        ) as bar:
            shown: dict[str, str] = {}
            for step in steps:
                batch = to_model_device(model, guide, batches.take())
                stepper.zero_grad()
                try:
                    loss = objective(batch)
                except ValueError as error:
                    batches.explain(error)
                    finite = all(bool(parameter.isfinite().all()) for parameter in parameters)
                    if step == 0 or (finite and "ExpectedCounts parameter" not in str(error)):
                        raise
                    raise FloatingPointError(
                        f"a parameter has left its range at step {step}; lower learning_rate or "
                        "set clip_norm."
                    ) from error
                losses.append(processes.mean(loss.detach().clone()))
                if loss.device.type == "cpu" or step % WINDOW == 0:  # elsewhere it takes a wait
                    _check_finite(losses[-1], step, elbo, model, guide, batch)
                with full_precision(loss):
                    loss.sum().backward()
                for parameter in parameters:  # a model without labels, say, may leave some out
                    if parameter.grad is not None:
                        processes.mean(parameter.grad)
                if loss.dim():
                    hold(parameters, ~losses[-1].isfinite())
                if clip_norm is not None:
                    clip(parameters, clip_norm * tokens, len(loss.shape) > 0)
                stepper.step()
                if averages is not None:
                    averages.update(step + 1)
                if scheduler is not None and not isinstance(scheduler, Plateau):
                    scheduler.step()
                bar.update()
                due = batches.at_end_of_round if every is None else (step + 1) % every == 0
                if held_out is not None and due:
                    with state.judged() as tensors:
                        nats = held_out.judge(step + 1, model, guide, tensors)
                    shown["held_out"] = f"{nats:.4f}"
                    bar.set_postfix(shown)
                    if isinstance(scheduler, Plateau):
                        scheduler.step(nats)
                    if held_out.is_stale:
                        converged = True
                        reason = f"{patience} validations in a row were no better than the best"
                if (step + 1) % WINDOW == 0:
                    mean = torch.stack(losses[-WINDOW:]).mean(0)
                    level = mean.min().item() / tokens
                    shown["nats_per_step"] = f"{level:.4f}"
                    bar.set_postfix(shown)
                    if tolerance is not None and len(losses) >= 2 * WINDOW:
                        before = torch.stack(losses[-2 * WINDOW : -WINDOW]).mean(0)
                        if not bool((before - mean >= tolerance * mean.abs()).any()):
                            converged = True
                            reason = (
                                f"over {WINDOW} steps the loss fell by less than {tolerance:g} "
                                "of itself"
                            )
                if converged:
                    break
                if keeper is not None and keeper.is_due():
                    keeper.save(state.take(losses, time.perf_counter() - start_time))
        if keeper is not None and len(steps):
            end = {"converged": converged, "reason": reason, "tests": [tolerance, patience]}
            keeper.save(state.take(losses, time.perf_counter() - start_time) | end)
        processes.wait()  # for the file, which another fit may ask for
        if held_out is not None and (
            not held_out.history or held_out.history[-1].step != len(losses)
        ):
            with state.judged() as tensors:
                held_out.judge(len(losses), model, guide, tensors)
        state.settle()
        history = torch.stack(losses).cpu()
        if history.dim() == 1 and not bool(history.isfinite().all()):
            worst = int((~history.isfinite()).byte().argmax())
            _check_finite(history[worst], worst, elbo, model, guide, probe)
    return Fit(
        model,
        guide,
        history,
        converged,
        reason,
        time.perf_counter() - start_time,
        data.num_observed,
        names,
        dict(store),
        uses_labels(data) if isinstance(getattr(model, "module", None), HMMModule) else [],
        validation=[] if held_out is None else held_out.history,
        supports=supports,
    )


def _check(
    model: Any,
    data: Any,
    num_steps: int,
    clip_norm: float | None = None,
    average: float | None = None,
) -> None:
    """Raise at arguments that cannot be meant."""
    if isinstance(model, HMMModule):
        raise TypeError(
            f"model must be a Pyro model of the data; got the HMMModule {type(model).__name__}. "
            "Put it into one: MarginalModel(module)."
        )
    if not isinstance(data, Sequences):
        raise TypeError(
            f"data must be Sequences; got {type(data).__name__}. Build them with "
            "Sequences.from_list, or Sequences(values, lengths)."
        )
    check_size("num_steps", num_steps)
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(f"clip_norm must be positive; got {clip_norm}.")
    if average is not None and not 0 < average < 1:
        raise ValueError(f"average must be between 0 and 1, such as 0.999; got {average}.")


def _check_batches(
    batch_size: int | None, batch_tokens: int | None, windows: tuple[int, int] | None
) -> None:
    for name, given in (("batch_size", batch_size), ("batch_tokens", batch_tokens)):
        if given is not None:
            check_size(name, given)
    if windows is not None:
        if not isinstance(windows, tuple) or len(windows) != 2:
            raise TypeError(f"windows must be a pair, (streams, steps); got {windows!r}.")
        for name, given in zip(("the streams of windows", "the steps of windows"), windows):
            check_size(name, given)
    if sum(each is not None for each in (batch_size, batch_tokens, windows)) > 1:
        raise ValueError(
            "batch_size, batch_tokens and windows exclude each other: a minibatch has a number of "
            "sequences, or of steps, or the next steps of streams. Give one of them."
        )


def _check_validation(
    validation: Any, validate_every: int | None, patience: int | None, report: Any
) -> None:
    if validation is not None and not isinstance(validation, Sequences):
        raise TypeError(f"validation must be Sequences; got {type(validation).__name__}.")
    for name, given in (("validate_every", validate_every), ("patience", patience)):
        if given is not None:
            check_size(name, given)
            if validation is None:
                raise ValueError(f"{name} needs validation, the sequences that are held out.")
    if report is not None and validation is None:
        raise ValueError("report needs validation, the sequences that are held out.")


def _rename(guide: AutoGuide) -> None:
    """Give an autoguide a name of its own: Pyro keeps parameters by name, and would mix guides."""
    if "_of_fit_" not in guide._pyro_name:
        own = f"{guide._pyro_name}_of_fit_{next(_guides)}"
        for name, part in guide.named_modules():
            if isinstance(part, PyroModule):
                part._pyro_name = f"{own}.{name}" if name else own


def _is_enumerated(site: dict[str, Any]) -> bool:
    return site["type"] == "sample" and site["infer"].get("enumerate") == "parallel"


def _sites(
    model: Callable[..., Any], data: Sequences
) -> tuple[dict[str, constraints.Constraint], bool]:
    """Spaces of the latent sites of ``model``, and whether some others are enumerated."""
    trace = poutine.trace(model).get_trace(data)
    hidden = [trace.nodes[name] for name in trace.stochastic_nodes]
    hidden = [site for site in hidden if not site_is_subsample(site)]
    supports = {site["name"]: site["fn"].support for site in hidden if not _is_enumerated(site)}
    return supports, any(_is_enumerated(site) for site in hidden)


def _check_shared(model: Callable[..., Any], data: Sequences) -> None:
    """Raise at latent variables of single sequences, of which processes would see others each."""
    shapes = []
    for number in (1, 2):
        with torch.no_grad(), poutine.block(), torch.random.fork_rng(devices=[]):
            trace = poutine.trace(model).get_trace(to_model_device(model, None, data[:number]))
        shapes.append({name: trace.nodes[name]["value"].shape for name in trace.stochastic_nodes})
    for name, shape in shapes[0].items():
        if shape != shapes[1].get(name) and not site_is_subsample(trace.nodes[name]):
            raise ValueError(
                f"site {name!r} grows with the number of sequences, which several processes share. "
                "Fit this model in one process."
            )


def _check_finite(
    loss: Tensor, step: int, elbo: ELBO | _EachRestart, model: Any, guide: Any, batch: Sequences
) -> None:
    """Raise if the loss at ``step``, on ``batch``, is not finite (in any restart)."""
    value = loss.min().item() if loss.isfinite().any() else loss.flatten()[0].item()
    if math.isfinite(value):
        return
    if math.isnan(value):  # the losses that Pyro differentiates turn infinity into NaN
        with torch.no_grad(), poutine.block():
            value = elbo.loss(model, guide, batch)
    cause = "lower learning_rate, set clip_norm, or keep scales and probabilities away from zero"
    if value == math.inf:
        asked = inspect.unwrap(model)
        which = getattr(asked, "when_impossible", WHEN_IMPOSSIBLE)
        if getattr(asked, "log_prior", None) is not None and which is WHEN_IMPOSSIBLE:
            which += (", or the log_prior is -inf, as that of diversity is where two rows are "
                      "equal: begin elsewhere, such as with init_to_sample")  # fmt: skip
        cause = which + (f"; or {cause}" if step else "")
    raise FloatingPointError(f"the loss is {value} at step {step}; {cause}.")
