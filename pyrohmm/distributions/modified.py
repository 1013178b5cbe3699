"""Distributions of numbers: wrapped Cauchy, with a cdf, zero-inflated, censored, truncated."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pyro.distributions as dist
import torch
from pyro.distributions.torch_distribution import TorchDistribution
from scipy import special
from torch import Tensor
from torch.distributions import NegativeBinomial, Poisson, constraints
from torch.distributions.utils import broadcast_all

from .._checks import OwnChecks
from .._imports import imported
from ..ops.log_space import finite_or_zero, log
from .hard_zeros import REACH, bounds, cdf_of_counts, exact_log_prob, first_reaching

MOST_TRIES = 100  # rejected samples of a truncated distribution, before the cdf is inverted
POINTS = 201  # of a quadrature, on each side of the middle

Limit = float | None


class StudentTWithCdf(dist.StudentT):
    """Student's t-distribution, with a CDF."""

    def cdf(self, value: Tensor) -> Tensor:
        """Cumulative probabilities, without a gradient."""
        return _by_scipy(special.stdtr, self.df, (value - self.loc) / self.scale)


class BetaWithCdf(dist.Beta):
    """Beta distribution, with a CDF."""

    def cdf(self, value: Tensor) -> Tensor:
        """Cumulative probabilities, without a gradient."""
        parts = self.concentration1, self.concentration0, value.clamp(0.0, 1.0)
        return _by_scipy(special.betainc, *parts)


class StableWeibull(dist.Weibull):
    """Weibull distribution whose log-density holds where torch's powers leave their range."""

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-density."""
        return exact_log_prob(self, value)


def _by_scipy(function: Callable[..., Any], *arguments: Tensor) -> Tensor:
    parts = [part.detach().cpu().double().numpy() for part in broadcast_all(*arguments)]
    return torch.as_tensor(function(*parts)).to(arguments[0])


class Angle(dist.VonMises):
    """Von Mises distribution of exact density, where torch's is right to eight digits."""

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-density, by a scaled Bessel function that is exact at any concentration."""
        fall = -2 * torch.sin((value - self.loc) / 2).square()  # cos - 1 without cancellation
        scale = torch.special.i0e(self.concentration).log() + math.log(2 * math.pi)
        return self.concentration * fall - scale

    def cdf(self, value: Tensor) -> Tensor:
        """Probability that an angle lies between -π and ``value``, both in one turn."""
        stats = imported("scipy.stats")  # a third of a second, which few need
        value = torch.remainder(value + math.pi, 2 * math.pi) - math.pi
        parts = self.concentration, self.loc
        upto = _by_scipy(stats.vonmises.cdf, value, *parts)
        return upto - _by_scipy(stats.vonmises.cdf, torch.full_like(upto, -math.pi), *parts)


class WrappedCauchy(TorchDistribution):
    r"""Wrapped Cauchy distribution of angles: heavier tails than von Mises.

    .. math:: p(x) = \frac{1 - \rho^2}{2 \pi (1 + \rho^2 - 2 \rho \cos(x - \mu))}

    Args:
        loc: Mean direction, in radians.
        concentration: ρ, the mean resultant length, between 0 and 1.
        validate_args: Whether arguments and values are checked.

    Example:
        >>> WrappedCauchy(torch.tensor(0.0), torch.tensor(0.5)).log_prob(torch.tensor(0.0)).exp()
        tensor(0.4775)
    """

    arg_constraints = {  # noqa: RUF012  # torch's interface
        "loc": constraints.real,
        "concentration": constraints.unit_interval,
    }
    support = constraints.real

    def __init__(self, loc: Tensor, concentration: Tensor, validate_args: Any = None) -> None:
        self.loc, self.concentration = broadcast_all(loc, concentration)
        super().__init__(self.loc.shape, validate_args=validate_args)

    def expand(self, batch_shape: Any, _instance: Any = None) -> WrappedCauchy:
        """Expand to a larger batch."""
        parts = self.loc.expand(batch_shape), self.concentration.expand(batch_shape)
        return WrappedCauchy(*parts, validate_args=False)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-density; (1 - ρ)² + 4 ρ sin² does not cancel."""
        rho = self.concentration
        spread = (1 - rho).square() + 4 * rho * torch.sin((value - self.loc) / 2).square()
        return (-rho).log1p() + rho.log1p() - math.log(2 * math.pi) - spread.log()

    def cdf(self, value: Tensor) -> Tensor:
        """Probability that an angle lies between -π and ``value``, both in one turn."""
        value = torch.remainder(value + math.pi, 2 * math.pi) - math.pi
        return self._upto(value) - self._upto(torch.full_like(value, -math.pi))

    def _upto(self, value: Tensor) -> Tensor:
        turns = torch.floor((value - self.loc + math.pi) / (2 * math.pi))
        within = value - self.loc - 2 * math.pi * turns
        slope = (1 + self.concentration) / (1 - self.concentration)
        return turns + torch.atan(slope * torch.tan(within / 2)) / math.pi + 0.5

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Sample angles between -π and π."""
        shape = self._extended_shape(torch.Size(sample_shape))
        tiny = torch.finfo(self.loc.dtype).tiny
        width = -self.concentration.clamp(min=tiny).log()  # so wide a one is uniform
        cauchy = torch.tan(math.pi * (torch.rand(shape).to(self.loc) - 0.5))
        angle = self.loc + width * cauchy
        return torch.remainder(angle + math.pi, 2 * math.pi) - math.pi

    @property
    def mean(self) -> Tensor:
        """The mean direction."""
        return self.loc

    @property
    def variance(self) -> Tensor:
        """The circular variance, 1 - ρ."""
        return 1 - self.concentration


class ZeroInflated(dist.ZeroInflatedDistribution):
    """Zero-inflated distribution: counts, or positive numbers, mixed with zeros.

    Counts of zero are of both; a zero among positive numbers has the probability ``gate`` itself.

    Args:
        base_dist: The distribution.
        gate: Probability of a further zero.
        validate_args: Whether arguments and values are checked.

    Example:
        >>> rain = ZeroInflated(dist.Gamma(torch.tensor(1.0), 1.0), gate=torch.tensor(0.3))
        >>> rain.log_prob(torch.tensor([0.0, 1.0])).exp()
        tensor([0.3000, 0.2575])
    """

    @constraints.dependent_property
    def support(self) -> Any:
        """Support of the base distribution, and zero."""
        return self.base_dist.support if self._of_counts else constraints.nonnegative

    @property
    def _of_counts(self) -> bool:
        return bool(self.base_dist.support.is_discrete)

    def expand(self, batch_shape: Any, _instance: Any = None) -> ZeroInflated:
        """Expand to a larger batch."""
        batch_shape = torch.Size(batch_shape)
        base, gate = self.base_dist.expand(batch_shape), self.gate.expand(batch_shape)
        return ZeroInflated(base, gate=gate, validate_args=False)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-probability or density."""
        gate, value = broadcast_all(self.gate, value)
        zero = value == 0
        seen = value if self._of_counts else torch.where(zero, 1.0, value)
        other = (-gate).log1p() + exact_log_prob(self.base_dist, seen)
        at_zero = torch.logaddexp(gate.log(), other) if self._of_counts else gate.log()
        return torch.where(zero, at_zero, other)

    def cdf(self, value: Tensor) -> Tensor:
        """Cumulative probabilities."""
        inside = value >= 0 if self._of_counts else value > 0
        base = self.base_dist.cdf(torch.where(inside, value, 1.0))
        found = self.gate + (1 - self.gate) * base.where(inside, 0.0)
        return found.where(value >= 0, 0.0)

    def cdf_below(self, value: Tensor) -> Tensor:
        """P(X < x) with a continuous base: the CDF, but zero up to x = 0."""
        return self.cdf(value).where(value > 0, 0.0)


class _Between(OwnChecks):
    """Base of censored and truncated distributions; ``base`` is that without limits."""

    def __init__(
        self, base: Any, lower: Limit = None, upper: Limit = None, validate_args: Any = None
    ) -> None:
        self.base, self.lower, self.upper = base, lower, upper
        self.low = -math.inf if lower is None else lower
        self.high = math.inf if upper is None else upper
        super().__init__(base.batch_shape, validate_args=validate_args)

    @property
    def support(self) -> Any:
        """Numbers between the limits."""
        low, high = bounds(self.base)
        whole = self.base.support.is_discrete
        kind: Any = constraints.integer_interval if whole else constraints.interval
        return kind(low.clamp(min=self.low), high.clamp(max=self.high))

    def expand(self, batch_shape: Any, _instance: Any = None) -> Any:
        """Expand to a larger batch."""
        return type(self)(self.base.expand(batch_shape), self.lower, self.upper, False)

    @property
    def mean(self) -> Tensor:
        """Mean of the censored or truncated variable."""
        return self._moments()[0]

    @property
    def variance(self) -> Tensor:
        """Variance of the censored or truncated variable."""
        return self._moments()[1]

    def _moments(self) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            points, weights = self._points()
        mass = (weights.log() + self.log_prob(points)).softmax(0)  # its sum is one but for rounding
        mean = (mass * points).sum(0)
        variance = (mass * (points - mean).square()).sum(0)
        return mean.to(self.base.mean), variance.to(self.base.mean)

    def _points(self) -> tuple[Tensor, Tensor]:
        """Quadrature nodes ``(J, *B)`` between the limits, and their weights.

        They are all counts, or those of a double exponential rule on both sides of the middle:
        near it in units of the standard deviation, and ever denser towards the ends.
        """
        unit = self.base.stddev.double().nan_to_num(1.0, posinf=1.0)
        low, high = (end.to(unit) for end in bounds(self))
        middle = self.base.mean.double().nan_to_num(0.0).maximum(low).minimum(high)
        if self.base.support.is_discrete:
            last = (middle + REACH * unit + REACH).minimum(high).max()
            counts = torch.arange(int(low), int(last) + 1).to(unit)
            return counts.reshape(-1, *(1,) * unit.dim()), torch.ones_like(unit)
        time = torch.linspace(-4.0, 4.0, POINTS, dtype=unit.dtype, device=unit.device)
        time = time.reshape(-1, *(1,) * unit.dim())
        apart = unit * (math.pi * time.sinh()).exp()
        points, weights = [], []
        for end, sign in ((low, -1.0), (high, 1.0)):
            room = (end - middle).abs()
            share = apart / room
            near, far = middle + sign * apart / (1 + share), end - sign * room / (1 + share)
            points.append(torch.where(share < 1, near, far))
            weights.append(apart / (1 + share).square() * time.cosh())
        return torch.cat(points), torch.cat(weights) * (8 * math.pi / (POINTS - 1))

    def _log_below(self, limit: float | Tensor) -> Tensor:
        """Log-probability of at most ``limit``."""
        return self._tail(limit, 1.0)

    def _log_above(self, limit: float | Tensor) -> Tensor:
        """Log-probability of at least ``limit``: for counts too."""
        if self.base.support.is_discrete:
            limit = math.ceil(limit) - 1
        return self._tail(limit, -1.0)

    def _tail(self, limit: float | Tensor, sign: float) -> Tensor:
        base = self.base
        limit = limit if isinstance(limit, Tensor) else base.mean.new_tensor(limit)
        least = torch.finfo(limit.dtype).tiny
        if isinstance(base, torch.distributions.LogNormal):
            base, limit = base.base_dist, limit.clamp(min=least).log()
        if isinstance(base, torch.distributions.Normal):
            return torch.special.log_ndtr(sign * (limit - base.loc) / base.scale)
        if isinstance(base, torch.distributions.Weibull):
            beyond = -(limit.clamp(min=least) / base.scale).pow(base.concentration)
            return beyond if sign < 0 else log(-beyond.expm1())
        if sign < 0 and isinstance(base, Poisson | NegativeBinomial):
            return _log_beyond(base, limit)
        low, high = (end.to(limit) for end in bounds(base))
        inside = limit.maximum(low).minimum(high)
        discrete = base.support.is_discrete
        upto = cdf_of_counts(base, limit.floor()) if discrete else base.cdf(inside).double()
        return log(upto if sign > 0 else 1 - upto).to(base.mean)


def _log_beyond(base: Any, limit: Tensor) -> Tensor:
    """Log-probability of counts above ``limit``: by a sum over the tail, or one minus the CDF."""
    upto, wide = cdf_of_counts(base, limit), base.stddev.detach()
    few = (upto < 0.5) | ~(wide < 2500)
    most = int(50 + 40 * wide.masked_fill(few, 0.0).max())  # so far beyond the median none is left
    first = max(int(limit), -1) + 1
    counts = torch.arange(first, first + most).to(base.mean)
    counts = counts.reshape(-1, *(1,) * len(base.batch_shape))
    tail = exact_log_prob(base, counts).logsumexp(0)
    return torch.where(few, log(1 - torch.where(few, upto, 0.0)).to(tail), tail)


class Censored(_Between):
    """Censored distribution: values below ``lower`` or above ``upper`` are those limits.

    As where an instrument has a detection limit, or a count has a ceiling.

    Args:
        base: The distribution of what is not censored, batched over states.
        lower: Observations that are smaller are recorded as this number.
        upper: Observations that are larger are recorded as this number.
        validate_args: Whether values are checked.

    Example:
        >>> Censored(dist.Normal(torch.tensor(0.0), 1.0), lower=0.0).log_prob(torch.tensor(0.0))
        tensor(-0.6931)
    """

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-density between the limits, log-probability at them."""
        found = exact_log_prob(self.base, value)
        if self.lower is not None:
            found = torch.where(value <= self.lower, self._log_below(self.lower), found)
        if self.upper is not None:
            found = torch.where(value >= self.upper, self._log_above(self.upper), found)
        return found

    def cdf(self, value: Tensor) -> Tensor:
        """Probability of at most each value."""
        found = self._log_below(value).exp().masked_fill(value < self.low, 0.0)
        return found.masked_fill(value >= self.high, 1.0)

    def cdf_below(self, value: Tensor) -> Tensor:
        """Probability of less than each value."""
        found = self._log_below(value).exp().masked_fill(value <= self.low, 0.0)
        return found.masked_fill(value > self.high, 1.0)

    def _points(self) -> tuple[Tensor, Tensor]:
        points, weights = super()._points()
        if self.base.support.is_discrete:
            return points, weights
        atoms = zip(bounds(self), (self.lower, self.upper))
        limits = [limit for end, limit in atoms if limit is not None and bool((end == limit).any())]
        ends = points.new_tensor(limits).reshape(-1, *(1,) * (points.dim() - 1))
        ends = ends.expand(-1, *points.shape[1:])
        return torch.cat([points, ends]), torch.cat([weights, torch.ones_like(ends)])

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Sample from the base distribution, clamped to the limits."""
        return self.base.sample(torch.Size(sample_shape)).clamp(self.lower, self.upper)


class Truncated(_Between):
    """Truncated distribution: given that the value is between limits, both included.

    Args:
        base: The distribution, batched over states.
        lower: The least value that is there to be observed.
        upper: The largest one.
        validate_args: Whether values are checked.

    Example:
        >>> once = Truncated(dist.Poisson(torch.tensor(1.0)), lower=1)  # counts of at least one
        >>> once.log_prob(torch.tensor([0.0, 1.0])).exp()
        tensor([0.0000, 0.5820])
    """

    def _log_upto(self, high: float | Tensor) -> Tensor:
        """Log-probability by ``base`` of values between the lower limit and ``high``."""
        low = self.low
        if low == -math.inf:
            return self._log_below(high)
        if isinstance(high, float) and high == math.inf:
            return self._log_above(low)
        discrete = self.base.support.is_discrete
        below, above = self._log_below(high), self._log_above(low)
        under = self._log_below(math.ceil(low) - 1 if discrete else low)
        over = self._log_above(high + 1 if discrete else high)
        most = torch.minimum(below, above)  # from the side of the smaller tail, lest all cancels
        less = torch.where(below < above, under, over)
        return most + (-(less - finite_or_zero(most)).exp()).log1p()

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-density; -inf outside of the limits."""
        found = exact_log_prob(self.base, value) - self._log_upto(self.high)
        return torch.where((value >= self.low) & (value <= self.high), found, -torch.inf)

    def cdf(self, value: Tensor) -> Tensor:
        """Probability of at most each value."""
        if self.base.support.is_discrete:
            return cdf_of_counts(self, value.floor())
        inside = value.clamp(self.low, self.high)
        return (self._log_upto(inside) - self._log_upto(self.high)).exp()

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Sample by rejection, and where many tries fail by inversion of the CDF."""
        found = self.base.sample(torch.Size(sample_shape))
        for _ in range(MOST_TRIES):
            outside = found.clamp(self.low, self.high) != found
            if not bool(outside.any()):
                return found
            found = torch.where(outside, self.base.sample(torch.Size(sample_shape)), found)
        probs, (low, high) = 1 - torch.rand(found.shape).to(found), bounds(self)
        whole = int(self.base.support.is_discrete)
        mean, reach = self.mean, REACH * self.stddev + whole
        low = low.to(found).maximum(mean - reach) - whole
        high = high.to(found).minimum(mean + reach)
        ends = low.expand_as(found), high.expand_as(found)
        inverse = first_reaching(lambda value: self.cdf(value) >= probs, *ends)
        return torch.where(outside, inverse.round() if whole else inverse, found)
