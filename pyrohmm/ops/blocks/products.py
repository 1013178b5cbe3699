"""Sums over the states that follow each state, without keeping a matrix that is too large."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..._precision import at_least_single, full_precision
from ..log_space import finite_or_zero, logsumexp
from ..tensor_cache import cached
from .inner_products import InnerProductTransition

KEPT = 1 << 32  # bytes of a matrix of probabilities that is kept, of 32,768 states in float32
CHUNK = 1 << 21  # probabilities that are computed at one time


class BackwardProducts:
    r"""One step of a backward pass, :math:`\log \sum_j p(j | i) e^{v_j}`, for all K states i.

    The K x K probabilities are computed once, and kept while the vectors of the transition live.
    Where they would take more than 4 GiB they are computed again, some rows at a time, each time.

    Args:
        transition: Of disjoint blocks.
    """

    def __init__(self, transition: InnerProductTransition) -> None:
        self.transition = transition
        self.num_states = len(transition.leave)
        leave, enter = transition.leave, transition.enter
        self.dtype = at_least_single(leave[:0]).dtype
        self._matrix: Tensor | None = None
        if self.num_states**2 * self.dtype.itemsize <= KEPT:
            self._matrix = cached(leave, self._compute, enter, transition.block_logits)

    def __call__(self, log_values: Tensor) -> Tensor:
        """Logs ``(n, K)`` before, of those after, ``(n, K)``, in the same dtype.

        Products are computed in probabilities, and in logarithms where they might be inexact.
        """
        peak = finite_or_zero(log_values.amax(-1, keepdim=True))
        number = torch.finfo(self.dtype)
        scaled = (log_values - peak).exp().to(self.dtype)
        scaled = scaled.masked_fill(scaled < number.tiny, 0.0)  # such numbers are slow, too
        with full_precision(scaled):
            sums = torch.cat([torch.nn.functional.linear(scaled, p) for p in self._parts()], -1)
        found = sums.to(log_values.dtype).log() + peak
        # what was lost in a sum is less than K times the least number
        possible = ~log_values.isneginf().all(-1, keepdim=True)
        unsure = (sums < self.num_states * number.tiny / number.eps) & possible
        states = unsure.any(0).nonzero().squeeze(-1)
        for part in states.split(self._rows_at_once) if len(states) else ():
            logs = self.transition.rows(part).to(log_values.dtype)
            found[:, part] = torch.stack([logsumexp(logs + row, -1) for row in log_values])
        return found

    def forward(self, probs: Tensor) -> Tensor:
        r"""Probabilities of the next state, :math:`\sum_i p_i \, p(j | i)`, ``(n, K)``."""
        probs = probs.to(self.dtype)
        states = probs.any(0).nonzero().squeeze(-1)
        with full_precision(probs):
            if self._matrix is not None and 4 * len(states) > self.num_states:
                return probs @ self._matrix
            found = torch.zeros_like(probs)
            for part in states.split(self._rows_at_once):
                rows = self.transition.rows(part).exp()
                found += probs[:, part] @ rows
        return found

    @property
    def _rows_at_once(self) -> int:
        return max(1, CHUNK // self.num_states)

    def _parts(self) -> Iterator[Tensor]:
        """Probabilities of some rows at a time; of all, where they are kept."""
        if self._matrix is not None:
            yield self._matrix
            return
        for states in torch.arange(self.num_states).split(self._rows_at_once):
            yield self.transition.rows(states).exp()

    def _compute(self) -> Tensor:
        size = self.num_states
        matrix = torch.empty(size, size, dtype=self.dtype, device=self.transition.leave.device)
        for states in torch.arange(size).split(self._rows_at_once):
            torch.exp(self.transition.rows(states), out=matrix[states[0] : states[-1] + 1])
        return matrix
