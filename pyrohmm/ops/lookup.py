"""Rows of a table, and the sums that are their gradient, both differentiable any number of times.

``torch.nn.functional.embedding`` does the same, but spends 100 ns on a row however short it is,
which for few states is longer than the recursions take.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor


@cache
def kernels(module: str = "_numba_chain") -> ModuleType | None:
    """The compiled loops of a module of this package, if Numba is installed."""
    try:
        return import_module(f".{module}", __package__)
    except ImportError:
        return None


def take_rows(table: Tensor, rows: Tensor) -> Tensor:
    """Rows of ``table`` ``(M, K)`` for each of the integers ``rows`` ``(*)``: ``(*, K)``."""
    found = _TakeRows.apply(table, rows.reshape(-1))
    return found.reshape(*rows.shape, table.size(-1))


def add_rows(values: Tensor, rows: Tensor, size: int) -> Tensor:
    """Sums ``(size, K)`` in float64 of the rows of ``values`` ``(M, K)`` that have the same index.

    (Sums of many small numbers in float32 come to a stand.) No gradient is kept.
    """
    values = values.detach()
    out = values.new_zeros(size, values.size(1), dtype=torch.float64)
    compiled = kernels() if values.device.type == "cpu" else None
    if compiled is None:
        return out.index_add_(0, rows, values.double())
    work = len(rows) * values.size(1) // size
    compiled.run(compiled.add_rows, size, work, rows, values.contiguous(), out)
    return out


class _TakeRows(torch.autograd.Function):
    """``table[rows]``; its gradient is :class:`_AddRows`."""

    @staticmethod
    def forward(ctx, table, rows):
        ctx.save_for_backward(rows)
        ctx.size = len(table)
        compiled = kernels() if table.device.type == "cpu" else None
        if compiled is None:
            return table.index_select(0, rows)
        low, high = (int(end) for end in torch.aminmax(rows)) if len(rows) else (0, 0)
        if low < 0 or high >= len(table):
            raise IndexError(f"rows must lie between 0 and {len(table) - 1}; got {low} to {high}.")
        out = table.new_empty(len(rows), table.size(1))
        width = table.size(1)
        compiled.run(compiled.take_rows, len(rows), width, table.contiguous(), rows, out)
        return out

    @staticmethod
    def backward(ctx, gradient):
        (rows,) = ctx.saved_tensors
        return _AddRows.apply(gradient, rows, ctx.size), None


class _AddRows(torch.autograd.Function):
    """Sums of the rows of ``values`` that have the same index; its gradient is a look-up."""

    @staticmethod
    def forward(ctx, values, rows, size):
        ctx.save_for_backward(rows)
        out = values.new_zeros(size, values.size(1))
        compiled = kernels() if values.device.type == "cpu" else None
        if compiled is None:
            return out.index_add_(0, rows, values)
        work = len(rows) * values.size(1) // size
        compiled.run(compiled.add_rows, size, work, rows, values.contiguous(), out)
        return out

    @staticmethod
    def backward(ctx, gradient):
        (rows,) = ctx.saved_tensors
        return _TakeRows.apply(gradient, rows), None, None
