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

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ..._checks import check_integers, check_range, check_shape, check_size


def bounds(sizes: Tensor) -> Tensor:
    """Offsets of parts of given sizes, with the end of the last."""
    return torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])


class States(NamedTuple):
    """The states of each block: ``members[starts[b] : starts[b + 1]]``, ``width`` at most."""

    starts: Tensor
    members: Tensor
    sizes: Tensor
    width: int

    @property
    def are_equal(self) -> bool:
        """Whether all blocks have as many states, so that there is one operation for all."""
        return bool((self.sizes == self.width).all())


class Blocks:
    """Which states may emit which symbol.

    Args:
        symbol_block: ``(V,)`` integers, the block of each symbol.
        states: For each of the B blocks, the states in it; a state may be in several.
        num_states: K; by default one more than the largest state.

    Raises:
        TypeError: If something does not hold integers.
        ValueError: If a block is empty, or has a state twice; or a state has no symbol, or is not
            one of 0 to K - 1.

    Example:
        >>> blocks = Blocks(torch.tensor([0, 0, 1]), [torch.tensor([0, 1]), torch.tensor([2])])
        >>> blocks.allowed
        tensor([[ True,  True, False],
                [ True,  True, False],
                [False, False,  True]])
    """

    def __init__(
        self, symbol_block: Tensor, states: list[Tensor], num_states: int | None = None
    ) -> None:
        check_integers("symbol_block", symbol_block)
        if symbol_block.dim() != 1 or len(symbol_block) == 0:
            raise ValueError(
                "symbol_block must have shape (V,) with at least one symbol; got shape "
                f"{tuple(symbol_block.shape)}."
            )
        for number, each in enumerate(states):
            check_integers(f"states of block {number}", each)
            if each.dim() != 1 or len(each) == 0 or len(each.unique()) < len(each):
                raise ValueError(
                    f"block {number} must have states, each once; got {each.tolist()[:10]}."
                )
        check_range("symbol_block", symbol_block, len(states), "B - 1", "B is that of states.")
        self.symbol_block = symbol_block.cpu().long()
        sizes = torch.tensor([len(each) for each in states])
        members = torch.cat([each.cpu().long() for each in states])
        self._states = States(bounds(sizes), members, sizes, int(sizes.max()))
        self.num_states = int(members.max()) + 1 if num_states is None else num_states
        check_range("states", members, self.num_states, "K - 1")
        self.disjoint = torch.equal(members, torch.arange(self.num_states))
        used = torch.zeros(len(states), dtype=torch.bool)
        used[self.symbol_block] = True
        reached = torch.zeros(self.num_states, dtype=torch.bool)
        reached[members[used.repeat_interleave(sizes)]] = True
        if not bool(reached.all()):
            raise ValueError(
                "each state must be in a block that symbol_block gives some symbol; state "
                f"{int((~reached).byte().argmax())} of {self.num_states} is in none."
            )

    @property
    def num_symbols(self) -> int:
        """V."""
        return len(self.symbol_block)

    @property
    def num_blocks(self) -> int:
        """B."""
        return len(self._states.sizes)

    @property
    def sizes(self) -> Tensor:
        """Number of states of each block, ``(B,)``."""
        return self._states.sizes

    @property
    def layout(self) -> States:
        """The states of all blocks, one block after the other."""
        return self._states

    @property
    def width(self) -> int:
        """w, the number of states of the largest block."""
        return self._states.width

    @cached_property
    def states(self) -> Tensor:
        """States of each block, ``(B, w)``, -1 where a block has fewer than w."""
        return torch.nn.utils.rnn.pad_sequence(
            list(self._states.members.split(self.sizes.tolist())), True, -1
        )

    @property
    def allowed(self) -> Tensor:
        """Whether each state may emit each symbol, ``(K, V)`` booleans."""
        allowed = torch.zeros(self.num_symbols, self.num_states + 1, dtype=torch.bool)
        rows = self.states[self.symbol_block]
        allowed.scatter_(1, rows.masked_fill(rows < 0, self.num_states), True)
        return allowed[:, :-1].T.contiguous()

    def keep(self, states: Tensor) -> Blocks:
        """The blocks of some of the states, which are numbered anew in their order.

        Args:
            states: ``(n,)`` integers, ascending.

        Raises:
            ValueError: If a block would be empty.
        """
        number = torch.full((self.num_states,), -1)
        number[states] = torch.arange(len(states))
        members = number[self._states.members]
        owner = torch.arange(self.num_blocks).repeat_interleave(self.sizes)
        kept = members >= 0
        sizes = torch.bincount(owner[kept], minlength=self.num_blocks)
        if not bool(sizes.all()):
            empty = int((sizes == 0).byte().argmax())
            raise ValueError(f"states must be of every block; no state of block {empty} is kept.")
        new = object.__new__(Blocks)
        new.symbol_block, new.num_states = self.symbol_block, len(states)
        new._states = States(bounds(sizes), members[kept], sizes, int(sizes.max()))
        new.disjoint = self.disjoint
        return new

    def __repr__(self) -> str:
        low, high = int(self.sizes.min()), self.width
        each = f"{low}" if low == high else f"{low} to {high}"
        return (
            f"Blocks({self.num_states} states and {self.num_symbols} symbols in "
            f"{self.num_blocks} blocks of {each} states)"
        )


def from_clusters(assignment: Tensor, states_per_cluster: int | Tensor) -> Blocks:
    """A block for each cluster of symbols; no state is in two.

    Args:
        assignment: ``(V,)`` integers, such as :func:`pyrohmm.clusters.brown` finds.
        states_per_cluster: Of each; or ``(C,)`` integers.

    Example:
        >>> from_clusters(torch.tensor([0, 1, 1, 2]), 4)
        Blocks(12 states and 4 symbols in 3 blocks of 4 states)
    """
    numbers = assignment.unique()
    if len(numbers) == 0 or not torch.equal(numbers.cpu(), torch.arange(len(numbers))):
        raise ValueError(
            "assignment must number clusters from 0 on, each with a symbol; got the numbers "
            f"{numbers.tolist()[:10]}."
        )
    if isinstance(states_per_cluster, int):
        check_size("states_per_cluster", states_per_cluster)
        states_per_cluster = torch.full((len(numbers),), states_per_cluster)
    check_shape("states_per_cluster", states_per_cluster, (len(numbers),), "(C,)")
    sizes = states_per_cluster.cpu().long()
    return Blocks(assignment, list(torch.arange(int(sizes.sum())).split(sizes.tolist())))


def uniform(
    num_symbols: int,
    num_states: int,
    states_per_symbol: int,
    generator: torch.Generator | None = None,
) -> Blocks:
    """One block per symbol, of states drawn uniformly and independently.

    A state that is in no block then takes the place of one that is in several.

    Args:
        num_symbols: V.
        num_states: K, at most V times ``states_per_symbol``.
        states_per_symbol: How many states may emit a symbol, at most K.
        generator: Source of randomness on the CPU; torch's global one by default.

    Raises:
        ValueError: If the sizes do not fit.

    Example:
        >>> uniform(5, 6, 2, torch.Generator().manual_seed(0)).sizes
        tensor([2, 2, 2, 2, 2])
    """
    if not 1 <= states_per_symbol <= num_states <= num_symbols * states_per_symbol:
        raise ValueError(
            f"num_states must lie between states_per_symbol = {states_per_symbol} and "
            f"num_symbols * states_per_symbol = {num_symbols * states_per_symbol}; got "
            f"{num_states}."
        )
    members = torch.stack(
        [torch.randperm(num_states, generator=generator)[:states_per_symbol]
         for _ in range(num_symbols)]
    )  # fmt: skip
    uses = torch.bincount(members.flatten(), minlength=num_states)
    flat = members.flatten()
    for state in (uses == 0).nonzero().flatten().tolist():
        spare = int((uses[flat] > 1).byte().argmax())
        uses[flat[spare]] -= 1
        uses[state] = 1
        flat[spare] = state
    rows = flat.reshape(members.shape).sort(-1).values
    return Blocks(torch.arange(num_symbols), list(rows), num_states)
