"""Rows of a table, and the sums that are their gradient, both differentiable any number of times.

``torch.nn.functional.embedding`` does the same, but spends 100 ns on a row however short it is,
which for few states is longer than the recursions take.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._transforms import transforming
from .backends import backend_for


def take_rows(table: Tensor, rows: Tensor) -> Tensor:
    """Rows of ``table`` ``(M, K)`` for each of the integers ``rows`` ``(*)``: ``(*, K)``."""
    if transforming():
        return table[rows]
    return _TakeRows.apply(table, rows.reshape(-1)).reshape(*rows.shape, table.size(-1))


def look_up(log_probs: Tensor, symbols: Tensor) -> Tensor:
    """Log-probabilities ``(*A, K)`` of symbols ``(*A)`` in each of K states.

    Args:
        log_probs: ``(*b, K, V)``, where b broadcasts with A from the right.
        symbols: Integers below V.

    Raises:
        IndexError: If a symbol is none.
    """
    table = log_probs.mT.reshape(-1, log_probs.size(-2))
    rows = symbols.long()
    if log_probs.dim() > 2:
        matrices = torch.arange(len(table) // log_probs.size(-1), device=rows.device)
        beyond = (rows < 0) | (rows >= log_probs.size(-1))  # not the row of another matrix
        rows = rows + matrices.reshape(log_probs.shape[:-2]) * log_probs.size(-1)
        rows = rows.masked_fill(beyond, len(table))
    return take_rows(table, rows)


def add_rows(values: Tensor, rows: Tensor, size: int) -> Tensor:
    """Sums ``(size, K)`` in float64 of the rows of ``values`` ``(M, K)`` that have the same index.

    (In float32, a long sum of small numbers stops growing.) No gradient is kept.
    """
    values = values.detach()
    out = values.new_zeros(size, values.size(1), dtype=torch.float64)
    backend_for(values.device).add_rows(values, rows, out)
    return out


class _TakeRows(torch.autograd.Function):
    """``table[rows]``; its gradient is :class:`_AddRows`."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.size = len(table)
        return backend_for(table.device).take_rows(table, rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        return _AddRows.apply(gradient, rows, ctx.size), None


class _AddRows(torch.autograd.Function):
    """Sums of the rows of ``values`` that have the same index; its gradient is a look-up."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, rows: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(rows)
        return add_rows(values, rows, size).to(values.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (rows,) = ctx.saved_tensors
        return _TakeRows.apply(gradient, rows), None, None
