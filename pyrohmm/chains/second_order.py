"""``SecondOrderChain``: each state depends on the two before it."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from .._checks import broadcast_shapes
from ..ops import second_order
from ..ops.log_space import logsumexp
from ..ops.sampling import CategoricalTable, sample_path
from .base import Chain, Core, Expansion, entry
from .markov import MarkovChain

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
    ops: ClassVar[Any] = second_order
    order = 2
    log_second: Tensor
    log_transition: Tensor

    def __init__(self, log_initial: Tensor, log_second: Tensor, log_transition: Tensor) -> None:
        super().__init__()
        self.take(log_initial=log_initial, log_second=log_second, log_transition=log_transition)
        self.tables = self.log_initial, self.log_second, self.log_transition

    @property
    def _by_earlier(self) -> Tensor:
        """``(*b, K + 1, K, K)``: the second state, then the next one by the state two before."""
        second, after = self.log_second.unsqueeze(-3), self.log_transition
        batch = broadcast_shapes(second.shape[:-3], after.shape[:-3])
        return torch.cat([part.expand(*batch, *part.shape[-3:]) for part in (second, after)], -3)

    # Of few states, those of the Markov chain of pairs of states, whose matrix is small

    def log_evidence(self, log_likelihood: Tensor, lengths: Tensor) -> Tensor:
        r"""Log evidence :math:`\log p(x_{1:T})`, ``(*B)``, in nats, differentiable."""
        if self.num_states > FEW:
            return super().log_evidence(log_likelihood, lengths)
        return self._pairs.log_evidence(self._of_pairs(log_likelihood), lengths)

    def filtered(self, log_likelihood: Tensor, lengths: Tensor) -> Tensor:
        r"""Filtered :math:`\log p(z_t \mid x_{1:t})`, ``(*B, T, K)``; -inf at padded steps."""
        if self.num_states > FEW:
            return super().filtered(log_likelihood, lengths)
        pairs = self._pairs.filtered(self._of_pairs(log_likelihood), lengths)
        return logsumexp(pairs.unflatten(-1, (-1, self.num_states)), -2)

    def viterbi(self, log_likelihood: Tensor, lengths: Tensor) -> Tensor:
        """Most probable path, ``(*B, T)``; 0 at padded steps."""
        if self.num_states > FEW:
            return super().viterbi(log_likelihood, lengths)
        pairs = self._pairs.viterbi(self._of_pairs(log_likelihood), lengths)
        return pairs % self.num_states

    def sample_states(self, log_likelihood: Tensor, lengths: Tensor, num_samples: int) -> Tensor:
        """Paths from the posterior, ``(num_samples, *B, T)``; 0 at padded steps."""
        if self.num_states > FEW:
            return super().sample_states(log_likelihood, lengths, num_samples)
        likelihood = self._of_pairs(log_likelihood)
        return self._pairs.sample_states(likelihood, lengths, num_samples) % self.num_states

    @property
    def _pairs(self) -> MarkovChain:
        return self.expanded(torch.tensor(1), 1).chain

    def _of_pairs(self, log_likelihood: Tensor) -> Tensor:
        return log_likelihood.repeat(*[1] * (log_likelihood.dim() - 1), self.num_states + 1)

    def log_prob(self, states: Tensor, exists: Tensor) -> Tensor:
        r"""Log-probability :math:`\log p(z_{1:T})` of paths."""
        earlier = torch.nn.functional.pad(states[..., :-2] + 1, (1, 0))[..., : states.size(-1) - 1]
        taken = entry(self._by_earlier, earlier, states[..., :-1], states[..., 1:])
        start = entry(self.log_initial, states[..., :1]).squeeze(-1)
        return start + taken.masked_fill(~exists[..., 1:], 0.0).sum(-1)

    def sample_prior(self, shape: torch.Size, num_steps: int) -> Tensor:
        """Paths of the chain."""
        size = self.num_states
        initial = CategoricalTable(self.log_initial.unsqueeze(-2))
        table = CategoricalTable(self._by_earlier.flatten(-3, -2))  # rows: pairs (earlier, j)

        def after(_: int, pairs: Tensor) -> Tensor:
            return (pairs % size + 1) * size + table.sample(pairs)

        first = initial.sample(torch.zeros(shape, dtype=torch.long))
        return sample_path(first, num_steps, after) % size

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
        """Share of the time that is spent in each state in the long run, ``(*b, K)``."""
        pairs = self.expanded(torch.tensor(1), 1).chain.stationary()
        return pairs.unflatten(-1, (-1, self.num_states)).sum(-2)

    def posterior(self, log_likelihood: Tensor, lengths: Tensor) -> SecondOrderPosterior:
        """Smoothed marginals, and expected transitions of each sequence."""
        evidence, states, counts = self.counts_of_each(log_likelihood, lengths)
        triples = counts["log_transition"]
        pairs = counts["log_second"] + triples.sum(-3)
        return SecondOrderPosterior(evidence, states, pairs, triples)
