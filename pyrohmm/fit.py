"""One training loop for any pair of model and guide: MAP and SVI are two such pairs.

Pyro's global parameter store is set aside during a fit, and left as it was found: otherwise a
second fit with the same names would start, silently, where the first one ended.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.infer import ELBO, Trace_ELBO, TraceEnum_ELBO
from pyro.infer.autoguide import AutoDelta, AutoGuide, init_to_sample
from pyro.nn import PyroModule
from pyro.poutine.util import site_is_subsample
from torch import Tensor, nn
from tqdm import tqdm

from ._checks import check_size
from .hmm import HMM
from .modules import HMMModule
from .sequences import Sequences

WINDOW = 25  # steps whose mean loss is compared with that of the steps before
_guides = count()

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
ScheduleFactory = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


@dataclass
class Fit:
    """A fitted model.

    Attributes:
        model: The Pyro model.
        guide: What was fitted: a point for MAP, a distribution for SVI.
        losses: ``(num_steps,)``, the loss at each step in nats, for the whole set: minus the log
            joint density for MAP, minus the evidence lower bound for SVI.
        converged: Whether the convergence test ended the fit.
        reason: Why it ended, in words.
        seconds: How long it took.
        num_observed: Number of observed steps it was fitted to.
        names: Names of the latent variables.
        params: The parameter store at the end of the fit. If the model or the guide is a function
            with ``pyro.param`` statements, call it inside
            ``pyro.get_param_store().scope(fit.params)``; modules carry their parameters.
    """

    model: Callable[..., Any]
    guide: Callable[..., Any]
    losses: Tensor
    converged: bool
    reason: str
    seconds: float
    num_observed: int
    names: list[str] = field(default_factory=list)
    params: dict[str, Any] = field(default_factory=dict, repr=False)

    def draw(self, data: Sequences) -> HMM:
        """An HMM for ``data``, from one draw of the guide (which for MAP is always the same).

        Raises:
            TypeError: If the model does not return an HMM.
        """
        with torch.no_grad(), pyro.get_param_store().scope(self.params), poutine.block():
            trace = poutine.trace(self.guide).get_trace(data)
            hmm = poutine.block(poutine.replay(self.model, trace=trace))(data)
        if not isinstance(hmm, HMM):
            raise TypeError(
                f"the model must return the HMM it built; it returned {type(hmm).__name__}. "
                "End your model with `return hmm`."
            )
        return hmm

    def summary(self) -> str:
        """What was fitted, how it went and why it ended, in a few lines."""
        first, last = self.losses[0].item(), self.losses[-WINDOW:].mean().item()
        tokens = self.num_observed
        lines = [
            f"{_name(self.guide)} on {_name(self.model)}: {', '.join(self.names) or 'parameters'}",
            f"loss      {first:.2f} -> {last:.2f} nats, mean of the last "
            f"{min(WINDOW, len(self.losses))} steps",
            f"per step  {last / max(tokens, 1):.4f} nats; {tokens:,} observed steps",
            f"ended     after {len(self.losses)} steps and {self.seconds:.1f} s: {self.reason}",
        ]
        return "\n".join(lines)


def fit_map(
    model: Callable[..., Any],
    data: Sequences,
    *,
    num_steps: int = 1000,
    learning_rate: float = 0.05,
    tolerance: float | None = 1e-5,
    init: Callable[..., Any] = init_to_sample,
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
        **options: Those of :func:`fit_svi`.

    Raises:
        FloatingPointError: If the loss becomes infinite or NaN.
        TypeError, ValueError: As :func:`fit_svi`.

    Example:
        >>> _ = pyro.set_rng_seed(0)
        >>> data = Sequences.from_list([[0, 1] * 10, [1, 0] * 10])
        >>> model = MarginalModel(TabularHMM(2, categorical(2)))
        >>> fit = fit_map(model, data, num_steps=200, learning_rate=0.2)
        >>> fit.draw(data).log_prob(data.values).sum().round(decimals=1)  # 2 log 1/2
        tensor(-1.4000)
    """
    guide = AutoDelta(poutine.block(model, hide_fn=_is_enumerated), init_loc_fn=init)
    return fit_svi(
        model,
        guide,
        data,
        num_steps=num_steps,
        learning_rate=learning_rate,
        tolerance=tolerance,
        **options,
    )


def fit_svi(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    data: Sequences,
    *,
    num_steps: int = 1000,
    learning_rate: float = 0.01,
    batch_size: int | None = None,
    elbo: ELBO | None = None,
    optimizer: OptimizerFactory | None = None,
    schedule: ScheduleFactory | None = None,
    clip_norm: float | None = None,
    tolerance: float | None = None,
    generator: torch.Generator | None = None,
    progress: bool | None = None,
) -> Fit:
    """Maximise the evidence lower bound by gradient steps.

    The fit runs where the parameters are. With ``batch_size`` the data may stay on the host: each
    minibatch is moved as it is used. Two runs after the same ``pyro.set_rng_seed`` are equal.

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
        elbo: The objective; ``TraceEnum_ELBO`` if the model enumerates sites, else ``Trace_ELBO``.
        optimizer: Called with the parameters, returns a torch optimizer.
        schedule: Called with the optimizer, returns a torch learning-rate scheduler, which is
            stepped once after every gradient step.
        clip_norm: Largest norm of the whole gradient, per observed step; no limit by default.
        tolerance: End when the mean loss of 25 steps is not below that of the 25 before by this
            share of itself. None runs all steps, which noisy losses may need.
        generator: Source of randomness for minibatches; torch's global one by default.
        progress: Whether to show a progress bar on stderr; by default if that is a terminal.

    Raises:
        FloatingPointError: If the loss becomes infinite or NaN.
        TypeError: If ``data`` are not :class:`Sequences`, ``model`` is a module that builds an
            HMM, or a number is of the wrong type.
        ValueError: If a number is out of range, or there is nothing to fit.
    """
    _check(model, data, num_steps, batch_size, clip_norm)
    if isinstance(guide, AutoGuide):
        _rename(guide)
    begun = time.perf_counter()
    with pyro.get_param_store().scope() as store:
        probe = _follow(model, guide, data[:1] if batch_size else data)
        with poutine.block(), torch.no_grad():
            names, enumerated = _sites(model, probe)
            guide(probe)  # an autoguide makes its parameters here
        elbo = elbo or (TraceEnum_ELBO() if enumerated else Trace_ELBO())
        objective = elbo(model, guide)
        parameters = _parameters(objective)
        stepper = (
            torch.optim.Adam(parameters, lr=learning_rate) if optimizer is None
            else optimizer(parameters)
        )  # fmt: skip
        scheduler = schedule(stepper) if schedule else None
        batches = _stream(data, batch_size, generator)
        losses: list[Tensor] = []
        converged, reason = False, f"it took all {num_steps} steps"
        with tqdm(total=num_steps, disable=None if progress is None else not progress) as bar:
            for step in range(num_steps):
                batch = _follow(model, guide, next(batches))
                stepper.zero_grad()
                try:
                    loss = objective(batch)
                except ValueError as error:
                    finite = all(bool(parameter.isfinite().all()) for parameter in parameters)
                    if step == 0 or (finite and "Expected parameter" not in str(error)):
                        raise
                    raise FloatingPointError(
                        f"a parameter has left its range at step {step}; lower learning_rate or "
                        "set clip_norm."
                    ) from error
                losses.append(loss.detach())
                if loss.device.type == "cpu" or step % WINDOW == 0:  # elsewhere it takes a wait
                    _check_finite(loss, step, elbo, model, guide, batch)
                loss.backward()
                if clip_norm is not None:
                    nn.utils.clip_grad_norm_(parameters, clip_norm * max(data.num_observed, 1))
                stepper.step()
                if scheduler is not None:
                    scheduler.step()
                bar.update()
                if (step + 1) % WINDOW == 0:
                    mean = torch.stack(losses[-WINDOW:]).mean().item()
                    bar.set_postfix(nats_per_step=f"{mean / max(data.num_observed, 1):.4f}")
                    if tolerance is not None and len(losses) >= 2 * WINDOW:
                        before = torch.stack(losses[-2 * WINDOW : -WINDOW]).mean().item()
                        if before - mean < tolerance * abs(mean):
                            converged = True
                            reason = (
                                f"over {WINDOW} steps the loss fell by less than {tolerance:g} "
                                "of itself"
                            )
                            break
        trail = torch.stack(losses).cpu()
        if not bool(trail.isfinite().all()):
            worst = int((~trail.isfinite()).byte().argmax())
            _check_finite(trail[worst], worst, elbo, model, guide, probe)
    return Fit(
        model,
        guide,
        trail,
        converged,
        reason,
        time.perf_counter() - begun,
        data.num_observed,
        names,
        dict(store),
    )


def _check(
    model: Any, data: Any, num_steps: int, batch_size: int | None, clip_norm: float | None
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
    if batch_size is not None:
        check_size("batch_size", batch_size)
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(f"clip_norm must be positive; got {clip_norm}.")


def _rename(guide: AutoGuide) -> None:
    """Give an autoguide a name of its own: Pyro keeps parameters by name, and would mix guides."""
    if "_of_fit_" not in guide._pyro_name:
        own = f"{guide._pyro_name}_of_fit_{next(_guides)}"
        for name, part in guide.named_modules():
            if isinstance(part, PyroModule):
                part._pyro_name = f"{own}.{name}" if name else own


def _parameters(objective: nn.Module) -> list[nn.Parameter]:
    """What is trained: parameters of modules, and those of ``pyro.param`` statements."""
    found = {id(parameter): parameter for parameter in objective.parameters()}
    for _, parameter in pyro.get_param_store().named_parameters():
        found.setdefault(id(parameter), parameter)
    wanted = [parameter for parameter in found.values() if parameter.requires_grad]
    if not wanted:
        raise ValueError(
            "model and guide have no parameters to fit. Give the module PyroParam or "
            "torch.nn.Parameter attributes, or priors to a guide that has parameters."
        )
    return wanted


def _stream(
    data: Sequences, batch_size: int | None, generator: torch.Generator | None
) -> Iterator[Sequences]:
    """Minibatches without end; the whole set if there is no batch size."""
    while True:
        if batch_size is None:
            yield data
        else:
            yield from data.batches(batch_size, generator)


def _follow(model: Any, guide: Any, data: Sequences) -> Sequences:
    """``data`` on the device of the parameters."""
    for part in (model, guide):
        if isinstance(part, nn.Module):
            for tensor in (*part.parameters(), *part.buffers()):
                return data if data.values.device == tensor.device else data.to(tensor.device)
    return data


def _is_enumerated(site: dict[str, Any]) -> bool:
    return site["type"] == "sample" and site["infer"].get("enumerate") == "parallel"


def _sites(model: Callable[..., Any], data: Sequences) -> tuple[list[str], bool]:
    """Names of the latent sites of ``model``, and whether some others are enumerated."""
    trace = poutine.trace(model).get_trace(data)
    hidden = [trace.nodes[name] for name in trace.stochastic_nodes]
    hidden = [site for site in hidden if not site_is_subsample(site)]
    names = [site["name"] for site in hidden if not _is_enumerated(site)]
    return names, any(_is_enumerated(site) for site in hidden)


def _check_finite(
    loss: Tensor, step: int, elbo: ELBO, model: Any, guide: Any, batch: Sequences
) -> None:
    """Raise if the loss at ``step``, on ``batch``, is not finite."""
    value = loss.item()
    if math.isfinite(value):
        return
    if math.isnan(value):  # the losses that Pyro differentiates turn infinity into NaN
        with torch.no_grad(), poutine.block():
            value = elbo.loss(model, guide, batch)
    cause = "lower learning_rate, set clip_norm, or keep scales and probabilities away from zero"
    if value == math.inf:
        cause = (
            "a sequence has probability zero: check for symbols or moves that no path allows"
            + (f"; or {cause}" if step else "")
        )  # fmt: skip
    raise FloatingPointError(f"the loss is {value} at step {step}; {cause}.")


def _name(part: Any) -> str:
    return getattr(part, "__name__", type(part).__name__)
