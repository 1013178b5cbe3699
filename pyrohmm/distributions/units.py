"""Priors of data in any unit: coordinates in units of the data, and densities that do not overflow.

Guides and optimisers work in unconstrained coordinates, where their steps and initial widths are of
the order of one; so means and variances must be measured there in units of the
data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import biject_to, constraints, transform_to
from torch.distributions.transforms import AffineTransform, ComposeTransform, Transform

from .._checks import (
    CheckedCalls,
    OwnChecks,
    PyroValidation,
    check_floats,
    check_number,
    check_trailing,
)
from .._sync import exceeds

ENOUGH = 2.0  # degrees beyond the dimension, to propose from an inverse Wishart distribution
STEPS = 5  # of a random walk of a covariance that few observations determine


class InUnits(OwnChecks):
    """Distribution of real numbers with unconstrained coordinates ``(x - origin) / unit``.

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

    has_rsample = True

    def __init__(self, base: Any, origin: Tensor, unit: Tensor) -> None:
        self.base, self.origin, self.unit = base, origin, unit
        super().__init__(base.batch_shape, base.event_shape, validate_args=False)

    @property
    def support(self) -> constraints.Constraint:
        """Support: real numbers, with unconstrained coordinates in these units."""
        real = _measured(constraints.real, self.origin, self.unit)
        return constraints.independent(real, len(self.event_shape)) if self.event_shape else real

    @property
    def mean(self) -> Tensor:
        """Mean of the base distribution."""
        return self.base.mean

    @property
    def variance(self) -> Tensor:
        """Variance of the base distribution."""
        return self.base.variance

    def expand(self, batch_shape: Any, _instance: Any = None) -> InUnits:
        """Expand to a larger batch."""
        return InUnits(self.base.expand(torch.Size(batch_shape)), self.origin, self.unit)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Sample from the base distribution."""
        return self.base.rsample(sample_shape)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-density of the base distribution."""
        return self.base.log_prob(value)


class InverseGamma(dist.InverseGamma):
    """Inverse gamma with coordinates in units of the rate, without overflow in float32.

    (The density of Pyro's transforms that of a gamma distribution, by a slope of the square.)

    Example:
        >>> from pyrohmm.distributions.units import InverseGamma
        >>> InverseGamma(torch.tensor(2.0), torch.tensor(1e20)).log_prob(torch.tensor(1e20))
        tensor(-47.0517)
    """

    @property
    def support(self) -> constraints.Constraint:
        """Support: positive numbers, with log coordinates in units of the rate."""
        return _measured(constraints.positive, torch.zeros_like(self.rate), self.rate)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-density ``(*B)``."""
        if self._validate_args:
            self._validate_sample(value)
        a, b = self.concentration, self.rate
        return a * b.log() - a.lgamma() - (a + 1) * value.log() - b / value


class FlatVariance(OwnChecks):
    r"""Distribution of positive numbers whose density is flat between two scales.

    .. math:: p(v) = \frac{\exp(-b/v - v/m)}{2 \sqrt{b m} K_1(2 \sqrt{b/m})}

    It is the generalised inverse Gaussian distribution of index one.

    Args:
        lower: b, the small scale.
        upper: m, the large scale, of the same shape.

    Example:
        >>> from pyrohmm.distributions.units import FlatVariance
        >>> prior = FlatVariance(torch.tensor(1e-4), torch.tensor(5.0))
        >>> prior.log_prob(torch.tensor([0.1, 1.0])).exp()
        tensor([0.1959, 0.1638])
    """

    def __init__(self, lower: Tensor, upper: Tensor) -> None:
        self.lower, self.upper = lower, upper
        super().__init__(lower.shape, validate_args=False)

    @property
    def support(self) -> constraints.Constraint:
        """Support: positive numbers, log coordinates in units of a fifth of the large scale."""
        return _measured(constraints.positive, torch.zeros_like(self.upper), self.upper / 5)

    def expand(self, batch_shape: Any, _instance: Any = None) -> FlatVariance:
        """Expand to a larger batch."""
        return FlatVariance(*(scale.expand(batch_shape) for scale in (self.lower, self.upper)))

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Sample by rejection from an exponential distribution of the large scale."""
        shape = torch.Size(sample_shape) + self.batch_shape
        value, waits = torch.zeros(shape).to(self.upper), True
        while waits:
            new = -self.upper * torch.rand_like(value).log()
            accepted = (-self.lower / new).exp() > torch.rand_like(value)
            value = torch.where((value == 0) & accepted, new, value)
            waits = bool((value == 0).any())
        return value

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-density ``(*B)``."""
        return -self.lower / value - value / self.upper - self.log_norm

    @cached_property
    def log_norm(self) -> Tensor:
        """Logarithm of the normaliser, ``(*B)``."""
        ratio = 2 * (self.lower / self.upper).sqrt()
        return self.upper.log() + (ratio * torch.special.modified_bessel_k1(ratio)).log()


class Reparametrized(constraints.Constraint):
    """Constraint with its own bijection from unconstrained space, in place of torch's."""

    def __init__(self, space: constraints.Constraint, transform: Transform) -> None:
        self.space, self.transform, self.event_dim = space, transform, space.event_dim
        super().__init__()

    def check(self, value: Tensor) -> Tensor:
        """Whether values are in the constraint ``space``."""
        return self.space.check(value)


for _registry in (biject_to, transform_to):
    _registry.register(Reparametrized, attrgetter("transform"))


def _measured(space: constraints.Constraint, origin: Tensor, unit: Tensor) -> Reparametrized:
    """Constraint whose unconstrained coordinates are shifted and scaled."""
    return Reparametrized(
        space, ComposeTransform([biject_to(space), AffineTransform(origin, unit)])
    )


# Covariances -------------------------------------------------------------------------------------


class InverseWishart(CheckedCalls, OwnChecks):
    r"""Inverse Wishart distribution of a covariance matrix.

    .. math:: p(\Sigma) \propto |\Sigma|^{-(\nu + D + 1)/2}
              \exp(-\tfrac12 \mathrm{tr}(\Psi \Sigma^{-1}))

    Its mean is :math:`\Psi / (\nu - D - 1)`; with D = 1 it is the inverse gamma distribution with
    concentration :math:`\nu/2` and rate :math:`\Psi/2`.

    Args:
        degrees: :math:`\nu`, greater than D - 1 and finite.
        scale: :math:`\Psi`, ``(*B, D, D)``, positive definite.

    Raises:
        TypeError: If ``degrees`` is not a number, or ``scale`` not a floating-point tensor.
        ValueError: If ``degrees`` is out of range, or (with ``validate_args``) ``scale`` is not
            symmetric and positive definite.

    Example:
        >>> InverseWishart(5.0, torch.eye(2)).log_prob(torch.eye(2))
        tensor(-5.3228)
    """

    _validate_args = PyroValidation()
    has_rsample = True

    def __init__(self, degrees: float, scale: Tensor, validate_args: bool | None = None) -> None:
        check_number("degrees", degrees)
        check_floats("scale", scale)
        dim = scale.size(-1)
        check_trailing("scale", scale, (dim, dim), "(D, D)")
        if not dim - 1 < degrees < math.inf:
            raise ValueError(
                f"degrees must be above D - 1 = {dim - 1} and finite; got {degrees}. D + 1 is a "
                "weak prior."
            )
        self.degrees, self.scale = float(degrees), scale
        super().__init__(scale.shape[:-2], scale.shape[-2:], validate_args=validate_args)
        if self._validate_args and not bool(constraints.positive_definite.check(scale).all()):
            text = "scale must hold symmetric positive definite matrices, and one is not"
            raise ValueError(f"{text}. Add a little to its diagonal.")

    @property
    def support(self) -> constraints.Constraint:
        """Support: covariance matrices, with coordinates in units of the scale."""
        return _covariances(self.scale.diagonal(dim1=-2, dim2=-1).sqrt())

    @property
    def mean(self) -> Tensor:
        """Mean of the matrix, infinite unless degrees exceed D + 1."""
        spare = self.degrees - self.scale.size(-1) - 1
        return self.scale / spare if spare > 0 else torch.full_like(self.scale, torch.inf)

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> InverseWishart:
        """Expand to a larger batch."""
        shape = torch.Size(batch_shape) + self.event_shape
        return InverseWishart(self.degrees, self.scale.expand(shape), validate_args=False)

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Sample matrices ``(*S, *B, D, D)``, by Bartlett's decomposition."""
        shape = torch.Size(sample_shape) + self.batch_shape
        degrees = self.scale.new_full(shape, self.degrees)
        return _square(sample_root(degrees, self.scale.expand(*shape, *self.event_shape)))

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-density ``(*B)`` of covariance matrices."""
        if self._validate_args:
            self._validate_sample(value)
        dim, degrees = self.scale.size(-1), self.degrees
        root = torch.linalg.cholesky(value)
        factor = torch.linalg.cholesky(self.scale)
        trace = torch.linalg.solve_triangular(root, factor, upper=False).pow(2).sum((-2, -1))
        half = 0.5 * degrees
        norm = half * log_det(factor) - half * dim * math.log(2)
        norm = norm - torch.special.multigammaln(value.new_tensor(half), dim)
        return norm - 0.5 * (degrees + dim + 1) * log_det(root) - 0.5 * trace


class FlatCovariance(OwnChecks):
    r"""Distribution of covariance matrices whose density is flat between two scales.

    .. math:: p(\Sigma) \propto \exp(-\mathrm{tr}(B \Sigma^{-1}) - \mathrm{tr}(\Sigma M^{-1}))

    It is a Wishart distribution with D + 1 degrees (Chung and others, 2015, Weakly informative
    prior for point estimation of covariance matrices), tempered at small matrices; with D = 1 it
    is :class:`FlatVariance`. The constant is a product of those of its D variances: with B / M
    below 0.02 / D its logarithm is known to 0.05.

    Args:
        lower: Diagonal of B, ``(*B, D)``.
        upper: Diagonal of M, ``(*B, D)``.

    Example:
        >>> from pyrohmm.distributions.units import FlatCovariance
        >>> ends = torch.tensor([1e-3, 1e-3]), torch.tensor([5.0, 5.0])
        >>> FlatCovariance(*ends).log_prob(torch.eye(2)).round(decimals=2)
        tensor(-5.6800)
    """

    def __init__(self, lower: Tensor, upper: Tensor) -> None:
        self.lower, self.upper = lower, upper
        shape, dim = lower.shape, lower.size(-1)
        super().__init__(shape[:-1], torch.Size([dim, dim]), validate_args=False)

    @property
    def support(self) -> constraints.Constraint:
        """Support: covariance matrices, coordinates in units of a fifth of the large scale by D."""
        return _covariances((self.upper / (5 * self.upper.size(-1))).sqrt())

    def expand(self, batch_shape: Any, _instance: Any = None) -> FlatCovariance:
        """Expand to a larger batch."""
        shape = (*batch_shape, self.lower.size(-1))
        return FlatCovariance(self.lower.expand(shape), self.upper.expand(shape))

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Sample by rejection from a Wishart distribution of the large scale."""
        shape, dim = torch.Size(sample_shape) + self.batch_shape, self.lower.size(-1)
        root, wanted = self.upper.new_zeros((*shape, dim, dim)), True
        scale = (self.upper / 2).sqrt().unsqueeze(-1)
        half = (dim + 1 - torch.arange(dim).to(root)) / 2
        while wanted:
            chi = (2 * torch._standard_gamma(half.expand((*shape, dim)))).sqrt()
            new = scale * (torch.randn_like(root).tril(-1) + chi.diag_embed())
            accepted = self._small(new).exp() > torch.rand_like(chi[..., 0])
            fresh = (root[..., 0, 0] == 0) & accepted
            root = torch.where(fresh[..., None, None], new, root)
            wanted = bool((root[..., 0, 0] == 0).any())
        return _square(root)

    def _small(self, root: Tensor) -> Tensor:
        """Log-density term of the lower scale, given Cholesky factors of the matrices."""
        lower = self.lower.sqrt().diag_embed().expand(root.shape)
        inside = torch.linalg.solve_triangular(root, lower, upper=False)
        return -inside.square().sum((-2, -1))

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-density ``(*B)`` of covariance matrices."""
        root, dim = torch.linalg.cholesky(value), self.lower.size(-1)
        ratio = 2 * (self.lower / self.upper).sqrt()
        norm = (ratio * torch.special.modified_bessel_k1(ratio)).log().sum(-1)
        norm = norm + (dim + 1) / 2 * self.upper.log().sum(-1)
        norm = norm + torch.special.multigammaln(value.new_tensor((dim + 1) / 2), dim)
        tail = (value.diagonal(dim1=-2, dim2=-1) / self.upper).sum(-1)
        return self._small(root) - tail - norm


def _square(root: Tensor) -> Tensor:
    """M M', symmetric to the last bit, which a product of matrices is only up to rounding."""
    square = root @ root.mT
    return (square + square.mT) / 2


def sample_root(degrees: Tensor, scale: Tensor) -> Tensor:
    """Sample square roots M of inverse-Wishart matrices M M', of degrees ``(*B)`` and scales."""
    half = (degrees.unsqueeze(-1) - torch.arange(scale.size(-1), device=scale.device)) / 2
    chi = (2 * torch._standard_gamma(half)).sqrt()
    lower = torch.randn_like(scale).tril(-1) + torch.diag_embed(chi)
    return torch.linalg.solve_triangular(lower, torch.linalg.cholesky(scale).mT, upper=False).mT


def flat_step(old: Tensor, upper: Tensor, count: Tensor, about: Tensor) -> Tensor:
    """One MCMC step for covariances under a flat prior, given means.

    With enough observations a Metropolis step, whose inverse Wishart proposals lack the tail of the
    prior; else a random walk, which is symmetric under all linear maps of the components.

    Args:
        old: ``(*B, D, D)``.
        upper: ``(*B, D)``, of the prior.
        count: ``(*B)``, numbers of observations.
        about: ``(*B, D, D)``, squares about the means, and twice the small scale.
    """
    old, upper, dim = old.double(), upper.double(), old.size(-1)
    degrees = count - dim - 1
    few = degrees < dim + ENOUGH

    def tail(root: Tensor) -> Tensor:
        return -(root.square().sum(-1) / upper).sum(-1)

    def chosen(ratio: Tensor, new: Tensor, old: Tensor) -> Tensor:
        return torch.where((ratio.exp() > torch.rand_like(ratio))[..., None, None], new, old)

    root, first = sample_root(degrees.clamp(min=dim + ENOUGH), about), torch.linalg.cholesky(old)
    new = chosen(tail(root) - tail(first), root @ root.mT, old)
    if not bool(few.any()):
        return new
    root, factor = first, torch.linalg.cholesky(about)

    def log_density(root: Tensor) -> Tensor:  # with respect to the measure of the walk
        inside = torch.linalg.solve(root, factor).square().sum((-2, -1)) / 2
        return (dim + 1 - count) * torch.linalg.slogdet(root)[1] - inside + tail(root)

    for _ in range(STEPS):
        noise = torch.randn_like(root) / (2 * math.sqrt(dim))
        moved = root @ torch.linalg.matrix_exp((noise + noise.mT) / 2)
        root = chosen(log_density(moved) - log_density(root), moved, root)
    return torch.where(few[..., None, None], root @ root.mT, new)


def lift(matrix: Tensor, floor: Tensor) -> tuple[Tensor, Tensor]:
    """Covariance matrices with eigenvalues clamped to a floor, and a mask of those changed.

    Args:
        matrix: ``(*, D, D)``; where it is NaN it stays.
        floor: ``(*, D)``, least variance of each component.
    """
    unit = floor.sqrt()
    scale = unit.unsqueeze(-1) * unit.unsqueeze(-2)
    inside = matrix / scale
    bad = ~inside.isfinite().all(-1).all(-1)
    eye = torch.eye(matrix.size(-1), dtype=matrix.dtype, device=matrix.device)
    above = torch.linalg.cholesky_ex(inside - eye).info == 0  # in a tenth of the time of eigh
    if exceeds(above.all().byte(), 0):
        return matrix, ~above
    values, vectors = torch.linalg.eigh(torch.where(bad[..., None, None], eye, inside))
    low = (values < 1).any(-1) & ~bad
    lifted = (vectors * values.clamp(min=1).unsqueeze(-2)) @ vectors.mT * scale
    return torch.where(low[..., None, None], lifted, matrix), low


class _VectorToCovariance(Transform):
    """Log-Cholesky parametrisation of covariance matrices, in given units."""

    bijective = True
    domain = constraints.real_vector
    codomain = constraints.positive_definite

    def __init__(self, unit: Tensor) -> None:
        super().__init__()
        self.unit = unit

    def _root(self, x: Tensor) -> Tensor:
        dim = (math.isqrt(8 * x.size(-1) + 1) - 1) // 2
        rows, columns = torch.tril_indices(dim, dim, device=x.device)
        lower = x.new_zeros((*x.shape[:-1], dim, dim))
        lower[..., rows, columns] = x
        return lower.tril(-1) + torch.diag_embed(lower.diagonal(dim1=-2, dim2=-1).exp())

    def _call(self, x: Tensor) -> Tensor:
        root = self._root(x) * self.unit.to(x).unsqueeze(-1)
        matrix = root @ root.mT
        rounding = 4 * root.size(-1) * torch.finfo(root.dtype).eps  # which could make it singular
        return matrix + torch.diag_embed(rounding * matrix.diagonal(dim1=-2, dim2=-1))

    def _inverse(self, y: Tensor) -> Tensor:
        root = torch.linalg.cholesky(y) / self.unit.to(y).unsqueeze(-1)
        rows, columns = torch.tril_indices(y.size(-1), y.size(-1), device=y.device)
        lower = root.tril(-1) + torch.diag_embed(root.diagonal(dim1=-2, dim2=-1).log())
        return lower[..., rows, columns]

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        logs = self._root(x).diagonal(dim1=-2, dim2=-1).log()
        dim = logs.size(-1)
        powers = torch.arange(dim + 1, 1, -1, dtype=logs.dtype, device=logs.device)
        units = self.unit.to(x).log().expand(*self.unit.shape[:-1], dim).sum(-1)
        return dim * math.log(2) + (powers * logs).sum(-1) + (dim + 1) * units

    def forward_shape(self, shape: Any) -> torch.Size:
        dim = (math.isqrt(8 * shape[-1] + 1) - 1) // 2
        return torch.Size(shape[:-1]) + torch.Size([dim, dim])

    def inverse_shape(self, shape: Any) -> torch.Size:
        return torch.Size(shape[:-2]) + torch.Size([shape[-1] * (shape[-1] + 1) // 2])


def _covariances(unit: Tensor) -> Reparametrized:
    """Constraint of covariance matrices: log-Cholesky coordinates, in deviations ``(*B, D)``."""
    return Reparametrized(constraints.positive_definite, _VectorToCovariance(unit))


covariance_matrix = _covariances(torch.ones(1))


def log_det(root: Tensor) -> Tensor:
    """Log-determinant of a matrix, from its Cholesky factor."""
    return 2 * root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
