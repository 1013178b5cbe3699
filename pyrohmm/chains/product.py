"""``ProductChain``: several independent Markov chains side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..ops import factorial
from ..ops import stationary as stationary_ops
from ..ops.sampling import CategoricalTable
from ..ops.tensor_cache import lazy
from .base import Chain, Core, Expansion, entry, sample_markov
from .markov import MarkovChain

MOST = 1 << 24  # product states


class FactorialPosterior(NamedTuple):
    """The posterior of a :class:`FactorialHMM`.

    Attributes:
        log_evidence: ``(*B)``, in nats.
        state_probs: ``(*B, T, K)``, smoothed marginals of the product states; zero at padded steps.
        chains: M of ``(*B, T, K_m)``, those of each chain.
        transitions: M of ``(*B, K_m, K_m)``, expected number of transitions of each chain.
    """

    log_evidence: Tensor
    state_probs: Tensor
    chains: tuple[Tensor, ...]
    transitions: tuple[Tensor, ...]


def check_product(sizes: Sequence[int]) -> None:
    """Raise if chains of so many states have more product states than can be summed over."""
    if (count := math.prod(sizes)) > MOST:
        raise ValueError(
            f"{len(sizes)} chains of {max(sizes)} or fewer states have {count:,} product states; "
            f"wanted at most {MOST:,}, for a message takes {4 * count:,} bytes at each step of "
            "each sequence. Take fewer chains, or fewer states."
        )


class ProductChain(Chain):
    """M independent Markov chains, whose product states are numbered with the last fastest.

    Its parameters are named ``log_initial_0``, ``log_transition_0``, ``log_initial_1``, ...

    Args:
        log_initials: M of ``(*b, K_m)``.
        log_transitions: M of ``(*b, K_m, K_m)``.
    """

    ops: ClassVar[Any] = factorial
    is_markov = True

    def __init__(self, log_initials: Sequence[Tensor], log_transitions: Sequence[Tensor]) -> None:
        super().__init__()
        self.log_initials, self.log_transitions = tuple(log_initials), tuple(log_transitions)
        self.sizes = tuple(table.size(-1) for table in self.log_transitions)
        check_product(self.sizes)

    @lazy
    def log_initial(self) -> Tensor:
        """``(*b, K)``, of the product states."""
        return reduce(_outer, self.log_initials)

    @property
    def tables(self) -> tuple[Tensor, tuple[Tensor, ...]]:  # type: ignore[override]
        """The first product state, and the matrix of each chain."""
        return self.log_initial, self.log_transitions

    @property
    def cores(self) -> dict[str, Core]:  # type: ignore[override]
        """Core dimensions of the initial probabilities and of the matrix of each chain."""
        found: dict[str, Core] = {}
        for m in range(len(self.sizes)):
            found |= {f"log_initial_{m}": (f"K{m}",), f"log_transition_{m}": (f"K{m}", f"K{m}")}
        return found

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The first state and the matrix of each chain."""
        pairs = zip(self.log_initials, self.log_transitions)
        return dict(zip(self.cores, (part for pair in pairs for part in pair)))

    def replace(self, **changes: Any) -> ProductChain:
        """A copy with some parameters changed, by name or all of a kind."""
        parts = self.parameters | {n: p for n, p in changes.items() if n in self.cores}
        initials, transitions = list(parts.values())[::2], list(parts.values())[1::2]
        return ProductChain(
            changes.get("log_initials", initials), changes.get("log_transitions", transitions)
        )

    @property
    def num_states(self) -> int:
        """K, the number of product states."""
        return math.prod(self.sizes)

    @property
    def log_transition(self) -> Tensor:
        """``(*b, K, K)``, of the product states; made anew at each reading."""
        product = self.log_transitions[0]
        for part in self.log_transitions[1:]:
            cells = product[..., :, None, :, None] + part[..., None, :, None, :]
            product = cells.flatten(-4, -3).flatten(-2)
        return product

    @property
    def matrices(self) -> Tensor:
        """``(*b, 1, K, K)``."""
        return self.log_transition.unsqueeze(-3)

    def split(self, states: Tensor) -> Tensor:
        """The state of each chain, ``(*, M)``, of product states ``(*)``."""
        parts = []
        for size in reversed(self.sizes):
            parts.append(states % size)
            states = states // size
        return torch.stack(parts[::-1], -1)

    def join(self, chains: Tensor) -> Tensor:
        """Product states ``(*)`` of the state of each chain, ``(*, M)``."""
        states = torch.zeros_like(chains[..., 0])
        for size, part in zip(self.sizes, chains.unbind(-1)):
            states = states * size + part
        return states

    def marginals(self, probs: Tensor) -> tuple[Tensor, ...]:
        """Marginals ``(*, K_m)`` of each chain, of probabilities of product states ``(*, K)``."""
        wide, axes = probs.unflatten(-1, self.sizes), range(-len(self.sizes), 0)
        return tuple(
            wide.sum([other for other in axes if other != axis]) if len(axes) > 1 else wide
            for axis in axes
        )

    def log_prob(self, states: Tensor, exists: Tensor) -> Tensor:
        r"""Log-probability :math:`\log p(z_{1:T})` of paths of product states."""
        total = entry(self.log_initial, states[..., :1]).squeeze(-1)
        for table, path in zip(self.log_transitions, self.split(states).unbind(-1)):
            taken = entry(table, path[..., :-1], path[..., 1:])
            total = total + taken.masked_fill(~exists[..., 1:], 0.0).sum(-1)
        return total

    def sample_prior(self, shape: torch.Size, num_steps: int) -> Tensor:
        """Paths of product states."""
        paths = [
            sample_markov(initial, [CategoricalTable(table)], shape, num_steps)
            for initial, table in zip(self.log_initials, self.log_transitions)
        ]
        return self.join(torch.stack(paths, -1))

    def expanded(self, lengths: Tensor, num_steps: int) -> Expansion:
        """The Markov chain of the product states, with its K x K matrix."""
        index = torch.arange(self.num_states, device=self.log_initial.device)
        return Expansion(MarkovChain(self.log_initial, self.log_transition), index)

    def stationary(self) -> Tensor:
        """Stationary distribution of the product states: that of every chain."""
        chains = [stationary_ops.stationary(table).log() for table in self.log_transitions]
        return reduce(_outer, chains).exp()

    def posterior(self, log_likelihood: Tensor, lengths: Tensor) -> FactorialPosterior:
        """Smoothed marginals of the product states and of each chain."""
        evidence, states, counts = self.counts_of_each(log_likelihood, lengths)
        transitions = tuple(list(counts.values())[1::2])
        return FactorialPosterior(evidence, states, self.marginals(states), transitions)

    def permuted(self, order: Tensor) -> Chain:
        """Raise ValueError: permuted product states are not a product of chains."""
        raise ValueError(
            "permute_states needs one chain; the states of this FactorialHMM are those of several. "
            "Pass hmm.expanded()."
        )


def _outer(first: Tensor, second: Tensor) -> Tensor:
    """Log-probabilities of pairs ``(*, K_1 K_2)`` of independent states."""
    return (first.unsqueeze(-1) + second.unsqueeze(-2)).flatten(-2)
