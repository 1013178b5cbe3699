"""Emission families of normal vectors with covariance matrices, alone or autoregressive.

The M-step is one weighted regression of vectors: on a constant, and on those before.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from pyro.distributions import MultivariateNormal, Normal
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor
from torch import distributions as torch_dist
from torch.distributions import constraints

from .._checks import check_positive_number
from .._sync import exceeds
from ..distributions.autoregressive import AutoregressiveNormal
from ..distributions.hard_zeros import is_tied
from ..distributions.observation import patterns
from ..distributions.units import (
    FlatCovariance,
    InUnits,
    InverseWishart,
    covariance_matrix,
    flat_step,
    lift,
    sample_root,
)
from ..ops.products import second_moments
from .closed_form import EmissionMStep, Maximum, Statistics, mode_of_part, sample_of_part, under
from .emissions import from_distribution
from .family import Emission, EmissionFamily, Number, check_strengths, family, filled
from .normals import LOWER, MEANS, UPPER, CentredEmission, floor_note, floor_of, like

HALF = 0.378  # deviation of the half of a normal sample that is nearest to its mean
MOST_ROWS, SUBSETS = 5000, 200  # of a regression by least trimmed squares
WEIGHTS = 1e4  # variance of the prior of weights beside a flat one, by variances within states
EXACT = 1e-7  # of a standard deviation, residuals that are rounding


class Slopes(NamedTuple):
    """Regression coefficients of D components on F regressors, the intercept first.

    Attributes:
        values: ``(R, K, F, D)``.
        prior: Their prior means, ``(K, F, D)``.
        precision: Of the prior, ``(K, F)``, in units of the covariance, or beside a flat prior of
            the variances within states.
    """

    values: Tensor
    prior: Tensor
    precision: Tensor


class CovarianceEmission(CentredEmission, emits=torch_dist.MultivariateNormal):
    r"""Emission family of normal vectors with a covariance matrix for each state.

    With hyperparameters the prior is conjugate:

    .. math:: \Sigma_k \sim \mathrm{InvWishart}(\nu, \Psi), \quad
              \mu_k \sim \mathrm{Normal}(m, \Sigma_k / w)

    Without any it is flat between two scales of the data, as that of :func:`normal`: estimates are
    those of maximum likelihood, but for a matrix that would become singular. With diagonal matrices
    S of variances within states and V of those of all data,

    .. math:: p(\Sigma_k) \propto \exp\Big(-\mathrm{tr}(S \Sigma_k^{-1}) / 10
              - \mathrm{tr}(V^{-1} \Sigma_k) / 5 D\Big), \quad
              \mu_k \sim \mathrm{Normal}(m, 100 V)

    Sites: ``emission.covariance`` ``(K, D, D)``, then ``emission.loc`` ``(K, D)``.

    Args:
        num_states: K.
        dim: D, at least 1.
        loc: m, a number or ``(D,)``; with neither m nor ``scale``, both are of the data, as in
            :func:`normal`.
        weight: w, how many observations the prior mean is worth; 0.01 if another is given.
        degrees: :math:`\nu`; if another is given D + 2, with which the prior mean of the covariance
            is :math:`\Psi`.
        scale: :math:`\Psi`, a number (times the identity) or ``(D, D)``; that of the data is
            diagonal, with the variance of each component.
        tied: Whether all the states have one matrix: see :func:`normal_tied`.
    """

    spread = "covariance"
    scale: Tensor
    lags = 0  # on how many vectors before it the mean depends
    supports: ClassVar = {"covariance": covariance_matrix, "loc": constraints.real}

    def __init__(
        self,
        num_states: int,
        dim: int,
        loc: Number | None = None,
        weight: float | None = None,
        degrees: float | None = None,
        scale: Number | None = None,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.of_data = loc is None and scale is None
        self.flat = self.of_data and weight is None and degrees is None
        weight = 0.01 if weight is None else weight
        check_strengths(weight, 1.0)
        self.dim, self.weight, self.tied = dim, weight, tied
        self.degrees = dim + 2.0 if degrees is None else float(degrees)
        means = filled("loc", 0.0 if loc is None else loc, (num_states, dim))
        self.register_buffer("prior_loc", means)
        matrix = torch.as_tensor(1.0 if scale is None else scale, dtype=means.dtype)
        matrix = matrix if matrix.dim() else matrix * torch.eye(dim)
        self.register_buffer("scale", filled("scale", matrix, (dim, dim)))
        InverseWishart(self.degrees, self.scale, validate_args=True)  # checks both
        self.register_buffer("upper", means.new_full((dim,), torch.inf))
        if self.flat:
            CovarianceEmission._set_spread(self, torch.ones(dim), torch.ones(dim))
        matrices = () if tied else (num_states,)
        self.add_parameters(covariance=(*matrices, dim, dim), loc=(num_states, dim))

    @classmethod
    def of(cls, distribution: Any, base: Any) -> Emission | None:
        """The module of a distribution: one covariance ``(D, D)`` for all states stays one."""
        tied = is_tied(base)
        module = cls(distribution.batch_shape[0], distribution.event_shape[0], tied=tied)
        covariance = base.covariance_matrix
        module.set_points(covariance=covariance[0] if tied else covariance, loc=base.loc)
        return module

    def _set_spread(self, variance: Tensor, within: Tensor) -> float:
        self.scale = like(self.scale, (LOWER * within if self.flat else variance).diag())
        if self.flat:
            self.upper = like(self.upper, UPPER * self.dim * variance)
        matrices = 1 if self.tied else len(self.prior_loc)
        return float(matrices * (self.dim + 1) * variance.log().sum()) / 2

    def covariance_prior(self) -> TorchDistribution:
        """Prior of the covariances: inverse Wishart, or flat."""
        batch = () if self.tied else (len(self.prior_loc),)
        if self.flat:
            return FlatCovariance(self.scale.diagonal(), self.upper).expand(batch)
        return InverseWishart(self.degrees, self.scale.expand(*batch, self.dim, self.dim))

    def loc_prior(self) -> TorchDistribution:
        """Normal prior of the means, given the covariances if conjugate."""
        if self.flat:
            variance = self._columns() / self._regressors()["loc"][1]
            unit = (self.upper / (UPPER * self.dim)).sqrt()
            return InUnits(Normal(self.prior_loc, variance.sqrt()), self.prior_loc, unit)
        prior = MultivariateNormal(self.prior_loc, self._wide(self.covariance) / self.weight)
        return InUnits(prior, self.prior_loc, self.scale.diagonal().sqrt())

    def _columns(self) -> Tensor:
        """Variances ``(D,)``: units of a flat prior of slopes, else the diagonal of the scale."""
        return self.upper / (UPPER * self.dim) if self.flat else self.scale.diagonal()

    def _wide(self, covariance: Tensor) -> Tensor:
        return covariance.unsqueeze(-3) if self.tied else covariance

    def forward(self) -> TorchDistribution:
        """The distribution of a vector, batched over states."""
        covariance = self._wide(self.covariance)  # read first: the prior of means depends on it
        return MultivariateNormal(self.loc, covariance)

    def augments(self, values: Tensor) -> bool:
        """Whether components of vectors are missing, which the sampler imputes."""
        return bool(values.isnan().any())

    def statistics(self, values: Tensor, weights: Tensor, current: Any) -> Statistics:
        """Weighted second moments of 1 and the centred vector, ``(R, K, 1 + D, 1 + D)``.

        Missing components are replaced by their conditional expectation and covariance (Dempster,
        Laird and Rubin, 1977); at the start, without a current emission, by means.
        """
        missing, about = values.isnan(), self.centre
        if not exceeds((~missing).all().byte(), 0):
            if current is not None:
                return {"squares": _completed(values, weights, current, about, self.imputes)}
            mean = values.double().nanmean(0).nan_to_num(0.0)
            values = torch.where(missing, mean, values.double())
        return {"squares": second_moments(weights, values, about)}

    def _mode_of_spread(self, statistics: Statistics, fit: Slopes) -> tuple[Tensor, list[str]]:
        """The mode of covariances, given the slopes of a regression, and remarks."""
        squares = statistics["squares"]
        dtype, has_prior = self.prior_loc.dtype, self.has_prior("covariance")
        scatter = self._pooled(self._residuals(squares, fit))
        weighs = 0 if self.flat else (fit.precision > 0).sum(-1)
        divisor = self._pooled(squares[..., 0, 0] + weighs)
        if has_prior and self.flat:
            unit = self.upper.double().sqrt()
            unit, divisor = unit * unit.unsqueeze(-1), divisor.unsqueeze(-1)
            values, vectors = torch.linalg.eigh((scatter + 2 * self.scale.double()) / unit)
            values = values.clamp(min=0.0)
            values = 2 * values / (divisor + (divisor.square() + 8 * values).sqrt())
            matrix = vectors * values.unsqueeze(-2) @ vectors.mT * unit
        else:
            if has_prior:
                scatter = scatter + self.scale.double()
                divisor = divisor + self.degrees + self.dim + 1
            matrix = scatter / divisor[..., None, None]
        # a matrix that is singular up to rounding has no inverse
        floor = 8 * torch.finfo(dtype).eps * matrix.diagonal(dim1=-2, dim2=-1)
        if not has_prior:
            least = self._floor(squares)
            least = least.reshape(len(least), *(1,) * (matrix.dim() - 3), -1)
            floor = torch.maximum(floor, least)
        covariance, low = lift(matrix, floor)
        if exceeds((~low).all().byte(), 0):
            return covariance, []
        singular = f"a covariance was numerically singular in {dtype}: components depend on others."
        return covariance, [singular if has_prior else floor_note("covariance")]

    def _whitened(self, covariance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Whitening map of the components, its inverse, and prior precisions of whitened slopes.

        They are in units of :meth:`_columns` beside a flat prior, else of the covariance.
        """
        unit = self._columns().double().sqrt()
        covariance = self._wide(covariance).double() / (unit * unit.unsqueeze(-1))
        ratio, vectors = torch.linalg.eigh(covariance)
        ratio = ratio.clamp(min=1e-15 * ratio.amax(-1, keepdim=True))
        root = ratio.sqrt().unsqueeze(-2)
        turn, back = vectors / unit.unsqueeze(-1) / root, (vectors * root).mT * unit
        return turn, back, ratio if self.flat else ratio.new_ones(1)

    def _given(self, fit: Slopes, current: Statistics) -> Slopes:
        for name, (rows, _) in self._regressors().items():
            if self.has_prior(name):
                fit.values[..., rows, :] = self._as_rows(name, current[name])
        return fit

    def _sample_spread(self, statistics: Statistics, fit: Slopes, current: Statistics) -> Tensor:
        """Covariances given slopes if the prior is flat, by an MCMC step; else of any slopes."""
        squares, scale = statistics["squares"], self.scale.double()
        parts = self._residuals(squares, fit), squares[..., 0, 0]
        scatter, count = map(self._pooled, parts)
        if self.flat:
            return flat_step(current["covariance"], self.upper, count, 2 * scale + scatter)
        root = sample_root(self.degrees + count, scale + scatter)
        return root @ root.mT

    def _pooled(self, sums: Tensor) -> Tensor:
        """Sum ``(R, K, ...)`` over states that share a covariance, to ``(R, [K,] ...)``."""
        return sums.sum(1) if self.tied else sums

    def _residuals(self, squares: Tensor, fit: Slopes) -> Tensor:
        """Residual scatter ``(R, K, D, D)``, with that of slopes about conjugate prior means."""
        slopes, prior, precision = fit
        eye = torch.eye(self.dim).to(slopes).expand(*slopes.shape[:2], -1, -1)
        columns, apart = torch.cat([-slopes, eye], -2), slopes - prior
        scatter = columns.mT @ squares @ columns
        if not self.flat:
            scatter = scatter + apart.mT @ (precision.unsqueeze(-1) * apart)
        return (scatter + scatter.mT).nan_to_num(0.0) / 2  # NaN of slopes without observations

    def _floor(self, squares: Tensor) -> Tensor:
        """Variance floor ``(R, D)`` without a prior, by moments pooled over states."""
        total, dim = squares.sum(1), self.dim
        mean = total[:, 0, -dim:] / total[:, :1, 0]
        spread = total.diagonal(dim1=-2, dim2=-1)[:, -dim:] / total[:, :1, 0] - mean**2
        return floor_of(spread, mean + self.centre, self.prior_loc.dtype)

    def _regression(self, fit: Slopes) -> dict[str, Tensor]:
        """Parameters of the mean from slopes by 1 and the vectors before."""
        return {"loc": fit.values[..., 0, :] + self.centre}

    def _regressors(self) -> dict[str, tuple[slice, Any]]:
        """Row slice of the slopes and prior precision of each parameter of the mean."""
        return {"loc": (slice(0, 1), 1 / MEANS if self.flat else self.weight)}

    def _as_rows(self, name: str, value: Tensor) -> Tensor:
        """Convert a parameter of the mean to rows of the slopes."""
        return (value.double() - self.centre).unsqueeze(-2)

    def _means(
        self, statistics: Statistics, covariance: Any = None, sampled: bool = False
    ) -> Slopes:
        """Least-squares slopes, or a sample; a flat prior's only beside a covariance."""
        squares, dim, states = statistics["squares"], self.dim, len(self.prior_loc)
        size = squares.size(-1) - dim
        eye = torch.eye(dim).to(squares)
        turn, back, ratio = eye, eye, squares.new_full((1,), 0.0 if self.flat else 1.0)
        if covariance is not None:
            turn, back, ratio = self._whitened(covariance)
        prior = squares.new_zeros(states, size, dim)
        prior[:, 0] = self.prior_loc.double() - self.centre
        precision = squares.new_zeros(states, size)
        slopes = prior.expand(len(squares), -1, -1, -1).clone()
        parts = []
        for name, (rows, strength) in self._regressors().items():
            if self.has_prior(name):
                precision[:, rows] = strength
            if self.is_free(name):
                parts.append(rows)
            else:
                slopes[..., rows, :] = self._as_rows(name, getattr(self, name))
        found = Slopes(slopes, prior, precision)
        if not parts:
            return found
        free = slice(parts[0].start, parts[-1].stop)
        weak = ratio.unsqueeze(-1) * precision[:, None, free]  # (R, K, D or 1, F)
        wanted = squares[..., :size, size:] - squares[..., :size, :size] @ slopes
        wanted = (wanted[..., free, :] @ turn).mT.unsqueeze(-1)
        inner = squares[..., None, free, free] + weak.diag_embed()
        nothing = (squares[..., 0, 0] == 0)[..., None] & (weak == 0).any(-1)
        apart = _solved(inner, wanted).masked_fill(nothing[..., None, None], torch.nan)
        apart = apart + _noise(inner, apart) if sampled else apart
        slopes[..., free, :] += apart.squeeze(-1).mT @ back
        return found


normal_full = family("normal_full", CovarianceEmission, dim=1)


def normal_tied(dim: int, *prior: Any, **named: Any) -> EmissionFamily:
    """Emission family of normal vectors with one covariance matrix ``(D, D)`` for all the states.

    Sites: ``emission.covariance`` ``(D, D)``, then ``emission.loc`` ``(K, D)``.

    Args:
        dim: D, at least 1.
        *prior: ``loc``, ``weight``, ``degrees`` and ``scale``, as of :func:`normal_full`.
        **named: The same by name.
    """
    return normal_full(dim, *prior, **{**named, "tied": True})


class AutoregressiveNormalEmission(CovarianceEmission, emits=AutoregressiveNormal):
    r"""Emission family of vectors that depend linearly on the L before: switching autoregression.

    .. math:: x_t | z_t = k \sim \mathrm{Normal}\Big(\mu_k + \sum_{l=1}^L (x_{t-l} - m) W_{kl},
              \; \Sigma_k\Big)

    With hyperparameters the prior is conjugate:

    .. math:: \Sigma_k \sim \mathrm{InvWishart}(\nu, \Psi), \quad
              \mu_k \sim \mathrm{Normal}(m, \Sigma_k / w), \quad
              W_{kli} \sim \mathrm{Normal}(0, \Sigma_k / (r \Psi_{ii}))

    Without any that of :math:`\Sigma` is as in :func:`normal_full`, where S are variances of
    residuals within states, at most about those in the narrowest: see :func:`residuals_within`.
    With U, variances within states of what is not a residual, and V, those of all data,

    .. math:: \mu_{kj} \sim \mathrm{Normal}(m_j, 100 U_j \max_i V_i / U_i), \quad
              W_{klij} \sim \mathrm{Normal}(0, 10^4 U_j / S_i)

    Vectors are rows: ``weights[k, l - 1, i, j]`` is by how much component i of the l-th vector
    before moves component j. The first L vectors of a sequence have a distribution of their own in
    each state, as of :func:`normal_full` with the same prior. Without ``loc`` and ``scale`` both
    are of the data, as there, and m is the origin of the regression as well.

    A vector that is missing, or a component of one, may not be followed by observed ones: what is
    observed after a gap is another sequence.

    Sites: ``emission.initial.covariance``, ``emission.covariance`` ``(K, D, D)``,
    ``emission.initial.loc``, ``emission.loc`` ``(K, D)``, ``emission.weights`` ``(K, L, D, D)``.

    Args:
        num_states: K.
        dim: D, at least 1.
        lags: L, at least 1.
        loc: m, a number or ``(D,)``.
        weight: w, how many observations the prior mean is worth; 0.01 if another is given.
        ridge: r, how many observations, each a standard deviation from the origin, weights of
            zero are worth; 0.01 if another is given.
        degrees: :math:`\nu`, D + 2 if another is given.
        scale: :math:`\Psi`, a number (times the identity) or ``(D, D)``.

    Raises:
        TypeError: If ``dim`` or ``lags`` is not an int.
        ValueError: If an argument is out of range.

    Example:
        >>> wave = torch.arange(40.0).sin().unsqueeze(-1)  # obeys x'' = 2 cos(1) x' - x
        >>> fit = fit_em(TabularHMM(1, autoregressive_normal(1, 2)), Sequences.from_list([wave]))
        >>> fit.parameters["module.emission.weights"].flatten().round(decimals=2)
        tensor([ 1.0800, -1.0000])
    """

    in_time = True
    origin: Tensor
    initial: Any
    supports: ClassVar = {**CovarianceEmission.supports, "weights": constraints.real}

    def __init__(
        self,
        num_states: int,
        dim: int,
        lags: int = 1,
        loc: Number | None = None,
        weight: float | None = None,
        ridge: float | None = None,
        degrees: float | None = None,
        scale: Number | None = None,
    ) -> None:
        weight = 0.01 if weight is None and ridge is not None else weight
        ridge = 0.01 if ridge is None else ridge
        check_positive_number("ridge", ridge, "0.01 is the default.")
        super().__init__(num_states, dim, loc, weight, degrees, scale)
        self.lags, self.ridge = lags, ridge
        self.initial = CovarianceEmission(num_states, dim, loc, weight, degrees, scale)
        self.register_buffer("origin", self.prior_loc[0].clone())
        self.add_parameters(weights=(num_states, lags, dim, dim))

    @classmethod
    def of(cls, distribution: Any, base: Any) -> Emission | None:
        """The module of a distribution without a history, and of its first observations."""
        initial = from_distribution(base.initial)
        if not isinstance(initial, EmissionMStep):
            got = type(base.initial).__name__
            raise TypeError(f"initial of the emission must have a closed M-step; got {got}.")
        noise = base.base
        module = cls(distribution.batch_shape[0], base.event_shape[0], base.lags)
        module.set_points(covariance=noise.covariance_matrix, loc=noise.loc, weights=base.weights)
        module.origin, module.initial = base.origin.detach().clone(), initial
        return module

    @property
    def centre(self) -> Tensor:
        """Origin of the regression, and of the sums."""
        return self.origin.double()

    def _set_spread(self, variance: Tensor, within: Tensor, residual: Any = None) -> float:
        self.origin = like(self.origin, self.prior_loc[0])
        self.initial.prior_loc = self.prior_loc.clone()
        means = float(len(self.prior_loc) * variance.log().sum()) / 2
        own = super()._set_spread(variance, within if residual is None else residual)
        return own + self.initial._set_spread(variance, within) + means

    def weights_prior(self) -> TorchDistribution:
        """Normal prior of the weights, given the covariances if conjugate."""
        unit = self._columns()
        ratio = (unit / unit.unsqueeze(-1)).sqrt()
        precision = self._regressors()["weights"][1][: self.dim].to(unit)[:, None, None]
        if self.flat:
            prior: Any = Normal(torch.zeros_like(ratio), (unit / precision[..., 0]).sqrt())
            prior = prior.expand((len(self.prior_loc), self.lags, self.dim, self.dim))
        else:
            spread = self.covariance[..., None, None, :, :] / precision  # (*, K, 1, D, D, D)
            spread = spread.expand(*spread.shape[:-4], self.lags, *spread.shape[-3:])
            prior = MultivariateNormal(torch.zeros_like(unit), spread)
        return InUnits(prior, torch.zeros_like(ratio), ratio)

    def _columns(self) -> Tensor:
        return self.initial.scale.diagonal() / LOWER if self.flat else self.scale.diagonal()

    def forward(self) -> TorchDistribution:
        """The distribution of a vector given those before, batched over states."""
        base: MultivariateNormal = super().forward()
        return AutoregressiveNormal(self.initial(), base, self.weights, self.origin)

    def statistics(self, values: Tensor, weights: Tensor, current: Any) -> Statistics:
        """Statistics of first vectors; second moments of 1, context and vector, about the origin.

        Args:
            values: ``(M, L+1, D)``: see :meth:`Autoregressive.windows`.
            weights: ``(R, M, K)``.
            current: Not used.
        """
        first = values[:, 0].isnan().any(-1)
        start = self.initial.statistics(values[first, -1], weights[:, first], None)
        rest = (values[~first] - self.origin).flip(1)  # the vector, then those before it
        squares = second_moments(weights[:, ~first], rest.roll(-1, 1).flatten(1), 0.0)
        return under("initial.", start) | {"squares": squares}

    def m_step(self, statistics: Statistics) -> Maximum:
        """M-step: modes of parameters of initial vectors, and of the regression on earlier ones."""
        first, notes = mode_of_part(self.initial, "initial.", statistics)
        mode, more = super().m_step(statistics)
        return first | mode, notes + more

    def sample_parameters(self, statistics: Statistics, current: Statistics) -> Statistics:
        """Sample the parameters of initial vectors, and of the regression on earlier ones."""
        first = sample_of_part(self.initial, "initial.", statistics, current)
        return first | super().sample_parameters(statistics, current)

    def _regression(self, fit: Slopes) -> dict[str, Tensor]:
        weights = fit.values[..., 1:, :].unflatten(-2, (self.lags, self.dim))
        return super()._regression(fit) | {"weights": weights}

    def _regressors(self) -> dict[str, tuple[slice, Any]]:
        own, found = self.ridge * self.scale.diagonal(), super()._regressors()
        if self.flat:
            share = (self._columns() / super()._columns()).min()
            own = self.scale.diagonal() / (LOWER * WEIGHTS)
            found = {"loc": (slice(0, 1), share / MEANS)}
        rows = slice(1, 1 + self.lags * self.dim)
        return found | {"weights": (rows, own.double().repeat(self.lags))}

    def _as_rows(self, name: str, value: Tensor) -> Tensor:
        own = name == "weights"
        return value.double().flatten(-3, -2) if own else super()._as_rows(name, value)


autoregressive_normal = family("autoregressive_normal", AutoregressiveNormalEmission, dim=1, lags=1)


# Least squares -----------------------------------------------------------------------------------


def _noise(inner: Tensor, like: Tensor) -> Tensor:
    """Sample normal vectors ``(*, F, 1)`` of mean zero, given precision matrices ``(*, F, F)``."""
    unit = inner.diagonal(dim1=-2, dim2=-1).sqrt().unsqueeze(-1)
    rounding = 1e-14 * torch.eye(inner.size(-1)).to(inner)  # which could make it singular
    root = torch.linalg.cholesky(inner / unit / unit.mT + rounding)
    return torch.linalg.solve_triangular(root.mT, torch.randn_like(like), upper=True) / unit


def _solved(inner: Tensor, wanted: Tensor) -> Tensor:
    """Minimum-norm solutions ``(*, F, 1)`` of positive semidefinite systems."""
    if inner.size(-1) == 1:
        return wanted / inner
    unit = inner.diagonal(dim1=-2, dim2=-1).sqrt()
    unit = torch.where(unit > 0, unit, 1.0).unsqueeze(-1)  # of a state without observations
    inverse = torch.linalg.pinv(inner / unit / unit.mT, hermitian=True)
    found = inverse @ (wanted / unit) / unit
    left = (wanted - inner @ found) / unit  # far from the origin it is not small
    return found + inverse @ left / unit


# Sums of products --------------------------------------------------------------------------------


def residuals_within(windows: Tensor, num_states: int) -> Tensor:
    """Robust residual deviations ``(D,)`` of an autoregression in the narrowest state.

    They are about those in the narrowest of states with n observations, or less, by least trimmed
    squares (Rousseeuw and Van Driessen, 2006, Computing LTS regression for large data sets): of
    regressions that begin at a few windows, successive or random, and go on with the n/2 that they
    fit best, that with the smallest residuals. Of components that repeat a value one window counts,
    and of many windows 5000. Infinite if there are too few; in float64.

    Args:
        windows: ``(M, D, L + 1)``, the last vector last.
        num_states: K; n is 100, or M / K if that is less.
    """
    windows = windows.double().cpu()
    windows = windows[~windows.flatten(1).isnan().any(-1)]
    generator = torch.Generator().manual_seed(0)
    found = []
    for values in windows[..., -1].mT:
        _, first = np.unique(values.numpy(), return_index=True)
        chosen = torch.as_tensor(first).sort().values
        chosen = chosen[:: len(chosen) // MOST_ROWS + 1]
        x, y = windows[chosen, :, :-1].flatten(1), values[chosen]
        rows, size = len(x), 1 + x.size(1)
        half = max(int(min(rows / num_states, 100) / 2), 2 * size)
        if rows < 2 * half:
            found.append(torch.tensor(torch.inf))
            continue
        x, y = x - x.mean(0), y - y.mean()
        x = torch.nn.functional.pad(x / x.std(0).clamp(min=1e-300), (1, 0), value=1.0)
        starts = torch.linspace(0, rows - size, SUBSETS).long()[:, None] + torch.arange(size)
        random = torch.rand((SUBSETS, rows), generator=generator).topk(size).indices
        nearest = torch.cat([starts, random])
        for _ in range(4):
            slopes = torch.linalg.lstsq(x[nearest], y[nearest].unsqueeze(-1)).solution
            squares = (y - (x @ slopes).squeeze(-1)).square()
            square, nearest = squares.topk(half, largest=False)
        best = square.sum(-1).min() / (half - size)
        found.append((best.sqrt() / HALF).maximum(EXACT * y.std()))
    return torch.stack(found).to(windows)


def _completed(
    values: Tensor, weights: Tensor, current: Any, about: Tensor, sampled: bool
) -> Tensor:
    """Weighted second moments, missing components imputed by expectation or by a sample."""
    dim, (restarts, _, states) = values.size(-1), weights.shape
    loc = current.loc.double() - about
    loc = loc.reshape(-1, *loc.shape[-2:]).expand(restarts, states, dim).unsqueeze(-2)
    matrix = current.covariance_matrix.double()
    matrix = matrix.reshape(-1, *matrix.shape[-3:]).expand(restarts, states, dim, dim)
    pad, total = torch.nn.functional.pad, matrix.new_zeros(())
    for pattern, here in patterns(values.isnan()):
        found, weight = values[here], weights[:, here]
        if not pattern.any():
            total = total + second_moments(weight, found, about)
            continue
        share = weight.double().mT.unsqueeze(-1)  # (R, K, m, 1)
        known = (~pattern).diag().double()
        absent = torch.eye(dim).to(known) - known
        # the regression of all components on those that are known
        slope = torch.linalg.solve(known @ matrix @ known + absent, known @ matrix)
        left = absent @ (matrix - matrix @ slope) @ absent
        whole = loc + (found.double() - about - loc).masked_fill(pattern, 0.0) @ slope
        if sampled:
            root = torch.linalg.cholesky(left + known) @ absent
            whole = whole + torch.randn_like(whole) @ root.mT @ absent
            left = torch.zeros_like(left)
        rows = pad(whole, (1, 0), value=1.0)
        extra = share.sum(-2, keepdim=True) * pad(left, (1, 0, 1, 0))
        total = total + (share * rows).mT @ rows + extra
    return total
