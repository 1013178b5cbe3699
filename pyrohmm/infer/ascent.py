"""Maximisation of many functions as one batch: quasi-Newton steps, each row at its own pace."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# from places (B', P) of the rows (B',) to values (B',) and slopes (B', P)
Function = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

CLOSE = 1e-3  # nats below the maximum with which a row may end where rounding stops it
LONGEST = 4.0  # largest norm of a step, in units of the coordinates
MEMORY = 10  # past steps from which the curvature is estimated
SHORTEST = 1e-8  # share of a step below which a row ends


class Peak(NamedTuple):
    """Ends of an ascent.

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
    """Steps of L-BFGS ``(B', P)``, and the rise ``(B',)`` that the slope promises for them."""
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
