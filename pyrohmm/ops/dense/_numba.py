"""The recursions of Markov chains by compiled loops, on the CPU."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..._choices import MILLISECOND, PIECES, SIDE_BY_SIDE
from .._numba_math import run, share
from ..log_space import largest
from ..masks import exists
from . import _passes, _paths
from ._lanes import LANES
from ._passes import Back, Messages
from ._steps import Data
from .chain import Chain, Gradient

LIMITS = {  # smallest normal number, and relative precision
    dtype: (float(np.finfo(dtype).tiny), float(np.finfo(dtype).eps))
    for dtype in map(np.dtype, ("float32", "float64"))
}


def scaled(
    chain: Chain, dtype: torch.dtype, differentiable: bool, each: bool
) -> tuple[Tensor, Tensor, Gradient]:
    """Evidence by scaled messages: see :func:`.scaling.solve`.

    Returns:
        Log evidence ``(G, n)`` in float64; where it is exact, ``(G, n)``; and the gradient, None if
        numbers left their range on the way back.
    """
    data = _data(chain, dtype)
    shape = chain.lengths.shape
    if not each and _is_long(data):
        pieces = _Pieces(data, differentiable)
        if pieces.good:
            evidence = torch.full(shape, pieces.evidence, dtype=torch.float64)
            exact = torch.ones(shape, dtype=torch.bool)
            return evidence, exact, lambda weight: _gradient(chain, pieces.backward(weight), data)
    passes = _Passes(data, each)
    messages = passes.forward(differentiable)
    unsure = messages.exact & ~messages.sure
    if unsure.any():
        kept = messages if differentiable else passes.forward(True)
        messages.exact[:] = passes.bound_losses(kept, unsure)

    def gradient(weight: Tensor) -> tuple[Tensor, ...] | None:
        return _gradient(chain, passes.backward(messages, weight), data)

    evidence, exact = (torch.from_numpy(part).reshape(shape) for part in messages[:2])
    return evidence, exact, gradient


def filtered(chain: Chain, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Filtered log-probabilities ``(G, n, T, K)``, and where they are exact, ``(G, n)``."""
    passes = _Passes(_data(chain, dtype), each=False)
    found = passes.forward(True)
    exact = torch.from_numpy(found.exact & found.sure).reshape(chain.lengths.shape)
    return passes.view(found.alpha).log_(), exact


def _data(chain: Chain, dtype: torch.dtype) -> Data:
    """The arguments as arrays of probabilities."""
    initial, transition = (part.detach().to(dtype).numpy() for part in chain[:2])
    logs = chain.logs.detach().to(dtype)
    real, num_states, height = initial.dtype, initial.shape[-1], -(-initial.shape[-1] // 4) * 4
    groups, num_steps = len(chain.lengths), chain.num_steps
    tiny, eps = LIMITS[real]
    low = math.log(tiny)
    least = min(initial.min(), transition.min(initial=0.0))
    zeros = not least > -np.inf  # or NaN
    if zeros:
        parts = (part[part > -np.inf] for part in (initial, transition))
        least = min(part.min(initial=0.0) for part in parts)
    matrices = np.zeros((*transition.shape[:2], height, height), real)
    matrices[..., :num_states, :num_states] = _probabilities(transition, low, zeros or least < low)
    tiny *= max(matrices.max(initial=1.0), 1.0)
    slack = tiny * num_states / eps
    smallest = math.exp(min(least, 0.0))
    watched = zeros or not smallest**2 >= slack
    if chain.symbols is None:
        if logs.stride(-1) != 1:
            logs = logs.contiguous()
        table, peaks = np.zeros((groups, 0, height), real), np.zeros((groups, 1), real)
        seen, first, along = _flat(logs)
        chosen = np.zeros(0, np.int64)
    else:
        table, peaks = _scaled_table(logs.numpy(), low, height)
        chosen, first, along = _flat(_codes(chain))
        seen = np.zeros(0, real)
    return Data(
        _probabilities(initial, low, zeros or least < low).reshape(-1, num_states), matrices,
        chosen, table, peaks, seen, first, along, chain.lengths.reshape(-1).numpy(), num_steps,
        (smallest if watched else -1.0, low, 2 * tiny, slack),
    )  # fmt: skip


def _probabilities(logs: np.ndarray, low: float, some_small: bool) -> np.ndarray:
    """Exponentials; what is not zero becomes at least the smallest normal number."""
    if not some_small:
        return np.exp(logs)
    return np.where(
        logs == -np.inf, logs.dtype.type(0), np.exp(np.maximum(logs, low, dtype=logs.dtype))
    )


def _scaled_table(logs: np.ndarray, low: float, height: int) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities ``(G, V + 1, height)`` of symbols over their largest; its logarithms."""
    groups, num_states, num_symbols = logs.shape
    table = np.zeros((groups, num_symbols + 1, height), logs.dtype)
    peaks = np.zeros((groups, num_symbols + 1), logs.dtype)
    peak = logs.max(1)
    peak[peak == -np.inf] = 0.0
    peaks[:, :-1] = peak
    over = _probabilities(logs - peak[:, None], low, True)
    table[:, :-1, :num_states] = over.swapaxes(1, 2)
    table[:, -1, :num_states] = 1.0  # of a missing symbol
    return table, peaks


def _codes(chain: Chain) -> Tensor:
    """Symbols ``(G, n, T)``; V where they are missing."""
    symbols, count = chain.symbols, chain.logs.size(-1)
    assert symbols is not None
    low, high = (int(end) for end in torch.aminmax(symbols))
    if low < 0 or high >= count:
        raise ValueError(
            f"symbols must lie between 0 and V - 1 = {count - 1}, with V that of log_symbols; got "
            f"{low} to {high}."
        )
    symbols = symbols.long()
    return symbols if chain.known is None else symbols.masked_fill(~chain.known, count)


def _flat(tensor: Tensor) -> tuple[np.ndarray, np.ndarray, int]:
    """The memory of ``(G, n, T, *)``, where each sequence begins in it, and from step to step."""
    (groups, size), (over_groups, over, along) = tensor.shape[:2], tensor.stride()[:3]
    length = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride()))
    first = over_groups * np.arange(groups)[:, None] + over * np.arange(size)
    return tensor.as_strided((length,), (1,)).numpy(), first.reshape(-1), along


class _Passes:
    """Forward and backward passes over sequences, on threads.

    Args:
        data: The arguments.
        each: Whether expected transitions are wanted of each sequence.
    """

    def __init__(self, data: Data, each: bool = False) -> None:
        self.data, self.each = data, each
        self.count, self.size = data.initial.shape
        self.groups = data.matrices.shape[1]
        self.alone = each or self.count // self.groups < SIDE_BY_SIDE
        lanes = 1 if self.alone else LANES
        self.tiles = self.groups * -(-self.count // self.groups // lanes)
        self.shape = (self.tiles, data.steps, self.size, lanes)
        self.work = self.count * data.steps * self.size * (self.size + 16)
        parts = self.tiles if self.groups == 1 else self.groups  # of which each has its sums
        threads = min(torch.get_num_threads(), parts, 1 + self.work // MILLISECOND)
        ends = [parts * part // threads * (self.tiles // parts) for part in range(threads + 1)]
        self.bounds = [*pairwise(ends)]

    def _sums(self, shape: tuple[int, ...], apart: bool) -> list[np.ndarray]:
        """Zeros for the sums of each thread; one array if all add to places ``apart``."""
        return (
            [np.zeros(shape)] * len(self.bounds)
            if apart
            else [np.zeros(shape) for _ in self.bounds]
        )

    def forward(self, kept: bool) -> Messages:
        """The pass; messages are written if ``kept``."""
        real, shape = self.data.matrices.dtype, self.shape if kept else (0, 0, 0, 0)
        found = Messages(
            np.zeros(self.count), np.ones(self.count, np.bool_), np.ones(self.count, np.bool_),
            np.zeros((self.count, self.size), real), np.empty(math.prod(shape), real),
            np.empty(shape[0] * shape[1] * shape[3], real),
        )  # fmt: skip
        loop = _passes.forward_rows if self.alone else _passes.forward_tiles
        share(lambda part: loop(*self.bounds[part], self.data, kept, found), len(self.bounds))
        return found

    def view(self, alpha: np.ndarray) -> Tensor:
        """Messages as ``(G, n, T, K)``."""
        by_tile = torch.from_numpy(alpha).reshape(self.groups, -1, *self.shape[1:])
        rows = by_tile.permute(0, 1, 4, 2, 3).flatten(1, 2)
        return rows[:, : self.count // self.groups]

    def bound_losses(self, found: Messages, unsure: np.ndarray) -> np.ndarray:
        """Booleans of the sequences whose pass is exact, from a bound on what unsure ones lost."""
        size, tiny = self.size, self.data.limits[2]
        back = self._back(unsure.copy(), np.ones(self.count))
        raised = back.transposed.copy()
        raised[..., :size, :size] += (size + 2) * tiny
        self._run_back(found, back._replace(transposed=raised, most=LIMITS[raised.dtype][1]))
        exact: np.ndarray = (found.exact & ~unsure) | back.exact
        return exact

    def _back(self, exact: np.ndarray, weights: np.ndarray) -> Back:
        real, shape = self.data.matrices.dtype, (self.count, self.size)
        rows = self.count * self.data.steps if len(self.data.likelihood) else 0
        return Back(
            np.ascontiguousarray(self.data.matrices.swapaxes(-1, -2)), weights,
            np.ones(shape, real), exact, 0.0, np.zeros(shape, real),
            np.zeros((rows, self.size), real),
        )  # fmt: skip

    def _run_back(self, found: Messages, back: Back) -> tuple[bool, np.ndarray, np.ndarray]:
        """Whether a sequence was lost; transitions over their probabilities; counts of symbols."""
        matrices, tables, apart = self.data.matrices, self.data.tables, self.groups > 1
        owners = self.count if self.each else self.groups
        counts = self._sums((len(matrices), owners, *matrices.shape[2:]), apart or self.each)
        emitted = self._sums(tables.shape, apart)
        loop = _passes.backward_rows if self.alone else _passes.backward_tiles

        def run_part(part: int) -> int:
            ends = self.bounds[part]
            lost: int = loop(*ends, self.data, found, back, counts[part], emitted[part])
            return lost

        lost = any(share(run_part, len(self.bounds)))
        return lost, _added(counts), _added(emitted)

    def backward(
        self, found: Messages, weight: Tensor, after: np.ndarray | None = None
    ) -> _Counts | None:
        """Expected counts, each sequence with its weight; None if numbers left their range."""
        back = self._back(found.exact.copy(), weight.double().reshape(-1).numpy())
        lost, counts, emitted = self._run_back(
            found, back if after is None else back._replace(after=after)
        )
        if lost:
            return None
        pairs, sums = counts[..., : self.size, : self.size], emitted[:, :-1, : self.size]
        return _Counts(*map(torch.from_numpy, (back.starts, sums, back.gamma, pairs)))


def _added(sums: list[np.ndarray]) -> np.ndarray:
    """Sum of different arrays."""
    return sums[0] if sums[0] is sums[-1] else np.sum(sums, 0)


class _Counts(NamedTuple):
    """Expected counts of a backward pass."""

    starts: Tensor  # (N, K), posterior of first states
    symbols: Tensor  # (G, V, K)
    states: Tensor  # (N T, K), posterior; no rows with symbols
    pairs: Tensor  # (S, G|N, K, K), transitions over their probabilities


def _gradient(chain: Chain, counts: _Counts | None, data: Data) -> tuple[Tensor, ...] | None:
    """Derivatives by the tensors of the chain; None if numbers left their range."""
    if counts is None:
        return None
    (groups, count), size = chain.lengths.shape, chain.initial.size(-1)
    probs = torch.from_numpy(data.matrices)[..., :size, :size]
    if counts.pairs.size(1) > groups:
        probs = probs.repeat_interleave(count, 1)
    transitions = counts.pairs * probs
    if data.limits[0] >= 0.0:
        transitions.masked_fill_(probs == 0, 0.0)  # messages to what cannot be reached are huge
    if not bool(transitions.isfinite().all()):
        return None
    initial = counts.starts.reshape(groups, count, size)
    if chain.symbols is not None:
        return initial, transitions, counts.symbols.mT
    states = counts.states.reshape(groups, count, -1, size)
    return initial, transitions, states[:, :, : chain.num_steps]


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
        tried = _Passes(probe).forward(False)
        self.good = bool((tried.exact & tried.sure).all())
        if not self.good:
            return
        joined, shift = _chain_of_pieces(tried, size, data.matrices.shape[-1])
        self.evidence = float(tried.evidence[0] + shift)
        over = _Passes(joined)
        along = over.forward(True)
        self.evidence += float(along.evidence[0])
        self.finish = along.alpha.reshape(-1, size)
        watched, slack = data.limits[0] >= 0.0, data.limits[3]
        self.good = bool(along.exact.all() and (not watched or self.finish.min() >= slack))
        if not (self.good and differentiable):
            return
        initial = np.concatenate([data.initial, (self.finish[:-1] @ matrix).astype(real)])
        self.passes = _Passes(pieces._replace(initial=initial))
        self.messages = self.passes.forward(True)
        back = over.backward(along, torch.ones(1))
        self.good = back is not None and bool((self.messages.exact & self.messages.sure).all())
        if back is not None:
            sides = back.states.numpy(), self.finish
            self.after = np.divide(*sides, out=np.zeros_like(sides[1]), where=sides[1] > 0)

    def backward(self, weight: Tensor) -> _Counts | None:
        """Expected counts, times ``weight`` ``(1, 1)``."""
        weights = weight.expand(len(self.finish), 1)
        after = self.after.astype(self.passes.data.matrices.dtype)
        counts = self.passes.backward(self.messages, weights, after)
        if counts is None:
            return None
        starts, initial = counts.starts.double(), torch.from_numpy(self.passes.data.initial)
        entered = torch.where(initial > 0, starts / initial, 0.0)[1:]
        between = torch.from_numpy(self.finish[:-1]).mT @ entered
        return counts._replace(starts=counts.starts[:1], pairs=counts.pairs + between)


def _chain_of_pieces(tried: Messages, size: int, height: int) -> tuple[Data, float]:
    """The pieces as steps of a chain, in float64, and what its log evidence lacks."""
    count = (len(tried.evidence) - 1) // size
    logs, ends = tried.evidence[1:].reshape(count, size), tried.ends[1:].astype(float)
    peak = logs.max(1, keepdims=True)
    matrices = np.zeros((count, 1, height, height))
    matrices[:, 0, :size, :size] = np.exp(logs - peak)[..., None] * ends.reshape(-1, size, size)
    tiny, eps = LIMITS[matrices.dtype]
    joined = Data(
        tried.ends[:1].astype(float), matrices, np.zeros(0, np.int64), np.zeros((1, 0, height)),
        np.zeros((1, 1)), np.zeros((count + 1) * size), np.zeros(1, np.int64), size,
        np.array([count + 1]), count + 1, (-1.0, math.log(tiny), 2 * tiny, tiny * size / eps),
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
