"""Newton's method for many small problems at once, with exact derivatives and line search.

In shapes, B is the number of problems, P that of unknowns of each, M that of observations, and Q
that of linear predictors.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Value = Callable[[Tensor], Tensor]  # (B, P) to (B,)
Derivatives = Callable[[Tensor], tuple[Tensor, Tensor]]  # to slopes (B, P), Hessians (B, P, P)

FLAT = 1e-10  # share of the largest curvature, below which a direction has that share
HALVINGS = 40
RISE = 1e-4  # share of the rise that the slope promises, which a step must bring


@torch.no_grad()
def maximized(
    value: Value,
    derivatives: Derivatives,
    start: Tensor,
    free: Tensor | None = None,
    num_steps: int = 100,
    tolerance: float = 1e-9,
) -> Tensor:
    """Points ``(B, P)`` where B functions have maxima, each of its own P numbers, float64.

    A step solves with the absolute curvatures, so that it climbs where a function is not concave,
    and is halved until it does: no function ends below its start.

    Args:
        value: The functions.
        derivatives: Their slopes and Hessians.
        start: ``(B, P)``.
        free: Booleans that broadcast to ``(B, P)``; other entries stay as they are.
        num_steps: Largest number of steps.
        tolerance: End where each function is so few nats below its maximum, by Newton's estimate.

    Example:
        >>> def value(x):
        ...     return (3 * x - x.exp()).sum(-1)
        >>> maximized(value, of_function(value), torch.zeros(1, 2)).exp().round()
        tensor([[3., 3.]], dtype=torch.float64)
    """
    point = start.double()
    height = value(point)
    for _ in range(num_steps):
        with torch.enable_grad():
            slope, curvature = derivatives(point)
        rounding = 4 * torch.finfo(point.dtype).eps * height.abs()
        step, rise = _step(slope, curvature, free)
        share = torch.where(rise > 1e-300, torch.ones_like(rise), 0.0)
        for _ in range(HALVINGS):
            moved = point + share.unsqueeze(-1) * step
            found = value(moved)
            enough = (found >= height + RISE * share * rise - rounding) | (share == 0)
            if bool(enough.all()):
                break
            share = torch.where(enough, share, share / 2)
        better = enough & (share > 0)
        point = torch.where(better.unsqueeze(-1), moved, point)
        height = torch.where(better, found, height)
        if bool((~better | (rise / 2 <= tolerance)).all()):
            break
    return point


def _step(slope: Tensor, curvature: Tensor, free: Tensor | None) -> tuple[Tensor, Tensor]:
    """Newton's steps ``(B, P)``, and how fast the functions rise along them, ``(B,)``."""
    if free is not None:
        slope = slope.where(free, 0.0)
        both = free.unsqueeze(-1) & free.unsqueeze(-2)
        curvature = curvature.where(both, 0.0)
    usable = slope.isfinite().all(-1) & curvature.isfinite().all(-1).all(-1)
    slope = slope.where(usable.unsqueeze(-1), 0.0)
    curvature = curvature.where(usable[:, None, None], 0.0)
    scale = curvature.diagonal(dim1=-2, dim2=-1).abs().sqrt()
    scale = torch.where(scale > 0, scale, 1.0)
    unit = curvature / scale.unsqueeze(-1) / scale.unsqueeze(-2)
    values, vectors = torch.linalg.eigh(unit)
    bend = values.abs()
    bend = bend.maximum(FLAT * bend.amax(-1, keepdim=True)).clamp(min=1e-300)
    along = (vectors.mT @ (slope / scale).unsqueeze(-1)).squeeze(-1)
    step = (vectors @ (along / bend).unsqueeze(-1)).squeeze(-1) / scale
    if free is not None:
        step = step.where(free, 0.0)
    return step, (step * slope).sum(-1)


def of_function(value: Value) -> Derivatives:
    """Exact derivatives of B functions, each of its own P numbers, by automatic differentiation."""

    def derivatives(point: Tensor) -> tuple[Tensor, Tensor]:
        leaf = point.detach().requires_grad_()
        (slope,) = torch.autograd.grad(value(leaf).sum(), leaf, create_graph=True)
        return slope.detach(), _rows_of_hessian(slope, leaf)

    return derivatives


def of_predictors(
    value: Value, designs: list[Tensor], precision: Tensor | None = None
) -> tuple[Value, Derivatives]:
    r"""Functions of linear predictors :math:`\eta_q = X_q x_q`, and their derivatives.

    The curvature by x is :math:`X^\top W X` with the curvature W of each observation.

    Args:
        value: From predictors ``(B, M, Q)`` to terms ``(B, M)``, of each observation its own.
        designs: Q matrices ``(M, P_q)``; x is the vector of all coefficients, in this order.
        precision: ``(P,)`` or ``(B, P)``, w of a further term :math:`-\sum_i w_i x_i^2 / 2`.
    """
    sizes = [design.size(1) for design in designs]

    def predictors(point: Tensor) -> Tensor:
        parts = point.split(sizes, -1)
        return torch.stack([part @ design.mT for part, design in zip(parts, designs)], -1)

    def total(point: Tensor) -> Tensor:
        found = value(predictors(point)).sum(-1)
        if precision is not None:
            found = found - (precision * point.square()).sum(-1) / 2
        return found

    def derivatives(point: Tensor) -> tuple[Tensor, Tensor]:
        leaf = predictors(point.detach()).requires_grad_()
        (slope,) = torch.autograd.grad(value(leaf).sum(), leaf, create_graph=True)
        weights = _rows_of_hessian(slope, leaf)  # (B, M, Q, Q)
        slope = slope.detach()
        found = torch.cat([slope[..., q] @ x for q, x in enumerate(designs)], -1)
        rows = [
            torch.cat([left.mT @ (weights[..., q, r, None] * right)
                       for r, right in enumerate(designs)], -1)
            for q, left in enumerate(designs)
        ]  # fmt: skip
        curvature = torch.cat(rows, -2)
        if precision is not None:
            found, curvature = found - precision * point, curvature - precision.diag_embed()
        return found, curvature

    return total, derivatives


def _rows_of_hessian(slope: Tensor, leaf: Tensor) -> Tensor:
    """Second derivatives ``(*, P, P)`` of functions of which each has its own ``(*, P)``."""
    size = leaf.size(-1)
    if not slope.requires_grad:  # linear
        return leaf.detach().new_zeros(*leaf.shape, size)
    rows = [
        torch.autograd.grad(slope[..., i].sum(), leaf, retain_graph=True, materialize_grads=True)[0]
        for i in range(size)
    ]
    return torch.stack(rows, -2)
