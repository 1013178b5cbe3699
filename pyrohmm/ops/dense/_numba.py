"""The recursions of Markov chains by compiled loops, on the CPU."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from ..._checks import check_range
from ..._choices import MILLISECOND, SIDE_BY_SIDE
from .._numba_math import call, copy, kernel, run, share, u64
from . import _backward, _forward
from ._backward import Back
from ._forward import Messages
from ._lanes import _LANES, LANES, Data, _0, _1, load, prepare, reach, starts_of
from .chain import Gradient, Groups

LIMITS = {  # logarithms of the smallest normal number and of the largest; relative precision
    np.dtype(number.dtype): (  # rounded up: its exponential must not be subnormal
        np.log(number.tiny * number.dtype.type(1.001)), np.log(number.max), number.eps,
    )
    for number in (np.finfo(np.float32), np.finfo(np.float64))
}  # fmt: skip
_NO_SYMBOLS = np.zeros(0, np.int64)


def scaled(
    chain: Groups, dtype: torch.dtype, differentiable: bool, each: bool
) -> tuple[Tensor, Tensor | None, Gradient]:
    """Scaled forward algorithm: log evidence, where nothing has underflowed, and its gradient.

    Returns:
        Log evidence ``(G, n)`` in float64; where it is exact, ``(G, n)``, or None if it is
        everywhere; and the gradient, None if numbers left their range on the way back.
    """
    passes, shape = _Passes(_data(chain, dtype), each), chain.lengths.shape
    messages = passes.forward(differentiable)
    if not (messages.sure | ~messages.exact).all():
        kept = messages if differentiable else passes.forward(True)
        messages.exact[:] = passes.bound_losses(kept)
    lost = not messages.exact.all()

    def gradient(weight: Tensor) -> tuple[Tensor, ...] | None:
        return passes.gradient(chain, messages, weight)

    evidence = torch.from_numpy(messages.evidence.reshape(shape))
    exact = torch.from_numpy(messages.exact.reshape(shape)) if lost else None
    return evidence, exact, gradient


def filtered(chain: Groups, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Filtered log-probabilities ``(G, n, T, K)``, and the mask of exact sequences, ``(G, n)``."""
    passes = _Passes(_data(chain, dtype), each=False)
    found = passes.forward(True)
    exact = torch.from_numpy(found.exact & found.sure).reshape(chain.lengths.shape)
    return passes.view(found.alpha).log_(), exact


def _data(chain: Groups, dtype: torch.dtype) -> Data:
    """Convert a chain to arrays of probabilities for the compiled loops."""
    initial, transition = chain.initial.detach().to(dtype), chain.transition.detach().to(dtype)
    logs = chain.logs.detach().to(dtype)
    groups, num_states = len(initial), initial.shape[-1]
    starts = initial.reshape(-1, num_states).numpy()
    if chain.symbols is None:
        logs = logs if logs.stride(-1) == 1 else logs.contiguous()
        table, symbols = np.zeros((groups, num_states, 0), starts.dtype), _NO_SYMBOLS
        likelihood, first, along = _flat(logs)
    else:
        table, likelihood = np.ascontiguousarray(logs.numpy()), starts[0, :0]
        symbols, first, along = _symbols(chain)
    height, count = -(-num_states // 4) * 4, table.shape[-1]
    probs, rows = np.empty_like(starts), count + 1 if count else 0
    matrices = np.zeros((*transition.shape[:2], height, height), starts.dtype)
    tables = np.zeros((groups, rows, height), starts.dtype)
    peaks = np.zeros((groups, count + 1), starts.dtype)
    limits = call(
        prepare, np.ascontiguousarray(starts), np.ascontiguousarray(transition.numpy()), table,
        *LIMITS[starts.dtype], probs, matrices, tables, peaks,
    )  # fmt: skip
    return Data(
        probs, matrices, symbols, tables, peaks, likelihood, first, along,
        chain.lengths.reshape(-1).numpy(), chain.num_steps, limits,
    )  # fmt: skip


def _symbols(chain: Groups) -> tuple[np.ndarray, np.ndarray, int]:
    """Flat memory of the symbols with its strides; V where symbols are missing."""
    assert chain.symbols is not None
    codes, count = chain.symbols.to(torch.long), chain.logs.size(-1)
    check_range("symbols", codes, count, "V - 1", "Do they begin at one? Subtract 1.")
    return _flat(codes if chain.known is None else codes.masked_fill(~chain.known, count))


def _flat(tensor: Tensor) -> tuple[np.ndarray, np.ndarray, int]:
    """Flat memory of ``(G, n, T, *)``, offset of each sequence, and stride between steps."""
    shape, (over_groups, over, along, *_) = tensor.shape, tensor.stride()
    if tensor.is_contiguous():
        flat = tensor.reshape(-1)
    else:
        length = 1 + sum((size - 1) * stride for size, stride in zip(shape, tensor.stride()))
        flat = tensor.as_strided((length,), (1,))
    return flat.numpy(), call(starts_of, *shape[:2], over_groups, over), along


class _Passes:
    """Forward and backward passes over sequences, on threads.

    Args:
        data: The arguments.
        each: Whether expected transitions are wanted of each sequence.
    """

    def __init__(self, data: Data, each: bool = False) -> None:
        self.data = data
        self.count, self.size = data.initial.shape
        self.groups = data.matrices.shape[1]
        self.owners = self.count if each else self.groups  # of expected transitions
        alone = each or self.count // self.groups < SIDE_BY_SIDE
        self.lanes = 1 if alone else LANES
        self.tiles = self.groups * -(-self.count // self.groups // self.lanes)
        work = self.count * data.steps * self.size * (self.size + 16)
        parts = self.tiles if self.groups == 1 else self.groups  # of which each has its sums
        threads = min(torch.get_num_threads(), parts, 1 + work // MILLISECOND)
        ends = [parts * part // threads * (self.tiles // parts) for part in range(threads + 1)]
        self.bounds = [*pairwise(ends)]

    def forward(self, kept: bool) -> Messages:
        """Run the forward pass; messages are stored if ``kept``."""
        real, length = self.data.initial.dtype, self.tiles * self.data.steps * self.lanes * kept
        found = Messages(
            np.zeros(self.count), np.ones(self.count, np.bool_), np.ones(self.count, np.bool_),
            np.empty(length * self.size, real), np.empty(length, real),
        )  # fmt: skip
        loop = _forward.forward_rows if self.lanes == 1 else _forward.forward_tiles
        arrays = tuple(self.data), kept, tuple(found)
        share(lambda part: call(loop, *self.bounds[part], *arrays), len(self.bounds))
        return found

    def view(self, alpha: np.ndarray) -> Tensor:
        """Messages as ``(G, n, T, K)``."""
        shape = self.groups, -1, self.data.steps, self.size, self.lanes
        rows = torch.from_numpy(alpha).reshape(shape).permute(0, 1, 4, 2, 3).flatten(1, 2)
        return rows[:, : self.count // self.groups]

    def bound_losses(self, found: Messages) -> np.ndarray:
        """Mask of exact sequences, by a bound on underflow losses."""
        size, tiny, unsure = self.size, self.data.limits[2], found.exact & ~found.sure
        back = _backward.begin_back(self.data, unsure, np.ones(self.count))
        back.transposed[..., :size, :size] += (size + 2) * tiny
        self._run_back(found, back._replace(most=float(LIMITS[self.data.initial.dtype][2])))
        exact: np.ndarray = (found.exact & ~unsure) | back.exact
        return exact

    def _run_back(self, found: Messages, back: Back) -> tuple[np.ndarray, np.ndarray, int]:
        """Run the backward pass: transition sums, symbol counts, number of underflows."""
        height = self.data.matrices.shape[2]
        sums = 1 if self.owners > 1 else len(self.bounds)  # several threads add to places apart
        counts = np.zeros((sums, len(self.data.matrices), self.owners, height, height))
        emitted = np.zeros((sums, *self.data.tables.shape))
        loop = _backward.backward_rows if self.lanes == 1 else _backward.backward_tiles
        arrays = tuple(self.data), tuple(found), tuple(back)

        def run_part(part: int) -> int:
            ends, place = self.bounds[part], part % sums
            lost: int = call(loop, *ends, *arrays, counts[place], emitted[place])
            return lost

        lost = sum(share(run_part, len(self.bounds)))
        if sums == 1:
            return counts[0], emitted[0], lost
        return counts.sum(0), emitted.sum(0), lost

    def gradient(self, chain: Groups, found: Messages, weight: Tensor) -> tuple[Tensor, ...] | None:
        """Derivatives by the tensors of the chain; None if numbers left their range."""
        weights = weight.to(torch.float64).reshape(-1).numpy()
        back = _backward.begin_back(self.data, found.exact, weights)
        counts, emitted, lost = self._run_back(found, back)
        matrices, (groups, rows), size = self.data.matrices, self.data.tables.shape[:2], self.size
        pairs = np.empty((*counts.shape[:2], size, size), matrices.dtype)
        symbols = np.empty((groups, size, max(rows - 1, 0)), matrices.dtype)
        if lost or not call(_backward.finish, counts, emitted, matrices, pairs, symbols):
            return None
        if chain.symbols is None:
            symbols = back.gamma.reshape(*chain.lengths.shape, -1, size)[:, :, : chain.num_steps]
        starts = back.starts.reshape(*chain.lengths.shape, size)
        return torch.from_numpy(starts), torch.from_numpy(pairs), torch.from_numpy(symbols)


# Best paths, and samples of paths --------------------------------------------------------------


@kernel
def viterbi_lanes(first, last, initial, transition, likelihood, lengths, best):
    """Most probable paths of many sequences; a tile of them is a unit of work."""
    steps, groups, num_states, _ = transition.shape
    size, height = u64(num_states), u64((num_states + 3) // 4 * 4)
    count, real = lengths.shape[0] // groups, likelihood.dtype
    packed = np.full(height * height, -np.inf, real)
    scores = np.full((best.shape[1], height * _LANES), -np.inf, real)
    reached, seen = np.full(height * _LANES, -np.inf, real), np.zeros(height * _LANES, real)
    zero, peak = real.type(0), np.zeros(LANES, real)
    offsets, active = np.zeros(LANES, np.uint64), np.zeros(LANES, np.bool_)
    states = np.zeros(LANES, np.uint64)
    tiles, current = (count + LANES - 1) // LANES, -1  # which matrix is packed
    for tile in range(first, last):
        g, start = tile // tiles, tile // tiles * count + tile % tiles * LANES
        width = min(LANES, (g + 1) * count - start)
        longest = lengths[start : start + width].max()
        for t in range(longest):
            score = scores[t]
            for i in range(LANES):
                active[i] = i < width and t < lengths[start + i]
                offsets[i] = u64((start + i) * best.shape[1] + t) * size
            if t == 0:
                for i in range(width):
                    for k in range(num_states):
                        reached[u64(k) * _LANES + u64(i)] = initial[start + i, k]
            else:
                wanted = g if steps == 1 else (t - 1) * groups + g
                if wanted != current:
                    current, matrix = wanted, transition[wanted // groups, g]
                    for j, k in np.ndindex(num_states, num_states):
                        packed[j * height + k] = matrix[j, k]
                reach(reached, scores[t - 1], packed, height)
            load(seen, _LANES, likelihood.ravel(), offsets, active, size, zero)
            for i in range(_LANES):
                peak[i] = -np.inf
            for k in range(size):
                for i in range(_LANES):
                    x = reached[k * _LANES + i] + seen[k * _LANES + i]
                    score[k * _LANES + i] = x
                    peak[i] = x if x > peak[i] else peak[i]
            for i in range(_LANES):
                peak[i] = peak[i] if peak[i] > -np.inf else zero
            for k in range(size):
                for i in range(_LANES):
                    score[k * _LANES + i] -= peak[i]
        for t in range(longest - 1, -1, -1):  # the first of the best predecessors
            score, matrix = scores[t], transition[min(t, steps - 1), g]
            for i in range(width):
                end = lengths[start + i] - 1
                if t <= end:
                    place, state, choice = u64(i), states[i], _0
                    top = score[place] + (matrix[_0, state] if t < end else zero)
                    for k in range(_1, size):
                        x = score[k * _LANES + place] + (matrix[k, state] if t < end else zero)
                        if x > top:
                            top, choice = x, u64(k)
                    states[i] = choice
                    best[start + i, t] = choice


@kernel
def best_rows(first, last, initial, transition, likelihood, lengths, best, losses):
    """Most probable paths ``best`` ``(N, C, T)`` of few sequences, one after the other, best first.

    Each is one of those before it from the end back to a step where it takes another state, and
    from there the best that leads to it. What such steps lose is kept in order in ``losses``
    ``(N, C)``, before infinite but for the first (Soong and Huang, 1991).
    """
    steps, groups, num_states, _ = transition.shape
    size, longest, count = lengths.shape[0] // groups, likelihood.shape[1], best.shape[1]
    scores = np.empty((longest, num_states), likelihood.dtype)
    origin = np.zeros((3, count), np.int64)  # path that each leaves, the step, its state there
    for i in range(first, last):
        g, end = i // size, lengths[i] - 1
        for t in range(end + 1):
            row = scores[t]
            if t == 0:
                copy(row, initial[i])
            else:
                matrix = transition[0 if steps == 1 else t - 1, g]
                row[:] = -np.inf
                for j in range(num_states):
                    score = scores[t - 1, j]
                    leaving = matrix[j]
                    for k in range(num_states):
                        reached = score + leaving[k]
                        row[k] = reached if reached > row[k] else row[k]
            for k in range(num_states):
                row[k] += likelihood[i, t, k]
            peak = row[0]
            for k in range(1, num_states):
                peak = row[k] if row[k] > peak else peak
            if peak > -np.inf:
                for k in range(num_states):
                    row[k] -= peak
        for c in range(count):
            if losses[i, c] == np.inf:
                break
            fixed, state = end + 1, 0
            if c > 0:
                fixed, state = origin[1, c], origin[2, c]
                for t in range(fixed + 1, end + 1):
                    best[i, c, t] = best[i, origin[0, c], t]
                best[i, c, fixed] = state
            for t in range(fixed - 1, -1, -1):
                row, matrix = scores[t], transition[0 if steps == 1 else min(t, steps - 1), g]
                top, choice = row[0] + matrix[0, state] if t < end else row[0], 0
                for k in range(1, num_states):
                    score = row[k] + matrix[k, state] if t < end else row[k]
                    if score > top:
                        top, choice = score, k
                for k in range(num_states if c < count - 1 else 0):
                    score = row[k] + matrix[k, state] if t < end else row[k]
                    loss, place = losses[i, c] + (top - score), count - 1
                    if k != choice and loss < losses[i, place]:
                        while place > c + 1 and losses[i, place - 1] > loss:
                            losses[i, place] = losses[i, place - 1]
                            for part in range(3):
                                origin[part, place] = origin[part, place - 1]
                            place -= 1
                        losses[i, place] = loss
                        origin[0, place], origin[1, place], origin[2, place] = c, t, k
                state = choice
                best[i, c, t] = state


FAR = 2.0**400  # by which products of two factors stay in the range of numbers


@kernel
def sample_by_rows(first, last, alpha, matrices, lengths, uniform, states):
    """Sample paths backwards from filtered probabilities ``alpha`` ``(N, T, K)``."""
    steps, groups = matrices.shape[:2]
    size, num_states = lengths.shape[0] // groups, alpha.shape[2]
    sums = np.empty(num_states)
    for i in range(first, last):
        g, end = i // size, lengths[i] - 1
        for s in range(states.shape[0]):
            state = 0
            for t in range(end, -1, -1):
                row, matrix, total = alpha[i, t], matrices[min(t, steps - 1), g], 0.0
                for k in range(num_states):
                    prob = np.float64(matrix[k, state]) if t < end else 1.0
                    total += (np.float64(row[k]) * FAR) * (prob * FAR)
                    sums[k] = total
                bound, state = uniform[s, i, t] * total, 0
                for k in range(num_states - 1):  # no jump that cannot be foreseen
                    state += not sums[k] > bound
                states[s, i, t] = state


def best_paths(chain: Groups, count: int) -> tuple[Tensor, Tensor]:
    """Most probable paths ``(G, n, C, T)``, zeros at padded steps; which of them there are."""
    (groups, size), num_states = chain.lengths.shape, chain.initial.size(-1)
    initial, transition, lengths = chain.initial.flatten(0, 1), chain.transition, chain.lengths
    likelihood = chain.likelihood.flatten(0, 1).contiguous()
    best = torch.zeros(len(likelihood), count, likelihood.size(1), dtype=torch.long)
    losses = torch.full((len(likelihood), count), torch.inf, dtype=torch.float64)
    losses[:, 0] = 0.0
    parts = initial.contiguous(), transition.contiguous(), likelihood, lengths.reshape(-1)
    work = likelihood[0].numel() * num_states
    if count == 1 and size >= SIDE_BY_SIDE:
        tiles = -(-size // LANES)
        run(viterbi_lanes, groups * tiles, work * size // tiles, *parts, best.squeeze(1))
    else:
        run(best_rows, groups * size, work, *parts, best, losses)
    return best.reshape(groups, size, count, -1), losses.isfinite().reshape(groups, size, count)


def sample_paths(
    chain: Groups, dtype: torch.dtype, num_samples: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Posterior samples of paths ``(S, G, n, T)``, evidence and mask of exact sequences."""
    passes, shape = _Passes(_data(chain, dtype)), chain.lengths.shape
    found, lengths = passes.forward(True), chain.lengths.reshape(-1)
    alpha = passes.view(found.alpha).flatten(0, 1).contiguous()
    uniform = torch.rand(num_samples, *alpha.shape[:2], dtype=torch.float64)
    states = torch.zeros(uniform.shape, dtype=torch.long)
    work = 4 * num_samples * alpha[0].numel()
    run(sample_by_rows, len(lengths), work, alpha, passes.data.matrices, lengths, uniform, states)
    parts = found.evidence, found.exact & found.sure
    evidence, exact = (torch.from_numpy(part).reshape(shape) for part in parts)
    return states.reshape(num_samples, *shape, -1), evidence, exact
