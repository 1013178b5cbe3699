"""Evidence and its gradient by compiled loops over whole sequences: chains of constant matrices.

The gradient is taken in the same loops: expected transitions, and where observations are symbols
their expected counts, are added up as the backward pass goes, so that a table ``(K, V)`` of
log-probabilities is enough, and nothing of size N T K is written but the forward messages. How
numbers are scaled and watched is said in :mod:`.message_passing`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .._precision import differentiable_gradient, in_full_precision
from .._threads import MILLISECOND, threads_for
from .products import accumulated

LIMITS = {  # smallest normal number, and relative precision
    dtype: (float(np.finfo(dtype).tiny), float(np.finfo(dtype).eps))
    for dtype in map(np.dtype, ("float32", "float64"))
}
WIDEST = 128  # states; for more, matrix products of torch are faster
FEW = 4  # states, up to which a long sequence goes in pieces
LONG = 100  # steps of each piece, from which that pays


@cache  # it imports Numba, when it is first called
def _kernels() -> Any:
    return import_module("._numba_evidence", __package__)


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


def expected_counts(chain: Uniform) -> tuple[Tensor, ...] | None:
    """Log evidence ``(G, n)``, and its gradients by initial, transition and logs, of their dtype.

    None if the numbers of a sequence left their range, those of float64 too.
    """
    found = _counts(chain)
    if found is None and chain.logs.dtype != torch.float64:
        wide = {name: getattr(chain, name).double() for name in chain._fields[:3]}
        found = _counts(chain._replace(**wide))
        found = found and tuple(part.to(chain.logs.dtype) for part in found)
    return found


def _counts(chain: Uniform) -> tuple[Tensor, ...] | None:
    """Log evidence and its gradients in the dtype of the chain; None out of its range."""
    groups = _groups(chain)
    for group in groups:
        group.forward(kept=True)
        if not group.exact.all():
            return None
    found = [group.backward(np.ones(group.count, group.dtype)) for group in groups]
    if any(parts is None for parts in found):
        return None
    return _evidence(groups), *_gradients(found, chain)


class _Pass(NamedTuple):
    """A forward pass: what it has found, and what its backward pass reads.

    Attributes:
        evidence: ``(n,)``.
        exact: ``(n,)``, where it is.
        sure: ``(n,)``, where that needs no bound of what steps may have lost.
        ends: ``(n, K)``, last messages.
        alpha: Messages, flat; none if they are not kept.
        total: Their sums before they were scaled, flat; as these.
    """

    evidence: np.ndarray
    exact: np.ndarray
    sure: np.ndarray
    ends: np.ndarray
    alpha: np.ndarray
    total: np.ndarray


class _Back(NamedTuple):
    """Expected counts of a backward pass; those of transitions are over their probabilities."""

    starts: np.ndarray
    pairs: np.ndarray
    emitted: np.ndarray


class _Sweep:
    """Forward and backward passes over sequences, or pieces of them."""

    def __init__(self, data: Any, packed: np.ndarray, size: int) -> None:
        self.kernels = kernels = _kernels()
        self.data, self.packed, self.size = data, packed, size
        self.count, self.steps = len(data.lengths), int(data.lengths.max())
        self.alone = self.count < kernels.LANES // 2  # one sequence after the other
        self.width = 1 if self.alone else kernels.LANES
        self.tiles = -(-self.count // self.width)

    @property
    def work(self) -> int:
        """Multiplications, about."""
        return self.count * self.steps * self.size * (self.size + 16)

    @property
    def threads(self) -> int:
        """How many the work is worth: each has a millisecond of it."""
        return min(torch.get_num_threads(), self.tiles, 1 + self.work // MILLISECOND)

    def _run(self, loop: Callable[..., Any], *arguments: Any, results: Sequence[Any]) -> list[Any]:
        """Run over all tiles, and return what each thread does; each has results of its own."""
        bounds = [self.tiles * part // len(results) for part in range(len(results) + 1)]

        def run(part: int) -> Any:
            ends = bounds[part], bounds[part + 1]
            return loop(*ends, self.data, *arguments, *results[part])

        return self.kernels.share(run, len(results))

    def forward(self, initial: np.ndarray, kept: bool) -> _Pass:
        """The pass with initial probabilities ``(n, K)``; messages are written if ``kept``."""
        rows = self.tiles * self.width * self.steps if kept else 0
        make = torch.zeros if self.alone else torch.empty  # its rows are all added up
        like = torch.from_numpy(self.packed)
        found = _Pass(
            np.zeros(self.count), np.ones(self.count, np.bool_), np.ones(self.count, np.bool_),
            np.zeros((self.count, self.size), self.packed.dtype),
            make(rows * self.size, dtype=like.dtype).numpy(),
            np.empty(rows, self.packed.dtype),
        )  # fmt: skip
        self._run(
            self.kernels.forward_rows if self.alone else self.kernels.forward_tiles,
            initial, self.packed, kept, found.alpha, found.total, found.evidence, found.exact,
            found.sure, found.ends, results=[()] * self.threads,
        )  # fmt: skip
        return found

    def backward(
        self, found: _Pass, weights: np.ndarray, after: np.ndarray, gamma: Tensor
    ) -> _Back | None:
        """Expected counts, each sequence with its weight; None if numbers left their range.

        They lie in memory of torch, whose products of matrices depend on how that is aligned.

        Args:
            found: The forward pass.
            weights: ``(n,)``.
            after: ``(n, K)``, what follows the last steps.
            gamma: Where the posterior is written, ``(rows, K)``; no rows with symbols.
        """
        threads = range(self.threads)
        message = gamma.new_zeros(self.count * self.steps if self.alone else 0, self.size)
        starts = np.zeros((self.count, self.size), self.packed.dtype)
        pairs = [message.numpy() if self.alone else np.zeros(self.packed.shape) for _ in threads]
        emitted = [np.zeros(self.data.table.shape) for _ in threads]
        lost = self._run(
            self.kernels.backward_rows if self.alone else self.kernels.backward_tiles,
            np.ascontiguousarray(self.packed.T), weights, found.alpha, found.total,
            found.exact.copy(), starts, gamma.numpy(), after, results=list(zip(pairs, emitted)),
        )  # fmt: skip
        if any(lost):
            return None
        counts = _sum(pairs)
        if self.alone:  # the message to a first step is zero
            before = torch.from_numpy(found.alpha).view(-1, self.size)[:-1]
            with threads_for(self.work):
                counts = accumulated(before, message[1:], cancels=False).numpy()
        return _Back(starts, counts, _sum(emitted))

    def bound_losses(self, found: _Pass) -> None:
        """Clear ``exact`` where the pass was not sure, and may have lost more than rounding."""
        losses, eps = _losses(), LIMITS[self.packed.dtype][1]
        self._run(
            losses.bound_rows if self.alone else losses.bound_tiles,
            np.ascontiguousarray(self.packed.T), found.alpha, found.total, eps,
            found.exact & ~found.sure, found.exact, results=[()] * self.threads,
        )  # fmt: skip


@cache
def _tables() -> Any:
    return import_module("._numba_tables", __package__)


@cache
def _pieces() -> Any:
    return import_module("._numba_pieces", __package__)


@cache
def _losses() -> Any:
    return import_module("._numba_losses", __package__)


class _Whole:
    """Sequences as they are."""

    def __init__(self, data: Any, initial: np.ndarray, packed: np.ndarray) -> None:
        self.sweep = _Sweep(data, packed, initial.shape[1])
        self.initial = initial.repeat(self.sweep.count, 0)

    def forward(self, kept: bool) -> tuple[np.ndarray, np.ndarray]:
        """Evidence ``(n,)``, and where it is exact."""
        self.found = self.sweep.forward(self.initial, kept)
        unsure = self.found.exact & ~self.found.sure
        if unsure.any() and kept:
            self.sweep.bound_losses(self.found)
        elif unsure.any():
            self._look_again(unsure.nonzero()[0])
        return self.found.evidence, self.found.exact

    def _look_again(self, rows: np.ndarray) -> None:
        """Bound losses of sequences whose messages were not kept."""
        data = self.sweep.data
        data = data._replace(first=data.first[rows], lengths=data.lengths[rows])
        sweep = _Sweep(data, self.sweep.packed, self.sweep.size)
        again = sweep.forward(self.initial[rows], kept=True)
        sweep.bound_losses(again)
        self.found.exact[rows] = again.exact

    def backward(self, weights: np.ndarray, gamma: Tensor) -> _Back | None:
        """Expected counts: see :class:`_Sweep`."""
        return self.sweep.backward(self.found, weights, np.ones_like(self.found.ends), gamma)


class _Pieces:
    """Few long sequences with few states, in pieces that go side by side.

    A first pass goes through each piece but the first from every state before it, so K times as
    much; then it is known where all begin, and what follows them.
    """

    def __init__(self, data: Any, initial: np.ndarray, packed: np.ndarray) -> None:
        size, lanes = initial.shape[1], _kernels().LANES
        self.whole = _Whole(data, initial, packed)
        length = -(-int(data.lengths.sum()) // lanes)
        counts = -(-data.lengths // length)  # pieces of each sequence
        self.owner = np.repeat(np.arange(len(counts)), counts)
        number = np.arange(len(self.owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        self.later = number > 0
        begin = number * length
        first = data.first[self.owner] + begin * data.along
        lengths = np.minimum(data.lengths[self.owner] - begin, length)
        rows = np.where(self.later, size, 1)
        self.heads = np.concatenate([[0], np.cumsum(rows)])
        each = np.repeat(np.arange(len(rows)), rows)
        self.probe = _Sweep(data._replace(first=first[each], lengths=lengths[each]), packed, size)
        self.pieces = _Sweep(data._replace(first=first, lengths=lengths), packed, size)
        self.initial = np.empty((len(each), size), packed.dtype)
        self.initial[self.heads[:-1][~self.later]] = initial
        self.initial[self.later[each]] = np.tile(packed[:size, :size], (self.later.sum(), 1))

    def forward(self, kept: bool) -> tuple[np.ndarray, np.ndarray]:
        """Evidence ``(n,)``, and where it is exact."""
        self.tried = tried = self.probe.forward(self.initial, kept=False)
        shape = len(self.owner), self.pieces.size
        self.starts, self.finish = np.empty(shape, self.initial.dtype), np.empty(shape)
        total = np.empty(len(self.owner))
        self.good = bool(tried.exact.all() and tried.sure.all())
        if self.good:
            watched, _, _, slack = self.probe.data.limits
            self.good = _pieces().join(
                self.heads, self.later, self.initial[0], self.pieces.packed, tried.evidence,
                tried.ends, slack if watched >= 0 else 0.0, self.starts, self.finish, total,
            )  # fmt: skip
            if kept and self.good:
                self.found = self.pieces.forward(self.starts, kept)
                self.good = bool(self.found.exact.all() and self.found.sure.all())
        if not self.good:
            return self.whole.forward(kept)
        last = np.append(~self.later[1:], True)
        return total[last], np.ones(int(last.sum()), np.bool_)

    def backward(self, weights: np.ndarray, gamma: Tensor) -> _Back | None:
        """Expected counts: see :class:`_Sweep`."""
        if not self.good:
            return self.whole.backward(weights, gamma)
        after = np.empty_like(self.starts)
        parts = self.heads, self.later, self.tried.evidence, self.tried.ends, self.finish
        _pieces().look_back(*parts, after)
        back = self.pieces.backward(self.found, weights[self.owner], after, gamma)
        if back is None:
            return None
        entered = np.divide(
            back.starts, self.starts, out=np.zeros(back.starts.shape), where=self.starts > 0
        )[self.later]
        before = self.finish[:-1][self.later[1:]]
        pairs = back.pairs.copy()
        pairs[: self.pieces.size, : self.pieces.size] += before.T @ entered
        return back._replace(starts=back.starts[~self.later], pairs=pairs)


class _Group:
    """One group of sequences: its arrays as the kernels read them, and its passes."""

    def __init__(
        self, initial: np.ndarray, transition: np.ndarray, logs: np.ndarray,
        symbols: np.ndarray | None, lengths: np.ndarray,
    ) -> None:  # fmt: skip
        kernels, tables = _kernels(), _tables()
        self.dtype, self.size, self.count = logs.dtype, len(transition), len(lengths)
        tiny, eps = LIMITS[self.dtype]
        low, height = math.log(tiny), -(-self.size // 4) * 4
        start, self.packed = self._zeros(1, self.size), self._zeros(height, height)
        least, zeros, most = tables.probabilities(
            initial[None], transition, low, start, self.packed
        )
        tiny *= most
        slack = tiny * self.size / eps
        smallest = math.exp(min(least, 0.0))
        watched = zeros or smallest**2 < slack
        self.by_symbol = symbols is not None
        if symbols is None:
            table, peaks, chosen = self._zeros(0, height), self._zeros(1), np.zeros(0, np.int64)
            self.steps, by_time = logs.shape[1], logs.swapaxes(0, 1)
            self.by_time = by_time.flags.c_contiguous
            across, along = (1, self.count) if self.by_time else (self.steps, 1)
            seen = np.ascontiguousarray(by_time if self.by_time else logs).reshape(-1)
        else:
            num_symbols, self.steps = logs.shape[1], symbols.shape[1]
            table, peaks = self._zeros(num_symbols + 1, height), self._zeros(num_symbols + 1)
            tables.scaled_table(logs, low, table, peaks)
            chosen = np.ascontiguousarray(symbols).reshape(-1)
            seen, across, along = self._zeros(0), self.steps, 1
        limits = (smallest if watched else -1.0, low, 2 * tiny, slack)
        first = across * np.arange(self.count)
        data = kernels.Data(chosen, table, peaks, seen, first, along, lengths, limits)
        few = self.size <= FEW and self.count < kernels.LANES // 2
        long = few and int(lengths.sum()) >= LONG * kernels.LANES
        self.passes = (_Pieces if long else _Whole)(data, start, self.packed)

    def _zeros(self, *shape: int) -> np.ndarray:
        return np.zeros(shape, self.dtype)

    def forward(self, kept: bool) -> None:
        """Evidence, and where it is exact; messages are ``kept`` for the backward pass."""
        self.evidence, self.exact = self.passes.forward(kept)

    def backward(self, weights: np.ndarray) -> tuple[Tensor, ...] | None:
        """Gradients by initial, transition and logs; None if numbers left their range."""
        like = torch.from_numpy(self.packed)
        gamma = like.new_zeros(0 if self.by_symbol else self.count * self.steps, self.size)
        back = self.passes.backward(weights, gamma)
        transitions = like.new_empty(self.size, self.size)
        if back is None or not _tables().finish(back.pairs, self.packed, transitions.numpy()):
            return None
        if self.by_symbol:
            counts = torch.from_numpy(back.emitted[:-1, : self.size])
            logs = counts.to(like.dtype, copy=True).T
        elif self.by_time:
            logs = gamma.reshape(self.steps, self.count, self.size).transpose(0, 1)
        else:
            logs = gamma.reshape(self.count, self.steps, self.size)
        starts = torch.from_numpy(back.starts.sum(0, dtype=np.float64))
        return starts.to(like.dtype, copy=True), transitions, logs


class _Evidence(torch.autograd.Function):
    """Log evidence by scaled messages, and whether they were exact; the gradient is analytic."""

    @staticmethod
    def forward(
        ctx: Any, initial: Tensor, transition: Tensor, logs: Tensor, symbols: Tensor | None,
        lengths: Tensor, general: Callable[..., Tensor],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        groups = _groups(Uniform(initial, transition, logs, symbols, lengths))
        for group in groups:
            group.forward(kept=any(ctx.needs_input_grad))
        ctx.save_for_backward(initial, transition, logs)
        ctx.groups, ctx.general = groups, general
        exact = torch.from_numpy(_stack([group.exact for group in groups]))
        ctx.mark_non_differentiable(exact)
        return _evidence(groups), exact

    @staticmethod
    @in_full_precision
    def backward(ctx: Any, weight: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        inputs, groups = ctx.saved_tensors, ctx.groups
        if not torch.is_grad_enabled():
            weights = np.ascontiguousarray(weight.numpy())
            found = [group.backward(row) for group, row in zip(groups, weights)]
            if all(parts is not None for parts in found):
                return (*_gradients(found, inputs), None, None, None)
        exact = torch.from_numpy(_stack([group.exact for group in groups]))

        def evidence(*logs: Tensor) -> Tensor:
            return ctx.general(*logs).reshape(exact.shape).masked_fill(~exact, 0.0)

        return (*differentiable_gradient(evidence, inputs, weight), None, None, None)


def _groups(chain: Uniform) -> list[_Group]:
    """The sequences that share a matrix, as arrays."""
    initial, transition, logs, symbols, lengths = chain
    (count, size), num_states = lengths.shape, initial.size(-1)
    each = zip(
        initial.detach().numpy().reshape(count, num_states),
        transition.detach().numpy().reshape(count, num_states, num_states),
        logs.detach().numpy().reshape(count, *(size,) * (symbols is None), *logs.shape[-2:]),
        [None] * count if symbols is None else symbols.numpy().reshape(count, size, -1),
        lengths.numpy(),
    )
    return [_Group(*parts) for parts in each]


def _evidence(groups: Sequence[_Group]) -> Tensor:
    """``(G, n)``, in the dtype of the chain."""
    return torch.from_numpy(_stack([group.evidence for group in groups]).astype(groups[0].dtype))


def _gradients(found: Sequence[Any], inputs: Sequence[Any]) -> list[Tensor]:
    """Gradients of all groups, each as one tensor of the shape of what it is a gradient by."""
    return [
        (parts[0] if len(parts) == 1 else torch.stack(parts)).reshape(like.shape)
        for parts, like in zip(zip(*found), inputs)
    ]


def _stack(parts: Sequence[np.ndarray]) -> np.ndarray:
    return parts[0][None] if len(parts) == 1 else np.stack(parts)


def _sum(parts: Sequence[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.sum(parts, 0)
