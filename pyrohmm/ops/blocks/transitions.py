r"""Sums over the transitions of chains in blocks of states, also where the state may be any.

A block is a number; B, the number of blocks, stands for all K states, where a step is missing. No
K x K matrix is made where scores are inner products: to and from a block there are w x K of them,
and those from all states to all are made some rows at a time. Vectors of states are logarithms
``(n, K + 1)``; the last number stands for what is no state, and is -inf.

Sums are computed in probabilities, and again with a wider range of numbers, in the end in
logarithms, where one is too small to be surely right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..._precision import at_least_single, full_precision, recomputed
from ..log_space import finite_or_zero, log_softmax_of_parts, logsumexp
from ..products import take_rows
from ..tensor_cache import cached, cached_on
from .states import States, bounds

CHUNK = 1 << 19  # transition probabilities that exist at one time; larger ones leave the cache
DENSE = 8  # transitions of all pairs of blocks are computed at once, if one in so many occurs
KEPT = 1 << 32  # bytes of a matrix of probabilities that is kept, of 32,768 states in float32

Part = Callable[..., Tensor]  # from the scores to log transition probabilities


class Transitions:
    """Transitions from blocks, or all states, to blocks, or all states.

    Args:
        states: Of each of B blocks.
        leave, enter, log_block_probs: Vectors u and v ``(K, D)``, and log p(b | i) ``(K, B)``:
            p(j | i) = p(b | i) softmax_b(u_i v_j) for state j in block b. Vectors may be of lower
            precision than all else: then the products are computed in that. Or log p(j | i)
            ``(K, K)`` and None twice, also where states are in several blocks.
    """

    def __init__(
        self, states: States, leave: Tensor, enter: Tensor | None, log_block_probs: Tensor | None
    ) -> None:
        self.states, self.num_states, self.all = states, len(leave), len(states.sizes)
        self.scores = leave, enter, log_block_probs

    @classmethod
    def of_matrix(cls, log_probs: Tensor) -> Transitions:
        """Transitions ``(K, K)`` of states that are all in one block."""
        size = torch.tensor([len(log_probs)])
        states = States(bounds(size), torch.arange(len(log_probs)), size, len(log_probs))
        return cls(states, log_probs, None, None)

    def states_of(self, block: int) -> Tensor:
        """The states of a block; of B, all."""
        starts, members, *_ = self.states
        if block == self.all:
            return torch.arange(self.num_states)
        return members[starts[block] : starts[block + 1]]

    def places(self, blocks: Tensor) -> Tensor:
        """The states of blocks, ``(n, w)``; K beyond them, and for B."""
        starts, members, sizes, width = self.states
        blocks, missing = blocks.clamp(max=self.all - 1), blocks == self.all
        places = torch.arange(width)
        states = members[(starts[blocks].unsqueeze(-1) + places).clamp(max=len(members) - 1)]
        beyond = (places >= sizes[blocks].unsqueeze(-1)) | missing.unsqueeze(-1)
        return states.masked_fill(beyond, self.num_states)

    def widened(self, logs: Tensor, blocks: Tensor) -> Tensor:
        """Vectors of all states, of those of the states of blocks ``(n, w)``."""
        places = self.places(blocks).to(logs.device)
        wide = logs.new_full((len(logs), self.num_states + 1), -torch.inf)
        return wide.scatter(1, places, logs.masked_fill(places == self.num_states, -torch.inf))

    def between(self, source: Tensor, target: Tensor) -> Tensor:
        """Log-probabilities ``(P, w, w)`` of transitions from some blocks to others.

        What is beyond the states of a block means nothing.
        """
        leave, enter, log_block_probs = self.scores
        count, width = self.all, self.states.width
        places = self.places(torch.arange(count)).to(leave.device)
        states = places.clamp(max=self.num_states - 1)
        source, target = (cached_on(leave.device, blocks) for blocks in (source, target))
        if enter is None or log_block_probs is None:
            cells = states[source].unsqueeze(-1) * self.num_states + states[target].unsqueeze(-2)
            return take_rows(leave.reshape(-1, 1), cells).squeeze(-1)
        tables = (leave, enter, log_block_probs)
        before, after, shares = (
            each.index_select(0, states.flatten()).view(count, width, -1) for each in tables
        )
        beyond, pairs = places == self.num_states, source * count + target
        shares = shares.mT.flatten(0, 1).index_select(0, pairs).unsqueeze(-1)  # (P, w, 1)
        if len(pairs) * DENSE > count**2:
            scores = at_least_single(before.flatten(0, 1) @ after.flatten(0, 1).mT)
            scores = scores.view(count, width, count, width).masked_fill(beyond, -torch.inf)
            logs = scores.log_softmax(-1).transpose(1, 2).flatten(0, 1)
            return logs.index_select(0, pairs) + shares
        scores = before.index_select(0, source) @ after.index_select(0, target).mT
        scores = at_least_single(scores).masked_fill(beyond[target].unsqueeze(-2), -torch.inf)
        return scores.log_softmax(-1) + shares

    def sums(self, logs: Tensor, source: Tensor, target: Tensor) -> Tensor:
        """Logs of sums over the states before, of vectors of all states; -inf elsewhere.

        Args:
            logs: ``(n, K + 1)``; what is beyond the states of ``source`` is not read, or is -inf.
            source: ``(n,)``, blocks before, or B.
            target: ``(n,)``, blocks after, or B.
        """
        found, order = [], []
        keys = (source * (self.all + 1) + target).masked_fill(
            (source < self.all) & (target < self.all), -1
        )
        for key in keys.unique().tolist():
            rows = (keys == key).nonzero().squeeze(-1)
            values = logs.index_select(0, rows.to(logs.device))
            if key < 0:
                before, after = source[rows], target[rows]
                values = values.gather(1, self.places(before).to(logs.device))
                part = logsumexp(values.unsqueeze(-1) + self.between(before, after), -2)
                found.append(self.widened(part, after))
            else:
                one, other = divmod(key, self.all + 1)
                here, there = (self.states_of(block).to(logs.device) for block in (one, other))
                part = self._sums(values.index_select(1, here), one, other, False)
                wide = part.new_full((len(rows), self.num_states + 1), -torch.inf)
                found.append(wide.index_copy(1, there, part))
            order.append(rows)
        return torch.cat(found)[torch.cat(order).argsort().to(logs.device)]

    def _sums(self, logs: Tensor, source: int, target: int, back: bool) -> Tensor:
        """Sums ``(n, c)`` over the states of a block, of their vectors ``(n, r)``."""
        rows = max(1, CHUNK // len(self.states_of(target)))
        parts = [self._part(some, target) for some in self.states_of(source).split(rows)]
        if not back:
            return _sums(logs.split(rows, -1), parts, self.scores)
        return torch.cat([_sums([logs], [_transposed(part)], self.scores) for part in parts], -1)

    def _part(self, rows: Tensor, target: int) -> Part:
        """Log-probabilities of transitions from some states to a block, as function of scores."""

        def logs(leave: Tensor, enter: Tensor | None, log_block_probs: Tensor | None) -> Tensor:
            own = rows.to(leave.device)
            before, entered = leave.index_select(0, own), self.states_of(target).to(leave.device)
            if enter is None or log_block_probs is None:
                return before if target == self.all else before.index_select(1, entered)
            scores = at_least_single(before @ enter.index_select(0, entered).mT)
            shares, sizes = log_block_probs.index_select(0, own), self.states.sizes
            if target == self.all:
                return log_softmax_of_parts(scores, sizes, shares)
            return log_softmax_of_parts(scores, sizes[[target]], shares[:, target : target + 1])

        return logs

    @torch.no_grad()
    def back_from_all(self, log_values: Tensor) -> Tensor:
        r"""One step of a backward pass over all states, :math:`\log \sum_j p(j | i) e^{v_j}`.

        The K x K probabilities are computed once, and kept while the vectors of the transition
        live, without gradients; if they would take more than 4 GiB, at each call some rows at a
        time.

        Args:
            log_values: ``(n, K)``, v; the result has its shape and dtype.
        """
        leave, every = self.scores[0], self.all
        number = torch.finfo(at_least_single(leave[:0]).dtype)
        if self.num_states**2 * number.bits // 8 > KEPT:
            return self._sums(log_values, every, every, True)
        matrix = cached(leave, self._probs, *self.scores[1:])
        peak = finite_or_zero(log_values.amax(-1, keepdim=True))
        scaled = (log_values - peak).exp().to(matrix.dtype)
        with full_precision(scaled):
            sums = scaled.masked_fill_(scaled < number.tiny, 0.0) @ matrix.mT
        # what was lost in a sum is less than K times the least number
        unsure = (sums < self.num_states * number.tiny / number.eps).any(-1)
        unsure &= ~log_values.isneginf().all(-1)
        found = sums.to(log_values.dtype).log() + peak
        if bool(unsure.any()):
            found[unsure] = self._sums(log_values[unsure], every, every, True)
        return found

    @torch.no_grad()
    def forward_from_all(self, probs: Tensor) -> Tensor:
        r"""Probabilities of the next state, :math:`\sum_i p_i \, p(j | i)`, ``(n, K)``."""
        leave, size = self.scores[0], self.num_states
        dtype = at_least_single(leave[:0]).dtype
        states = probs.any(0).nonzero().squeeze(-1)
        with full_precision(leave):
            if 4 * len(states) > size and size**2 * dtype.itemsize <= KEPT:
                return probs.to(dtype) @ cached(leave, self._probs, *self.scores[1:])
            found = probs.new_zeros(len(probs), size, dtype=dtype)
            for part in states.split(max(1, CHUNK // size)):
                rows = self._part(part, self.all)(*self.scores).exp()
                found += probs[:, part].to(dtype) @ rows
        return found

    def _probs(self) -> Tensor:
        """Transition probabilities ``(K, K)``, made some rows at a time."""
        size, leave = self.num_states, self.scores[0]
        matrix = leave.new_empty(size, size, dtype=at_least_single(leave[:0]).dtype)
        for rows in torch.arange(size).split(max(1, CHUNK // size)):
            torch.exp(self._part(rows, self.all)(*self.scores), out=matrix[rows[0] : rows[-1] + 1])
        return matrix


def _sums(logs: Any, parts: list[Part], scores: tuple[Any, ...]) -> Tensor:
    """Logs ``(n, C)`` of sums over states, part by part: each with its transitions to C states.

    Transition probabilities are computed again for the gradient.
    """
    with torch.no_grad():
        peak = torch.stack([part.amax(-1) for part in logs]).amax(0)
        peak = finite_or_zero(peak).unsqueeze(-1)
    count = sum(part.size(-1) for part in logs)
    for dtype in dict.fromkeys((peak.dtype, torch.float64)):
        total: Any = 0.0
        for part, transition in zip(logs, parts):
            total = total + recomputed(_mixture(transition), (part - peak).to(dtype).exp(), *scores)
        number = torch.finfo(dtype)
        if bool((total.detach() > count * number.tiny / number.eps).all()):
            return (total.log() + peak).to(peak.dtype)
    found = [
        torch.stack([recomputed(_log_mixture(transition), row, *scores) for row in part])
        for part, transition in zip(logs, parts)
    ]
    return logsumexp(torch.stack(found), 0).to(peak.dtype)


def _transposed(part: Part) -> Part:
    return lambda *scores: part(*scores).mT


def _mixture(part: Part) -> Part:
    return lambda probs, *scores: probs @ part(*scores).to(probs.dtype).exp()


def _log_mixture(part: Part) -> Part:
    return lambda logs, *scores: logsumexp(logs.unsqueeze(-1) + part(*scores), 0)
