r"""Products of matrices between observations and states, look-ups, and the sums of their gradients.

Rows are features of observations, ``(*A, F)``, columns belong to states, ``(*b, K, F)``; their
batch dimensions broadcast from the right. What has a size of its own on both sides, as parameters
per sequence have, becomes a batch of products; all else is one product. Neither values nor
gradients make one number for each observation, state and feature. A look-up is the product with a
row of zeros and a one.

Gradients by columns are sums over all observations whose terms cancel: they are added up in
float64, whatever the dtype of the rows. Columns may be in float64 beside rows in float32: then what
their gradients become parts of cancels in float64 too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from .._checks import broadcast_shapes
from .._choices import ADDED, BLOCK, CACHED, NARROW, ON_DEVICE, THIN, threads_for
from .._imports import imported
from .._precision import full_precision, with_gradient
from .._transforms import transforming
from .backends import NUMBA, pick

CHUNK = CACHED
FEWER = 8  # numbers for each integer in their range, from which a table of these is made
LOST = 1e-30  # share of a sum of squares that is rounded away, even if they differ much
LONG = 96  # numbers of an observation, from which few of them may be all that counts


def look_up(log_probs: Tensor, symbols: Tensor) -> Tensor:
    """Gather log-probabilities ``(*A, K)`` of symbols ``(*A)`` in each of K states.

    Args:
        log_probs: ``(*b, K, V)``, where b broadcasts with A from the right.
        symbols: Integers below V.

    Raises:
        IndexError: If a symbol is none.
    """
    table = log_probs.mT.reshape(-1, log_probs.size(-2))
    batch = log_probs.shape[:-2]
    rows = symbols.long()
    if batch.numel() == 1:
        rows = rows.expand(broadcast_shapes(batch, rows.shape))
    else:
        matrices = torch.arange(len(table) // log_probs.size(-1), device=rows.device)
        beyond = (rows < 0) | (rows >= log_probs.size(-1))  # not the row of another matrix
        rows = rows + matrices.reshape(batch) * log_probs.size(-1)
        rows = rows.masked_fill(beyond, len(table))
    try:
        return take_rows(table, rows)
    except IndexError:
        raise IndexError(
            f"symbols must lie between 0 and V - 1 = {log_probs.size(-1) - 1}; got "
            f"{int(symbols.min())} to {int(symbols.max())}. Do they begin at one? Subtract 1."
        ) from None


def integers_of(values: Tensor) -> tuple[Tensor, Tensor] | None:
    """All integers ``(U,)`` in the range of ``values`` ``(*A)``, and the index of each value.

    That of NaN is U. None if values are few or have gradients, if some are not integers or these
    are not much fewer, and on an accelerator, which would wait.
    """
    unfit = values.device.type != "cpu" or values.requires_grad or transforming()
    if unfit or values.numel() < ADDED:
        return None
    known, floating = values, values.dtype.is_floating_point
    low, high = known.aminmax()
    missing = known.isnan() if floating and bool(low.isnan()) else None
    if missing is not None:
        low = known.masked_fill(missing, torch.inf).amin()
        high = known.masked_fill(missing, -torch.inf).amax()
    size = high.item() - low.item() + 1
    if not 0 < size <= values.numel() / FEWER:
        return None
    known = known if missing is None else torch.where(missing, high, known)
    index = (known - low).long()
    if floating and not torch.equal(index.to(known.dtype), known - low):
        return None
    index = index if missing is None else index.masked_fill(missing, int(size))
    return low + torch.arange(int(size)).to(values.dtype), index


def take_rows(table: Tensor, rows: Tensor) -> Tensor:
    """Gather rows of ``table`` ``(M, K)`` by the integers ``rows`` ``(*)``: ``(*, K)``.

    (``torch.nn.functional.embedding`` spends 100 ns on the gradient of a row however short it is,
    which for few states is longer than the recursions take.)
    """
    flat = rows.reshape(-1)

    def taken(table: Tensor) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor]]]:
        size, dtype = len(table), table.dtype
        return (
            table.index_select(0, flat),
            lambda weights: (add_rows(weights, flat, size).to(dtype),),
        )

    def twin(table: Tensor) -> Tensor:
        return table.double()[flat].to(table.dtype)  # so that sums of gradients are in float64

    return with_gradient(taken, twin, table, also=[flat]).reshape(*rows.shape, table.size(-1))


def add_rows(values: Tensor, rows: Tensor, size: int) -> Tensor:
    """Scatter-add the rows of ``values`` ``(M, K)`` by index: sums ``(size, K)`` in float64.

    (In float32, a long sum of small numbers stops growing.) No gradient is kept.
    """
    values = values.detach()
    out = values.new_zeros(size, values.size(1), dtype=torch.float64)
    some = max(1, (CACHED if values.device.type == "cpu" else ON_DEVICE) // max(1, values.size(1)))
    for part, places in zip(values.split(some), rows.split(some)):
        out.index_add_(0, places, part.double())
    return out


def accumulated(weights: Tensor, rows: Tensor, cancels: bool = True) -> Tensor:
    r"""Sums :math:`\sum_n w_{nk} r_{nf}`, ``(*S, K, F)``, in float64.

    In float32 a long sum of equal numbers is off by parts in a hundred, for each addition rounds
    the same way; and whatever cancels afterwards makes more of that.

    Args:
        weights: ``(*S, N, K)``.
        rows: ``(*S, N, F)``.
        cancels: Whether most of the sums may cancel in what is made of them, as in a gradient by
            means. If not, and there are many states, those over ``BLOCK`` rows are of the dtype of
            the rows.

    Example:
        >>> tenth = torch.full((1_000_000, 1), 0.1)
        >>> accumulated(tenth, torch.ones_like(tenth)).round(decimals=1)
        tensor([[100000.]], dtype=torch.float64)
    """
    height, width = weights.size(-1), rows.size(-1)
    fits = weights.dim() == 2 and min(height, width) <= THIN and len(rows) * height >= ADDED
    if pick(rows.device, fits and not torch.is_grad_enabled()) is NUMBA:
        loops = imported("._numba_math", __package__)
        weights, rows = (part.detach().resolve_neg() for part in (weights, rows))
        if width <= height:
            return loops.sum_products(rows, weights).mT
        return loops.sum_products(weights, rows)
    size = BLOCK
    if cancels or height < NARROW:
        numbers = weights.shape[:-2].numel() * (height + width)  # of a row
        size = max(32, (CACHED if rows.device.type == "cpu" else ON_DEVICE) // max(numbers, 1))
        if weights.dtype == torch.float64 or torch.is_grad_enabled() or rows.size(-2) <= size:
            return weights.double().mT @ rows.double()
    out = rows.new_zeros(*weights.shape[:-2], height, width, dtype=torch.float64)
    for weight, part in zip(weights.split(size, -2), rows.split(size, -2)):
        if size != BLOCK:
            weight, part = weight.double(), part.double()
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
    return _batched(_product_and_gradient, _summed_in_double, rows, columns, 2)


def squared_norms(rows: Tensor, columns: Tensor) -> Tensor:
    r"""Squared norms :math:`\sum_d (\sum_f r_f c_{kdf})^2`, ``(*A, K)``, in chunks of rows.

    Differentiable any number of times; more than once is for small problems.

    Args:
        rows: ``(*A, F)``.
        columns: ``(*b, K, D, F)``.
    """
    return _batched(_norms_and_gradient, _all_squared_norms, rows, columns, 3)


def _batched(
    compute: Callable[..., tuple[Tensor, Callable[[Tensor], tuple[Tensor | None, Tensor]]]],
    twin: Callable[[Tensor, Tensor], Tensor], rows: Tensor, columns: Tensor, own: int,
) -> Tensor:  # fmt: skip
    """Apply a product of rows and columns, with its gradient, over broadcast batch dimensions."""
    batch = BatchAxes(rows.shape[:-1], columns.shape[: columns.dim() - own])
    parts = batch.of_rows(rows), batch.of_columns(columns, own)
    by_rows = rows.requires_grad

    def computed(rows: Tensor, columns: Tensor):  # type: ignore[no-untyped-def]
        with _threads_for(rows, columns):
            value, gradient = compute(rows, columns, by_rows)

        def on_threads(weights: Tensor) -> tuple[Tensor | None, Tensor]:
            with _threads_for(rows, columns):
                return gradient(weights)

        return value, on_threads

    with full_precision(rows):
        return batch.join(with_gradient(computed, twin, *parts))


def second_moments(weights: Tensor, values: Tensor, about: Tensor | float) -> Tensor:
    r"""Sums :math:`\sum_m w_{rmk} y_m y_m^\top` with :math:`y_m = (1, x_m - o)`, in float64.

    Of weights ``(R, M, K)`` and values ``(M, D)`` about an origin o: ``(R, K, 1 + D, 1 + D)``, in
    chunks of observations. Of short vectors one product with all pairs of components, of others one
    for each state. Posteriors given long vectors are all but certain: observations whose weights
    would be rounded away are left out there.
    """
    restarts, count, states = weights.shape
    weights = weights.movedim(1, 0).reshape(count, restarts * states)
    width = values.size(-1) + 1
    total = weights.new_zeros(weights.size(-1), width, width, dtype=torch.float64)
    few = width <= len(total)
    size = max(1, CHUNK // (width**2 if few else width))
    long = count > 0 and width > LONG and weights.device.type == "cpu"
    least = LOST * weights.amax(0) if long else total
    with threads_for(weights.numel() * width**2):
        for weight, value in zip(weights.split(size), values.split(size)):
            every = (value.double() - about).mT.contiguous()
            every = torch.nn.functional.pad(every, (0, 0, 1, 0), value=1.0)
            if few:
                pairs = (every.unsqueeze(1) * every).flatten(0, 1)
                total += (weight.double().mT @ pairs.mT).unflatten(-1, (width, width))
                continue
            for row, share in enumerate(weight.double().mT.contiguous()):
                columns, out = every, total[row]
                if long and 2 * len(here := (share > least[row]).nonzero()[:, 0]) < len(share):
                    columns, share = every[:, here], share[here]
                out.addmm_(columns * share, columns.mT)
    return total.unflatten(0, (restarts, states))


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


class BatchAxes:
    """The batch dimensions of a product: those that both sides have, rows alone, columns alone."""

    def __init__(self, rows: torch.Size, columns: torch.Size) -> None:
        shape = broadcast_shapes(rows, columns)
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
        """Reshape rows ``(*A, F)`` to ``([S,] L, F)``."""
        size = rows.size(-1)
        rows = rows.reshape(*self.rows, size).permute(*self.order, -1)
        return rows.reshape(*self.shared, self.height, size)

    def of_columns(self, columns: Tensor, own: int) -> Tensor:
        """Reshape ``(*b, K, *X)`` to ``([S,] R K, *X)``; ``own`` counts the dimensions after b."""
        states, *rest = columns.shape[columns.dim() - own :]
        columns = columns.reshape(*self.columns, states, *rest)
        columns = columns.permute(*self.order, *range(-own, 0))
        return columns.reshape(*self.shared, self.width * states, *rest)

    def join(self, products: Tensor) -> Tensor:
        """Restore batch dimensions ``(*A, K)`` and their order of products ``([S,] L, R K)``."""
        states = products.size(-1) // max(self.width, 1)
        products = products.reshape(*self.shape, states)
        return products.permute(*(self.order.index(i) for i in range(len(self.order))), -1)


def _threads_for(rows: Tensor, columns: Tensor) -> AbstractContextManager[None]:
    """Threads for the product of ``([S,] L, F)`` and ``([S,] K, *D, F)``."""
    shared = len(rows) if rows.dim() == 3 else 1
    return threads_for(rows.numel() * columns.numel() / max(shared * rows.size(-1), 1))


Computed = tuple[Tensor, Callable[[Tensor], tuple[Tensor | None, Tensor]]]


def _summed_in_double(rows: Tensor, columns: Tensor) -> Tensor:
    """Matrix product in float64, so that autograd accumulates gradients in float64 too."""
    return (rows.double() @ columns.double().mT).to(rows.dtype)


def _product_and_gradient(rows: Tensor, columns: Tensor, by_rows: bool) -> Computed:
    """``rows @ columns.mT``; the gradients are products also."""

    def gradient(weights: Tensor) -> tuple[Tensor | None, Tensor]:
        by_columns = accumulated(weights, rows).to(columns.dtype)
        return weights @ columns.to(rows.dtype) if by_rows else None, by_columns

    return rows @ columns.to(rows.dtype).mT, gradient


def _norms_and_gradient(rows: Tensor, columns: Tensor, by_rows: bool) -> Computed:
    """Squared norms ``([S,] L, K)`` of rows ``([S,] L, F)`` by columns ``([S,] K, D, F)``."""
    out = rows.new_empty(*rows.shape[:-1], columns.size(-3))
    for chunk, inner in _inner_products(rows, columns):
        torch.sum(inner.square_(), -2, out=out[..., chunk, :])

    def gradient(weights: Tensor) -> tuple[Tensor | None, Tensor]:
        flat = _flat(columns).to(rows.dtype)
        of_rows = torch.zeros_like(rows) if by_rows else None
        by_flat = torch.zeros_like(flat.mT, dtype=torch.float64)
        for chunk, inner in _inner_products(rows, columns):
            inner = inner.mul_(2 * weights[..., chunk, :].unsqueeze(-2)).flatten(-2)
            by_flat += accumulated(rows[..., chunk, :], inner)  # of moments terms would cancel
            if of_rows is not None:
                of_rows[..., chunk, :] = inner @ flat
        by_columns = by_flat.unflatten(-1, (columns.size(-2), columns.size(-3)))
        return of_rows, by_columns.movedim(-3, -1).transpose(-3, -2).to(columns.dtype)

    return out, gradient


def _flat(columns: Tensor) -> Tensor:
    """Reshape ``(.., K, D, F)`` to ``(.., D K, F)``: sums over D are then contiguous."""
    return columns.transpose(-3, -2).flatten(-3, -2)


def _inner_products(rows: Tensor, columns: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Chunks of rows, and their inner products ``(.., l, D, K)``."""
    states, dim, _ = columns.shape[-3:]
    flat = _flat(columns).mT.to(rows.dtype)
    size = max(1, CHUNK // max(1, flat.size(-1) * math.prod(rows.shape[:-2])))
    for start in range(0, rows.size(-2), size):
        chunk = slice(start, start + size)
        yield chunk, (rows[..., chunk, :] @ flat).unflatten(-1, (dim, states))


def _all_squared_norms(rows: Tensor, columns: Tensor) -> Tensor:
    inner = _summed_in_double(rows, _flat(columns)).unflatten(
        -1, (columns.size(-2), columns.size(-3))
    )
    return inner.square().sum(-2)
