"""``ProductChain``: several independent Markov chains side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.tensor_cache import lazy
from .base import Chain, Core
from .markov import MarkovRecursions

MOST = 1 << 13  # product states: a matrix of 512 MB in float64


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
    """Raise if chains of so many states have more product states than a matrix can hold."""
    if (count := math.prod(sizes)) > MOST:
        raise ValueError(
            f"{len(sizes)} chains of {max(sizes)} or fewer states have {count:,} product states; "
            f"wanted at most {MOST:,}, for their matrix takes {8 * count**2:,} bytes. Take fewer "
            "chains, or fewer states."
        )


class ProductChain(MarkovRecursions):
    """M independent Markov chains: one chain of product states, numbered with the last fastest.

    Its matrix is the Kronecker product of theirs; their expected counts are gradients through it.

    Its parameters are named ``log_initial_0``, ``log_transition_0``, ``log_initial_1``, ...

    Args:
        log_initials: M of ``(*b, K_m)``.
        log_transitions: M of ``(*b, K_m, K_m)``.
    """

    def __init__(self, log_initials: Sequence[Tensor], log_transitions: Sequence[Tensor]) -> None:
        super().__init__()
        self.log_initials, self.log_transitions = tuple(log_initials), tuple(log_transitions)
        self.sizes = tuple(table.size(-1) for table in self.log_transitions)
        check_product(self.sizes)

    @lazy
    def log_initial(self) -> Tensor:
        """``(*b, K)``, of the product states."""
        return reduce(_outer, self.log_initials)

    @lazy
    def matrices(self) -> Tensor:
        """``(*b, 1, K, K)``, of the product states."""
        return reduce(_kronecker, self.log_transitions).unsqueeze(-3)

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
        known = [*self.cores, "log_initials", "log_transitions"]
        for name in changes:
            if name not in known:
                raise TypeError(f"{name} is no parameter of a product of chains: {known} are.")
        parts = self.parameters | {n: p for n, p in changes.items() if n in self.cores}
        initials, transitions = list(parts.values())[::2], list(parts.values())[1::2]
        return ProductChain(
            changes.get("log_initials", initials), changes.get("log_transitions", transitions)
        )

    @property
    def num_states(self) -> int:
        """K, the number of product states."""
        return math.prod(self.sizes)

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

    def posterior(self, log_likelihood: Tensor, lengths: Tensor) -> FactorialPosterior:  # type: ignore[override]
        """Smoothed marginals of the product states and of each chain."""
        evidence, states, pairs = super().posterior(log_likelihood, lengths)
        count = len(self.sizes)
        pairs = pairs.unflatten(-1, self.sizes).unflatten(-1 - count, self.sizes)
        own = [(m - 2 * count, m - count) for m in range(count)]
        others = [[axis for axis in range(-2 * count, 0) if axis not in kept] for kept in own]
        transitions = tuple(pairs.sum(axes) if axes else pairs for axes in others)
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


def _kronecker(first: Tensor, second: Tensor) -> Tensor:
    """Logarithms of the Kronecker product of two matrices ``(*, K, K)``."""
    cells = first[..., :, None, :, None] + second[..., None, :, None, :]
    return cells.flatten(-4, -3).flatten(-2)
