"""Chains over several states at once: ``ProductChain`` and ``SecondOrderChain``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from .._checks import broadcast_shapes
from ..ops import forward
from ..ops.log_space import logsumexp
from ..ops.markov import sample_chain
from ..ops.tensor_cache import lazy
from .base import Chain, Core, Expansion, entry
from .markov import MarkovChain, MarkovRecursions

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
    """Raise if chains of ``sizes`` states have more product states than a matrix can hold."""
    if (count := math.prod(sizes)) > MOST:
        raise ValueError(
            f"{len(sizes)} chains of {max(sizes)} or fewer states have {count:,} product states; "
            f"wanted at most {MOST:,}, as their matrix takes {8 * count**2:,} bytes. Use fewer "
            "chains or states."
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
        pairs = zip(self.log_initials, self.log_transitions)
        self.take(**dict(zip(self.cores, (part for pair in pairs for part in pair))))

    check_values = Chain.check_values  # rows sum to one if those of the parts do

    @lazy
    def log_initial(self) -> Tensor:
        """Log initial probabilities of the product states, ``(*b, K)``."""
        return reduce(_outer, self.log_initials)

    @lazy
    def matrices(self) -> Tensor:
        """Log transition matrices of the product states, ``(*b, 1, K, K)``."""
        return reduce(_kronecker, self.log_transitions).unsqueeze(-3)

    @property
    def cores(self) -> dict[str, Core]:  # type: ignore[override]
        """Core dimensions of the initial probabilities and of the matrix of each chain."""
        names, chains = {"log_initial": 1, "log_transition": 2}, range(len(self.sizes))
        return {f"{name}_{m}": (f"K{m}",) * dim for m in chains for name, dim in names.items()}

    def replace(self, **changes: Any) -> ProductChain:
        """A copy with some parameters changed, by name or all of a kind."""
        lists = "log_initials", "log_transitions"
        known = [*self.cores, *lists]
        if unknown := changes.keys() - known:
            raise TypeError(f"{min(unknown)} is no parameter of a product of chains: {known} are.")
        parts = [changes.get(name, part) for name, part in self.parameters.items()]
        return ProductChain(*(changes.get(name, parts[i::2]) for i, name in enumerate(lists)))

    @property
    def num_states(self) -> int:
        """K, the number of product states."""
        return math.prod(self.sizes)

    def split(self, states: Tensor) -> Tensor:
        """Split product states ``(*)`` into the state of each chain, ``(*, M)``."""
        parts = []
        for size in reversed(self.sizes):
            parts.append(states % size)
            states = states // size
        return torch.stack(parts[::-1], -1)

    def join(self, chains: Tensor) -> Tensor:
        """Join the states of all chains ``(*, M)`` to product states ``(*)``."""
        states = torch.zeros_like(chains[..., 0])
        for size, part in zip(self.sizes, chains.unbind(-1)):
            states = states * size + part
        return states

    def marginals(self, probs: Tensor) -> tuple[Tensor, ...]:
        """Marginals ``(*, K_m)`` of each chain, from those of product states ``(*, K)``."""
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


FEW = 24  # states, with which the matrix of pairs is as fast as their own steps; below, faster


class SecondOrderPosterior(NamedTuple):
    """The posterior of a :class:`SecondOrderHMM`.

    Attributes:
        log_evidence: ``(*B)``, in nats.
        state_probs: ``(*B, T, K)``, smoothed marginals; zero at padded steps.
        transitions: ``(*B, K, K)``, expected number of transitions between adjacent states.
        triples: ``(*B, K, K, K)``, expected number of uses of each entry of ``log_transition``.
    """

    log_evidence: Tensor
    state_probs: Tensor
    transitions: Tensor
    triples: Tensor


class SecondOrderChain(Chain):
    """A chain whose next state depends on the two states before it.

    Args:
        log_initial: ``(*b, K)``.
        log_second: ``(*b, K, K)``, of the second state given the first.
        log_transition: ``(*b, K, K, K)``: [i, j, k] is that of k after i, j.
    """

    cores: ClassVar[dict[str, Core]] = {
        "log_initial": ("K",), "log_second": ("K", "K"), "log_transition": ("K", "K", "K"),
    }  # fmt: skip
    order = 2
    log_second: Tensor
    log_transition: Tensor

    def __init__(self, log_initial: Tensor, log_second: Tensor, log_transition: Tensor) -> None:
        super().__init__()
        self.take(log_initial=log_initial, log_second=log_second, log_transition=log_transition)

    @property
    def _by_earlier(self) -> Tensor:
        """Log transitions by the state two before, ``(*b, K + 1, K, K)``; at 0 if there is none."""
        second, after = self.log_second.unsqueeze(-3), self.log_transition
        batch = broadcast_shapes(second.shape[:-3], after.shape[:-3])
        return torch.cat([part.expand(*batch, *part.shape[-3:]) for part in (second, after)], -3)

    def log_evidence(self, log_likelihood: Tensor, lengths: Tensor) -> Tensor:
        r"""Log evidence :math:`\log p(x_{1:T})`, ``(*B)``, in nats, differentiable."""
        return self._ask("log_evidence", log_likelihood, lengths)

    def filtered(self, log_likelihood: Tensor, lengths: Tensor) -> Tensor:
        r"""Filtered :math:`\log p(z_t \mid x_{1:t})`, ``(*B, T, K)``; -inf at padded steps."""
        found = self._ask("filtered", log_likelihood, lengths)
        return logsumexp(found.unflatten(-1, (-1, self.num_states)), -2)

    def viterbi(self, log_likelihood: Tensor, lengths: Tensor) -> Tensor:
        """Most probable path, ``(*B, T)``; 0 at padded steps."""
        return self._ask("viterbi", log_likelihood, lengths) % self.num_states

    def sample_states(self, log_likelihood: Tensor, lengths: Tensor, num_samples: int) -> Tensor:
        """Sample paths from the posterior, ``(num_samples, *B, T)``; 0 at padded steps."""
        return self._ask("sample_states", log_likelihood, lengths, num_samples) % self.num_states

    def _ask(self, query: str, log_likelihood: Tensor, lengths: Tensor, *options: int) -> Tensor:
        """Run the recursion ``query``; with few states, on the Markov chain of pairs of states."""
        found: Tensor
        if self.num_states > FEW:
            found = getattr(super(), query)(log_likelihood, lengths, *options)
        else:
            of_pairs = log_likelihood.repeat(*[1] * (log_likelihood.dim() - 1), self.num_states + 1)
            found = getattr(self._pairs, query)(of_pairs, lengths, *options)
        return found

    def arranged(self, log_likelihood: Tensor, lengths: Tensor) -> forward.Arranged:
        """Messages of pairs of states, and tables ``(middle, first, next)``."""
        before = self.log_initial.unsqueeze(-2)
        pairs = torch.nn.functional.pad(before, (0, 0, 0, self.num_states - 1), value=-torch.inf)
        by_middle = self.log_second.unsqueeze(-2), self.log_transition.transpose(-3, -2)
        tables = torch.stack(torch.broadcast_tensors(*by_middle), -4)
        return forward.arrange(pairs, tables, log_likelihood, lengths)

    @property
    def _pairs(self) -> MarkovChain:
        return self.expanded(torch.tensor(1), 1).chain

    def log_prob(self, states: Tensor, exists: Tensor) -> Tensor:
        r"""Log-probability :math:`\log p(z_{1:T})` of paths."""
        earlier = torch.nn.functional.pad(states[..., :-2] + 1, (1, 0))[..., : states.size(-1) - 1]
        taken = entry(self._by_earlier, earlier, states[..., :-1], states[..., 1:])
        start = entry(self.log_initial, states[..., :1]).squeeze(-1)
        return start + taken.masked_fill(~exists[..., 1:], 0.0).sum(-1)

    def sample_prior(self, shape: torch.Size, num_steps: int) -> Tensor:
        """Sample paths of the chain."""
        rows = self._by_earlier.flatten(-3, -2).unsqueeze(-3)  # of pairs (earlier, j)
        return sample_chain(self.log_initial, rows, shape, num_steps)

    def expanded(self, lengths: Tensor, num_steps: int) -> Expansion:
        """A Markov chain of K (K + 1) states: j is a first state, (1 + i) K + j is j after i."""
        size, tables = self.num_states, self._by_earlier
        initial = torch.nn.functional.pad(self.log_initial, (0, size**2), value=-torch.inf)
        same = torch.eye(size, dtype=torch.bool, device=tables.device).unsqueeze(-1)
        after = tables.unsqueeze(-2).expand(*tables.shape[:-1], size, size)  # [c, i, j, k], i = j
        after = after.masked_fill(~same, -torch.inf).flatten(-2).flatten(-3, -2)
        matrix = torch.nn.functional.pad(after, (size, 0), value=-torch.inf)
        index = torch.arange(size, device=tables.device).repeat(size + 1)
        return Expansion(MarkovChain(initial, matrix), index)

    def stationary(self) -> Tensor:
        """Stationary distribution of the states, ``(*b, K)``."""
        return self._pairs.stationary().unflatten(-1, (-1, self.num_states)).sum(-2)

    def posterior(self, log_likelihood: Tensor, lengths: Tensor) -> SecondOrderPosterior:
        """Smoothed marginals, and expected transitions of each sequence."""
        evidence, states, counts = self.counts_of_each(log_likelihood, lengths)
        triples = counts["log_transition"]
        pairs = counts["log_second"] + triples.sum(-3)
        return SecondOrderPosterior(evidence, states, pairs, triples)
