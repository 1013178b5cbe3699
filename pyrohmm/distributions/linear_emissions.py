r"""Emissions whose log-densities in all states are one product of matrices.

The log-density of independent normal or Poisson components is linear in features of the
observation: log-likelihoods ``(N T, K)`` are the product of features ``(N T, F)`` and parameters
``(F, K)``, and gradients are transposed products. Vectors with covariance
matrices are whitened by a product for each state. None of this makes N T K D numbers.

A product rounds relative to its terms, which may be much larger than their sum: those of a normal
component are of the size of :math:`\mu^2 / \sigma^2`, the mean being counted from a centre of all
states. Where that is too large for the dtype the product is one in float64; where it is too large
for that also, the formula of the density is evaluated as it stands. Parameters
are in float64 always: there are few, and their gradients are differences of long sums.

Only distributions of torch and Pyro themselves are known, not classes that inherit from them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor
from torch import distributions as torch_dist

from .._checks import broadcast_shapes
from .._choices import threads_for
from .._precision import full_precision, with_gradient
from .._sync import exceeds, is_guessing
from .._transforms import transforming
from ..ops.products import product, squared_norms
from .hard_zeros import exact_log_prob

# Largest relative error of log-densities, by the dtype they are wanted in.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-9}
SMALL = 1 << 13  # numbers, below which the formula as it stands takes less time than a product
PASSES = 50  # over the values, to make features of them: a millisecond for 400,000 numbers
HALF_LOG_TAU = 0.5 * math.log(2 * math.pi)


def linear_log_prob(emission: Any, values: Tensor, mixed: bool = False) -> Tensor | None:
    """Log-density ``(*A, K)`` of ``values`` ``(*A, *E)`` in each of the K states.

    Args:
        emission: Of batch shape ``(*b, K)``, where b broadcasts with A from the right.
        values: Components that are NaN are missing, and integrated out.
        mixed: Whether emissions are the C components of mixtures in K states, of batch shape
            ``(*b, K, C)``; the result is ``(*A, K C)``.

    Returns:
        None if the emission is not of a family known here; or it has covariance matrices, and
        components are missing, values so few that its own ``log_prob`` is as fast, or so extreme
        that it alone is exact.
    """
    base, events = emission, 0
    while type(base) in (dist.Independent, torch_dist.Independent):
        base, events = base.base_dist, events + base.reinterpreted_batch_ndims
    if type(base) not in _FAMILIES:
        return None
    family, *names = _FAMILIES[type(base)]
    parameters: list[Tensor] = [*map(partial(getattr, base), names)]
    dtype = torch.promote_types(values.dtype, parameters[0].dtype)
    if dtype not in TOLERANCE or (family is _Vectors and events):
        return None
    if family is _Vectors:
        loc, root = parameters
        parameters = [loc, root.expand(*loc.shape, -1) if mixed or root.dim() == 2 else root]
    elif events == 0:
        values, *parameters = map(partial(torch.unsqueeze, dim=-1), (values, *parameters))
    elif events > 1:
        joined = partial(torch.flatten, start_dim=-events)
        values, *parameters = map(joined, (values, *parameters))
    if mixed:
        at = len(emission.batch_shape) - 2
        parameters = [part.flatten(at, at + 1) for part in parameters]
    values, *parameters = map(partial(torch.Tensor.to, dtype=dtype), (values, *parameters))
    with full_precision(values):
        return family(*parameters).log_prob(values)


def _precision(
    dtype: torch.dtype, dim: int, amplification: float, reach: float
) -> torch.dtype | None:
    """Least dtype in which a product is exact enough for ``dtype``; None if there is none.

    Args:
        dtype: Of the result.
        dim: D, the number of squares that are summed.
        amplification: Of rounding errors.
        reach: The largest number that is squared.
    """
    for wide in (dtype, torch.float64):
        limits = torch.finfo(wide)
        exact = amplification * limits.eps <= TOLERANCE[dtype]  # not if it is NaN
        if exact and reach < math.sqrt(0.01 * limits.max / dim):
            return wide
    return None


def _read(numbers: Sequence[Tensor], values: Tensor) -> list[float]:
    """Transfer error bounds to the host; while guessing, return zeros and test them later."""
    if not is_guessing(values.device):
        return torch.stack([*numbers]).tolist()  # waits for the device once
    limits = torch.finfo(values.dtype)
    most = TOLERANCE[values.dtype] / limits.eps, math.sqrt(0.01 * limits.max / values.size(-1))
    for number, bound in zip(numbers, most):
        exceeds(-number, -bound)  # not if it is NaN
    return [0.0] * len(numbers)


class _Components:
    """Emissions of independent components, with parameters ``(*b, K, D)``; dtype of values."""

    def __init__(self, *parameters: Tensor, dtype: torch.dtype = torch.float64) -> None:
        self.parameters, self.dtype = parameters, dtype

    def apart(self, values: Tensor, known: Tensor | None) -> Tensor:
        """Values ``(*A, D)`` as features count them; zeros if they are not ``known``."""
        return values

    formula: Any  # (values (*A, 1, D)) -> log-densities (*A, K, D), plainly; no NaN
    condition: Any  # (largest apart) -> error amplification and reach, for _precision
    terms: Any  # (apart, known) -> (*A, F) and (*b, K, F), whose product is the log-density

    def log_prob(self, values: Tensor, known: Tensor | None = None) -> Tensor:
        """Log-density ``(*A, K)`` of values ``(*A, D)``; those that are not ``known`` are zeros."""
        if transforming():
            missing = values.isnan()
            return self._as_it_stands(values.masked_fill(missing, 0.0), ~missing)
        first = self.parameters[0]
        few = max(values.numel() * first.size(-2), first.numel()) <= SMALL
        if few or not values.numel():
            whole = known is not None or not values.numel()
            whole = whole or exceeds(values.detach().amin(), -torch.inf)
            return self._as_it_stands(values, known) if whole else self._with_gaps(values)
        family = type(self)(*(part.double() for part in self.parameters), dtype=values.dtype)
        with threads_for(PASSES * values.numel()):
            apart = family.apart(values, known)
            with torch.no_grad():
                found = _read(family.condition(apart.abs().amax()), values)
        if known is None and any(map(math.isnan, found)):
            return self._with_gaps(values)
        wide = _precision(values.dtype, values.size(-1), *found)
        if wide is None:
            return self._as_it_stands(values, known)
        with threads_for(PASSES * values.numel()):
            apart = apart if wide == values.dtype else family.apart(values.to(wide), known)
            rows, columns = family.terms(apart, known)
        return product(rows, columns).to(values.dtype)

    def _with_gaps(self, values: Tensor) -> Tensor:
        missing = values.isnan()
        return self.log_prob(values.masked_fill(missing, 0.0), ~missing)

    def _as_it_stands(self, values: Tensor, known: Tensor | None) -> Tensor:
        scores = self.formula(values.unsqueeze(-2))
        scores = scores if known is None else torch.where(known.unsqueeze(-2), scores, 0.0)
        return scores.sum(-1) if values.size(-1) != 1 else scores.squeeze(-1)


class _Normal(_Components):
    """Normal components, with parameters ``loc`` and ``scale``."""

    @cached_property
    def precision(self) -> Tensor:
        """Reciprocal variances ``(*b, K, D)``."""
        return self.parameters[1].detach().pow(-2)

    @cached_property
    def centre(self) -> Tensor:
        """Precision-weighted mean of ``loc`` over states, ``(D,)``, of the values' dtype."""
        loc, weight = (x.flatten(0, -2) for x in (self.parameters[0].detach(), self.precision))
        return ((weight * loc).sum(0) / weight.sum(0)).to(self.dtype)

    @cached_property
    def table(self) -> tuple[Tensor, ...]:
        """As of :meth:`_table`, without a gradient."""
        loc, scale = (part.detach() for part in self.parameters)
        return self._table(loc, scale, self.precision)

    def _table(self, loc: Tensor, scale: Tensor, precision: Tensor) -> tuple[Tensor, ...]:
        """Three parameters of a product, and means from the centre, over scales and squared."""
        apart = loc - self.centre
        linear = apart * precision
        square = apart * linear
        constant = -HALF_LOG_TAU - torch.add(scale.log(), square, alpha=0.5)
        return -0.5 * precision, linear, constant, apart, square

    def apart(self, values: Tensor, known: Tensor | None) -> Tensor:
        values = values - self.centre
        return values if known is None else torch.where(known, values, 0.0)

    def formula(self, values: Tensor) -> Tensor:
        loc, scale = self.parameters
        apart = (values - loc) / scale
        return torch.addcmul(-HALF_LOG_TAU - scale.log(), apart, apart, value=-0.5)

    def condition(self, largest: Tensor) -> tuple[Tensor, Tensor]:
        return self.table[-1].mean(-1).amax(), largest / self.parameters[1].amin()

    def terms(self, apart: Tensor, known: Tensor | None) -> tuple[Tensor, Tensor]:
        def columns(loc: Tensor, scale: Tensor) -> Any:
            *table, shift, _ = self.table  # autograd would take three times as many kernels

            def gradient(weights: Tensor) -> tuple[Tensor, Tensor]:
                squares, values, count = weights.tensor_split((loc.size(-1), 2 * loc.size(-1)), -1)
                slope = torch.addcmul(values, shift, count, value=-1)
                spread = torch.addcmul(squares, shift, values + slope, value=-1)
                return slope * self.precision, (spread * self.precision - count) / scale

            return _joined(table, known), gradient

        def twin(loc: Tensor, scale: Tensor) -> Tensor:
            return _joined(self._table(loc, scale, scale.pow(-2))[:3], known)

        rows = torch.cat([apart.square(), apart, _ones(apart, known)], -1)
        return rows, with_gradient(columns, twin, *self.parameters)


class _Poisson(_Components):
    """Poisson components, with parameter ``rate``."""

    def formula(self, values: Tensor) -> Tensor:
        return exact_log_prob(dist.Poisson(*self.parameters, validate_args=False), values)

    def condition(self, largest: Tensor) -> tuple[Tensor, Tensor]:
        (rate,) = self.parameters
        size = (rate * (1 + rate.log().abs())).mean(-1).amax()  # NaN if a rate is zero
        return size, largest

    def terms(self, apart: Tensor, known: Tensor | None) -> tuple[Tensor, Tensor]:
        (rate,) = self.parameters
        of_values = (apart + 1).lgamma().sum(-1, keepdim=True)
        ones = rate.new_ones(1).expand(*rate.shape[:-1], 1)
        rows = torch.cat([apart, of_values, _ones(apart, known)], -1)
        return rows, _joined([rate.log(), -ones, -rate], known)


def _ones(values: Tensor, known: Tensor | None) -> Tensor:
    """The feature of constants: the mask of known components, or a one for all of them."""
    return values.new_ones(1).expand(*values.shape[:-1], 1) if known is None else known.to(values)


def _joined(parameters: Sequence[Tensor], known: Tensor | None) -> Tensor:
    """Concatenate parameters, of which the last are constants of components."""
    *others, constant = parameters
    constant = constant.sum(-1, keepdim=True) if known is None else constant
    return torch.cat([*others, constant], -1)


class _Vectors:
    """Multivariate normals: ``loc`` ``(*b, K, D)``, Cholesky factors ``(*b, K or 1, D, D)``."""

    def __init__(self, loc: Tensor, root: Tensor) -> None:
        self.loc, self.root = loc, root

    def log_prob(self, values: Tensor) -> Tensor | None:
        """Log-density ``(*A, K)`` of values ``(*A, D)``; None where the plain formula is needed."""
        shape = broadcast_shapes(values.unsqueeze(-2).shape, self.loc.shape)
        if shape.numel() <= SMALL or transforming():
            return None
        family = _Vectors(self.loc.double(), self.root.double())
        eye = torch.eye(self.root.size(-1), dtype=torch.double, device=self.root.device)
        inverse = torch.linalg.solve_triangular(family.root, eye, upper=False)
        with torch.no_grad(), threads_for(PASSES * values.numel()):
            centre = _Normal(family.loc, family.root.norm(dim=-1).expand_as(self.loc)).centre
            largest = values.abs().amax()
            found = _read(family._condition(largest, centre, inverse.abs()), values)
        dtype, dim = values.dtype, values.size(-1)
        wide = _precision(dtype, dim, *found)
        if wide is None:
            return None
        centre = centre.to(dtype)
        return _whitened(family.loc - centre, inverse, values.to(wide) - centre).to(dtype)

    def _condition(self, largest: Tensor, centre: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
        """Error amplification of whitening, which units of components do not change, and reach."""
        root, apart = self.root.abs(), (self.loc - centre).abs().unsqueeze(-1)
        size = largest + self.loc.abs().amax()
        reach = torch.stack([size * inverse.sum(-1).amax(), size, inverse.amax()]).amax()
        sums = (inverse @ root).sum(-1, keepdim=True)
        return (sums + inverse @ apart).amax(), reach


def _whitened(loc: Tensor, inverse: Tensor, values: Tensor) -> Tensor:
    """Normal log-densities by whitening, given the inverse of the Cholesky factors."""
    mean = (inverse @ loc.unsqueeze(-1)).squeeze(-1)  # (*b, K, D)
    constant = inverse.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    if inverse.size(-3) == 1:  # states that share a matrix whiten alike
        apart = product(values, inverse.squeeze(-3))
        return _Normal(mean, torch.ones_like(mean)).log_prob(apart) + _at_all(values, constant)
    # the triangle last, so that rows end with zeros
    columns = torch.cat([-mean.unsqueeze(-1), inverse.expand(*mean.shape, -1)], -1)
    rows = torch.nn.functional.pad(values, (1, 0), value=1.0)
    constant = constant - HALF_LOG_TAU * values.size(-1)
    return torch.add(_at_all(values, constant), squared_norms(rows, columns), alpha=-0.5)


def _at_all(values: Tensor, constant: Tensor) -> Tensor:
    """Broadcast ``constant`` ``(*b, K)`` to all values; its gradient is summed in float64."""
    return product(values.new_ones(1).expand(*values.shape[:-1], 1), constant.unsqueeze(-1))


_FAMILIES: dict[type, tuple[Any, ...]] = {
    kind: (family, *names)
    for room in (dist, torch_dist)
    for kind, family, *names in (
        (room.Normal, _Normal, "loc", "scale"),
        (room.Poisson, _Poisson, "rate"),
        (room.MultivariateNormal, _Vectors, "loc", "_unbroadcasted_scale_tril"),
    )
}
