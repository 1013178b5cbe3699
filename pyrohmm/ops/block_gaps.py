r"""Chains in blocks of states with missing steps, whose state may be in any block.

The observed steps between two gaps are a segment, a chain in blocks by itself. It begins with the
distribution of its first state given what was observed before, which comes through the gap as a
vector over all K states: spread from the block before, moved on at each further missing step,
gathered in the block after. No K x K matrix is made where scores are inner products: to and from a
block there are w x K of them, and those of a gap of several steps are made some rows at a time.

Gaps are computed in probabilities, and again with a wider range of numbers, in the end in
logarithms, where one is too small to be surely right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._precision import (
    at_least_single,
    differentiable_gradient,
    in_full_precision,
    recomputed,
)
from . import block_recursions
from .block_logs import BlockLogs
from .block_plan import States
from .log_space import finite_or_zero, log_softmax_of_parts, logsumexp

CHUNK = 1 << 19  # transition probabilities that exist at one time; larger ones leave the cache


class Segments(NamedTuple):
    """The runs of observed steps of all sequences, in the order of sequences and steps.

    Attributes:
        sequence: ``(S,)``, to which sequence each belongs.
        rank: ``(S,)``, which of its segments it is, from 0.
        begin: ``(S,)``, its first step.
        length: ``(S,)``, number of its steps.
        gap: ``(S,)``, number of missing steps before it, after the segment before.
    """

    sequence: Tensor
    rank: Tensor
    begin: Tensor
    length: Tensor
    gap: Tensor

    @property
    def is_last(self) -> Tensor:
        """Which are the last of their sequence, ``(S,)`` booleans."""
        follows = torch.zeros_like(self.rank, dtype=torch.bool)
        follows[:-1] = self.rank[1:] > 0
        return ~follows

    def steps(self) -> Tensor:
        """The step of the sequence at each step of the segment, ``(S, L)``; padded, its last."""
        places = torch.arange(int(self.length.max()))
        return self.begin.unsqueeze(-1) + places.minimum(self.length.unsqueeze(-1) - 1)

    def cut(self, sequences: Tensor) -> Tensor:
        """What belongs to the segments, ``(S, L, *)``, of what belongs to sequences."""
        rows, steps = self.sequence.unsqueeze(-1), self.steps()
        return sequences[rows.to(sequences.device), steps.to(sequences.device)]


def segments_of(observed: Tensor) -> Segments:
    """Segments of sequences with a mask ``(N, T)`` of the steps that exist and are observed."""
    padded = torch.nn.functional.pad(observed.cpu(), (1, 1))
    sequence, begin = (padded[:, 1:] & ~padded[:, :-1]).nonzero().unbind(-1)
    end = (padded[:, :-1] & ~padded[:, 1:]).nonzero()[:, 1]
    numbers = torch.arange(len(sequence))
    fresh = torch.ones_like(sequence, dtype=torch.bool)
    fresh[1:] = sequence[1:] != sequence[:-1]
    rank = numbers - numbers.masked_fill(~fresh, 0).cummax(0).values if len(numbers) else numbers
    gap = begin - end.roll(1).masked_fill(fresh, 0)
    return Segments(sequence, rank, begin, end - begin, gap)


# Transitions from, to and between all states ------------------------------------------------------


class AllTransitions:
    """Sums over transitions from and to all K states.

    Args:
        states: Of each block.
        leave, enter, log_block_probs: As :mod:`pyrohmm.ops.block_recursions` reads them.
    """

    def __init__(
        self, states: States, leave: Tensor, enter: Tensor | None, log_block_probs: Tensor | None
    ) -> None:
        self.states, self.num_states = states, len(leave)
        self.scores = leave, enter, log_block_probs
        self.is_matrix = enter is None

    def spread(self, log_probs: Tensor, block: Tensor) -> Tensor:
        """Logs ``(n, K)`` one step after ``(n, w)`` in the blocks ``(n,)``."""
        if self.is_matrix:
            return self.onward(self.widened(log_probs, block))
        return _by_block(log_probs, block, self._spread)

    def _spread(self, log_probs: Tensor, block: int) -> Tensor:
        rows = self._states_of(block)
        return _sums([log_probs[:, : len(rows)]], [self._part(rows, None)], self.scores)

    def onward(self, log_probs: Tensor) -> Tensor:
        """Logs ``(n, K)`` one step after ``(n, K)``."""
        size = max(1, CHUNK // self.num_states)
        rows = torch.arange(self.num_states).split(size)
        return _sums(
            list(log_probs.split(size, -1)), [self._part(part, None) for part in rows], self.scores
        )

    def gather(self, log_probs: Tensor, block: Tensor) -> Tensor:
        """Logs ``(n, w)`` in the blocks ``(n,)``, one step after ``(n, K)``; -inf beyond them."""
        if self.is_matrix:
            return self.narrowed(self.onward(log_probs), block)
        return _by_block(log_probs, block, self._gather)

    def between(self, log_probs: Tensor, source: Tensor, target: Tensor) -> Tensor:
        """Logs ``(n, w)`` in the blocks ``target``, one step after ``(n, w)`` in ``source``."""
        many = len(self.states.sizes)

        def pair(part: Tensor, key: int) -> Tensor:
            rows = self._states_of(key // many)
            return self._into(part[:, : len(rows)], rows, key % many)

        return _by_block(log_probs, source * many + target, pair)

    def _gather(self, log_probs: Tensor, block: int) -> Tensor:
        return self._into(log_probs, torch.arange(self.num_states), block)

    def _into(self, log_probs: Tensor, rows: Tensor, block: int) -> Tensor:
        """Logs ``(n, w)`` in a block, one step after those of the states ``rows``."""
        size = max(1, CHUNK // self.states.width)
        parts = [self._part(part, block) for part in rows.split(size)]
        found = _sums(list(log_probs.split(size, -1)), parts, self.scores)
        beyond = self.states.width - found.size(-1)
        return torch.nn.functional.pad(found, (0, beyond), value=-torch.inf)

    def before_block(self, log_values: Tensor, block: Tensor) -> Tensor:
        """Logs ``(n, K)`` of sums over the states that follow, of values in blocks ``(n, w)``."""
        if self.is_matrix:
            return self.before_all(self.widened(log_values, block))
        rows = torch.arange(self.num_states)
        return _by_block(log_values, block, lambda part, kind: self._before(part, rows, kind))

    def before_all(self, log_values: Tensor, block: Tensor | None = None) -> Tensor:
        """The same of values of all states ``(n, K)``; in the states of blocks ``(n, w)``."""
        rows = torch.arange(self.num_states)
        if block is None:
            return self._before(log_values, rows, None)
        if self.is_matrix:
            return self.narrowed(self._before(log_values, rows, None), block)

        def part(values: Tensor, kind: int) -> Tensor:
            found = self._before(values, self._states_of(kind), None)
            beyond = self.states.width - found.size(-1)
            return torch.nn.functional.pad(found, (0, beyond), value=-torch.inf)

        return _by_block(log_values, block, part)

    def _before(self, log_values: Tensor, rows: Tensor, block: int | None) -> Tensor:
        """Logs ``(n, R)`` in the states ``rows`` of sums over those of a block, or of all."""
        count = self.num_states if block is None else int(self.states.sizes[block])
        values = [log_values[:, :count]]
        parts = (self._part(each, block) for each in rows.split(max(1, CHUNK // count)))
        return torch.cat([_sums(values, [_transposed(part)], self.scores) for part in parts], -1)

    def from_all(self, states: Tensor) -> Tensor:
        """Log-probabilities ``(n, K)`` of transitions from all states to ``states`` ``(n,)``."""
        kinds, place = states.unique(return_inverse=True)
        if self.is_matrix:
            return self.scores[0][:, kinds.to(self.scores[0].device)].mT[place]
        block = torch.searchsorted(self.states.starts, kinds, right=True) - 1

        def part(columns: Tensor, kind: int) -> Tensor:
            return self.columns_of(kind)[1][:, columns.squeeze(-1) - self.states.starts[kind]].mT

        return _by_block(kinds.unsqueeze(-1), block, part)[place]

    def rows_of(self, block: int) -> tuple[Tensor, Tensor]:
        """The states of a block, and log-probabilities ``(r, K)`` of all that may follow."""
        rows = self._states_of(block)
        if self.is_matrix:
            return rows, self.scores[0][rows.to(self.scores[0].device)]
        return rows, self._part(rows, None)(*self.scores)

    def columns_of(self, block: int) -> tuple[Tensor, Tensor]:
        """The states of a block, and log-probabilities ``(K, r)`` of them after all others."""
        columns = self._states_of(block)
        rows = torch.arange(self.num_states).split(max(1, CHUNK // len(columns)))
        return columns, torch.cat([self._part(part, block)(*self.scores) for part in rows])

    def all_rows(self) -> Iterator[tuple[slice, Tensor]]:
        """Some rows at a time of the log-probabilities of all transitions."""
        for rows in torch.arange(self.num_states).split(max(1, CHUNK // self.num_states)):
            yield slice(int(rows[0]), int(rows[-1]) + 1), self._part(rows, None)(*self.scores)

    def widened(self, log_probs: Tensor, block: Tensor) -> Tensor:
        """Logs of all states ``(n, K)``, of those of the states of the blocks ``(n, w)``."""
        places = self.places(block).to(log_probs.device)
        wide = log_probs.new_full((len(block), self.num_states + 1), -torch.inf)
        wide = wide.scatter(1, places, log_probs.masked_fill(places == self.num_states, -torch.inf))
        return wide[:, :-1]

    def narrowed(self, log_probs: Tensor, block: Tensor) -> Tensor:
        """Logs of the states of the blocks ``(n, w)``, of those of all states ``(n, K)``."""
        wide = torch.nn.functional.pad(log_probs, (0, 1), value=-torch.inf)
        return wide.gather(1, self.places(block).to(wide.device))

    def places(self, block: Tensor) -> Tensor:
        """The states of blocks, ``(n, w)``; K beyond them."""
        starts, sizes, members = self.states.starts, self.states.sizes, self.states.members
        places = torch.arange(self.states.width)
        index = starts[block].unsqueeze(-1) + places
        states = members[index.clamp(max=len(members) - 1)]
        return states.masked_fill(places >= sizes[block].unsqueeze(-1), self.num_states)

    def _states_of(self, block: int) -> Tensor:
        return self.states.members[self.states.starts[block] : self.states.starts[block + 1]]

    def _part(self, rows: Tensor, block: int | None) -> Callable[..., Tensor]:
        """Log transition probabilities from some states to those of a block, or to all.

        A function of the scores, so that it can be computed again. With inner products the states
        of ``rows`` are one after the other.
        """
        some = slice(int(rows[0]), int(rows[-1]) + 1)

        def logs(leave: Tensor, enter: Tensor | None, log_block_probs: Tensor | None) -> Tensor:
            if enter is None or log_block_probs is None:
                if block is None:
                    return leave[some]
                columns = self._states_of(block).to(leave.device)
                return leave[rows.to(leave.device).unsqueeze(-1), columns]
            if block is None:
                scores = at_least_single(leave[some] @ enter.mT)
                return log_softmax_of_parts(scores, self.states.sizes, log_block_probs[some])
            first, last = self.states.starts[block : block + 2].tolist()
            scores = at_least_single(leave[some] @ enter[first:last].mT)
            return scores.log_softmax(-1) + log_block_probs[some, block : block + 1]

        return logs


def _by_block(
    log_probs: Tensor, block: Tensor, function: Callable[[Tensor, int], Tensor]
) -> Tensor:
    """Apply ``function`` to the rows of each block at once."""
    order, parts = block.argsort(stable=True), []
    kinds, counts = block.unique(return_counts=True)
    rows = log_probs[order.to(log_probs.device)].split(counts.tolist())
    for part, kind in zip(rows, kinds.tolist()):
        parts.append(function(part, kind))
    return torch.cat(parts)[order.argsort().to(log_probs.device)]


def _sums(
    log_probs: list[Tensor], parts: list[Callable[..., Tensor]], scores: tuple[Any, ...]
) -> Tensor:
    """Logs ``(n, C)`` of sums over states, part by part: each with its transitions to C states.

    Transition probabilities are computed again for the gradient.
    """
    with torch.no_grad():
        peak = torch.stack([part.amax(-1) for part in log_probs]).amax(0)
        peak = finite_or_zero(peak).unsqueeze(-1)
    count = sum(part.size(-1) for part in log_probs)
    for dtype in dict.fromkeys((peak.dtype, torch.float64)):
        total: Any = 0.0
        for logs, part in zip(log_probs, parts):
            total = total + recomputed(_mixture(part), (logs - peak).to(dtype).exp(), *scores)
        number = torch.finfo(dtype)
        if bool((total.detach() > count * number.tiny / number.eps).all()):
            return (total.log() + peak).to(peak.dtype)
    found = [
        torch.stack([recomputed(_log_mixture(part), row, *scores) for row in logs])
        for logs, part in zip(log_probs, parts)
    ]
    return logsumexp(torch.stack(found), 0)


def _transposed(part: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *scores: part(*scores).mT


def _mixture(part: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda probs, *scores: probs @ part(*scores).to(probs.dtype).exp()


def _log_mixture(part: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda logs, *scores: logsumexp(logs.unsqueeze(-1) + part(*scores), 0)


# Forward pass -------------------------------------------------------------------------------------


class Entries(NamedTuple):
    """How the segments begin.

    Attributes:
        log_first: ``(S, w)``, log-probability of the first state given what is before, in its
            block.
        before: ``(S,)`` float64, log-probability of what is before. A constant for gradients, for
            ``log_first`` has those of both.
    """

    log_first: Tensor
    before: Tensor


class _FinalState(torch.autograd.Function):
    r"""Log p(z_T | x_{1:T}) ``(N, w)`` in the last block, and the evidence ``(N,)`` of chains.

    The gradient is that of log p(x_{1:T}, z_T), of both together, weighted by numbers of one sign
    for each sequence (so they are: the posterior of the state times the weight of the sequence).
    It is the gradient of the evidence of a chain whose last likelihoods weigh states like that.
    """

    @staticmethod
    def forward(
        ctx: Any, path: Tensor, lengths: Tensor, states: States, *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        chain: Any = path, lengths, states, *tensors
        final = block_recursions.final_state_log_probs(*chain)
        evidence = block_recursions.log_evidence(*chain)
        ctx.chain = path, lengths, states
        ctx.save_for_backward(final, *tensors)
        ctx.mark_non_differentiable(evidence)
        return final, evidence

    @staticmethod
    @in_full_precision
    def backward(ctx: Any, weights: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        path, lengths, states = ctx.chain
        final, *tensors = ctx.saved_tensors
        if torch.is_grad_enabled():

            def joint(*inputs: Any) -> Tensor:
                plan = block_recursions.plan_chain(path, lengths, states, *inputs)
                logs = BlockLogs(plan)
                messages, subtracted = logs.messages()
                found = logs.ends(messages) + logs.ends(subtracted).unsqueeze(-1)
                return found[plan.plan.order.argsort().to(found.device)].to(final.dtype)

            weights = weights.masked_fill(final.isneginf(), 0.0)
            return None, None, None, *differentiable_gradient(joint, tensors, weights)
        total = weights.sum(-1, keepdim=True)
        share = weights / total.masked_fill(total == 0, 1.0)
        later = torch.where(share > 0, share.log() - final, -torch.inf)
        later = later.masked_fill(total == 0, 0.0)
        with torch.enable_grad():
            inputs: list[Any] = [
                None if part is None else part.detach().requires_grad_(needed)
                for part, needed in zip(tensors, ctx.needs_input_grad[3:])
            ]
            last = torch.arange(len(lengths), device=later.device), (lengths - 1).to(later.device)
            seen = inputs[-1].index_put(last, inputs[-1][last] + later)
            chain: Any = path, lengths, states, *inputs[:-1], seen
            evidence = block_recursions.log_evidence(*chain)
            wanted = [part for part in inputs if part is not None and part.requires_grad]
            found = iter(
                torch.autograd.grad(evidence, wanted, total.squeeze(-1), materialize_grads=True)
            )
        needed = (part is not None and part.requires_grad for part in inputs)
        return None, None, None, *(next(found) if each else None for each in needed)


def entries(
    segments: Segments,
    path: Tensor,
    states: States,
    scores: tuple[Tensor, Tensor | None, Tensor | None],
    log_initial: Tensor,
    log_seen: Tensor,
) -> Entries:
    """How segments begin, from the first of each sequence to its last.

    Args:
        segments: S of them.
        path: ``(S, L)``, block of each step.
        states: Of each block.
        scores: ``leave``, ``enter`` and ``log_block_probs`` of :mod:`.block_recursions`.
        log_initial: ``(K,)``, log-probabilities of the first state of a sequence.
        log_seen: ``(S, L, w)``, log-likelihoods.
    """
    step, device = AllTransitions(states, *scores), log_seen.device
    place = torch.zeros_like(segments.rank)  # among those of its rank
    firsts: list[Tensor] = []
    before = torch.zeros(len(place), dtype=torch.float64, device=device)
    for rank in range(int(segments.rank.max()) + 1):
        at = (segments.rank == rank).nonzero().squeeze(-1)
        place[at] = torch.arange(len(at))
        gap, block = segments.gap[at], path[at, 0]
        if rank == 0:
            missing = log_initial.expand(len(at), -1)
        else:
            last = at - 1
            ends = segments.length[last]
            log_probs, evidence = _FinalState.apply(
                path[last], ends, states, *scores, firsts[-1][place[last].to(device)],
                log_seen[last.to(device)],
            )  # fmt: skip
            before[at.to(device)] = before[last.to(device)] + finite_or_zero(evidence).double()
            missing = step.spread(log_probs, path[last, ends - 1])
        firsts.append(_after_gaps(step, missing, gap, block))
    order = segments.rank.argsort(stable=True).argsort()
    return Entries(torch.cat(firsts)[order.to(device)], before)


def _after_gaps(step: AllTransitions, missing: Tensor, gap: Tensor, block: Tensor) -> Tensor:
    """Logs ``(n, w)`` in the blocks, after gaps whose first states have logs ``(n, K)``."""
    device = missing.device
    none = (gap == 0).nonzero().squeeze(-1)
    parts, orders = [step.narrowed(missing[none.to(device)], block[none])], [none]
    left = (gap > 0).nonzero().squeeze(-1)
    missing, passed = missing[left.to(device)], 0
    while len(left):
        passed += 1
        ends = gap[left] == passed
        if bool(ends.any()):
            parts.append(step.gather(missing[ends.to(device)], block[left[ends]]))
            orders.append(left[ends])
        left, missing = left[~ends], missing[~ends.to(device)]
        if len(left):
            missing = step.onward(missing)
    return torch.cat(parts)[torch.cat(orders).argsort().to(device)]


def log_evidence(
    observed: Tensor,
    path: Tensor,
    states: States,
    scores: tuple[Tensor, Tensor | None, Tensor | None],
    log_initial: Tensor,
    log_seen: Tensor,
) -> Tensor:
    r"""Log evidence of what is observed, in nats, ``(N,)``; differentiable.

    Args:
        observed: ``(N, T)`` booleans, which steps exist and are observed.
        path: ``(N, T)``, block of each step that is observed.
        states: Of each block.
        scores: As for :func:`entries`.
        log_initial: ``(K,)``, log-probabilities of the first state.
        log_seen: ``(N, T, w)``, log-likelihoods.
    """
    segments = segments_of(observed)
    value = log_seen[:, 0, 0].masked_fill(torch.ones_like(log_seen[:, 0, 0], dtype=torch.bool), 0.0)
    if not len(segments.rank):
        return value
    path, log_seen = segments.cut(path), segments.cut(log_seen)
    found = entries(segments, path, states, scores, log_initial, log_seen)
    last = segments.is_last.nonzero().squeeze(-1)
    rows = last.to(log_seen.device)
    evidence = block_recursions.log_evidence(
        path[last], segments.length[last], states, *scores, found.log_first[rows], log_seen[rows]
    )
    evidence = (evidence.double() + found.before[rows]).to(evidence.dtype)
    return value.index_put((segments.sequence[last].to(value.device),), evidence)
