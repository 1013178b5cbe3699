"""The recursions of Markov chains by compiled loops, on the CPU."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from ..._choices import MILLISECOND, PIECES, SIDE_BY_SIDE
from .._numba_math import call, run, share
from ..log_space import largest
from ..masks import exists
from . import _backward, _forward, _paths
from ._backward import Back, Counts
from ._forward import Messages
from ._lanes import LANES
from ._steps import Data, prepare, starts_of, symbol_range
from .chain import Chain, Gradient, cast

LIMITS = {  # logarithms of the smallest normal number and of the largest; relative precision
    np.dtype(number.dtype): (  # rounded up: its exponential must not be subnormal
        np.log(number.tiny * number.dtype.type(1.001)), np.log(number.max), number.eps,
    )
    for number in (np.finfo(np.float32), np.finfo(np.float64))
}  # fmt: skip
_NO_SYMBOLS = np.zeros(0, np.int64)


def scaled(
    chain: Chain, dtype: torch.dtype, differentiable: bool, each: bool
) -> tuple[Tensor, Tensor | None, Gradient]:
    """Evidence by scaled messages: see :func:`.scaling.solve`.

    Returns:
        Log evidence ``(G, n)`` in float64; where it is exact, ``(G, n)``, or None if it is
        everywhere; and the gradient, None if numbers left their range on the way back.
    """
    data, shape = _data(chain, dtype), chain.lengths.shape
    if not each and _is_long(data):
        pieces = _Pieces(data, differentiable)
        if pieces.good:
            evidence = torch.full(shape, pieces.evidence, dtype=torch.float64)
            return evidence, None, lambda weight: _gradient(chain, pieces.backward(weight), data)
    passes = _Passes(data, each)
    messages, lost, unsure = passes.forward(differentiable)
    if unsure:
        kept = messages if differentiable else passes.forward(True)[0]
        messages.exact[:] = passes.bound_losses(kept)
        lost = not messages.exact.all()

    def gradient(weight: Tensor) -> tuple[Tensor, ...] | None:
        return _gradient(chain, passes.backward(messages, weight), data)

    evidence = torch.from_numpy(messages.evidence.reshape(shape))
    exact = torch.from_numpy(messages.exact.reshape(shape)) if lost else None
    return evidence, exact, gradient


def filtered(chain: Chain, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Filtered log-probabilities ``(G, n, T, K)``, and where they are exact, ``(G, n)``."""
    passes = _Passes(_data(chain, dtype), each=False)
    found = passes.forward(True)[0]
    exact = torch.from_numpy(found.exact & found.sure).reshape(chain.lengths.shape)
    return passes.view(found.alpha).log_(), exact


def _data(chain: Chain, dtype: torch.dtype) -> Data:
    """The arguments as arrays of probabilities."""
    initial, transition, logs = (cast(part.detach(), dtype) for part in chain[:3])
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


def _symbols(chain: Chain) -> tuple[np.ndarray, np.ndarray, int]:
    """Memory of the symbols: see :func:`_flat`; V where they are missing."""
    assert chain.symbols is not None
    codes, count = cast(chain.symbols, torch.long), chain.logs.size(-1)
    symbols, first, along = _flat(codes)
    low, high = call(symbol_range, symbols, first, along, chain.num_steps)
    if low < 0 or high >= count:
        raise ValueError(
            f"symbols must lie between 0 and V - 1 = {count - 1}, with V that of log_symbols; got "
            f"{low} to {high}."
        )
    if chain.known is None:
        return symbols, first, along
    return _flat(codes.masked_fill(~chain.known, count))


def _flat(tensor: Tensor) -> tuple[np.ndarray, np.ndarray, int]:
    """The memory of ``(G, n, T, *)``, where each sequence begins in it, and from step to step."""
    shape, (over_groups, over, along, *_) = tensor.shape, tensor.stride()
    if tensor.is_contiguous():
        flat = tensor.reshape(-1)
    else:
        length = 1 + sum((n - 1) * stride for n, stride in zip(shape, tensor.stride()))
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

    def forward(self, kept: bool) -> tuple[Messages, int, int]:
        """The pass; messages are written if ``kept``.

        Also how many sequences left the range of numbers, and how many others may have lost mass.
        """
        found = _forward.messages(self.data, self.tiles, self.lanes, kept)
        loop = _forward.forward_rows if self.lanes == 1 else _forward.forward_tiles
        arrays = tuple(self.data), kept, tuple(found)
        share(lambda part: call(loop, *self.bounds[part], *arrays), len(self.bounds))
        return found, *call(_forward.doubts, found.exact, found.sure)

    def view(self, alpha: np.ndarray) -> Tensor:
        """Messages as ``(G, n, T, K)``."""
        shape = self.groups, -1, self.data.steps, self.size, self.lanes
        rows = torch.from_numpy(alpha).reshape(shape).permute(0, 1, 4, 2, 3).flatten(1, 2)
        return rows[:, : self.count // self.groups]

    def bound_losses(self, found: Messages) -> np.ndarray:
        """Which passes are exact, from a bound on what those that are not ``sure`` lost."""
        size, tiny, unsure = self.size, self.data.limits[2], found.exact & ~found.sure
        back = _backward.begin_back(self.data, unsure, np.ones(self.count), found.ends[:0])
        back.transposed[..., :size, :size] += (size + 2) * tiny
        self._run_back(found, back._replace(most=float(LIMITS[found.ends.dtype][2])))
        exact: np.ndarray = (found.exact & ~unsure) | back.exact
        return exact

    def _run_back(self, found: Messages, back: Back) -> tuple[np.ndarray, np.ndarray, int]:
        """Transitions over their probabilities, counts of symbols, and how many were lost."""
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
        whole = (part[0] if len(part) == 1 else part.sum(0) for part in (counts, emitted))
        return *whole, lost

    def backward(
        self, found: Messages, weight: Tensor, after: np.ndarray | None = None
    ) -> Counts | None:
        """Expected counts, each sequence with its weight; None if numbers left their range."""
        weights = cast(weight, torch.float64).reshape(-1).numpy()
        after = found.ends[:0] if after is None else after
        back = _backward.begin_back(self.data, found.exact, weights, after)
        pairs, symbols, lost = self._run_back(found, back)
        return None if lost else Counts(back.starts, back.gamma, pairs, symbols)


def _gradient(chain: Chain, counts: Counts | None, data: Data) -> tuple[Tensor, ...] | None:
    """Derivatives by the tensors of the chain; None if numbers left their range."""
    if counts is None:
        return None
    (groups, count), size = chain.lengths.shape, data.initial.shape[1]
    real, (steps, owners) = data.matrices.dtype, counts.pairs.shape[:2]
    pairs = np.empty((steps, owners, size, size), real)
    symbols = np.empty((len(data.tables), size, max(data.tables.shape[1] - 1, 0)), real)
    if not call(_backward.finish, counts.pairs, counts.symbols, data.matrices, pairs, symbols):
        return None
    if chain.symbols is None:
        symbols = counts.states.reshape(groups, count, -1, size)[:, :, : chain.num_steps]
    starts = counts.starts.reshape(groups, count, size)
    return torch.from_numpy(starts), torch.from_numpy(pairs), torch.from_numpy(symbols)


# One long sequence ------------------------------------------------------------------------------


def _is_long(data: Data) -> bool:
    """Whether there is one sequence, so long and of so few states that it is cut in pieces."""
    return (
        len(data.lengths) == len(data.matrices) == 1
        and data.initial.shape[1] <= PIECES[0]
        and data.lengths[0] >= PIECES[1]
    )


class _Pieces:
    """One long sequence with few states, in pieces that go side by side.

    A first pass goes through each piece but the first from every state before it, so K times as
    much. What it finds are the transitions of a chain of pieces, whose forward and backward
    messages are those at the ends of the pieces.

    Attributes:
        good: Whether no number left its range; else nothing here is of use.
        evidence: Log evidence.
    """

    def __init__(self, data: Data, differentiable: bool) -> None:
        size, real = data.initial.shape[1], data.matrices.dtype
        matrix, length = data.matrices[0, 0, :size, :size], -(-int(data.lengths[0]) // LANES)
        begin = np.arange(0, data.lengths[0], length)
        first, lengths = data.first + begin * data.along, np.minimum(data.lengths - begin, length)
        owner = np.repeat(np.arange(len(begin)), [1] + [size] * (len(begin) - 1))
        starts = np.concatenate([data.initial, np.tile(matrix, (len(begin) - 1, 1))])
        pieces = data._replace(first=first, lengths=lengths, steps=length)
        probe = pieces._replace(initial=starts, first=first[owner], lengths=lengths[owner])
        tried, lost, unsure = _Passes(probe).forward(False)
        self.good = lost + unsure == 0
        if not self.good:
            return
        joined, shift = _chain_of_pieces(tried, size, data.matrices.shape[-1])
        self.evidence = float(tried.evidence[0] + shift)
        over = _Passes(joined)
        along, lost, _ = over.forward(True)
        self.evidence += float(along.evidence[0])
        self.finish = along.alpha.reshape(-1, size)
        watched, slack = data.limits[0] >= 0.0, data.limits[3]
        self.good = lost == 0 and bool(not watched or self.finish.min() >= slack)
        if not (self.good and differentiable):
            return
        initial = np.concatenate([data.initial, (self.finish[:-1] @ matrix).astype(real)])
        self.passes = _Passes(pieces._replace(initial=initial))
        self.messages, lost, unsure = self.passes.forward(True)
        back = over.backward(along, torch.ones(1))
        self.good = back is not None and lost + unsure == 0
        if back is not None:
            sides = back.states, self.finish
            self.after = np.divide(*sides, out=np.zeros_like(sides[1]), where=sides[1] > 0)

    def backward(self, weight: Tensor) -> Counts | None:
        """Expected counts, times ``weight`` ``(1, 1)``."""
        weights = weight.expand(len(self.finish), 1)
        after = self.after.astype(self.passes.data.matrices.dtype)
        counts = self.passes.backward(self.messages, weights, after)
        if counts is None:
            return None
        starts, initial = counts.starts.astype(float), self.passes.data.initial
        entered = np.divide(starts, initial, out=np.zeros_like(starts), where=initial > 0)[1:]
        size = starts.shape[1]
        counts.pairs[0, 0, :size, :size] += self.finish[:-1].T @ entered
        return counts._replace(starts=counts.starts[:1])


def _chain_of_pieces(tried: Messages, size: int, height: int) -> tuple[Data, float]:
    """The pieces as steps of a chain, in float64, and what its log evidence lacks."""
    count = (len(tried.evidence) - 1) // size
    logs, ends = tried.evidence[1:].reshape(count, size), tried.ends[1:].astype(float)
    peak = logs.max(1, keepdims=True)
    matrices = np.zeros((count, 1, height, height))
    matrices[:, 0, :size, :size] = np.exp(logs - peak)[..., None] * ends.reshape(-1, size, size)
    low, _, eps = LIMITS[matrices.dtype]
    tiny = np.exp(low)
    joined = Data(
        tried.ends[:1].astype(float), matrices, np.zeros(0, np.int64), np.zeros((1, 0, height)),
        np.zeros((1, 1)), np.zeros((count + 1) * size), np.zeros(1, np.int64), size,
        np.array([count + 1]), count + 1, (-1.0, low, 2 * tiny, tiny * size / eps),
    )  # fmt: skip
    return joined, float(peak.sum())


# In logarithms ----------------------------------------------------------------------------------


def log_space(chain: Chain, each: bool) -> tuple[Tensor, Gradient]:
    """Log evidence ``(G, n)``, and the gradient, in logarithms and float64."""
    (groups, size), num_states = chain.lengths.shape, chain.initial.size(-1)
    initial, transition, likelihood, lengths, shift = _wide(chain)
    evidence, gamma = likelihood.new_zeros(len(lengths)), torch.zeros_like(likelihood)
    counts = likelihood.new_zeros(len(transition), len(lengths), num_states, num_states)
    run(
        _paths.log_space, len(lengths), 10 * likelihood[0].numel() * num_states, initial,
        transition, transition.mT.contiguous(), transition.exp(), likelihood, lengths, True,
        torch.zeros_like(likelihood), evidence, gamma, counts,
    )  # fmt: skip

    def gradient(weight: Tensor) -> tuple[Tensor, ...]:
        states = gamma.reshape(groups, size, -1, num_states) * weight[..., None, None]
        pairs = counts * weight.reshape(-1, 1, 1)
        if not each:
            pairs = pairs.unflatten(1, (groups, size)).sum(2)
        return states[:, :, 0], pairs, chain.by_logs(states)

    return (evidence + shift).reshape(groups, size), gradient


def filtered_in_log_space(chain: Chain) -> Tensor:
    """Log p(x_{1:t}, z_t) ``(G, n, T, K)`` but for a number at each step; padding is anything."""
    initial, transition, likelihood, lengths, _ = _wide(chain)
    messages, nothing = torch.zeros_like(likelihood), likelihood.new_zeros(0, 0, 0)
    run(
        _paths.log_space, len(lengths), 10 * likelihood[0].numel() * likelihood.size(-1), initial,
        transition, transition.mT.contiguous(), transition.exp(), likelihood, lengths, False,
        messages, likelihood.new_zeros(len(lengths)), nothing, nothing.unsqueeze(0),
    )  # fmt: skip
    return messages.reshape(*chain.lengths.shape, *messages.shape[1:])


def _wide(chain: Chain) -> tuple[Tensor, ...]:
    """Initial, transition, log-likelihood and lengths of N sequences, in float64.

    The largest logarithm of each step and matrix is subtracted, lest sums over steps grow so large
    that none of their digits are left for the differences; the last part is that sum, ``(N,)``.
    """
    initial, transition, likelihood = chain.initial, chain.transition, chain.likelihood
    initial, transition = initial.double().flatten(0, 1), transition.double()
    likelihood, lengths = likelihood.double().flatten(0, 1), chain.lengths.reshape(-1)
    peak, most = largest(likelihood, (-1,)), largest(transition, (-2, -1))
    steps = likelihood.size(1)
    moves = most.flatten(2).expand(max(steps - 1, 0), -1, -1).squeeze(-1).mT  # (G, T - 1)
    moves = moves.repeat_interleave(len(lengths) // len(moves), 0)
    shift = (peak.squeeze(-1) * exists(lengths, steps)).sum(-1)
    shift = shift + (moves * exists(lengths - 1, steps - 1)).sum(-1)
    parts = initial.contiguous(), (transition - most).contiguous(), (likelihood - peak).contiguous()
    return *parts, lengths, shift


def viterbi(chain: Chain) -> Tensor:
    """Most probable paths ``(G, n, T)``; zeros at padded steps."""
    groups, size = chain.lengths.shape
    initial, transition, lengths = chain.initial.flatten(0, 1), chain.transition, chain.lengths
    likelihood = chain.likelihood.flatten(0, 1).contiguous()
    best = torch.zeros(likelihood.shape[:2], dtype=torch.long)
    work, many = likelihood[0].numel() * likelihood.size(-1), size >= SIDE_BY_SIDE
    tiles = -(-size // LANES)
    run(
        _paths.viterbi_lanes if many else _paths.viterbi_rows,
        groups * tiles if many else groups * size, work * size // tiles if many else work,
        initial.contiguous(), transition.contiguous(), likelihood, lengths.reshape(-1), best,
    )  # fmt: skip
    return best.reshape(groups, size, -1)


def sample_states(chain: Chain, messages: Tensor, num_samples: int) -> Tensor:
    """Paths ``(S, G, n, T)`` sampled backwards from log filtered ``messages`` ``(G, n, T, K)``."""
    messages, lengths = messages.flatten(0, 1).contiguous(), chain.lengths.reshape(-1)
    uniform = torch.rand(num_samples, *messages.shape[:2], dtype=messages.dtype)
    states = torch.zeros(uniform.shape, dtype=torch.long)
    low = math.log(torch.finfo(messages.dtype).tiny)
    run(
        _paths.sample_states, len(lengths), 10 * num_samples * messages[0].numel(), messages,
        chain.transition.to(messages.dtype).contiguous(), lengths, low, uniform, states,
    )  # fmt: skip
    return states.reshape(num_samples, *chain.lengths.shape, -1)
