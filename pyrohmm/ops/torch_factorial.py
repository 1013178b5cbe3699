"""Chains whose messages have several axes, in logarithms, as torch operations.

Product states are numbered with the last axis fastest. Each transition takes the first axis of the
messages ``(n, K)`` and leaves one as the last. Of M chains behind one observation, one transition
follows another, so that after M of them the axes are in order again: see
:mod:`pyrohmm.ops.factorial`. Of pairs of states of one chain, a single transition takes (i, j) to
(j, k): see :mod:`pyrohmm.ops.second_order`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._precision import differentiable_gradient, in_full_precision
from .log_space import finite_or_zero, largest, logsumexp
from .masks import exists

LEAST = -100.0  # log-probability of a transition, above which sums may be products of matrices


class Chains(NamedTuple):
    """N sequences, the longest first, in float64; G is N, or 1 if all share a matrix."""

    initial: Tensor  # (N, K), log
    likelihood: Tensor  # (N, T, W), log; of the last W states, and again of those before
    transitions: tuple[Tensor, ...]  # (G, K_m, K_m) or, of pairs of states, (G, W, W, W), log
    counts: list[int]  # how many sequences have each step, up to the last that one has

    def emitted(self, t: int) -> Tensor:
        """Log-likelihoods ``(n, K)`` of the product states at a step."""
        here = self.likelihood[: self.counts[t], t]
        return here.repeat(1, self.initial.size(-1) // here.size(-1))


class Arranged(NamedTuple):
    """Sequences as the recursions below take them, and as they came."""

    chain: Chains
    order: Tensor  # (N,), the sequence that each row is
    batch: torch.Size
    dtype: torch.dtype
    shift: Tensor  # (N,), what was subtracted from the log-likelihoods of each sequence

    @property
    def shape(self) -> tuple[int, ...]:
        """``(*B, T, W)``."""
        return (*self.batch, *self.chain.likelihood.shape[1:])

    def restored(self, rows: Tensor, dim: int = 0) -> Tensor:
        """Results of sequences ``(*, N, *)`` in the order and the batch shape of the arguments."""
        place = self.order.argsort().to(rows.device)
        return rows.index_select(dim, place).unflatten(dim, self.batch or (1,))


def arrange(
    initial: Tensor, transitions: Sequence[Tensor], likelihood: Tensor, lengths: Tensor,
    batch: torch.Size, core: int = 2,
) -> Arranged:  # fmt: skip
    """The longest sequences first, by differentiable operations.

    Args:
        initial: ``(*b, K)``.
        transitions: Of ``core`` dimensions behind ``(*b)``.
        likelihood: ``(*b, T, W)``.
        lengths: ``(*b)``, on the CPU.
        batch: What ``(*b)`` broadcast to.
        core: 2, or 3 of pairs of states.
    """
    lengths = lengths.expand(batch).reshape(-1)
    order = lengths.argsort(descending=True, stable=True)
    longest = int(lengths.max()) if len(lengths) else 1
    where = order.to(likelihood.device)

    def rows(tensor: Tensor, core: int) -> Tensor:
        tail = tensor.shape[tensor.dim() - core :]
        wide = tensor.double().expand(*batch, *tail).reshape(len(order), *tail)
        return wide.index_select(0, where)

    seen = rows(likelihood, 2)
    peak = largest(seen, (-1,))  # lest sums over steps have no digits left for differences
    steps = exists(lengths[order], seen.size(1), where.device).unsqueeze(-1)
    chain = Chains(
        rows(initial, 1),
        seen - peak,
        tuple(
            table.double().reshape(1, *table.shape[-core:])
            if table.shape[:-core].numel() == 1
            else rows(table, core)
            for table in transitions
        ),
        (lengths > torch.arange(longest).unsqueeze(-1)).sum(-1).tolist(),
    )
    dtype = torch.promote_types(likelihood.dtype, initial.dtype)
    for tensor in transitions:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return Arranged(chain, order, batch, dtype, peak.masked_fill(~steps, 0.0).sum((-2, -1)))


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

    def into(self, states: Tensor, others: Tensor) -> Tensor:
        """Log-probabilities ``(*n, K_m)`` of coming to ``states`` ``(*n)`` beside ``others``."""
        count = states.size(-1)
        rows = torch.arange(count, device=states.device)
        return self._for(self.logs, count).expand(count, -1, -1)[rows, :, states]


class PairStep(Step):
    """The transition of pairs of states (i, j) to (j, k) by log p(k | i, j), ``(G, K, K, K)``.

    A product of matrices for each j: K^3, where that of all pairs costs K^4.
    """

    def _contracted(self, scores: Tensor, of: str, to: str) -> Tensor:
        """Sums of products of matrices and ``scores`` ``(n, K, K)``."""
        if len(self.probs) == 1:
            return torch.einsum(f"ijk,n{of}->n{to}", self.probs[0], scores)
        return torch.einsum(f"nijk,n{of}->n{to}", self.probs[: len(scores)], scores)

    def forward(self, scores: Tensor) -> Tensor:
        """``(n, i, j)`` to ``(n, j, k)``."""
        if self.by_pairs:
            return logsumexp(scores.unsqueeze(-1) + self._for(self.logs, len(scores)), 1)
        top = finite_or_zero(scores.amax(1, keepdim=True))
        return self._contracted((scores - top).exp(), "ij", "jk").log().add(top.mT)

    def backward(self, scores: Tensor) -> Tensor:
        """``(n, j, k)`` to ``(n, i, j)``."""
        if self.by_pairs:
            return logsumexp(scores.unsqueeze(1) + self._for(self.logs, len(scores)), 3)
        top = finite_or_zero(scores.amax(-1, keepdim=True))
        return self._contracted((scores - top).exp(), "jk", "ij").log().add(top.mT)

    def best(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """As :meth:`forward` with maxima in place of sums, and states before, ``(n, k, j)``."""
        largest, state = (scores.unsqueeze(-1) + self._for(self.logs, len(scores))).max(1)
        return largest, state.mT

    def counts(self, before: Tensor, after: Tensor, evidence: Tensor, weight: Tensor) -> Tensor:
        """Expected transitions ``(G, K, K, K)``: see :meth:`Step.counts`."""
        one = len(self.logs) == 1
        if self.by_pairs:
            logs = self._for(self.logs, len(before)) + before.unsqueeze(-1) + after.unsqueeze(1)
            counts = (logs - evidence.unsqueeze(-1)).exp() * weight.unsqueeze(-1)
            return counts.sum(0, keepdim=True) if one else counts
        tops = before.amax(1), after.amax(-1)  # (n, j), as in Step
        share = (tops[0] + tops[1] - evidence.squeeze(-1)).exp().unsqueeze(-1) * weight
        left = (before - finite_or_zero(tops[0]).unsqueeze(1)).exp()
        right = (after - finite_or_zero(tops[1]).unsqueeze(-1)).exp() * share
        if one:
            return self.probs * torch.einsum("nij,njk->ijk", left, right)
        return self.probs[: len(before)] * torch.einsum("nij,njk->nijk", left, right)

    def into(self, states: Tensor, others: Tensor) -> Tensor:
        """Log-probabilities ``(*n, K)`` of coming to the pair of ``others`` and ``states``."""
        count = states.size(-1)
        rows = torch.arange(count, device=states.device)
        return self._for(self.logs, count).expand(count, -1, -1, -1)[rows, :, others, states]


def steps_of(chain: Chains, by_pairs: bool = False) -> list[Step]:
    """The transitions of a chain; with ``by_pairs`` such that all may be differentiated."""
    return [(PairStep if t.dim() == 4 else Step)(t, by_pairs) for t in chain.transitions]


def through(scores: Tensor, steps: list[Step]) -> list[Tensor]:
    """Messages ``(n, K)`` before each transition, and after the last one, ``(n, K)``."""
    messages = []
    for step in steps:
        messages.append(scores.reshape(len(scores), step.size, -1))
        scores = step.forward(messages[-1])
    return [*messages, scores.reshape(len(scores), -1)]


def forward(chain: Chains, steps: list[Step]) -> list[Tensor]:
    """Log-probabilities of the past and the product states, ``(n_t, K)`` for each step t."""
    messages = [chain.initial + chain.emitted(0)]
    for t, count in enumerate(chain.counts[1:], 1):
        messages.append(through(messages[-1][:count], steps)[-1] + chain.emitted(t))
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
    states, initial = torch.zeros_like(chain.likelihood), messages[0]
    transitions = [torch.zeros_like(table) for table in chain.transitions]
    evidence = evidence.masked_fill(evidence.isneginf(), torch.inf).unsqueeze(-1)
    back = torch.zeros_like(messages[-1])
    for t in range(len(messages) - 1, -1, -1):
        count = chain.counts[t]
        initial = (messages[t] + back - evidence[:count]).exp() * weight[:count, None]
        states[:count, t] = initial.unflatten(-1, (-1, states.size(-1))).sum(1)
        if t == 0:
            break
        back = back + chain.emitted(t)
        scale = evidence[:count].unsqueeze(-1), weight[:count, None, None]
        for m, before in reversed([*enumerate(through(messages[t - 1][:count], steps)[:-1])]):
            step = steps[m]
            back = back.reshape(count, -1, step.size)
            counts = step.counts(before, back, *scale)
            transitions[m][: len(counts)] += counts
            back = step.backward(back)
        back = back.reshape(count, -1)
        back = torch.nn.functional.pad(back, (0, 0, 0, chain.counts[t - 1] - count))
    return initial, states, transitions


class _Evidence(torch.autograd.Function):
    """Log evidence ``(N,)``; the gradient is analytic."""

    @staticmethod
    def forward(
        ctx: Any, counts: list[int], initial: Tensor, likelihood: Tensor, *transitions: Tensor
    ) -> Tensor:
        chain = Chains(initial, likelihood, transitions, counts)
        messages = forward(chain, steps_of(chain))
        evidence = last(chain, messages).logsumexp(-1)
        ctx.save_for_backward(initial, likelihood, *transitions)
        ctx.counts, ctx.messages, ctx.evidence = counts, messages, evidence
        return evidence.clone()

    @staticmethod
    @in_full_precision
    def backward(ctx: Any, weight: Tensor) -> tuple[Any, ...]:
        tensors = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient will itself be differentiated

            def evidence(initial: Tensor, likelihood: Tensor, *transitions: Tensor) -> Tensor:
                chain = Chains(initial, likelihood, transitions, ctx.counts)
                return logsumexp(last(chain, forward(chain, steps_of(chain, True))), -1)

            return (None, *differentiable_gradient(evidence, tensors, weight))
        chain = Chains(tensors[0], tensors[1], tensors[2:], ctx.counts)
        initial, likelihood, parts = gradient(chain, ctx.messages, ctx.evidence, weight)
        return (None, initial, likelihood, *parts)


def log_evidence(arranged: Arranged) -> Tensor:
    """Log evidence ``(*B)``, differentiable any number of times."""
    chain = arranged.chain
    value: Tensor = _Evidence.apply(
        chain.counts, chain.initial, chain.likelihood, *chain.transitions
    )
    value = arranged.restored(value + arranged.shift)
    return value.reshape(arranged.batch).to(arranged.dtype)


def filtered(arranged: Arranged) -> Tensor:
    """Filtered log-probabilities ``(*B, T, W)`` of the last W states; -inf where padded."""
    chain = arranged.chain
    scores = torch.full_like(chain.likelihood, -torch.inf)
    for t, message in enumerate(forward(chain, steps_of(chain))):
        total = finite_or_zero(message.logsumexp(-1, keepdim=True))
        states = (message - total).unflatten(-1, (-1, scores.size(-1)))
        scores[: len(message), t] = states.logsumexp(1)
    return arranged.restored(scores).reshape(arranged.shape).to(arranged.dtype)


def viterbi(arranged: Arranged) -> Tensor:
    """Most probable path of the product states, ``(*B, T)``; 0 at padded steps."""
    chain = arranged.chain
    steps, pointers = steps_of(chain), []
    score, scores = chain.initial + chain.emitted(0), []
    for t, count in enumerate(chain.counts):
        if t:
            score, before = score[:count], []
            for step in steps:
                largest, state = step.best(score.reshape(count, step.size, -1))
                before.append(state)
                score = largest.reshape(count, -1)
            score = score + chain.emitted(t)
            pointers.append(before)
        scores.append(score)

    def previous(t: int, states: Tensor) -> Tensor:
        for step, pointer in zip(reversed(steps), reversed(pointers[t - 1])):
            other, here = states // step.size, states % step.size
            rows = torch.arange(len(states), device=states.device)
            states = pointer[rows, here, other] * pointer.size(-1) + other
        return states

    path = walk_back(chain, last(chain, scores).argmax(-1), previous)
    return arranged.restored(path).reshape(arranged.shape[:-1])


def sample_states(arranged: Arranged, num_samples: int) -> Tensor:
    """Samples of paths of the product states, ``(num_samples, *B, T)``; 0 at padded steps."""
    chain = arranged.chain
    steps = steps_of(chain)
    messages = forward(chain, steps)

    def previous(t: int, states: Tensor) -> Tensor:
        count = states.size(-1)  # of the sequences; before it are the samples
        rows = torch.arange(count, device=states.device)
        scores = through(messages[t - 1][:count], steps)[:-1]
        for step, score in zip(reversed(steps), reversed(scores)):
            other, here = states // step.size, states % step.size
            fibre = score[rows, :, other] + step.into(here, other)
            states = drawn(fibre) * score.size(-1) + other
        return states

    ends = last(chain, messages).expand(num_samples, -1, -1)
    found = walk_back(chain, drawn(ends), previous)
    shape = (num_samples, *arranged.shape[:-1])
    return arranged.restored(found, 1).reshape(shape).long()


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
