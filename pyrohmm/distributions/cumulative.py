"""Cumulative probabilities of counts, and the values that have a cumulative probability."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributions import constraints

from .._checks import broadcast_shapes
from .hard_zeros import exact_log_prob

BISECTIONS = 60  # of an interval: what is left is below the rounding of its ends
OPEN = {"lower_bound": -torch.inf, "upper_bound": torch.inf}
REACH = 40.0  # standard deviations about the mean, within which values are sought


def bounds(distribution: Any) -> tuple[Tensor, Tensor]:
    """Ends of the support of numbers, which broadcast with the batch."""
    ends: Any = (0.0, 1.0)
    if distribution.support is not constraints.boolean:
        ends = [getattr(distribution.support, name, end) for name, end in OPEN.items()]
    low, high = (
        end if isinstance(end, Tensor) else torch.tensor(end, dtype=torch.double) for end in ends
    )
    return low, high


def cdf_of_counts(distribution: Any, values: Tensor) -> Tensor:
    """Probability of at most each of whole numbers: the sum of those from zero upwards.

    Args:
        distribution: Of batch shape B.
        values: What broadcasts with B.
    """
    most = values.max().minimum(bounds(distribution)[1].max().to(values.device))
    counts = torch.arange(max(int(most), 0) + 1).to(values)
    counts = counts.reshape(-1, *(1,) * len(distribution.batch_shape))
    upto = exact_log_prob(distribution, counts).double().exp().cumsum(0)
    upto = torch.cat([torch.zeros_like(upto[:1]), upto])  # (V + 1, *B)
    shape = broadcast_shapes(values.shape, upto.shape[1:])
    upto = upto.reshape(len(upto), *(1,) * (len(shape) + 1 - upto.dim()), *upto.shape[1:])
    index = values.clamp(-1, len(counts) - 1).long() + 1
    return upto.expand(-1, *shape).gather(0, index.expand(1, *shape)).squeeze(0)


def first_reaching(reached: Callable[[Tensor], Tensor], low: Tensor, high: Tensor) -> Tensor:
    """The least value between ``low`` and ``high`` that has ``reached``, by bisection."""
    first = low
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        enough = reached(middle)
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    return torch.where(reached(first), first, high)
