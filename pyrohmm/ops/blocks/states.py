r"""``Blocks``: which states may emit which symbol.

``K`` states, ``V`` symbols, ``B`` blocks of at most ``w`` states each. Every symbol has a block:
the states that may emit it. A :class:`pyrohmm.BlockHMM` is an HMM with that constraint; it is as
exact as any, and a step costs :math:`w^2` in place of :math:`K^2`, so that there may be tens of
thousands of states.

References:
    Scaling Hidden Markov Language Models (Chiu and Rush, 2020),
    https://aclanthology.org/2020.emnlp-main.103
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..._checks import check_integers, check_shape, check_size
from ..tensor_cache import cached, cached_on


def offsets(sizes: Tensor) -> Tensor:
    """Offsets of parts of given sizes, followed by the total size."""
    return torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])


class Blocks:
    """Assignment of states and symbols to blocks: a state emits the symbols of its block only.

    Args:
        symbol_block: ``(V,)`` integers, the block of each symbol; each block has one.
        sizes: ``(B,)`` integers, the number of states of each block, one block after the other.

    Attributes:
        starts: ``(B + 1,)``, the first state of each block, and K.
        width: w, the number of states of the largest block.
        owner: ``(K,)``, the block of each state.
        states: ``(B, w)``, the states of each block, -1 where a block has fewer than w.
        places: ``(B + 1, w)``, the same with K as padding, and a row of K.
        are_equal: Whether all blocks have as many states, so that there is one operation for all.

    Raises:
        TypeError: If something does not hold integers.
        ValueError: If a block has no state or no symbol.
    """

    def __init__(self, symbol_block: Tensor, sizes: Tensor) -> None:
        check_integers("symbol_block", symbol_block)
        check_integers("sizes", sizes)
        self.symbol_block, self.sizes = symbol_block.cpu().long(), sizes.cpu().long()
        numbers = self.symbol_block.unique()
        every = torch.arange(len(numbers), device="cpu")
        if len(numbers) == 0 or not torch.equal(numbers, every):
            raise ValueError(
                "assignment must number clusters from 0 on, each with a symbol; got the numbers "
                f"{numbers.tolist()[:10]}. Renumber by unique(return_inverse=True)."
            )
        check_shape("sizes", self.sizes, (len(numbers),), "(B,)")
        if int(self.sizes.min()) < 1:
            text = f"each block must have a state; got {self.sizes.tolist()[:10]}"
            raise ValueError(f"{text}. Give each at least 1.")
        self.starts = offsets(self.sizes)
        self.num_states, self.width = int(self.starts[-1]), int(self.sizes.max())
        self.are_equal = bool((self.sizes == self.width).all())
        self.owner = every.repeat_interleave(self.sizes)
        places = torch.arange(self.width, device="cpu")
        states = self.starts[:-1].unsqueeze(-1) + places
        beyond = places >= self.sizes.unsqueeze(-1)
        self.states = states.masked_fill(beyond, -1)
        self.places = pad(
            states.masked_fill(beyond, self.num_states), (0, 0, 0, 1), value=self.num_states
        )
        self._places = self.states.flatten().clamp(min=0)
        self._exist = (self.states.flatten() >= 0).nonzero().squeeze(-1)

    @property
    def num_symbols(self) -> int:
        """V, the number of symbols."""
        return len(self.symbol_block)

    @property
    def num_blocks(self) -> int:
        """B, the number of blocks."""
        return len(self.sizes)

    @property
    def allowed(self) -> Tensor:
        """Mask of the symbols that each state may emit, ``(K, V)``."""
        return self.owner.unsqueeze(-1) == self.symbol_block

    def by_block(self, rows: Tensor) -> Tensor:
        """Arrange rows ``(K, *)`` of the states by block, ``(B, w, *)``; padding holds anything."""
        if not self.are_equal:
            rows = rows.index_select(0, cached_on(rows.device, self._places))
        return rows.unflatten(0, (self.num_blocks, self.width))

    def without_padding(self, values: Tensor, fill: float) -> Tensor:
        """Set padding of ``values`` by block ``(*, B, w)`` to ``fill``."""
        if self.are_equal:
            return values
        return values.masked_fill(cached_on(values.device, self.states) < 0, fill)

    def without_others(self, table: Tensor) -> Tensor:
        """Set entries of ``table`` ``(V, w)`` beyond the states of a symbol's block to -inf."""
        if self.are_equal:
            return table
        beyond = cached(self.states, lambda: (self.states < 0)[self.symbol_block])
        return table.masked_fill(cached_on(table.device, beyond), -torch.inf)

    def of_states(self, parts: Tensor) -> Tensor:
        """Flatten rows by block ``(B, w, *)`` to rows of the states ``(K, *)``."""
        rows = parts.flatten(0, 1)
        if self.are_equal:
            return rows
        return rows.index_select(0, cached_on(rows.device, self._exist))

    def keep(self, dropout: float) -> Blocks:
        """Blocks of the share of states that ``dropout`` leaves, rounded, at least one of each."""
        sizes = ((1 - dropout) * self.sizes + 0.5).floor().long().clamp(min=1)
        return cached(self.sizes, lambda: Blocks(self.symbol_block, sizes), sizes.numpy().tobytes())

    def __repr__(self) -> str:
        low, high = int(self.sizes.min()), self.width
        each = f"{low}" if low == high else f"{low} to {high}"
        return (
            f"Blocks({self.num_states} states and {self.num_symbols} symbols in "
            f"{self.num_blocks} blocks of {each} states)"
        )


def from_clusters(assignment: Tensor, states_per_cluster: int | Tensor) -> Blocks:
    """Blocks of consecutive states, one for each cluster of symbols.

    Args:
        assignment: ``(V,)`` integers, such as :func:`pyrohmm.clusters.brown` finds.
        states_per_cluster: Of each; or ``(C,)`` integers.

    Example:
        >>> two = from_clusters(torch.tensor([0, 0, 1]), torch.tensor([2, 1]))
        >>> two
        Blocks(3 states and 3 symbols in 2 blocks of 1 to 2 states)
        >>> two.allowed
        tensor([[ True,  True, False],
                [ True,  True, False],
                [False, False,  True]])
    """
    if isinstance(states_per_cluster, int):
        check_size("states_per_cluster", states_per_cluster)
        states_per_cluster = torch.full((len(assignment.unique()),), states_per_cluster)
    return Blocks(assignment, states_per_cluster)
