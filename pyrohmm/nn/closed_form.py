"""M-steps in closed form: protocols, families of parameters, and their priors.

Two methods, ``statistics`` and ``m_step``, of a chain (:class:`ChainMStep`) or of an emission
(:class:`EmissionMStep`). EM asks for the methods, not for a class: what lacks them is maximised by
gradient steps on the expected log joint density.

In shapes, M is the number of observations and R that of batched restarts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from pyro.distributions.torch_distribution import TorchDistribution
from pyro.nn import PyroModule, PyroParam, PyroSample
from torch import Tensor, nn
from torch.distributions import constraints

from .._checks import check_kind
from .._sync import exceeds
from ..chains.base import ExpectedCounts
from ..data.sequences import Sequences

Statistics = dict[str, Tensor]
Maximum = tuple[dict[str, Tensor], list[str]]
Counted = tuple[Sequences, Statistics]  # and their expected counts, by name


@runtime_checkable
class EmissionMStep(Protocol):
    """An emission whose M-step has a closed form: a ``PyroModule`` with these methods."""

    def statistics(self, values: Tensor, weights: Tensor, current: Any) -> Statistics:
        """Sufficient statistics of the parameters: sums over observations.

        Args:
            values: ``(M, *E)``; NaN components are missing.
            weights: ``(R, M, K)``, the smoothed posterior of the state at each observation.
            current: The emission the weights were computed with, of batch shape ``(K,)`` or
                ``(R, 1, K)``; None at the start.
        """

    def m_step(self, statistics: Statistics) -> Maximum:
        """M-step: mode of the parameters given sufficient statistics, priors included.

        Returns:
            The parameters by name, each ``(R, ...)``, NaN where neither an observation nor a prior
            determines them; and remarks, such as that a variance was held at its floor. Those of
            frozen parameters are ignored; the mode of the others must be that with their values.
        """


@runtime_checkable
class ConjugateSampler(Protocol):
    """A part whose parameters Gibbs can sample given its sufficient ``statistics``."""

    def sample_parameters(self, statistics: Statistics, current: dict[str, Tensor]) -> Statistics:
        """Sample parameters given sufficient statistics of data whose states are known.

        Args:
            statistics: Of weights and counts that are whole numbers: those of sampled paths.
            current: The parameters by name, ``(R, ...)``, of which one that is not sampled in one
                step with the others may depend.

        Returns:
            One sample ``(R, ...)`` of each by name, from its distribution given the statistics,
            priors included; those of frozen parameters are left out. Parameters that are not among
            them are updated by Hamiltonian steps.
        """


@runtime_checkable
class ChainMStep(Protocol):
    """An :class:`HMMModule` whose chain has an M-step in closed form.

    ``m_step`` maximises all the parameters but those of :meth:`HMMModule.emission_module`.
    """

    def statistics(self, expected: ExpectedCounts) -> Statistics:
        """Sufficient statistics of the chain: sums over sequences.

        Args:
            expected: With ``counts`` in float64, by the names of the chain's parameters and each
                of its shape: ``log_initial`` ``(R, K)`` and ``log_transition`` ``(R, K, K)`` of a
                Markov chain.
        """

    def m_step(self, statistics: Statistics) -> Maximum:
        """M-step: mode of the chain's parameters given expected counts, priors included."""


@runtime_checkable
class TransitionCounts(ChainMStep, Protocol):
    """A :class:`ChainMStep` with a parameter ``transition`` ``(K, K)``: the probabilities.

    EM maximises it under a prior of the transition matrix: see :mod:`pyrohmm.infer.msteps`. An
    attribute ``transition_allowed`` ``(K, K)``, booleans, says which transitions are possible; all
    are without it, or if it is None.
    """

    def transition_counts(self, statistics: Statistics) -> Tensor | None:
        """Transition counts ``(R, K, K)`` plus pseudo-counts of the prior; None if frozen."""


@runtime_checkable
class StepsMStep(Protocol):
    """An :class:`HMMModule` whose M-step needs the posterior of each step, not summed counts.

    Attributes:
        by_steps: Names of the parameters that ``maximize`` returns.
    """

    by_steps: list[str]

    def maximize(self, parts: list[Counted], current: Statistics) -> Statistics:
        """M-step: mode of the parameters, by name, each ``(R, ...)``.

        Args:
            parts: Sequences of similar length, and their expected counts by the names of the
                chain's parameters, and ``states``, those of each step, all with dimensions
                ``(R, N)``; ``(N,)`` without restarts.
            current: The parameters as they are, ``(R, ...)``.
        """


class Prior(partial):
    """A prior that the M-step of its module accounts for."""


class Penalty(Prior):
    """Smoothing prior whose scale is estimated; kept also under ``priors=False``."""


class Flat(Prior):
    """Improper constant prior on the support of the prior that it replaces."""


def with_priors(module: Any, priors: bool) -> Any:
    """Make the priors of ``module`` :class:`Flat` if ``priors`` is False, and return it."""
    check_kind("priors", priors, bool, "True or False", "Give priors themselves to the module.")
    if not priors:
        check_kind("module", module, nn.Module, "a module where priors=False")
        for part in module.modules():
            samples = getattr(part, "_pyro_samples", {})
            chosen = {n: x for n, x in samples.items() if not isinstance(x, Flat | Penalty)}
            samples.update({n: Flat(_unweighted, prior=x) for n, x in chosen.items()})
    return module


@contextmanager
def without_priors(module: nn.Module) -> Iterator[None]:
    """Context manager in which M-steps of a module maximise the likelihood, without priors."""
    tables = [getattr(part, "_pyro_samples", {}) for part in module.modules()]
    kept = [dict(samples) for samples in tables]
    try:
        yield with_priors(module, False)
    finally:
        for samples, priors in zip(tables, kept):
            samples.update(priors)


def _unweighted(module: Any, prior: Any) -> TorchDistribution:
    return (prior if hasattr(prior, "sample") else prior(module)).mask(False)


class Family(PyroModule):
    """Base of modules with parameters that have priors, have none, or are frozen.

    Attributes:
        supports: Support of each parameter, by its name.
    """

    supports: ClassVar[dict[str, constraints.Constraint]] = {}
    accounts_for_priors = False  # whether the M-step knows the priors of the parameters

    def spaces(self) -> dict[str, constraints.Constraint]:
        """Constraints of all parameters, with dots in the names of those of parts."""
        return self.supports

    def add_parameters(self, **shapes: tuple[int, ...]) -> None:
        """Add random variables of these shapes.

        The method ``<name>_prior`` returns the prior of each, which becomes a single event.
        """
        self.accounts_for_priors = True
        for name, shape in shapes.items():
            setattr(self, name, PyroSample(Prior(_prior_of, name=name, dims=len(shape))))

    def set_points(self, **values: Tensor) -> None:
        """Make these values parameters without priors."""
        for name, value in values.items():
            if name in self._pyro_samples:
                delattr(self, name)
            setattr(self, name, PyroParam(value.detach().clone(), self.supports[name]))

    def owner(self, name: str) -> tuple[Any, str]:
        """Submodule that has a parameter, and the parameter's name in it."""
        path, _, last = name.rpartition(".")
        return self.get_submodule(path), last

    def is_free(self, name: str) -> bool:
        """Whether the parameter ``name`` is fitted: it has a prior, or requires a gradient."""
        part, last = self.owner(name) if "." in name else (self, name)
        if last in part._pyro_params:
            return bool(getattr(part, f"{last}_unconstrained").requires_grad)
        return last in part._pyro_samples

    def has_prior(self, name: str) -> bool:
        """Whether the parameter ``name`` has a prior that is not :class:`Flat`."""
        part, last = self.owner(name) if "." in name else (self, name)
        return not isinstance(part._pyro_samples.get(last), Flat | None)

    def prior(self, name: str) -> Any:
        """Prior distribution of a parameter, given the parameters that it depends on."""
        return getattr(self, f"{name}_prior")()

    def at(self, values: dict[str, Tensor]) -> Any:
        """A copy whose parameters are these tensors, of any shape, with no priors.

        What priors are made of gets their dtype: ``Gamma.log_prob`` rounds values to that of its
        rate, and Newton's method cannot climb a function that is rounded more than its slope.

        Args:
            values: By name, with dots for those of parts.
        """
        other = object.__new__(type(self))
        fields = other.__dict__
        fields |= self.__dict__
        for table in ("_pyro_samples", "_pyro_params", "_parameters", "_buffers", "_modules"):
            fields[table] = fields[table].copy()
        for name in {name.partition(".")[0] for name in values}:
            if name in self._modules:
                fields["_modules"][name] = getattr(self, name).at(inside(values, f"{name}."))
                continue
            for table in ("_pyro_samples", "_pyro_params", "_buffers"):
                fields[table].pop(name, None)
            fields[name] = values[name]
        dtype = next(iter(values.values())).dtype
        for name, buffer in fields["_buffers"].items():
            if buffer is not None and buffer.is_floating_point():
                fields["_buffers"][name] = buffer.to(dtype)
        return other


def _prior_of(module: Any, name: str, dims: int) -> TorchDistribution:
    """The prior of a parameter of ``dims`` dimensions, all of which are one event."""
    prior = module.prior(name)
    return prior.to_event(dims - len(prior.event_shape))


def has_foreign_priors(module: nn.Module, but: nn.Module | None = None) -> bool:
    """Whether an M-step of this package would ignore a prior in its module, such as a user's.

    An M-step of a user's knows the priors of all that is below it.

    Args:
        module: What has the M-step.
        but: A part that is not looked at.
    """
    if module is but:
        return False
    priors = getattr(module, "_pyro_samples", {}).values()
    if hasattr(module, "m_step"):
        if not isinstance(module, Family) or (priors and not module.accounts_for_priors):
            return False
        if {*map(type, priors)} - {Prior, Penalty, Flat}:
            return True
    return any(map(partial(has_foreign_priors, but=but), module.children()))


def check_mode(name: str, concentration: Tensor) -> None:
    """Raise if a concentration is below one, with which the density has no maximum."""
    if not exceeds(concentration.amin(), math.nextafter(1.0, 0.0)):
        raise ValueError(
            f"{name} below one has no most probable value, which EM looks for; got "
            f"{concentration.min().item():g}. Use fit_svi, or a {name} of at least one."
        )


def with_prior(counts: Tensor, concentration: Tensor | None) -> Tensor:
    """Counts ``(*, V)`` plus the pseudo-counts of a Dirichlet prior, if any, in float64.

    Raises:
        ValueError: If a concentration is below one.
    """
    if concentration is None:
        return counts.double()
    check_mode("concentration", concentration)
    return counts.double() + (concentration - 1)


def row_mode(counts: Tensor, concentration: Tensor | None = None) -> Tensor:
    """Posterior mode of rows ``(*, V)``: normalised counts, pseudo-counts of a prior included."""
    counts = with_prior(counts, concentration)
    return counts / counts.sum(-1, keepdim=True)


def sample_rows(concentration: Tensor) -> Tensor:
    """Sample rows of probabilities ``(*, V)`` from Dirichlet distributions, of any concentration.

    In logarithms, for a gamma variable of a small concentration is smaller than any number; an
    entry of concentration zero is zero.
    """
    gammas = torch._standard_gamma(concentration + 1)
    return (gammas.log() + torch.rand_like(gammas).log() / concentration).softmax(-1)


def mode_of_part(part: Any, prefix: str, statistics: Statistics) -> Maximum:
    """M-step of a part; names of its statistics and parameters begin with ``prefix``."""
    values, notes = part.m_step(inside(statistics, prefix))
    return under(prefix, values), notes


def sample_of_part(
    part: Any, prefix: str, statistics: Statistics, current: Statistics
) -> Statistics:
    """Sample the parameters of a part, if it can; names as in :func:`mode_of_part`."""
    if not isinstance(part, ConjugateSampler):
        return {}
    own = (inside(each, prefix) for each in (statistics, current))
    return under(prefix, part.sample_parameters(*own))


def inside(statistics: Statistics, prefix: str) -> Statistics:
    """Select the statistics whose names begin with ``prefix``, and strip it."""
    return {
        name.removeprefix(prefix): value
        for name, value in statistics.items()
        if name.startswith(prefix)
    }


def under(prefix: str, statistics: Statistics) -> Statistics:
    """Prepend ``prefix`` to the names of statistics."""
    return {prefix + name: value for name, value in statistics.items()}
