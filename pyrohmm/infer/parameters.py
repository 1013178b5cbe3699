"""The parameters of an EM fit: values of the latent variables, and points in the module."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from pyro import poutine
from pyro.distributions import Dirichlet
from pyro.distributions.util import scale_and_mask
from pyro.nn.module import _Context
from pyro.poutine.messenger import Messenger
from torch import Tensor

from .._checks import check_returned
from ..data.parts import Parts
from ..data.sequences import Sequences
from ..distributions.hmm import HMM
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
        constant: Names of those whose prior is the same whatever the values: it is made once.
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
        self.constant = _constant_priors(module) & self.sites.keys()
        self._flat: Values = {}  # log-densities that no value changes
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
        known = {name: self.values[name] for name in self.constant}
        with _LogDensities(self.values) as densities, self.module._at_values(known):
            hmm = build(self.module, batch)
        prior = self.log_density(densities.found)
        if self.log_prior is not None:
            further = self.log_prior(hmm)
            check_returned("log_prior", further, Tensor, "a tensor")
            prior = prior + (further.squeeze(-1) if further.dim() > 1 else further)
        if self.restarts > 1:  # also what is the same in all of them is counted for each
            widen = partial(_widened, restarts=self.restarts)
            hmm = hmm.with_chain(hmm.chain.map(lambda _, tensor, core: widen(tensor, core)))
        if batch.labels is not None:
            hmm = hmm.restrict(batch.labels)
        return hmm, torch.as_tensor(prior)

    def log_density(self, found: Mapping[str, Tensor]) -> Tensor:
        """Log prior density of the latent variables, ``(R,)`` or a scalar.

        Args:
            found: Log-densities of those whose priors are not constant, by name.
        """
        total = torch.zeros(())
        for name, site in self.sites.items():
            log_prob = self._flat.get(name, found.get(name))
            if log_prob is None:
                log_prob = site.log_prob(self.values[name])
                if _is_flat(site):
                    self._flat[name] = log_prob
            total = total + (log_prob.sum(-1) if self.restarts > 1 else log_prob)
        return total

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
            if name in self.values:
                old = self.values[name]
                value = value.unsqueeze(1) if self.restarts > 1 else value[0]
                self.values[name] = torch.where(value.isnan(), old, value.to(old.dtype))
                continue
            path, _, last = name.rpartition(".")
            part = self.module.get_submodule(path)
            if name not in self.fitted:
                getattr(part, last)
                continue
            old = self.get(name)
            value = torch.where(value.isnan(), old.double(), value).to(old.dtype)[0]
            if last in part._parameters:
                part._parameters[last].data.copy_(value)
            else:
                setattr(part, last, value)

    def state(self) -> dict[str, Any]:
        """State, for checkpoints."""
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


class _LogDensities(Messenger):
    """Runs a model at values of its variables, by name, and computes their log-densities."""

    def __init__(self, values: Values) -> None:
        super().__init__()
        self.values, self.found = values, dict[str, Tensor]()

    def _pyro_sample(self, message: Any) -> None:
        name = message["name"]
        if name in self.values and not message["is_observed"]:
            message["value"] = value = self.values[name]
            message["done"] = True
            log_prob = message["fn"].log_prob(value, *message["args"], **message["kwargs"])
            self.found[name] = scale_and_mask(log_prob, message["scale"], message["mask"])


OWN = __name__.partition(".")[0]


def _constant_priors(module: HMMModule) -> set[str]:
    """Names of the latent variables whose priors depend on constants of the module alone.

    Modules of others may change their priors as they like. Those of this package, where they have
    no parameters, let them depend on other variables and on nothing else.
    """
    kinds = {type(part).__module__.partition(".")[0] for part in module.modules()}
    if next(module.parameters(), None) is not None or not kinds <= {OWN, "pyro", "torch"}:
        return set()
    constant = set()
    for part in module.modules():
        for name, prior in getattr(part, "_pyro_samples", {}).items():
            if getattr(getattr(prior, "func", None), "__module__", "").partition(".")[0] != OWN:
                continue
            with torch.random.fork_rng(devices=[]), module._at_values({}), poutine.trace() as read:
                prior(part)
                site = part._pyro_get_fullname(name)
            if not read.trace.nodes:
                constant.add(site)
    return constant


def _is_flat(prior: Any) -> bool:
    """Whether a prior has the same density everywhere: a Dirichlet whose concentrations are one."""
    base = getattr(prior, "base_dist", prior)
    return type(base) is Dirichlet and bool((base.concentration == 1).all())


def _widened(tensor: Tensor, core: int, restarts: int) -> Tensor:
    """``tensor`` with dimensions ``(R, 1)`` or ``(R, N)`` before its ``core`` last ones."""
    lead = tensor.shape[: tensor.dim() - core]
    if len(lead) > 1:
        return tensor
    inner = (lead or torch.Size([1])) + tensor.shape[tensor.dim() - core :]
    return tensor.reshape(inner).expand(restarts, *inner)
