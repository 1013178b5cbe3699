"""Emission families of normal vectors with covariance matrices, alone or autoregressive.

The M-step is one weighted regression of vectors: on a constant, and on those before.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from pyro.distributions import MultivariateNormal, Normal
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor
from torch import distributions as torch_dist
from torch.distributions import constraints

from .._checks import check_number
from .._sync import exceeds
from ..distributions.constructors import is_tied
from ..distributions.units import (
    FlatCovariance,
    InUnits,
    InverseWishart,
    covariance_matrix,
    flat_step,
    lift,
    log_det,
    sample_root,
)
from ..distributions.vector_autoregression import AutoregressiveNormal
from ..ops.products import symmetric, upper_products, weighted_sums
from .closed_form import EmissionMStep, Maximum, Statistics, mode_of_part, sample_of_part, under
from .emissions import from_distribution
from .family import Emission, EmissionFamily, averaged, check_strengths, family, spread
from .normals import LOWER, MEANS, UPPER, CentredEmission, floor_note, floor_of, like

LeastSquares = tuple[Tensor, Tensor, Tensor]


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

    scale: Tensor
    lags = 0  # on how many vectors before it the mean depends
    supports: ClassVar[dict[str, constraints.Constraint]] = {
        "covariance": covariance_matrix,
        "loc": constraints.real,
    }

    def __init__(
        self,
        num_states: int,
        dim: int,
        loc: float | Tensor | None = None,
        weight: float | None = None,
        degrees: float | None = None,
        scale: float | Tensor | None = None,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.of_data = loc is None and scale is None
        self.flat = self.of_data and weight is None and degrees is None
        weight = 0.01 if weight is None else weight
        check_strengths(weight, 1.0)
        self.dim, self.weight, self.tied = dim, weight, tied
        self.degrees = dim + 2.0 if degrees is None else float(degrees)
        means = spread("loc", 0.0 if loc is None else loc, (num_states, dim))
        self.register_buffer("prior_loc", means)
        matrix = torch.as_tensor(1.0 if scale is None else scale, dtype=means.dtype)
        matrix = matrix if matrix.dim() else matrix * torch.eye(dim)
        self.register_buffer("scale", spread("scale", matrix, (dim, dim)))
        InverseWishart(self.degrees, self.scale, validate_args=True)  # checks both
        self.register_buffer("upper", means.new_full((dim,), torch.inf))
        if self.flat:
            self._set_spread(torch.ones(dim), torch.ones(dim))
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

    @classmethod
    def merged(cls, arguments: dict[str, Tensor], weights: Tensor) -> dict[str, Tensor] | None:
        """Mean and Cholesky factor of the covariance of the mixture."""
        loc, root = averaged(arguments["loc"], weights), arguments.get("scale_tril")
        if root is None:  # one for all states
            return {"loc": loc}
        away = arguments["loc"] - loc
        outer = away.unsqueeze(-1) * away.unsqueeze(-2)
        return {
            "loc": loc,
            "scale_tril": torch.linalg.cholesky(averaged(root @ root.mT + outer, weights)),
        }

    def _set_spread(self, variance: Tensor, within: Tensor) -> float:
        self.scale = like(self.scale, (LOWER * within if self.flat else variance).diag())
        if self.flat:
            self.upper = like(self.upper, UPPER * self.dim * variance)
        matrices = 1 if self.tied else len(self.prior_loc)
        return float(matrices * (self.dim + 1) * variance.log().sum()) / 2

    def covariance_prior(self) -> TorchDistribution:
        """Inverse Wishart matrices, or a flat prior."""
        batch = () if self.tied else (len(self.prior_loc),)
        if self.flat:
            return FlatCovariance(self.scale.diagonal(), self.upper).expand(batch)
        scale = self.scale.expand(*batch, self.dim, self.dim)
        return InverseWishart(self.degrees, scale)

    def loc_prior(self) -> TorchDistribution:
        """Normal means, given the covariances if conjugate."""
        if self.flat:
            unit = self.upper / (UPPER * self.dim)
            flat = Normal(self.prior_loc, (MEANS * unit).sqrt())
            return InUnits(flat, self.prior_loc, unit.sqrt())
        prior = MultivariateNormal(self.prior_loc, self._wide(self.covariance) / self.weight)
        return InUnits(prior, self.prior_loc, self.scale.diagonal().sqrt())

    def _wide(self, covariance: Tensor) -> Tensor:
        return covariance.unsqueeze(-3) if self.tied else covariance

    def forward(self) -> TorchDistribution:
        """The distribution of a vector, batched over states."""
        covariance = self._wide(self.covariance)
        return MultivariateNormal(self.loc, covariance)

    def augments(self, values: Tensor) -> bool:
        """Whether components of vectors are missing, which are sampled."""
        return bool(values.isnan().any())

    def statistics(
        self, values: Tensor, weights: Tensor, current: TorchDistribution | None
    ) -> Statistics:
        """Sums of products of 1 and the vector about the centre, ``(R, K, 1 + D, 1 + D)``.

        Missing components are replaced by their conditional expectation and covariance (Dempster,
        Laird and Rubin, 1977); at the start, without a current emission, by means.
        """
        missing = values.isnan()
        if not exceeds((~missing).all().byte(), 0):
            if current is not None:
                return {"squares": self._completed(values, weights, current)}
            mean = values.double().nanmean(0).nan_to_num(0.0)
            values = torch.where(missing, mean, values.double())
        return {"squares": _second_moments(values, weights, self.centre)}

    def _completed(self, values: Tensor, weights: Tensor, current: Any) -> Tensor:
        """:func:`_second_moments` with missing components as expected, or sampled."""
        dim, weights, about = values.size(-1), weights.double(), self.centre
        restarts, _, states = weights.shape
        values, loc = values.double() - about, current.loc.double() - about
        loc = loc.reshape(-1, *loc.shape[-2:]).expand(restarts, states, dim).unsqueeze(-2)
        matrix = current.covariance_matrix.double()
        matrix = matrix.reshape(-1, *matrix.shape[-3:]).expand(restarts, states, dim, dim)
        missing, pad = values.isnan(), torch.nn.functional.pad
        total = matrix.new_zeros(restarts, states, 1 + dim, 1 + dim)
        for pattern in missing.unique(dim=0):
            here = (missing == pattern).all(-1)
            share = weights[:, here].mT.unsqueeze(-1)  # (R, K, m, 1)
            known = (~pattern).diag().double()
            absent = torch.eye(dim).to(known) - known
            # the regression of all components on those that are known
            slope = torch.linalg.solve(known @ matrix @ known + absent, known @ matrix)
            left = absent @ (matrix - matrix @ slope) @ absent
            whole = loc + (values[here] - loc).masked_fill(pattern, 0.0) @ slope
            if self.imputes:
                root = torch.linalg.cholesky(left + known) @ absent
                whole = whole + torch.randn_like(whole) @ root.mT @ absent
                left = torch.zeros_like(left)
            rows = pad(whole, (1, 0), value=1.0)
            extra = share.sum(-2, keepdim=True) * pad(left, (1, 0, 1, 0))
            total += (share * rows).mT @ rows + extra
        return total

    def m_step(self, statistics: Statistics) -> Maximum:
        """The mode of the joint posterior of covariances and slopes: weighted least squares."""
        squares, notes = statistics["squares"], list[str]()
        fit = self._least_squares(squares)
        for _ in range(2 if self.flat else 1):  # of a weak prior of means two are enough
            if self.is_free("covariance"):
                covariance, notes = self._mode_of_covariance(squares, fit)
            else:
                covariance = self.covariance.double()
            if self.flat and self.has_prior("loc"):
                fit = self._with_prior(squares, fit, covariance)
        found = {"covariance": covariance} if self.is_free("covariance") else {}
        return self._regression(fit[0]) | found, notes

    def _mode_of_covariance(self, squares: Tensor, fit: LeastSquares) -> tuple[Tensor, list[str]]:
        """The mode of covariances, given the slopes of a regression, and remarks."""
        dtype, precision = self.prior_loc.dtype, fit[2]
        scatter = self._pooled(self._residuals(squares, fit))
        divisor = self._pooled(squares[..., 0, 0] + (precision > 0).sum(-1))
        has_prior = self.has_prior("covariance")
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
        singular = (
            f"a covariance was numerically singular in {dtype}: components are almost functions of "
            "each other. Drop some, or compute in float64."
        )
        return covariance, [singular if has_prior else floor_note("covariance")]

    def _with_prior(self, squares: Tensor, fit: LeastSquares, covariance: Tensor) -> LeastSquares:
        """Means with their prior beside a flat one, given covariances; and precisions of zero."""
        _, prior, precision = fit
        count, sums = squares[..., :1, :1], squares[..., 1:, :1]
        ratio = self._wide(covariance) / self._mean_variance() + count * torch.eye(self.dim).to(
            sums
        )
        apart = torch.linalg.solve(ratio, sums - count * prior.mT)
        return prior + apart.mT, prior, precision

    def _mean_variance(self) -> Tensor:
        """Variances of the prior of means beside a flat one."""
        return MEANS / (UPPER * self.dim) * self.upper.double()

    def sample_parameters(self, statistics: Statistics, current: Statistics) -> Statistics:
        """Covariances and slopes given sums of products."""
        samples, squares = {}, statistics["squares"]
        slopes, _, precision = fit = self._least_squares(squares)
        if self.has_prior("covariance"):
            scatter = self._pooled(self._residuals(squares, fit))
            if self.flat:
                covariance = self._sample_flat(squares, fit, scatter, current)
                samples, root = {"covariance": covariance}, torch.linalg.cholesky(covariance)
            else:
                degrees = self.degrees + self._pooled(squares[..., 0, 0])
                root = sample_root(degrees, self.scale.double() + scatter)
                samples = {"covariance": root @ root.mT}
        else:
            covariance = self.covariance.double()
            root = torch.linalg.cholesky(covariance)
        root = self._wide(root)
        if self.flat:
            if self.has_prior("loc"):
                slopes, _, _ = self._with_prior(squares, fit, covariance)
                inner = (1 / self._mean_variance()).diag()
                inner = inner + squares[..., :1, :1] * torch.cholesky_inverse(root)
                factor, noise = torch.linalg.cholesky(inner), torch.randn_like(slopes)
                noise = torch.linalg.solve_triangular(factor.mT, noise.mT, upper=True)
                samples |= self._regression(slopes + noise.mT)
            return samples
        free = (precision > 0).all(0)  # the rows of what has a prior
        size = precision.size(-1)
        inner = (squares[..., :size, :size] + torch.diag_embed(precision))[..., free, :][..., free]
        factor, noise = torch.linalg.cholesky(inner), torch.randn_like(slopes[..., free, :])
        noise = torch.linalg.solve_triangular(factor.mT, noise, upper=True) @ root.mT
        slopes[..., free, :] += noise
        return samples | {n: v for n, v in self._regression(slopes).items() if self.has_prior(n)}

    def _sample_flat(
        self, squares: Tensor, fit: LeastSquares, scatter: Tensor, current: Statistics
    ) -> Tensor:
        """Covariances under the flat prior: see :func:`.units.flat_step`."""
        count, scale, (slopes, prior, precision) = squares[..., 0, 0], self.scale.double(), fit
        has_mean = self.has_prior("loc")
        lost = (count > 0).to(count) if has_mean else torch.zeros_like(count)

        def log_means(matrix: Tensor) -> Tensor:
            spread = self._wide(matrix) / count.clamp(min=1e-12)[..., None, None]
            factor = torch.linalg.cholesky(spread + self._mean_variance().diag())
            apart = torch.linalg.solve_triangular(factor, (slopes - prior).mT, upper=False)
            means = log_det(factor) + apart.square().sum((-2, -1))
            return -self._pooled(torch.where(lost > 0, means, 0.0)) / 2

        given = (current["loc"].double() - self.centre).unsqueeze(-2) if has_mean else slopes
        about = scale + self._pooled(self._residuals(squares, (given, prior, precision)))
        total, count_of_all = scale + scatter, self._pooled(count)
        spare = count_of_all - self._pooled(lost)
        old = current["covariance"]
        return flat_step(old, self.upper, spare, total, log_means, count_of_all, about)

    def _pooled(self, sums: Tensor) -> Tensor:
        """Sums ``(R, [K,] ...)`` over states that share a covariance, of sums ``(R, K, ...)``."""
        return sums.sum(1) if self.tied else sums

    def _residuals(self, squares: Tensor, fit: LeastSquares) -> Tensor:
        """Squares of residuals, and of slopes about prior means, ``(R, K, D, D)``."""
        slopes, prior, precision = fit
        eye = torch.eye(self.dim).to(slopes).expand(*slopes.shape[:2], -1, -1)
        columns, apart = torch.cat([-slopes, eye], -2), slopes - prior
        scatter = columns.mT @ squares @ columns + apart.mT @ (precision.unsqueeze(-1) * apart)
        return scatter.nan_to_num(0.0)  # of slopes without observations

    def _floor(self, squares: Tensor) -> Tensor:
        """Least variances ``(R, D)`` without a prior, by moments of all the states."""
        total, dim = squares.sum(1), self.dim
        mean = total[:, 0, -dim:] / total[:, :1, 0]
        spread = total.diagonal(dim1=-2, dim2=-1)[:, -dim:] / total[:, :1, 0] - mean**2
        return floor_of(spread, mean + self.centre, self.prior_loc.dtype)

    def _regression(self, slopes: Tensor) -> dict[str, Tensor]:
        """Parameters of the mean from slopes ``(R, K, F, D)`` by 1 and the vectors before."""
        return {"loc": slopes[..., 0, :] + self.centre} if self.is_free("loc") else {}

    def _regressors(self) -> dict[str, tuple[slice, Any, Any]]:
        """Rows of the slopes by parameter of the mean, prior precision, and values if frozen."""
        value = None if self.is_free("loc") else (self.loc.double() - self.centre).unsqueeze(-2)
        return {"loc": (slice(0, 1), 0.0 if self.flat else self.weight, value)}

    def _least_squares(self, squares: Tensor) -> LeastSquares:
        """Slopes ``(R, K, F, D)`` of 1 and context, their prior means, precisions ``(K, F)``."""
        dim, states = self.dim, len(self.prior_loc)
        size = squares.size(-1) - dim
        prior = squares.new_zeros(states, size, dim)
        prior[:, 0] = self.prior_loc.double() - self.centre
        precision = squares.new_zeros(states, size)
        slopes = squares.new_zeros(len(squares), states, size, dim)
        parts = []
        for name, (rows, strength, value) in self._regressors().items():
            if self.has_prior(name):
                precision[:, rows] = strength
            if value is None:
                parts.append(rows)
            else:
                slopes[..., rows, :] = value
        if not parts:
            return slopes, prior, precision
        free = slice(parts[0].start, parts[-1].stop)
        inner = squares[..., :size, :size] + torch.diag_embed(precision)
        wanted = squares[..., :size, size:] + precision.unsqueeze(-1) * prior
        wanted = (wanted - inner @ slopes)[..., free, :]
        inner = inner[..., free, free]
        if inner.size(-1) == 1:
            slopes[..., free, :] = wanted / inner
            return slopes, prior, precision
        scale = inner.diagonal(dim1=-2, dim2=-1).sqrt()
        scale = torch.where(scale > 0, scale, 1.0).unsqueeze(-1)  # of a state without observations
        inverse = torch.linalg.pinv(inner / scale / scale.mT, hermitian=True)
        found = inverse @ (wanted / scale) / scale
        nothing = (squares[..., 0, 0] == 0) & (precision[:, free] == 0).any(-1)
        slopes[..., free, :] = found.masked_fill(nothing[..., None, None], torch.nan)
        return slopes, prior, precision


normal_full = family("normal_full", CovarianceEmission, dim=1)


def normal_tied(
    dim: int,
    loc: float | Tensor | None = None,
    weight: float | None = None,
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
        degrees: Of the inverse Wishart prior.
        scale: Of the inverse Wishart prior, a number (times the identity) or ``(D, D)``.
    """
    return normal_full(dim, loc, weight, degrees, scale, tied=True)


class AutoregressiveNormalEmission(CovarianceEmission, emits=AutoregressiveNormal):
    r"""Emission family of vectors that depend linearly on the L before: switching autoregression.

    .. math:: x_t | z_t = k &\sim \mathrm{Normal}\Big(\mu_k + \sum_{l=1}^L (x_{t-l} - m) W_{kl},
              \; \Sigma_k\Big), \qquad \Sigma_k \sim \mathrm{InvWishart}(\nu, \Psi) \\
              \mu_k &\sim \mathrm{Normal}(m, \Sigma_k / w), \qquad
              W_{kli} \sim \mathrm{Normal}(0, \Sigma_k / (r \Psi_{ii}))

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
        weight: w, how many observations the prior mean is worth.
        ridge: r, how many observations, each a standard deviation from the origin, weights of
            zero are worth.
        degrees: :math:`\nu`, D + 2 by default.
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
    supports: ClassVar[dict[str, constraints.Constraint]] = {
        **CovarianceEmission.supports,
        "weights": constraints.real,
    }

    def __init__(
        self,
        num_states: int,
        dim: int,
        lags: int = 1,
        loc: float | Tensor | None = None,
        weight: float = 0.01,
        ridge: float = 0.01,
        degrees: float | None = None,
        scale: float | Tensor | None = None,
    ) -> None:
        check_number("ridge", ridge)
        if not 0 < ridge < math.inf:
            raise ValueError(f"ridge must be positive and finite; got {ridge}.")
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
            raise TypeError(
                "initial of the emission must have a closed M-step; got "
                f"{type(base.initial).__name__}. Fit a module of your own."
            )
        noise = base.base
        module = cls(distribution.batch_shape[0], base.event_shape[0], base.lags)
        module.set_points(covariance=noise.covariance_matrix, loc=noise.loc, weights=base.weights)
        module.origin, module.initial = base.origin.detach().clone(), initial
        return module

    @property
    def centre(self) -> Tensor:
        """Origin of the regression, and of the sums."""
        return self.origin.double()

    def _set_spread(self, variance: Tensor, within: Tensor) -> float:
        self.origin = like(self.origin, self.prior_loc[0])
        self.initial.prior_loc = self.prior_loc.clone()
        means = float(len(self.prior_loc) * variance.log().sum()) / 2
        own = super()._set_spread(variance, within)
        return own + self.initial._set_spread(variance, within) + means

    def weights_prior(self) -> TorchDistribution:
        """Normal weights in units of the scales, given the covariances."""
        unit = self.scale.diagonal()
        precision = (self.ridge * unit)[:, None, None]
        spread = self.covariance[..., None, None, :, :] / precision  # (*, K, 1, D, D, D)
        spread = spread.expand(*spread.shape[:-4], self.lags, *spread.shape[-3:])
        prior = MultivariateNormal(torch.zeros_like(unit), spread)
        ratio = (unit / unit.unsqueeze(-1)).sqrt()
        return InUnits(prior, torch.zeros_like(ratio), ratio)

    def forward(self) -> TorchDistribution:
        """The distribution of a vector given those before, batched over states."""
        base: MultivariateNormal = super().forward()
        return AutoregressiveNormal(self.initial(), base, self.weights, self.origin)

    def statistics(
        self, values: Tensor, weights: Tensor, current: TorchDistribution | None
    ) -> Statistics:
        """Statistics of first vectors; second moments of 1, context and vector, about the origin.

        Args:
            values: ``(M, L+1, D)``: see :meth:`Autoregressive.windows`.
            weights: ``(R, M, K)``.
            current: Not used.
        """
        first = values[:, 0].isnan().any(-1)
        start = self.initial.statistics(values[first, -1], weights[:, first], None)
        rest = (values[~first] - self.origin).flip(1)  # the vector, then those before it
        rest = rest.roll(-1, 1).flatten(1)
        return under("initial.", start) | {
            "squares": _second_moments(rest, weights[:, ~first], 0.0)
        }

    def m_step(self, statistics: Statistics) -> Maximum:
        """The modes of the first vectors, and of the regression of the others."""
        first, notes = mode_of_part(self.initial, "initial.", statistics)
        mode, more = super().m_step(statistics)
        return first | mode, notes + more

    def sample_parameters(self, statistics: Statistics, current: Statistics) -> Statistics:
        """Sample of the parameters of the first vectors and of the regression of the others."""
        first = sample_of_part(self.initial, "initial.", statistics, current)
        return first | super().sample_parameters(statistics, current)

    def _regression(self, slopes: Tensor) -> dict[str, Tensor]:
        weights = slopes[..., 1:, :].unflatten(-2, (self.lags, self.dim))
        return super()._regression(slopes) | (
            {"weights": weights} if self.is_free("weights") else {}
        )

    def _regressors(self) -> dict[str, tuple[slice, Any, Any]]:
        precision = (self.ridge * self.scale.diagonal().double()).repeat(self.lags)
        value = None if self.is_free("weights") else self.weights.double().flatten(-3, -2)
        return super()._regressors() | {"weights": (slice(1, 1 + len(precision)), precision, value)}


autoregressive_normal = family("autoregressive_normal", AutoregressiveNormalEmission, dim=1, lags=1)


# Sums of products --------------------------------------------------------------------------------


def _second_moments(values: Tensor, weights: Tensor, about: Tensor | float) -> Tensor:
    """Sums of products of 1 and values ``(M, S)`` about an origin, ``(R, K, 1 + S, 1 + S)``."""
    size = values.size(-1) + 1

    def features(values: Tensor) -> Tensor:
        return upper_products(torch.cat([values.new_ones(len(values), 1), values - about], -1))

    return symmetric(weighted_sums(weights, values, features, size * (size + 1) // 2), size)
