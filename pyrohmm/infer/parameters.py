"""The parameters of an EM fit: values of the latent variables, and points in the module."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from pyro import poutine
from pyro.distributions import Dirichlet
from pyro.distributions.util import scale_and_mask
from pyro.nn import PyroModule
from pyro.nn.module import _Context
from pyro.poutine.messenger import Messenger
from torch import Tensor

from ..data.batches import Parts
from ..data.sequences import Sequences
from ..distributions.hmm import HMM
from ..io.checkpoints import Fields
from ..nn.base import HMMModule
from .models import LogPrior, build, scale_priors, to_model_device
from .objective import check_events, step_cost
from .starts import Values

PACKAGE = __name__.partition(".")[0]


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
        cost: Multiplications for one step of a sequence, about.
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
        self._priors = _attribute_priors(module, trace)
        self._flat = {
            name: prior.constant.log_prob(trace.nodes[name]["value"])
            for name, prior in self._priors.items()
            if prior.constant is not None and _is_flat(prior.constant)
        }
        self.values: Values = {}
        points = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.points = list(points.values())
        self.fitted = {*self.sites, *(name.removesuffix("_unconstrained") for name in points)}
        self.example: HMM = trace.nodes["_RETURN"]["value"]
        self.cost = restarts * step_cost([self.example], self.points)
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

    def stacked(self) -> Values:
        """The latent variables by name, ``(R, ...)``."""
        return {name: self.get(name) for name in self.values}

    def keep(self, chosen: Tensor) -> None:
        """Go on with some of the restarts alone, ``(R',)`` integers."""
        stacked, self.restarts = self.stacked(), len(chosen)
        self.set_values({name: value[chosen] for name, value in stacked.items()})

    def build(self, batch: Sequences) -> tuple[HMM, Tensor]:
        """The HMM with the parameters as they are, and their log-prior, ``(R,)`` or a scalar."""
        attributes = {name: self.values[name] for name in self._priors}
        others = len(attributes) < len(self.sites)
        sampled = _LogDensities(self.values)
        with sampled if others else nullcontext(), self.module._at_values(attributes):
            hmm = build(self.module, batch)
            prior = self.log_density(sampled.found)
        if self.log_prior is not None:
            further = self.log_prior(hmm)
            prior = prior + (further.squeeze(-1) if further.dim() > 1 else further)
        if self.restarts > 1:  # also what is the same in all of them is counted for each
            widen = partial(_widened, restarts=self.restarts)
            hmm = hmm.with_chain(hmm.chain.map(lambda _, tensor, core: widen(tensor, core)))
        if batch.labels is not None:
            hmm = hmm.restrict(batch.labels)
        return hmm, torch.as_tensor(prior)

    def constant_priors(self) -> set[str]:
        """Names of the latent variables whose priors depend on nothing else."""
        return {name for name, prior in self._priors.items() if prior.constant is not None}

    def log_density(self, found: Values) -> Tensor:
        """Log prior density of the latent variables, ``(R,)`` or a scalar.

        Args:
            found: Log-densities of those that are no attributes, by name.
        """
        total = torch.zeros(())
        for name, value in self.values.items():
            if name in self._flat:
                total = total + self._flat[name]
                continue
            log_prob = self._priors[name](value) if name in self._priors else found.get(name)
            if log_prob is not None:  # None of what was not read
                total = total + (log_prob.sum(-1) if self.restarts > 1 else log_prob)
        return total

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
            ValueError: If a value has another shape.
        """
        for name, value in values.items():
            path, _, last = name.rpartition(".")
            if name not in self.fitted:
                getattr(self.module.get_submodule(path), last)
                continue
            old = self.get(name)
            if value.shape != old.shape:
                raise ValueError(
                    f"m_step must return {name!r} with a value for each restart, of shape "
                    f"(R, ...) = {tuple(old.shape)}; it returned shape {tuple(value.shape)}."
                )
            value = torch.where(value.isnan(), old, value.to(old.dtype))
            if name in self.values:
                self.values[name] = value.unsqueeze(1) if self.restarts > 1 else value[0]
                continue
            part = self.module.get_submodule(path)
            if last in part._parameters:
                part._parameters[last].data.copy_(value[0])
            else:
                setattr(part, last, value[0])

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


class _AttributePrior(NamedTuple):
    """The prior of an attribute of a module of this package, whose value needs no effect handler.

    Attributes:
        part: The module.
        make: Called with it, returns the prior.
        constant: The prior, if it depends on no other variable.
    """

    part: PyroModule
    make: Any
    constant: Any

    def __call__(self, value: Tensor) -> Tensor:
        """Log-density, at the values of other variables around this call."""
        prior = self.make(self.part) if self.constant is None else self.constant
        return prior.log_prob(value)


def _attribute_priors(module: HMMModule, trace: poutine.Trace) -> dict[str, _AttributePrior]:
    """Priors of the latent variables that are read in no plate, mask or scale, by name.

    Modules of others may do with their variables as they like, and ask Pyro for each. Where there
    are points, priors may depend on them.
    """
    kinds = {type(part).__module__.partition(".")[0] for part in module.modules()}
    if next(module.parameters(), None) is not None or not kinds <= {PACKAGE, "pyro", "torch"}:
        return {}
    priors = {}
    for part in module.modules():
        for name, make in getattr(part, "_pyro_samples", {}).items():
            if getattr(getattr(make, "func", None), "__module__", "").partition(".")[0] != PACKAGE:
                continue
            with torch.random.fork_rng(devices=[]), module._at_values({}), poutine.trace() as read:
                prior = make(part)
                site = part._pyro_get_fullname(name)
            if site in trace.nodes:
                priors[site] = _AttributePrior(part, make, None if read.trace.nodes else prior)
    return priors


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
