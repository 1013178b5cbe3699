"""Quantiles of mixtures of the emissions of the states, component by component of vectors."""

from __future__ import annotations

import copy
from typing import Any

import torch
from pyro.distributions import Normal
from torch import Tensor
from torch.distributions import (
    Independent,
    MixtureSameFamily,
    MultivariateNormal,
    constraints,
)

from .hard_zeros import exact_log_prob
from .observation import Tied, is_categorical

COUNTS = (constraints.boolean, constraints.nonnegative_integer)
BISECTIONS = 60  # of an interval: what is left is below the rounding of its ends
REACH = 40.0  # standard deviations of a state within which quantiles are sought


def mixture_quantiles(weights: Tensor, emission: Any, probs: Tensor) -> Tensor | None:
    """Quantiles ``(Q, *B, H, *E)`` of mixtures; None unless the distribution function is known.

    Args:
        weights: ``(*B, H, K)``, of the states.
        emission: Batched over the K states, ``(*b, K)``.
        probs: ``(Q,)``, between 0 and 1; of these two, the ends of the support.
    """
    if isinstance(emission, Tied):
        shared = weights.new_zeros(*weights.shape[:-1], emission.base.batch_shape[-1])
        return mixture_quantiles(
            shared.index_add(-1, emission.index, weights), emission.base, probs
        )
    if is_categorical(emission):
        return symbol_quantiles(weights @ emission.probs, probs)
    margins = _margins(emission)
    if margins is None:
        return None
    events = len(emission.event_shape)
    # steps to the left, so that the rest of the dimensions are those of the parameters
    weights = weights.movedim(-2, 0).unflatten(-1, (-1,) + (1,) * events)  # (H, *B, K, *1)
    kind = _of_counts if margins.support in COUNTS else _by_bisection
    return kind(weights, margins, -1 - events, probs).movedim(1, -1 - events)


def symbol_quantiles(symbols: Tensor, probs: Tensor) -> Tensor:
    """Quantiles ``(Q, *B)`` of symbols in the order of their numbers.

    Args:
        symbols: ``(*B, V)``, their probabilities.
        probs: ``(Q,)``, between 0 and 1.
    """
    return _first_reaching(symbols.movedim(-1, 0), probs)


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
    emission = copy.copy(emission)
    emission._validate_args = False  # what bisection asks for may lie outside of the support
    try:
        emission.cdf(emission.mean)
        return emission if bool(emission.variance.isfinite().all()) else None
    except (NotImplementedError, AttributeError):
        return None


def _first_reaching(masses: Tensor, probs: Tensor) -> Tensor:
    """The first of n outcomes with which ``(n, *)`` masses add to each of ``probs``, ``(Q, *)``.

    That of 0 is the first that has a mass, that of 1 the last.
    """
    limits = torch.finfo(masses.dtype)
    probs = probs.to(masses).reshape(-1, *(1,) * masses.dim())
    wanted = (probs * (1 - 8 * limits.eps)).clamp(min=limits.tiny)
    first = (masses.cumsum(0) < wanted).sum(1).clamp(max=len(masses) - 1)
    number = torch.arange(len(masses), device=masses.device)
    last = (number.reshape(-1, *(1,) * (masses.dim() - 1)) * (masses > 0)).amax(0)
    return torch.where(probs.squeeze(1) == 1, last, first)


def _of_counts(weights: Tensor, margins: Any, state: int, probs: Tensor) -> Tensor:
    """Quantiles ``(Q, H, *B, *E)`` of counts, by adding probabilities from zero upwards."""
    last, whole = 1, margins.support is constraints.boolean
    if not whole:
        last = int((margins.mean + REACH * margins.variance.sqrt()).max()) + 20
    counts = torch.arange(last + 1).to(margins.mean)
    masses = exact_log_prob(margins, counts.reshape(-1, *(1,) * weights.dim())).exp()
    found = _first_reaching((weights * masses).sum(state), probs).to(margins.mean)
    above = (probs.to(found) == 1) & (not whole)
    return found.masked_fill(above.reshape(-1, *(1,) * (found.dim() - 1)), torch.inf)


def _by_bisection(weights: Tensor, margins: Any, state: int, probs: Tensor) -> Tensor:
    """Quantiles ``(Q, H, *B, *E)`` of continuous components, from distribution functions."""
    least, most = _ends(weights, margins, state)
    reach = REACH * margins.variance.sqrt()
    low = (margins.mean - reach).amin(state).maximum(least)
    high = (margins.mean + reach).amax(state).minimum(most)
    probs = probs.to(weights).reshape(-1, *(1,) * (weights.dim() - 1))
    shape = torch.broadcast_shapes(probs.shape, weights.sum(state).shape, low.shape)
    low, high = low.expand(shape), high.expand(shape)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        reached = (weights * margins.cdf(middle.unsqueeze(state))).sum(state) >= probs
        low, high = torch.where(reached, low, middle), torch.where(reached, middle, high)
    return torch.where(probs == 0, least, torch.where(probs == 1, most, high))


def _ends(weights: Tensor, margins: Any, state: int) -> tuple[Tensor, Tensor]:
    """Ends ``(H, *B, *E)`` of the union of the supports of the states that have a weight."""
    low, high = (end.expand(margins.batch_shape).to(weights) for end in _bounds(margins))
    possible = weights > 0
    return (
        torch.where(possible, low, torch.inf).amin(state),
        torch.where(possible, high, -torch.inf).amax(state),
    )


def _bounds(margins: Any) -> tuple[Tensor, Tensor]:
    """Ends of the support of each component, which broadcast with ``(*b, K, *E)``."""
    if isinstance(margins, MixtureSameFamily):
        low, high = _bounds(margins.component_distribution)
        return low.amin(-1), high.amax(-1)
    ends = ("lower_bound", -torch.inf), ("upper_bound", torch.inf)
    low, high = (torch.as_tensor(getattr(margins.support, name, end)) for name, end in ends)
    return low, high
