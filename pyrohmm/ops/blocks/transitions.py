r"""Sums over the transitions of chains in blocks of states, also where the state may be any.

A block is a number; B, the number of blocks, stands for all K states, where a step is missing. No
K x K matrix is made where scores are inner products: to and from a block there are w x K of them,
and those from all states to all are made some rows at a time.

Sums are computed in probabilities, and again with a wider range of numbers, in the end in
logarithms, where one is too small to be surely right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..._precision import at_least_single, recomputed
from ..log_space import finite_or_zero, log_softmax_of_parts, logsumexp
from .plan import States

CHUNK = 1 << 19  # transition probabilities that exist at one time; larger ones leave the cache


class Transitions:
    """Transitions from blocks, or all states, to blocks, or all states.

    Args:
        states: Of each of B blocks.
        leave, enter, log_block_probs: As :mod:`pyrohmm.ops.blocks.recursions` reads them.
    """

    def __init__(
        self, states: States, leave: Tensor, enter: Tensor | None, log_block_probs: Tensor | None
    ) -> None:
        self.states, self.num_states, self.all = states, len(leave), len(states.sizes)
        self.scores = leave, enter, log_block_probs
        self.is_matrix = enter is None

    def sums(self, logs: Tensor, source: Tensor, target: Tensor, back: bool = False) -> Tensor:
        """Logs of sums over the states before; those of a block ``(n, w)``, of all ``(n, K)``.

        Args:
            logs: ``(n, w)`` or ``(n, K)``, of the states of ``source``.
            source: ``(n,)``, blocks before; or B everywhere.
            target: ``(n,)``, blocks after; or B everywhere.
            back: Whether to sum over the states after, of values of the states of ``target``.
        """
        here, there = (target, source) if back else (source, target)
        if self.is_matrix and self.all in (int(here[0]), int(there[0])):
            # one product for all tokens
            found = self._sums(self.widened(logs, here), self.all, self.all, back)
            return self.narrowed(found, there)
        return self._grouped(
            logs, source, target, lambda part, one, other: self._sums(part, one, other, back)
        )

    def _sums(self, logs: Tensor, source: int, target: int, back: bool) -> Tensor:
        parts, there = self._parts(source, target), source if back else target
        if back:
            values = [logs[:, : self.size(target)]]
            one = [_sums(values, [_transposed(part)], self.scores) for _, part in parts]
            found = torch.cat(one, -1)
        else:
            some = [logs[:, rows] for rows, _ in parts]
            found = _sums(some, [part for _, part in parts], self.scores)
        return self.padded(found, there)

    def into(self, source: Tensor, states: Tensor) -> Tensor:
        """Log-probabilities of transitions to ``states`` ``(n,)``: ``(n, w)``, or all ``(n, K)``.

        From the states of ``source`` ``(n,)``, blocks or B everywhere.
        """
        if self.is_matrix:
            matrix = self.scores[0]
            return self.narrowed(matrix[:, states.to(matrix.device)].mT, source)
        starts = self.states.starts

        def part(states: Tensor, one: int, other: int) -> Tensor:
            logs = torch.cat([logs for _, logs in self.parts(one, other)])
            return self.padded(logs[:, states - starts[other].to(states.device)].mT, one)

        states = states.to(self.scores[0].device)
        target = torch.searchsorted(starts, states.cpu(), right=True) - 1
        return self._grouped(states, source, target, part)

    def parts(self, source: int, target: int) -> Iterator[tuple[slice, Tensor]]:
        """Log transition probabilities ``(r, c)`` of some states of a block at a time, and which.

        To those of another block; B is all states.
        """
        for rows, part in self._parts(source, target):
            yield rows, part(*self.scores)

    def groups(self, source: Tensor, target: Tensor) -> Iterator[tuple[Tensor, int, int]]:
        """The rows of each pair of blocks, and these two."""
        many = self.all + 1
        kinds, counts = (keys := source * many + target).unique(return_counts=True)
        rows = keys.argsort(stable=True).split(counts.tolist())
        for row, kind in zip(rows, kinds.tolist()):
            yield row, kind // many, kind % many

    def _grouped(
        self, values: Tensor, source: Tensor, target: Tensor,
        function: Callable[[Tensor, int, int], Tensor],
    ) -> Tensor:  # fmt: skip
        """Apply ``function`` to the values of each pair of blocks at once."""
        found, orders = [], []
        for rows, one, other in self.groups(source, target):
            found.append(function(values[rows.to(values.device)], one, other))
            orders.append(rows)
        return torch.cat(found)[torch.cat(orders).argsort().to(values.device)]

    def size(self, block: int) -> int:
        """Number of states of a block; of B, of all."""
        return self.num_states if block == self.all else int(self.states.sizes[block])

    def states_of(self, block: int) -> Tensor:
        """The states of a block; of B, all."""
        if block == self.all:
            return torch.arange(self.num_states)
        return self.states.members[self.states.starts[block] : self.states.starts[block + 1]]

    def padded(self, logs: Tensor, block: int) -> Tensor:
        """Of the states of a block, with -inf beyond it up to w."""
        beyond = 0 if block == self.all else self.states.width - logs.size(1)
        shape = (*(0 for _ in range(2 * (logs.dim() - 2))), 0, beyond)
        return torch.nn.functional.pad(logs, shape, value=-torch.inf) if beyond else logs

    def widened(self, logs: Tensor, block: Tensor) -> Tensor:
        """Logs of all states ``(n, K)``, of those of the states of the blocks ``(n, w)``."""
        if int(block[0]) == self.all:
            return logs
        places = self.places(block).to(logs.device)
        wide = logs.new_full((len(block), self.num_states + 1), -torch.inf)
        wide = wide.scatter(1, places, logs.masked_fill(places == self.num_states, -torch.inf))
        return wide[:, :-1]

    def narrowed(self, logs: Tensor, block: Tensor) -> Tensor:
        """Logs of the states of the blocks ``(n, w)``, of those of all states ``(n, K)``."""
        if int(block[0]) == self.all:
            return logs
        wide = torch.nn.functional.pad(logs, (0, 1), value=-torch.inf)
        return wide.gather(1, self.places(block).to(wide.device))

    def places(self, block: Tensor) -> Tensor:
        """The states of blocks, ``(n, w)``; K beyond them."""
        starts, members, sizes, width = self.states
        places = torch.arange(width)
        states = members[(starts[block].unsqueeze(-1) + places).clamp(max=len(members) - 1)]
        return states.masked_fill(places >= sizes[block].unsqueeze(-1), self.num_states)

    def _parts(self, source: int, target: int) -> list[tuple[slice, Callable[..., Tensor]]]:
        """As :meth:`parts`, as functions of the scores, so that they can be computed again."""
        size, rows = self.size(source), max(1, CHUNK // self.size(target))
        some = [slice(begin, min(begin + rows, size)) for begin in range(0, size, rows)]
        return [(part, self._part(source, part, target)) for part in some]

    def _part(self, source: int, part: slice, target: int) -> Callable[..., Tensor]:
        rows: Any = part
        if source < self.all and self.is_matrix:
            rows = self.states_of(source)[part].to(self.scores[0].device)
        elif source < self.all:  # with inner products the states of a block stand together
            first = int(self.states.starts[source])
            rows = slice(first + part.start, first + part.stop)

        def logs(leave: Tensor, enter: Tensor | None, log_block_probs: Tensor | None) -> Tensor:
            if enter is None or log_block_probs is None:
                if target == self.all:
                    return leave[rows]
                columns = self.states_of(target).to(leave.device)
                return leave[rows if isinstance(rows, slice) else rows.unsqueeze(-1), columns]
            if target == self.all:
                scores = at_least_single(leave[rows] @ enter.mT)
                return log_softmax_of_parts(scores, self.states.sizes, log_block_probs[rows])
            first, last = self.states.starts[target : target + 2].tolist()
            scores = at_least_single(leave[rows] @ enter[first:last].mT)
            return scores.log_softmax(-1) + log_block_probs[rows, target : target + 1]

        return logs


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
