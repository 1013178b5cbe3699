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
from torch.nn.functional import pad

from ..._precision import at_least_single, full_precision, recomputed
from ..._transforms import transforming
from ..log_space import finite_or_zero, log_softmax_of_parts, logsumexp
from ..products import take_rows
from ..tensor_cache import cached, cached_on
from .pairs import (
    BlockPairs,
    PairGradient,
    log_softmax_of_pairs,
    logs_of_matrix,
    probs_of_matrix,
    softmax_of_pairs,
)
from .states import Blocks

CHUNK = 1 << 19  # transition probabilities that exist at one time; larger ones leave the cache
AT_ONCE = 1 << 23  # numbers of matrices that exist at one time on a CPU
KEPT = 1 << 32  # bytes of a matrix of probabilities that is kept, of 32,768 states in float32


def at_once(device: torch.device) -> int:
    """Maximum number of matrix entries in memory at one time."""
    return AT_ONCE if device.type == "cpu" else 16 * AT_ONCE


Part = Callable[..., Tensor]  # from the scores to log transition probabilities


class Transitions:
    """Transition probabilities between blocks of states, or all states, computed as needed.

    Args:
        blocks: Of states; B of them.
        leave, enter, log_block_probs: Vectors u and v ``(K, D)``, and log p(b | i) ``(K, B)``:
            p(j | i) = p(b | i) softmax_b(u_i v_j) for state j in block b, or None for p(j | i, b).
            Vectors may be of lower precision than all else: then the products are computed in
            that. Or log p(j | i) ``(K, K)`` and None twice.
    """

    def __init__(
        self, blocks: Blocks, leave: Tensor, enter: Tensor | None, log_block_probs: Tensor | None
    ) -> None:
        self.blocks, self.num_states, self.all = blocks, len(leave), blocks.num_blocks
        self.scores = leave, enter, log_block_probs

    @classmethod
    def of_matrix(cls, log_probs: Tensor) -> Transitions:
        """Transitions ``(K, K)`` of states that are all in one block."""
        one = Blocks(torch.tensor([0]), torch.tensor([len(log_probs)]))
        return cls(one, log_probs, None, None)

    def states_of(self, block: int) -> slice:
        """Slice of the states of ``block``; all states for index B."""
        if block == self.all:
            return slice(0, self.num_states)
        return slice(*self.blocks.starts[block : block + 2].tolist())

    def places(self, blocks: Tensor) -> Tensor:
        """Indices of the states of blocks, ``(n, w)``; K as padding, and for index B."""
        device = self.scores[0].device
        return cached_on(device, self.blocks.places).index_select(0, blocks.to(device))

    def widened(self, logs: Tensor, blocks: Tensor) -> Tensor:
        """Scatter vectors over the states of blocks ``(n, w)`` to all states."""
        places = self.places(blocks)
        wide = logs.new_full((len(logs), self.num_states + 1), -torch.inf)
        return wide.scatter(1, places, logs.masked_fill(places == self.num_states, -torch.inf))

    def of_pairs(self, pairs: BlockPairs) -> tuple[Tensor, PairGradient]:
        """Transition probabilities of pairs within blocks, ``(P, w, w)``, and their gradient."""
        leave, enter, _ = self.scores
        if enter is None:
            return probs_of_matrix(pairs, self.blocks, leave)
        return softmax_of_pairs(pairs, self.blocks, leave, enter)

    def leaving(self, keys: Tensor) -> Tensor:
        """Log-probabilities of the next block, given each state of a block, by the keys of pairs.

        ``(*, w)``; zeros for key -1.
        """
        shares = self.scores[2]
        assert shares is not None
        by_pair = self.blocks.by_block(shares).mT.flatten(0, 1)
        keys = cached_on(by_pair.device, keys)
        return take_rows(by_pair, keys.clamp(min=0)).masked_fill((keys < 0).unsqueeze(-1), 0.0)

    def of_keys(self, pairs: BlockPairs) -> Tensor:
        """Log-probabilities ``(*, w, w)`` of transitions, for each key of ``pairs``.

        What is beyond the states of a block means nothing.
        """
        leave, enter, shares = self.scores
        if enter is None:
            found = logs_of_matrix(pairs, self.blocks, leave)
        else:
            found = log_softmax_of_pairs(pairs, self.blocks, leave, enter)
        if shares is not None:
            add = torch.add if torch.is_grad_enabled() or transforming() else Tensor.add_
            found = add(found, self.leaving(pairs.keys).unsqueeze(1))
        found = take_rows(found.mT.flatten(1), cached_on(found.device, pairs.index))
        return found.unflatten(-1, (self.blocks.width, -1))

    def sums(self, logs: Tensor, source: Tensor, target: Tensor, best: bool = False) -> Tensor:
        """Log-sum-exp over the previous state, for vectors of all states; -inf elsewhere.

        Args:
            logs: ``(n, K + 1)``; what is beyond the states of ``source`` is not read, or is -inf.
            source: ``(n,)``, blocks before, or B.
            target: ``(n,)``, blocks after, or B.
            best: Whether the largest are wanted in place of sums.
        """
        along = torch.amax if best else logsumexp
        found, order = [], []
        keys = (source * (self.all + 1) + target).masked_fill(
            (source < self.all) & (target < self.all), -1
        )
        for key in keys.unique().tolist():
            rows = (keys == key).nonzero().squeeze(-1)
            values = logs.index_select(0, rows.to(logs.device))
            if key < 0:
                before, after = source[rows], target[rows]
                values = values.gather(1, self.places(before))
                pairs = BlockPairs(before * self.all + after, self.all, logs.device)
                part = along(values.unsqueeze(-1) + self.of_keys(pairs), -2)
                found.append(self.widened(part, after))
            else:
                one, other = divmod(key, self.all + 1)
                here, there = self.states_of(one), self.states_of(other)
                part = self._sums(values[:, here], one, other, False, best)
                after = self.num_states + 1 - there.stop
                found.append(pad(part, (there.start, after), value=-torch.inf))
            order.append(rows)
        return torch.cat(found)[torch.cat(order).argsort().to(logs.device)]

    def _sums(
        self, logs: Tensor, source: int, target: int, back: bool, best: bool = False
    ) -> Tensor:
        """Log-sum-exp ``(n, c)`` of ``logs`` ``(n, r)`` over transitions from block to block."""
        here, there = self.states_of(source), self.states_of(target)
        rows = max(1, CHUNK // (there.stop - there.start))
        some = range(here.start, here.stop, rows)
        parts = [self._part(slice(i, min(i + rows, here.stop)), target) for i in some]
        if not back:
            return _sums(logs.split(rows, -1), parts, self.scores, best)
        return torch.cat([_sums([logs], [_transposed(part)], self.scores) for part in parts], -1)

    def _part(self, rows: slice | Tensor, target: int) -> Part:
        """Function from scores to log-probabilities from states ``rows`` to block ``target``."""

        def logs(leave: Tensor, enter: Tensor | None, log_block_probs: Tensor | None) -> Tensor:
            before, entered = leave[rows], self.states_of(target)
            if enter is None or log_block_probs is None:
                return before[:, entered]
            scores = at_least_single(before @ enter[entered].mT)
            shares, sizes = log_block_probs[rows], self.blocks.sizes
            if target < self.all:
                shares, sizes = shares[:, target : target + 1], sizes[[target]]
            return log_softmax_of_parts(scores, sizes, shares)

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
                found += probs[:, part].to(dtype) @ self._part(part, self.all)(*self.scores).exp()
        return found

    def _probs(self) -> Tensor:
        """Transition probabilities ``(K, K)``, made some rows at a time."""
        size, leave = self.num_states, self.scores[0]
        matrix = leave.new_empty(size, size, dtype=at_least_single(leave[:0]).dtype)
        rows = max(1, CHUNK // size)
        for i, out in enumerate(matrix.split(rows)):
            own = slice(i * rows, i * rows + len(out))
            torch.exp(self._part(own, self.all)(*self.scores), out=out)
        return matrix


def _sums(logs: Any, parts: list[Part], scores: tuple[Any, ...], best: bool = False) -> Tensor:
    """Log-sum-exp ``(n, C)`` over previous states, in parts, each with its transitions to C.

    Transition probabilities are computed again for the gradient.
    """
    with torch.no_grad():
        peak = torch.stack([part.amax(-1) for part in logs]).amax(0)
        peak = finite_or_zero(peak).unsqueeze(-1)
    count = sum(part.size(-1) for part in logs)
    for dtype in () if best else dict.fromkeys((peak.dtype, torch.float64)):
        total: Any = 0.0
        for part, transition in zip(logs, parts):
            total = total + recomputed(_mixture(transition), (part - peak).to(dtype).exp(), *scores)
        number = torch.finfo(dtype)
        if bool((total.detach() > count * number.tiny / number.eps).all()):
            return (total.log() + peak).to(peak.dtype)
    along = torch.amax if best else logsumexp
    found = [
        recomputed(_along(along, transition), part, *scores)
        for part, transition in zip(logs, parts)
    ]
    return along(torch.stack(found), 0).to(peak.dtype)


def _transposed(part: Part) -> Part:
    return lambda *scores: part(*scores).mT


def _mixture(part: Part) -> Part:
    return lambda probs, *scores: probs @ part(*scores).to(probs.dtype).exp()


def _along(along: Callable[[Tensor, int], Tensor], part: Part) -> Part:
    def rows(logs: Tensor, *scores: Any) -> Tensor:
        table = part(*scores)
        return torch.stack([along(row.unsqueeze(-1) + table, 0) for row in logs])

    return rows
