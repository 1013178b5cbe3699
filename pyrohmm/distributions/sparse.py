"""Tables some entries of which are exactly zero: ``SparseDirichlet``, ``SparseGamma``.

The whole table is one event. Guides and samplers change the allowed entries only, so that what is
forbidden stays exactly zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from pyro.distributions import Gamma
from torch import Tensor
from torch.distributions import biject_to, constraints, transform_to
from torch.distributions.transforms import Transform

from .._checks import (
    OwnChecks,
    PyroValidation,
    broadcast_shapes,
    check_booleans,
    check_floats,
    check_positive,
    check_trailing,
)


class _Sparse(OwnChecks):
    """A table whose entries are exactly zero where they are not ``allowed``.

    Args:
        allowed: ``(*table)`` booleans.
        validate_args: Whether values are checked.
        **parameters: Positive, ``(*B, *table)``; what stands at forbidden entries is not read.
    """

    _validate_args = PyroValidation()
    has_rsample = True

    def __init__(self, allowed: Tensor, validate_args: bool | None, **parameters: Tensor) -> None:
        check_booleans("allowed", allowed)
        for name, value in parameters.items():
            check_floats(name, value)
            check_trailing(name, value, tuple(allowed.shape), "(*table)", "That of allowed.")
            setattr(self, name, value)
        self.allowed, self._names = allowed, list(parameters)
        shape = broadcast_shapes(*(value.shape for value in parameters.values()))
        super().__init__(
            shape[: len(shape) - allowed.dim()], allowed.shape, validate_args=validate_args
        )
        if self._validate_args:
            for name, value in parameters.items():
                check_positive(name, value.masked_fill(~allowed, 1.0))

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> Any:
        """Expand to a larger batch."""
        shape = torch.Size(batch_shape) + self.event_shape
        parts = (getattr(self, name).expand(shape) for name in self._names)
        return type(self)(*parts, self.allowed, validate_args=False)  # type: ignore[call-arg, misc]


class _SparseTables(constraints.Constraint):
    """Base of constraints: tables that are zero where ``allowed`` is False."""

    def __init__(self, allowed: Tensor) -> None:
        self.allowed, self.event_dim = allowed, allowed.dim()
        super().__init__()


class _FromVector(Transform):
    """Base of bijections from vectors of ``size`` free numbers to tables."""

    bijective = True
    domain = constraints.real_vector
    size: int

    def __init__(self, codomain: _SparseTables) -> None:
        super().__init__()
        self.codomain, self.allowed = codomain, codomain.allowed

    def forward_shape(self, shape: Any) -> torch.Size:
        return torch.Size(shape[:-1]) + self.allowed.shape

    def inverse_shape(self, shape: Any) -> torch.Size:
        return torch.Size(shape)[: len(shape) - self.allowed.dim()] + torch.Size([self.size])


class SparseDirichlet(_Sparse):
    """Rows of probabilities, Dirichlet over the entries they may use, exactly zero elsewhere.

    Args:
        concentration: Positive, ``(*B, *rows, K)``; what stands at forbidden entries is not read.
        allowed: ``(*rows, K)`` booleans, True where an entry may be positive.

    Raises:
        TypeError: If a dtype is wrong.
        ValueError: If a row allows nothing, shapes disagree, or (with ``validate_args``) a
            concentration is not positive and finite where an entry is allowed.

    Example:
        >>> left_to_right = torch.ones(3, 3).triu().bool()
        >>> matrix = SparseDirichlet(torch.ones(3, 3), left_to_right).sample()
        >>> matrix[1, 0], matrix[2]
        (tensor(0.), tensor([0., 0., 1.]))
    """

    concentration: Tensor

    def __init__(
        self, concentration: Tensor, allowed: Tensor, validate_args: bool | None = None
    ) -> None:
        super().__init__(allowed, validate_args, concentration=concentration)
        if not bool(allowed.any(-1).all()):
            row = (~allowed.any(-1)).nonzero()[0].tolist()
            text = f"allowed must have a True in each row; row {row} has none"
            raise ValueError(f"{text}. Allow an entry there.")

    @property
    def support(self) -> constraints.Constraint:
        """Tables whose rows sum to one and are zero where nothing is allowed."""
        return _SparseSimplex(self.allowed)

    @property
    def mean(self) -> Tensor:
        """Mean of the table, ``(*B, *rows, K)``."""
        strength = self.concentration.masked_fill(~self.allowed, 0.0)
        return strength / strength.sum(-1, keepdim=True)

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Sample tables ``(*S, *B, *rows, K)``."""
        shape = torch.Size(sample_shape) + self.concentration.shape
        strength = self.concentration.masked_fill(~self.allowed, 1.0).expand(shape)
        # Gamma(c) is Gamma(c + 1) U^(1/c); in logs, for a small c underflows in whole rows
        logs = torch.distributions.Gamma(strength + 1, 1.0).rsample().log()
        logs = logs - torch.empty_like(logs).exponential_() / strength
        rows = logs.masked_fill(~self.allowed, -torch.inf).softmax(-1)
        # at zero itself the density is infinite
        return rows.clamp(min=torch.finfo(rows.dtype).tiny).masked_fill(~self.allowed, 0.0)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-density ``(*B)`` of tables; -inf where a forbidden entry is positive."""
        if self._validate_args:
            self._validate_sample(value)
        strength = self.concentration.masked_fill(~self.allowed, 1.0)
        total = self.concentration.masked_fill(~self.allowed, 0.0).sum(-1).lgamma()
        # a flat density has no slope, not even at zero, where xlogy has NaN
        inner = value.masked_fill(~self.allowed | (strength == 1), 1.0)
        powers = torch.xlogy(strength - 1, inner)
        rows = (powers - strength.lgamma()).sum(-1) + total
        # a row that may use one entry has no density
        rows = rows.masked_fill(self.allowed.sum(-1) == 1, 0.0)
        rows = rows.masked_fill(((value > 0) & ~self.allowed).any(-1), -torch.inf)
        return rows.flatten(1 - self.allowed.dim()).sum(-1) if self.allowed.dim() > 1 else rows


class _SparseSimplex(_SparseTables):
    """Constraint: rows of probabilities that are zero where ``allowed`` is False."""

    def check(self, value: Tensor) -> Tensor:
        """Whether rows of each table sum to one, with zeros at forbidden entries."""
        inside = ((value.sum(-1) - 1).abs() < 1e-4) & (value >= 0).all(-1)
        inside = inside & (value.masked_fill(self.allowed, 0.0) == 0).all(-1)
        return inside.flatten(-self.event_dim + 1).all(-1) if self.event_dim > 1 else inside


class _SparseSoftmax(Transform):
    """Softmax over the allowed entries of each row, for optimisers."""

    bijective = False

    def __init__(self, codomain: _SparseSimplex) -> None:
        super().__init__()
        self.allowed, self.codomain = codomain.allowed, codomain
        self.domain = constraints.independent(constraints.real, codomain.event_dim)

    def _call(self, x: Tensor) -> Tensor:
        return x.masked_fill(~self.allowed, -torch.inf).softmax(-1)

    def _inverse(self, y: Tensor) -> Tensor:
        return y.clamp(min=torch.finfo(y.dtype).tiny).log().masked_fill(~self.allowed, 0.0)


class _SparseStickBreaking(_FromVector):
    """Stick-breaking bijection to the allowed entries of each row, for densities.

    Rows differ in the number n of entries allowed. The n - 1 free numbers of all the rows make one
    vector; where a row is shorter than the longest one, the whole rest of the stick is taken.
    """

    def __init__(self, codomain: _SparseSimplex) -> None:
        super().__init__(codomain)
        allowed = self.allowed
        count = allowed.sum(-1, keepdim=True)  # (*rows, 1)
        width = int(count.max())
        self.order = (~allowed).byte().argsort(stable=True)[..., :width]  # allowed ones first
        rest = count - 1 - torch.arange(width - 1, device=allowed.device)
        self.free = rest > 0  # (*rows, width - 1)
        self.size = int(self.free.sum())
        self.offset = rest.clamp(min=1)[self.free].log()  # so that zeros are even shares

    def _break(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Stick-breaking share at each break, and the log of the stick left before it.

        Shares that round to one leave something all the same, which only the logarithm shows.
        """
        share = x.new_ones(x.shape[:-1] + self.free.shape)
        rest = torch.full_like(share, -torch.inf)
        logit = x - self.offset.to(x)
        share[..., self.free] = logit.sigmoid()
        rest[..., self.free] = torch.nn.functional.logsigmoid(-logit)
        return share, torch.cat([x.new_zeros((*share.shape[:-1], 1)), rest.cumsum(-1)], -1)

    def _call(self, x: Tensor) -> Tensor:
        share, left = self._break(x)
        left = left.exp()
        parts = torch.cat([share * left[..., :-1], left[..., -1:]], -1)
        # at zero itself a density may be infinite
        used = torch.nn.functional.pad(self.free, (1, 0), value=True)
        parts = torch.where(used, parts.clamp(min=torch.finfo(parts.dtype).tiny), parts)
        out = parts.new_zeros(parts.shape[: parts.dim() - self.allowed.dim()] + self.allowed.shape)
        return out.scatter(-1, self.order.expand(parts.shape), parts)

    def _inverse(self, y: Tensor) -> Tensor:
        batch = y.shape[: y.dim() - self.allowed.dim()]
        parts = y.gather(-1, self.order.expand(batch + self.order.shape))
        tiny = torch.finfo(y.dtype).tiny
        after = parts.flip(-1).cumsum(-1).flip(-1)[..., 1:].clamp(min=tiny)  # left after the break
        odds = parts[..., :-1].clamp(min=tiny).log() - after.log()
        return odds[..., self.free] + self.offset.to(y)

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        logit = x - self.offset.to(x)
        slope = torch.nn.functional.logsigmoid(logit) + torch.nn.functional.logsigmoid(-logit)
        _, left = self._break(x)
        return (slope + left[..., :-1][..., self.free]).sum(-1)


biject_to.register(_SparseSimplex, _SparseStickBreaking)
transform_to.register(_SparseSimplex, _SparseSoftmax)


class SparseGamma(_Sparse):
    """Independent Gamma variables in the allowed entries of a table, exactly zero elsewhere.

    The prior of rates of a chain in continuous time.

    Args:
        concentration: Positive, ``(*B, *table)``; what stands at forbidden entries is not read.
        rate: Positive, ``(*B, *table)``; likewise.
        allowed: ``(*table)`` booleans, True where an entry may be positive.

    Raises:
        TypeError: If a dtype is wrong.
        ValueError: If shapes disagree, or (with ``validate_args``) a concentration or a rate is not
            positive and finite where an entry is allowed.

    Example:
        >>> others = ~torch.eye(2).bool()
        >>> prior = SparseGamma(torch.ones(2, 2), torch.full((2, 2), 0.5), others)
        >>> prior.mean
        tensor([[0., 2.],
                [2., 0.]])
    """

    concentration: Tensor
    rate: Tensor

    def __init__(
        self, concentration: Tensor, rate: Tensor, allowed: Tensor, validate_args: Any = None
    ) -> None:
        super().__init__(allowed, validate_args, concentration=concentration, rate=rate)

    def _entries(self) -> Gamma:
        """Gamma distribution of each entry; a placeholder where it is forbidden."""
        parts = (part.masked_fill(~self.allowed, 1.0) for part in (self.concentration, self.rate))
        return Gamma(*parts, validate_args=False)

    @property
    def support(self) -> constraints.Constraint:
        """Tables that are not negative, and zero where nothing is allowed."""
        return SparsePositive(self.allowed)

    @property
    def mean(self) -> Tensor:
        """Mean of the table, ``(*B, *table)``."""
        return self._entries().mean.masked_fill(~self.allowed, 0.0)

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Sample tables ``(*S, *B, *table)``."""
        return self._entries().rsample(torch.Size(sample_shape)).masked_fill(~self.allowed, 0.0)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-density ``(*B)`` of tables; -inf where a forbidden entry is positive."""
        if self._validate_args:
            self._validate_sample(value)
        entries = self._entries()
        # a flat density has no slope at zero, where xlogy has NaN
        inner = value.masked_fill(~self.allowed | (entries.concentration == 1), 1.0)
        shape, rate = entries.concentration, entries.rate
        scores = torch.xlogy(shape - 1, inner) - rate * value + torch.xlogy(shape, rate)
        scores = (scores - shape.lgamma()).masked_fill(~self.allowed, 0.0)
        scores = scores.masked_fill((value > 0) & ~self.allowed, -torch.inf)
        return scores.flatten(-self.allowed.dim()).sum(-1)


class SparsePositive(_SparseTables):
    """Constraint: non-negative tables that are zero where ``allowed`` is False."""

    def check(self, value: Tensor) -> Tensor:
        """Whether each table is non-negative, with zeros at forbidden entries."""
        inside = (value >= 0) & ((value == 0) | self.allowed)
        return inside.flatten(-self.event_dim).all(-1)


class _Scattered(_FromVector):
    """Exponential map from a vector to the allowed entries of a table."""

    def __init__(self, codomain: SparsePositive) -> None:
        super().__init__(codomain)
        self.size = int(self.allowed.sum())

    def _call(self, x: Tensor) -> Tensor:
        place = self.allowed.flatten().nonzero().squeeze(-1)
        table = x.new_zeros(*x.shape[:-1], self.allowed.numel())
        table = table.index_copy(-1, place, x.exp())
        return table.unflatten(-1, self.allowed.shape)

    def _inverse(self, y: Tensor) -> Tensor:
        return y[..., self.allowed].clamp(min=torch.finfo(y.dtype).tiny).log()

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        return x.sum(-1)


for _registry in (biject_to, transform_to):
    _registry.register(SparsePositive, _Scattered)


def interior(support: constraints.Constraint, value: Tensor) -> Tensor:
    """Shift ``value`` off the boundary of its support, where gradients and densities may end.

    Probabilities change by about a millionth; what is far inside stays to rounding.

    Args:
        support: Of a latent variable.
        value: One that may lie on the boundary, such as a probability of zero.
    """
    base = support
    while isinstance(base, constraints.independent):
        base = base.base_constraint
    try:
        transform = biject_to(support)
    except NotImplementedError:
        return value
    free = transform.inv(value)
    bounded = type(constraints.simplex) | type(constraints.unit_interval) | _SparseSimplex
    if isinstance(base, bounded):
        return transform(free.clamp(-14.0, 14.0))
    if bool(free.isfinite().all()):
        return value
    return transform(torch.where(free.isfinite(), free, -14.0))
