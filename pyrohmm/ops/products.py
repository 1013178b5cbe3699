r"""Products of matrices between observations and states.

Rows are features of observations, ``(*A, F)``, columns belong to states, ``(*b, K, F)``; their
batch dimensions broadcast from the right. What has a size of its own on both sides, as parameters
per sequence have, becomes a batch of products; all else is one product. Neither values nor
gradients make one number for each observation, state and feature.

Gradients by columns are sums over all observations whose terms cancel: they are added up in
float64, whatever the dtype of the rows. Columns may be in float64 beside rows in float32: then what
their gradients become parts of cancels in float64 too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from .._precision import differentiable_gradient, full_precision, in_full_precision
from .._threads import threads_for
from .._transforms import transforming
from .backends import backend_for

CHUNK = 1 << 17  # numbers made at once: they stay in the cache of a core
NARROW, BLOCK = 32, 512  # states; and rows whose sums are in single precision, where there are more


def accumulated(weights: Tensor, rows: Tensor, cancels: bool = True) -> Tensor:
    r"""Sums :math:`\sum_n w_{nk} r_{nf}`, ``(*S, K, F)``, in float64.

    In float32 a long sum of equal numbers is off by parts in a hundred, for each addition rounds
    the same way; and whatever cancels afterwards makes more of that.

    Args:
        weights: ``(*S, N, K)``.
        rows: ``(*S, N, F)``.
        cancels: Whether most of the sums may cancel in what is made of them, as in a gradient by
            means. If not, and there are many states, those over ``BLOCK`` rows are of the dtype of
            the rows: 7e-6 wrong at most, in half of the time.

    Example:
        >>> tenth = torch.full((1_000_000, 1), 0.1)
        >>> accumulated(tenth, torch.ones_like(tenth)).round(decimals=1)
        tensor([[100000.]], dtype=torch.float64)
    """
    if weights.dtype == torch.float64 or torch.is_grad_enabled():
        return weights.double().mT @ rows.double()
    shape = *weights.shape[:-2], weights.size(-1), rows.size(-1)
    out = rows.new_zeros(shape, dtype=torch.float64)
    if cancels or weights.size(-1) < NARROW:
        backend_for(rows.device).add_products(weights, rows, out)
        return out
    for weight, part in zip(weights.split(BLOCK, -2), rows.split(BLOCK, -2)):
        out += weight.mT @ part
    return out


def product(rows: Tensor, columns: Tensor) -> Tensor:
    r"""Inner products :math:`\sum_f r_f c_{kf}`, ``(*A, K)``, A being as wide as A and b together.

    Differentiable any number of times.

    Args:
        rows: ``(*A, F)``.
        columns: ``(*b, K, F)``.

    Example:
        >>> product(torch.ones(5, 2), torch.ones(3, 1, 4, 2)).shape  # three restarts
        torch.Size([3, 5, 4])
    """
    batch = _Batch(rows.shape[:-1], columns.shape[:-2])
    multiply = _product if transforming() else _Product.apply
    with full_precision(rows):
        return batch.join(multiply(batch.of_rows(rows), batch.of_columns(columns, 2)))


def squared_norms(rows: Tensor, columns: Tensor) -> Tensor:
    r"""Squared norms :math:`\sum_d (\sum_f r_f c_{kdf})^2`, ``(*A, K)``, in chunks of rows.

    Differentiable any number of times; more than once is for small problems.

    Args:
        rows: ``(*A, F)``.
        columns: ``(*b, K, D, F)``.
    """
    batch = _Batch(rows.shape[:-1], columns.shape[:-3])
    compute = _all_squared_norms if transforming() else _SquaredNorms.apply
    with full_precision(rows):
        return batch.join(compute(batch.of_rows(rows), batch.of_columns(columns, 3)))


def quadratic_forms(rows: Tensor, matrices: Tensor) -> Tensor:
    r"""Quadratic forms :math:`\sum_{fg} r_f M_{kfg} r_g`, ``(*A, K)``, in chunks of rows.

    A product with the products of components, of which there are half as many numbers as in
    :func:`squared_norms`; but these may cancel. Differentiable as there.

    Args:
        rows: ``(*A, F)``.
        matrices: ``(*b, K, F, F)``, symmetric.
    """
    batch = _Batch(rows.shape[:-1], matrices.shape[:-3])
    compute = _all_quadratic_forms if transforming() else _QuadraticForms.apply
    with full_precision(rows):
        return batch.join(compute(batch.of_rows(rows), batch.of_columns(matrices, 3)))


def upper_products(rows: Tensor) -> Tensor:
    """Products of components ``(*, F (F + 1) / 2)`` of ``rows`` ``(*, F)``: each pair once."""
    columns, size = rows.mT.contiguous(), rows.size(-1)
    out = rows.new_empty(*rows.shape[:-2], size * (size + 1) // 2, rows.size(-2))
    for i, part in enumerate(out.split([*range(size, 0, -1)], -2)):
        torch.mul(columns[..., i : i + 1, :], columns[..., i:, :], out=part)
    return out.mT


def symmetric(products: Tensor, size: int) -> Tensor:
    """Symmetric matrices ``(*, F, F)`` of what belongs to :func:`upper_products`."""
    first, second = torch.triu_indices(size, size, device=products.device)
    places = first.new_zeros(size, size)
    places[first, second] = places[second, first] = torch.arange(len(first), device=first.device)
    return products[..., places]


def weighted_sums(
    weights: Tensor, values: Tensor, features: Callable[[Tensor], Tensor], width: int
) -> Tensor:
    r"""Sums :math:`\sum_m w_{rmk} f(x_m)`, ``(R, K, F)``, in float64 and in chunks of observations.

    Args:
        weights: ``(R, M, K)``.
        values: ``(M, D)``.
        features: Of values ``(m, D)`` in float64, ``(m, F)``.
        width: F.
    """
    restarts, _, states = weights.shape
    size = max(1, CHUNK // max(width, restarts * states))
    parts = zip(weights.split(size, 1), values.split(size))
    total = weights.new_zeros(restarts, states, width, dtype=torch.float64)
    with threads_for(weights.numel() * width):
        for weight, value in parts:
            total += weight.double().mT @ features(value.double())
    return total


class _Batch:
    """The batch dimensions of a product: those that both sides have, rows alone, columns alone."""

    def __init__(self, rows: torch.Size, columns: torch.Size) -> None:
        shape = torch.broadcast_shapes(rows, columns)
        rows, columns = (torch.Size([1] * (len(shape) - len(x))) + x for x in (rows, columns))
        sizes = list(enumerate(zip(rows, columns)))
        both = [i for i, (row, column) in sizes if row != 1 and column != 1]
        left = [i for i, (_, column) in sizes if column == 1]
        right = [i for i, (row, column) in sizes if row == 1 and column != 1]
        self.rows, self.columns, self.order = rows, columns, [*both, *left, *right]
        self.shape = [shape[i] for i in self.order]
        self.shared = [math.prod(shape[i] for i in both)] if both else []
        self.height = math.prod(shape[i] for i in left)
        self.width = math.prod(shape[i] for i in right)

    def of_rows(self, rows: Tensor) -> Tensor:
        """``(*A, F)`` as ``([S,] L, F)``."""
        size = rows.size(-1)
        rows = rows.reshape(*self.rows, size).permute(*self.order, -1)
        return rows.reshape(*self.shared, self.height, size)

    def of_columns(self, columns: Tensor, own: int) -> Tensor:
        """``(*b, K, *X)`` as ``([S,] R K, *X)``; ``own`` is the number of dimensions after b."""
        states, *rest = columns.shape[columns.dim() - own :]
        columns = columns.reshape(*self.columns, states, *rest)
        columns = columns.permute(*self.order, *range(-own, 0))
        return columns.reshape(*self.shared, self.width * states, *rest)

    def join(self, products: Tensor) -> Tensor:
        """``([S,] L, R K)`` as ``(*A, K)``."""
        states = products.size(-1) // max(self.width, 1)
        products = products.reshape(*self.shape, states)
        return products.permute(*(self.order.index(i) for i in range(len(self.order))), -1)


def _product(rows: Tensor, columns: Tensor) -> Tensor:
    return rows @ columns.to(rows.dtype).mT


def _threads_for(rows: Tensor, columns: Tensor) -> AbstractContextManager[None]:
    """Threads for the product of ``([S,] L, F)`` and ``([S,] K, *D, F)``."""
    shared = len(rows) if rows.dim() == 3 else 1
    return threads_for(rows.numel() * columns.numel() / max(shared * rows.size(-1), 1))


class _Product(torch.autograd.Function):
    """``rows @ columns.mT``; the gradients are products also."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, columns: Tensor) -> Tensor:
        ctx.save_for_backward(rows, columns)
        with _threads_for(rows, columns):
            return _product(rows, columns)

    @staticmethod
    @in_full_precision
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        rows, columns = ctx.saved_tensors
        by_rows, by_columns = ctx.needs_input_grad
        with _threads_for(rows, columns):
            return (
                gradient @ columns.to(rows.dtype) if by_rows else None,
                accumulated(gradient, rows).to(columns.dtype) if by_columns else None,
            )


class _SquaredNorms(torch.autograd.Function):
    """Squared norms ``([S,] L, K)`` of rows ``([S,] L, F)`` by columns ``([S,] K, D, F)``."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, columns: Tensor) -> Tensor:
        ctx.save_for_backward(rows, columns)
        out = rows.new_empty(*rows.shape[:-1], columns.size(-3))
        with _threads_for(rows, columns):
            for chunk, inner in _inner_products(rows, columns):
                torch.sum(inner.square_(), -2, out=out[..., chunk, :])
        return out

    @staticmethod
    @in_full_precision
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, columns = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient will itself be differentiated
            return tuple(differentiable_gradient(_all_squared_norms, (rows, columns), gradient))
        flat = _flat(columns).to(rows.dtype)
        by_rows, by_flat = torch.zeros_like(rows), torch.zeros_like(flat.mT, dtype=torch.float64)
        with _threads_for(rows, columns):
            for chunk, inner in _inner_products(rows, columns):
                inner = inner.mul_(2 * gradient[..., chunk, :].unsqueeze(-2)).flatten(-2)
                by_flat += accumulated(rows[..., chunk, :], inner)
                if ctx.needs_input_grad[0]:
                    by_rows[..., chunk, :] = inner @ flat
        by_columns = by_flat.unflatten(-1, (columns.size(-2), columns.size(-3)))
        return by_rows, by_columns.movedim(-3, -1).transpose(-3, -2).to(columns.dtype)


class _QuadraticForms(torch.autograd.Function):
    """Quadratic forms ``([S,] L, K)`` of rows ``([S,] L, F)`` by matrices ``([S,] K, F, F)``."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrices: Tensor) -> Tensor:
        ctx.save_for_backward(rows, matrices)
        first, second = torch.triu_indices(rows.size(-1), rows.size(-1), device=rows.device)
        flat = matrices[..., first, second] * torch.where(first == second, 1.0, 2.0)
        flat = flat.to(rows.dtype)
        out = rows.new_empty(*rows.shape[:-1], matrices.size(-3))
        with _threads_for(rows, matrices):
            for chunk in _chunks(rows, flat.size(-1) // 4):  # they are made one by one
                torch.matmul(upper_products(rows[..., chunk, :]), flat.mT, out=out[..., chunk, :])
        return out

    @staticmethod
    @in_full_precision
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, matrices = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient will itself be differentiated
            return tuple(differentiable_gradient(_all_quadratic_forms, (rows, matrices), gradient))
        size = rows.size(-1)
        shape = *gradient.shape[:-2], gradient.size(-1), size * (size + 1) // 2
        flat, wide = rows.new_zeros(shape, dtype=torch.float64), matrices.flatten(-2).to(rows.dtype)
        by_rows = torch.zeros_like(rows) if ctx.needs_input_grad[0] else None
        with _threads_for(rows, matrices):
            for chunk in _chunks(rows, flat.size(-1) // 4):  # they are made one by one
                part, weights = rows[..., chunk, :], gradient[..., chunk, :]
                flat += accumulated(weights, upper_products(part))
                if by_rows is not None:
                    mixed = (weights @ wide).unflatten(-1, (size, size))
                    by_rows[..., chunk, :] = 2 * (mixed @ part.unsqueeze(-1)).squeeze(-1)
        return by_rows, symmetric(flat, size).to(matrices.dtype)


def _chunks(rows: Tensor, width: int) -> Iterator[slice]:
    """Slices of rows of which ``width`` numbers each are made."""
    size = max(1, CHUNK // max(1, width * math.prod(rows.shape[:-2])))
    for start in range(0, rows.size(-2), size):
        yield slice(start, start + size)


def _flat(columns: Tensor) -> Tensor:
    """``(.., K, D, F)`` as ``(.., D K, F)``: sums over D are then sums of contiguous rows."""
    return columns.transpose(-3, -2).flatten(-3, -2)


def _inner_products(rows: Tensor, columns: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Chunks of rows, and their inner products ``(.., l, D, K)``."""
    states, dim = columns.shape[-3:-1]
    flat = _flat(columns).mT.to(rows.dtype)
    for chunk in _chunks(rows, flat.size(-1)):
        yield chunk, (rows[..., chunk, :] @ flat).unflatten(-1, (dim, states))


def _all_squared_norms(rows: Tensor, columns: Tensor) -> Tensor:
    inner = _product(rows, _flat(columns)).unflatten(-1, (columns.size(-2), columns.size(-3)))
    return inner.square().sum(-2)


def _all_quadratic_forms(rows: Tensor, matrices: Tensor) -> Tensor:
    apart = _product(rows, matrices.flatten(-3, -2)).unflatten(-1, matrices.shape[-3:-1])
    return (apart * rows.unsqueeze(-2)).sum(-1)
