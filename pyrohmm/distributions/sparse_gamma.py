"""``SparseGamma``: tables of positive numbers some of which are exactly zero."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from pyro.distributions import Gamma
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor
from torch.distributions import biject_to, constraints, transform_to
from torch.distributions.transforms import Transform

from .._checks import PyroValidation, check_booleans, check_floats, check_positive, check_trailing


class SparseGamma(TorchDistribution):
    """Independent Gamma variables in the allowed entries of a table, exactly zero elsewhere.

    The whole table is one event. Guides and samplers change the allowed entries only. It is the
    prior of rates of a chain in continuous time.

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

    arg_constraints: dict[str, constraints.Constraint] = {}  # noqa: RUF012  # torch's interface
    _validate_args = PyroValidation()
    has_rsample = True

    def __init__(
        self,
        concentration: Tensor,
        rate: Tensor,
        allowed: Tensor,
        validate_args: bool | None = None,
    ) -> None:
        check_booleans("allowed", allowed)
        for name, value in (("concentration", concentration), ("rate", rate)):
            check_floats(name, value)
            check_trailing(name, value, tuple(allowed.shape), "(*table)", "That of allowed.")
        self.concentration, self.rate, self.allowed = concentration, rate, allowed
        whole = torch.broadcast_shapes(concentration.shape, rate.shape)
        super().__init__(
            whole[: len(whole) - allowed.dim()], allowed.shape, validate_args=validate_args
        )
        if self._validate_args:
            for name, value in (("concentration", concentration), ("rate", rate)):
                check_positive(name, value.masked_fill(~allowed, 1.0))

    def _entries(self) -> Gamma:
        """The distribution of each entry; something where it is forbidden."""
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

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> SparseGamma:
        """Expand to a larger batch."""
        shape = torch.Size(batch_shape) + self.event_shape
        parts = self.concentration.expand(shape), self.rate.expand(shape)
        return SparseGamma(*parts, self.allowed, validate_args=False)

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
        scores = (
            torch.xlogy(entries.concentration - 1, inner) - entries.rate * value
            + torch.xlogy(entries.concentration, entries.rate) - entries.concentration.lgamma()
        )  # fmt: skip
        scores = scores.masked_fill(~self.allowed, 0.0)
        scores = scores.masked_fill((value > 0) & ~self.allowed, -torch.inf)
        return scores.flatten(-self.allowed.dim()).sum(-1)


class SparsePositive(constraints.Constraint):
    """Tables of numbers that are not negative, and zero where ``allowed`` is not."""

    def __init__(self, allowed: Tensor) -> None:
        self.allowed = allowed
        self.event_dim = allowed.dim()
        super().__init__()

    def check(self, value: Tensor) -> Tensor:
        """Whether each table is one of them."""
        inside = (value >= 0) & ((value == 0) | self.allowed)
        return inside.flatten(-self.event_dim).all(-1)


class _Scattered(Transform):
    """Exponentials of a vector, in the allowed entries of a table."""

    bijective = True

    def __init__(self, allowed: Tensor) -> None:
        super().__init__()
        self.allowed = allowed
        self.domain = constraints.real_vector
        self.codomain = SparsePositive(allowed)

    def _call(self, x: Tensor) -> Tensor:
        place = self.allowed.flatten().nonzero().squeeze(-1)
        table = x.new_zeros(*x.shape[:-1], self.allowed.numel())
        table = table.index_copy(-1, place, x.exp())
        return table.unflatten(-1, self.allowed.shape)

    def _inverse(self, y: Tensor) -> Tensor:
        return y[..., self.allowed].clamp(min=torch.finfo(y.dtype).tiny).log()

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        return x.sum(-1)

    def forward_shape(self, shape: Any) -> torch.Size:
        return torch.Size(shape[:-1]) + self.allowed.shape

    def inverse_shape(self, shape: Any) -> torch.Size:
        shape = torch.Size(shape)
        return shape[: len(shape) - self.allowed.dim()] + torch.Size([int(self.allowed.sum())])


@biject_to.register(SparsePositive)
@transform_to.register(SparsePositive)
def _map_to_table(constraint: SparsePositive) -> Transform:
    return _Scattered(constraint.allowed)
