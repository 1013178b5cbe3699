"""Cumulative probabilities, and quantiles of mixtures of the states, component by component."""

from __future__ import annotations

import copy
from typing import Any

import torch
from pyro.distributions import Normal
from torch import Tensor
from torch.distributions import Independent, MixtureSameFamily, MultivariateNormal

from .._checks import broadcast_shapes
from .cumulative import REACH, bounds, cdf_of_counts, first_reaching
from .observation import Streams, Tied, is_categorical


def cdf(distribution: Any, values: Tensor, below: bool = False) -> Tensor:
    """Probability ``(*A, K, *E)`` of at most each component of ``values``, in each state.

    A distribution takes part by its method ``cdf(values)``; one with atoms also by
    ``cdf_below(values)``, the probability of less. Counts without a ``cdf`` have the sum of their
    probabilities, vectors the marginals of their components.

    Args:
        distribution: Of batch shape ``(*b, K)``.
        values: ``(*A, 1, *E)``; they may lie outside of the support.
        below: Whether it is the probability of less than each value.

    Raises:
        ValueError: If it is not known.

    Example:
        >>> cdf(Poisson(torch.tensor([1.0])), torch.tensor([[0.0], [1.0]])).float()
        tensor([[0.3679],
                [0.7358]])
    """
    at = -1 - len(distribution.event_shape)
    if isinstance(distribution, Tied):
        return cdf(distribution.base, values, below).index_select(at, distribution.index)
    if isinstance(distribution, Streams):
        pieces = zip(distribution.parts, distribution.split(values))
        return distribution.join([cdf(part, piece, below) for part, piece in pieces])
    if isinstance(distribution, Independent):
        return cdf(distribution.base_dist, values, below)
    if isinstance(distribution, MixtureSameFamily):
        weights = distribution.mixture_distribution.probs
        parts = cdf(distribution.component_distribution, values.unsqueeze(at), below)
        return (parts * weights.reshape(weights.shape + (1,) * (-1 - at))).sum(at)
    if isinstance(distribution, MultivariateNormal):
        distribution = Normal(distribution.mean, distribution.stddev)
    return _own_cdf(distribution, values, below)


def _own_cdf(distribution: Any, values: Tensor, below: bool) -> Tensor:
    """:func:`cdf` of a distribution of numbers."""
    distribution = copy.copy(distribution)
    distribution._validate_args = False
    discrete, atoms = distribution.support.is_discrete, hasattr(distribution, "cdf_below")
    if discrete:
        values = values.ceil() - 1 if below else values.floor()
    elif not atoms:
        low, high = (end.to(values) for end in bounds(distribution))
        values = values.maximum(low).minimum(high)
    try:
        own = distribution.cdf_below if below and atoms and not discrete else distribution.cdf
        return own(values).clamp(0.0, 1.0)
    except NotImplementedError:
        if not discrete or distribution.event_shape:
            raise ValueError(
                "cumulative probabilities are known of symbols, counts, and distributions with a "
                f"cdf; {type(distribution).__name__} has none. Write a subclass with the method "
                "cdf(values)."
            ) from None
    return cdf_of_counts(distribution, values)


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
    if isinstance(emission, Streams):
        found: list[Any] = [mixture_quantiles(weights, part, probs) for part in emission.parts]
        return emission.join(found) if all(part is not None for part in found) else None
    try:
        cdf(emission, emission.mean)
        reach = REACH * emission.stddev
    except (ValueError, NotImplementedError, AttributeError):
        return None
    if not bool(reach.isfinite().all()):
        return None
    events = len(emission.event_shape)
    # steps to the left, so that the rest of the dimensions are those of the parameters
    weights = weights.movedim(-2, 0).unflatten(-1, (-1,) + (1,) * events)  # (H, *B, K, *1)
    kind = _of_counts if emission.support.is_discrete else _by_bisection
    return kind(weights, emission, -1 - events, probs).movedim(1, -1 - events)


def symbol_quantiles(symbols: Tensor, probs: Tensor) -> Tensor:
    """Quantiles ``(Q, *B)`` of symbols in the order of their numbers.

    Args:
        symbols: ``(*B, V)``, their probabilities.
        probs: ``(Q,)``, between 0 and 1.
    """
    return _first_to_sum_to(symbols.movedim(-1, 0).cumsum(0), probs)


def _first_to_sum_to(upto: Tensor, probs: Tensor) -> Tensor:
    """The first of n outcomes at which the sums ``(n, *)`` reach each of ``probs``, ``(Q, *)``.

    That of 0 is the first that has a mass, that of 1 the last.
    """
    limits = torch.finfo(upto.dtype)
    probs = probs.to(upto).reshape(-1, *(1,) * upto.dim())
    wanted = (probs * (1 - 8 * limits.eps)).clamp(min=limits.tiny)
    wanted = torch.where(probs == 1, upto[-1:], wanted)
    return (upto < wanted).sum(1).clamp(max=len(upto) - 1)


def _of_counts(weights: Tensor, emission: Any, state: int, probs: Tensor) -> Tensor:
    """Quantiles ``(Q, H, *B, *E)`` of counts, by adding probabilities from zero upwards."""
    _, most = _ends(weights, emission, state)
    last = (emission.mean + REACH * emission.stddev + 20).amax(state).minimum(most).max()
    counts = torch.arange(int(last) + 1).to(weights).reshape(-1, *(1,) * weights.dim())
    upto = (weights * cdf(emission, counts)).sum(state)
    found = _first_to_sum_to(upto, probs).to(weights)
    above = (probs.to(found) == 1).reshape(-1, *(1,) * most.dim()) & most.isposinf()
    return found.masked_fill(above, torch.inf)


def _by_bisection(weights: Tensor, emission: Any, state: int, probs: Tensor) -> Tensor:
    """Quantiles ``(Q, H, *B, *E)`` of continuous components, from distribution functions."""
    least, most = _ends(weights, emission, state)
    reach = REACH * emission.stddev
    low = (emission.mean - reach).amin(state).maximum(least)
    high = (emission.mean + reach).amax(state).minimum(most)
    probs = probs.to(weights).reshape(-1, *(1,) * (weights.dim() - 1))
    shape = broadcast_shapes(probs.shape, weights.sum(state).shape, low.shape)

    def reached(value: Tensor) -> Tensor:
        return (weights * cdf(emission, value.unsqueeze(state))).sum(state) >= probs

    found = first_reaching(reached, low.expand(shape), high.expand(shape))
    return torch.where(probs == 0, least, torch.where(probs == 1, most, found))


def _ends(weights: Tensor, emission: Any, state: int) -> tuple[Tensor, Tensor]:
    """Ends ``(H, *B, *E)`` of the union of the supports of the states that have a weight."""
    low, high = (end.to(weights) for end in _bounds(emission))
    possible = weights > 0
    return (
        torch.where(possible, low, torch.inf).amin(state),
        torch.where(possible, high, -torch.inf).amax(state),
    )


def _bounds(emission: Any) -> tuple[Tensor, Tensor]:
    """Ends of the support of each component, ``(*b, K, *E)``."""
    if isinstance(emission, MixtureSameFamily):
        low, high = _bounds(emission.component_distribution)
        at = -1 - len(emission.event_shape)
        return low.amin(at), high.amax(at)
    base = emission
    while isinstance(base, Independent):
        base = base.base_dist
    low, high = (end.expand(emission.batch_shape + emission.event_shape) for end in bounds(base))
    return low, high
