"""Loss of a model and a guide, which a gradient fit minimises over their parameters."""

from __future__ import annotations

import copy
import inspect
import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.distributions.util import is_identically_zero
from pyro.infer import ELBO, Trace_ELBO, TraceEnum_ELBO
from pyro.infer.autoguide import AutoDelta, AutoGuide, AutoGuideList, AutoNormal
from pyro.poutine.util import site_is_subsample
from torch import Tensor, nn
from torch.distributions import constraints

from .._choices import SHARED
from ..data.sequences import Sequences
from ..distributions.hmm import HMM
from ..distributions.structured_hmm import HSMM
from .guides import RotationGuide
from .models import to_model_device
from .plates import PlatesOfBatch, sequence_plates

WHEN_IMPOSSIBLE = (
    "a sequence has probability zero: check for symbols or transitions that no path allows"
)
LEFT = "a parameter has left its range at step {}; lower learning_rate or set clip_norm."


class Objective:
    """Minus the evidence lower bound, or with ``batched`` minus each restart's log joint density.

    Model and guide are run once on ``probe``; an autoguide makes its parameters there.

    Attributes:
        supports: Spaces of the latent variables, by name.
        plates: Of the latent variables of which each sequence has one, by name.
        cost: Multiplications for one step of a sequence, about; infinite if it is not known.
        module: Called with data, returns the loss.
        parameters: All that are trained: those of modules, and those that model and guide read.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        guide: Callable[..., Any],
        probe: Sequences,
        elbo: ELBO | None = None,
        batched: bool = False,
    ) -> None:
        with poutine.block(), torch.no_grad():
            with poutine.trace(param_only=True) as of_model:
                trace = poutine.trace(model).get_trace(probe)
            self.supports, enumerated = latent_sites(trace)
            asked = inspect.unwrap(model) if batched else model
            self.plates = sequence_plates(asked, probe, None if batched else trace)
            self.cost = _cost(trace)
            with poutine.trace(param_only=True) as of_guide:
                guide(probe)
        self.model, self.guide = model, guide
        self.elbo = copy.copy(elbo) or (TraceEnum_ELBO() if enumerated else _UnreadELBO())
        self.module = RestartLosses(model, guide) if batched else self.elbo(model, guide)
        read = parameters_read(model, of_model) + parameters_read(guide, of_guide)
        distinct = {id(each): each for each in [*self.module.parameters(), *read]}.values()
        self.parameters = [parameter for parameter in distinct if parameter.requires_grad]
        if has_networks(self.parameters, model, guide):
            self.cost = math.inf
        if not self.parameters:
            raise ValueError(
                "model and guide have no parameters to fit. Give the module PyroParam or "
                "torch.nn.Parameter attributes, or priors to a guide that has parameters."
            )

    @property
    def parts(self) -> Tensor | None:
        """Log-likelihood and log-prior of the last loss, ``(2,)`` or ``(2, R)``, if it is known."""
        holder = self.module if isinstance(self.module, RestartLosses) else self.elbo
        return getattr(holder, "parts", None)

    def explain(self, error: ValueError, step: int) -> None:
        """Raise FloatingPointError if an ``error`` is due to parameters that became invalid."""
        finite = all(bool(parameter.isfinite().all()) for parameter in self.parameters)
        if step > 0 and (not finite or re.search(r"Expected parameter|\bnan\b", str(error))):
            raise FloatingPointError(LEFT.format(step)) from error

    def check_finite(self, loss: Tensor, step: int, batch: Sequences) -> None:
        """Raise FloatingPointError, with the likely cause, if the ``loss`` is not finite."""
        value = loss.min().item() if loss.isfinite().any() else loss.flatten()[0].item()
        if math.isfinite(value):
            return
        if math.isnan(value):  # the losses that Pyro differentiates turn infinity into NaN
            with torch.no_grad(), poutine.block():
                value = (self.module(batch).min().item() if loss.dim()
                         else self.elbo.loss(self.model, self.guide, batch))  # fmt: skip
        cause = (
            "lower learning_rate, set clip_norm, or keep scales and probabilities away from zero"
        )
        if value == math.inf:
            model = inspect.unwrap(self.model)
            impossible = getattr(model, "when_impossible", None) or WHEN_IMPOSSIBLE
            if getattr(model, "log_prior", None) is not None and impossible == WHEN_IMPOSSIBLE:
                impossible += (
                    ", or the log_prior is -inf, as that of diversity is where two rows are "
                    "equal: start elsewhere, such as with init_to_sample"
                )
            cause = impossible + (f"; or {cause}" if step else "")
        raise FloatingPointError(f"the loss is {value} at step {step}; {cause}.")


class _UnreadELBO(Trace_ELBO):
    """``Trace_ELBO`` whose values stay on the device; Pyro's reads that of every site."""

    parts: Tensor | None = None

    def differentiable_loss(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> Tensor:
        """The loss, with the gradient of its surrogate."""
        ((of_model, of_guide),) = self._get_traces(model, guide, args, kwargs)
        loss, surrogate = self._differentiable_loss_particle(of_model, of_guide)
        self.parts = torch.stack(_by_part(of_model, "log_prob_sum")).detach()
        return loss + (surrogate - surrogate.detach())

    def _differentiable_loss_particle(self, model_trace: Any, guide_trace: Any) -> Any:
        of_guide = [site for site in guide_trace.nodes.values() if site["type"] == "sample"]
        if any(not is_identically_zero(site["score_parts"].score_function) for site in of_guide):
            return super()._differentiable_loss_particle(model_trace, guide_trace)
        evidence = sum(_by_part(model_trace, "log_prob_sum"))
        entropies = [site["score_parts"].entropy_term for site in of_guide]
        entropy = sum(term.sum() for term in entropies if not is_identically_zero(term))
        bound = evidence - sum(site["log_prob_sum"] for site in of_guide)
        return -bound.detach(), entropy - evidence


def _by_part(trace: Any, name: str) -> tuple[Tensor, Tensor]:
    """Log-likelihood and log-prior: sums of the numbers ``name`` of the sites of a model."""
    likelihood, prior = torch.zeros(()), torch.zeros(())
    for site in trace.nodes.values():
        if site["type"] != "sample" or site_is_subsample(site):
            continue
        if site["is_observed"] and site["name"] != "log_prior":
            likelihood = likelihood + site[name]
        else:
            prior = prior + site[name]
    return likelihood, prior


def parameters_read(function: Any, read: Any) -> list[nn.Parameter]:
    """The parameters that a function has read, also those of modules that it calls.

    Of a module ``parameters()`` are known, and some that it read may have been replaced since.

    Args:
        function: The model or the guide.
        read: A trace of the parameters, around its call.
    """
    if isinstance(function, nn.Module):
        return []
    values = [site["value"] for site in read.trace.nodes.values()]
    return [value.unconstrained() if hasattr(value, "unconstrained") else value for value in values
            if hasattr(value, "unconstrained") or isinstance(value, nn.Parameter)]  # fmt: skip


class RestartLosses(nn.Module):
    """Minus the log joint density of each of R batched restarts, ``(R,)``."""

    def __init__(self, model: Any, guide: Any) -> None:
        super().__init__()
        self.model, self.guide = model, guide
        self.parts: Tensor | None = None

    def forward(self, batch: Sequences) -> Tensor:
        """Run the guide, and the model against it."""
        point = poutine.trace(self.guide).get_trace(batch)
        trace = poutine.trace(poutine.replay(self.model, trace=point)).get_trace(batch)
        trace.compute_log_prob()
        for site in trace.nodes.values():
            if site["type"] == "sample" and not site_is_subsample(site):
                scores = site["log_prob"]
                if scores.dim() < 2:
                    raise ValueError(
                        f"site {site['name']!r} is the same in all restarts; its parameters must "
                        "keep the dimensions to the left of their own."
                    )
                site["of_restarts"] = scores.sum(-1).reshape(-1, scores.size(-2)).sum(0)
        likelihood, prior = _by_part(trace, "of_restarts")
        self.parts = torch.stack(torch.broadcast_tensors(likelihood, prior)).detach()
        return -(likelihood + prior)


def is_enumerated(site: dict[str, Any]) -> bool:
    """Whether a site is summed out in parallel."""
    return site["type"] == "sample" and site["infer"].get("enumerate") == "parallel"


def has_networks(parameters: Iterable[Tensor], *functions: Any) -> bool:
    """Whether there is more to compute than an HMM: many parameters, or layers of a network."""
    parts = [part for each in functions if isinstance(each, nn.Module) for part in each.modules()]
    layers = any(
        kind.__module__.startswith("torch.nn.modules.") and kind not in (nn.Module, *_CONTAINERS)
        for part in parts
        for kind in type(part).__mro__
    )
    registered = any("$$$" in name for name in pyro.get_param_store())  # by pyro.module
    return layers or registered or sum(each.numel() for each in parameters) > SHARED


_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.ParameterList, nn.ParameterDict)


def step_cost(hmm: HMM) -> float:
    """Multiplications for one step of a sequence of ``hmm``, about."""
    width, further = math.prod(hmm.event_shape[1:]), 16
    if isinstance(hmm, HSMM):
        further += hmm.log_duration.size(-1)
    return hmm.num_states * (hmm.num_states**hmm.order + further + width**2)


def _cost(trace: poutine.Trace) -> float:
    """Cost of all HMMs of a model; infinite if it has none."""
    hmms = [inner for site in trace.nodes.values() for inner in _hmms_in(site.get("fn"))]
    batch = max((math.prod(hmm.batch_shape) for hmm in hmms), default=0)
    return batch * sum(map(step_cost, hmms)) if hmms else math.inf


def _hmms_in(fn: Any) -> list[HMM]:
    """The HMM that a site's distribution is, or is made of."""
    while fn is not None and not isinstance(fn, HMM):
        fn = getattr(fn, "base_dist", None)
    return [] if fn is None else [fn]


def latent_sites(trace: poutine.Trace) -> tuple[dict[str, constraints.Constraint], bool]:
    """Spaces of the latent sites of a model, and whether some others are enumerated."""
    hidden = [trace.nodes[name] for name in trace.stochastic_nodes]
    hidden = [site for site in hidden if not site_is_subsample(site)]
    supports = {site["name"]: site["fn"].support for site in hidden if not is_enumerated(site)}
    return supports, any(is_enumerated(site) for site in hidden)


def check_events(sites: dict[str, Any]) -> None:
    """Raise unless all ``sites`` (distributions by name) are events: restarts are the batch."""
    for name, distribution in sites.items():
        if distribution.batch_shape:
            raise ValueError(
                f"site {name!r} must be one event, without batch dimensions; it has batch shape "
                f"{tuple(distribution.batch_shape)}. Call "
                f".to_event({len(distribution.batch_shape)}) on its distribution."
            )


def follow_batches(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    probe: Sequences,
) -> None:
    """Let ``guide`` take, of variables of which each sequence has one, those of a minibatch.

    Raises:
        ValueError: If the model's plate of sequences, or the guide, cannot follow minibatches.
    """
    with poutine.block(), torch.no_grad():
        plates = sequence_plates(model, probe)
    for name, plate in plates.items():
        if plate.full_size != probe.total:
            raise ValueError(
                f"site {name!r} has one value for each sequence, and minibatches need a plate that "
                f"takes some of them: pyro.plate({plate.name!r}, data.total, "
                f"subsample=data.indices); got one of size {plate.full_size} for a minibatch of "
                f"{len(probe)} of {probe.total} sequences."
            )
    guide = guide.inner if isinstance(guide, RotationGuide) else guide
    if not plates or not isinstance(guide, AutoGuide):
        return
    if guide.create_plates is None:
        guide.create_plates = PlatesOfBatch(plates, int(probe.total))
    with poutine.block(), torch.no_grad():
        guide(probe)
    for part in guide if isinstance(guide, AutoGuideList) else [guide]:
        names = getattr(part.prototype_trace, "nodes", {})
        for name in plates:
            if name in names and not isinstance(part, AutoNormal | AutoDelta):
                raise ValueError(
                    f"guide must take values of site {name!r} for the sequences of a minibatch, "
                    f"which {type(part).__name__} cannot. Use AutoNormal or AutoDelta for it, or "
                    "fit all sequences at once, without batch_size."
                )


def check_shared(model: Callable[..., Any], data: Sequences) -> None:
    """Raise if a latent variable belongs to single sequences, which data-parallel ranks divide."""
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
