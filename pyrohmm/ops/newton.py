"""Batched maximisation: Newton's method with exact derivatives, and L-BFGS.

In shapes, B is the number of problems, P that of unknowns of each, M that of observations, and Q
that of linear predictors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from .._choices import CACHED, ON_DEVICE

Value = Callable[[Tensor], Tensor]  # (B, P) to (B,)
Derivatives = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]  # and slopes, Hessians (B, P, P)
Terms = Callable[..., Tensor]  # of predictors (B, m, Q), and which ``rows`` these are of, (B, m)

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
    share: float = 0.0,
) -> Tensor:
    """Maximise B functions of P numbers each by Newton's method: points ``(B, P)``, float64.

    A step solves with the absolute curvatures, so that it climbs where a function is not concave,
    and is halved until it does: no function ends below its start.

    Args:
        value: The functions.
        derivatives: Their values, slopes and Hessians.
        start: ``(B, P)``.
        free: Booleans that broadcast to ``(B, P)``; other entries stay as they are.
        num_steps: Largest number of steps.
        tolerance: End where each function is so few nats below its maximum, by Newton's estimate.
        share: Or where a step has raised it by what that estimate said, but for this share of it:
            what is left is then about the square of that share.

    Example:
        >>> def value(x):
        ...     return (3 * x - x.exp()).sum(-1)
        >>> maximized(value, of_function(value), torch.zeros(1, 2)).exp().round()
        tensor([[3., 3.]], dtype=torch.float64)
    """
    point = start.double()
    going = torch.ones(len(point), dtype=torch.bool, device=point.device)
    for _ in range(num_steps):
        with torch.enable_grad():
            height, slope, curvature = derivatives(point)
        rounding = 4 * torch.finfo(point.dtype).eps * height.abs()
        step, rise = _step(slope, curvature, free)
        size = (going & (rise > 1e-300)).to(rise)
        for _ in range(HALVINGS):
            moved = point + size.unsqueeze(-1) * step
            found = value(moved)
            enough = (found >= height + RISE * size * rise - rounding) | (size == 0)
            if bool(enough.all()):
                break
            size = torch.where(enough, size, size / 2)
        better = enough & (size > 0)
        point = torch.where(better.unsqueeze(-1), moved, point)
        as_said = (found - height - rise / 2).abs() <= share * rise / 2
        going = better & ~as_said & (rise / 2 > tolerance)
        if not bool(going.any()):
            break
    return point


def _step(slope: Tensor, curvature: Tensor, free: Tensor | None) -> tuple[Tensor, Tensor]:
    """Newton steps ``(B, P)``, and the directional derivatives along them, ``(B,)``."""
    if free is not None:
        slope = slope.where(free, 0.0)
        curvature = curvature.where(free.unsqueeze(-1) & free.unsqueeze(-2), 0.0)
    usable = slope.isfinite().all(-1) & curvature.isfinite().all(-1).all(-1)
    slope = slope.where(usable.unsqueeze(-1), 0.0)
    curvature = curvature.where(usable[:, None, None], 0.0)
    scale = curvature.diagonal(dim1=-2, dim2=-1).abs().sqrt()
    scale = torch.where(scale > 0, scale, 1.0)
    values, vectors = torch.linalg.eigh(curvature / scale.unsqueeze(-1) / scale.unsqueeze(-2))
    bend = values.abs()
    bend = bend.maximum(FLAT * bend.amax(-1, keepdim=True)).clamp(min=1e-300)
    along = (vectors.mT @ (slope / scale).unsqueeze(-1)).squeeze(-1)
    step = (vectors @ (along / bend).unsqueeze(-1)).squeeze(-1) / scale
    if free is not None:
        step = step.where(free, 0.0)
    return step, (step * slope).sum(-1)


def of_function(value: Value) -> Derivatives:
    """Exact derivatives of B functions, each of its own P numbers, by automatic differentiation."""

    def derivatives(point: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        leaf = point.detach().requires_grad_()
        found = value(leaf)
        (slope,) = torch.autograd.grad(found.sum(), leaf, create_graph=True)
        return found.detach(), slope.detach(), _rows_of_hessian(slope, leaf)

    return derivatives


def of_predictors(
    value: Terms, designs: list[Tensor], precision: Tensor
) -> tuple[Value, Derivatives]:
    r"""Functions of linear predictors :math:`\eta_q = X_q x_q`, and their derivatives.

    The curvature by x is :math:`X^\top W X` with the curvature W of each observation. They are
    computed in pieces of observations, which stay in the cache of a core.

    Args:
        value: From predictors ``(B, m, Q)`` and ``rows``, of which observations they are, to
            terms ``(B, m)``, of each observation its own.
        designs: Q matrices ``(M, P_q)``; x is the vector of all coefficients, in this order.
        precision: ``(P,)`` or ``(B, P)``, w of a further term :math:`-\sum_i w_i x_i^2 / 2`.
    """
    sizes = [design.size(1) for design in designs]
    columns = [design.mT.contiguous() for design in designs]
    pairs = [[(x, y) for y in columns] for x in columns]

    def pieces(point: Tensor) -> Iterator[tuple[slice, Tensor]]:
        room = CACHED if point.device.type == "cpu" else ON_DEVICE
        size = max(1, room // (len(point) * len(designs)))
        for first in range(0, max(len(designs[0]), 1), size):
            rows = slice(first, first + size)
            parts = zip(point.split(sizes, -1), columns)
            yield rows, torch.stack([part @ x[:, rows] for part, x in parts], 1).mT

    def total(point: Tensor) -> Tensor:
        terms = sum(value(predictors, rows).sum(-1) for rows, predictors in pieces(point))
        return terms - (precision * point.square()).sum(-1) / 2

    def derivatives(point: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        height = -(precision * point.square()).sum(-1) / 2
        total, bend = -precision * point, -precision.diag_embed()
        for rows, predictors in pieces(point):
            terms, slope, weights = of_function(partial(value, rows=rows))(predictors)
            weights = weights.movedim(1, -1)  # (B, Q, Q, m)
            height = height + terms.sum(-1)
            own = zip(slope.unbind(-1), columns)
            total = total + torch.cat([part @ x[:, rows].mT for part, x in own], -1)
            bend = bend + torch.cat([
                torch.cat([(x[:, rows] * weights[:, q, r, None]) @ y[:, rows].mT
                           for r, (x, y) in enumerate(row)], -1)
                for q, row in enumerate(pairs)
            ], -2)  # fmt: skip
        return height, total, bend

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


# By slopes alone, each row at its own pace

# from places (B', P) of the rows (B',) to values (B',) and slopes (B', P)
Function = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

CLOSE = 1e-3  # nats below the maximum with which a row may end where rounding stops it
LONGEST = 4.0  # largest norm of a step, in units of the coordinates
MEMORY = 10  # past steps from which the curvature is estimated
SHORTEST = 1e-8  # share of a step below which a row ends


class Peak(NamedTuple):
    """Maxima found by an ascent.

    Attributes:
        place: ``(B, P)``.
        value: ``(B,)``.
        gap: ``(B,)``, how far each value is below its maximum, by the estimated curvature.
        converged: ``(B,)`` booleans.
    """

    place: Tensor
    value: Tensor
    gap: Tensor
    converged: Tensor


@torch.no_grad()
def climb(function: Function, start: Tensor, most: int = 300, tolerance: float = 1e-7) -> Peak:
    """Maximise B smooth functions of P coordinates by L-BFGS, as one batch.

    A row whose step does not raise its value halves the step; one that has ended is evaluated no
    more. Coordinates should be scaled so that the curvature is about one.

    Args:
        function: From places ``(B', P)`` and numbers ``(B',)`` of rows to values and slopes there.
        start: ``(B, P)``, in float64.
        most: Evaluations.
        tolerance: A row ends so far below its maximum, in nats.

    References:
        Nocedal and Wright (2006), Numerical Optimization, algorithm 7.4.
    """
    place, rows = start.clone(), torch.arange(len(start))
    value, slope = function(place, rows)
    share, gap = torch.ones_like(value), torch.full_like(value, torch.inf)
    steps, falls = (place.new_zeros(MEMORY, *place.shape) for _ in range(2))
    rows = rows[value.isfinite() & slope.isfinite().all(-1)]
    for _ in range(most):
        direction, rise = _direction(slope[rows], steps[:, rows], falls[:, rows])
        gap[rows] = rise / 2
        going = (gap[rows] > tolerance) & (share[rows] > SHORTEST)
        rows, direction, rise = rows[going], direction[going], rise[going]
        if not len(rows):
            break
        size = share[rows] * (LONGEST / direction.norm(dim=-1)).clamp(max=1.0)
        step = size.unsqueeze(-1) * direction
        new, new_slope = function(place[rows] + step, rows)
        rounding = 1e-13 * value[rows].abs()
        better = (new >= value[rows] + 1e-4 * size * rise - rounding) & new_slope.isfinite().all(-1)
        fall = slope[rows] - new_slope
        curved = (step * fall).sum(-1) > 0  # elsewhere steps of a slope alone are too short
        share[rows] *= torch.where(better, torch.where(curved, torch.inf, 4.0), 0.3)
        share.masked_fill_(share.isinf(), 1.0)
        taken, step = rows[better], step[better]
        place[taken], value[taken] = place[taken] + step, new[better]
        steps[:, taken] = torch.cat([step.unsqueeze(0), steps[:-1, taken]])
        falls[:, taken] = torch.cat([fall[better].unsqueeze(0), falls[:-1, taken]])
        slope[taken] = new_slope[better]
    rounded = (gap < CLOSE) & (share <= SHORTEST)
    return Peak(place, value, gap, (gap <= tolerance) | rounded)


def _direction(slope: Tensor, steps: Tensor, falls: Tensor) -> tuple[Tensor, Tensor]:
    """L-BFGS directions ``(B', P)``, and the directional derivatives ``(B',)`` along them."""
    product = (steps * falls).sum(-1, keepdim=True)
    known = product > 1e-10 * steps.norm(dim=-1, keepdim=True) * falls.norm(dim=-1, keepdim=True)
    inverse = torch.where(known, 1 / product, 0.0)
    direction, weights = slope, []
    for step, fall, ratio in zip(steps, falls, inverse):
        weights.append(ratio * (step * direction).sum(-1, keepdim=True))
        direction = direction - weights[-1] * fall
    square = falls[0].square().sum(-1, keepdim=True)
    direction = torch.where(known[0], product[0] / square, 1.0) * direction
    for step, fall, ratio, weight in reversed([*zip(steps, falls, inverse, weights)]):
        direction = direction + step * (weight - ratio * (fall * direction).sum(-1, keepdim=True))
    rise = (direction * slope).sum(-1)
    wrong = ~(rise > 0)
    direction = torch.where(wrong.unsqueeze(-1), slope, direction)
    return direction, torch.where(wrong, slope.square().sum(-1), rise)
