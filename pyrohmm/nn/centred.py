"""Bases of the normal families, whose default priors have the location and scale of the data."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from pyro.distributions import Normal
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor
from torch.distributions import constraints

from ..distributions.units import InUnits, InverseGamma
from .family import Emission, check_strengths, positive, spread

ROUNDING = 1e-14  # share of its mean below which a standard deviation is rounding


class CentredEmission(Emission):
    """An emission with means ``loc`` whose sums are taken about the buffer ``prior_loc``.

    Attributes:
        of_data: Whether the prior takes location and scale from the data of a fit.
    """

    prior_loc: Tensor
    dim: int
    of_data = False

    def set_points(self, **values: Tensor) -> None:
        """Make parameters points without priors; sums are then about the value of ``loc``."""
        super().set_points(**values)
        if "loc" in values:
            self.prior_loc.copy_(values["loc"].detach().expand(self.prior_loc.shape))
            self.of_data = False

    def scale_prior(self, moments: Tensor) -> float:
        r"""Give the prior the location and scale of data, unless hyperparameters were given.

        Args:
            moments: ``(3, D)`` or ``(3,)``, of the observations: see :func:`moments_of`.

        Returns:
            By how much minus the log joint density exceeds that of data, and of parameters, in
            units of the standard deviations s of the data: :math:`\log s_d` for each component
            known and each mean, and what the scales add. Zero if the prior stays.

        Raises:
            ValueError: If squares of the data leave the range of the dtype of the parameters.
        """
        if moments.shape[1:] != ((self.dim,) if self.dim else ()):
            return 0.0  # what builds the HMM explains it
        known, mean, variance = moments
        varies = variance.sqrt() > ROUNDING * mean.abs()  # not NaN either
        _check_range(variance[varies], self.prior_loc.dtype)
        if not self.of_data:
            return 0.0
        variance = torch.where(varies, variance, 1.0)
        self.prior_loc = like(self.prior_loc, mean.nan_to_num(0.0))
        numbers = known + self.prior_loc.numel() // max(self.dim, 1)
        return float((numbers * variance.log()).sum()) / 2 + self._set_spread(variance)

    def _set_spread(self, variance: Tensor) -> float:
        """Take the scale of the prior from the variance of each component; returns log-units."""
        raise NotImplementedError


class IndependentNormals(CentredEmission):
    """Normal components, independent given all else, with conjugate priors; any shape of means."""

    rate: Tensor
    spherical: bool
    supports: ClassVar[dict[str, constraints.Constraint]] = {
        "variance": constraints.positive,
        "loc": constraints.real,
    }

    def _add_normals(
        self,
        shape: tuple[int, ...],
        loc: float | Tensor | None,
        weight: float,
        concentration: float,
        rate: float | Tensor | None,
        spherical: bool,
    ) -> None:
        """Add means of ``shape``, and variances: one for each row of them if ``spherical``."""
        check_strengths(weight, concentration)
        self.weight, self.spherical = weight, spherical
        self.of_data = loc is None and rate is None
        self.register_buffer("prior_loc", spread("loc", 0.0 if loc is None else loc, shape))
        each = shape[:-1] if spherical else shape
        self.register_buffer("rate", positive("rate", 1.0 if rate is None else rate, each))
        self.register_buffer("shape", torch.full_like(self.rate, concentration))
        self.set_priors(
            variance=IndependentNormals._variance_prior, loc=IndependentNormals._loc_prior
        )

    def _set_spread(self, variance: Tensor) -> float:
        self.rate = like(self.rate, variance.mean() if self.spherical else variance)
        return float(self.rate.log().sum())

    def _wide(self) -> Tensor:
        variance = self.variance
        return variance.unsqueeze(-1) if self.spherical else variance

    def _variance_prior(self) -> TorchDistribution:
        return InverseGamma(self.shape, self.rate).to_event(self.rate.dim())

    def _loc_prior(self) -> TorchDistribution:
        unit = self.rate.sqrt()
        prior = Normal(self.prior_loc, (self._wide() / self.weight).sqrt())
        unit = unit.unsqueeze(-1) if self.spherical else unit
        return InUnits(prior, self.prior_loc, unit).to_event(self.prior_loc.dim())


def like(buffer: Tensor, values: Tensor) -> Tensor:
    """New numbers for a buffer: the old ones are still those of guides of earlier fits."""
    return values.to(buffer).expand(buffer.shape).clone()


def moments_of(values: Tensor) -> Tensor:
    """Number, mean and variance of each component of observations ``(M, *E)``, in float64.

    NaN is missing; a component of which nothing is known has a mean of NaN.
    """
    mean = values.double().nanmean(0)
    variance = (values.double() - mean).square().nanmean(0)
    return torch.stack([(~values.isnan()).sum(0).double(), mean, variance])


def merged(first: Tensor, second: Tensor) -> Tensor:
    """The moments of two sets of observations together (Chan, Golub and LeVeque, 1983)."""
    total = first[0] + second[0]
    share = second[0] / total
    apart = second[1] - first[1]
    mean = first[1] + share * apart
    variance = (1 - share) * first[2] + share * second[2] + share * (1 - share) * apart.square()
    both = torch.stack([total, mean, variance])
    return torch.where(first[0] == 0, second, torch.where(second[0] == 0, first, both))


def scale_prior(emission: Any, moments: Tensor) -> float:
    """:meth:`CentredEmission.scale_prior` of an emission that defines it; zero of others."""
    method = getattr(emission, "scale_prior", None)
    return 0.0 if method is None else method(moments)


def centre(part: Any) -> Tensor:
    """Origin of the moments, ``(D,)``: squares of numbers far from zero would cancel."""
    loc = part.prior_loc.double()
    return loc.reshape(-1, max(part.dim, 1)).mean(0)


def lift(matrix: Tensor, floor: Tensor) -> tuple[Tensor, Tensor]:
    """Raise eigenvalues, in units of the floor of each component, to at least one.

    Args:
        matrix: ``(*, D, D)``; where it is NaN it stays.
        floor: ``(*, D)``, least variance of each component.
    """
    unit = floor.sqrt()
    scale = unit.unsqueeze(-1) * unit.unsqueeze(-2)
    inside = matrix / scale
    bad = ~inside.isfinite().all(-1).all(-1)
    eye = torch.eye(matrix.size(-1), dtype=matrix.dtype, device=matrix.device)
    values, vectors = torch.linalg.eigh(torch.where(bad[..., None, None], eye, inside))
    low = (values < 1).any(-1) & ~bad
    lifted = (vectors * values.clamp(min=1).unsqueeze(-2)) @ vectors.mT * scale
    return torch.where(low[..., None, None], lifted, matrix), low


def _check_range(variance: Tensor, dtype: torch.dtype) -> None:
    """Raise unless variances, and shares of them, are far inside the range of ``dtype``."""
    limits = torch.finfo(dtype)
    bad = (variance < limits.tiny / limits.eps) | (variance > limits.max * limits.eps)
    if bool(bad.any()):
        raise ValueError(
            f"data has a standard deviation of {variance[bad][0].sqrt().item():.3g}, whose square "
            f"{dtype} does not hold. Change the unit of the data, or compute in float64: "
            "module.double(), and values of float64."
        )
