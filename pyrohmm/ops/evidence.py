"""Evidence and its gradient by compiled loops over whole sequences: chains of constant matrices.

The gradient is taken in the same loops: expected transitions, and where observations are symbols
their expected counts, are added up as the backward pass goes, so that a table ``(K, V)`` of
log-probabilities is enough, and nothing of size N T K is written but the forward messages. How
numbers are scaled and watched is said in :mod:`.message_passing`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .._precision import differentiable_gradient, in_full_precision
from .._threads import MILLISECOND, threads_for

LIMITS = {  # smallest normal number, and relative precision
    name: (float(np.finfo(name).tiny), float(np.finfo(name).eps)) for name in ("float32", "float64")
}
WIDEST = 128  # states; for more, matrix products of torch are faster


class Uniform(NamedTuple):
    """Sequences in G groups that share initial probabilities and one matrix each.

    Dimensions of size one may stand anywhere between those named here.

    Attributes:
        initial: ``(G, K)``, log.
        transition: ``(G, K, K)``, log.
        logs: Log-likelihoods ``(G, n, T, K)``, or with ``symbols`` of each ``(G, K, V)``.
        symbols: ``(G, n, T)`` integers up to V, which stands for a missing one.
        lengths: ``(G, n)``, on the CPU.
    """

    initial: Tensor
    transition: Tensor
    logs: Tensor
    symbols: Tensor | None
    lengths: Tensor


def log_evidence(
    chain: Uniform, general: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Log evidence ``(G, n)``, and where it is exact; elsewhere it means nothing.

    Args:
        chain: The arguments, on the CPU and of one dtype.
        general: Computes the same from initial, transition and logs by operations of torch, for
            second derivatives and where only the backward pass leaves the range of numbers.
    """
    return _Evidence.apply(*chain, general)


class _Group:
    """One group of sequences: its arrays as the kernels read them, and its messages."""

    def __init__(
        self, initial: np.ndarray, transition: np.ndarray, logs: np.ndarray,
        symbols: np.ndarray | None, lengths: np.ndarray,
    ) -> None:  # fmt: skip
        self.kernels = kernels = import_module("._numba_evidence", __package__)
        self.dtype, self.size, self.count = logs.dtype, len(transition), len(lengths)
        tiny, eps = LIMITS[self.dtype.name]
        low, slack, height = math.log(tiny), tiny * self.size / eps, -(-self.size // 4) * 4
        self.initial, self.packed = self._zeros(1, self.size), self._zeros(height, height)
        least, zero = kernels.probabilities(initial[None], low, self.initial)
        other, other_zero = kernels.probabilities(transition, low, self.packed)
        smallest = math.exp(min(least, other, 0.0))
        watched = zero or other_zero or smallest**2 < slack
        if symbols is None:
            table, peaks, chosen = self._zeros(0, height), self._zeros(1), np.zeros(0, np.int64)
            self.steps, by_time = logs.shape[1], logs.swapaxes(0, 1)
            self.by_time = by_time.flags.c_contiguous
            layout = (1, self.count) if self.by_time else (self.steps, 1)
            seen = (by_time if self.by_time else logs).reshape(-1)
        else:
            num_symbols, self.steps = logs.shape[1], symbols.shape[1]
            table, peaks = self._zeros(num_symbols + 1, height), self._zeros(num_symbols + 1)
            kernels.scaled_table(logs, low, table, peaks)
            chosen, seen, layout = symbols.reshape(-1), self._zeros(0), (self.steps, 1)
        limits = (smallest if watched else -1.0, low, tiny, slack)
        self.data = kernels.Data(chosen, table, peaks, seen, layout, lengths, limits)
        many = self.count >= kernels.LANES // 2
        self.width = kernels.LANES if many else 1
        self.tiles = -(-self.count // self.width)
        self.loops = (
            (kernels.forward_tiles, kernels.backward_tiles)
            if many
            else (kernels.forward_row, kernels.backward_row)
        )

    def _zeros(self, *shape: int) -> np.ndarray:
        return np.zeros(shape, self.dtype)

    @property
    def _work(self) -> int:
        """Multiplications, about."""
        return self.count * self.steps * self.size * (self.size + 16)

    @property
    def _threads(self) -> int:
        """How many the work is worth: each has a millisecond of it."""
        return min(torch.get_num_threads(), self.tiles, 1 + self._work // MILLISECOND)

    def _run(self, loop: Callable[..., None], *arguments: Any, results: Sequence[Any]) -> None:
        """Run over all tiles; each thread has results of its own."""
        bounds = [self.tiles * part // len(results) for part in range(len(results) + 1)]

        def run(part: int) -> None:
            for tile in range(bounds[part], bounds[part + 1]):
                loop(tile, self.data, *arguments, *results[part])

        self.kernels.share(run, len(results))

    def forward(self, kept: bool) -> None:
        """Evidence, where it is exact, and the messages if they are ``kept``."""
        rows = self.tiles * self.width * self.steps
        make = torch.empty if self.width > 1 else torch.zeros  # its rows are all added up
        like = torch.from_numpy(self.packed)
        self.alpha = make(rows * self.size if kept else 0, dtype=like.dtype).numpy()
        self.total = np.empty(rows, self.dtype)
        self.evidence, self.exact = np.zeros(self.count), np.ones(self.count, np.bool_)
        self._run(
            self.loops[0], self.initial[0], self.packed, kept, self.alpha, self.total,
            self.evidence, self.exact, results=[()] * self._threads,
        )  # fmt: skip

    def backward(self, weights: np.ndarray) -> tuple[Tensor, ...] | None:
        """Gradients by initial, transition and logs; None if numbers left their range.

        They lie in memory of torch, whose products of matrices depend on how that is aligned.
        """
        by_symbol = bool(self.data.symbols.size)
        like = torch.from_numpy(self.packed)
        gamma = like.new_zeros(0 if by_symbol else self.count * self.steps, self.size)
        alone, threads = self.width == 1, range(self._threads)  # one sequence after the other
        message = like.new_zeros(self.count * self.steps if alone else 0, self.size)
        starts = [np.zeros(self.size) for _ in threads]
        pairs = [message.numpy() if alone else np.zeros(self.packed.shape) for _ in threads]
        emitted = [np.zeros(self.data.table.shape if by_symbol else (0, 1)) for _ in threads]
        exact = self.exact.copy()
        self._run(
            self.loops[1], np.ascontiguousarray(self.packed.T), weights, self.alpha, self.total,
            exact, results=[(*own, gamma.numpy()) for own in zip(starts, pairs, emitted)],
        )  # fmt: skip
        counts = _sum(pairs)
        if alone:  # the message to a first step is zero
            before = torch.from_numpy(self.alpha).view(-1, self.size)[:-1]
            with threads_for(self._work):
                counts = (before.mT @ message[1:]).double().numpy()
        transitions = like.new_empty(self.size, self.size)
        finite = self.kernels.finish(counts, self.packed, transitions.numpy())
        if not finite or not np.array_equal(exact, self.exact):
            return None
        if by_symbol:
            logs = torch.from_numpy(_sum(emitted)[:-1, : self.size]).to(like.dtype, copy=True).T
        elif self.by_time:
            logs = gamma.reshape(self.steps, self.count, self.size).transpose(0, 1)
        else:
            logs = gamma.reshape(self.count, self.steps, self.size)
        return torch.from_numpy(_sum(starts)).to(like.dtype, copy=True), transitions, logs


class _Evidence(torch.autograd.Function):
    """Log evidence by scaled messages, and whether they were exact; the gradient is analytic."""

    @staticmethod
    def forward(
        ctx: Any, initial: Tensor, transition: Tensor, logs: Tensor, symbols: Tensor | None,
        lengths: Tensor, general: Callable[..., Tensor],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        kept, (count, size), num_states = any(ctx.needs_input_grad), lengths.shape, initial.size(-1)
        each = zip(
            initial.detach().numpy().reshape(count, num_states),
            transition.detach().numpy().reshape(count, num_states, num_states),
            logs.detach()
            .numpy()
            .reshape(count, *() if symbols is not None else (size,), *logs.shape[-2:]),
            [None] * count if symbols is None else symbols.numpy().reshape(count, size, -1),
            lengths.numpy(),
        )
        groups = [_Group(*parts) for parts in each]
        for group in groups:
            group.forward(kept)
        ctx.save_for_backward(initial, transition, logs)
        ctx.groups, ctx.general = groups, general
        evidence = _stack([group.evidence for group in groups]).astype(groups[0].dtype)
        exact = torch.from_numpy(_stack([group.exact for group in groups]))
        ctx.mark_non_differentiable(exact)
        return torch.from_numpy(evidence).clone(), exact

    @staticmethod
    @in_full_precision
    def backward(ctx: Any, weight: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        inputs, groups = ctx.saved_tensors, ctx.groups
        if not torch.is_grad_enabled():
            weights = np.ascontiguousarray(weight.numpy())
            found = [group.backward(row) for group, row in zip(groups, weights)]
            if all(parts is not None for parts in found):
                gradients = (
                    (parts[0] if len(parts) == 1 else torch.stack(parts)).reshape(like.shape)
                    for parts, like in zip(zip(*found), inputs)
                )
                return (*gradients, None, None, None)
        exact = torch.from_numpy(_stack([group.exact for group in groups]))

        def evidence(*logs: Tensor) -> Tensor:
            return ctx.general(*logs).reshape(exact.shape).masked_fill(~exact, 0.0)

        return (*differentiable_gradient(evidence, inputs, weight), None, None, None)


def _stack(parts: Sequence[np.ndarray]) -> np.ndarray:
    return parts[0][None] if len(parts) == 1 else np.stack(parts)


def _sum(parts: Sequence[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.sum(parts, 0)
