"""The parameters of an EM fit, values of latent variables and points; extrapolation of them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property, partial
from operator import attrgetter
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.nn.module import PyroModule, _Context
from torch import Tensor, nn
from torch.distributions import Dirichlet, Distribution, Independent, transform_to

from .._choices import first_values
from .._transforms import NOTHING, tensors_of
from ..data.parts import Parts
from ..data.sequences import Sequences
from ..distributions.hmm import HMM
from ..nn.base import HMMModule
from .coordinates import IDENTITY, Packing
from .models import LogPrior, build, in_units, scale_priors, to_model_device
from .plates import AtValues, LogJoint, check_events
from .process_group import ProcessGroup

GROWTH = 4.0  # of the longest extrapolation when one of that length has succeeded
Values = dict[str, Tensor]


class Parameters:
    """The parameters of a module, for R batched restarts.

    Attributes:
        module: Builds the HMM; it holds the parameters without priors.
        data: The sequences, on the device of the module.
        probe: The first sequence.
        sites: Priors of the latent variables, by name.
        supports: Of the latent variables.
        priors: Those of them that depend on nothing that the fit changes.
        uniform: Log-densities of those that are the same everywhere, as of Dirichlet(1, ..., 1).
        values: The latent variables by name, ``(R, ...)``.
        sample: The same of one sample from the prior, ``(1, ...)``.
        points: The parameters without priors.
        fitted: The points by name, and None for latent variables; all else is frozen.
        example: An HMM that the module has built.
        units: What the unit of the data adds to the loss: see :func:`scale_priors`.

    Raises:
        ValueError: If there is nothing to fit, or there are restarts and points.
    """

    def __init__(
        self, module: HMMModule, data: Sequences | Parts, restarts: int,
        log_prior: LogPrior | None, group: ProcessGroup | None = None,
    ) -> None:  # fmt: skip
        for part in module.modules():  # which may have run by itself
            if isinstance(part, PyroModule):
                part._pyro_context.used = False
        module._pyro_set_supermodule("", _Context())  # names without those of what holds it
        self.module: Any = module
        self.restarts, self.log_prior = restarts, log_prior
        self.data = to_model_device(module, None, data)
        self.probe = self.data[:1]
        self.units = scale_priors(module, self.data, group)
        in_units(module, self.data, group)  # a start in units of the data
        in_units(module, None, group)
        with torch.no_grad(), poutine.block(), first_values(self.data.device):
            trace = poutine.trace(lambda: build(module, self.probe)).get_trace()
        self.sites = {name: trace.nodes[name]["fn"] for name in trace.stochastic_nodes}
        check_events(self.sites)
        self.supports = {name: site.support for name, site in self.sites.items()}
        self.sample: Values = {name: trace.nodes[name]["value"][None] for name in self.sites}
        self.values = dict(self.sample) if restarts == 1 else {}
        self.priors = self._constant_priors()
        self.uniform = {name: prior.log_prob(self.sample[name]).squeeze(0)
                        for name, prior in self.priors.items() if is_uniform(prior)}  # fmt: skip
        points = dict(fitted_in(module))
        self.points = list(points.values())
        self.fitted: dict[str, Tensor | None] = dict.fromkeys(self.sites)
        self.fitted |= {name.removesuffix("_unconstrained"): x for name, x in points.items()}
        self.example: HMM = trace.nodes["_RETURN"]["value"]
        if restarts > 1 and self.points:
            raise ValueError(
                "restarts need every parameter to have a prior, so that each has its own; "
                f"{type(module).__name__} has parameters without one: {', '.join(points)}. Give "
                "them one, as parametric(distribution, loc=Normal(0.0, 10.0)) and prior_scale= of "
                "RegressionHMM do, freeze them, or fit once for each start."
            )
        if not self.sites and not self.points:
            raise ValueError("module has no parameters to fit: all of them are frozen.")

    def _constant_priors(self) -> dict[str, Any]:
        """Priors of attributes of the module that depend on no other parameter, by name."""
        found, context = {}, self.module._pyro_context
        unchecked, store = pyro.validation_enabled(False), pyro.get_param_store().scope()
        sample = AtValues({name: value[0] for name, value in self.sample.items()})
        with sample, torch.enable_grad(), unchecked, store:
            for part in self.module.modules():
                for last, prior in getattr(part, "_pyro_samples", {}).items():
                    with context:
                        made = prior if hasattr(prior, "sample") else prior(part)
                        alone = not context.cache and isinstance(made, Distribution)
                    name = part._pyro_get_fullname(last)
                    learnt = any(map(attrgetter("requires_grad"), tensors_of(made)))
                    if alone and name in self.sites and not learnt:
                        found[name] = made
        context.used = False  # or no other module could hold this one
        return found

    @property
    def cost(self) -> float:
        """Approximate multiplications per time step: R times the parameters or K^2, if more."""
        size = sum(map(torch.Tensor.numel, (*self.sample.values(), *self.points)))
        return self.restarts * max(size, self.example.num_states**2)

    def set_values(self, values: Values) -> None:
        """Set latent variables, shared or one per restart, and parameters without a prior."""
        # those of a fit have the name of the module before their own
        values = {name.removeprefix("module."): value for name, value in values.items()}
        check_start(values, self.sites)
        for name in (self.fitted.keys() - self.sites.keys()) & values.keys():
            self.update({name: values[name].unsqueeze(0)})
        for name, site in self.sites.items():
            value, shape = values[name].detach(), (self.restarts, *site.event_shape)
            if value.dim() > len(shape) and value.size(1) == 1:  # as in a plate of restarts
                value = value.squeeze(1)
            try:
                self.values[name] = value.expand(shape)
            except RuntimeError:
                raise ValueError(
                    f"start must hold {name!r} of shape {shape[1:]}, or one value for each "
                    f"restart, {shape}; got {tuple(value.shape)}."
                ) from None

    def keep(self, chosen: Tensor) -> None:
        """Keep only the restarts of indices ``(R',)``."""
        self.restarts = len(chosen)
        self.values = {name: value[chosen] for name, value in self.values.items()}

    def in_plate(self, values: Values) -> Values:
        """Values as the module reads them: ``(R, 1, ...)``, or ``(...)`` if R = 1."""
        if self.restarts == 1:
            return {name: value[0] for name, value in values.items()}
        return {name: value.unsqueeze(1) for name, value in values.items()}

    def build(self, batch: Sequences) -> tuple[HMM, Tensor]:
        """HMM at the current parameters, and their log-prior, ``(R,)`` or a scalar."""
        cache, values = self.module._pyro_context.cache, self.in_plate(self.values)
        for name in self.priors:
            cache[name] = values[name]
        try:
            with LogJoint(values) as joint:
                hmm = build(self.module, batch)
        finally:
            cache.clear()
        hmm.provenance = NOTHING  # which nobody follows inside of a fit
        prior = self._log_prior(joint, values)
        if self.restarts > 1 and prior.dim():  # (R, 1)
            prior = prior.sum(-1)
        if self.log_prior is not None:
            further = self.log_prior(hmm)
            prior = prior + (further.squeeze(-1) if further.dim() > 1 else further)
        if self.restarts > 1 and min(map(len, hmm.chain.batches.values())) < 2:
            # also what is the same in all of them is counted for each
            widen = partial(_widened, restarts=self.restarts)
            hmm = hmm.with_chain(hmm.chain.map(lambda _, tensor, core: widen(tensor, core)))
        return (hmm if batch.labels is None else hmm.restrict(batch.labels)), prior

    def _log_prior(self, joint: LogJoint, values: Values) -> Tensor:
        """Sum of the log priors at values, of those that ``joint`` has not met as well."""
        total = torch.zeros(())
        for name, value in values.items():
            if name in self.uniform:
                total = total + self.uniform[name]
            elif name in self.priors:
                total = total + self.priors[name].log_prob(value)
            else:
                total = total + joint.sites[name][0]
        return total

    def prior_slopes(self, names: Iterable[str]) -> Values:
        """Gradients ``(R, ...)`` of the log prior by the parameters ``names``, by name."""
        with torch.enable_grad():
            leaves = {n: self.values[n].detach().clone().requires_grad_() for n in names}
            values = self.in_plate(leaves)
            with LogJoint(values) as joint, self.module._pyro_context:
                for name in leaves.keys() - self.priors.keys():
                    attrgetter(name)(self.module)
            self.module._pyro_context.used = False
            total = self._log_prior(joint, values).sum()
            if not total.requires_grad:  # no prior counts
                return {}
            found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        return {name: slope for name, slope in zip(leaves, found) if slope is not None}

    def get(self, name: str) -> Tensor:
        """The value ``(R, ...)`` of a parameter; that of a frozen one is the same in all."""
        if name in self.values:
            return self.values[name]
        path, _, last = name.rpartition(".")
        value = getattr(self.module.get_submodule(path), last).detach()
        return value.expand(self.restarts, *value.shape)

    def update(self, values: Values) -> None:
        """Set parameters to values ``(R, ...)``; frozen ones stay, and all where these are NaN.

        Raises:
            AttributeError: If the module has no parameter of a name, frozen or not.
            ValueError: If a value has another shape.
        """
        for name, value in values.items():
            path, _, last = name.rpartition(".")
            if name not in self.fitted:
                if not hasattr(self.module.get_submodule(path), last):
                    raise AttributeError(
                        f"m_step returned {name!r}, and the module has no parameter of this name; "
                        f"it has {', '.join(sorted(self.fitted))}."
                    )
                continue
            old = self.get(name)
            if value.shape != old.shape:
                raise ValueError(
                    f"m_step must return {name!r} with a value for each restart, of shape "
                    f"(R, ...) = {tuple(old.shape)}; it returned shape {tuple(value.shape)}."
                )
            value = torch.where(value.isnan(), old, value.to(old.dtype))
            if name in self.values:
                self.values[name] = value
                continue
            set_point(self.module, name, value[0])

    def state(self) -> dict[str, Any]:
        """Checkpoint state: latent variables and parameters without a prior."""
        return {"values": self.values, "points": list(self.points)}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore latent variables and parameters without a prior from a checkpoint."""
        device = self.data.device
        self.values = {name: state["values"][name].to(device) for name in self.sites}
        with torch.no_grad():
            for point, saved in zip(self.points, state["points"], strict=True):
                point.copy_(saved)


def _widened(tensor: Tensor, core: int, restarts: int) -> Tensor:
    """Reshape to batch dimensions ``(R, 1)`` or ``(R, N)`` before the ``core`` last ones."""
    lead = tensor.shape[: tensor.dim() - core]
    if len(lead) > 1:
        return tensor
    inner = (lead or torch.Size([1])) + tensor.shape[tensor.dim() - core :]
    return tensor.reshape(inner).expand(restarts, *inner)


def check_start(values: Values, names: Iterable[str]) -> None:
    """Raise unless the ``values`` of a start have all of these ``names``."""
    if absent := [name for name in names if name not in values]:
        text = f"start has no value for {', '.join(absent)}; it has {', '.join(values) or 'none'}"
        raise ValueError(f"{text}. Give one for each.")


def is_uniform(prior: Any) -> bool:
    """Whether a prior has the same density everywhere, as Dirichlet(1, ..., 1) has."""
    base = prior.base_dist if isinstance(prior, Independent) else prior
    return isinstance(base, Dirichlet) and bool((base.concentration == 1).all())


def fitted_in(model: Any) -> list[tuple[str, Tensor]]:
    """Parameters without a prior of a module, by name; none of a function."""
    named = model.named_parameters() if isinstance(model, nn.Module) else ()
    return [(name, point) for name, point in named if point.requires_grad]


def set_point(module: nn.Module, name: str, value: Tensor) -> None:
    """Set a parameter of a module that has no prior, in place."""
    path, _, last = name.rpartition(".")
    part = module.get_submodule(path)
    if last in part._parameters:
        part._parameters[last].data.copy_(value)  # type: ignore[union-attr]
    else:
        setattr(part, last, value.clone())  # which is trained in place


class Extrapolation:
    r"""SQUAREM extrapolation of EM (Varadhan and Roland, 2008, Scand. J. Statistics 35).

    From two iterations of EM, :math:`\theta_0, \theta_1, \theta_2`, with
    :math:`r = \theta_1 - \theta_0` and :math:`v = \theta_2 - \theta_1 - r`, it proposes
    :math:`\theta_0 + 2 s r + s^2 v`, where :math:`s = |r| / |v|` in each restart. Coordinates are
    unconstrained, such as logarithms of probabilities; hard zeros stay.

    Args:
        parameters: Of the fit; they are set.
        gradient: The gradient steps, which may hold coordinates of their own.
        active: Whether it extrapolates; else it waits until EM is slow.

    Attributes:
        active: Whether each restart extrapolates, ``(R,)``; others take steps of EM.
        proposed: Whether the parameters are a proposal that is to be judged.
    """

    def __init__(self, parameters: Parameters, gradient: Any, active: bool) -> None:
        self.parameters, self.gradient = parameters, gradient
        self.active = torch.full((parameters.restarts,), active)
        self.path: list[Tensor] = []  # coordinates (R, P) of iterations, then the proposal
        self.proposed = False
        self.longest = torch.full((parameters.restarts, 1), GROWTH, dtype=torch.float64)
        self.length = torch.ones_like(self.longest)

    @cached_property
    def packing(self) -> Packing:
        """Coordinates of all parameters of a restart."""
        points, supports = self._points(), self.parameters.supports
        to = {name: transform_to(support) for name, support in supports.items()}
        return Packing.of(to | dict.fromkeys(points, IDENTITY), self.parameters.values | points)

    @torch.no_grad()
    def record(self) -> None:
        """Record the parameters of an iteration, and extrapolate after two."""
        now = self.parameters.values | self._points()
        self.path.append(self.packing.flat({name: x.double() for name, x in now.items()}))
        if len(self.path) < 3:
            return
        first, second, third = self.path
        ahead = second - first
        turn = third - second - ahead
        usable = turn.isfinite()
        ahead, turn = ahead.where(usable, 0.0), turn.where(usable, 0.0)
        length = ahead.norm(dim=-1, keepdim=True) / turn.norm(dim=-1, keepdim=True)
        self.length = length.nan_to_num(1.0).cpu().clamp(min=1.0).minimum(self.longest)
        self.length[~self.active] = 1.0
        s = self.length.to(ahead.device)
        self.path = [third]
        self.proposed = bool((self.length > 1).any())
        if self.proposed:  # at s = 1 it is the third
            self.path.append(third + 2 * (s - 1) * ahead + (s * s - 1) * turn)
            self._write(self.path[1])
        else:
            self._lengthen()

    @torch.no_grad()
    def undo(self, worse: Tensor) -> bool:
        """Undo SQUAREM extrapolations of ``worse`` restarts ``(R,)``; others may step farther next.

        Args:
            worse: Whether a proposal has lowered the log joint density, or has none.

        Returns:
            Whether any was taken back.
        """
        third, proposal = self.path
        bad = worse.reshape(-1, 1) & (self.length > 1)
        kept = torch.where(bad.to(third.device), third, proposal)
        self.proposed, self.path = False, []
        self._lengthen()
        self.longest = torch.where(bad, (self.length / GROWTH).clamp(min=1.0), self.longest)
        undone = bool(bad.any())
        if undone:
            self._write(kept)
        return undone

    def keep(self, chosen: Tensor) -> None:
        """Keep only some of the restarts."""
        self.path = [flat[chosen.to(flat.device)] for flat in self.path]
        self.longest, self.length, self.active = (
            each[chosen] for each in (self.longest, self.length, self.active)
        )

    def _lengthen(self) -> None:
        """Allow longer steps where the last one was as long as allowed."""
        self.longest = torch.where(self.length < self.longest, 1.0, GROWTH) * self.longest

    def _write(self, flat: Tensor) -> None:
        """Set the parameters to coordinates ``(R, P)``."""
        old, leaves = self.parameters.values, self.gradient.leaves
        values, pieces = self.packing.values(flat), self.packing.split(flat)
        for name, value in old.items():
            old[name] = values[name].to(value.dtype)
            if name in leaves:
                leaves[name].copy_(pieces[name].reshape(leaves[name].shape))
        for name, point in self._points().items():
            point.copy_(values[name])

    def _points(self) -> Values:
        """Parameters without priors ``(1, ...)``, by name."""
        return {f"point {i}": x.detach()[None] for i, x in enumerate(self.parameters.points)}

    STATE = "path", "proposed", "longest", "length", "active"

    def state(self) -> dict[str, Any]:
        """Checkpoint state: extrapolation path and step lengths."""
        return {name: getattr(self, name) for name in self.STATE}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore extrapolation path and step lengths from a checkpoint."""
        for name in self.STATE:
            setattr(self, name, state[name])
