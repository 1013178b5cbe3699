"""Loss of a model and a guide, which a gradient fit minimises over their parameters."""

from __future__ import annotations

import copy
import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from itertools import count
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.distributions.util import is_identically_zero
from pyro.infer import ELBO, Trace_ELBO, TraceEnum_ELBO
from pyro.infer.autoguide import AutoDelta, AutoGuide, AutoGuideList, AutoNormal
from pyro.infer.elbo import ELBOModule
from pyro.poutine.util import site_is_subsample
from torch import Tensor, nn
from torch.distributions import constraints

from .._checks import warn_caller
from .._choices import SHARED, first_values
from ..data.sequences import Sequences
from ..nn.base import PYRO
from .plates import (
    LogJoint,
    is_likelihood,
    pieces_of,
    plates_of_batch,
    repeatable,
    sequence_plates,
    wide,
)

APART = 0.01  # of coordinates of copies
WHEN_IMPOSSIBLE = (
    "a sequence has probability zero: check for symbols or transitions that no path allows"
)
LEFT = "a parameter has left its range at step {}; lower learning_rate or set clip_norm."


class Objective:
    """Minus the evidence lower bound, or minus the log joint density of each of R restarts.

    Model and guide are run once on ``probe``; an autoguide makes its parameters there.

    Attributes:
        supports: Spaces of the latent variables, by name.
        plates: Of the latent variables of which each sequence has one, by name.
        cost: Multiplications for one step of a sequence, about; infinite without an HMM, and for
            networks.
        module: Called with data, returns the loss.
        parameters: All that are trained: those of modules, and those that model and guide read.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        guide: Callable[..., Any],
        probe: Sequences,
        elbo: ELBO | None = None,
        restarts: int = 1,
    ) -> None:
        batched = restarts > 1
        with poutine.block(), torch.no_grad():
            with poutine.trace(param_only=True) as of_model:
                trace = poutine.trace(model).get_trace(probe)
            self.supports, enumerated = latent_sites(trace)
            asked = inspect.unwrap(model)
            self.plates = sequence_plates(asked, probe, None if batched else trace)
            with poutine.trace(param_only=True) as of_guide:
                guide(probe)
        beside = elbo is not None and elbo.vectorize_particles and elbo.num_particles > 1
        frames = [f for s in trace.nodes.values() for f in s.get("cond_indep_stack", ()) if f.dim]
        if beside and self.supports and not enumerated and {f.dim for f in frames} == {-1}:
            check_batchable(asked, probe, trace)
        self.model, self.guide = model, guide
        self.elbo = copy.copy(elbo) or (TraceEnum_ELBO() if enumerated else _UnreadELBO())
        if batched:
            self.module: Any = RestartLosses(model, guide, restarts)
        elif hasattr(self.elbo, "differentiable_loss"):
            self.module = self.elbo(model, guide)
        else:
            self.module = _LossOfGradients(model, guide, self.elbo)
        read = parameters_read(model, of_model) + parameters_read(guide, of_guide)
        distinct = {id(each): each for each in [*self.module.parameters(), *read]}.values()
        self.parameters = [parameter for parameter in distinct if parameter.requires_grad]
        self.module.trained = self.parameters
        self.read = [] if isinstance(asked, nn.Module) else list(of_model.trace.nodes)
        states = getattr(trace.nodes["_RETURN"]["value"], "num_states", 0)
        count = sum(each.numel() for each in self.parameters)
        small = states and count <= SHARED
        self.cost = max(count, restarts * states**2) if small else math.inf
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

    def points(self) -> dict[str, Tensor]:
        """Values of ``pyro.param`` statements of a function model, by name."""
        store = pyro.get_param_store()
        names = [name for name in self.read if name in store and "$$$" not in name]
        return {name: store[name].detach().clone() for name in names}

    def check_finite(self, loss: Tensor, step: int, batch: Sequences) -> None:
        """Raise FloatingPointError, with the likely cause, if the ``loss`` is not finite."""
        value = loss.min().item() if loss.isfinite().any() else loss.flatten()[0].item()
        if math.isfinite(value):
            return
        if math.isnan(value) and not loss.dim():  # Pyro's differentiable losses make NaN of inf
            with torch.no_grad(), poutine.block():
                value = self.elbo.loss(self.model, self.guide, batch)
        cause = (
            "lower learning_rate, set clip_norm, or keep scales and probabilities away from zero"
        )
        if value == math.inf:
            model = inspect.unwrap(self.model)
            impossible = getattr(model, "when_impossible", WHEN_IMPOSSIBLE)
            if getattr(model, "log_prior", None) is not None and impossible == WHEN_IMPOSSIBLE:
                impossible += (
                    ", or the log_prior is -inf, as that of diversity is where two rows are "
                    "equal: start elsewhere, such as with init_to_sample"
                )
            cause = impossible + (f"; or {cause}" if step else "")
        raise FloatingPointError(f"the loss is {value} at step {step}; {cause}.")


class _UnreadELBO(Trace_ELBO):
    """``Trace_ELBO`` without device synchronisation: its values stay on the device."""

    parts: Tensor | None = None

    def differentiable_loss(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> Tensor:
        """The loss, with the gradient of its surrogate where the guide needs one."""
        ((of_model, of_guide),) = self._get_traces(model, guide, args, kwargs)
        likelihood: Any = 0.0
        prior: Any = 0.0
        guided: Any = 0.0
        surrogates = False
        for site in of_model.nodes.values():
            if site["type"] == "sample" and is_likelihood(site):
                likelihood = likelihood + site["log_prob_sum"]
            elif site["type"] == "sample":
                prior = prior + site["log_prob_sum"]
        for site in of_guide.nodes.values():
            if site["type"] == "sample":
                guided = guided + site["log_prob_sum"]
                surrogates |= not is_identically_zero(site["score_parts"].score_function)
        loss: Any = guided - likelihood - prior
        parts = [(torch.zeros_like(loss) + each).detach() for each in (likelihood, prior)]
        self.parts = torch.stack(parts)
        if surrogates:
            loss, surrogate = self._differentiable_loss_particle(of_model, of_guide)
            return loss + (surrogate - surrogate.detach())
        return loss


class _LossOfGradients(ELBOModule):
    """Loss of an objective that gives gradients only, such as ``TraceGraph_ELBO``."""

    trained: list[nn.Parameter]

    def forward(self, data: Sequences) -> Tensor:
        """Loss with the objective's gradients; the first of several losses, as of wake-sleep."""
        kept = [parameter.grad for parameter in self.trained]
        for parameter in self.trained:
            parameter.grad = None
        loss = self.elbo.loss_and_grads(self.model, self.guide, data)
        surrogate: Any = self.trained[0].new_zeros(())
        for parameter, before in zip(self.trained, kept):
            if parameter.grad is not None:
                surrogate = surrogate + (parameter * parameter.grad).sum()
            parameter.grad = before
        return (loss[0] if isinstance(loss, tuple) else loss) + surrogate - surrogate.detach()


def site_losses(
    model: Callable[..., Any], guide: Callable[..., Any], data: Sequences, with_guide: bool
) -> dict[str, Tensor]:
    """Minus the log-densities of the model's sites by name, and log-densities of the guide's.

    Args:
        model: The Pyro model.
        guide: Gives the values of the latent variables.
        data: The sequences.
        with_guide: Whether the densities of the guide are parts of the loss.
    """
    pieces, losses = pieces_of(model, data), dict[str, Tensor]()
    guide_trace = poutine.trace(guide).get_trace(pieces[0][0])
    replayed = poutine.trace(poutine.replay(model, trace=guide_trace))
    traces = [(replayed.get_trace(part), -weight, "") for part, weight in pieces]
    for trace, sign, prefix in traces + [(guide_trace, 1.0, "guide: ")] * with_guide:
        trace.compute_log_prob(site_filter=lambda _, site: not site_is_subsample(site))
        for name, site in trace.nodes.items():
            if site["type"] != "sample" or site_is_subsample(site):
                continue
            if is_enumerated(site):
                raise ValueError(
                    f"the model enumerates {name!r}, so the likelihood is not one site. Fit "
                    "a MarginalModel, which has the same density."
                )
            loss, name = sign * site["log_prob"].sum(), prefix + re.sub(r"_of_fit_\d+", "", name)
            losses[name] = losses.get(name, 0.0) + loss
    return losses


def log_joint(
    model: Any,
    data: Sequences,
    values: Mapping[str, Tensor],
    copies: int | None = None,
    weights: Tensor | None = None,
) -> tuple[LogJoint, Any]:
    """Log joint density of ``model`` at values of its variables, and the HMM it returns there."""
    with PYRO, poutine.block(), pyro.get_param_store().scope(), pyro.validation_enabled(False):
        with LogJoint(values, copies, weights, inside=True) as joint:
            return joint, model(data)


def num_copies(data: Sequences, num_states: int, values: Iterable[Tensor]) -> int:
    """Number of copies that is no size of data, states or values ``(...)``, nor next to one.

    A dimension of copies then broadcasts against no other, as it might in a check of other numbers.
    """
    sizes = {num_states, *data.values.shape}.union(*(value.shape for value in values))
    return next(n for n in count(3, 2) if not sizes & {n - 1, n, n + 1})


def is_close(one: Tensor, other: Tensor, values: Mapping[str, Tensor], num_steps: int) -> bool:
    """Whether log densities of so many steps, at ``values`` of parameters, differ by rounding."""
    dtypes = {x.dtype for x in (one, *values.values()) if x.is_floating_point()}
    near = max(torch.finfo(dtype).eps for dtype in dtypes) ** 0.75
    return torch.allclose(other, one, near, near * num_steps, equal_nan=True)


def check_copies(
    pair: Callable[[], tuple[Tensor, Tensor]], values: Mapping[str, Tensor], num_steps: int
) -> None:
    """Raise if a batch of model copies gives another log joint density than the model alone.

    Args:
        pair: Returns them, as computed in two ways.
        values: The parameters there, as copies of the model read them.
        num_steps: Number of observations.
    """
    cause, close = None, False
    try:
        with torch.no_grad(), poutine.block():
            one, other = pair()
        close = is_close(one, other, values, num_steps)
    except (RuntimeError, ValueError, IndexError) as error:
        cause = error
    if not close:
        shapes = ", ".join(
            f"{name} {tuple(value.shape[1 + (value.size(1) == 1):])} and {tuple(value.shape)}"
            for name, value in values.items()
        )  # fmt: skip
        raise ValueError(
            "copies of the model, run as one batch with a dimension of copies first, have another "
            f"density than one alone. Shapes alone and of copies: {shapes}. Those that meet a "
            "plate must be scalars or lie in it; write matrix[..., 0, :], not matrix[0]."
        ) from cause


class RestartLosses(nn.Module):
    """Minus the log joint density of each of R batched restarts, ``(R,)``."""

    def __init__(self, model: Any, guide: Any, restarts: int) -> None:
        super().__init__()
        self.model, self.guide, self.restarts = model, guide, restarts
        self.parts: Tensor | None = None

    def forward(self, batch: Sequences) -> Tensor:
        """Run the guide, and the model at its values."""
        with LogJoint(self.guide(batch), self.restarts) as joint:
            self.model(batch)
        parts = torch.broadcast_tensors(joint.likelihood, joint.prior)
        self.parts = torch.stack(parts).detach()
        return -(parts[0] + parts[1])


def parameters_read(function: Any, read: Any) -> list[nn.Parameter]:
    """Parameters read by a function, those of modules that it calls included.

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


def is_enumerated(site: dict[str, Any]) -> bool:
    """Whether a site is enumerated in parallel."""
    return site["type"] == "sample" and site["infer"].get("enumerate") == "parallel"


def latent_sites(trace: poutine.Trace) -> tuple[dict[str, constraints.Constraint], bool]:
    """Supports of the latent sites of a model, and whether some others are enumerated."""
    supports, enumerated = {}, False
    for name in trace.stochastic_nodes:
        site = trace.nodes[name]
        if is_enumerated(site):
            enumerated = True
        elif not site_is_subsample(site):
            supports[name] = site["fn"].support
    return supports, enumerated


def trace_of_batchable(model: Callable[..., Any], data: Sequences, copies: int) -> poutine.Trace:
    """Trace of a model, checked to be runnable as a batch of restarts or chains.

    Raises:
        ValueError: If it enumerates states, has parameters without a prior, or mixes copies.
    """
    with poutine.block(), torch.no_grad(), first_values(data.device):
        with poutine.trace(param_only=True) as read:
            trace = poutine.trace(model).get_trace(data)
    known = model.parameters() if isinstance(model, nn.Module) else parameters_read(model, read)
    if any(parameter.requires_grad for parameter in known):
        raise ValueError(
            "every parameter must have a prior, so that restarts and chains differ: give it one by "
            "PyroSample, freeze it, or fit once for each start."
        )
    if latent_sites(trace)[1]:
        raise ValueError(
            "restarts and chains need a model whose states are summed out, such as MarginalModel."
        )
    if copies > 1:
        check_batchable(model, data, trace)
    return trace


def check_batchable(model: Any, data: Sequences, trace: poutine.Trace) -> None:
    """Raise if copies of a model in a plate have other densities than each of them alone.

    Where they have data of their own, or random numbers, each is run among others of its values.
    """
    if getattr(model, "generator", None) is not None:  # whose calls all differ
        return
    sites = {name: trace.nodes[name] for name in latent_sites(trace)[0]}
    num_states = getattr(trace.nodes["_RETURN"]["value"], "num_states", 1)
    own = getattr(model, "copies", None)
    copies = own or num_copies(data, num_states, (site["value"] for site in sites.values()))

    with repeatable():
        first = torch.rand((), device=data.device)  # what is drawn next unless the model draws

    def plated() -> Any:
        return pyro.plate("copies", copies, dim=-2)

    def parts(values: dict[str, Tensor], batched: bool) -> tuple[Tensor, bool]:
        with repeatable(), LogJoint(values, copies if batched else None) as joint:
            with plated() if batched else nullcontext():
                model(data)
            drawn = torch.rand((), device=data.device)
        found = torch.broadcast_tensors(joint.likelihood, joint.prior)
        return torch.stack(found).reshape(2, -1), bool(drawn != first)

    def pair() -> tuple[Tensor, Tensor]:
        with repeatable(), plated():
            nodes = poutine.trace(model).get_trace(data).nodes
        values = {name: nodes[name]["value"] for name in sites}
        together, draws = parts(values, True)
        batched, rows = draws or own is not None, [0, 1, copies - 1]
        alone = []  # any of them changes with what it is mixed with
        for row in rows:
            some = {n: x[row].expand_as(x) if batched else x[row].reshape(sites[n]["value"].shape)
                    for n, x in values.items()}  # fmt: skip
            alone.append(parts(some, batched)[0][:, row if batched else 0])
        return torch.stack(alone), torch.stack([together[:, row] for row in rows])

    inside = {name for name, site in sites.items() if site["cond_indep_stack"]}
    one = wide({name: site["value"] for name, site in sites.items()}, inside, 0)
    values = {name: value.expand(copies, *value.shape) for name, value in one.items()}
    check_copies(pair, values, data.num_observed)


def follow_batches(model: Callable[..., Any], guide: Callable[..., Any], probe: Sequences) -> None:
    """Subsample the per-sequence variables of ``guide`` with each minibatch.

    Raises:
        ValueError: If the model's plate of sequences, or the guide, cannot follow minibatches.
    """
    half = probe.with_total(2 * probe.total)
    nats = []
    for data in (probe, half):  # at the same values
        with PYRO, torch.no_grad(), poutine.block(), torch.random.fork_rng(devices=[]):
            trace = poutine.trace(model).get_trace(data)
            trace.compute_log_prob(lambda _, site: site["is_observed"])
        nats.append(sum(trace.nodes[x]["log_prob_sum"].item() for x in trace.observation_nodes))
    plates = sequence_plates(model, half, trace)
    latent = any(not site_is_subsample(trace.nodes[name]) for name in trace.stochastic_nodes)
    if nats[0] == nats[1] and latent:  # which weighs as much as with all data
        cure = 'observe them in pyro.plate("sequences", data.total, subsample=data.indices)'
        text = f"a minibatch counts as no more than its own sequences, of {probe.total:g}"
        warn_caller(f"{text}: {cure}.")
    for name, plate in plates.items():
        if plate.full_size != half.total:
            raise ValueError(
                f"site {name!r} has one value for each sequence, and minibatches need a plate that "
                f"takes some of {probe.total}, not {plate.full_size} at any time: "
                f"pyro.plate({plate.name!r}, data.total, subsample=data.indices)."
            )
    if not plates or not isinstance(guide, AutoGuide):
        return
    if guide.create_plates is None:
        dims = {plate.name: plate.dim for plate in plates.values()}
        guide.create_plates = partial(plates_of_batch, dims, int(probe.total))
    with poutine.block(), torch.no_grad():
        guide(probe)
    for part in guide if isinstance(guide, AutoGuideList) else [guide]:
        names = plates.keys() & getattr(part.prototype_trace, "nodes", {}).keys()
        if names and not isinstance(part, AutoNormal | AutoDelta):
            raise ValueError(
                f"{type(part).__name__} cannot take values of site {min(names)!r} for a minibatch: "
                "guide it by AutoNormal or AutoDelta, or fit without batch_size."
            )
