r"""Log evidence of chains in which a symbol says to which block of states the state belongs.

Between two symbols only the transitions from the one's block to the other's matter: within blocks
it is a Markov chain of w states, the places in a block, with a matrix for each step. The
probabilities of transitions are computed once for each pair of blocks that occurs in the data. They
are products, :math:`p(j | i) = p(b | i) \, p(j | i, b)` for state j in block b, whose second factor
is a softmax of scores within the block (any chain can be written like that); where states are in
several blocks, they are given as they are.

By torch messages are logarithms, the matrices of all steps are gathered at once, and nothing is
read by the host.

On a CPU compiled loops scale messages: float64, and of sum one at each step. Transition
probabilities have the dtype of the model. This is exact within rounding: logarithms of
probabilities that are not zero are raised to ``LOW`` at least, so that products of them stay in the
range of float64. If a *likelihood* or a first state was raised, or a message fell below ``LEAST``,
the sequence is computed in logarithms. Raised *transitions* are more frequent, as
softmaxes in float32 are cut early. They only add paths; the share of the evidence that is of paths
with such a transition is at most the expected number of them, which the backward pass bounds. Where
that is more than rounding, the sequence is computed in logarithms, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..._precision import recomputed, with_gradient
from ..backends import NUMBA, compiled, pick
from ..log_space import finite_or_zero, logsumexp, step_mask
from ..products import take_rows
from ..tensor_cache import cached, cached_on
from .states import States, bounds
from .transitions import Transitions

LOW = {torch.float32: -75.0, torch.float64: -150.0}
LEAST = 1e-100
GATHERED = 1 << 27  # numbers of the matrices of some sequences that exist at one time


def log_evidence(
    transitions: Transitions, blocks: Tensor, lengths: Tensor, log_first: Tensor, log_seen: Tensor
) -> Tensor:
    r"""Log evidence :math:`\log p(x_{1:T})` in nats, ``(N,)``, differentiable.

    Args:
        transitions: Between the states of blocks.
        blocks: ``(N, T)``, block of each step, on the CPU. Padding may hold anything.
        lengths: ``(N,)``, number of steps that exist, on the CPU.
        log_first: ``(N, w)``, log-probability of the first state, in the first block.
        log_seen: ``(N, T, w)``, log p(x_t | z_t) in the states of the block; -inf beyond them.
    """
    if pick(log_seen.device) is not NUMBA:
        return _by_torch(transitions, blocks, lengths, log_first, log_seen)
    scores: Any = transitions.scores
    passes: list[Passes] = []

    def solved(first: Tensor, seen: Tensor, *_: Tensor) -> tuple[Tensor, Callable[..., Any]]:
        passes.append(Passes.of(transitions, blocks, lengths, first, seen))
        found, moving = passes[0], any(x is not None and x.requires_grad for x in scores)

        def gradient(weights: Tensor) -> tuple[Tensor | None, ...]:
            gamma, message, _ = found.backward(weights[found.plan.order])
            by_scores = found.score_gradients(message) if moving else (None,) * len(scores)
            by_seen = torch.zeros_like(seen)
            by_seen.flatten(0, 1)[found.plan.where] = gamma.to(seen.dtype)
            return by_seen[:, 0], by_seen, *by_scores

        return found.evidence.masked_fill(~found.sound, 0.0).to(seen.dtype), gradient

    def twin(first: Tensor, seen: Tensor, *scores: Any) -> Tensor:
        exact = _by_torch(Transitions(transitions.states, *scores), blocks, lengths, first, seen)
        return exact.masked_fill(~passes[0].sound, 0.0) if passes else exact

    value = with_gradient(solved, twin, log_first, log_seen, *scores)
    if not passes or bool(passes[0].sound.all()):
        return value
    rows = (~passes[0].sound).nonzero().squeeze(-1)
    parts = blocks[rows], lengths[rows], log_first[rows], log_seen[rows]
    return value.index_add(0, rows, _by_torch(transitions, *parts))


@torch.no_grad()
def final_state(transitions: Transitions, *chain: Tensor) -> Tensor | None:
    r"""Log :math:`p(z_T \mid x_{1:T})` in the last blocks ``(N, w)``, if compiled loops are exact.

    ``chain`` is as for :func:`log_evidence`.
    """
    if pick(chain[-1].device) is NUMBA:
        passes = Passes.of(transitions, *chain)
        plan = passes.plan
        if bool(passes.sound.all()) and not bool(passes.raised.any()):
            last = plan.begins[plan.lengths - 1] + torch.arange(len(plan.lengths))
            return passes.alpha[last[plan.order.argsort()]].log().to(chain[-1].dtype)
    return None


# By torch ----------------------------------------------------------------------------------------


def gathered(transitions: Transitions, blocks: Tensor, lengths: Tensor) -> Tensor:
    """Log transition probabilities ``(N, T-1, w, w)`` between the blocks of steps ``(N, T)``.

    Those of each pair of blocks that occurs are computed once.
    """
    width, device = transitions.states.width, transitions.scores[0].device
    shape = len(blocks), blocks.size(1) - 1, width, width
    if not math.prod(shape):
        return transitions.scores[0].new_zeros(shape)
    steps = lengths.numpy().tobytes()
    source, target, index = cached(
        blocks, lambda: pairs_of(blocks, lengths, transitions.all), steps
    )
    matrices = transitions.between(source, target)
    return take_rows(matrices.flatten(1), cached_on(device, index)).view(shape)


def pairs_of(blocks: Tensor, lengths: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The distinct pairs of blocks that follow each other, ``(P,)``; which each step ends."""
    keys = blocks[:, :-1] * count + blocks[:, 1:]
    real = step_mask(lengths, blocks.size(1))[:, 1:]
    keys, index = keys.masked_fill(~real, 0).unique(return_inverse=True)
    return keys // count, keys % count, index


def parts_of(blocks: Tensor, width: int) -> list[Tensor]:
    """Sequences ``(n,)`` whose matrices may exist at one time."""
    count, steps = blocks.shape
    return list(torch.arange(count).split(max(1, GATHERED // max(1, steps * width**2))))


def _by_torch(
    transitions: Transitions, blocks: Tensor, lengths: Tensor, log_first: Tensor, log_seen: Tensor
) -> Tensor:
    """:func:`log_evidence` by torch; of many sequences some at a time, for the gradient as well."""

    def evidence(
        first: Tensor, seen: Tensor, blocks: Tensor, lengths: Tensor, *scores: Any
    ) -> Tensor:
        matrices = gathered(Transitions(transitions.states, *scores), blocks, lengths)
        lasts = step_mask(lengths, blocks.size(1), seen.device)
        return with_gradient(_in_logs, _evidence_in_logs, first, matrices.to(seen), seen, lasts)

    parts = parts_of(blocks, transitions.states.width)
    if len(parts) == 1:
        return evidence(log_first, log_seen, blocks, lengths, *transitions.scores)
    found = [
        recomputed(
            evidence, log_first[rows], log_seen[rows], blocks[rows], lengths[rows],
            *transitions.scores,
        )
        for rows in parts
    ]  # fmt: skip
    return torch.cat(found)


def _messages(
    first: Tensor, matrices: Tensor, seen: Tensor, real: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Evidence ``(N,)`` in float64; log p(x_{1:t}, z_t) less the largest, ``(N, w)`` a step."""
    message, total, messages = first + seen[:, 0], torch.zeros_like(first[:, 0]).double(), []
    for t in range(seen.size(1)):
        if t:
            arrived = logsumexp(message.unsqueeze(-1) + matrices[:, t - 1], -2) + seen[:, t]
            message = torch.where(real[:, t, None], arrived, message)
        peak = finite_or_zero(message.detach().amax(-1))
        message, total = message - peak.unsqueeze(-1), total + peak
        messages.append(message)
    return total + logsumexp(message, -1), messages


def _evidence_in_logs(first: Tensor, matrices: Tensor, seen: Tensor, real: Tensor) -> Tensor:
    return _messages(first, matrices, seen, real)[0].to(seen.dtype)


def _in_logs(
    first: Tensor, matrices: Tensor, seen: Tensor, real: Tensor
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor | None, ...]]]:
    """Log evidence ``(N,)`` of a chain with a matrix for each step; and its gradient."""
    evidence, messages = _messages(first, matrices, seen, real)

    def gradient(weights: Tensor) -> tuple[Tensor | None, ...]:
        beta = torch.zeros_like(first)
        betas = [beta]
        for t in range(seen.size(1) - 1, 0, -1):
            arrived = logsumexp(matrices[:, t - 1] + (seen[:, t] + beta).unsqueeze(-2), -1)
            arrived = arrived - finite_or_zero(arrived.amax(-1, keepdim=True))
            beta = torch.where(real[:, t, None], arrived, beta)
            betas.append(beta)
        alpha, after = torch.stack(messages, 1), torch.stack(betas[::-1], 1)
        weights = weights.masked_fill(evidence.isneginf(), 0.0).unsqueeze(-1)

        def shares(logs: Tensor, real: Tensor) -> Tensor:
            zero = ~real | evidence.isneginf().unsqueeze(-1)
            return logs.softmax(-1).masked_fill_(zero.unsqueeze(-1), 0.0) * weights.unsqueeze(-1)

        states = shares(alpha + after, real)
        pairs = alpha[:, :-1].unsqueeze(-1) + matrices + (seen + after)[:, 1:].unsqueeze(-2)
        return states[:, 0], shares(pairs.flatten(2), real[:, 1:]).view_as(matrices), states, None

    return evidence.to(seen.dtype), gradient


# Where steps are missing -------------------------------------------------------------------------


def messages_of_all(
    transitions: Transitions, blocks: Tensor, lengths: Tensor, log_first: Tensor, seen: Any
) -> Iterator[tuple[Tensor, Tensor]]:
    """Log p(x_{1:t}, z_t) less the largest, ``(N, K + 1)``, of each step; and what was subtracted.

    The state of a step whose block is B, the number of blocks, may be any. From one observed step
    to the next there are the transitions of pairs of blocks; from, to and between missing ones sums
    over all states.

    Args:
        transitions: Between the states of blocks.
        blocks: ``(N, T)``.
        lengths: ``(N,)``.
        log_first: ``(N, K + 1)``.
        seen: Log-likelihoods ``(N, K + 1)`` of a step ``t``.
    """
    message, total = log_first + seen(0), log_first.new_zeros(len(blocks)).double()
    clock = lengths.to(log_first.device).unsqueeze(-1)
    for t in range(blocks.size(1)):
        if t:
            here, there = blocks[:, t - 1], blocks[:, t]
            arrived = transitions.sums(message, here, there).to(message.dtype) + seen(t)
            message = torch.where(t < clock, arrived, message)
        peak = finite_or_zero(message.detach().amax(-1))
        message, total = message - peak.unsqueeze(-1), total + peak
        yield message, total


# By compiled loops -------------------------------------------------------------------------------


class Plan(NamedTuple):
    """Which blocks follow each other in a batch, and where everything is kept.

    Sequences are in the order of their lengths, longest first; a token is one step of one of them,
    numbered step by step. Pairs of blocks that occur next to each other are sorted by their first
    block. Their transition probabilities are in one array: a row for each state of a source block,
    ``stride`` numbers long, with the states of all its targets one after the other.

    Attributes:
        order: ``(N,)``, which sequence is at each place.
        lengths: ``(N,)`` of the sequences in that order.
        begins: ``(T,)``, the first token of each step.
        where: ``(M,)``, each token's place among ``N * T`` steps.
        rank: ``(M,)``, which of the sequences, in that order, each token belongs to.
        before: ``(M,)``, the token before; itself at the first step.
        block: ``(M,)``, block of each token.
        pair: ``(M,)``, the pair of which a token is the second; 0 at the first step.
        source, target: ``(P,)``, blocks of each pair.
        base, stride: ``(P,)``, where its probabilities begin, and how far apart its rows are.
        pairs_of: ``(U + 1,)``, where the pairs of each source begin.
        columns: The states of the targets of all sources, one after the other.
        columns_of: ``(U + 1,)``, where those of each source begin.
        tokens, tokens_of: The tokens of all pairs, one after the other, and where each begins.
        size: Length of the array of probabilities.
    """

    order: Tensor
    lengths: Tensor
    begins: Tensor
    where: Tensor
    rank: Tensor
    before: Tensor
    block: Tensor
    pair: Tensor
    source: Tensor
    target: Tensor
    base: Tensor
    stride: Tensor
    pairs_of: Tensor
    columns: Tensor
    columns_of: Tensor
    tokens: Tensor
    tokens_of: Tensor
    size: int


def make_plan(blocks: Tensor, lengths: Tensor, states: States) -> Plan:
    """Plan for sequences of blocks ``(N, T)``, of ``lengths`` ``(N,)``."""
    steps = blocks.size(1)
    order = lengths.argsort(descending=True, stable=True)
    lengths = lengths[order]
    clock = torch.arange(int(lengths[0])).unsqueeze(-1)
    real = step_mask(lengths, len(clock)).T  # (T, N)
    place = (order * steps + clock)[real]
    counts = real.sum(-1)
    begins = bounds(counts)[:-1]
    block = blocks.reshape(-1)[place]
    step, rank = real.nonzero().unbind(-1)
    before = torch.where(step > 0, begins[(step - 1).clamp(min=0)] + rank, rank)
    later = int(counts[0])  # the first token that has one before
    many = len(states.sizes)
    keys = block[before[later:]] * many + block[later:]
    keys, pairs, uses = keys.unique(return_inverse=True, return_counts=True)
    source, target = keys // many, keys % many  # pairs of one source stand together
    first, unit, in_source = source.unique_consecutive(return_inverse=True, return_counts=True)
    pairs_of = bounds(in_source)
    widths = states.sizes[target]
    column = bounds(widths)
    columns_of = column[pairs_of]
    stride = columns_of.diff()  # (U,)
    area = bounds(stride * states.sizes[first])
    base = area[unit] + column[:-1] - columns_of[unit]
    columns = states.starts[target].repeat_interleave(widths)
    columns += torch.arange(len(columns)) - column[:-1].repeat_interleave(widths)
    return Plan(
        order, lengths, begins, place, rank, before, block, pad(pairs, (later, 0)), source, target,
        base, stride[unit], pairs_of, states.members[columns], columns_of,
        pairs.argsort(stable=True) + later, bounds(uses), int(area[-1]),
    )  # fmt: skip


class Passes:
    """Forward and backward passes by compiled loops.

    Attributes:
        evidence: ``(N,)`` float64, log.
        sound: ``(N,)``, whether it is exact.
        raised: ``(P,)``, whether a transition of a pair was raised.
        alpha: ``(M, w)``, filtered probabilities of each token.
        probs: Transition probabilities of the pairs, within the blocks.
    """

    def __init__(
        self, kernels: ModuleType, plan: Plan, transitions: Transitions, first: Tensor, seen: Tensor
    ) -> None:
        self.kernels, self.plan, self.states = kernels, plan, transitions.states
        self.scores, count = transitions.scores, len(plan.lengths)
        self.dtype, log_block_probs = seen.dtype, self.scores[2]
        first, seen = first[plan.order], seen.flatten(0, 1).index_select(0, plan.where)
        self.raised = torch.zeros(len(plan.source), dtype=torch.bool)
        self.block_probs = torch.empty(0, 0, dtype=torch.float64)
        if log_block_probs is not None:  # (B, K)
            block_probs, raised = _raised(log_block_probs.mT)
            self.block_probs = block_probs.contiguous()
            self.raised |= bool(raised.any())
        peak = finite_or_zero(seen.amax(-1))
        self.seen, cut = _raised(seen - peak.unsqueeze(-1))
        first, cut_first = _raised(first)
        sound = ~cut_first.any(-1)
        sound[plan.rank[cut.any(-1)]] = False
        self.alpha, self.norm = torch.zeros_like(self.seen), torch.ones(len(peak)).double()
        evidence = torch.zeros(count, dtype=torch.float64)
        evidence.index_add_(0, plan.rank, peak.double())
        self.probs: Tensor | None = self.probs_of_pairs()
        self._sound = sound
        self._run(
            kernels.forward, self.probs, self.block_probs, first, self.seen, LEAST, self.alpha,
            self.norm, evidence, sound,
        )  # fmt: skip
        if bool(self.raised.any()):
            uses = self.backward(torch.ones(count).double())[2] * math.exp(LOW[self.dtype])
            sound &= uses < torch.finfo(self.dtype).eps
        places = plan.order.argsort()
        self.evidence, self.sound = evidence[places], sound[places]

    @classmethod
    def of(
        cls, transitions: Transitions, blocks: Tensor, lengths: Tensor, first: Tensor, seen: Tensor
    ) -> Passes:
        """The forward pass: see :func:`log_evidence`."""
        states, steps = transitions.states, lengths.numpy().tobytes()
        plan = cached(blocks, lambda: make_plan(blocks, lengths, states), states, steps)
        return cls(compiled("blocks._numba"), plan, transitions, first, seen)

    def _run(self, loop: Any, *arguments: Any) -> None:
        """Run a loop over sequences."""
        plan, states = self.plan, self.states
        mean = plan.size // max(len(plan.source), 1)
        self.kernels.run(
            loop, len(plan.lengths), mean * len(plan.begins), _mixed(len(plan.lengths)),
            plan.lengths, plan.begins, plan.block, states.sizes, states.starts, plan.pair,
            plan.base, plan.stride, *arguments,
        )  # fmt: skip

    def probs_of_pairs(self) -> Tensor:
        """Transition probabilities of the pairs, within the blocks."""
        kernels, plan, probs = self.kernels, self.plan, self._scores_of_pairs()
        of_matrix = self.scores[1] is None
        loop = kernels.exp_of_pairs if of_matrix else kernels.softmax_of_pairs
        count = len(plan.source) if of_matrix else len(plan.pairs_of) - 1
        kernels.run(
            loop, count, 10 * plan.size // max(count, 1), _mixed(count),
            *(() if of_matrix else (plan.pairs_of,)), plan.source, plan.target,
            self.states.sizes, plan.base, plan.stride, LOW[probs.dtype], probs, self.raised,
        )  # fmt: skip
        return probs

    def _sources(self, values: Tensor) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """For each source block its rows, columns, target blocks and ``values``."""
        plan, starts, begin = self.plan, self.states.starts.tolist(), 0
        columns = plan.columns.split(plan.columns_of.diff().tolist())
        targets = plan.target.split(plan.pairs_of.diff().tolist())
        for block, column, target in zip(
            plan.source[plan.pairs_of[:-1]].tolist(), columns, targets
        ):
            rows = slice(starts[block], starts[block + 1])
            end = begin + len(column) * (rows.stop - rows.start)
            yield rows, column, target, values[begin:end].view(-1, len(column))
            begin = end

    def _scores_of_pairs(self) -> Tensor:
        """Scores of all pairs: inner products, or those of a matrix."""
        leave, enter, _ = self.scores
        out = leave.new_empty(self.plan.size, dtype=self.dtype)
        for rows, columns, _, part in self._sources(out):
            if enter is None:
                part.copy_(leave[self.states.members[rows].unsqueeze(-1), columns])
            elif leave.dtype == out.dtype:
                torch.mm(leave[rows], enter.index_select(0, columns).mT, out=part)
            else:
                part.copy_(leave[rows] @ enter.index_select(0, columns).mT)
        return out

    def backward(self, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Smoothed marginals and messages ``(M, w)``; expected uses of raised transitions."""
        if self.probs is None:  # a second time, through a graph that was retained
            self.probs = self.probs_of_pairs()
        gamma, message = torch.zeros_like(self.seen), torch.zeros_like(self.seen)
        uses = torch.zeros(len(weights), dtype=torch.float64)
        self._run(
            self.kernels.backward, self.probs, self.block_probs, self.raised, self.seen,
            self.alpha, self.norm, self._sound, weights.double().contiguous(), gamma, message, uses,
        )  # fmt: skip
        return gamma, message, uses

    def score_gradients(self, message: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients by the scores of the transitions; takes the probabilities."""
        plan, states, probs, self.probs = self.plan, self.states, self.probs, None
        assert probs is not None
        pairs, by_block = len(plan.source), torch.zeros_like(self.block_probs)
        schedule = plan.tokens_of.diff().argsort(descending=True, stable=True)[_mixed(pairs)]
        work = plan.size // max(pairs, 1) * (2 + len(plan.tokens) // max(pairs, 1))
        self.kernels.run(
            self.kernels.gradients_of_pairs, pairs, work, schedule, plan.tokens_of, plan.tokens,
            plan.before, plan.block, states.sizes, states.starts, plan.base, plan.stride,
            torch.finfo(probs.dtype).tiny, self.alpha, message, self.block_probs, probs, by_block,
        )  # fmt: skip
        leave, enter, _ = self.scores
        to_leave, starts = torch.zeros_like(leave), states.starts.tolist()
        if enter is None:
            for rows, columns, _, part in self._sources(probs):
                place = states.members[rows].unsqueeze(-1), columns
                to_leave.index_put_(place, part, accumulate=True)
            return to_leave, None, None
        to_enter = torch.zeros_like(enter, dtype=probs.dtype)
        for rows, columns, targets, part in self._sources(probs):
            part = part.to(leave.dtype)
            torch.mm(part, enter.index_select(0, columns), out=to_leave[rows])
            entered = (part.mT @ leave[rows]).to(probs.dtype).split(states.sizes[targets].tolist())
            for block, gradient in zip(targets.tolist(), entered):
                to_enter[starts[block] : starts[block + 1]] += gradient
        shares = by_block.mul_(self.block_probs).mT
        return to_leave, to_enter.to(enter.dtype), shares.to(probs.dtype)


def _mixed(count: int) -> Tensor:
    """The numbers below ``count``, such that equal parts of them hold large and small alike."""
    threads = max(1, min(torch.get_num_threads(), count))
    return torch.cat([torch.arange(part, count, threads) for part in range(threads)])


def _raised(logs: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities in float64, none but zeros below the least; and where one was."""
    low = LOW[torch.float64]
    below = logs < low
    probs = logs.clamp(min=low).double().exp_()
    zero = logs.isneginf()
    return probs.masked_fill_(zero, 0.0), below & ~zero
