r"""``Pairs``: sparse counts of pairs of symbols, and losses of a model that predicts their shares.

``K`` states, ``V`` symbols, ``M`` distinct pairs that occur; ``*B`` are batch dimensions.

``joint``   ``(*B, K, K)``  :math:`\Theta = \mathrm{diag}(\pi) A^d`, of two states d steps apart
``probs``   ``(*B, K, V)``  B, probabilities of symbols in each state
``target``  what was counted, W: :class:`Pairs`, or dense fractions ``(*B, V, V)``

A model predicts :math:`\Omega = B^\top \Theta B`, which has V² entries. Losses against
:class:`Pairs` never write them down: they cost O(V K² + M K) and keep O(V K + M) numbers.
"""

from __future__ import annotations

import warnings
from functools import cached_property
from typing import Any

import numpy as np
import torch
from scipy.sparse import csr_array
from torch import Tensor

from .._checks import check_integers, check_range, check_size
from .log_space import log

FAINT = 1e-30  # probabilities of pairs below which single precision may lose them
SMALL = 256  # symbols, up to which all V^2 pairs take less time than those that occur


class Pairs:
    """Sparse matrix of counts: how often each symbol follows each.

    Pairs may be given in any order, and more than once; they are sorted and added up.

    Args:
        first: ``(M,)`` integers, the symbols that come first.
        second: ``(M,)`` integers, those that follow.
        counts: ``(M,)`` integers, at least 1, how often they do.
        num_symbols: V.
        lag: By how many steps the second follows the first.

    Attributes:
        first, second, counts: As above, sorted by ``first`` and then ``second``, each pair once.
        num_symbols, lag: As above.

    Raises:
        TypeError: If a tensor does not hold integers.
        ValueError: If shapes disagree, there is no pair, a symbol is not below V, or a count is
            not positive.

    Example:
        >>> pairs = Pairs(torch.tensor([1, 0]), torch.tensor([0, 1]), torch.tensor([1, 3]), 2)
        >>> pairs
        Pairs(2 distinct pairs of 2 symbols, 4 in all, lag 1)
        >>> pairs.dense()
        tensor([[0.0000, 0.7500],
                [0.2500, 0.0000]])
    """

    def __init__(
        self, first: Tensor, second: Tensor, counts: Tensor, num_symbols: int, lag: int = 1
    ) -> None:
        check_size("num_symbols", num_symbols)
        check_size("lag", lag)
        for name, tensor in (("first", first), ("second", second), ("counts", counts)):
            check_integers(name, tensor)
            if tensor.dim() != 1 or len(tensor) == 0 or tensor.shape != first.shape:
                raise ValueError(
                    f"{name} must have shape (M,), as first and with at least one pair; got "
                    f"{tuple(tensor.shape)}, and first has {tuple(first.shape)}. Flatten them."
                )
        for name, tensor in (("first", first), ("second", second)):
            check_range(name, tensor, num_symbols, "V - 1")
        if int(counts.min()) < 1:
            text = f"counts must be at least 1; got {int(counts.min())}"
            raise ValueError(f"{text}. Drop pairs that never occur.")
        self.first, self.second, self.counts = first.long(), second.long(), counts.long()
        keys = self.first * num_symbols + self.second
        if not bool((keys[1:] > keys[:-1]).all()):
            sums = add_up(keys.cpu().numpy(), self.counts.cpu().numpy())
            keys, self.counts = (torch.from_numpy(column).to(first.device) for column in sums)
            self.first, self.second = keys // num_symbols, keys % num_symbols
        self.num_symbols, self.lag = num_symbols, lag

    def __len__(self) -> int:
        return len(self.counts)

    def __repr__(self) -> str:
        return (
            f"Pairs({len(self):,} distinct pairs of {self.num_symbols:,} symbols, "
            f"{self.total:,} in all, lag {self.lag})"
        )

    @cached_property
    def total(self) -> int:
        """Number of pairs counted."""
        return int(self.counts.sum())

    @cached_property
    def fractions(self) -> Tensor:
        """Relative frequencies ``(M,)`` of the pairs, in float64."""
        return self.counts / torch.tensor(self.total, dtype=torch.float64)

    @cached_property
    def squares(self) -> float:
        """The sum of the squared fractions."""
        return float(self.fractions.square().sum())

    @cached_property
    def relative_weights(self) -> Tensor:
        """Weights ``(V,)`` of the symbols in :func:`relative_distance`."""
        shares = self.fractions.new_zeros(self.num_symbols)
        for symbols in (self.first, self.second):
            shares.index_add_(0, symbols, self.fractions)
        return relative_weights(shares / 2)

    @cached_property
    def relative_squares(self) -> float:
        """The sum of the squared fractions with these weights."""
        weights = self.relative_weights
        return float((self.fractions.square() * weights[self.first] * weights[self.second]).sum())

    def dense(self) -> Tensor:
        """The fractions as a matrix ``(V, V)``, in the default dtype, with zeros elsewhere."""
        return self._dense.to(torch.get_default_dtype(), copy=True)

    def to(self, device: torch.device | str) -> Pairs:
        """Copy the pairs to ``device`` where needed."""
        if self.counts.device == torch.empty(0, device=device).device:
            return self
        first, second, counts = (each.to(device) for each in (self.first, self.second, self.counts))
        return Pairs(first, second, counts, self.num_symbols, self.lag)

    @cached_property
    def _dense(self) -> Tensor:
        out = self.fractions.new_zeros(self.num_symbols, self.num_symbols)
        out[self.first, self.second] = self.fractions
        return out

    @cached_property
    def _layouts(self) -> list[tuple[Any, Tensor, Tensor, Tensor]]:
        """Order of the pairs, row offsets, columns and fractions: of the matrix, transposed."""
        size, ends = self.num_symbols, (self.first, self.second)
        starts = [torch.bincount(rows + 1, minlength=size + 1).cumsum(0) for rows in ends]
        parts = np.arange(len(self)), self.second.cpu().numpy(), starts[0].cpu().numpy()
        # in O(V + M), where a sort would take ten times as long
        order = torch.from_numpy(csr_array(parts, (size, size)).tocsc().data).to(starts[0].device)
        turned = order, starts[1], self.first[order], self.fractions[order]
        return [(slice(None), starts[0], self.second, self.fractions), turned]

    def _matrix(self, values: Tensor | None, transposed: bool) -> Tensor:
        """A sparse matrix of ``values`` ``(M,)`` in place of the fractions, perhaps transposed."""
        order, starts, columns, fractions = self._layouts[transposed]
        values, shape = fractions if values is None else values[order], (self.num_symbols,) * 2
        with warnings.catch_warnings(action="ignore"):  # torch says once that the format is young
            return torch.sparse_csr_tensor(starts, columns, values, shape, check_invariants=False)


def relative_weights(shares: Tensor) -> Tensor:
    """Inverse of the mean of symbol frequencies ``shares`` ``(*B, V)`` and uniform frequencies."""
    return 2 / (shares + 1 / shares.size(-1))


def add_up(keys: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distinct keys in ascending order, and the sums of their counts."""
    distinct = np.unique(keys)  # sorting keys alone is ten times as fast as sorting with counts
    sums = np.zeros_like(distinct)
    np.add.at(sums, np.searchsorted(distinct, keys), counts)
    return distinct, sums


# Losses ------------------------------------------------------------------------------------------


def squared_distance(joint: Tensor, probs: Tensor, target: Pairs | Tensor) -> Tensor:
    r"""Squared Frobenius distance to the counted frequencies, :math:`\lVert \Omega - W \rVert^2`.

    Against :class:`Pairs` it is
    :math:`\mathrm{tr}(\Theta^\top G \Theta G) - 2 \langle \Theta, B W B^\top \rangle +
    \lVert W \rVert^2` with :math:`G = B B^\top`, in float64, in which the terms cancel to some
    1e-16 of :math:`\lVert W \rVert^2`: at a perfect fit the result may be as much below zero.

    Its gradient by the logarithm of a probability is in proportion to that probability: with
    thousands of symbols a fit that starts far off makes little progress, unlike with
    :func:`relative_distance` and :func:`cross_entropy`.

    Args:
        joint: ``(*B, K, K)``.
        probs: ``(*B, K, V)``.
        target: Pairs, or dense fractions ``(*B, V, V)``.

    Returns:
        ``(*B)``.

    Example:
        >>> both = torch.tensor([[0.5, 0.0], [0.0, 0.5]])
        >>> target = Pairs(torch.tensor([0, 1]), torch.tensor([1, 1]), torch.tensor([1, 1]), 2)
        >>> squared_distance(both, torch.eye(2), target)  # ((1/2)^2 + (-1/2)^2 + 0)
        tensor(0.5000)
    """
    if isinstance(target, Tensor):
        return (probs.mT @ joint @ probs - target).square().sum((-2, -1))
    if target.num_symbols <= SMALL:
        return squared_distance(joint, probs, target._dense.to(probs.dtype))
    table = _table(probs, torch.float64)
    return (_expanded(joint, table, table, target) + target.squares).to(probs.dtype)


def relative_distance(joint: Tensor, probs: Tensor, target: Pairs | Tensor) -> Tensor:
    r"""Half the squared distance, relative to what independent symbols would have.

    .. math:: \frac12 \sum_{xy} \frac{(\Omega_{xy} - W_{xy})^2}{m_x m_y}, \quad
              m_x = \frac12 \Big( \frac1V + \frac12 \sum_y (W_{xy} + W_{yx}) \Big)

    Rare symbols count as much as frequent ones, so that fits of thousands of symbols make progress
    from any start. Where symbols are nearly independent this is the excess of
    :func:`cross_entropy` over its least value, to second order. Half of m is uniform, lest pairs of
    symbols that occur once dominate (as in the regularised Laplacian of Qin and Rohe, 2013,
    https://arxiv.org/abs/1309.4111). The cost and the precision are those of
    :func:`squared_distance`.

    Args:
        joint: ``(*B, K, K)``.
        probs: ``(*B, K, V)``.
        target: Pairs, or dense fractions ``(*B, V, V)``.

    Returns:
        ``(*B)``.

    Example:
        >>> both = torch.tensor([[0.5, 0.0], [0.0, 0.5]])
        >>> target = Pairs(torch.tensor([0, 1]), torch.tensor([1, 0]), torch.tensor([1, 1]), 2)
        >>> relative_distance(both, torch.eye(2), target)  # four times (1/2)^2 / (2 m m), m = 1/2
        tensor(2.)
    """
    if isinstance(target, Tensor):
        weights = relative_weights((target.sum(-1) + target.sum(-2)) / 2)
        difference = probs.mT @ joint @ probs - target
        terms = weights.unsqueeze(-1) * difference.square() * weights.unsqueeze(-2)
        return terms.sum((-2, -1)) / 2
    table = _table(probs, torch.float64)
    weighted = target.relative_weights.unsqueeze(-1) * table
    value = _expanded(joint, table, weighted, target) + target.relative_squares
    return (value / 2).to(probs.dtype)


def _expanded(joint: Tensor, table: Tensor, weighted: Tensor, pairs: Pairs) -> Tensor:
    """Squared distance less a constant, from K x K products; ``weighted`` is w times a table."""
    joint = joint.double()
    gram = table.mT @ weighted  # G, (*B, K, K)
    cross = weighted.mT @ _Product.apply(None, weighted, pairs, False)  # B W B^T, (*B, K, K)
    return (joint.mT @ gram @ joint * gram).sum((-2, -1)) - 2 * (joint * cross).sum((-2, -1))


def cross_entropy(joint: Tensor, probs: Tensor, target: Pairs | Tensor) -> Tensor:
    r"""Minus the mean log-probability of the pairs, :math:`-\sum_{xy} W_{xy} \log \Omega_{xy}`.

    In nats per pair; at least the entropy of the target. If a pair occurs that is impossible under
    the model, the result is infinite, and this pair adds nothing to the gradient.

    Args:
        joint: ``(*B, K, K)``.
        probs: ``(*B, K, V)``.
        target: Pairs, or dense fractions ``(*B, V, V)``.

    Returns:
        ``(*B)``.

    Example:
        >>> even = torch.full((2, 2), 0.25)
        >>> target = Pairs(torch.tensor([0, 1]), torch.tensor([1, 1]), torch.tensor([1, 1]), 2)
        >>> cross_entropy(even, torch.eye(2), target)  # log 4
        tensor(1.3863)
    """
    if isinstance(target, Pairs) and target.num_symbols <= SMALL:
        target = target._dense
    fractions = target if isinstance(target, Tensor) else target.fractions
    pair_probs = _pair_probs(joint, probs, target)  # as fractions, but for batch dimensions
    if bool(pair_probs.detach().amin() > FAINT):
        logs = pair_probs.log()
    else:  # too small for single precision, or zero
        logs = log(_pair_probs(joint.double(), probs.double(), target))
    over = (-2, -1) if isinstance(target, Tensor) else (-1,)
    terms = fractions.to(logs.dtype) * logs
    return -terms.sum(over, dtype=torch.float64).to(probs.dtype)


def _pair_probs(joint: Tensor, probs: Tensor, target: Pairs | Tensor) -> Tensor:
    """Predicted probabilities of the counted pairs, ``(*B, M)``; if dense, one elsewhere."""
    if isinstance(target, Tensor):
        return (probs.mT @ joint @ probs).masked_fill(target <= 0, 1.0)
    table = _table(probs, probs.dtype)
    before = table @ joint  # its products with rows of the table are the probabilities
    return _Products.apply(before, table.expand(before.shape), target)


def _table(probs: Tensor, dtype: torch.dtype) -> Tensor:
    """Transpose emission probabilities to one contiguous row per symbol, ``(*B, V, K)``."""
    return probs.mT.to(dtype).contiguous()


# Two products with a sparse matrix. The gradient of each is the other, so that both can be
# differentiated any number of times; nothing of size M K or V V is ever made.


class _Product(torch.autograd.Function):
    """A sparse matrix (``values`` ``(*B, M)``, or the fractions) times tables ``(*B, V, K)``."""

    @staticmethod
    def forward(
        ctx: Any, values: Tensor | None, table: Tensor, pairs: Pairs, transposed: bool
    ) -> Tensor:
        ctx.save_for_backward(values, table)
        ctx.pairs, ctx.transposed = pairs, transposed
        every = table.reshape(-1, *table.shape[-2:])
        entries = [None] * len(every) if values is None else values.reshape(-1, values.size(-1))
        products = [pairs._matrix(each, transposed) @ one for each, one in zip(entries, every)]
        return torch.stack(products).reshape(table.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        values, table = ctx.saved_tensors
        by_values = by_table = None
        if ctx.needs_input_grad[0]:
            sides = (table, gradient) if ctx.transposed else (gradient, table)
            by_values = _Products.apply(*sides, ctx.pairs)
        if ctx.needs_input_grad[1]:
            by_table = _Product.apply(values, gradient, ctx.pairs, not ctx.transposed)
        return by_values, by_table, None, None


class _Products(torch.autograd.Function):
    """Inner products ``(*B, M)`` of rows ``first`` and ``second`` of two tables ``(*B, V, K)``."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, pairs: Pairs) -> Tensor:
        ctx.save_for_backward(left, right)
        ctx.pairs = pairs
        places = pairs._matrix(left.new_zeros(len(pairs)), False)
        both = (table.reshape(-1, *table.shape[-2:]) for table in (left, right))
        products = [
            torch.sparse.sampled_addmm(places, one, other.mT, beta=0.0).values()
            for one, other in zip(*both)
        ]
        return torch.stack(products).reshape(*left.shape[:-2], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        left, right = ctx.saved_tensors
        by_left = by_right = None
        if ctx.needs_input_grad[0]:
            by_left = _Product.apply(gradient, right, ctx.pairs, False)
        if ctx.needs_input_grad[1]:
            by_right = _Product.apply(gradient, left, ctx.pairs, True)
        return by_left, by_right, None
