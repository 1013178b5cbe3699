"""Counts of pairs of symbols a few steps apart, and bins for numbers."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from .._checks import check_floats, check_integers, check_range, check_size
from ..ops.pairs import Pairs, add_up
from .sequences import Sequences, check_sequences

CHUNK = 1 << 20  # pairs that are sorted at a time


def count_pairs(data: Sequences | Iterable[Sequences], num_symbols: int, lag: int = 1) -> Pairs:
    """Count the pairs of symbols ``lag`` steps apart.

    Both steps of a pair lie in one sequence and are observed; steps between them need not be.

    Args:
        data: Sequences of symbols; or an iterable of them, as from a file larger than memory: only
            the distinct pairs and one of the ``Sequences`` are held at a time.
        num_symbols: V.
        lag: Distance of the pairs in steps.

    Raises:
        TypeError: If the values are not integers.
        ValueError: If a symbol is not below V, or there is no pair.

    Example:
        >>> data = Sequences.from_list([[0, 1, 1, 1], [1, 0]])
        >>> pairs = count_pairs(data, 2)
        >>> pairs.first, pairs.second, pairs.counts
        (tensor([0, 1, 1]), tensor([1, 0, 1]), tensor([1, 1, 2]))
        >>> count_pairs((data[n : n + 1] for n in range(2)), 2, lag=2)  # a stream
        Pairs(2 distinct pairs of 2 symbols, 2 in all, lag 2)
    """
    check_size("num_symbols", num_symbols)
    check_size("lag", lag)
    keys, counts = np.zeros((2, 0), np.int64)  # of all merged parts
    parts: list[tuple[np.ndarray, np.ndarray]] = []  # not yet merged
    pending = 0

    def merged() -> tuple[np.ndarray, np.ndarray]:
        columns = zip((keys, counts), *parts)
        return add_up(*(np.concatenate(column) for column in columns))

    device = None
    for part in (data,) if isinstance(data, Sequences) else data:
        check_sequences("data", part)
        device = part.values.device if device is None else device
        for pairs in _keys(part, num_symbols, lag):
            parts.append(np.unique(pairs, return_counts=True))
            pending += len(parts[-1][0])
            if pending > max(CHUNK, len(keys)):
                (keys, counts), pending = merged(), 0
                parts.clear()
    keys, counts = merged()
    if len(keys) == 0:
        raise ValueError(
            f"data has no two observed steps {lag} apart in one sequence; nothing to count."
        )
    first, second, number = (
        torch.from_numpy(column).to(device) for column in (*np.divmod(keys, num_symbols), counts)
    )
    return Pairs(first, second, number, num_symbols, lag)


def _keys(data: Sequences, num_symbols: int, lag: int) -> Iterable[np.ndarray]:
    """Pairs (a, b) as numbers a V + b, those of some sequences at a time."""
    check_integers("values of data", data.values)
    if data.values.dim() != 2:
        raise ValueError(
            f"values of data must have shape (N, T), one symbol at a step; got "
            f"{tuple(data.values.shape)}."
        )
    rows = max(1, CHUNK // data.num_steps)
    for values, observed in zip(data.values.split(rows), data.observed.split(rows)):
        both = observed[:, :-lag] & observed[:, lag:]
        first, second = values[:, :-lag][both].long(), values[:, lag:][both].long()
        if len(first):
            check_range("values of data", torch.cat([first, second]), num_symbols, "V - 1")
            yield (first * num_symbols + second).cpu().numpy()


def counted(data: Sequences | Iterable[Sequences], num_symbols: int, lag: int = 1) -> Tensor:
    """Joint relative frequencies of symbols ``lag`` steps apart, ``(V, V)``.

    :func:`count_pairs` as a dense matrix.

    Example:
        >>> counted(Sequences.from_list([[0, 1, 1], [1, 0]]), 2)
        tensor([[0.0000, 0.3333],
                [0.3333, 0.3333]])
    """
    return count_pairs(data, num_symbols, lag).dense()


def quantile_edges(data: Sequences, num_bins: int) -> Tensor:
    """Edges ``(V - 1,)`` between V bins with equally many observed values, by their quantiles.

    Args:
        data: Sequences of numbers, ``(N, T)`` or ``(N, T, 1)``.
        num_bins: V, at least 2.

    Raises:
        ValueError: If so many values are equal that two edges would be.

    Example:
        >>> quantile_edges(Sequences.from_list([[4.0, 1.0, 3.0], [2.0]]), 2)
        tensor([2.])
    """
    check_size("num_bins", num_bins)
    values = _numbers(data)[data.observed].sort().values
    if num_bins < 2 or len(values) < num_bins:
        raise ValueError(
            f"num_bins must lie between 2 and the number of observed values, {len(values)}; got "
            f"{num_bins}."
        )
    ranks = torch.arange(1, num_bins, device=values.device) * len(values) // num_bins
    edges = values[ranks - 1]
    if not bool((edges[1:] > edges[:-1]).all()):
        raise ValueError(
            f"num_bins = {num_bins} is too many: some of the bins would lie between equal values. "
            "Ask for fewer, or choose the edges yourself."
        )
    return edges


def binned(data: Sequences, edges: Tensor) -> Sequences:
    """Replace each value by the number of its bin: v if it is in (edge v - 1, edge v].

    Args:
        data: Sequences of numbers, ``(N, T)`` or ``(N, T, 1)``.
        edges: ``(V - 1,)``, rising.

    Returns:
        Sequences of symbols from 0 to V - 1, with the same lengths and the same gaps.

    Example:
        >>> binned(Sequences.from_list([[0.5, 2.0, 7.0]]), torch.tensor([1.0, 2.0])).values
        tensor([[0, 1, 2]])
    """
    check_edges(edges)
    values = _numbers(data)
    symbols = torch.bucketize(values.contiguous(), edges.to(values))
    return Sequences(symbols, data.lengths, data.observed, total=data.total)


def _numbers(data: Sequences) -> Tensor:
    """Values ``(N, T)`` of sequences of numbers."""
    check_floats("values of data", data.values)
    if data.values.shape[2:].numel() != 1:
        raise ValueError(
            "values of data must be numbers, of shape (N, T) or (N, T, 1); got "
            f"{tuple(data.values.shape)}."
        )
    return data.values.reshape(data.values.shape[:2])


def check_edges(edges: Tensor) -> None:
    """Raise unless ``edges`` are numbers that rise."""
    check_floats("edges", edges)
    if edges.dim() != 1 or len(edges) == 0 or not bool((edges[1:] > edges[:-1]).all()):
        raise ValueError(
            f"edges must be (V - 1,) numbers that rise, at least one; got {edges.tolist()}."
        )
