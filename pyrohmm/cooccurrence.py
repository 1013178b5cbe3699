r"""The law of pairs of symbols a few steps apart: counted, predicted by a model, and compared.

``K`` states, ``V`` symbols, ``M`` distinct pairs that occur; ``*B`` are batch dimensions.

``law``     ``(*B, K)``     probabilities of the state of the first of the two steps
``joint``   ``(*B, K, K)``  :math:`\Theta = \mathrm{diag}(\pi) A^d`, of both states, d steps apart
``probs``   ``(*B, K, V)``  B, probabilities of symbols in each state
``target``  what was counted, W: :class:`Pairs`, or dense shares ``(*B, V, V)``

A model predicts :math:`\Omega = B^\top \Theta B`, which has V² entries. Losses against
:class:`Pairs` never write them down: they cost O(V K² + M K) and keep O(V K + M) numbers.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor
from torch.distributions import Independent, MixtureSameFamily

from ._checks import check_floats, check_integers, check_size
from .distributions import log
from .sequences import Sequences

if TYPE_CHECKING:
    from .hmm import HMM

CHUNK = 1 << 20  # pairs that are sorted at a time
FAINT = 1e-30  # probabilities of pairs below which single precision may lose them
SMALL = 256  # symbols, up to which all V^2 pairs take less time than those that occur

# What was counted --------------------------------------------------------------------------------


class Pairs:
    """How often each symbol follows each, for the pairs that occur: a sparse matrix.

    Pairs may be given in any order, and more than once; they are sorted and added up.

    Args:
        first: ``(M,)`` integers, the symbols that come first.
        second: ``(M,)`` integers, those that follow.
        counts: ``(M,)`` integers, at least 1, how often they do.
        num_symbols: V.
        lag: By how many steps the second follows the first.
        squares: The sum of the squared shares, if these pairs stand for others: see :meth:`sample`.

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
        squares: float | None = None,
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
            found = _add_up(keys.cpu().numpy(), self.counts.cpu().numpy())
            keys, self.counts = (torch.from_numpy(column).to(first.device) for column in found)
            self.first, self.second = keys // num_symbols, keys % num_symbols
        self.num_symbols, self.lag = num_symbols, lag
        self._squares = squares

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
    def shares(self) -> Tensor:
        """``(M,)``, counts over their total, in float64."""
        return self.counts / torch.tensor(self.total, dtype=torch.float64)

    @cached_property
    def squares(self) -> float:
        """The sum of the squared shares."""
        return self._own_squares if self._squares is None else self._squares

    @cached_property
    def _own_squares(self) -> float:
        return float(self.shares.square().sum())

    def dense(self) -> Tensor:
        """The shares as a matrix ``(V, V)``, in the default dtype; what did not occur is zero."""
        return self._dense.to(torch.get_default_dtype(), copy=True)

    def to(self, device: torch.device | str) -> Pairs:
        """The same pairs on ``device``; themselves if they are there."""
        if self.counts.device == torch.empty(0, device=device).device:
            return self
        first, second, counts = (each.to(device) for each in (self.first, self.second, self.counts))
        return Pairs(first, second, counts, self.num_symbols, self.lag, self._squares)

    def sample(self, num_pairs: int, generator: torch.Generator | None = None) -> Pairs:
        """Pairs drawn with replacement, in proportion to their counts: a minibatch.

        Its losses are unbiased estimates of those of all pairs: :func:`cross_entropy` is linear in
        the shares, and so is :func:`squared_distance` but for ``squares``, which stay those of
        all.

        Args:
            num_pairs: How many to draw.
            generator: Source of randomness on the CPU; torch's global one by default.
        """
        check_size("num_pairs", num_pairs)
        draws = torch.randint(self.total, (num_pairs,), generator=generator)
        drawn = torch.searchsorted(self._ends, draws.to(self._ends.device), right=True)
        drawn, counts = drawn.unique(return_counts=True)
        return Pairs(
            self.first[drawn], self.second[drawn], counts, self.num_symbols, self.lag, self.squares
        )

    @cached_property
    def _dense(self) -> Tensor:
        out = self.shares.new_zeros(self.num_symbols, self.num_symbols)
        out[self.first, self.second] = self.shares
        return out

    @cached_property
    def _ends(self) -> Tensor:
        """Where each pair ends if all that were counted stand in a row, ``(M,)``."""
        return self.counts.cumsum(0)

    @cached_property
    def _by_second(self) -> Tensor:
        """The order of the pairs by ``second`` and then ``first``, ``(M,)``."""
        columns = self.second.cpu().numpy(), self._starts(self.first).cpu().numpy()
        numbered = csr_array((np.arange(len(self)), *columns), (self.num_symbols,) * 2)
        order = numbered.tocsc().data  # in O(V + M), where a sort would take ten times as long
        return torch.from_numpy(order).to(self.counts.device)

    def _starts(self, rows: Tensor) -> Tensor:
        """Where the entries of each row begin and the last ends, ``(V + 1,)``."""
        return torch.bincount(rows + 1, minlength=self.num_symbols + 1).cumsum(0)

    def _sparse(self, rows: Tensor, columns: Tensor, values: Tensor) -> Tensor:
        """A sparse matrix ``(V, V)`` of entries that are sorted by row."""
        return self._csr(self._starts(rows), columns, values)

    def _csr(self, starts: Tensor, columns: Tensor, values: Tensor) -> Tensor:
        with warnings.catch_warnings(action="ignore"):  # torch says once that the format is young
            return torch.sparse_csr_tensor(
                starts, columns, values, (self.num_symbols,) * 2, check_invariants=False
            )

    @cached_property
    def _rows(self) -> Tensor:
        """The shares as a sparse matrix ``(V, V)``."""
        return self._sparse(self.first, self.second, self.shares)

    @cached_property
    def _columns(self) -> Tensor:
        """The transposed shares as a sparse matrix ``(V, V)``."""
        first, second, shares = (
            each[self._by_second] for each in (self.first, self.second, self.shares)
        )
        return self._sparse(second, first, shares)

    def _matrix(self, values: Tensor | None, transposed: bool) -> Tensor:
        """A sparse matrix with ``values`` ``(M,)`` in place of the shares, perhaps transposed."""
        like = self._columns if transposed else self._rows
        if values is None:
            return like
        values = values[self._by_second] if transposed else values
        return self._csr(like.crow_indices(), like.col_indices(), values)


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


def count_pairs(data: Sequences | Iterable[Sequences], num_symbols: int, lag: int = 1) -> Pairs:
    """Count the pairs of symbols ``lag`` steps apart.

    Both steps of a pair lie in one sequence and are observed; what lies between them need not be.

    Args:
        data: Sequences of symbols; or many such, one after the other, as from a file that is larger
            than memory: no more is kept than the distinct pairs, and one of the ``Sequences``.
        num_symbols: V.
        lag: How many steps apart.

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
    none = np.zeros(0, np.int64)
    keys, counts = none, none  # of all so far
    held, pending = [(none, none)], 0  # what has been counted since, each part by itself

    def merged() -> tuple[np.ndarray, np.ndarray]:
        parts = [(keys, counts), *held]
        return _add_up(*(np.concatenate(column) for column in zip(*parts)))

    device = None
    for part in (data,) if isinstance(data, Sequences) else data:
        if not isinstance(part, Sequences):
            raise TypeError(
                "data must be Sequences, or an iterable of Sequences; got "
                f"{type(part).__name__} in it."
            )
        device = part.values.device if device is None else device
        for found in _keys(part, num_symbols, lag):
            held.append(np.unique(found, return_counts=True))
            pending += len(held[-1][0])
            if pending > max(CHUNK, len(keys)):
                (keys, counts), held, pending = merged(), [], 0
    keys, counts = merged()
    if len(keys) == 0:
        raise ValueError(
            f"data has no two observed steps {lag} apart in one sequence; there is nothing to "
            "count."
        )
    first, second, number = (
        torch.from_numpy(column).to(device) for column in (*np.divmod(keys, num_symbols), counts)
    )
    return Pairs(first, second, number, num_symbols, lag)


def _keys(data: Sequences, num_symbols: int, lag: int) -> Iterable[np.ndarray]:
    """The pairs of some sequences after those of others, (a, b) as the number a V + b."""
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
            _check_symbols("values of data", torch.cat([first, second]), num_symbols)
            yield (first * num_symbols + second).cpu().numpy()


def counted(data: Sequences | Iterable[Sequences], num_symbols: int, lag: int = 1) -> Tensor:
    """How often each symbol follows each, as shares of all pairs, ``(V, V)``.

    :func:`count_pairs` as a dense matrix.

    Example:
        >>> counted(Sequences.from_list([[0, 1, 1], [1, 0]]), 2)
        tensor([[0.0000, 0.3333],
                [0.3333, 0.3333]])
    """
    return count_pairs(data, num_symbols, lag).dense()


# Continuous observations -------------------------------------------------------------------------


def quantile_edges(data: Sequences, num_bins: int) -> Tensor:
    """Cut points ``(V - 1,)`` between V bins that hold equally many of the observed values.

    Args:
        data: Sequences of numbers, ``(N, T)`` or ``(N, T, 1)``.
        num_bins: V, at least 2.

    Raises:
        ValueError: If so many values are equal that two cut points would be.

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
    """Number the bin of each value: bin v holds what lies above edge v - 1 and not above edge v.

    Args:
        data: Sequences of numbers, ``(N, T)`` or ``(N, T, 1)``.
        edges: ``(V - 1,)``, rising.

    Returns:
        Sequences of symbols from 0 to V - 1, with the same lengths and the same gaps.

    Example:
        >>> binned(Sequences.from_list([[0.5, 2.0, 7.0]]), torch.tensor([1.0, 2.0])).values
        tensor([[0, 1, 2]])
    """
    _check_edges(edges)
    values = _numbers(data)
    symbols = torch.bucketize(values.contiguous(), edges.to(values))
    return Sequences(symbols, data.lengths, data.observed, total=data.total)


def bin_probs(emission: Any, edges: Tensor) -> Tensor:
    """Probability of each bin in each state, ``(*B, K, V)``: differences of ``emission.cdf``.

    Args:
        emission: A distribution of numbers, or of vectors of size one, batched over K states.
        edges: ``(V - 1,)``, rising.

    Raises:
        TypeError: If the observations are larger, or the distribution has no ``cdf``.

    Example:
        >>> bin_probs(Normal(torch.tensor([0.0, 9.0]), 1.0), torch.tensor([0.0, 9.0]))
        tensor([[0.5000, 0.5000, 0.0000],
                [0.0000, 0.5000, 0.5000]])
    """
    _check_edges(edges)
    if emission.event_shape.numel() != 1:
        raise TypeError(
            "bins are of numbers; the module emits observations of shape "
            f"{tuple(emission.event_shape)}."
        )
    points = edges.double().reshape(-1, *(1,) * len(emission.batch_shape + emission.event_shape))
    below = _cdf(emission, points).reshape(len(edges), *emission.batch_shape).movedim(0, -1)
    ends = [torch.full_like(below[..., :1], end) for end in (0.0, 1.0)]
    probs = torch.cat([ends[0], below, ends[1]], -1).diff(dim=-1)
    return probs.clamp(min=0.0).to(edges.dtype)


def _cdf(distribution: Any, points: Tensor) -> Tensor:
    """Probability of a value up to each of ``points``, which broadcast with one observation."""
    if isinstance(distribution, Independent):  # of one component
        return _cdf(distribution.base_dist, points)
    if isinstance(distribution, MixtureSameFamily):
        at = -1 - len(distribution.event_shape)
        parts = _cdf(distribution.component_distribution, points.unsqueeze(at))
        shares = distribution.mixture_distribution.probs
        return (parts * shares.reshape(shares.shape + (1,) * (-1 - at))).sum(at)
    try:
        return distribution.cdf(points)
    except NotImplementedError:
        raise TypeError(
            f"bins need an emission with a cdf, such as Normal; {type(distribution).__name__} has "
            "none."
        ) from None


def _numbers(data: Sequences) -> Tensor:
    """Values ``(N, T)`` of sequences of numbers."""
    check_floats("values of data", data.values)
    if data.values.shape[2:].numel() != 1:
        raise ValueError(
            "values of data must be numbers, of shape (N, T) or (N, T, 1); got "
            f"{tuple(data.values.shape)}."
        )
    return data.values.reshape(data.values.shape[:2])


def _check_edges(edges: Tensor) -> None:
    check_floats("edges", edges)
    if edges.dim() != 1 or len(edges) == 0 or not bool((edges[1:] > edges[:-1]).all()):
        raise ValueError(
            f"edges must be (V - 1,) numbers that rise, at least one; got {edges.tolist()}."
        )


# What a model predicts ---------------------------------------------------------------------------


def joint_law(law: Tensor, log_transition: Tensor, lag: int = 1) -> Tensor:
    r"""The law of two states ``lag`` steps apart, :math:`\mathrm{diag}(\pi) A^d`.

    Args:
        law: ``(*B, K)``, probabilities of the first of them, such as :func:`stationary` gives.
        log_transition: ``(*B, K, K)``.
        lag: d.

    Returns:
        ``(*B, K, K)``, sums to one.
    """
    moves = log_transition.exp()
    return law.unsqueeze(-1) * (moves if lag == 1 else torch.linalg.matrix_power(moves, lag))


def predicted(law: Tensor, log_transition: Tensor, probs: Tensor, lag: int = 1) -> Tensor:
    r"""The law of two symbols ``lag`` steps apart, :math:`B^\top \mathrm{diag}(\pi) A^d B`.

    Args:
        law: ``(*B, K)``, probabilities of the first state, such as :func:`stationary` gives.
        log_transition: ``(*B, K, K)``.
        probs: ``(*B, K, V)``, probabilities of symbols.
        lag: d.

    Returns:
        ``(*B, V, V)``, sums to one.

    Example:
        >>> matrix = torch.tensor([[0.9, 0.1], [0.3, 0.7]])
        >>> predicted(stationary(matrix.log()), matrix.log(), torch.eye(2))
        tensor([[0.6750, 0.0750],
                [0.0750, 0.1750]])
    """
    return probs.mT @ joint_law(law, log_transition, lag) @ probs


def stationary(log_transition: Tensor, check: bool = True) -> Tensor:
    r"""Stationary distribution of a chain, by one linear solve, differentiable.

    It solves :math:`\pi^\top (I - A + 1 1^\top) = 1^\top`, which has one solution whenever the
    chain has one recurrent class.

    Args:
        log_transition: ``(*B, K, K)``, log-probabilities; row = from, column = to.
        check: Whether to raise where there are many; if not, they are NaN there.

    Returns:
        ``(*B, K)`` probabilities.

    Raises:
        ValueError: If the chain has more than one recurrent class, so that there are many.

    Example:
        >>> stationary(torch.tensor([[0.9, 0.1], [0.3, 0.7]]).log())
        tensor([0.7500, 0.2500])
    """
    matrix = log_transition.double().exp()
    size = matrix.size(-1)
    moves = (matrix.detach() > 0).cpu().reshape(-1, size, size)
    several = torch.zeros(len(moves), dtype=torch.bool)
    if not bool(moves.all()):
        several = torch.tensor([_count_ends(each) > 1 for each in moves.numpy()])
    # of I - A, the diagonal is what leaves a state: exact also where A is nearly the identity
    away = matrix - torch.diag_embed(matrix.diagonal(dim1=-2, dim2=-1))
    system = torch.diag_embed(away.sum(-1)) - away + 1.0
    law, info = torch.linalg.solve_ex(system.mT, torch.ones_like(matrix[..., 0]))
    residual = ((law.unsqueeze(-2) @ matrix).squeeze(-2) - law).detach().abs().amax(-1)
    failed = several.to(info.device).reshape(info.shape) | (info != 0) | ~(residual < 1e-3)
    if bool(failed.any()):
        if check:
            raise ValueError(
                "log_transition must have one recurrent class for its stationary distribution to "
                "be unique; this chain has several, or nearly so. Allow moves between them."
            )
        law = law.masked_fill(failed.unsqueeze(-1), torch.nan)
    return law.clamp(min=0.0).to(log_transition.dtype)


def stationary_detached(log_transition: Tensor) -> Tensor:
    """As :func:`stationary`, but a constant: no gradient passes through it.

    Published code for fits to co-occurrences leaves this gradient out, so that its steps are not
    those of the loss, and may even raise it. Use this to reproduce such results, and
    :func:`stationary` otherwise.

    Args:
        log_transition: ``(*B, K, K)``.

    Returns:
        ``(*B, K)`` probabilities.
    """
    return stationary(log_transition.detach())


def average_law(hmm: HMM, num_steps: int) -> Tensor:
    """Mean law of the state over all steps but the last: that of the first step of a random pair.

    For chains that do not begin in their stationary law.
    ``predicted(average_law(hmm, T), hmm.log_transition, probs)`` is the law of pairs of adjacent
    symbols in sequences of T steps.

    Args:
        hmm: Its initial law and its transition matrix are used.
        num_steps: T, at least 2.

    Returns:
        ``(*B, K)`` probabilities.

    Example:
        >>> swap = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
        >>> coins = Categorical(torch.ones(2, 2) / 2)
        >>> hmm = HMM(torch.tensor([1.0, 0.0]).log(), swap.log(), coins, torch.tensor(4))
        >>> average_law(hmm, 4)  # of the states 0, 1, 0
        tensor([0.6667, 0.3333])
    """
    check_size("num_steps", num_steps)
    if num_steps < 2:
        raise ValueError("num_steps must be at least 2: a single step is in no pair; got 1.")
    if hmm.transition_per_step:
        raise ValueError("hmm must have one transition matrix for all steps; it has one per step.")
    moves = hmm.log_transition.exp()
    law = hmm.log_initial.exp().unsqueeze(-2)  # (*B, 1, K)
    total = law
    for _ in range(num_steps - 2):
        law = law @ moves
        total = total + law
    return total.squeeze(-2) / (num_steps - 1)


def _count_ends(moves: np.ndarray) -> int:
    """Number of recurrent classes: sets of states that lead to each other and nowhere else."""
    count, member = connected_components(csr_array(moves), directed=True, connection="strong")
    origin, target = moves.nonzero()
    left = member[origin] != member[target]
    return count - len(np.unique(member[origin[left]]))


# Losses ------------------------------------------------------------------------------------------


def squared_distance(joint: Tensor, probs: Tensor, target: Pairs | Tensor) -> Tensor:
    r"""The squared distance of what is predicted and counted, :math:`\lVert \Omega - W \rVert^2`.

    Against :class:`Pairs` it is
    :math:`\mathrm{tr}(\Theta^\top G \Theta G) - 2 \langle \Theta, B W B^\top \rangle +
    \lVert W \rVert^2` with :math:`G = B B^\top`, in float64, in which the terms cancel to some
    1e-16 of :math:`\lVert W \rVert^2`: at a perfect fit the result may be as much below zero.

    Its slope by the logarithm of a probability is in proportion to that probability: with thousands
    of symbols a fit that begins far off hardly moves. :func:`cross_entropy` does not have this.

    Args:
        joint: ``(*B, K, K)``.
        probs: ``(*B, K, V)``.
        target: Pairs, or dense shares ``(*B, V, V)``.

    Returns:
        ``(*B)``.

    Example:
        >>> both = torch.tensor([[0.5, 0.0], [0.0, 0.5]])
        >>> target = Pairs(torch.tensor([0, 1]), torch.tensor([1, 1]), torch.tensor([1, 1]), 2)
        >>> squared_distance(both, torch.eye(2), target)  # ((1/2)^2 + (-1/2)^2 + 0)
        tensor(0.5000)
    """
    _check_target(probs, target)
    if isinstance(target, Tensor):
        return (probs.mT @ joint @ probs - target).square().sum((-2, -1))
    if target.num_symbols <= SMALL:
        value = squared_distance(joint, probs, target._dense.to(probs.dtype))
        return value + (target.squares - target._own_squares)
    table, joint = _table(probs, torch.float64), joint.double()
    gram = table.mT @ table  # G, (*B, K, K)
    cross = table.mT @ _Product.apply(None, table, target, False)  # B W B^T, (*B, K, K)
    value = (joint.mT @ gram @ joint * gram).sum((-2, -1)) - 2 * (joint * cross).sum((-2, -1))
    return (value + target.squares).to(probs.dtype)


def cross_entropy(joint: Tensor, probs: Tensor, target: Pairs | Tensor) -> Tensor:
    r"""Minus the mean log-probability of the pairs, :math:`-\sum_{xy} W_{xy} \log \Omega_{xy}`.

    In nats a pair. The least value that any law can reach is the entropy of the target. If a pair
    occurs that is impossible under the model, the result is infinite, and this pair adds nothing to
    the gradient.

    Args:
        joint: ``(*B, K, K)``.
        probs: ``(*B, K, V)``.
        target: Pairs, or dense shares ``(*B, V, V)``.

    Returns:
        ``(*B)``.

    Example:
        >>> even = torch.full((2, 2), 0.25)
        >>> target = Pairs(torch.tensor([0, 1]), torch.tensor([1, 1]), torch.tensor([1, 1]), 2)
        >>> cross_entropy(even, torch.eye(2), target)  # log 4
        tensor(1.3863)
    """
    _check_target(probs, target)
    if isinstance(target, Pairs) and target.num_symbols <= SMALL:
        target = target._dense
    shares = target if isinstance(target, Tensor) else target.shares
    law = _law_of_pairs(joint, probs, target)  # as shares, but for batch dimensions
    if bool(law.detach().amin() > FAINT):
        logs = law.log()
    else:  # too small for single precision, or zero
        logs = log(_law_of_pairs(joint.double(), probs.double(), target))
    over = (-2, -1) if isinstance(target, Tensor) else (-1,)
    terms = shares.to(logs.dtype) * logs
    return -terms.sum(over, dtype=torch.float64).to(probs.dtype)


def _law_of_pairs(joint: Tensor, probs: Tensor, target: Pairs | Tensor) -> Tensor:
    """The predicted law at the pairs ``(*B, M)``; or at all ``(*B, V, V)``, one where none is."""
    if isinstance(target, Tensor):
        return (probs.mT @ joint @ probs).masked_fill(target <= 0, 1.0)
    table = _table(probs, probs.dtype)
    before = table @ joint  # its products with rows of the table make the law
    return _Products.apply(before, table.expand(before.shape), target)


def _table(probs: Tensor, dtype: torch.dtype) -> Tensor:
    """A row for each symbol, ``(*B, V, K)`` in one piece."""
    return probs.mT.to(dtype).contiguous()


def _check_target(probs: Tensor, target: Pairs | Tensor) -> None:
    size = target.size(-1) if isinstance(target, Tensor) else target.num_symbols
    if size != probs.size(-1):
        raise ValueError(
            f"target must be of the symbols that the model emits, V = {probs.size(-1)}; it is of "
            f"{size}."
        )


# Two products with a sparse matrix. The gradient of each is the other, so that both can be
# differentiated any number of times; nothing of size M K or V V is ever made.


class _Product(torch.autograd.Function):
    """A sparse matrix (``values`` ``(*B, M)``, or else the shares) times tables ``(*B, V, K)``."""

    @staticmethod
    def forward(ctx, values, table, pairs, transposed):
        ctx.save_for_backward(values, table)
        ctx.pairs, ctx.transposed = pairs, transposed
        every = table.reshape(-1, *table.shape[-2:])
        entries = [None] * len(every) if values is None else values.reshape(-1, values.size(-1))
        found = [pairs._matrix(each, transposed) @ one for each, one in zip(entries, every)]
        return _stacked(found).reshape(table.shape)

    @staticmethod
    def backward(ctx, gradient):
        values, table = ctx.saved_tensors
        by_values = by_table = None
        if ctx.needs_input_grad[0]:
            sides = (table, gradient) if ctx.transposed else (gradient, table)
            by_values = _Products.apply(*sides, ctx.pairs)
        if ctx.needs_input_grad[1]:
            by_table = _Product.apply(values, gradient, ctx.pairs, not ctx.transposed)
        return by_values, by_table, None, None


class _Products(torch.autograd.Function):
    """Products ``(*B, M)`` of rows ``first`` of tables ``(*B, V, K)`` and ``second`` of others."""

    @staticmethod
    def forward(ctx, left, right, pairs):
        ctx.save_for_backward(left, right)
        ctx.pairs = pairs
        places = pairs._matrix(left.new_zeros(len(pairs)), False)
        both = (table.reshape(-1, *table.shape[-2:]) for table in (left, right))
        found = [
            torch.sparse.sampled_addmm(places, one, other.mT, beta=0.0).values()
            for one, other in zip(*both)
        ]
        return _stacked(found).reshape(*left.shape[:-2], -1)

    @staticmethod
    def backward(ctx, gradient):
        left, right = ctx.saved_tensors
        by_left = by_right = None
        if ctx.needs_input_grad[0]:
            by_left = _Product.apply(gradient, right, ctx.pairs, False)
        if ctx.needs_input_grad[1]:
            by_right = _Product.apply(gradient, left, ctx.pairs, True)
        return by_left, by_right, None


def _stacked(parts: list[Tensor]) -> Tensor:
    """As :func:`torch.stack`; a single part is not copied."""
    return parts[0].unsqueeze(0) if len(parts) == 1 else torch.stack(parts)
