"""Chains behind one observation, in logarithms, as torch operations.

The product states of M chains are numbered with the last chain fastest. Messages ``(n, K)`` pass
through the transition of one chain after another: each takes the first axis and leaves it as the
last, so that after M of them the axes are in order again. See :mod:`pyrohmm.ops.factorial`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .log_space import finite_or_zero, logsumexp

LEAST = -100.0  # log-probability of a transition, above which sums may be products of matrices


class Chains(NamedTuple):
    """N sequences, the longest first, in float64; G is N, or 1 if all share a matrix."""

    initial: Tensor  # (N, K), log
    likelihood: Tensor  # (N, T, K), log
    transitions: tuple[Tensor, ...]  # (G, K_m, K_m), log
    counts: list[int]  # how many sequences have each step, up to the last that one has


class Step:
    """The transition of one chain, along one axis of messages in logarithms.

    Where every transition has some probability, sums are products of matrices of each fibre over
    its largest entry: what is lost then is below the precision of the sum. Else, and where the
    result is to be differentiated, they are sums of exponentials of all pairs.
    """

    def __init__(self, logs: Tensor, by_pairs: bool) -> None:
        self.logs, self.size = logs, logs.size(-1)
        self.by_pairs = by_pairs or bool((logs < LEAST).any())
        self.probs = logs.exp()

    def _for(self, table: Tensor, count: int) -> Tensor:
        return table if len(table) == 1 else table[:count]

    def forward(self, scores: Tensor) -> Tensor:
        """``(n, K_m, R)``, by the state before, to ``(n, R, K_m)``, by the next."""
        if self.by_pairs:
            pairs = scores.unsqueeze(2) + self._for(self.logs, len(scores)).unsqueeze(-1)
            return logsumexp(pairs, 1).mT
        top = finite_or_zero(scores.amax(1, keepdim=True))
        probs = self._for(self.probs, len(scores))
        return (probs.mT @ (scores - top).exp()).log().add(top).mT

    def backward(self, scores: Tensor) -> Tensor:
        """``(n, R, K_m)``, by the next state, to ``(n, K_m, R)``, by the state before."""
        if self.by_pairs:
            pairs = scores.mT.unsqueeze(1) + self._for(self.logs, len(scores)).unsqueeze(-1)
            return logsumexp(pairs, 2)
        top = finite_or_zero(scores.amax(-1, keepdim=True))
        probs = self._for(self.probs, len(scores))
        return (probs @ (scores - top).exp().mT).log().add(top.mT)

    def best(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """As :meth:`forward` with maxima in place of sums, and states before, ``(n, K_m, R)``."""
        pairs = scores.unsqueeze(2) + self._for(self.logs, len(scores)).unsqueeze(-1)
        largest, state = pairs.max(1)
        return largest.mT, state

    def counts(self, before: Tensor, after: Tensor, evidence: Tensor, weight: Tensor) -> Tensor:
        """Expected transitions ``(G, K_m, K_m)``, times weights ``(n,)``.

        Args:
            before: ``(n, K_m, R)``, messages that come to this step.
            after: ``(n, R, K_m)``, messages that come back to it.
            evidence: ``(n, 1, 1)``.
            weight: ``(n, 1, 1)``.
        """
        if self.by_pairs:
            logs = self._for(self.logs, len(before)).unsqueeze(-1)
            pairs = before.unsqueeze(2) + logs + after.mT.unsqueeze(1)
            counts = (pairs - evidence.unsqueeze(-1)).exp().sum(-1) * weight
        else:
            tops = before.amax(1), after.amax(-1)  # -inf where nothing comes: its share is zero
            share = (tops[0] + tops[1] - evidence.squeeze(-1)).exp().unsqueeze(-1) * weight
            left = (before - finite_or_zero(tops[0]).unsqueeze(1)).exp()
            right = (after - finite_or_zero(tops[1]).unsqueeze(-1)).exp() * share
            counts = self._for(self.probs, len(before)) * (left @ right)
        return counts.sum(0, keepdim=True) if len(self.logs) == 1 else counts


def steps_of(chain: Chains, by_pairs: bool = False) -> list[Step]:
    """The transition of each chain; with ``by_pairs`` such that all may be differentiated."""
    return [Step(table, by_pairs) for table in chain.transitions]


def through(scores: Tensor, steps: list[Step]) -> list[Tensor]:
    """Messages ``(n, K)`` before each chain's transition, and after the last one, ``(n, K)``."""
    messages = []
    for step in steps:
        messages.append(scores.reshape(len(scores), step.size, -1))
        scores = step.forward(messages[-1])
    return [*messages, scores.reshape(len(scores), -1)]


def forward(chain: Chains, steps: list[Step]) -> list[Tensor]:
    """Log-probabilities of the past and the product states, ``(n_t, K)`` for each step t."""
    messages = [chain.initial + chain.likelihood[:, 0]]
    for t, count in enumerate(chain.counts[1:], 1):
        after = through(messages[-1][:count], steps)[-1]
        messages.append(after + chain.likelihood[:count, t])
    return messages


def last(chain: Chains, messages: list[Tensor]) -> Tensor:
    """The messages at the last step of each sequence, ``(N, K)``."""
    ends = [*chain.counts[1:], 0]
    return torch.cat([message[end:] for message, end in zip(messages, ends)][::-1])


def gradient(
    chain: Chains, messages: list[Tensor], evidence: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Derivatives by the logarithms of the chain, times weights ``(N,)``."""
    steps = steps_of(chain)
    states = torch.zeros_like(chain.likelihood)
    transitions = [torch.zeros_like(table) for table in chain.transitions]
    evidence = evidence.masked_fill(evidence.isneginf(), torch.inf).unsqueeze(-1)
    back = torch.zeros_like(messages[-1])
    for t in range(len(messages) - 1, -1, -1):
        count = chain.counts[t]
        states[:count, t] = (messages[t] + back - evidence[:count]).exp()
        states[:count, t] *= weight[:count, None]
        if t == 0:
            break
        back = back + chain.likelihood[:count, t]
        scale = evidence[:count].unsqueeze(-1), weight[:count, None, None]
        for m, before in reversed([*enumerate(through(messages[t - 1][:count], steps)[:-1])]):
            step = steps[m]
            back = back.reshape(count, -1, step.size)
            counts = step.counts(before, back, *scale)
            transitions[m][: len(counts)] += counts
            back = step.backward(back)
        back = back.reshape(count, -1)
        back = torch.nn.functional.pad(back, (0, 0, 0, chain.counts[t - 1] - count))
    return states[:, 0].clone(), states, transitions


def walk_back(chain: Chains, last: Tensor, previous: Callable[[int, Tensor], Tensor]) -> Tensor:
    """Paths ``(*S, N, T)`` from their last states ``(*S, N)``; 0 at padded steps."""
    shape = (*last.shape[:-1], *chain.likelihood.shape[:2])
    path = torch.zeros(shape, dtype=torch.long, device=last.device)
    states = last[..., :0]
    for t in range(len(chain.counts) - 1, -1, -1):
        if t + 1 < len(chain.counts) and states.size(-1):
            states = previous(t + 1, states)
        states = torch.cat([states, last[..., states.size(-1) : chain.counts[t]]], -1)
        path[..., : states.size(-1), t] = states
    return path


def drawn(logs: Tensor) -> Tensor:
    """A column of each row of log-probabilities ``(*n, S)``, up to a constant, ``(*n)``."""
    probs = (logs - finite_or_zero(logs.amax(-1, keepdim=True))).exp()
    sums = probs.cumsum(-1)
    uniform = torch.rand_like(sums[..., :1]) * (1 - 1e-9)
    place = torch.searchsorted(sums, sums[..., -1:] * uniform, right=True)
    return place.squeeze(-1).clamp(max=logs.size(-1) - 1)
