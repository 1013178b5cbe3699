"""The forward pass of any chain in float64, in which nothing leaves the range of numbers.

By torch operations in logarithms on any device; by the compiled loops of ``_numba_segments`` where
these are, but for second-order chains.

Messages ``(n, H, W)`` are log-probabilities of the W states and of what else the next step depends
on. A step takes them along: those of a Markov chain by a matrix (H = 1), those of a second-order
chain, of pairs (i, j), to (j, k) by a matrix for each j, those of a semi-Markov chain by one more
step of each segment (H = D, its steps so far) or by its end. All else follows from a step: for the
gradient it is taken again on the way back, and best paths and samples choose what came before it.

-inf is legal everywhere. A sequence of probability zero has evidence -inf and gradient zero.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .._checks import broadcast_shapes
from .._precision import recomputing, with_gradient
from .._transforms import transforming
from .backends import NUMBA, compiled, pick
from .log_space import finite_or_zero, largest, log, logsumexp, normalised, step_mask

LEAST = -100.0  # log-probability of a transition, above which products of matrices lose nothing
FLOOR = 1e-150  # what factors of products are at least where they are possible
LOSSLESS = 1e-130  # what a sum of such products is above if it loses only rounding
SMALL = 1 << 12  # pairs of states, up to which their sum takes less time than a product
AT_ONCE = 1 << 17  # numbers made at once, of all pairs of states: they stay in the cache
Gradient = Callable[[Tensor], tuple[Tensor, ...]]
Algebra = Any  # what a sum over states is: one of the classes below


class SortedChain(NamedTuple):
    """N sequences in float64, the longest first for torch, and G tables that they share."""

    initial: Tensor  # (N, H, W), log
    likelihood: Tensor  # (N, T, W), log, of the states
    logs: Tensor  # (S, G, R|1, k, k), log, of S transitions: the last for all after the others
    weights: Tensor | None  # (G, 2, 2, D, W), log, of segments: is it the first, is it the last
    owner: Tensor | None  # (N,), which of the G tables each has; None if there is one
    counts: list[int]  # how many sequences have each step, up to the last that one has
    last: Tensor | None  # (N, 1), the last step of each, of what is carried over those after it
    loops: Any  # the module that computes; None for torch

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors by which the log evidence is differentiated."""
        return tuple(part for part in self[:4] if part is not None)

    def replaced(
        self, initial: Tensor, likelihood: Tensor, logs: Tensor, weights: Tensor | None = None
    ) -> SortedChain:
        """Copy of the chain with other tensors."""
        return SortedChain(initial, likelihood, logs, weights, *self[4:])

    def by_rows(self) -> SortedChain:
        """Copy of the chain with one table per sequence, if there are several tables."""
        if self.owner is None:
            return self
        weights = None if self.weights is None else self.weights.index_select(0, self.owner)
        logs = self.logs.index_select(1, self.owner)
        return self._replace(logs=logs, weights=weights, owner=None)

    def place(self, t: int) -> int:
        """Index among the S transitions of the one that leads to step t."""
        return min(t, len(self.logs)) - 1


class Arranged(NamedTuple):
    """Sequences sorted by length, with what restores their order, shape and dtype."""

    chain: SortedChain
    order: Tensor  # (N,), the sequence that each row is
    batch: torch.Size
    dtype: torch.dtype
    shift: Tensor  # (N,), what was subtracted from the logarithms of each sequence

    def restored(self, rows: Tensor, dim: int = 0) -> Tensor:
        """Results of sequences ``(*, N, *)`` in the order and the batch shape of the arguments."""
        if self.chain.last is None:  # else all have kept their place
            rows = rows.index_select(dim, self.order.argsort().to(rows.device))
        return rows.reshape((*rows.shape[:dim], *self.batch, *rows.shape[dim + 1 :]))


def arrange(
    initial: Tensor, logs: Tensor, likelihood: Tensor, lengths: Tensor, batch: torch.Size,
    weights: Tensor | None = None, narrow: bool = True,
) -> Arranged:  # fmt: skip
    """Sequences in float64, the longest first, by differentiable operations.

    Within transforms, which may not know the lengths, and by compiled loops, all keep their place.

    The largest logarithm of each step, and of each matrix of a Markov chain, is subtracted, lest
    sums over steps grow so large that none of their digits are left for the differences.

    Args:
        initial: ``(*b, H, W)``.
        logs: ``(*b, S, R|1, k, k)``: the last of S for all transitions after the others.
        likelihood: ``(*b, T, W)``.
        lengths: ``(*b)``, on the CPU.
        batch: What ``(*b)`` broadcast to.
        weights: ``(*b, 2, 2, D, W)``, of a semi-Markov chain.
        narrow: Whether compiled loops are faster than matrix products of torch.
    """
    lengths, device = lengths.expand(batch).reshape(-1), likelihood.device
    fits = narrow and logs.size(-3) == 1 and not transforming()
    loops = compiled("_numba_segments") if pick(device, fits) is NUMBA else None
    order, longest = torch.arange(len(lengths)), likelihood.size(-2)
    in_place = transforming() or loops is not None
    if not in_place:
        order = lengths.argsort(descending=True, stable=True)
        longest = int(lengths.max()) if len(lengths) else 1
    where = order.to(device)

    def rows(tensor: Tensor, core: int) -> Tensor:
        tail = tensor.shape[tensor.dim() - core :]
        tensor = tensor.double().expand(*batch, *tail).reshape(len(order), *tail)
        return tensor if in_place else tensor.index_select(0, where)

    def grouped(table: Tensor) -> Tensor:
        core = table.shape[-4:]
        return table.double().expand(*lead, *core).reshape(lead.numel(), *core)

    lead = logs.shape[:-4]
    if weights is not None:
        lead = broadcast_shapes(lead, weights.shape[:-4])
        weights = grouped(weights)
    tables, owner = grouped(logs).movedim(1, 0), None
    if lead.numel() > 1:
        owner = torch.arange(lead.numel()).reshape(lead).expand(batch).reshape(-1)[order].to(device)
    seen = rows(likelihood, 2)
    peak, steps = largest(seen, (-1,)), step_mask(lengths[order], seen.size(1), device)
    seen = (seen - peak).masked_fill(~steps.unsqueeze(-1), 0.0)
    shift = peak.squeeze(-1).masked_fill(~steps, 0.0).sum(-1)
    if weights is None:  # segments end at some steps alone
        most = largest(tables, (-3, -2, -1))
        places = torch.arange(seen.size(1) - 1, device=device).clamp(max=len(most) - 1)
        moved = most.flatten(1).index_select(0, places).mT
        moved = moved if owner is None else moved[owner]  # (1|N, T - 1)
        tables, shift = tables - most, shift + moved.masked_fill(~steps[:, 1:], 0.0).sum(-1)
    last = (lengths - 1).unsqueeze(-1).to(device) if in_place else None
    counts = [len(order)] * longest
    if not in_place:
        counts = (lengths > torch.arange(longest).unsqueeze(-1)).sum(-1).tolist()
    tensors = rows(initial, 2), seen, tables, weights
    dtype = torch.promote_types(likelihood.dtype, initial.dtype)
    dtype = torch.promote_types(dtype, logs.dtype)
    return Arranged(SortedChain(*tensors, owner, counts, last, loops), order, batch, dtype, shift)


# What a sum over states is -----------------------------------------------------------------------


class SumProduct:
    """Sum-product semiring in logarithms, by matrix products.

    A possible factor is at least ``FLOOR``, so that a product is zero only if it is impossible, and
    ``LOSSLESS`` if nothing was lost. Where it is less, a second pass sums over all pairs.
    """

    along = staticmethod(logsumexp)

    def __init__(self, logs: Tensor, count: int) -> None:
        self.safe = bool((logs >= LEAST).all())
        self.lossless = LOSSLESS * logs.exp().amax().clamp(min=1.0) if logs.numel() else LOSSLESS
        self.lost = torch.zeros(count, dtype=torch.bool, device=logs.device)
        self.again: Tensor | None = None  # the sequences of the second pass, once that is known

    def over(self, scores: Tensor, logs: Tensor, probs: Tensor) -> Tensor:
        """Log-sum-exp of ``scores`` over transitions, ``(n, R, k)``."""
        if scores.numel() * scores.size(-1) <= SMALL:
            return PairSumProduct.over(scores, logs)
        top = finite_or_zero(scores.detach().amax(-1, keepdim=True))
        factors = (scores - top).exp() if self.safe else _possible(scores - top)
        total = torch.einsum("nri,nrik->nrk", factors, probs)
        found = log(total) + top
        if self.safe:
            return found
        if self.again is None:
            lost = (total > 0) & (total < self.lossless)
            self.lost[: len(lost)] |= lost.flatten(1).any(-1)
            return found
        rows = self.again[self.again < len(scores)]
        for part in rows.split(max(1, AT_ONCE // (scores[0].numel() * scores.size(-1)))):
            table = logs if len(logs) == 1 else logs[part]
            found = found.index_put((part,), PairSumProduct.over(scores[part], table))
        return found

    def twice(self, run: Callable[[Algebra], Any]) -> Any:
        """Run a pass; repeat it with log-sum-exp for sequences that underflowed."""
        found = run(self)
        self.again = self.lost.nonzero().squeeze(-1)
        return run(self) if len(self.again) else found


class PairSumProduct:
    """Sum-product semiring over all pairs of states, differentiable any number of times."""

    along = staticmethod(logsumexp)

    @staticmethod
    def over(scores: Tensor, logs: Tensor, _: Tensor | None = None) -> Tensor:
        """Log-sum-exp of ``scores`` over transitions, ``(n, R, k)``."""
        return logsumexp(scores.unsqueeze(-1) + logs, -2)


class MaxProduct:
    """Max-product semiring."""

    @staticmethod
    def along(scores: Tensor, dim: int) -> Tensor:
        """Largest scores over a dimension."""
        return scores.amax(dim)

    @staticmethod
    def over(scores: Tensor, logs: Tensor, _: Tensor | None = None) -> Tensor:
        """Largest scores after a transition, ``(n, R, k)``: the max-product step of Viterbi."""
        size = max(1, AT_ONCE // (scores[0].numel() * scores.size(-1)))
        parts, tables = scores.unsqueeze(-1).split(size), logs.split(size)
        tables = tables if len(tables) == len(parts) else tables * len(parts)
        return torch.cat([(part + table).amax(-2) for part, table in zip(parts, tables)])


def _possible(logs: Tensor) -> Tensor:
    """Exponentials, floored at ``FLOOR`` except for hard zeros."""
    return torch.where(logs.isneginf(), 0.0, logs.exp().clamp(min=FLOOR))


def log_sums(scores: Tensor, logs: Tensor) -> Tensor:
    """Log-sum-exp of ``scores`` over transitions, ``(n, R, k)``."""
    if transforming():
        return PairSumProduct.over(scores, logs)
    probs = _possible(logs)
    found: Tensor = SumProduct(logs, len(scores)).twice(lambda each: each.over(scores, logs, probs))
    return found


# A step ------------------------------------------------------------------------------------------


def _step(
    algebra: Algebra, t: int, message: Tensor, logs: Tensor, probs: Tensor,
    weights: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Messages ``(n, H, W)`` of step t, before its observation, from those of the step before."""
    if weights is None:
        moved: Tensor = algebra.over(_fibres(message, logs), logs, probs)
        return moved
    ended = algebra.along(message + _lasting(weights, t - 1, False), 1).unsqueeze(1)
    return torch.cat([algebra.over(ended, logs, probs), message[:, :-1]], 1)


def _end(t: Any, message: Tensor, weights: Tensor | None = None) -> Tensor:
    """Final messages of sequences that end with step t, segment survival included."""
    return message if weights is None else message + _lasting(weights, t, True)


def _before(
    algebra: Algebra, choose: Callable[[Tensor], Tensor], t: int, place: Tensor, message: Tensor,
    logs: Tensor, weights: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Choose the predecessors ``(*s, n)`` of ``place``: indices of messages of step t - 1."""
    size, row = logs.size(-1), torch.arange(place.size(-1), device=place.device)
    outer, state = place // size, place % size
    into = logs[row % len(logs), outer % logs.size(1), :, state]
    if weights is None:
        scores = _fibres(message, logs)
        return choose(scores[row, outer] + into) * scores.size(1) + outer
    lasted = message + _lasting(weights, t - 1, False)
    origin = choose(algebra.along(lasted, 1) + into)
    age = choose(lasted.mT[row, origin])
    return torch.where(outer > 0, place - size, age * size + origin)


def _fibres(message: Tensor, logs: Tensor) -> Tensor:
    """Reshape messages to ``(n, R, k)``, the states that a transition leaves last."""
    return message.reshape(len(message), logs.size(-1), -1).mT


def _lasting(weights: Tensor, t: Any, is_last: bool) -> Tensor:
    """Log weights ``(n|1, D, W)`` of segments that end with step t, by duration."""
    steps = torch.arange(weights.size(-2), device=weights.device)
    others, first = weights[:, :, int(is_last)].unbind(1)
    return torch.where((steps == t).unsqueeze(-1), first, others)


# The passes --------------------------------------------------------------------------------------


def forward_messages(chain: SortedChain, probs: Tensor, algebra: Algebra) -> list[Tensor]:
    """Forward messages in logarithms, ``(n_t, H, W)`` for each step t."""
    messages = [chain.initial + chain.likelihood[:, :1]]
    for t, count in enumerate(chain.counts[1:], 1):
        message = _step(algebra, t, messages[-1][:count], *_at(chain, probs, t))
        message = message + chain.likelihood[:count, t : t + 1]
        if chain.last is not None:
            message = torch.where((t <= chain.last).unsqueeze(-1), message, messages[-1])
        messages.append(message)
    return messages


def _summed(chain: SortedChain) -> tuple[Algebra, Tensor, list[Tensor]]:
    """Sum-product forward pass: semiring, transition factors, messages."""
    if transforming():
        return PairSumProduct, chain.logs, forward_messages(chain, chain.logs, PairSumProduct)
    algebra, probs = SumProduct(chain.logs, len(chain.initial)), _possible(chain.logs)
    return algebra, probs, algebra.twice(partial(forward_messages, chain, probs))


def _at(chain: SortedChain, probs: Tensor, t: int) -> tuple[Tensor, ...]:
    """Transition tables and segment weights of step t, for sequences still running."""
    place, count = chain.place(t), chain.counts[t]
    tables = chain.logs[place][:count], probs[place][:count]
    return tables if chain.weights is None else (*tables, chain.weights[:count])


def _ends(chain: SortedChain, messages: list[Tensor]) -> list[tuple[Any, Tensor, Tensor | None]]:
    """Last step, messages and weights of sequences grouped by length, the longest first."""
    found, weights = [], chain.weights
    if chain.last is not None:
        return [(chain.last, messages[-1], weights)]
    for t, (message, end) in enumerate(zip(messages, [*chain.counts[1:], 0])):
        if end < len(message):
            if chain.weights is not None and len(chain.weights) > 1:
                weights = chain.weights[end : len(message)]
            found.append((t, message[end:], weights))
    return found[::-1]


def _evidence(chain: SortedChain, messages: list[Tensor]) -> Tensor:
    """Log evidence ``(N,)`` from forward messages."""
    return logsumexp(torch.cat([_end(*parts).flatten(1) for parts in _ends(chain, messages)]), -1)


def solve(chain: SortedChain) -> tuple[Tensor, Gradient]:
    """Log evidence ``(N,)``, and the function from weights ``(N,)`` to its gradient."""
    if chain.loops is not None:
        found: tuple[Tensor, Gradient] = chain.loops.solve(chain)
        return found
    rows = chain.by_rows()
    algebra, probs, messages = _summed(rows)

    def gradient(weight: Tensor) -> tuple[Tensor, ...]:
        initial, states, *tables = _gradient(rows, algebra, probs, messages, weight)
        if chain.owner is not None:
            sums = zip(chain.tensors[2:], (1, 0), tables)
            tables = [torch.zeros_like(x).index_add(d, chain.owner, part) for x, d, part in sums]
        return initial, states, *tables

    return _evidence(rows, messages), gradient


def _gradient(
    chain: SortedChain, algebra: Algebra, probs: Tensor, messages: list[Tensor], weight: Tensor
) -> tuple[Tensor, ...]:
    """Derivatives by the tensors of the evidences times weights ``(N,)``, a step at a time."""
    states, by_logs, by_probs = (torch.zeros_like(x) for x in (chain.likelihood, probs, probs))
    by_weights = [] if chain.weights is None else [torch.zeros_like(chain.weights)]
    flow = messages[-1][:0]
    ends = {t: parts for t, *parts in _ends(chain, messages)}
    for t in range(len(messages) - 1, -1, -1):
        if t in ends:
            first, count = len(flow), len(messages[t])

            def evidence(message: Tensor, *weights: Tensor, t: int = t) -> Tensor:
                return logsumexp(_end(t, message, *weights).flatten(1), -1)

            ending = (part for part in ends[t] if part is not None)
            stopped, *more = _pulled(evidence, weight[first:count], *ending)
            flow = torch.cat([flow, stopped])
            for total, part in zip(by_weights, more):
                total[slice(first, count) if len(total) > 1 else slice(None)] += part
        states[: len(flow), t] = flow.sum(1)
        if t == 0:
            break
        parts = messages[t - 1][: len(flow)], *_at(chain, probs, t)
        flow, *more = _pulled(partial(_step, algebra, t), flow, *parts)
        tables = by_logs[chain.place(t)], by_probs[chain.place(t)], *by_weights
        for total, part in zip(tables, more):
            if part is not None:
                total[: len(part)] += part
    return flow, states, by_logs + by_probs * probs, *by_weights


def _pulled(
    function: Callable[..., Tensor], weights: Tensor, *arguments: Tensor
) -> tuple[Any, ...]:
    """Vector-Jacobian product: derivatives of ``function(*arguments)`` with ``weights``."""
    with torch.inference_mode(False), torch.enable_grad():
        parts = (x.clone() if x.is_inference() else x.detach() for x in (weights, *arguments))
        weights, *leaves = parts
        for leaf in leaves:
            leaf.requires_grad_()
        return torch.autograd.grad(function(*leaves), leaves, weights, allow_unused=True)


# What is asked -----------------------------------------------------------------------------------


def log_evidence(arranged: Arranged) -> Tensor:
    """Log evidence ``(*B)``, differentiable any number of times."""
    chain = arranged.chain
    value = with_gradient(
        lambda *tensors: solve(chain.replaced(*tensors)),
        lambda *tensors: _by_pairs(chain.replaced(*tensors)),
        *chain.tensors, dtype=arranged.dtype,
    )  # fmt: skip
    return arranged.restored(value + arranged.shift).to(arranged.dtype)


def log_evidence_by_pairs(arranged: Arranged) -> Tensor:
    """Log evidence ``(*B)``, by differentiable operations of torch alone."""
    value = _by_pairs(arranged.chain)
    return arranged.restored(value + arranged.shift).to(arranged.dtype)


def _by_pairs(chain: SortedChain) -> Tensor:
    """Log evidence ``(N,)``, by sums over all pairs of states."""
    chain = chain.by_rows()
    return _evidence(chain, forward_messages(chain, chain.logs, PairSumProduct))


@recomputing
def filtered(arranged: Arranged) -> Tensor:
    """Filtered log-probabilities ``(*B, T, W)`` of the states; -inf where padded.

    Each step is taken as the last.
    """
    chain = arranged.chain.by_rows()
    count, num_steps, _ = chain.likelihood.shape
    if chain.loops is not None and not transforming():
        scores = normalised(arranged.chain.loops.filtered(arranged.chain))
    else:
        steps = []
        for t, message in enumerate(_summed(chain)[2]):
            weights = chain.weights if chain.weights is None else chain.weights[: len(message)]
            states = normalised(logsumexp(_end(t, message, weights), 1))
            steps.append(pad(states, (0, 0, 0, count - len(message)), value=-torch.inf))
        scores = pad(torch.stack(steps, 1), (0, 0, 0, num_steps - len(steps)), value=-torch.inf)
    if chain.last is not None:
        after = torch.arange(num_steps, device=scores.device) > chain.last
        scores = scores.masked_fill(after.unsqueeze(-1), -torch.inf)
    return arranged.restored(scores).to(arranged.dtype)


@torch.no_grad()
def viterbi(arranged: Arranged) -> Tensor:
    """Most probable path of the states, ``(*B, T)``; 0 at padded steps."""
    chain = arranged.chain
    if chain.loops is not None:
        return arranged.restored(chain.loops.viterbi(chain))
    chain = chain.by_rows()
    messages = forward_messages(chain, chain.logs, MaxProduct)
    path = _walk_back(chain, MaxProduct, messages, lambda logs: logs.argmax(-1), torch.Size())
    return arranged.restored(path)


def sample_states(arranged: Arranged, num_samples: int) -> Tensor:
    """Sample paths of the states, ``(num_samples, *B, T)``; 0 at padded steps."""
    return sample_paths(arranged, num_samples)[0]


@torch.no_grad()
def sample_paths(arranged: Arranged, num_samples: int) -> tuple[Tensor, Tensor]:
    """As :func:`sample_states`, and the log evidence ``(*B)`` in float64."""
    chain = arranged.chain
    if chain.loops is not None:
        paths, evidence = chain.loops.sample_paths(chain, num_samples)
    else:
        chain = chain.by_rows()
        algebra, _, messages = _summed(chain)
        paths = _walk_back(chain, algebra, messages, drawn, torch.Size([num_samples]))
        evidence = _evidence(chain, messages)
    return arranged.restored(paths, 1), arranged.restored(evidence + arranged.shift)


def _walk_back(
    chain: SortedChain, algebra: Algebra, messages: list[Tensor],
    choose: Callable[[Tensor], Tensor], samples: torch.Size,
) -> Tensor:  # fmt: skip
    """Backtrack paths ``(*S, N, T)`` of the states; 0 at padded steps.

    ``choose`` returns a column for each row of log-probabilities.
    """
    ends = torch.cat([_end(*parts).flatten(1) for parts in _ends(chain, messages)])
    last = choose(ends.expand(*samples, *ends.shape))
    shape = (*samples, *chain.likelihood.shape[:2])
    path = torch.zeros(shape, dtype=torch.long, device=last.device)
    place = last[..., :0]
    for t in range(len(chain.counts) - 1, -1, -1):
        if count := place.size(-1):
            logs, _, *weights = _at(chain, chain.logs, t + 1)
            parts = place, messages[t][:count], logs, *weights
            place = _before(algebra, choose, t + 1, *parts)
        place = torch.cat([place, last[..., place.size(-1) : chain.counts[t]]], -1)
        path[..., : place.size(-1), t] = place % chain.likelihood.size(-1)
    return path


def drawn(logs: Tensor) -> Tensor:
    """Sample a column of each row of unnormalised log-probabilities ``(*n, S)``, ``(*n)``."""
    probs = (logs - finite_or_zero(logs.amax(-1, keepdim=True))).exp()
    sums = probs.cumsum(-1)
    uniform = torch.rand_like(sums[..., :1]) * (1 - 1e-9)
    place = torch.searchsorted(sums, sums[..., -1:] * uniform, right=True)
    return place.squeeze(-1).clamp(max=logs.size(-1) - 1)
