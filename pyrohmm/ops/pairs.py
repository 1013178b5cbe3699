"""``Pairs``: sparse counts of pairs of symbols."""

from __future__ import annotations

import warnings
from functools import cached_property

import numpy as np
import torch
from scipy.sparse import csr_array
from torch import Tensor

from .._checks import check_integers, check_size


class Pairs:
    """How often each symbol follows each, for the pairs that occur: a sparse matrix.

    Pairs may be given in any order, and more than once; they are sorted and added up.

    Args:
        first: ``(M,)`` integers, the symbols that come first.
        second: ``(M,)`` integers, those that follow.
        counts: ``(M,)`` integers, at least 1, how often they do.
        num_symbols: V.
        lag: By how many steps the second follows the first.
        whole: All pairs, if these are a :meth:`sample` of them.

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
        self,
        first: Tensor,
        second: Tensor,
        counts: Tensor,
        num_symbols: int,
        lag: int = 1,
        whole: Pairs | None = None,
    ) -> None:
        check_size("num_symbols", num_symbols)
        check_size("lag", lag)
        for name, tensor in (("first", first), ("second", second), ("counts", counts)):
            check_integers(name, tensor)
            if tensor.dim() != 1 or len(tensor) == 0 or tensor.shape != first.shape:
                raise ValueError(
                    f"{name} must have shape (M,), as first and with at least one pair; got "
                    f"{tuple(tensor.shape)}, and first has {tuple(first.shape)}."
                )
        for name, tensor in (("first", first), ("second", second)):
            _check_symbols(name, tensor, num_symbols)
        if int(counts.min()) < 1:
            raise ValueError(f"counts must be at least 1; got {int(counts.min())}.")
        self.first, self.second, self.counts = first.long(), second.long(), counts.long()
        keys = self.first * num_symbols + self.second
        if not bool((keys[1:] > keys[:-1]).all()):
            sums = _add_up(keys.cpu().numpy(), self.counts.cpu().numpy())
            keys, self.counts = (torch.from_numpy(column).to(first.device) for column in sums)
            self.first, self.second = keys // num_symbols, keys % num_symbols
        self.num_symbols, self.lag = num_symbols, lag
        self._whole = whole

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

    @property
    def whole(self) -> Pairs:
        """All pairs: these, or those of which they are a :meth:`sample`."""
        return self if self._whole is None else self._whole

    @cached_property
    def fractions(self) -> Tensor:
        """``(M,)``, counts over their total, in float64."""
        return self.counts / torch.tensor(self.total, dtype=torch.float64)

    @cached_property
    def squares(self) -> float:
        """The sum of the squared fractions, of all pairs."""
        return self.whole._sampled_squares

    @cached_property
    def _sampled_squares(self) -> float:
        return float(self.fractions.square().sum())

    @cached_property
    def relative_weights(self) -> Tensor:
        """``(V,)``, the weight of each symbol in :func:`relative_distance`, by all pairs."""
        pairs = self.whole
        shares = pairs.fractions.new_zeros(pairs.num_symbols)
        for symbols in (pairs.first, pairs.second):
            shares.index_add_(0, symbols, pairs.fractions)
        return relative_weights(shares / 2)

    @cached_property
    def relative_squares(self) -> float:
        """The sum of the squared fractions with these weights, of all pairs."""
        pairs, weights = self.whole, self.relative_weights
        terms = pairs.fractions.square() * weights[pairs.first] * weights[pairs.second]
        return float(terms.sum())

    def dense(self) -> Tensor:
        """The fractions as a matrix ``(V, V)``, in the default dtype, with zeros elsewhere."""
        return self._dense.to(torch.get_default_dtype(), copy=True)

    def to(self, device: torch.device | str) -> Pairs:
        """Pairs on ``device``; themselves if they are there."""
        if self.counts.device == torch.empty(0, device=device).device:
            return self
        first, second, counts = (each.to(device) for each in (self.first, self.second, self.counts))
        whole = None if self._whole is None else self._whole.to(device)
        return Pairs(first, second, counts, self.num_symbols, self.lag, whole)

    def sample(self, num_pairs: int, generator: torch.Generator | None = None) -> Pairs:
        """Pairs sampled with replacement, in proportion to their counts: a minibatch.

        Its losses are unbiased estimates of those of all pairs: :func:`cross_entropy` is linear in
        the fractions, and so are :func:`squared_distance` and :func:`relative_distance` but for
        ``squares`` and weights, which stay those of all.

        Args:
            num_pairs: How many to sample.
            generator: Source of randomness on the CPU; torch's global one by default.
        """
        check_size("num_pairs", num_pairs)
        places = torch.randint(self.total, (num_pairs,), generator=generator)
        chosen = torch.searchsorted(self._ends, places.to(self._ends.device), right=True)
        chosen, counts = chosen.unique(return_counts=True)
        return Pairs(
            self.first[chosen],
            self.second[chosen],
            counts,
            self.num_symbols,
            self.lag,
            self.whole,
        )

    @cached_property
    def _dense(self) -> Tensor:
        out = self.fractions.new_zeros(self.num_symbols, self.num_symbols)
        out[self.first, self.second] = self.fractions
        return out

    @cached_property
    def _ends(self) -> Tensor:
        """Cumulative counts, ``(M,)``."""
        return self.counts.cumsum(0)

    @cached_property
    def _by_second(self) -> Tensor:
        """The order of the pairs by ``second`` and then ``first``, ``(M,)``."""
        columns = self.second.cpu().numpy(), self._starts(self.first).cpu().numpy()
        numbered = csr_array((np.arange(len(self)), *columns), (self.num_symbols,) * 2)
        order = numbered.tocsc().data  # in O(V + M), where a sort would take ten times as long
        return torch.from_numpy(order).to(self.counts.device)

    def _starts(self, rows: Tensor) -> Tensor:
        """Offsets of the rows' entries, with the end of the last, ``(V + 1,)``."""
        return torch.bincount(rows + 1, minlength=self.num_symbols + 1).cumsum(0)

    def _csr(self, starts: Tensor, columns: Tensor, values: Tensor) -> Tensor:
        with warnings.catch_warnings(action="ignore"):  # torch says once that the format is young
            return torch.sparse_csr_tensor(
                starts, columns, values, (self.num_symbols,) * 2, check_invariants=False
            )

    @cached_property
    def _rows(self) -> Tensor:
        """The fractions as a sparse matrix ``(V, V)``."""
        return self._csr(self._starts(self.first), self.second, self.fractions)

    @cached_property
    def _columns(self) -> Tensor:
        """The transposed fractions as a sparse matrix ``(V, V)``."""
        first, second, fractions = (
            each[self._by_second] for each in (self.first, self.second, self.fractions)
        )
        return self._csr(self._starts(second), first, fractions)

    def _matrix(self, values: Tensor | None, transposed: bool) -> Tensor:
        """A sparse matrix of ``values`` ``(M,)`` in place of the fractions, perhaps transposed."""
        like = self._columns if transposed else self._rows
        if values is None:
            return like
        values = values[self._by_second] if transposed else values
        return self._csr(like.crow_indices(), like.col_indices(), values)


def relative_weights(shares: Tensor) -> Tensor:
    """One over the mean of ``shares`` ``(*B, V)`` of symbols and of equal shares."""
    return 2 / (shares + 1 / shares.size(-1))


def _check_symbols(name: str, symbols: Tensor, num_symbols: int) -> None:
    low, high = (int(end) for end in torch.aminmax(symbols))
    if low < 0 or high >= num_symbols:
        raise ValueError(
            f"{name} must be symbols from 0 to V - 1 = {num_symbols - 1}; got values from {low} to "
            f"{high}."
        )


def _add_up(keys: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distinct keys in rising order, and the sums of their counts."""
    distinct = np.unique(keys)  # sorting keys alone is ten times as fast as sorting with counts
    sums = np.zeros_like(distinct)
    np.add.at(sums, np.searchsorted(distinct, keys), counts)
    return distinct, sums
