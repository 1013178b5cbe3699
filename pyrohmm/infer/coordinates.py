r"""Unconstrained coordinates in which posteriors are near to normal, and their metric."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributions import biject_to, constraints
from torch.distributions.transforms import IndependentTransform, StickBreakingTransform
from torch.nn.functional import pad

WIDEST = 128  # coordinates, for more of which the metric is diagonal


class ProbitSticks(StickBreakingTransform):
    r"""Breaks a stick, of whose rest entry k takes the share :math:`\Phi(x_k)`.

    Where counts are few the posterior of probabilities reaches down to zero. The tail there is that
    of a normal distribution; with logistic shares it is exponential, and much longer.
    """

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


def coordinates(support: constraints.Constraint) -> Any:
    """The map from unconstrained coordinates to the space of a variable."""
    base: Any = support
    while isinstance(base, constraints.independent):
        base = base.base_constraint
    if isinstance(base, type(constraints.simplex)):
        return IndependentTransform(ProbitSticks(), support.event_dim - 1)
    return biject_to(support)


def times(root: Tensor, vectors: Tensor) -> Tensor:
    """Matrices ``(*, D, D)``, or diagonals ``(*, D)``, times vectors ``(*, D)``."""
    if root.dim() == vectors.dim():
        return root * vectors
    return (root @ vectors.unsqueeze(-1)).squeeze(-1)


def second_moments(vectors: Tensor, like: Tensor) -> Tensor:
    """Sums over C of products of vectors ``(2, C, R, D)``, or of squares: of a metric ``like``."""
    form = "pcri,pcri->pri" if like.dim() == 2 else "pcri,pcrj->prij"
    return torch.einsum(form, vectors, vectors)


def metric_root(places: Tensor, gradients: Tensor, freedom: int) -> Tensor:
    r"""Symmetric square root of the inverse mass matrix M for which M cov(gradients) M = cov(q).

    For a normal distribution that is its covariance matrix, of any places at all. Correlations are
    shrunk, the more the fewer degrees of freedom there are.

    Args:
        places: Covariance matrices ``(R, D, D)``, or variances ``(R, D)``, of coordinates.
        gradients: Those of the gradients of the log-density.
        freedom: Degrees of freedom of both.
    """
    if places.dim() == 2:
        return (places / gradients).pow(0.25)
    first, second = (part.diagonal(dim1=-2, dim2=-1) for part in (places, gradients))
    unit = (first / second).pow(0.25).unsqueeze(-1)
    units, eye = unit * unit.mT, torch.eye(unit.size(-2)).to(unit)
    share = eye + (1 - eye) * freedom / (freedom + len(eye))
    inner, outer = places / units * share, gradients * units * share
    root, inverse = _power(outer, 0.5), _power(outer, -0.5)
    return _power(inverse @ _power(root @ inner @ root, 0.5) @ inverse * units, 0.5)


def _power(matrix: Tensor, power: float) -> Tensor:
    """Powers of positive definite matrices; NaN if one is not finite."""
    if not bool(matrix.isfinite().all()):
        return torch.full_like(matrix, torch.nan)
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.pow(power).unsqueeze(-2)) @ vectors.mT
