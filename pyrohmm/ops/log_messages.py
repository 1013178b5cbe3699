"""Chains of one state, or of pairs of states, in logarithms and float64, as torch operations.

A transition takes the first axis of the messages ``(n, K)`` and leaves one as the last. A Markov
chain has one axis: so are computed its best paths and samples on a device, and sequences whose
scaled messages leave the range. Of pairs of states, a transition takes (i, j) to (j, k) by a matrix
for each j: see :mod:`pyrohmm.ops.second_order`.

Everything is summed in logarithms and float64, and comes back in the dtype of the arguments; -inf
is legal everywhere. A sequence of probability zero has evidence -inf and gradient zero.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .._checks import check_broadcast, check_lengths
from .._precision import recomputing, with_gradient
from .._transforms import transforming
from .log_space import finite_or_zero, largest, logsumexp
from .masks import exists

LEAST = -100.0  # log-probability of a transition, above which products of matrices lose nothing
SURE = 1e-280  # what a sum of products of numbers up to one is above if it loses only rounding
MOST = 200.0  # logarithm of a factor by which such products may be multiplied afterwards
AT_ONCE = 1 << 17  # numbers made at once, of all pairs of states: they stay in the cache
Gradient = Callable[[Tensor], tuple[Tensor, ...]]


class Chains(NamedTuple):
    """N sequences, the longest first, in float64."""

    initial: Tensor  # (N, K), log
    likelihood: Tensor  # (N, T, W), log; of the last W states, and again of those before
    table: Tensor  # (S, N|1, R|1, k, k), log, of S transitions: see Step
    counts: list[int]  # how many sequences have each step, up to the last that one has

    def place(self, t: int) -> int:
        """Which of the S matrices goes to step t: the last for all after the others."""
        return min(t, len(self.table)) - 1

    def emitted(self, t: int) -> Tensor:
        """Log-likelihoods ``(n, K)`` of the messages' states at a step."""
        here = self.likelihood[: self.counts[t], t]
        return here.repeat(1, self.initial.size(-1) // here.size(-1))


class Arranged(NamedTuple):
    """Sequences as the recursions below take them, and as they came."""

    chain: Chains
    order: Tensor  # (N,), the sequence that each row is
    batch: torch.Size
    dtype: torch.dtype
    shift: Tensor  # (N,), what was subtracted from the logarithms of each sequence

    def restored(self, rows: Tensor, dim: int = 0) -> Tensor:
        """Results of sequences ``(*, N, *)`` in the order and the batch shape of the arguments."""
        rows = rows.index_select(dim, self.order.argsort().to(rows.device))
        return rows.reshape((*rows.shape[:dim], *self.batch, *rows.shape[dim + 1 :]))


def arrange(
    initial: Tensor, table: Tensor, likelihood: Tensor, lengths: Tensor, batch: torch.Size
) -> Arranged:
    """Sort the longest sequences first, by differentiable operations.

    The largest logarithm of each step is subtracted, lest sums over steps grow so large that none
    of their digits are left for the differences.

    Args:
        initial: ``(*b, K)``.
        table: ``(*b, S, R|1, k, k)``: the last of S for all transitions after the others.
        likelihood: ``(*b, T, W)``.
        lengths: ``(*b)``, on the CPU.
        batch: What ``(*b)`` broadcast to.
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
    peak = largest(seen, (-1,))
    steps = exists(lengths[order], seen.size(1), where.device)
    seen = (seen - peak).masked_fill(~steps.unsqueeze(-1), 0.0)
    shared = table.shape[:-4].numel() == 1
    matrices = table.double().reshape(1, *table.shape[-4:]) if shared else rows(table, 4)
    counts = (lengths > torch.arange(longest).unsqueeze(-1)).sum(-1).tolist()
    chain = Chains(rows(initial, 1), seen, matrices.movedim(1, 0), counts)
    dtype = torch.promote_types(likelihood.dtype, initial.dtype)
    dtype = torch.promote_types(dtype, table.dtype)
    return Arranged(chain, order, batch, dtype, peak.squeeze(-1).masked_fill(~steps, 0.0).sum(-1))


def checked(
    log_initial: Tensor, table: Tensor, log_likelihood: Tensor, lengths: Tensor
) -> Arranged:
    """:func:`arrange` with checks of the lengths and batch dimensions."""
    lengths = lengths.cpu().long()
    check_lengths(lengths, log_likelihood.size(-2))
    batch = check_broadcast(
        {
            "transitions": table.shape[:-4],
            "log_initial": log_initial.shape[:-1],
            "lengths": lengths.shape,
            "log_likelihood": log_likelihood.shape[:-2],
        }
    )
    return arrange(log_initial, table, log_likelihood, lengths, batch)


class Step:
    """One transition, along the first axis of messages in logarithms.

    Sums are products of matrices of each fibre over its largest entry, where they surely lose only
    rounding; else, and where the result is to be differentiated, sums over all pairs of states.

    Args:
        logs: ``(N|1, R|1, k, k)``: for each sequence or all, for each fibre or all.
        by_pairs: Whether the sums are to be differentiable.
    """

    def __init__(self, logs: Tensor, by_pairs: bool = False) -> None:
        self.logs, self.size, self.by_pairs = logs, logs.size(-1), by_pairs
        self.axes = "n" * (len(logs) > 1) + "r" * (logs.size(1) > 1)
        if not by_pairs:
            self.probs = logs.exp()
            self.safe = bool((logs >= LEAST).all())
            self.sure = SURE * self.probs.amax().clamp(min=1.0)

    def fibres(self, scores: Tensor) -> Tensor:
        """Messages ``(n, K)`` as ``(n, R, k)``, by the states that the transition leaves."""
        return scores.reshape(len(scores), self.size, -1).mT

    def table(self, table: Tensor, rows: Tensor | int) -> Tensor:
        """Entries of ``table`` for some rows of the sequences, or the first ones."""
        if len(table) == 1:
            return table
        return table[:rows] if isinstance(rows, int) else table[rows]

    def sums(self, scores: Tensor, back: bool = False) -> Tensor:
        """Log of sums over transitions of ``scores`` ``(n, R, k)``, by the state at the end.

        With ``back`` the scores are by that state, and the sums by the one before.
        """
        logs = self.logs.mT if back else self.logs
        if self.by_pairs:
            return _over_pairs(scores, self.table(logs, len(scores)))
        top = finite_or_zero(scores.amax(-1, keepdim=True))
        total = self._product((scores - top).exp(), self.probs, back)
        found = total.log() + top
        if not self.safe:
            possible = (scores > -torch.inf).double(), (self.logs > -torch.inf).double()
            lost = (total < self.sure) & (self._product(*possible, back) > 0)
            rows = lost.flatten(1).any(-1).nonzero().squeeze(-1)
            if len(rows):
                found[rows] = _over_pairs(scores[rows], self.table(logs, rows))
        return found

    def _product(self, values: Tensor, table: Tensor, back: bool) -> Tensor:
        """Sums ``(n, R, k)`` of ``values`` ``(n, R, k)`` times a table."""
        here = self.table(table, len(values))[:, 0 if table.size(1) == 1 else slice(None)]
        here = here if len(table) > 1 else here[0]
        of, to = "ki" if back else "ik", "nrk"
        return torch.einsum(f"nri,{self.axes}{of}->{to}", values, here)

    def best(self, scores: Tensor) -> Tensor:
        """Maxima over transitions ``(n, R, k)``, of ``scores`` ``(n, R, k)``."""
        size = max(1, AT_ONCE // (scores[0].numel() * self.size))
        parts = scores.unsqueeze(-1).split(size)
        tables = self.table(self.logs, len(scores)).split(size)
        tables = tables if len(tables) == len(parts) else tables * len(parts)
        return torch.cat([(part + table).amax(-2) for part, table in zip(parts, tables)])

    def counts(self, before: Tensor, after: Tensor, evidence: Tensor, weight: Tensor) -> Tensor:
        """Expected transitions, of the shape of ``logs`` for the first n sequences.

        Args:
            before: ``(n, R, k)``, messages that come to this step.
            after: ``(n, R, k)``, messages that come back to it.
            evidence: ``(n,)``.
            weight: ``(n,)``.
        """
        tops = before.amax(-1), after.amax(-1)  # -inf where nothing comes: its share is zero
        share = tops[0] + tops[1] - evidence.unsqueeze(-1)
        lost = share.amax(-1) > MOST
        share = share.masked_fill(lost.unsqueeze(-1), -torch.inf).exp() * weight.unsqueeze(-1)
        left = (before - finite_or_zero(tops[0]).unsqueeze(-1)).exp()
        right = (after - finite_or_zero(tops[1]).unsqueeze(-1)).exp() * share.unsqueeze(-1)
        outer = torch.einsum(f"nri,nrk->{self.axes}ik", left, right)
        shape = (len(before) if "n" in self.axes else 1, *self.logs.shape[1:])
        counts = self.table(self.probs, len(before)) * outer.reshape(shape)
        for row in lost.nonzero().squeeze(-1):
            pairs = before[row].unsqueeze(-1) + after[row].unsqueeze(-2)
            pairs = pairs + self.table(self.logs, row.reshape(1))[0] - evidence[row]
            pairs = (pairs.exp() * weight[row]).sum_to_size(self.logs.shape[1:])
            counts[row if "n" in self.axes else 0] += pairs
        return counts

    def into(self, states: Tensor, fibres: Tensor) -> Tensor:
        """Log-probabilities ``(*s, n, k)`` of coming to ``states`` ``(*s, n)`` of ``fibres``."""
        row = torch.arange(states.size(-1), device=states.device) % len(self.logs)
        return self.logs[row, fibres % self.logs.size(1), :, states]


def _over_pairs(scores: Tensor, logs: Tensor) -> Tensor:
    """Log of sums over all pairs of states, differentiable."""
    return logsumexp(scores.unsqueeze(-1) + logs, -2)


Over = Callable[[Step, Tensor], Tensor]  # sums or maxima over transitions


def steps_of(chain: Chains, by_pairs: bool = False) -> Callable[[int], Step]:
    """The transition to step t, as a function of t."""

    @lru_cache(maxsize=2)
    def at(place: int) -> Step:
        return Step(chain.table[place], by_pairs)

    return lambda t: at(chain.place(t))


def forward(chain: Chains, by_pairs: bool = False, over: Over = Step.sums) -> list[Tensor]:
    """Log-probabilities of the past and the states, ``(n_t, K)`` for each step t."""
    messages, step_to = [chain.initial + chain.emitted(0)], steps_of(chain, by_pairs)
    for t, count in enumerate(chain.counts[1:], 1):
        step = step_to(t)
        messages.append(over(step, step.fibres(messages[-1][:count])).flatten(1) + chain.emitted(t))
    return messages


def last(chain: Chains, messages: list[Tensor]) -> Tensor:
    """The messages at the last step of each sequence, ``(N, K)``."""
    ends = [*chain.counts[1:], 0]
    return torch.cat([message[end:] for message, end in zip(messages, ends)][::-1])


def solve(chain: Chains) -> tuple[Tensor, Gradient]:
    """Log evidence ``(N,)``; and the derivatives of its sum with weights, by all tensors."""
    messages = forward(chain)
    evidence = last(chain, messages).logsumexp(-1)
    return evidence.clone(), lambda weight: _gradient(chain, messages, evidence, weight)


def _gradient(
    chain: Chains, messages: list[Tensor], evidence: Tensor, weight: Tensor
) -> tuple[Tensor, ...]:
    """Derivatives by initial, likelihood and table of the evidences times weights ``(N,)``."""
    step_to = steps_of(chain)
    states, initial = torch.zeros_like(chain.likelihood), messages[0]
    table = torch.zeros_like(chain.table)
    evidence = evidence.masked_fill(evidence.isneginf(), torch.inf)
    back = torch.zeros_like(messages[-1])
    for t in range(len(messages) - 1, -1, -1):
        count = chain.counts[t]
        whole, weights = evidence[:count], weight[:count]
        initial = (messages[t] + back - whole.unsqueeze(-1)).exp() * weights.unsqueeze(-1)
        states[:count, t] = initial.unflatten(-1, (-1, states.size(-1))).sum(1)
        if t == 0:
            break
        step = step_to(t)
        after = (back + chain.emitted(t)).reshape(count, -1, step.size)
        counts = step.counts(step.fibres(messages[t - 1][:count]), after, whole, weights)
        table[chain.place(t), : len(counts)] += counts
        back = step.sums(after, back=True).mT.flatten(1)
        back = pad(back, (0, 0, 0, chain.counts[t - 1] - count))
    return initial, states, table


def log_evidence(arranged: Arranged) -> Tensor:
    """Log evidence ``(*B)``, differentiable any number of times."""
    chain = arranged.chain

    def made(initial: Tensor, likelihood: Tensor, table: Tensor) -> Chains:
        return Chains(initial, likelihood, table, chain.counts)

    def twin(*tensors: Tensor) -> Tensor:
        parts = made(*tensors)
        return logsumexp(last(parts, forward(parts, by_pairs=True)), -1)

    tensors = chain.initial, chain.likelihood, chain.table
    value = with_gradient(
        lambda *tensors: solve(made(*tensors)), twin, *tensors, dtype=arranged.dtype
    )
    return arranged.restored(value + arranged.shift).to(arranged.dtype)


def filtered(arranged: Arranged) -> Tensor:
    """Filtered log-probabilities ``(*B, T, W)`` of the last W states; -inf where padded."""
    count, num_steps, size = arranged.chain.likelihood.shape
    steps = []
    for message in forward(arranged.chain, by_pairs=transforming()):
        total = finite_or_zero(logsumexp(message, -1).unsqueeze(-1))
        states = logsumexp((message - total).unflatten(-1, (-1, size)), 1)
        steps.append(pad(states, (0, 0, 0, count - len(message)), value=-torch.inf))
    scores = pad(torch.stack(steps, 1), (0, 0, 0, num_steps - len(steps)), value=-torch.inf)
    return arranged.restored(scores).to(arranged.dtype)


def viterbi(arranged: Arranged) -> Tensor:
    """Most probable path of the last W states, ``(*B, T)``; 0 at padded steps."""
    path = _walk_back(arranged.chain, Step.best, lambda logs: logs.argmax(-1), torch.Size())
    return arranged.restored(path)


def sample_states(arranged: Arranged, num_samples: int) -> Tensor:
    """Samples of paths of the last W states, ``(num_samples, *B, T)``; 0 at padded steps."""
    paths = _walk_back(arranged.chain, Step.sums, drawn, torch.Size([num_samples]))
    return arranged.restored(paths, 1)


def _walk_back(
    chain: Chains, over: Over, choose: Callable[[Tensor], Tensor], samples: torch.Size
) -> Tensor:
    """Paths ``(*S, N, T)`` of the last W states; 0 at padded steps.

    Args:
        chain: The arguments.
        over: Sums or maxima over transitions.
        choose: A column for each row of log-probabilities.
        samples: ``(*S)``, how many paths.
    """
    found, step_to = forward(chain, over=over), steps_of(chain)
    ends = choose(last(chain, found).expand(*samples, -1, -1))
    shape = (*samples, *chain.likelihood.shape[:2])
    path = torch.zeros(shape, dtype=torch.long, device=ends.device)
    states = ends[..., :0]
    for t in range(len(chain.counts) - 1, -1, -1):
        if count := states.size(-1):
            rows, step = torch.arange(count, device=states.device), step_to(t + 1)
            scores = step.fibres(found[t][:count])
            fibre, here = states // step.size, states % step.size
            states = choose(scores[rows, fibre] + step.into(here, fibre)) * scores.size(1) + fibre
        states = torch.cat([states, ends[..., states.size(-1) : chain.counts[t]]], -1)
        path[..., : states.size(-1), t] = states % chain.likelihood.size(-1)
    return path


def drawn(logs: Tensor) -> Tensor:
    """A column of each row of log-probabilities ``(*n, S)``, up to a constant, ``(*n)``."""
    probs = (logs - finite_or_zero(logs.amax(-1, keepdim=True))).exp()
    sums = probs.cumsum(-1)
    uniform = torch.rand_like(sums[..., :1]) * (1 - 1e-9)
    place = torch.searchsorted(sums, sums[..., -1:] * uniform, right=True)
    return place.squeeze(-1).clamp(max=logs.size(-1) - 1)


def recursions(arrange: Callable[..., Arranged]) -> tuple[Callable[..., Tensor], ...]:
    """Evidence, filtered states, best path and samples of what ``arrange`` makes of arguments."""

    def evidence(*arguments: Any) -> Tensor:
        r"""Log evidence :math:`\log p(x_{1:T})` in nats, ``(*B)``; differentiable."""
        return log_evidence(arrange(*arguments))

    @recomputing
    def filtered_states(*arguments: Any) -> Tensor:
        r"""Filtered log-probabilities :math:`\log p(z_t \mid x_{1:t})`, ``(*B, T, K)``.

        They are -inf at padded steps, and from the step at which observations become impossible.
        """
        return filtered(arrange(*arguments))

    @torch.no_grad()
    def best_path(*arguments: Any) -> Tensor:
        """Most probable path, ``(*B, T)`` integers; 0 at padded steps."""
        return viterbi(arrange(*arguments))

    @torch.no_grad()
    def samples(*arguments: Any, num_samples: int = 1) -> Tensor:
        r"""Samples of paths from :math:`p(z_{1:T} \mid x_{1:T})`, ``(num_samples, *B, T)``."""
        return sample_states(arrange(*arguments), num_samples)

    return evidence, filtered_states, best_path, samples
