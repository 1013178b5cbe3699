r"""Log evidence of chains in which a symbol says to which block of states the state belongs.

Between two symbols only the transitions from the one's block to the other's matter: within blocks
it is a Markov chain of w states, the places in a block, with a matrix for each step. The
probabilities of transitions are computed once for each pair of blocks that occurs in the data. They
are products, :math:`p(j | i) = p(b | i) \, p(j | i, b)` for state j in block b, whose second factor
is a softmax of scores within the block; any chain can be written like that.

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
from .states import Blocks, offsets
from .transitions import Transitions, at_once

LOW = {torch.float32: -75.0, torch.float64: -150.0}
LEAST = 1e-100


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
    if len(lengths) > 1 and blocks.numel() > 2 * int(lengths.sum()):  # mostly padding
        key = lengths.numpy().tobytes(), b"by length"
        pieces = cached(blocks, lambda: _by_length(blocks, lengths), *key)
        found = [
            log_evidence(transitions, part, each, log_first[rows], log_seen[rows, : part.size(1)])
            for rows, part, each in pieces
        ]
        return torch.cat(found)[torch.cat([rows for rows, _, _ in pieces]).argsort()]
    scores: Any = transitions.scores
    passes: list[Passes] = []

    def solved(first: Tensor, seen: Tensor, *_: Tensor) -> tuple[Tensor, Callable[..., Any]]:
        passes.append(Passes.of(transitions, blocks, lengths, first, seen))
        found, moving = passes[0], any(x is not None and x.requires_grad for x in scores)

        def gradient(weights: Tensor) -> tuple[Tensor | None, ...]:
            gamma, message, _ = found.backward(weights)
            by_scores = found.score_gradients(message) if moving else (None,) * len(scores)
            gamma = gamma.to(seen.dtype)
            return gamma[:, 0], gamma, *by_scores

        return found.evidence.masked_fill(~found.exact, 0.0).to(seen.dtype), gradient

    def twin(first: Tensor, seen: Tensor, *scores: Any) -> Tensor:
        found = _by_torch(Transitions(transitions.blocks, *scores), blocks, lengths, first, seen)
        return found.masked_fill(~passes[0].exact, 0.0) if passes else found

    value = with_gradient(solved, twin, log_first, log_seen, *scores)
    if not passes or bool(passes[0].exact.all()):
        return value
    rows = (~passes[0].exact).nonzero().squeeze(-1)
    parts = blocks[rows], lengths[rows], log_first[rows], log_seen[rows]
    return value.index_add(0, rows, _by_torch(transitions, *parts))


def _by_length(blocks: Tensor, lengths: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Split sequences at half the largest length: indices, blocks and lengths of each group."""
    long = 2 * lengths > lengths.max()
    rows = [mask.nonzero().squeeze(-1) for mask in (long, ~long) if bool(mask.any())]
    return [(part, blocks[part, : int(lengths[part].max())], lengths[part]) for part in rows]


@torch.no_grad()
def final_state(transitions: Transitions, *chain: Tensor) -> Tensor | None:
    r"""Log :math:`p(z_T \mid x_{1:T})` in the last blocks ``(N, w)``, if compiled loops are exact.

    ``chain`` is as for :func:`log_evidence`.
    """
    if pick(chain[-1].device) is NUMBA:
        passes = Passes.of(transitions, *chain)
        if bool(passes.exact.all()) and not bool(passes.raised.any()):
            last = passes.alpha[torch.arange(len(chain[1])), chain[1] - 1]
            return last.log().to(chain[-1].dtype)
    return None


# By torch ----------------------------------------------------------------------------------------


def gathered(transitions: Transitions, blocks: Tensor, lengths: Tensor) -> Tensor:
    """Log transition probabilities ``(N, T-1, w, w)`` between the blocks of steps ``(N, T)``.

    Those of each pair of blocks that occurs are computed once.
    """
    width, device = transitions.blocks.width, transitions.scores[0].device
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
    """Distinct pairs (from, to) of successive blocks, ``(P,)`` each; the pair of each move."""
    keys = blocks[:, :-1] * count + blocks[:, 1:]
    real = step_mask(lengths, blocks.size(1))[:, 1:]
    keys, index = keys.masked_fill(~real, 0).unique(return_inverse=True)
    return keys // count, keys % count, index


def chunks_of(transitions: Transitions, blocks: Tensor) -> tuple[Tensor, ...]:
    """Split sequences into chunks, indices ``(n,)``, whose transition matrices fit into memory."""
    numbers = blocks.size(1) * transitions.blocks.width**2
    limit = at_once(transitions.scores[0].device)
    return torch.arange(len(blocks)).split(max(1, limit // max(1, numbers)))


def _by_torch(
    transitions: Transitions, blocks: Tensor, lengths: Tensor, log_first: Tensor, log_seen: Tensor
) -> Tensor:
    """Log evidence by torch, in chunks of sequences that fit into memory."""

    def evidence(
        first: Tensor, seen: Tensor, blocks: Tensor, lengths: Tensor, *scores: Any
    ) -> Tensor:
        matrices = gathered(Transitions(transitions.blocks, *scores), blocks, lengths)
        lasts = step_mask(lengths, blocks.size(1), seen.device)
        parts = first, matrices.to(seen), seen, lasts
        return with_gradient(_in_logs, lambda *x: _messages(*x)[0].to(seen.dtype), *parts)

    parts = chunks_of(transitions, blocks)
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
    """Log evidence ``(N,)`` in float64, and peak-normalised log messages ``(N, w)`` per step."""
    message, total, messages = first + seen[:, 0], torch.zeros_like(first[:, 0]).double(), []
    for t in range(seen.size(1)):
        if t:
            arrived = logsumexp(message.unsqueeze(-1) + matrices[:, t - 1], -2) + seen[:, t]
            message = torch.where(real[:, t, None], arrived, message)
        peak = finite_or_zero(message.detach().amax(-1))
        message, total = message - peak.unsqueeze(-1), total + peak
        messages.append(message)
    return total + logsumexp(message, -1), messages


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


# By compiled loops -------------------------------------------------------------------------------


class Plan(NamedTuple):
    """Pairs of successive blocks in a batch, and the memory of their transition probabilities.

    Pairs of blocks that occur next to each other are sorted by their first block. Their transition
    probabilities are in one array: a row for each state of a source block, ``stride`` numbers long,
    with the states of all its targets one after the other.

    Attributes:
        block: ``(N, T)``, block of each step.
        pair: ``(N, T)``, the pair of which a step is the second; 0 at the first.
        source, target: ``(P,)``, blocks of each pair.
        base, stride: ``(P,)``, where its probabilities begin, and how far apart its rows are.
        pairs_of: ``(U + 1,)``, where the pairs of each source begin.
        columns: The states of the targets of all sources, one after the other.
        columns_of: ``(U + 1,)``, where those of each source begin.
        steps: The steps of all pairs, among ``N * T``.
        steps_of: Where those of each pair begin.
        size: Length of the array of probabilities.
    """

    block: Tensor
    pair: Tensor
    source: Tensor
    target: Tensor
    base: Tensor
    stride: Tensor
    pairs_of: Tensor
    columns: Tensor
    columns_of: Tensor
    steps: Tensor
    steps_of: Tensor
    size: int


def make_plan(steps: Tensor, lengths: Tensor, blocks: Blocks) -> Plan:
    """Plan for sequences whose steps are in blocks ``(N, T)``, of ``lengths`` ``(N,)``."""
    source, target, pair = pairs_of(steps, lengths, blocks.num_blocks)
    first, unit, in_source = source.unique_consecutive(return_inverse=True, return_counts=True)
    of_source, widths = offsets(in_source), blocks.sizes[target]
    column = offsets(widths)
    columns_of = column[of_source]
    stride = columns_of.diff()  # (U,)
    area = offsets(stride * blocks.sizes[first])
    base = area[unit] + column[:-1] - columns_of[unit]
    columns = (blocks.starts[target] - column[:-1]).repeat_interleave(widths)
    columns += torch.arange(len(columns))
    later = pad(step_mask(lengths, steps.size(1))[:, 1:], (1, 0))  # steps that have one before
    pair = pad(pair, (1, 0))
    own = pair[later]
    places = later.flatten().nonzero().squeeze(-1)[own.argsort(stable=True)]
    return Plan(
        steps.contiguous(), pair, source, target, base, stride[unit], of_source, columns,
        columns_of, places, offsets(own.bincount(minlength=len(source))), int(area[-1]),
    )  # fmt: skip


class Passes:
    """Forward and backward passes by compiled loops.

    Attributes:
        evidence: ``(N,)`` float64, log.
        exact: ``(N,)``, cleared where numbers left their range.
        raised: ``(P,)``, whether a transition of a pair was raised.
        alpha: ``(N, T, w)``, filtered probabilities.
        probs: Transition probabilities of the pairs, within the blocks.
    """

    def __init__(
        self, kernels: ModuleType, plan: Plan, transitions: Transitions, lengths: Tensor,
        first: Tensor, seen: Tensor,
    ) -> None:  # fmt: skip
        self.kernels, self.plan, self.blocks = kernels, plan, transitions.blocks
        self.scores, self.lengths, self.dtype = transitions.scores, lengths, seen.dtype
        log_block_probs = self.scores[2]
        self.raised = torch.zeros(len(plan.source), dtype=torch.bool)
        self.block_probs = torch.empty(0, 0, dtype=torch.float64)
        if log_block_probs is not None:  # (B, K)
            block_probs, raised = _raised(log_block_probs.mT)
            self.block_probs = block_probs.contiguous()
            self.raised |= bool(raised.any())
        real = step_mask(lengths, seen.size(1))
        peak = finite_or_zero(seen.amax(-1))
        self.seen, cut = _raised(seen - peak.unsqueeze(-1))
        first, cut_first = _raised(first)
        self.exact = ~(cut_first.any(-1) | (cut.any(-1) & real).any(-1))
        self.alpha, self.norm = torch.zeros_like(self.seen), torch.ones_like(peak).double()
        self.evidence = peak.double().masked_fill(~real, 0.0).sum(-1)
        self.probs: Tensor | None = self.probs_of_pairs()
        self._run(
            kernels.forward, self.probs, self.block_probs, first, self.seen, LEAST, self.alpha,
            self.norm, self.evidence, self.exact,
        )  # fmt: skip
        if bool(self.raised.any()):
            uses = self.backward(torch.ones_like(self.evidence))[2] * math.exp(LOW[self.dtype])
            self.exact &= uses < torch.finfo(self.dtype).eps

    @classmethod
    def of(
        cls, transitions: Transitions, steps: Tensor, lengths: Tensor, first: Tensor, seen: Tensor
    ) -> Passes:
        """Plan the block pairs and run the compiled forward pass."""
        blocks, known = transitions.blocks, lengths.numpy().tobytes()
        plan = cached(steps, lambda: make_plan(steps, lengths, blocks), blocks, known)
        return cls(compiled("blocks._numba"), plan, transitions, lengths, first, seen)

    def _run(self, loop: Any, *arguments: Any) -> None:
        """Run a loop over sequences, with long and short ones balanced over threads."""
        plan, blocks = self.plan, self.blocks
        mean = plan.size // max(len(plan.source), 1)
        order = self.lengths.argsort(descending=True)[_mixed(len(self.lengths))]
        self.kernels.run(
            loop, len(order), mean * plan.block.size(1), order, self.lengths, plan.block,
            blocks.sizes, blocks.starts, plan.pair, plan.base, plan.stride, *arguments,
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
            self.blocks.sizes, plan.base, plan.stride, LOW[probs.dtype], probs, self.raised,
        )  # fmt: skip
        return probs

    def _sources(self, values: Tensor) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """For each source block its rows, columns, target blocks and ``values``."""
        plan, starts, begin = self.plan, self.blocks.starts.tolist(), 0
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
                part.copy_(leave[rows].index_select(1, columns))
            elif leave.dtype == out.dtype:
                torch.mm(leave[rows], enter.index_select(0, columns).mT, out=part)
            else:
                part.copy_(leave[rows] @ enter.index_select(0, columns).mT)
        return out

    def backward(self, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Smoothed marginals and messages ``(N, T, w)``; expected uses of floored transitions."""
        if self.probs is None:  # a second time, through a graph that was retained
            self.probs = self.probs_of_pairs()
        gamma, message = torch.zeros_like(self.seen), torch.zeros_like(self.seen)
        uses = torch.zeros(len(weights), dtype=torch.float64)
        self._run(
            self.kernels.backward, self.probs, self.block_probs, self.raised, self.seen,
            self.alpha, self.norm, self.exact, weights.double().contiguous(), gamma, message, uses,
        )  # fmt: skip
        return gamma, message, uses

    def score_gradients(self, message: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients by the transition scores; overwrites the probabilities."""
        plan, blocks, probs, self.probs = self.plan, self.blocks, self.probs, None
        assert probs is not None
        pairs, by_block = len(plan.source), torch.zeros_like(self.block_probs)
        schedule = plan.steps_of.diff().argsort(descending=True, stable=True)[_mixed(pairs)]
        work = plan.size // max(pairs, 1) * (2 + len(plan.steps) // max(pairs, 1))
        self.kernels.run(
            self.kernels.gradients_of_pairs, pairs, work, schedule, plan.steps_of, plan.steps,
            plan.source, plan.target, blocks.sizes, blocks.starts, plan.base, plan.stride,
            torch.finfo(probs.dtype).tiny, self.alpha.flatten(0, 1), message.flatten(0, 1),
            self.block_probs, probs, by_block,
        )  # fmt: skip
        leave, enter, _ = self.scores
        to_leave, starts = torch.zeros_like(leave), blocks.starts.tolist()
        if enter is None:
            for rows, columns, _, part in self._sources(probs):
                to_leave[rows].index_add_(1, columns, part)
            return to_leave, None, None
        to_enter = torch.zeros_like(enter, dtype=probs.dtype)
        for rows, columns, targets, part in self._sources(probs):
            part = part.to(leave.dtype)
            torch.mm(part, enter.index_select(0, columns), out=to_leave[rows])
            entered = (part.mT @ leave[rows]).to(probs.dtype).split(blocks.sizes[targets].tolist())
            for block, gradient in zip(targets.tolist(), entered):
                to_enter[starts[block] : starts[block + 1]] += gradient
        shares = by_block.mul_(self.block_probs).mT
        return to_leave, to_enter.to(enter.dtype), shares.to(probs.dtype)


def _mixed(count: int) -> Tensor:
    """Interleaved order of ``count`` numbers, so that equal parts balance large and small."""
    threads = max(1, min(torch.get_num_threads(), count))
    return torch.cat([torch.arange(part, count, threads) for part in range(threads)])


def _raised(logs: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities in float64, positive ones floored; and the mask of floored ones."""
    low = LOW[torch.float64]
    below = logs < low
    probs = logs.clamp(min=low).double().exp_()
    zero = logs.isneginf()
    return probs.masked_fill_(zero, 0.0), below & ~zero
