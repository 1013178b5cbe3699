"""Which blocks of states follow each other in a batch, and where their probabilities are kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..log_space import step_mask
from ..tensor_cache import cached_on


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


class PlannedChain(NamedTuple):
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

    def detached(self) -> PlannedChain:
        """A copy without gradients, of tensors that may be saved for one of others."""
        parts: Any = (
            part if not isinstance(part, Tensor)
            else part.clone() if part.is_inference() else part.detach()
            for part in self
        )  # fmt: skip
        return PlannedChain(*parts)


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
    real = step_mask(lengths, len(clock)).T  # (T, N)
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


class Source(NamedTuple):
    """A block, the blocks that follow it, and where the scores of their states are.

    Attributes:
        rows: Which of the ``members`` of all blocks its r states are.
        columns: ``(c,)``, the states of the blocks that follow it, block after block.
        targets: These blocks.
        cells: Where the r x c scores are.
    """

    rows: slice
    columns: Tensor
    targets: Tensor
    cells: slice


def sources(plan: Plan, states: States, device: torch.device) -> Iterator[Source]:
    """The blocks that are followed by others; the columns are on ``device``."""
    starts, begin = states.starts.tolist(), 0
    columns = cached_on(device, plan.columns).split(plan.columns_of.diff().tolist())
    targets = plan.target.split(plan.pairs_of.diff().tolist())
    for block, column, target in zip(plan.source[plan.pairs_of[:-1]].tolist(), columns, targets):
        rows = slice(starts[block], starts[block + 1])
        cells = slice(begin, begin + len(column) * (rows.stop - rows.start))
        yield Source(rows, column, target, cells)
        begin = cells.stop


def scores(chain: PlannedChain) -> Tensor:
    """Scores of all pairs of a plan, one after the other: inner products, or those of a matrix.

    With ``enter``, states are in the order of their blocks, which are disjoint.
    """
    plan, states, leave, enter = chain[:4]
    out = leave.new_empty(plan.size, dtype=chain.log_seen.dtype)
    for rows, columns, _, cells in sources(plan, states, leave.device):
        part = out[cells].view(rows.stop - rows.start, -1)
        if enter is None:
            part.copy_(leave[states.members[rows].unsqueeze(-1), columns])
        elif leave.dtype == out.dtype:
            torch.mm(leave[rows], enter.index_select(0, columns).mT, out=part)
        else:
            part.copy_(leave[rows] @ enter.index_select(0, columns).mT)
    return out


def score_gradients(chain: PlannedChain, changed: Tensor) -> tuple[Tensor, Tensor | None]:
    """Gradients by ``leave`` and ``enter``, from those by the :func:`scores`."""
    plan, states, leave, enter = chain[:4]
    to_leave, starts = torch.zeros_like(leave), states.starts.tolist()
    to_enter = None if enter is None else torch.zeros_like(enter, dtype=changed.dtype)
    for rows, columns, targets, cells in sources(plan, states, leave.device):
        part = changed[cells].view(rows.stop - rows.start, -1)
        if enter is None or to_enter is None:
            place = states.members[rows].unsqueeze(-1), columns
            to_leave.index_put_(place, part, accumulate=True)
            continue
        part = part.to(leave.dtype)
        torch.mm(part, enter.index_select(0, columns), out=to_leave[rows])
        entered = (part.mT @ leave[rows]).to(changed.dtype).split(states.sizes[targets].tolist())
        for block, gradient in zip(targets.tolist(), entered):
            to_enter[starts[block] : starts[block + 1]] += gradient
    return to_leave, None if to_enter is None or enter is None else to_enter.to(enter.dtype)
