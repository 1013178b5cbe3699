"""Priors of data in any unit: coordinates in units of the data, and densities that do not overflow.

Guides and optimisers work in unconstrained coordinates, where their steps and initial widths are of
the order of one; so means and variances must be measured there in units of the
data.
"""

from __future__ import annotations

from typing import Any

import pyro.distributions as dist
import torch
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor
from torch.distributions import biject_to, constraints, transform_to
from torch.distributions.transforms import AffineTransform, ComposeTransform, Transform


class InUnits(TorchDistribution):
    """A distribution of real numbers, with coordinates ``(x - origin) / unit`` in its support.

    Density and samples are those of ``base``.

    Args:
        base: Distribution of real numbers or vectors.
        origin: What broadcasts with its samples.
        unit: The same, positive.

    Example:
        >>> far = InUnits(dist.Normal(1e6, 2e3), torch.tensor(1e6), torch.tensor(1e3))
        >>> biject_to(far.support).inv(torch.tensor(1.002e6))
        tensor(2.)
    """

    arg_constraints: dict[str, constraints.Constraint] = {}  # noqa: RUF012
    has_rsample = True

    def __init__(self, base: Any, origin: Tensor, unit: Tensor) -> None:
        self.base, self.origin, self.unit = base, origin, unit
        super().__init__(base.batch_shape, base.event_shape, validate_args=False)

    @property
    def support(self) -> constraints.Constraint:
        """Real numbers, with these coordinates."""
        real = _Measured(constraints.real, self.origin, self.unit)
        return constraints.independent(real, len(self.event_shape)) if self.event_shape else real

    @property
    def mean(self) -> Tensor:
        """Taken from the base distribution."""
        return self.base.mean

    @property
    def variance(self) -> Tensor:
        """Taken from the base distribution."""
        return self.base.variance

    def expand(self, batch_shape: Any, _instance: Any = None) -> InUnits:
        """Expand to a larger batch."""
        return InUnits(self.base.expand(torch.Size(batch_shape)), self.origin, self.unit)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Samples of the base."""
        return self.base.rsample(sample_shape)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-density of the base."""
        return self.base.log_prob(value)


class InverseGamma(dist.InverseGamma):
    """Pyro's distribution, with coordinates in units of the rate, and without overflow in float32.

    (The density of Pyro's transforms that of a gamma distribution, by a slope of the square.)

    Example:
        >>> from pyrohmm.distributions.units import InverseGamma
        >>> InverseGamma(torch.tensor(2.0), torch.tensor(1e20)).log_prob(torch.tensor(1e20))
        tensor(-47.0517)
    """

    @property
    def support(self) -> constraints.Constraint:
        """Positive numbers, with logarithms in these units as coordinates."""
        return _Measured(constraints.positive, torch.zeros_like(self.rate), self.rate)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-density ``(*B)``."""
        if self._validate_args:
            self._validate_sample(value)
        a, b = self.concentration, self.rate
        return a * b.log() - a.lgamma() - (a + 1) * value.log() - b / value


class _Measured(constraints.Constraint):
    """A space of numbers with another origin and unit; torch's have one bijection for all."""

    def __init__(self, space: constraints.Constraint, origin: Tensor, unit: Tensor) -> None:
        self.space, self.origin, self.unit = space, origin, unit
        super().__init__()

    def check(self, value: Tensor) -> Tensor:
        return self.space.check(value)


@biject_to.register(_Measured)
@transform_to.register(_Measured)
def _from_units(constraint: _Measured) -> Transform:
    measured = AffineTransform(constraint.origin, constraint.unit)
    return ComposeTransform([biject_to(constraint.space), measured])
