"""Which blocks of states follow each other in a batch, and where their probabilities are kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..masks import exists


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
        before: ``(M,)``, the token before; itself at the first step.
        block: ``(M,)``, block of each token; B, the number of blocks, where a step is missing.
        pair: ``(M,)``, the pair of which a token is the second; 0 at the first step, and where one
            of the two is missing.
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

    @property
    def rank(self) -> Tensor:
        """Which of the sequences, in the order of the plan, each token belongs to, ``(M,)``."""
        counts = torch.cat([self.begins[1:], self.begins.new_full((1,), len(self.where))])
        counts = counts - self.begins
        return torch.arange(len(self.where)) - self.begins.repeat_interleave(counts)


class States(NamedTuple):
    """The states of each block: ``members[starts[b] : starts[b + 1]]``, ``width`` at most."""

    starts: Tensor
    members: Tensor
    sizes: Tensor
    width: int

    @property
    def are_equal(self) -> bool:
        """Whether all blocks have as many states, so that there is one operation for all."""
        return bool((self.sizes == self.width).all())


class BlockChain(NamedTuple):
    """A chain whose steps say in which block their state is; N sequences, M tokens.

    A transition probability is p(j | i) = p(b | i) p(j | i, b) for state j in block b; where states
    are in several blocks there is no first factor.

    Attributes:
        plan: Of the blocks of the sequences.
        states: Of each block.
        leave: ``(K, D)``, vectors of states; or, without ``enter``, log-probabilities ``(K, K)``.
        enter: ``(K, D)``; p(j | i, b) is the softmax in b of inner products with them. Vectors may
            be of lower precision than all else: then the products are computed in that.
        log_block_probs: ``(K, B)``, log p(b | i); with ``enter`` only.
        log_first: ``(N, w)``, log-probability of the first state, in the first block.
        log_seen: ``(M, w)``, log-likelihood of each token in the states of its block; -inf where
            a block has fewer states than w.
    """

    plan: Plan
    states: States
    leave: Tensor
    enter: Tensor | None
    log_block_probs: Tensor | None
    log_first: Tensor
    log_seen: Tensor


def bounds(sizes: Tensor) -> Tensor:
    """Offsets of parts of given sizes, with the end of the last."""
    return torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])


def make_plan(blocks: Tensor, lengths: Tensor, states: States) -> Plan:
    """Plan for sequences of blocks ``(N, T)``, on the CPU.

    Args:
        blocks: Block of each step; B where it is missing. Padding may hold anything.
        lengths: ``(N,)``.
        states: Of each block.
    """
    steps = blocks.size(1)
    order = lengths.argsort(descending=True, stable=True)
    lengths = lengths[order]
    clock = torch.arange(int(lengths[0])).unsqueeze(-1)
    real = exists(lengths, len(clock)).T  # (T, N)
    place = (order * steps + clock)[real]
    counts = real.sum(-1)
    begins = bounds(counts)[:-1]
    block = blocks.reshape(-1)[place]
    step = clock.squeeze(-1).repeat_interleave(counts)
    index = torch.arange(len(block))
    before = torch.where(step > 0, index - counts[(step - 1).clamp(min=0)], index)
    later = int(counts[0])  # the first token that has one before
    many = len(states.sizes)
    linked = ((block[before[later:]] < many) & (block[later:] < many)).nonzero().squeeze(-1) + later
    keys = block[before[linked]] * many + block[linked]
    keys, pairs, uses = keys.unique(return_inverse=True, return_counts=True)
    source, target = keys // many, keys % many  # pairs of one source stand together
    fresh = torch.ones_like(source, dtype=torch.bool)
    fresh[1:] = source[1:] != source[:-1]
    first = fresh.nonzero().squeeze(-1)
    pairs_of = torch.cat([first, first.new_full((1,), len(keys))])
    widths = states.sizes[target]
    column = bounds(widths)
    columns_of = column[pairs_of]
    stride = columns_of.diff()  # (U,)
    unit = fresh.long().cumsum(0) - 1  # (P,)
    area = bounds(stride * states.sizes[source[first]])
    base = area[unit] + column[:-1] - columns_of[unit]
    columns = states.starts[target].repeat_interleave(widths)
    columns += torch.arange(len(columns)) - column[:-1].repeat_interleave(widths)
    pair = torch.zeros_like(block)
    pair[linked] = pairs
    return Plan(
        order, lengths, begins, place, before, block, pair, source, target, base,
        stride[unit], pairs_of, states.members[columns], columns_of,
        linked[pairs.argsort(stable=True)], bounds(uses), int(area[-1]),
    )  # fmt: skip


# Scores of transitions ---------------------------------------------------------------------------


def multiply(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Write the matrix product to ``out``, which may be of higher precision."""
    if left.dtype == out.dtype:
        torch.mm(left, right, out=out)
    else:
        out.copy_(left @ right)


class Scores:
    """The scores of all pairs of a plan, and their gradient: inner products, or a matrix.

    With ``enter``, states are in the order of their blocks, which are disjoint.
    """

    def __init__(self, chain: BlockChain) -> None:
        self.plan, self.states, self.leave, self.enter = chain[:4]
        self.dtype = chain.log_seen.dtype

    def __call__(self) -> Tensor:
        """Scores, one after the other."""
        if self.enter is None:
            parts = [self.leave[rows, columns].flatten() for rows, columns, _ in self._matrix()]
            return torch.cat(parts) if parts else self.leave.new_empty(0)
        out = self.leave.new_empty(self.plan.size, dtype=self.dtype)
        for rows, targets, cells in self.sources():
            part = out[cells].view(rows.stop - rows.start, -1)
            multiply(self.leave[rows], self.entered(targets).mT, part)
        return out

    def gradients(self, changed: Tensor) -> tuple[Tensor, Tensor | None]:
        """Of ``leave`` and ``enter``, from those of the scores."""
        leave, enter = self.leave, self.enter
        to_leave = torch.zeros_like(leave)
        if enter is None:
            for states, columns, cells in self._matrix():
                part = changed[cells].view(len(states), -1)
                to_leave.index_put_((states, columns), part, accumulate=True)
            return to_leave, None
        to_enter = torch.zeros_like(enter, dtype=self.dtype)  # a sum over many sources
        for rows, targets, cells in self.sources():
            part = changed[cells].view(rows.stop - rows.start, -1).to(leave.dtype)
            torch.mm(part, self.entered(targets), out=to_leave[rows])
            self._add_entered(to_enter, targets, (part.mT @ leave[rows]).to(self.dtype))
        return to_leave, to_enter.to(enter.dtype)

    def sources(self) -> Iterator[tuple[slice, Tensor, slice]]:
        """For each source block: its states, its targets, and where its scores are."""
        plan, starts = self.plan, self.states.starts.tolist()
        firsts, begin = plan.pairs_of.tolist(), 0
        widths = plan.columns_of.diff().tolist()
        for first, last, width in zip(firsts, firsts[1:], widths):
            source = int(plan.source[first])
            rows = slice(starts[source], starts[source + 1])
            cells = slice(begin, begin + width * (rows.stop - rows.start))
            yield rows, plan.target[first:last], cells
            begin = cells.stop

    def _matrix(self) -> Iterator[tuple[Tensor, Tensor, slice]]:
        """The same for states in any order: rows ``(k, 1)`` and columns."""
        members, device = self.states.members, self.leave.device
        limits = self.plan.columns_of.tolist()
        sources = zip(self.sources(), limits, limits[1:])
        for (rows, _, cells), left, right in sources:
            columns = self.plan.columns[left:right]
            yield members[rows].unsqueeze(-1).to(device), columns.to(device), cells

    def entered(self, targets: Tensor) -> Tensor:
        """Vectors of the states of some blocks, one block after the other."""
        assert self.enter is not None
        count = len(self.states.sizes)
        if count * self.states.width == len(self.enter):  # blocks of one size
            blocks = self.enter.view(count, -1).index_select(0, targets.to(self.enter.device))
            return blocks.view(-1, self.enter.size(1))
        return torch.cat([self.enter[a:b] for a, b in self._bounds(targets)])

    def _add_entered(self, total: Tensor, targets: Tensor, part: Tensor) -> None:
        """Add ``part``, one row for each of :meth:`entered`, to the rows of ``total``."""
        count = len(self.states.sizes)
        if count * self.states.width == len(total):
            blocks = total.view(count, -1)
            blocks.index_add_(0, targets.to(total.device), part.view(len(targets), -1))
            return
        begin = 0
        for a, b in self._bounds(targets):
            total[a:b] += part[begin : begin + b - a]
            begin += b - a

    def _bounds(self, targets: Tensor) -> list[tuple[int, int]]:
        """First and last offsets of the states of some blocks."""
        starts = self.states.starts
        return list(zip(starts[targets].tolist(), starts[targets + 1].tolist()))
