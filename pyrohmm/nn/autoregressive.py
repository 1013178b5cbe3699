"""Emission families whose observations depend on those before: vectors and symbols."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, ClassVar

import torch
from pyro.distributions import Categorical, Dirichlet, MultivariateNormal
from pyro.distributions.torch_distribution import TorchDistribution
from pyro.nn import PyroModule, PyroSample
from torch import Tensor
from torch.distributions import constraints

from .._checks import check_number, check_size
from ..distributions.context_tables import AutoregressiveCategorical
from ..distributions.inverse_wishart import covariance_matrix
from ..distributions.units import InUnits
from ..distributions.vector_autoregression import AutoregressiveNormal
from ..ops.log_space import log
from ..ops.products import add_rows
from ..ops.products import weighted_sums
from .centred import like
from .closed_form import EmissionMStep, Maximum, Statistics, inside, row_mode, under
from .family import Emission, EmissionFamily, positive
from .normals import CovarianceEmission, floor_of

MOST = 10**10  # numbers in the table of a state, which would take 80 GB


def autoregressive_normal(
    dim: int,
    lags: int = 1,
    loc: float | Tensor | None = None,
    weight: float = 0.01,
    ridge: float = 0.01,
    degrees: float | None = None,
    scale: float | Tensor | None = None,
) -> EmissionFamily:
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
        >>> fit.values["module.emission.weights"].flatten().round(decimals=2)
        tensor([ 1.0800, -1.0000])
    """
    check_size("dim", dim)
    check_size("lags", lags)
    return partial(
        AutoregressiveNormalEmission, dim=dim, lags=lags, loc=loc, weight=weight, ridge=ridge,
        degrees=degrees, scale=scale,
    )  # fmt: skip


class AutoregressiveNormalEmission(CovarianceEmission):
    """Vectors that depend linearly on those before: see :func:`autoregressive_normal`."""

    in_time = True
    origin: Tensor
    initial: Any
    supports: ClassVar[dict[str, constraints.Constraint]] = {
        "covariance": covariance_matrix,
        "loc": constraints.real,
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
        self.weights = PyroSample(partial(_weights_prior))

    def _set_spread(self, variance: Tensor) -> float:
        self.origin = like(self.origin, self.prior_loc[0])
        self.initial.prior_loc = self.prior_loc.clone()
        means = float(len(self.prior_loc) * variance.log().sum()) / 2
        return super()._set_spread(variance) + self.initial._set_spread(variance) + means

    def _weights_prior(self) -> TorchDistribution:
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
        size = 1 + rest.size(-1)

        def products(rows: Tensor) -> Tensor:
            rows = torch.cat([torch.ones_like(rows[:, :1]), rows], -1)
            return (rows.unsqueeze(-1) * rows.unsqueeze(-2)).flatten(1)

        squares = weighted_sums(weights[:, ~first], rest, products, size * size)
        return under("initial.", start) | {"squares": squares.unflatten(-1, (size, size))}

    def m_step(self, statistics: Statistics) -> Maximum:
        """The mode of the matrix-normal-inverse-Wishart posterior: weighted least squares."""
        mode, notes = self.initial.m_step(inside(statistics, "initial."))
        mode = under("initial.", mode)
        squares, dim = statistics["squares"], self.dim
        slopes, prior, precision = self._least_squares(squares)
        if self.is_free("loc"):
            mode["loc"] = slopes[..., 0, :] + self.origin.double()
        if self.is_free("weights"):
            mode["weights"] = slopes[..., 1:, :].unflatten(-2, (self.lags, dim))
        if not self.is_free("covariance"):
            return mode, notes
        inner, cross = squares[..., :-dim, :-dim], squares[..., :-dim, -dim:]
        apart = slopes - prior
        across = slopes.mT @ cross
        scatter = squares[..., -dim:, -dim:] - across - across.mT + slopes.mT @ inner @ slopes
        scatter = scatter + apart.mT @ (precision.unsqueeze(-1) * apart)
        scatter = scatter.nan_to_num(0.0)  # of slopes without observations
        divisor = squares[..., 0, 0] + (precision > 0).sum(-1)
        number = squares[..., 0, 0].sum(1, keepdim=True)
        mean = squares[..., 0, -dim:].sum(1) / number
        total = squares.sum(1).diagonal(dim1=-2, dim2=-1)[..., -dim:] / number
        least = floor_of(total - mean**2, mean + self.origin.double(), self.prior_loc.dtype)
        mode["covariance"], more = self._covariance_mode(scatter, divisor, least)
        return mode, notes + more

    def _least_squares(self, squares: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Slopes ``(R, K, F, D)`` of 1 and context, their prior means, precisions ``(K, F)``."""
        dim, states = self.dim, len(self.prior_loc)
        size = 1 + self.lags * dim
        parts = {"loc": slice(0, 1), "weights": slice(1, size)}
        unit = self.scale.diagonal().double()
        precision = unit.new_full((states, size), self.weight)
        precision[:, 1:] = (self.ridge * unit).repeat(self.lags)
        prior = unit.new_zeros(states, size, dim)
        prior[:, 0] = self.prior_loc.double() - self.origin.double()
        slopes = prior.expand(len(squares), -1, -1, -1).clone()
        free = torch.zeros(size, dtype=torch.bool, device=unit.device)
        for name, part in parts.items():
            free[part] = self.is_free(name)
            if not self.has_prior(name):
                precision[:, part] = 0.0
        if not self.is_free("loc"):
            slopes[..., 0, :] = self.loc.double() - self.origin.double()
        if not self.is_free("weights"):
            slopes[..., 1:, :] = self.weights.double().flatten(-3, -2)
        if not bool(free.any()):
            return slopes, prior, precision
        inner = squares[..., :size, :size] + torch.diag_embed(precision)
        wanted = squares[..., :size, size:] + precision.unsqueeze(-1) * prior
        wanted = wanted[..., free, :] - inner[..., free, :][..., ~free] @ slopes[..., ~free, :]
        inner = inner[..., free, :][..., free]
        scale = inner.diagonal(dim1=-2, dim2=-1).sqrt()
        scale = torch.where(scale > 0, scale, 1.0).unsqueeze(-1)  # of a state without observations
        inverse = torch.linalg.pinv(inner / scale / scale.mT, hermitian=True)
        found = inverse @ (wanted / scale) / scale
        nothing = (squares[..., 0, 0] == 0) & (precision[:, free] == 0).any(-1)
        slopes[..., free, :] = found.masked_fill(nothing[..., None, None], torch.nan)
        return slopes, prior, precision


def autoregressive_categorical(
    num_symbols: int, lags: int = 1, concentration: float | Tensor = 1.0
) -> EmissionFamily:
    """Emission family of symbols 0 to V - 1 that depend on the last L symbols, with Dirichlet rows.

    Each state has a distribution for each of the ``V ** L`` contexts, numbered as in
    :class:`pyrohmm.distributions.AutoregressiveCategorical`. The first L symbols of a sequence have
    a distribution of their own in each state. A missing symbol may not be followed by observed
    ones: what is observed after a gap is another sequence.

    Sites: ``emission.initial`` ``(K, V)``, ``emission.probs`` ``(K, V**L, V)``.

    Args:
        num_symbols: V.
        lags: L, at least 1.
        concentration: Of the priors of all rows; a number, ``(V,)``, or for ``probs`` what
            broadcasts with ``(K, V**L, V)``; that of ``initial`` is its mean over contexts.

    Raises:
        TypeError: If ``num_symbols`` or ``lags`` is not an int.
        ValueError: If an argument is out of range.

    Example:
        >>> data = Sequences.from_list([[0, 1, 0, 1, 0, 1, 1]])
        >>> fit = fit_em(TabularHMM(1, autoregressive_categorical(2)), data)
        >>> fit.values["module.emission.probs"]
        tensor([[[0.0000, 1.0000],
                 [0.6667, 0.3333]]])
    """
    check_size("num_symbols", num_symbols)
    check_size("lags", lags)
    if num_symbols ** (lags + 1) > MOST:
        raise ValueError(
            f"lags must leave tables of at most {MOST:.0e} numbers a state, V ** (L + 1); got "
            f"{num_symbols} ** {lags + 1}. Take fewer lags, or fewer symbols."
        )
    return partial(
        AutoregressiveCategoricalEmission,
        num_symbols=num_symbols,
        lags=lags,
        concentration=concentration,
    )


class AutoregressiveCategoricalEmission(Emission):
    """Symbols that depend on those before: see :func:`autoregressive_categorical`."""

    in_time = True
    supports: ClassVar[dict[str, constraints.Constraint]] = {
        "initial": constraints.simplex,
        "probs": constraints.simplex,
    }

    def __init__(
        self,
        num_states: int,
        num_symbols: int,
        lags: int = 1,
        concentration: float | Tensor = 1.0,
    ) -> None:
        super().__init__()
        shape = (num_states, num_symbols**lags, num_symbols)
        self.register_buffer("concentration", positive("concentration", concentration, shape))
        self.initial = PyroSample(partial(_initial_prior))
        self.probs = PyroSample(partial(_probs_prior))

    def forward(self) -> TorchDistribution:
        """The distribution of a symbol given those before, batched over states."""
        return AutoregressiveCategorical(
            Categorical(logits=log(self.initial)), Categorical(logits=log(self.probs))
        )

    def statistics(
        self, values: Tensor, weights: Tensor, current: TorchDistribution | None
    ) -> Statistics:
        """Expected number of times each state emits each symbol first, and after each context.

        Args:
            values: ``(M, L+1)``: see :meth:`Autoregressive.windows`.
            weights: ``(R, M, K)``.
            current: Not used, but for how contexts are numbered.
        """
        _, contexts, size = self.concentration.shape
        with torch.no_grad():
            whole = self.forward() if current is None else current
        codes = whole.codes(values)
        counts = [add_rows(weight, codes, size + contexts * size).mT for weight in weights]
        first, rest = torch.stack(counts).split([size, contexts * size], -1)
        return {"initial": first, "probs": rest.unflatten(-1, (contexts, size))}

    def m_step(self, statistics: Statistics) -> Maximum:
        """Shares of the counts, with those of the priors."""
        prior = {"initial": self.concentration.mean(-2), "probs": self.concentration}
        mode = {
            name: row_mode(statistics[name], prior[name] if self.has_prior(name) else None)
            for name in prior
            if self.is_free(name)
        }
        return mode, []


def autoregressive_from(
    distribution: AutoregressiveNormal | AutoregressiveCategorical, initial: PyroModule
) -> Emission:
    """The emission module with the values of a distribution as points, without priors.

    Args:
        distribution: With parameters of batch shape ``(K,)``.
        initial: The module of its first observations.

    Raises:
        TypeError: If the first observations have no M-step in closed form.
        ValueError: If the distribution has a history or further batch dimensions.
    """
    if not distribution.num_first or len(distribution.batch_shape) > 1:
        raise ValueError(
            "emission has a history or parameters of some sequences; got batch shape "
            f"{tuple(distribution.batch_shape)}. Fit one of batch shape (K,), without a history."
        )
    if isinstance(distribution, AutoregressiveCategorical):
        tables = distribution.tables.probs
        table = AutoregressiveCategoricalEmission(len(tables), tables.size(-1), distribution.lags)
        table.set_points(initial=distribution.initial.probs, probs=tables)
        return table
    if not isinstance(initial, EmissionMStep):
        raise TypeError(
            "initial of the emission must have a closed M-step; got "
            f"{type(distribution.initial).__name__}. Fit a module of your own."
        )
    base = distribution.base
    states, dim = base.loc.shape
    module = AutoregressiveNormalEmission(states, dim, distribution.lags)
    module.set_points(covariance=base.covariance_matrix, loc=base.loc, weights=distribution.weights)
    module.origin, module.initial = distribution.origin.detach().clone(), initial
    return module


# Priors; functions that can be pickled, in a shell, for Pyro would rename them --------------------


def _weights_prior(emission: Any) -> TorchDistribution:
    return emission._weights_prior().to_event(3)


def _initial_prior(emission: Any) -> TorchDistribution:
    return Dirichlet(emission.concentration.mean(-2)).to_event(1)


def _probs_prior(emission: Any) -> TorchDistribution:
    return Dirichlet(emission.concentration).to_event(2)
