"""Quantiles of mixtures of the emissions of the states, component by component of vectors."""

from __future__ import annotations

from typing import Any

import torch
from pyro.distributions import Normal
from torch import Tensor
from torch.distributions import Independent, MultivariateNormal, constraints

from .observation import is_categorical

COUNTS = (constraints.boolean, constraints.nonnegative_integer)
BISECTIONS = 60  # of an interval: what is left is below the rounding of its ends
REACH = 40.0  # standard deviations of a state within which quantiles are sought


def mixture_quantiles(weights: Tensor, emission: Any, probs: Tensor) -> Tensor | None:
    """Quantiles ``(Q, *B, H, *E)`` of mixtures; None unless the distribution function is known.

    Args:
        weights: ``(*B, H, K)``, of the states.
        emission: Batched over the K states, ``(*b, K)``.
        probs: ``(Q,)``, between 0 and 1.
    """
    if is_categorical(emission):
        return _first_reaching((weights @ emission.probs).movedim(-1, 0), probs)
    margins = _margins(emission)
    if margins is None:
        return None
    events = len(emission.event_shape)
    # steps to the left, so that the rest of the dimensions are those of the parameters
    weights = weights.movedim(-2, 0).unflatten(-1, (-1,) + (1,) * events)  # (H, *B, K, *1)
    kind = _of_counts if margins.support in COUNTS else _by_bisection
    return kind(weights, margins, -1 - events, probs).movedim(1, -1 - events)


def _margins(emission: Any) -> Any:
    """The distributions ``(*b, K, *E)`` of the components, if they are known."""
    if isinstance(emission, Independent):
        return _margins(emission.base_dist)
    if isinstance(emission, MultivariateNormal):
        return Normal(emission.mean, emission.variance.sqrt(), validate_args=False)
    if emission.event_shape:
        return None
    if emission.support in COUNTS:
        return emission
    try:
        emission.cdf(emission.mean)
        return emission if bool(emission.variance.isfinite().all()) else None
    except (NotImplementedError, AttributeError):
        return None


def _first_reaching(masses: Tensor, probs: Tensor) -> Tensor:
    """The first of n outcomes with which ``(n, *)`` masses add to each of ``probs``, ``(Q, *)``."""
    rounding = 8 * torch.finfo(masses.dtype).eps
    wanted = (probs.to(masses) * (1 - rounding)).reshape(-1, *(1,) * masses.dim())
    return (masses.cumsum(0) < wanted).sum(1).clamp(max=len(masses) - 1)


def _of_counts(weights: Tensor, margins: Any, state: int, probs: Tensor) -> Tensor:
    """Quantiles ``(Q, H, *B, *E)`` of counts, by adding probabilities from zero upwards."""
    last = 1
    if margins.support is not constraints.boolean:
        last = int((margins.mean + REACH * margins.variance.sqrt()).max()) + 20
    counts = torch.arange(last + 1).to(margins.mean)
    masses = margins.log_prob(counts.reshape(-1, *(1,) * weights.dim())).exp()
    return _first_reaching((weights * masses).sum(state), probs).to(margins.mean)


def _by_bisection(weights: Tensor, margins: Any, state: int, probs: Tensor) -> Tensor:
    """Quantiles ``(Q, H, *B, *E)`` of continuous components, from distribution functions."""
    reach = REACH * margins.variance.sqrt()
    low, high = (margins.mean - reach).amin(state), (margins.mean + reach).amax(state)
    bound = getattr(margins.support, "lower_bound", None)
    if bound is not None:
        low = low.clamp(min=bound)
    probs = probs.to(weights).reshape(-1, *(1,) * (weights.dim() - 1))
    shape = torch.broadcast_shapes(probs.shape, weights.sum(state).shape, low.shape)
    low, high = low.expand(shape), high.expand(shape)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        reached = (weights * margins.cdf(middle.unsqueeze(state))).sum(state) >= probs
        low, high = torch.where(reached, low, middle), torch.where(reached, middle, high)
    return high
