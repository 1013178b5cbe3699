r"""Unconstrained coordinates in which posteriors are near to normal, and their metric.

Hamiltonian trajectories take long steps where the density is that of a normal distribution in all
directions alike: coordinates are chosen for its tails, the metric for its covariance matrix.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributions import biject_to, constraints
from torch.distributions.transforms import IndependentTransform, Transform
from torch.nn.functional import pad

WIDEST = 128  # coordinates, for more of which the metric is diagonal


class ProbitSticks(Transform):
    r"""Breaks a stick, of whose rest entry k takes the share :math:`\Phi(x_k)`.

    Where counts are few the posterior of probabilities reaches down to zero. The tail there is that
    of a normal distribution; with logistic shares it is exponential, and much longer.
    """

    domain = constraints.real_vector
    codomain = constraints.simplex
    bijective = True

    def _call(self, x: Tensor) -> Tensor:
        taken, left = torch.special.log_ndtr(torch.stack([x, -x]))
        logs = pad(taken, (0, 1)) + pad(left.cumsum(-1), (1, 0))
        return logs.exp().clamp(min=torch.finfo(x.dtype).tiny)

    def _inverse(self, y: Tensor) -> Tensor:
        rest = y.double().flip(-1).cumsum(-1).flip(-1)
        shares = torch.stack([y.double()[..., :-1], rest[..., 1:]]) / rest[..., :-1]
        low, high = torch.special.ndtri(shares)
        return torch.where(low < 0, low, -high).to(y)  # of the smaller one, which is not rounded

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        """Of the first K - 1 entries, each the density of its break times the rest before it."""
        rest = y[..., 1:].flip(-1).cumsum(-1)[..., 1:].log().sum(-1)
        return rest - 0.5 * (x.square() + math.log(2 * math.pi)).sum(-1)

    def forward_shape(self, shape: Any) -> torch.Size:
        """``(*, K)`` of ``(*, K - 1)``."""
        return torch.Size([*shape[:-1], shape[-1] + 1])

    def inverse_shape(self, shape: Any) -> torch.Size:
        """``(*, K - 1)`` of ``(*, K)``."""
        return torch.Size([*shape[:-1], shape[-1] - 1])


def coordinates(support: constraints.Constraint) -> Any:
    """The map from unconstrained coordinates to the space of a variable."""
    base: Any = support
    more = 0
    while isinstance(base, constraints.independent):
        base, more = base.base_constraint, more + base.reinterpreted_batch_ndims
    if isinstance(base, type(constraints.simplex)):
        return IndependentTransform(ProbitSticks(), more)
    return biject_to(support)


def times(root: Tensor, vectors: Tensor) -> Tensor:
    """Matrices ``(*, D, D)``, or diagonals ``(*, D)``, times vectors ``(*, D)``."""
    if root.dim() == vectors.dim():
        return root * vectors
    return (root @ vectors.unsqueeze(-1)).squeeze(-1)


def second_moments(vectors: Tensor, like: Tensor) -> Tensor:
    """Sums over C of products of vectors ``(2, C, R, D)``, or of squares: of a metric ``like``."""
    if like.dim() == 2:
        return vectors.square().sum(1)
    return torch.einsum("pcri,pcrj->prij", vectors, vectors)


def metric_root(places: Tensor, gradients: Tensor, freedom: int) -> Tensor:
    r"""Symmetric square root of the inverse mass matrix M for which M cov(gradients) M = cov(q).

    For a normal distribution that is its covariance matrix, of any places at all. Correlations are
    shrunk, the more the fewer samples there are of each coordinate.

    Args:
        places: Covariance matrices ``(R, D, D)``, or variances ``(R, D)``, of coordinates.
        gradients: Those of the gradients of the log-density.
        freedom: Degrees of freedom of both.
    """
    if places.dim() == 2:
        return (places / gradients).pow(0.25)
    first, second = (part.diagonal(dim1=-2, dim2=-1) for part in (places, gradients))
    unit, size = (first / second).pow(0.25), places.size(-1)
    units = unit.unsqueeze(-1) * unit.unsqueeze(-2)
    share = freedom / (freedom + size) + (1 - freedom / (freedom + size)) * torch.eye(size).to(unit)
    inner, outer = places / units * share, gradients * units * share
    root, inverse = _power(outer, 0.5), _power(outer, -0.5)
    return _power(inverse @ _power(root @ inner @ root, 0.5) @ inverse * units, 0.5)


def _power(matrix: Tensor, power: float) -> Tensor:
    """Powers of positive definite matrices."""
    if not bool(matrix.isfinite().all()):
        return torch.full_like(matrix, torch.nan)
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.pow(power).unsqueeze(-2)) @ vectors.mT
