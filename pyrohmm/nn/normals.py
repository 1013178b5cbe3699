"""Emission families of normal vectors: independent components, and covariance matrices.

Sums of squares are taken about a centre, and a variance without a prior never falls below a small
share of that of the data. A prior whose location and scale are not given takes those of the data
that it is fitted to, so that the unit of the data does not matter.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch
from pyro.distributions import MultivariateNormal, Normal
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor
from torch.distributions import constraints

from .._checks import check_size
from .._sync import exceeds
from ..distributions.inverse_wishart import InverseWishart, covariance_matrix
from ..distributions.units import InUnits
from ..ops.products import symmetric, upper_products, weighted_sums
from .centred import CentredEmission, IndependentNormals, centre, lift, like
from .closed_form import Maximum, Statistics
from .family import (
    EmissionFamily,
    check_strengths,
    moments,
    spread,
)

SMALLEST = 1e-12  # share of the data's variance that one without a prior never falls below


def normal(
    dim: int = 1,
    loc: float | Tensor | None = None,
    weight: float = 0.01,
    concentration: float = 2.0,
    rate: float | Tensor | None = None,
) -> EmissionFamily:
    r"""Emission family of vectors whose components are independent and normal in each state.

    The prior is conjugate and weak, and keeps the variance of a state with a single observation
    from shrinking to zero:

    .. math:: \sigma^2_{kd} \sim \mathrm{InvGamma}(a, b_d), \quad
              \mu_{kd} \sim \mathrm{Normal}(m_d, \sigma^2_{kd} / w)

    If neither m nor b is given they are mean and variance of the data of a fit, which sets them
    before its first step, so that the unit of the data does not matter; :func:`scale_priors` does
    the same for NUTS. Until then, and if one of them alone is given, m is 0 and b is 1.

    Sites: ``emission.variance`` ``(K, D)``, then ``emission.loc`` ``(K, D)``.

    Args:
        dim: D, the number of components of an observation, whose event shape is ``(D,)``. With
            zero, observations are scalars, of an empty event shape.
        loc: m, a number or ``(D,)``.
        weight: w, how many observations the prior mean is worth.
        concentration: a.
        rate: b, a number or ``(D,)``.

    Example:
        >>> data = Sequences.from_list([[[1e10], [3e10]]])
        >>> fit_em(TabularHMM(1, normal(1)), data).values["module.emission.loc"].item()
        20000000000.0
    """
    check_size("dim", dim, 0)
    return partial(
        NormalEmission, dim=dim, loc=loc, weight=weight, concentration=concentration, rate=rate
    )


def normal_spherical(
    dim: int,
    loc: float | Tensor | None = None,
    weight: float = 0.01,
    concentration: float = 2.0,
    rate: float | None = None,
) -> EmissionFamily:
    """Emission family of normal vectors with one variance for all the components of a state.

    Priors are those of :func:`normal`.

    Sites: ``emission.variance`` ``(K,)``, then ``emission.loc`` ``(K, D)``.

    Args:
        dim: D, at least 1.
        loc: Prior mean, a number or ``(D,)``; of the data by default, with ``rate``.
        weight: How many observations the prior mean is worth.
        concentration: Of the inverse gamma prior of the variance.
        rate: Of the inverse gamma prior of the variance; by default the mean over components of
            the variance of the data.
    """
    check_size("dim", dim)
    return partial(
        NormalEmission,
        dim=dim,
        loc=loc,
        weight=weight,
        concentration=concentration,
        rate=rate,
        spherical=True,
    )


def normal_full(
    dim: int,
    loc: float | Tensor | None = None,
    weight: float = 0.01,
    degrees: float | None = None,
    scale: float | Tensor | None = None,
) -> EmissionFamily:
    r"""Emission family of normal vectors with a covariance matrix for each state.

    .. math:: \Sigma_k \sim \mathrm{InvWishart}(\nu, \Psi), \quad
              \mu_k \sim \mathrm{Normal}(m, \Sigma_k / w)

    Sites: ``emission.covariance`` ``(K, D, D)``, then ``emission.loc`` ``(K, D)``.

    Args:
        dim: D, at least 1.
        loc: m, a number or ``(D,)``; with neither m nor ``scale``, both are of the data, as in
            :func:`normal`.
        weight: w, how many observations the prior mean is worth.
        degrees: :math:`\nu`, D + 2 by default, with which the prior mean of the covariance is
            :math:`\Psi`.
        scale: :math:`\Psi`, a number (times the identity) or ``(D, D)``; that of the data is
            diagonal, with the variance of each component.
    """
    check_size("dim", dim)
    return partial(
        CovarianceEmission, dim=dim, loc=loc, weight=weight, degrees=degrees, scale=scale
    )


def normal_tied(
    dim: int,
    loc: float | Tensor | None = None,
    weight: float = 0.01,
    degrees: float | None = None,
    scale: float | Tensor | None = None,
) -> EmissionFamily:
    """Emission family of normal vectors with one covariance matrix ``(D, D)`` for all the states.

    Priors are those of :func:`normal_full`.

    Sites: ``emission.covariance`` ``(D, D)``, then ``emission.loc`` ``(K, D)``.

    Args:
        dim: D, at least 1.
        loc: Prior mean, a number or ``(D,)``; of the data by default, with ``scale``.
        weight: How many observations the prior mean is worth.
        degrees: Of the inverse Wishart prior, D + 2 by default.
        scale: Of the inverse Wishart prior, a number (times the identity) or ``(D, D)``.
    """
    check_size("dim", dim)
    return partial(
        CovarianceEmission,
        dim=dim,
        loc=loc,
        weight=weight,
        degrees=degrees,
        scale=scale,
        tied=True,
    )


class NormalEmission(IndependentNormals):
    """Independent normal components with a conjugate prior: see :func:`normal`."""

    def __init__(
        self,
        num_states: int,
        dim: int,
        loc: float | Tensor | None = None,
        weight: float = 0.01,
        concentration: float = 2.0,
        rate: float | Tensor | None = None,
        spherical: bool = False,
    ) -> None:
        super().__init__()
        self.dim = dim
        shape = (num_states, dim) if dim else (num_states,)
        self._add_normals(shape, loc, weight, concentration, rate, spherical)

    def forward(self) -> TorchDistribution:
        """The distribution of an observation, batched over states."""
        variance = self._wide()  # read first: the prior of the mean depends on it
        components = Normal(self.loc, variance.sqrt())
        return components.to_event(1) if self.dim else components

    def statistics(
        self, values: Tensor, weights: Tensor, current: TorchDistribution | None
    ) -> Statistics:
        """Expected number of observations, their sums and sums of squares, about the centre."""
        values = values if self.dim else values.unsqueeze(-1)
        known, sums, squares = moments(values, weights, centre(self))
        return {"known": known.expand_as(sums), "sums": sums, "squares": squares}

    def m_step(self, statistics: Statistics) -> Maximum:
        """The mode of the normal-inverse-gamma posterior."""
        return normal_m_step(self, statistics, flat=not self.dim)


class CovarianceEmission(CentredEmission):
    """Normal vectors with covariance matrices: see :func:`normal_full`, :func:`normal_tied`."""

    scale: Tensor
    supports: ClassVar[dict[str, constraints.Constraint]] = {
        "covariance": covariance_matrix,
        "loc": constraints.real,
    }

    def __init__(
        self,
        num_states: int,
        dim: int,
        loc: float | Tensor | None = None,
        weight: float = 0.01,
        degrees: float | None = None,
        scale: float | Tensor | None = None,
        tied: bool = False,
    ) -> None:
        super().__init__()
        check_strengths(weight, 1.0)
        self.dim, self.weight, self.tied = dim, weight, tied
        self.of_data = loc is None and scale is None
        self.degrees = dim + 2.0 if degrees is None else float(degrees)
        means = spread("loc", 0.0 if loc is None else loc, (num_states, dim))
        self.register_buffer("prior_loc", means)
        matrix = torch.as_tensor(1.0 if scale is None else scale, dtype=means.dtype)
        if matrix.dim() == 0:
            matrix = matrix * torch.eye(dim)
        proper = matrix.shape == (dim, dim) and torch.equal(matrix, matrix.mT)
        if not proper or bool(torch.linalg.cholesky_ex(matrix)[1]):
            raise ValueError(
                f"scale must be a positive number or a positive definite matrix ({dim}, {dim}); "
                f"got {tuple(matrix.shape)}."
            )
        self.register_buffer("scale", matrix)
        InverseWishart(self.degrees, matrix)  # checks the degrees
        self.set_priors(
            covariance=CovarianceEmission._covariance_prior, loc=CovarianceEmission._loc_prior
        )

    def _set_spread(self, variance: Tensor) -> float:
        self.scale = like(self.scale, variance.diag())
        matrices = 1 if self.tied else len(self.prior_loc)
        return float(matrices * (self.dim + 1) * variance.log().sum()) / 2

    def _covariance_prior(self) -> TorchDistribution:
        batch = () if self.tied else (len(self.prior_loc),)
        scale = self.scale.expand(*batch, self.dim, self.dim)
        return InverseWishart(self.degrees, scale).to_event(len(batch))

    def _loc_prior(self) -> TorchDistribution:
        prior = MultivariateNormal(self.prior_loc, self._wide() / self.weight)
        return InUnits(prior, self.prior_loc, self.scale.diagonal().sqrt()).to_event(1)

    def _wide(self) -> Tensor:
        covariance = self.covariance
        return covariance.unsqueeze(-3) if self.tied else covariance

    def forward(self) -> TorchDistribution:
        """The distribution of a vector, batched over states."""
        covariance = self._wide()
        return MultivariateNormal(self.loc, covariance)

    def statistics(
        self, values: Tensor, weights: Tensor, current: TorchDistribution | None
    ) -> Statistics:
        """Expected number of observations, sum, and sum of outer products.

        Missing components are replaced by their conditional expectation and covariance (Dempster,
        Laird and Rubin, 1977); at the start, without a current emission, by means.
        """
        count = weights.sum(1, dtype=torch.float64)
        missing = values.isnan()
        if exceeds((~missing).all().byte(), 0):
            sums, squares = _second_moments(values, weights, centre(self))
        elif current is None:
            mean = values.double().nanmean(0).nan_to_num(0.0)
            filled = torch.where(missing, mean, values.double())
            return self.statistics(filled, weights, None)
        else:
            sums, squares = _completed(values, weights, current, centre(self))
        return {"count": count, "sums": sums, "squares": squares}

    def m_step(self, statistics: Statistics) -> Maximum:
        """The mode of the normal-inverse-Wishart posterior."""
        count, sums, squares = (statistics[name] for name in ("count", "sums", "squares"))
        mode: dict[str, Tensor] = {}
        notes: list[str] = []
        prior_loc = self.prior_loc.double() - centre(self)
        weight = self.weight if self.has_prior("loc") else 0.0
        if self.is_free("loc"):
            loc = (weight * prior_loc + sums) / (weight + count).unsqueeze(-1)
            mode["loc"] = loc + centre(self)
        else:
            loc = (self.loc.double() - centre(self)).expand_as(sums)
        if self.is_free("covariance"):
            cross = loc.unsqueeze(-1) * sums.unsqueeze(-2)
            outer = loc.unsqueeze(-1) * loc.unsqueeze(-2)
            scatter = squares - cross - cross.mT + count[..., None, None] * outer
            apart = loc - prior_loc
            scatter = scatter + weight * apart.unsqueeze(-1) * apart.unsqueeze(-2)
            scatter = scatter.nan_to_num(0.0)  # of a mean without observations
            divisor = count + (1.0 if weight else 0.0)
            if self.tied:
                scatter, divisor = scatter.sum(1), divisor.sum(1)
            total, mean = _of_all(count, sums, squares)
            least = floor_of(total - mean**2, mean + centre(self), self.prior_loc.dtype)
            mode["covariance"], notes = self._covariance_mode(scatter, divisor, least)
        return mode, notes

    def _covariance_mode(
        self, scatter: Tensor, divisor: Tensor, least: Tensor
    ) -> tuple[Tensor, list[str]]:
        """Mode of the covariances ``(R, [K,] D, D)``, and remarks.

        Args:
            scatter: Sums of outer products of residuals, of the shape of the mode.
            divisor: ``(R, [K])``, their number.
            least: ``(R, D)``, variances below which there is none without a prior.
        """
        if self.has_prior("covariance"):
            scatter = scatter + self.scale.double()
            divisor = divisor + self.degrees + self.dim + 1
        matrix = scatter / divisor[..., None, None]
        dtype = self.prior_loc.dtype
        # a matrix that is singular up to rounding has no inverse
        floor = 8 * torch.finfo(dtype).eps * matrix.diagonal(dim1=-2, dim2=-1)
        if not self.has_prior("covariance"):
            least = least.reshape(len(least), *(1,) * (matrix.dim() - 3), -1)
            floor = torch.maximum(floor, least)
        matrix, low = lift(matrix, floor)
        if exceeds((~low).all().byte(), 0):
            return matrix, []
        singular = (
            f"a covariance was numerically singular in {dtype}: components are almost functions of "
            "each other. Drop some, or compute in float64."
        )
        return matrix, [singular if self.has_prior("covariance") else _floor_note("covariance")]


# What M-steps share ------------------------------------------------------------------------------


def normal_m_step(
    part: Any, statistics: Statistics, flat: bool
) -> tuple[dict[str, Tensor], list[str]]:
    """The mode of ``loc`` and ``variance`` of independent normal components.

    Args:
        part: The module: its priors, and what of it is frozen.
        statistics: ``known``, ``sums`` and ``squares``, ``(R, K, ..., D)``.
        flat: Whether observations are scalars, so that D = 1 is to be dropped.
    """
    known, sums, squares = (statistics[name] for name in ("known", "sums", "squares"))
    if flat:
        known, sums, squares = (part.squeeze(-1) for part in (known, sums, squares))
    mode: dict[str, Tensor] = {}
    notes: list[str] = []
    middle = centre(part).squeeze(-1) if flat else centre(part)
    prior_loc = part.prior_loc.double() - middle
    weight = part.weight if part.has_prior("loc") else 0.0
    if part.is_free("loc"):
        loc = (weight * prior_loc + sums) / (weight + known)
        mode["loc"] = loc + middle
    else:
        loc = (part.loc.double() - middle).expand_as(sums)
    if part.is_free("variance"):
        scatter = squares - 2 * loc * sums + known * loc**2 + weight * (loc - prior_loc) ** 2
        scatter = scatter.nan_to_num(0.0)  # of a mean without observations
        count = known + (1.0 if weight else 0.0)
        if part.spherical:
            scatter, count = scatter.sum(-1), count.sum(-1)
        above, below = 0.5 * scatter.clamp(min=0.0), 0.5 * count
        if part.has_prior("variance"):
            above, below = above + part.rate.double(), below + part.shape.double() + 1
        variance = above / below
        if not part.has_prior("variance"):
            over = tuple(range(1, known.dim() - (0 if flat else 1)))  # all but restart, component
            mean = sums.sum(over) / known.sum(over)
            spread = squares.sum(over) / known.sum(over) - mean**2
            floor = floor_of(spread, mean + middle, part.prior_loc.dtype)
            if part.spherical:
                floor = floor.mean(-1)
            shape = (len(floor),) + (1,) * (variance.dim() - floor.dim()) + floor.shape[1:]
            held = torch.maximum(variance, floor.reshape(shape))  # NaN stays
            if not exceeds((~(held > variance)).all().byte(), 0):
                notes.append(_floor_note("variance"))
            variance = held
        mode["variance"] = variance
    return mode, notes


def floor_of(spread: Tensor, mean: Tensor, dtype: torch.dtype) -> Tensor:
    """The least variance without a prior: by that of the data, and by the rounding of ``dtype``."""
    square = mean.nan_to_num(0.0) ** 2
    spread = spread.nan_to_num(0.0)
    square = torch.where((square == 0) & (spread <= 0), 1.0, square)  # all data are zero
    return torch.maximum(SMALLEST * spread, torch.finfo(dtype).eps ** 2 * square)


def _of_all(count: Tensor, sums: Tensor, squares: Tensor) -> tuple[Tensor, Tensor]:
    """Means ``(R, D)`` of squares and of values, from sums ``(R, K, D[, D])`` of the states."""
    number = count.sum(1, keepdim=True)
    return squares.sum(1).diagonal(dim1=-2, dim2=-1) / number, sums.sum(1) / number


def _floor_note(name: str) -> str:
    return (
        f"a {name} was held at its floor, {SMALLEST:g} of that of the data: a state emits a single "
        "value. A prior, or fewer states, would prevent it."
    )


def _second_moments(values: Tensor, weights: Tensor, about: Tensor) -> tuple[Tensor, Tensor]:
    """Sums and sums of outer products, ``(R, K, D)`` and ``(R, K, D, D)``."""
    size = values.size(-1) + 1

    def features(values: Tensor) -> Tensor:
        return upper_products(torch.cat([values - about, values.new_ones(len(values), 1)], -1))

    sums = symmetric(weighted_sums(weights, values, features, size * (size + 1) // 2), size)
    return sums[..., :-1, -1], sums[..., :-1, :-1]


def _completed(
    values: Tensor, weights: Tensor, current: Any, about: Tensor
) -> tuple[Tensor, Tensor]:
    """Sums and sums of outer products ``(R, K, D[, D])``, missing components as expected."""
    dim, weights = values.size(-1), weights.double()
    restarts, _, states = weights.shape
    values, loc = values.double() - about, current.loc.double() - about
    loc = loc.reshape(-1, *loc.shape[-2:]).expand(restarts, states, dim)
    matrix = current.covariance_matrix.double()
    matrix = matrix.reshape(-1, *matrix.shape[-3:]).expand(restarts, states, dim, dim)
    missing = values.isnan()
    sums, squares = torch.zeros_like(loc), torch.zeros_like(matrix)
    for pattern in missing.unique(dim=0):
        here = (missing == pattern).all(-1)
        share, seen = weights[:, here], values[here]  # (R, m, K), (m, D)
        known, absent = (~pattern).nonzero().squeeze(-1), pattern.nonzero().squeeze(-1)
        whole = seen.nan_to_num(0.0).expand(restarts, states, -1, dim).clone()  # (R, K, m, D)
        extra = torch.zeros_like(matrix)
        if len(absent):
            inner = matrix[..., known.unsqueeze(-1), known]
            across = matrix[..., absent.unsqueeze(-1), known]
            slope = torch.linalg.solve(inner, across.mT).mT if len(known) else across
            residual = seen[:, known] - loc[..., known].unsqueeze(-2)
            whole[..., absent] = loc[..., absent].unsqueeze(-2) + residual @ slope.mT
            left = matrix[..., absent.unsqueeze(-1), absent] - slope @ across.mT
            extra[..., absent.unsqueeze(-1), absent] = left
        weighted = share.mT.unsqueeze(-1) * whole
        sums = sums + weighted.sum(-2)
        squares = squares + weighted.mT @ whole + share.sum(1)[..., None, None] * extra
    return sums, squares
