"""The parameters of an EM fit: values of the latent variables, and points in the module."""

from __future__ import annotations

import math
from typing import Any

import torch
from pyro import poutine
from pyro.nn.module import _Context
from torch import Tensor

from .._checks import check_returned
from ..data.parts import Parts
from ..data.sequences import Sequences
from ..distributions.continuous_time_hmm import ContinuousTimeHMM
from ..distributions.factorial_hmm import FactorialHMM
from ..distributions.hmm import HMM
from ..distributions.second_order_hmm import SecondOrderHMM
from ..io.checkpoints import Fields
from ..nn.base import HMMModule
from .models import LogPrior, build, scale_priors, to_model_device
from .objective import check_events, has_networks, step_cost
from .starts import Values


class Parameters:
    """The parameters of a module, for R batched restarts.

    Attributes:
        module: Builds the HMM; it holds the parameters without priors.
        data: The sequences, on the device of the module.
        sites: Priors of the latent variables, by name.
        values: The latent variables by name, ``(R, 1, ...)``, or ``(...)`` if R = 1.
        points: The parameters without priors.
        fitted: Names of the latent variables and of the points; all else is frozen.
        example: An HMM that the module has built.
        cost: Multiplications for one step of a sequence, about; infinite with networks.
        units: What the unit of the data adds to the loss: see :func:`scale_priors`.

    Raises:
        ValueError: If there is nothing to fit, or there are restarts and points.
    """

    def __init__(
        self,
        module: HMMModule,
        data: Sequences | Parts,
        restarts: int,
        log_prior: LogPrior | None,
    ) -> None:
        module._pyro_set_supermodule("", _Context())  # names without those of what holds it
        self.module: Any = module
        self.restarts, self.log_prior = restarts, log_prior
        self.data = to_model_device(module, None, data)
        self.units = scale_priors(module, self.data)
        with torch.no_grad(), poutine.block():
            trace = poutine.trace(lambda: build(module, self.data[:1])).get_trace()
        self.sites = {name: trace.nodes[name]["fn"] for name in trace.stochastic_nodes}
        check_events(self.sites)
        self.values: Values = {}
        points = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.points = list(points.values())
        self.fitted = {*self.sites, *(name.removesuffix("_unconstrained") for name in points)}
        self.example: HMM = trace.nodes["_RETURN"]["value"]
        self.cost = math.inf
        if not has_networks(self.points, module):
            self.cost = restarts * step_cost(self.example)
        if restarts > 1 and self.points:
            raise ValueError(
                "restarts need every parameter to have a prior, so that each restart has its own; "
                f"{type(module).__name__} has parameters without one."
            )
        if not self.sites and not self.points:
            raise ValueError("module has no parameters to fit: all of them are frozen.")

    def set_values(self, values: Values) -> None:
        """Take all latent variables from ``values``: one of each, or one for each restart."""
        # those of a fit have the name of the module before their own
        values = {name.removeprefix("module."): value for name, value in values.items()}
        absent = [name for name in self.sites if name not in values]
        if absent:
            raise ValueError(f"start has no value for {', '.join(absent)}; it has "
                             f"{', '.join(values) or 'none'}.")  # fmt: skip
        for name, site in self.sites.items():
            value, event = values[name].detach(), site.event_shape
            if value.shape == (self.restarts, *event) and self.restarts > 1:
                value = value.unsqueeze(1)
            try:
                value = value.expand(self.restarts, 1, *event)
            except RuntimeError:
                raise ValueError(
                    f"start must hold {name!r} of shape {tuple(event)}, or one value for each "
                    f"restart, {(self.restarts, *event)}; got {tuple(value.shape)}."
                ) from None
            self.values[name] = value if self.restarts > 1 else value[0, 0]

    def build(self, batch: Sequences) -> tuple[HMM, Tensor]:
        """The HMM with the parameters as they are, and their log-prior, ``(R,)`` or a scalar."""
        with poutine.block():
            with poutine.condition(data=self.values):
                trace = poutine.trace(lambda: build(self.module, batch)).get_trace()
            trace.compute_log_prob(site_filter=lambda name, site: name in self.sites)
        prior = torch.zeros(())
        for name in self.sites:
            log_prob = trace.nodes[name]["log_prob"]
            prior = prior + (log_prob.sum(-1) if self.restarts > 1 else log_prob)
        hmm: HMM = trace.nodes["_RETURN"]["value"]
        if self.log_prior is not None:
            further = self.log_prior(hmm)
            check_returned("log_prior", further, Tensor, "a tensor")
            prior = prior + (further.squeeze(-1) if further.dim() > 1 else further)
        if self.restarts > 1:  # also what is the same in all of them is counted for each
            core = 1 + hmm.order + hmm.transition_per_step
            wide: dict[str, Any] = {
                "log_initial": _widened(hmm.log_initial, 1, self.restarts),
                "log_transition": _widened(hmm.log_transition, core, self.restarts),
            }
            if isinstance(hmm, ContinuousTimeHMM):
                wide = {
                    "log_initial": wide["log_initial"],
                    "rates": _widened(hmm.rates, 2, self.restarts),
                }
            if isinstance(hmm, FactorialHMM):
                wide = {
                    "log_initials": [_widened(p, 1, self.restarts) for p in hmm.log_initials],
                    "log_transitions": [_widened(p, 2, self.restarts) for p in hmm.log_transitions],
                }
            if isinstance(hmm, SecondOrderHMM):
                wide["log_second"] = _widened(hmm.log_second, 2, self.restarts)
            if hmm.counted_duration is not None:
                wide["log_duration"] = _widened(hmm.counted_duration, 2, self.restarts)
            hmm = hmm.replace(**wide)
        if batch.labels is not None:
            hmm = hmm.restrict(batch.labels)
        return hmm, torch.as_tensor(prior)

    def loss(self, batch_size: int) -> Tensor:
        """The loss ``(R,)`` on all the data, in minibatches."""
        total: Any = 0.0
        data: Any = self.data  # in memory, as minibatches are
        with torch.no_grad():
            for first in range(0, len(data), batch_size):
                batch = data[first : first + batch_size]
                hmm, prior = self.build(batch)
                evidence = hmm.log_prob(batch.values).double()
                total = total + evidence.reshape(self.restarts, -1).sum(-1)
        return -(total * data.total / len(data) + prior.double()).cpu()

    def get(self, name: str) -> Tensor:
        """The value ``(R, ...)`` of a parameter."""
        if name in self.values:
            value = self.values[name]
            return value.squeeze(1) if self.restarts > 1 else value.unsqueeze(0)
        path, _, last = name.rpartition(".")
        return getattr(self.module.get_submodule(path), last).detach().unsqueeze(0)

    def update(self, values: Values) -> None:
        """Set parameters to values ``(R, ...)``; frozen ones stay, and all where these are NaN.

        Raises:
            AttributeError: If the module has no parameter of a name, frozen or not.
        """
        for name, value in values.items():
            path, _, last = name.rpartition(".")
            part = self.module.get_submodule(path)
            if name not in self.fitted:
                getattr(part, last)
                continue
            old = self.get(name)
            value = torch.where(value.isnan(), old.double(), value).to(old.dtype)
            if name in self.values:
                self.values[name] = value.unsqueeze(1) if self.restarts > 1 else value[0]
            elif last in part._parameters:
                part._parameters[last].data.copy_(value[0])
            else:
                setattr(part, last, value[0])

    def state(self) -> dict[str, Any]:
        """What a checkpoint saves."""
        return {"values": self.values, "points": list(self.points)}

    def restore(self, state: Fields) -> None:
        """Take the parameters from a checkpoint.

        Raises:
            ValueError: If they are not those of this module.
        """
        device = self.data.device
        values = state["values"]
        if not isinstance(values, dict) or values.keys() != self.sites.keys():
            raise ValueError(f"wanted values of {list(self.sites)}")
        lead = (self.restarts, 1) if self.restarts > 1 else ()
        for name, site in self.sites.items():
            shape = lead + tuple(site.batch_shape + site.event_shape)
            value = values[name]
            if not isinstance(value, Tensor) or tuple(value.shape) != shape:
                raise ValueError(f"{name} must be a tensor {shape}")
            if not bool(site.support.check(value.to(device)).all()):
                raise ValueError(f"{name} must be in {site.support}")
        self.values = {name: value.to(device) for name, value in values.items()}
        with torch.no_grad():
            for point, saved in zip(self.points, state.tensors_like("points", self.points)):
                point.copy_(saved)


def _widened(tensor: Tensor, core: int, restarts: int) -> Tensor:
    """``tensor`` with dimensions ``(R, 1)`` or ``(R, N)`` before its ``core`` last ones."""
    lead = tensor.shape[: tensor.dim() - core]
    if len(lead) > 1:
        return tensor
    inner = (lead or torch.Size([1])) + tensor.shape[tensor.dim() - core :]
    return tensor.reshape(inner).expand(restarts, *inner)
