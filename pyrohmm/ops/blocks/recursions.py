r"""Log evidence of chains in which a symbol says to which block of states the state belongs.

Between two symbols only the transitions from the one's block to the other's matter: within blocks
it is a Markov chain of w states, the places in a block, with a matrix for each step. The
probabilities of transitions are computed once for each pair of blocks that occurs in the data. They
are products, :math:`p(j | i) = p(b | i) \, p(j | i, b)` for state j in block b, whose second factor
is a softmax of scores within the block; any chain can be written like that.

Messages are scaled to sum to one at each step. That is exact within rounding where nothing that
became zero could matter. What is lost of a state at a step is at most w + 2 of the least numbers of
the dtype, over the norm of the step; its share in the evidence is that times the message of the way
back, which is relative to what follows given the past. Sequences in which all this may be more than
rounding are computed in logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..._choices import BLOCK
from ..._precision import recomputed, with_gradient
from ..._sync import exceeds
from ..._transforms import transforming
from ..log_space import finite_or_zero, logsumexp, step_mask
from ..tensor_cache import cached, cached_on
from .pairs import BlockPairs
from .states import offsets
from .transitions import Transitions, at_once

FEWEST = 8  # moves of a pair that are added by one product


def log_evidence(
    transitions: Transitions, blocks: Tensor, lengths: Tensor, log_first: Tensor, log_seen: Tensor
) -> Tensor:
    r"""Log evidence :math:`\log p(x_{1:T})` in nats, ``(N,)``, differentiable.

    Args:
        transitions: Between the states of blocks, within blocks or without.
        blocks: ``(N, T)``, block of each step, on the CPU. Padding may hold anything.
        lengths: ``(N,)``, number of steps that exist, on the CPU.
        log_first: ``(N, w)``, log-probability of the first state, in the first block.
        log_seen: ``(N, T, w)``, log p(x_t | z_t) in the states of the block; -inf beyond them.
            With transitions within blocks, and the log-probability of the block of the next step.
    """
    if transforming():
        return _by_logs(transitions, blocks, lengths, log_first, log_seen)
    moves, inexact = moves_of(transitions, blocks, lengths), list[Tensor]()
    scores = [part for part in transitions.scores if part is not None]
    moving = torch.is_grad_enabled() and any(part.requires_grad for part in scores)
    differentiable = moving or log_first.requires_grad or log_seen.requires_grad

    def solved(
        first: Tensor, seen: Tensor, *scores: Tensor
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor | None, ...]]]:
        probs, of_scores = transitions.of_pairs(moves.pairs)
        found = BlockMessages(moves, first, seen, probs.to(seen.dtype))
        if differentiable or not exceeds(found.least, found.bound):
            inexact.extend(found.back())

        def gradient(weights: Tensor) -> tuple[Tensor | None, ...]:
            by_first, by_seen, by_probs = found.gradient(weights)
            by_scores = of_scores(by_probs) if moving else [None] * len(scores)
            return by_first, by_seen, *by_scores

        return found.evidence.to(seen.dtype), gradient

    def twin(first: Tensor, seen: Tensor, *scores: Any) -> Tensor:
        parts = Transitions(transitions.blocks, *scores, *[None] * (3 - len(scores)))
        real = step_mask(lengths, seen.size(1), seen.device)
        value = _in_logs(first, parts.of_keys(moves.pairs).to(seen), seen, real)
        return value.masked_fill(inexact[0], 0.0) if inexact else value

    value = with_gradient(solved, twin, log_first, log_seen, *scores)
    if not inexact:
        return value
    rows = inexact[0].nonzero().squeeze(-1)
    some = rows.cpu()
    parts = blocks[some], lengths[some], log_first[rows], log_seen[rows]
    return value.index_add(0, rows, _by_logs(transitions, *parts))


@torch.no_grad()
def final_state(
    transitions: Transitions, blocks: Tensor, lengths: Tensor, log_first: Tensor, log_seen: Tensor
) -> Tensor | None:
    r"""Log :math:`p(z_T \mid x_{1:T})` in the last blocks ``(N, w)``, if messages are exact.

    Arguments are as for :func:`log_evidence`.
    """
    moves = moves_of(transitions, blocks, lengths)
    probs, _ = transitions.of_pairs(moves.pairs)
    found = BlockMessages(moves, log_first, log_seen, probs.to(log_seen.dtype))
    if exceeds(found.least, found.bound):
        return found.alpha.index_select(0, cached_on(probs.device, moves.last)).log()
    return None


class Moves(NamedTuple):
    """Steps of a batch without padding, and the transitions between them.

    The M steps are rows: the first steps of all sequences, then all second ones. At each time long
    sequences are before short ones, so that those that go on are the first of their time.

    Attributes:
        pairs: Of successive blocks, with an index ``(N, T - 1)``.
        order: ``(N,)``, the sequences, the longest first.
        rows: ``(M,)``, which of the ``N * T`` steps they are.
        sizes: How many sequences have a first step, a second one, and so on.
        pair: ``(M - N,)``, of the move to each row after the first N.
        after, before: ``(Z, S)``, rows to and from which moves are, all those of a line with the
            same pair; M and 0 as padding. For each group of pairs one line for each pair, and then
            further ones.
        of: ``(Z - P,)``, the places of the pairs of further lines in their groups.
        further: How many further lines each group has.
        last: ``(N,)``, the row of the last step of each sequence.
        leaving: ``(N, T)``, the key of the pair of a step and the next; -1 if there is none.
    """

    pairs: BlockPairs
    order: Tensor
    rows: Tensor
    sizes: list[int]
    pair: Tensor
    after: Tensor
    before: Tensor
    of: Tensor
    further: list[int]
    last: Tensor
    leaving: Tensor


def moves_of(transitions: Transitions, blocks: Tensor, lengths: Tensor) -> Moves:
    """:class:`Moves` of sequences whose steps are in ``blocks`` ``(N, T)``; made once a batch."""
    device, count = transitions.scores[0].device, transitions.all

    def made() -> Moves:
        order = lengths.argsort(descending=True, stable=True)
        time, place = step_mask(lengths[order], blocks.size(1)).mT.nonzero().unbind(-1)
        rows, sizes = order[place] * blocks.size(1) + time, time.bincount()
        start, later = offsets(sizes), time > 0
        pairs = pairs_of(blocks, lengths, count, device)
        pair = pad(pairs.index, (1, 0)).flatten()[rows[later]]
        before = start[time[later] - 1] + place[later]
        moves, of, further = _lines(pair, pairs.sizes)
        after = (moves + len(order)).clamp(max=len(rows))
        last = start[lengths - 1] + order.argsort()
        real = step_mask(lengths, blocks.size(1))[:, 1:]
        leaving = pad(pairs.keys[pairs.index].masked_fill(~real, -1), (0, 1), value=-1)
        return Moves(
            pairs, order, rows, sizes.tolist(), pair, after, pad(before, (0, 1))[moves], of,
            further, last, leaving,
        )  # fmt: skip

    return cached(blocks, made, lengths.numpy().tobytes(), f"{device} {count}".encode())


def pairs_of(blocks: Tensor, lengths: Tensor, count: int, device: torch.device) -> BlockPairs:
    """Distinct pairs of successive blocks of sequences ``(N, T)``."""
    keys = blocks[:, :-1] * count + blocks[:, 1:]
    real = step_mask(lengths, blocks.size(1))[:, 1:]
    some = pad(keys[real], (0, 1))[0]  # in place of what is no pair
    return BlockPairs(torch.where(real, keys, some), count, device)


def _lines(pair: Tensor, groups: list[int]) -> tuple[Tensor, Tensor, list[int]]:
    """Sort transitions by pair of blocks, in lines of equal size ``(Z, S)``; see :class:`Moves`."""
    sizes = torch.tensor(groups, dtype=torch.long)
    count, starts = sum(groups), offsets(sizes)
    number = pair.bincount(minlength=count)
    size = min(BLOCK, max(FEWEST, 2 * math.ceil(len(pair) / max(count, 1))))
    further = offsets((number - 1).clamp(min=0) // size)
    begin, end = (x.repeat_interleave(sizes) for x in (starts[:-1], starts[1:]))
    order = pair.argsort(stable=True)
    own = pair[order]
    rank = torch.arange(len(pair)) - offsets(number)[own]
    first, later = own + further[begin[own]], end[own] + further[own] + rank // size - 1
    moves = torch.full((count + int(further[-1]), size), len(pair))
    moves[torch.where(rank < size, first, later), rank % size] = order
    of = (torch.arange(count) - begin).repeat_interleave(further.diff())
    return moves, of, further[starts].diff().tolist()


class BlockMessages:
    """Scaled forward and backward messages.

    Args:
        moves: Of the batch.
        first: ``(N, w)``, log-probabilities of the first state.
        seen: ``(N, T, w)``, log-likelihoods.
        probs: ``(P, w, w)``, transition probabilities of the pairs.

    Attributes:
        alpha: ``(M, w)``, filtered probabilities.
        evidence: ``(N,)`` float64, log.
        least: The least joint probability of a state and its symbol given the past, but for those
            states that cannot emit it.
        bound: What this is above if no message lost anything.
    """

    def __init__(self, moves: Moves, first: Tensor, seen: Tensor, probs: Tensor) -> None:
        self.moves, self.probs, self.steps = moves, probs, seen.size(1)
        order, self.rows = self._here(moves.order), self._here(moves.rows)
        limits, (size, _, width) = torch.finfo(seen.dtype), seen.shape
        self.bound = 3 * len(moves.sizes) * (width + 2) * limits.tiny / limits.eps
        logs, logs_first = (
            seen.flatten(0, 1).index_select(0, self.rows),
            first.index_select(0, order),
        )
        peak, most = (finite_or_zero(x.amax(-1, keepdim=True)) for x in (logs, logs_first))
        self.weight, self.never = (logs - peak).exp_(), logs.isneginf()
        self.alpha, self.norm = torch.empty_like(logs), torch.empty_like(peak)
        self._most, sizes = max(1, at_once(probs.device) // width**2), moves.sizes
        self._some = probs.new_empty(min(size, self._most), width, width)
        self._pairs = self._here(moves.pair).split(sizes[1:])
        parts = (x.unsqueeze(1).split(sizes) for x in (self.alpha, self.weight, self.norm))
        before = torch.exp(logs_first - most, out=self.alpha[:size])
        for t, (alpha, weight, norm) in enumerate(zip(*parts)):
            if t > 0:
                self._step(t, before[: len(alpha)], alpha)
            torch.sum(alpha.mul_(weight), -1, keepdim=True, out=norm)
            before = alpha.div_(norm)
        self.least = (self.alpha * self.norm).masked_fill_(self.never, torch.inf).amin()
        total = self.norm.double().log().add_(peak).squeeze(-1)
        total[:size] += most.squeeze(-1)
        self.owner = self.rows.div(self.steps, rounding_mode="floor")
        self.evidence = total.new_zeros(size).index_add_(0, self.owner, total)

    def _here(self, indices: Tensor) -> Tensor:
        return cached_on(self.probs.device, indices)

    def _step(self, t: int, messages: Tensor, out: Tensor, back: bool = False) -> None:
        """Products of messages ``(n, 1, w)`` and the transitions into step t, some at a time."""
        parts = (x.split(self._most) for x in (self._pairs[t - 1], messages, out))
        for pair, message, product in zip(*parts):
            matrices = torch.index_select(self.probs, 0, pair, out=self._some[: len(pair)])
            torch.bmm(message, matrices if back else matrices.mT, out=product)

    def back(self) -> list[Tensor]:
        """Backward pass; a list of the mask ``(N,)`` of inexact sequences, or an empty one."""
        sizes, none = self.moves.sizes, self.alpha.new_zeros(1, self.alpha.size(1))
        self.beta = torch.ones_like(self.alpha)
        ratio = (self.weight / self.norm).unsqueeze(1).split(sizes)
        self.sent = torch.cat([self.weight, none])  # each message from a step to the one before
        sent, beta = (
            x.unsqueeze(1).split([*sizes, n]) for x, n in ((self.sent, 1), (self.beta, 0))
        )
        for t in range(len(sizes) - 1, 0, -1):
            torch.mul(ratio[t], beta[t], out=sent[t])
            self._step(t, sent[t], beta[t - 1][: sizes[t]], back=True)
        most = self.beta.masked_fill(self.never, 0.0).amax(-1, keepdim=True)
        mass, bound = self.norm / most, self.bound * self.alpha.size(1)
        if exceeds(mass.amin(), bound):
            return []
        wrong = (~(mass > bound)).squeeze(-1)
        unsure = self.evidence.new_zeros(sizes[0]).index_add_(0, self.owner, wrong.double()) > 0
        rows = unsure.index_select(0, self.owner).unsqueeze(-1)
        self.evidence.masked_fill_(unsure, 0.0)
        for part in (self.alpha, self.beta, self.sent[:-1]):
            part.masked_fill_(rows, 0.0)
        return [unsure]

    def gradient(self, weights: Tensor) -> tuple[Tensor, Tensor, Iterator[Tensor]]:
        """Gradients by the first two arguments, and by ``probs`` of each group of pairs."""
        size, width = self.moves.sizes[0], self.alpha.size(1)
        alpha = self.alpha * weights.to(self.alpha.dtype).index_select(0, self.owner).unsqueeze(-1)
        gamma = alpha * self.beta
        by_seen = gamma.new_zeros(size * self.steps, width).index_copy_(0, self.rows, gamma)
        by_first = torch.empty_like(gamma[:size])
        by_first.index_copy_(0, self._here(self.moves.order), gamma[:size])
        return by_first, by_seen.view(size, -1, width), self._by_probs(alpha)

    def _by_probs(self, alpha: Tensor) -> Iterator[Tensor]:
        """Gradients by transition probabilities ``(p, w, w)``, of one group of pairs at a time."""
        moves = self.moves
        sizes = [sum(each) for each in zip(moves.pairs.sizes, moves.further)]
        lines = [
            messages.index_select(0, rows.flatten()).view(*rows.shape, -1).split(sizes)
            for messages, rows in (
                (self.sent, self._here(moves.after)), (alpha, self._here(moves.before))
            )
        ]  # fmt: skip
        of = self._here(moves.of).split(moves.further)
        for there, here, more, count in zip(*lines, of, moves.pairs.sizes):
            found = [torch.bmm(there[:count].mT, here[:count])]
            if len(more):
                found[0].index_add_(0, more, torch.bmm(there[count:].mT, here[count:]))
            yield found.pop()  # and is not held here while the next is made


# In logarithms -----------------------------------------------------------------------------------


def gathered(transitions: Transitions, blocks: Tensor, lengths: Tensor) -> Tensor:
    """Log transition probabilities ``(N, T-1, w, w)`` between the blocks of steps ``(N, T)``."""
    device = transitions.scores[0].device
    return transitions.of_keys(pairs_of(blocks, lengths, transitions.all, device))


def chunks_of(transitions: Transitions, blocks: Tensor) -> tuple[Tensor, ...]:
    """Split sequences into chunks, indices ``(n,)``, whose transition matrices fit into memory."""
    numbers = blocks.size(1) * transitions.blocks.width**2
    limit = at_once(transitions.scores[0].device)
    return torch.arange(len(blocks)).split(max(1, limit // max(1, numbers)))


def _by_logs(
    transitions: Transitions, blocks: Tensor, lengths: Tensor, log_first: Tensor, log_seen: Tensor
) -> Tensor:
    """Log evidence by messages in logarithms, in chunks of sequences that fit into memory."""

    def evidence(
        first: Tensor, seen: Tensor, blocks: Tensor, lengths: Tensor, *scores: Any
    ) -> Tensor:
        matrices = gathered(Transitions(transitions.blocks, *scores), blocks, lengths)
        real = step_mask(lengths, blocks.size(1), seen.device)
        return _in_logs(first, matrices.to(seen), seen, real)

    found = [
        recomputed(
            evidence, log_first[rows], log_seen[rows], blocks[rows], lengths[rows],
            *transitions.scores,
        )
        for rows in chunks_of(transitions, blocks)
    ]  # fmt: skip
    return torch.cat(found)


def _in_logs(first: Tensor, matrices: Tensor, seen: Tensor, real: Tensor) -> Tensor:
    """Log evidence ``(N,)`` of a chain with log-probabilities ``(N, T-1, w, w)`` for each move."""
    message, total = first + seen[:, 0], torch.zeros_like(first[:, 0]).double()
    for t in range(seen.size(1)):
        if t:
            arrived = logsumexp(message.unsqueeze(-1) + matrices[:, t - 1], -2) + seen[:, t]
            message = torch.where(real[:, t, None], arrived, message)
        peak = finite_or_zero(message.detach().amax(-1))
        message, total = message - peak.unsqueeze(-1), total + peak
    return (total + logsumexp(message, -1)).to(seen.dtype)
