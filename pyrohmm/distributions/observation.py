r"""Joint and tied emissions, and log-densities of vectors with missing components.

An observation may be known in part: components that are NaN are missing. Where a distribution
allows it exactly they are integrated out (:func:`marginal_log_prob`), never filled in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from pyro.distributions import Categorical as PyroCategorical
from pyro.distributions import MixtureSameFamily as PyroMixture
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor
from torch.distributions import (
    Bernoulli,
    Beta,
    Categorical,
    Gamma,
    Independent,
    MixtureSameFamily,
    MultivariateNormal,
    constraints,
)

from .._checks import (
    CheckedCalls,
    OwnChecks,
    broadcast_shapes,
    check_broadcast,
    check_integers,
    check_range,
)
from .._sync import exceeds
from .._transforms import transforming
from ..ops.log_space import logsumexp
from ..ops.products import FEWER, BatchAxes, integers_of, look_up
from .hard_zeros import (
    exact_log_prob,
    log_prob_of_bits,
    log_probs,
    log_probs_of_bits,
    without_events,
)
from .linear_emissions import linear_log_prob
from .modified import Censored, Truncated, ZeroInflated


class Streams(CheckedCalls, OwnChecks):
    """Several observations at once, independent given the state, joined in one vector.

    A part that emits scalars or symbols takes one component, one that emits vectors of D takes D.
    Symbols stand in the vector as whole numbers.

    Args:
        parts: Distributions with equal batch shapes and at most one dimension of events.

    Example:
        >>> from pyro.distributions import Categorical, Normal
        >>> symbols, vectors = Categorical(torch.ones(2, 3)), Normal(torch.zeros(2, 4), 1.0)
        >>> both = Streams([symbols, vectors.to_event(1)])
        >>> both.batch_shape, both.event_shape
        (torch.Size([2]), torch.Size([5]))
    """

    def __init__(
        self, parts: Sequence[TorchDistribution], validate_args: bool | None = None
    ) -> None:
        if any(len(part.event_shape) > 1 for part in parts):
            shapes = [tuple(part.event_shape) for part in parts]
            text = f"parts must emit scalars or vectors; got event shapes {shapes}"
            raise ValueError(f"{text}. Flatten others.")
        self.parts = list(parts)
        self.widths = [part.event_shape.numel() for part in parts]
        batch = check_broadcast({f"parts[{i}]": part.batch_shape for i, part in enumerate(parts)})
        super().__init__(batch, torch.Size([sum(self.widths)]), validate_args=validate_args)

    @property
    def support(self) -> constraints.Constraint:
        """Joint support of the parts."""
        return _StreamsSupport(self)

    @property
    def mean(self) -> Tensor:
        """Means of the parts, joined; that of a symbol means nothing and is NaN."""
        return self.join([part.mean for part in self.parts])

    @property
    def variance(self) -> Tensor:
        """Variances of the parts, joined; that of a symbol is NaN."""
        return self.join([part.variance for part in self.parts])

    def split(self, values: Tensor) -> list[Tensor]:
        """Split vectors ``(*, sum of widths)`` into the observations of the parts."""
        pieces = zip(values.split(self.widths, -1), self.parts)
        return [piece if part.event_shape else piece.squeeze(-1) for piece, part in pieces]

    def join(self, pieces: list[Tensor]) -> Tensor:
        """Concatenate the values of all parts to one tensor ``(*, D)``."""
        pairs = zip(pieces, self.parts)
        width = [piece if part.event_shape else piece.unsqueeze(-1) for piece, part in pairs]
        lead = broadcast_shapes(*(piece.shape[:-1] for piece in width))
        floating = [piece.dtype for piece in width if piece.dtype.is_floating_point]
        dtype = [torch.get_default_dtype(), *floating][-1]
        return torch.cat([piece.to(dtype).expand(*lead, piece.size(-1)) for piece in width], -1)

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> Streams:
        """Expand to a larger batch."""
        return Streams([part.expand(torch.Size(batch_shape)) for part in self.parts])

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-density ``(*B)`` of vectors; NaN components are missing."""
        pieces = self.split(value)
        scores = [marginal_log_prob(part, piece) for part, piece in zip(self.parts, pieces)]
        return torch.stack(torch.broadcast_tensors(*scores)).sum(0)

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Sample vectors ``(*S, *B, sum of widths)``."""
        wide = [part.expand(self.batch_shape) for part in self.parts]  # independent for each entry
        return self.join([part.sample(torch.Size(sample_shape)) for part in wide])


class _StreamsSupport(constraints.Constraint):
    event_dim = 1

    def __init__(self, joined: Streams) -> None:
        self.joined = joined
        super().__init__()

    def check(self, value: Tensor) -> Tensor:
        return inside_support(self.joined, value)


class Tied(CheckedCalls, OwnChecks):
    """States that share emissions: state k emits as entry ``index[k]`` of ``base`` does.

    Args:
        base: Distribution batched over the distinct emissions, ``(*B, J)``.
        index: ``(K,)`` integers below J.
    """

    def __init__(
        self, base: TorchDistribution, index: Tensor, validate_args: bool | None = None
    ) -> None:
        check_integers("index", index)
        if index.dim() != 1 or not base.batch_shape:
            text = "index must have shape (K,), and base a batch shape (*B, J)"
            raise ValueError(f"{text}; got {tuple(index.shape)} and {tuple(base.batch_shape)}.")
        self.base, self.index = base, index.long()
        check_range("index", index, base.batch_shape[-1], "J - 1")
        super().__init__(
            base.batch_shape[:-1] + index.shape, base.event_shape, validate_args=validate_args
        )

    @property
    def support(self) -> constraints.Constraint:
        """Support of the base."""
        return self.base.support

    @property
    def mean(self) -> Tensor:
        """Mean in each state."""
        return self._pick(self.base.mean)

    @property
    def variance(self) -> Tensor:
        """Variance in each state."""
        return self._pick(self.base.variance)

    def _pick(self, moment: Tensor) -> Tensor:
        return moment.index_select(-1 - len(self.event_shape), self.index)

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> Tied:
        """Expand to a larger batch."""
        shape = torch.Size(batch_shape)
        return Tied(self.base.expand(shape[:-1] + self.base.batch_shape[-1:]), self.index)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-density ``(*B, K)``; ``value`` has one entry for all states, or one for each."""
        return self.in_each_state(marginal_log_prob, value)

    def in_each_state(self, function: Callable[[Any, Tensor], Tensor], value: Tensor) -> Tensor:
        """Evaluate ``function(base, value)`` in each of the tied states, ``(*B, K)``."""
        at = -1 - len(self.event_shape)
        shared = value.dim() < -at or value.size(at) == 1
        if not shared:
            shape = broadcast_shapes(value.shape, self.batch_shape + self.event_shape)
            value = value.expand(shape).movedim(at, 0).unsqueeze(at)  # (K, *B, 1, *E)
        every = function(self.base, value)
        every = every.expand(*every.shape[:-1], self.base.batch_shape[-1])  # ([K,] *B, J)
        if shared:
            return every.index_select(-1, self.index)
        index = self.index.reshape(-1, *(1,) * (every.dim() - 1))
        return every.gather(-1, index.expand(*every.shape[:-1], 1)).squeeze(-1).movedim(0, -1)

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Sample in each state, ``(*S, *B, K, *E)``."""
        states = len(self.index)
        wide = self.base.expand((states, *self.base.batch_shape))  # independent for each state
        values = wide.sample(torch.Size(sample_shape))  # (*S, K, *b, J, *E)
        at = values.dim() - len(self.event_shape) - 1
        values = values.movedim(len(torch.Size(sample_shape)), at - 1)  # (*S, *b, K, J, *E)
        index = self.index.reshape((states,) + (1,) * (1 + len(self.event_shape)))
        index = index.expand((*values.shape[: at - 1], states, 1, *self.event_shape))
        return values.gather(at, index).squeeze(at)


def permuted(emission: Any, order: Tensor) -> TorchDistribution:
    """Emissions in which state k emits as ``order[k]`` did, ``(K,)`` integers."""
    if hasattr(emission, "permuted"):
        return emission.permuted(order)
    if is_categorical(emission):
        return PyroCategorical(logits=log_probs(emission)[..., order, :])
    return Tied(emission, order)


def is_categorical(emission: Any) -> bool:
    """Whether ``emission`` emits symbols."""
    return isinstance(emission, Categorical) and not emission.event_shape


def log_prob_per_state(emission: TorchDistribution, values: Tensor) -> Tensor:
    """Log-density ``(*A, K)`` of ``values`` ``(*A, *E)`` in each of the K states.

    The batch of ``emission`` is ``(*b, K)``, where b broadcasts with A from the right. Components
    that are NaN are missing: see :func:`marginal_log_prob`.
    """
    if isinstance(emission, Streams):
        pieces = zip(emission.parts, emission.split(values))
        return reduce(torch.add, (log_prob_per_state(part, piece) for part, piece in pieces))
    if isinstance(emission, Tied):
        return log_prob_per_state(emission.base, values).index_select(-1, emission.index)
    if type(emission) in (PyroMixture, MixtureSameFamily):
        weights = log_probs(emission.mixture_distribution)
        return logsumexp(log_prob_per_component(emission, values) + weights, -1)
    if _is_of_bits(emission):
        return log_prob_of_bits(log_probs_of_bits(emission.base_dist), values)
    if not is_categorical(emission):
        scores = linear_log_prob(emission, values)
        scores = _by_integers(emission, values) if scores is None else scores
        if scores is not None:
            return scores
        return marginal_log_prob(emission, values.unsqueeze(-1 - len(emission.event_shape)))
    # a look-up of rows: log_prob would keep a gradient of N T K V numbers
    if not values.dtype.is_floating_point:
        return look_up(log_probs(emission), values)
    missing = values.isnan()
    scores = look_up(log_probs(emission), values.masked_fill(missing, 0.0))
    return scores.masked_fill(missing.unsqueeze(-1), 0.0)


def _by_integers(emission: Any, values: Tensor) -> Tensor | None:
    """Log-densities of integers, by a look-up in a table of those in their range, if it is small.

    None of distributions of vectors whose components are not independent, too.
    """
    base, wide = without_events(emission), len(emission.event_shape)
    found = None if base.event_shape or wide > 1 else integers_of(values)
    if found is None:
        return None
    numbers, index = found
    if len(numbers) * math.prod(emission.batch_shape[:-1]) * FEWER > values.numel():
        return None
    table = _log_prob(base, numbers.reshape(-1, *(1,) * len(base.batch_shape))).movedim(0, -1)
    table = torch.nn.functional.pad(table, (0, 1))  # of what is missing
    if not wide:
        return look_up(table, index)
    pairs = zip(table.unbind(-2), index.unbind(-1))
    return reduce(torch.add, (look_up(part, place) for part, place in pairs))


def _is_of_bits(emission: Any) -> bool:
    """Whether ``emission`` is a vector of independent Bernoullis with one table for all steps."""
    return (
        isinstance(emission, Independent)
        and isinstance(emission.base_dist, Bernoulli)
        and len(emission.event_shape) == 1
        and emission.batch_shape[-2:-1] in ((), (1,))
    )


def log_prob_per_component(mixture: Any, values: Tensor) -> Tensor:
    """Log-density ``(*A, K, C)`` of ``values`` ``(*A, *E)`` in each component of K mixtures."""
    parts, at = mixture.component_distribution, -1 - len(mixture.event_shape)
    scores = linear_log_prob(parts, values, mixed=True)
    if scores is None:
        return marginal_log_prob(parts, values.unsqueeze(at).unsqueeze(at))
    return scores.unflatten(-1, parts.batch_shape[-2:])


def marginal_log_prob(distribution: TorchDistribution, values: Tensor) -> Tensor:
    r"""Marginal log-density of the components of ``values`` that are not NaN.

    The others are integrated out exactly: independent components are left out, and a normal
    distribution with full covariance is marginalised, once for each pattern of missing components.

    Where the support depends on parameters, a value outside of it has -inf.

    Args:
        distribution: Of batch shape B.
        values: ``(*B, *E)``, or what broadcasts with it.

    Raises:
        ValueError: If a component is missing and the distribution has no marginal we know.

    Example:
        >>> from pyro.distributions import Normal
        >>> plane = Normal(torch.zeros(2), 1.0).to_event(1)
        >>> marginal_log_prob(plane, torch.tensor([0.0, torch.nan]))
        tensor(-0.9189)
    """
    if not values.dtype.is_floating_point:
        return _log_prob(distribution, values)
    if isinstance(distribution, Streams | Tied):
        return distribution.log_prob(values)
    missing = values.isnan()
    base = distribution.base_dist if isinstance(distribution, Independent) else distribution
    if transforming() and not base.event_shape and not base.support.is_discrete:
        # whether something is missing cannot be asked for here; the slopes of NaN are NaN
        scores = _log_prob(base, torch.where(missing, 0.5, values)).masked_fill(missing, 0.0)
        last = tuple(range(-len(distribution.event_shape), 0))
        return scores.sum(last) if last else scores
    if transforming() or exceeds((~missing).all().byte(), 0):
        whole = isinstance(distribution, Categorical)
        return _log_prob(distribution, values.long() if whole else values)
    if isinstance(distribution, MixtureSameFamily):
        return _mixed(distribution, values, marginal_log_prob)
    if isinstance(distribution, MultivariateNormal):
        return _marginal_normal(distribution, values)
    base, events = without_events(distribution), len(distribution.event_shape)
    if base.event_shape:
        raise ValueError(
            f"values has vectors with some components NaN, which {type(base).__name__} cannot "
            "integrate out. Mark these steps as not observed."
        )
    filled = torch.where(missing, any_value(base).to(torch.get_default_dtype()), values)
    if isinstance(base, Categorical):
        filled = filled.long()
    scores = _log_prob(base, filled).masked_fill(missing, 0.0)
    return scores.sum(tuple(range(-events, 0))) if events else scores


def support_varies(distribution: Any) -> bool:
    """Whether the support depends on parameters, so that states may have different ones.

    No value is read: numbers of their own count as different, those expanded from one do not.
    """
    if isinstance(distribution, Streams):
        return any(map(support_varies, distribution.parts))
    if isinstance(distribution, Tied):
        return support_varies(distribution.base)
    if isinstance(distribution, MixtureSameFamily):
        return support_varies(distribution.component_distribution)
    bounds = vars(without_events(distribution).support).values()
    shapes = (zip(x.shape, x.stride()) for x in bounds if isinstance(x, Tensor))
    return any(size > 1 and step != 0 for shape in shapes for size, step in shape)


def inside_support(distribution: Any, values: Tensor) -> Tensor:
    """Whether ``values`` are in the support, of the shape of ``distribution.log_prob(values)``.

    (The constraint of a mixture does not tell apart the entries of its batch, that of
    :class:`Tied` those of its index.) Ends at which the density is zero or infinite are not.
    """
    if isinstance(distribution, Streams):
        pieces = zip(distribution.parts, distribution.split(values))
        parts = [inside_support(part, piece) for part, piece in pieces]
        return torch.stack(torch.broadcast_tensors(*parts)).all(0)
    if isinstance(distribution, Tied):
        return distribution.in_each_state(inside_support, values)
    at = -1 - len(distribution.event_shape)
    if isinstance(distribution, MixtureSameFamily):
        return inside_support(distribution.component_distribution, values.unsqueeze(at)).any(-1)
    if isinstance(distribution, Independent):
        inside = inside_support(distribution.base_dist, values)
        return inside.flatten(-distribution.reinterpreted_batch_ndims).all(-1)
    if isinstance(distribution, ZeroInflated):
        return inside_support(distribution.base_dist, values) | (values == 0)
    inside = distribution.support.check(values)
    if isinstance(distribution, Censored | Truncated):
        at_limit = (values == distribution.lower) | (values == distribution.upper)
        inner = inside_support(distribution.base, values)
        return inside & (inner | at_limit if isinstance(distribution, Censored) else inner)
    if isinstance(distribution, Gamma):
        inside = inside & ((values != 0) | (distribution.concentration == 1))
    if isinstance(distribution, Beta):
        inside = inside & ((values != 0) | (distribution.concentration1 == 1))
        inside = inside & ((values != 1) | (distribution.concentration0 == 1))
    return inside


def _log_prob(distribution: Any, values: Tensor) -> Tensor:
    """Log-density of ``values``; -inf outside of a support that depends on parameters.

    (Distributions of torch raise there, or go on with a formula that does not hold.)
    """
    if isinstance(distribution, MixtureSameFamily):
        return _mixed(distribution, values, _log_prob)
    if isinstance(distribution, Independent):
        scores = _log_prob(distribution.base_dist, values)
        return scores.sum(tuple(range(-distribution.reinterpreted_batch_ndims, 0)))
    if not support_varies(distribution):
        return exact_log_prob(distribution, values)
    support = distribution.support
    inside = support.check(values)
    closed = (constraints.interval, constraints.integer_interval, constraints.greater_than_eq)
    filler = support.lower_bound if isinstance(support, closed) else any_value(distribution)
    filler = torch.as_tensor(filler, device=values.device).detach().to(values.dtype)
    wide = inside.reshape(inside.shape + (1,) * len(distribution.event_shape))
    scores = exact_log_prob(distribution, torch.where(wide, values, filler))
    return scores.masked_fill(~inside, -torch.inf)


def _mixed(
    mixture: MixtureSameFamily, values: Tensor, log_prob: Callable[[Any, Tensor], Tensor]
) -> Tensor:
    """Log-density of a mixture, by log-sum-exp over its components."""
    values = values.unsqueeze(-1 - len(mixture.event_shape))
    parts = log_prob(mixture.component_distribution, values)
    return logsumexp(parts + log_probs(mixture.mixture_distribution), -1)


def any_value(distribution: Any) -> Tensor:
    """Placeholder values in the support, ``(*B, *E)``, without a change of the random state."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        return distribution.sample()


def patterns(missing: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The distinct rows of booleans ``(M, D)``, each with the indices of all that are equal."""
    gaps = missing.any(-1)
    whole, rows = (~gaps).nonzero().squeeze(-1), gaps.nonzero().squeeze(-1)
    place = torch.zeros_like(rows)
    for bits in missing[rows].split(31, -1):
        powers = 2 ** torch.arange(bits.size(-1), device=bits.device)
        _, place = (place * 2**31 + (bits * powers).sum(-1)).unique(return_inverse=True)
    groups = rows[place.argsort(stable=True)].split(place.bincount().tolist())
    return [(missing[group[0]], group) for group in (whole, *groups) if len(group)]


def _marginal_normal(normal: MultivariateNormal, values: Tensor) -> Tensor:
    """Marginal log-density: for each pattern of missing components, of the rows that have it."""
    shape = broadcast_shapes(values.shape[:-1], normal.batch_shape)
    values = values[tuple(slice(None if step else 1) for step in values.stride()[:-1])]
    batch = BatchAxes(values.shape[:-1], normal.batch_shape)
    rows = batch.of_rows(values)  # ([S,] L, D), where normals are of S times as many
    loc = batch.of_columns(normal.loc.unsqueeze(-2), 2)
    matrix = batch.of_columns(normal.covariance_matrix.unsqueeze(-3), 3)
    if shared := rows.dim() == 3:
        loc, matrix = loc.unsqueeze(1), matrix.unsqueeze(1)
    dtype = torch.promote_types(values.dtype, loc.dtype)
    out = loc.new_zeros(*rows.shape[:-1], loc.size(-2), dtype=dtype)
    for pattern, here in patterns(rows.isnan().flatten(0, -2)):
        known = (~pattern).nonzero().squeeze(-1)
        if len(known) == 0:
            continue
        covariance = matrix[..., known.unsqueeze(-1), known]
        part = MultivariateNormal(loc[..., known], covariance, validate_args=False)
        here = (here % rows.size(-2)).unique() if shared else here
        found = rows[..., here, :]
        others = (found.isnan() != pattern).any(-1, keepdim=True)
        scores = log_prob_per_state(part, found[..., known].nan_to_num(0.0))
        out = out.index_add(-2, here, scores.masked_fill(others, 0.0).to(dtype))
    return batch.join(out).squeeze(-1).expand(shape)


def log_likelihood(emission: TorchDistribution, values: Tensor) -> Tensor:
    """Log-likelihood ``(*B, T, K)`` of ``values`` ``(*B, T, *E)`` in each state.

    Time goes first meanwhile, so that the batch of the emission ``(*B, K)`` stays on the right.
    """
    first = values.movedim(values.dim() - 1 - len(emission.event_shape), 0)
    return log_prob_per_state(emission, first).movedim(0, -2)
