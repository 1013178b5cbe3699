"""Families made of another: with further zeros, censored, truncated; by Newton's method."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, ClassVar

import torch
from pyro.distributions import Beta
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor
from torch.distributions import constraints

from ..distributions import modified
from ..distributions.observation import inside_support
from .closed_form import Statistics, under
from .emissions import from_distribution
from .family import Components, Emission, EmissionFamily
from .newton import EXAMPLE, NewtonComponents
from .normals import scale_prior


class _Modified(NewtonComponents):
    """Base of families around another, ``part``, of independent components."""

    def __init__(self, num_states: int, inner: EmissionFamily, **priors: TorchDistribution) -> None:
        part: Any = inner(num_states)
        shapes = {tuple(getattr(part, "shape", ()))}
        if isinstance(part, Components):
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                shapes = {tuple(getattr(part, name).shape) for name in part.supports}
        if not isinstance(part, Components) or len(shapes) != 1:
            raise TypeError(
                "family must be one of independent components, such as normal(0), poisson() or "
                f"weibull(); got {type(part).__name__}."
            )
        super().__init__(num_states, part.dim, **priors)
        self.part = part

    @classmethod
    def of(cls, distribution: Any, base: Any) -> Emission | None:
        """The module of a distribution whose part has independent components; None else."""
        inner = getattr(base, "base_dist", None) or base.base
        part = from_distribution(inner.to_event(len(distribution.event_shape)))
        return cls.around(part, base) if isinstance(part, Components) else None

    @classmethod
    def around(cls, part: Any, base: Any) -> Emission:
        """The module of the distribution ``base``, whose parameters are those of ``part``."""
        raise NotImplementedError

    def spaces(self) -> dict[str, constraints.Constraint]:
        """Supports of all parameters."""
        inner = self.part.spaces() if hasattr(self.part, "spaces") else self.part.supports
        return {f"part.{name}": space for name, space in inner.items()} | self.supports

    def scale_prior(self, moments: Tensor) -> float:
        """Scale the prior of the part: see :func:`.normals.scale_prior`."""
        return scale_prior(self.part, moments)

    def begin(self, values: Tensor, weights: Tensor) -> Statistics:
        """The maximum of the part, as if it were not modified."""
        found = self.part.statistics(values, weights, None)
        return under("part.", self.part.m_step(found)[0])

    def values_of(self, distribution: Any) -> Statistics:
        """The parameters of a distribution that the family emits, by name."""
        inner = getattr(distribution, "base_dist", None) or distribution.base
        if isinstance(self.part, NewtonComponents):
            found = self.part.values_of(inner)
        else:
            found = {name: getattr(inner, name) for name in self.part.supports}
        return under("part.", found)


def zero_inflated(
    family: EmissionFamily,
    gate: TorchDistribution = Beta(1.0, 1.0),  # noqa: B008
) -> EmissionFamily:
    """Emission family of counts, or of positive numbers, with further zeros in each state.

    Of counts, a zero may be of both kinds; a zero among positive numbers, such as a day without
    rain, or an animal that does not move, is none of the part.

    Sites: those of ``family``, as ``emission.part.…``, and ``emission.gate``, the probability of a
    further zero.

    Args:
        family: Of independent components, such as :func:`poisson` or :func:`gamma`.
        gate: Prior of the probabilities.

    Example:
        >>> data = Sequences.from_list([[0, 0, 0, 5, 7, 0, 6]])
        >>> fit = fit_em(TabularHMM(1, zero_inflated(poisson())), data)
        >>> fit.parameters["module.emission.gate"].round(decimals=1)
        tensor([0.6000])
    """
    return partial(ZeroInflatedEmission, inner=family, gate=gate)


class ZeroInflatedEmission(_Modified, emits=modified.ZeroInflated):
    """Counts or positive numbers with further zeros: see :func:`zero_inflated`."""

    supports: ClassVar = {"gate": constraints.unit_interval}
    defaults: ClassVar = {"gate": lambda _: Beta(1.0, 1.0)}

    @classmethod
    def around(cls, part: Any, base: Any) -> Emission:
        """The module with the gates of ``base``."""
        module = cls(base.batch_shape[0], lambda _: part)
        module.set_points(gate=base.gate.expand(base.batch_shape))
        return module

    def components(self) -> TorchDistribution:
        """The distribution of the components."""
        return modified.ZeroInflated(self.part.components(), gate=self.gate)

    def begin(self, values: Tensor, weights: Tensor) -> Statistics:
        """The maximum without zeros, and half of their share."""
        zero = values == 0
        start = super().begin(values.masked_fill(zero, torch.nan), weights)
        _, weights = self._known(values, weights)
        share = (weights * zero.unsqueeze(1)).sum(1) / weights.sum(1)
        return start | {"gate": 0.05 + 0.9 * share.nan_to_num(0.1)}

    def values_of(self, distribution: Any) -> Statistics:
        """The parameters of a distribution that the family emits, by name."""
        return super().values_of(distribution) | {"gate": distribution.gate}


def censored(
    family: EmissionFamily, lower: float | None = None, upper: float | None = None
) -> EmissionFamily:
    """Emission family of numbers that are recorded as a limit where they are beyond it.

    As measurements below a detection limit, which count with the probability to be there.

    Sites: those of ``family``, as ``emission.part.…``.

    Args:
        family: Of independent components whose cumulative probabilities have derivatives:
            :func:`normal` ``(0)``, :func:`log_normal`, :func:`weibull`, or counts.
        lower: Observations that are smaller are recorded as this number.
        upper: Observations that are larger are recorded as this number.

    Raises:
        ValueError: If there is no limit, or the lower one is not below the upper one.

    Example:
        >>> data = Sequences.from_list([[0.0, 0.0, 0.4, 1.2, 0.0, 0.7]])
        >>> fit = fit_em(TabularHMM(1, censored(normal(0), lower=0.0)), data)
        >>> bool(fit.parameters["module.emission.part.loc"] < data.values.mean())
        True
    """
    _check_limits(lower, upper)
    return partial(_LimitedEmission, inner=family, build=modified.Censored, limits=(lower, upper))


def truncated(
    family: EmissionFamily, lower: float | None = None, upper: float | None = None
) -> EmissionFamily:
    """Emission family of numbers of which only those between limits are observed.

    As group sizes, of which none is zero: ``truncated(poisson(), lower=1)``.

    Sites: those of ``family``, as ``emission.part.…``.

    Args:
        family: As of :func:`censored`.
        lower: The least number that is observed.
        upper: The largest one.

    Raises:
        ValueError: If there is no limit, or the lower one is not below the upper one.

    Example:
        >>> data = Sequences.from_list([[1, 1, 2, 1, 1, 3]])
        >>> fit = fit_em(TabularHMM(1, truncated(poisson(), lower=1)), data)
        >>> bool(fit.parameters["module.emission.part.rate"] < 1)  # the mean of those seen is 1.5
        True
    """
    _check_limits(lower, upper)
    return partial(_LimitedEmission, inner=family, build=modified.Truncated, limits=(lower, upper))


def _check_limits(lower: float | None, upper: float | None) -> None:
    low = -math.inf if lower is None else lower
    if (lower is None and upper is None) or not low < (math.inf if upper is None else upper):
        raise ValueError(f"lower must be less than upper, one may be None; got {lower}, {upper}.")


class _LimitedEmission(_Modified, emits=(modified.Censored, modified.Truncated)):
    """A family with limits: see :func:`censored` and :func:`truncated`."""

    def __init__(self, num_states: int, inner: EmissionFamily, build: Any, limits: Any) -> None:
        super().__init__(num_states, inner)
        self.build, self.limits = build, limits
        leaves = {n: torch.full(self.shape, EXAMPLE, requires_grad=True) for n in self.spaces()}
        found = self.at(leaves).components()
        ends = torch.tensor([float(limit) for limit in limits if limit is not None])
        ends = ends.reshape(-1, *(1,) * len(self.shape))
        if not bool(inside_support(found.base, ends).all()):
            raise ValueError(
                f"lower and upper must lie inside the support of the family, "
                f"{found.base.support!s:.80}; got {limits[0]}, {limits[1]}. Exact zeros among "
                "positive numbers are those of zero_inflated(...)."
            )
        try:
            with torch.enable_grad():
                found.log_prob(ends).sum().backward()
        except (NotImplementedError, RuntimeError) as error:
            raise TypeError(
                f"family must have cumulative probabilities with derivatives; those of "
                f"{type(self.part).__name__} have none. normal, log_normal, weibull and families "
                "of counts have them."
            ) from error

    @classmethod
    def around(cls, part: Any, base: Any) -> Emission:
        """The module with the limits of ``base``."""
        return cls(base.batch_shape[0], lambda _: part, type(base), (base.lower, base.upper))

    def components(self) -> TorchDistribution:
        """The distribution of the components."""
        found: TorchDistribution = self.build(self.part.components(), *self.limits)
        return found
