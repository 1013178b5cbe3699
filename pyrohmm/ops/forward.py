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

from .._checks import broadcast_shapes, check_lengths
from .._precision import recomputing, with_gradient
from .._transforms import refuse_transforms, transforming
from .backends import NUMBA, compiled, pick
from .log_space import finite_or_zero, largest, log, logsumexp, normalised, step_mask

LEAST = -100.0  # log-probability of a transition, above which products of matrices lose nothing
FLOOR = 1e-150  # what factors of products are at least where they are possible
LOSSLESS = 1e-130  # what a sum of such products is above if it loses only rounding
SMALL = 1 << 12  # pairs of states, up to which their sum takes less time than a product
AT_ONCE = 1 << 17  # numbers made at once, of all pairs of states: they stay in the cache
Gradient = Callable[[Tensor], tuple[Tensor, ...]]
Algebra = Any  # what a sum over states is: one of the classes below


class Arranged(NamedTuple):
    """N sequences in float64, and G tables that they share."""

    initial: Tensor  # (N, H, W), log
    likelihood: Tensor  # (N, T, W), log, of the states
    logs: Tensor  # (S, G, R|1, k, k), log, of S transitions: the last for all after the others
    weights: Tensor | None  # (G, 2, 2, D, W), log, of segments: is it the first, is it the last
    owner: Tensor | None  # (N,), which of the G tables each has; None if there is one
    last: Tensor  # (N, 1), the last step of each, of what is carried over those after it
    loops: Any  # the module that computes; None for torch
    shift: Tensor  # (N,), what was subtracted from the logarithms of each sequence
    batch: torch.Size  # of N sequences
    dtype: torch.dtype  # of the arguments

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors by which the log evidence is differentiated."""
        return tuple(part for part in self[:4] if part is not None)

    def replaced(
        self, initial: Tensor, likelihood: Tensor, logs: Tensor, weights: Tensor | None = None
    ) -> Arranged:
        """Copy with other tensors."""
        return Arranged(initial, likelihood, logs, weights, *self[4:])

    def by_rows(self) -> Arranged:
        """Copy with one table per sequence, if there are several tables."""
        if self.owner is None:
            return self
        weights = None if self.weights is None else self.weights.index_select(0, self.owner)
        logs = self.logs.index_select(1, self.owner)
        return self._replace(logs=logs, weights=weights, owner=None)

    def place(self, t: int) -> int:
        """Index among the S transitions of the one that leads to step t."""
        return min(t, len(self.logs)) - 1

    def restored(self, rows: Tensor, dim: int = 0) -> Tensor:
        """Results of sequences ``(*, N, *)`` in the batch shape of the arguments."""
        return rows.reshape((*rows.shape[:dim], *self.batch, *rows.shape[dim + 1 :]))


def arrange(
    initial: Tensor, logs: Tensor, likelihood: Tensor, lengths: Tensor,
    weights: Tensor | None = None, narrow: bool = True,
) -> Arranged:  # fmt: skip
    """Sequences in float64, in rows, by differentiable operations.

    The largest logarithm of each step, and of each matrix of a Markov chain, is subtracted, lest
    sums over steps grow so large that none of their digits are left for the differences.

    Args:
        initial: ``(*b, H, W)``; batch dimensions broadcast.
        logs: ``(*b, S, R|1, k, k)``: the last of S for all transitions after the others.
        likelihood: ``(*b, T, W)``.
        lengths: ``(*b)``.
        weights: ``(*b, 2, 2, D, W)``, of a semi-Markov chain.
        narrow: Whether compiled loops are faster than matrix products of torch.
    """
    lead, device = logs.shape[:-4], likelihood.device
    if weights is not None:
        lead = broadcast_shapes(lead, weights.shape[:-4])
    batch = broadcast_shapes(lead, initial.shape[:-2], likelihood.shape[:-2], lengths.shape)
    lengths = lengths.cpu().long()
    check_lengths(lengths, likelihood.size(-2))
    lengths = lengths.expand(batch).reshape(-1)
    fits = narrow and logs.size(-3) == 1 and not transforming()
    loops = compiled("_numba_segments") if pick(device, fits) is NUMBA else None

    def rows(tensor: Tensor) -> Tensor:
        core = tensor.shape[-2:]
        return tensor.double().expand(*batch, *core).reshape(batch.numel(), *core)

    def grouped(table: Tensor) -> Tensor:
        core = table.shape[-4:]
        return table.double().expand(*lead, *core).reshape(lead.numel(), *core)

    tables, owner = grouped(logs).movedim(1, 0), None
    weights = None if weights is None else grouped(weights)
    if lead.numel() > 1:
        owner = torch.arange(lead.numel()).reshape(lead).expand(batch).reshape(-1).to(device)
    seen = rows(likelihood)
    peak, steps = largest(seen, (-1,)), step_mask(lengths, seen.size(1), device)
    seen = (seen - peak).masked_fill(~steps.unsqueeze(-1), 0.0)
    shift = peak.squeeze(-1).masked_fill(~steps, 0.0).sum(-1)
    if weights is None:  # segments end at some steps alone
        most = largest(tables, (-3, -2, -1))
        places = torch.arange(seen.size(1) - 1, device=device).clamp(max=len(most) - 1)
        moved = most.flatten(1).index_select(0, places).mT
        moved = moved if owner is None else moved[owner]  # (1|N, T - 1)
        tables, shift = tables - most, shift + moved.masked_fill(~steps[:, 1:], 0.0).sum(-1)
    dtype = torch.promote_types(likelihood.dtype, initial.dtype)
    return Arranged(
        rows(initial), seen, tables, weights, owner, (lengths - 1).unsqueeze(-1).to(device), loops,
        shift, batch, torch.promote_types(dtype, logs.dtype),
    )  # fmt: skip


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
            self.lost |= lost.flatten(1).any(-1)
            return found
        for part in self.again.split(max(1, AT_ONCE // (scores[0].numel() * scores.size(-1)))):
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


def _taken(chain: Arranged, algebra: Algebra, t: int, message: Tensor, *parts: Tensor) -> Tensor:
    """Messages after step t, with its log-likelihoods and tables; those of ended rows stay."""
    seen, *tables = parts
    moved = _step(algebra, t, message, *tables) + seen
    return torch.where((t <= chain.last).unsqueeze(-1), moved, message)


def forward_messages(chain: Arranged, probs: Tensor, algebra: Algebra) -> list[Tensor]:
    """Forward messages in logarithms, ``(N, H, W)`` for each step t."""
    messages = [chain.initial + chain.likelihood[:, :1]]
    for t in range(1, chain.likelihood.size(1)):
        messages.append(_taken(chain, algebra, t, messages[-1], *_at(chain, probs, t)))
    return messages


def _summed(chain: Arranged) -> tuple[Algebra, Tensor, list[Tensor]]:
    """Sum-product forward pass: semiring, transition factors, messages."""
    if transforming():
        return PairSumProduct, chain.logs, forward_messages(chain, chain.logs, PairSumProduct)
    algebra, probs = SumProduct(chain.logs, len(chain.initial)), _possible(chain.logs)
    return algebra, probs, algebra.twice(partial(forward_messages, chain, probs))


def _at(chain: Arranged, probs: Tensor, t: int) -> tuple[Tensor, ...]:
    """Log-likelihoods, transition tables and segment weights of step t."""
    place, weights = chain.place(t), [] if chain.weights is None else [chain.weights]
    return chain.likelihood[:, t : t + 1], chain.logs[place], probs[place], *weights


def _evidence(last: Tensor, message: Tensor, weights: Tensor | None = None) -> Tensor:
    """Log evidence ``(N,)`` from the messages of the last step."""
    return logsumexp(_end(last, message, weights).flatten(1), -1)


def solve(chain: Arranged) -> tuple[Tensor, Gradient]:
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

    return _evidence(rows.last, messages[-1], rows.weights), gradient


def _gradient(
    chain: Arranged, algebra: Algebra, probs: Tensor, messages: list[Tensor], weight: Tensor
) -> tuple[Tensor, ...]:
    """Derivatives by the tensors of the evidences times weights ``(N,)``, a step at a time."""
    states, by_logs, by_probs = (torch.zeros_like(x) for x in (chain.likelihood, probs, probs))
    ending = partial(_evidence, chain.last)
    flow, *by_weights = _pulled(ending, weight, messages[-1], *chain.tensors[3:])
    for t in range(len(messages) - 1, 0, -1):
        parts = messages[t - 1], *_at(chain, probs, t)
        flow, seen, *more = _pulled(partial(_taken, chain, algebra, t), flow, *parts)
        states[:, t] = seen.squeeze(1)
        tables = by_logs[chain.place(t)], by_probs[chain.place(t)], *by_weights
        for total, part in zip(tables, more):
            if part is not None:
                total += part
    states[:, 0] = flow.sum(1)
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
    value = with_gradient(
        lambda *tensors: solve(arranged.replaced(*tensors)),
        lambda *tensors: _by_pairs(arranged.replaced(*tensors)),
        *arranged.tensors, dtype=arranged.dtype,
    )  # fmt: skip
    return arranged.restored(value + arranged.shift).to(arranged.dtype)


def _by_pairs(chain: Arranged) -> Tensor:
    """Log evidence ``(N,)``, by sums over all pairs of states."""
    chain = chain.by_rows()
    messages = forward_messages(chain, chain.logs, PairSumProduct)
    return _evidence(chain.last, messages[-1], chain.weights)


@recomputing
def filtered(arranged: Arranged) -> Tensor:
    """Filtered log-probabilities ``(*B, T, W)`` of the states; -inf where padded.

    Each step is taken as the last.
    """
    if arranged.loops is not None and not transforming():
        scores = normalised(arranged.loops.filtered(arranged))
    else:
        chain = arranged.by_rows()
        ends = (_end(t, x, chain.weights) for t, x in enumerate(_summed(chain)[2]))
        scores = torch.stack([normalised(logsumexp(end, 1)) for end in ends], 1)
    after = (torch.arange(scores.size(1), device=scores.device) > arranged.last).unsqueeze(-1)
    return arranged.restored(scores.masked_fill(after, -torch.inf)).to(arranged.dtype)


@torch.no_grad()
def viterbi(arranged: Arranged) -> Tensor:
    """Most probable path of the states, ``(*B, T)``; 0 at padded steps."""
    refuse_transforms("the most probable path")
    if arranged.loops is not None:
        return arranged.restored(arranged.loops.viterbi(arranged))
    chain = arranged.by_rows()
    messages = forward_messages(chain, chain.logs, MaxProduct)
    path = _walk_back(chain, MaxProduct, messages, lambda logs: logs.argmax(-1), torch.Size())
    return arranged.restored(path)


@torch.no_grad()
def sample_paths(arranged: Arranged, num_samples: int) -> tuple[Tensor, Tensor]:
    """Sample paths ``(num_samples, *B, T)``, 0 at padded steps; log evidence in float64."""
    refuse_transforms("samples of paths")
    if arranged.loops is not None:
        paths, evidence = arranged.loops.sample_paths(arranged, num_samples)
    else:
        chain = arranged.by_rows()
        algebra, _, messages = _summed(chain)
        paths = _walk_back(chain, algebra, messages, drawn, torch.Size([num_samples]))
        evidence = _evidence(chain.last, messages[-1], chain.weights)
    return arranged.restored(paths, 1), arranged.restored(evidence + arranged.shift)


def _walk_back(
    chain: Arranged, algebra: Algebra, messages: list[Tensor],
    choose: Callable[[Tensor], Tensor], samples: torch.Size,
) -> Tensor:  # fmt: skip
    """Backtrack paths ``(*S, N, T)`` of the states; 0 at padded steps.

    ``choose`` returns a column for each row of log-probabilities.
    """
    last = chain.last.squeeze(-1)
    ends = _end(chain.last, messages[-1], chain.weights).flatten(1)
    places = [choose(ends.expand(*samples, *ends.shape))]
    for t in range(len(messages) - 1, 0, -1):
        _, logs, _, *weights = _at(chain, chain.logs, t)
        before = _before(algebra, choose, t, places[-1], messages[t - 1], logs, *weights)
        places.append(torch.where(t <= last, before, places[-1]))
    path = torch.stack(places[::-1], -1) % chain.likelihood.size(-1)
    return path.masked_fill(torch.arange(len(messages), device=path.device) > chain.last, 0)


def drawn(logs: Tensor) -> Tensor:
    """Sample a column of each row of unnormalised log-probabilities ``(*n, S)``, ``(*n)``."""
    probs = (logs - finite_or_zero(logs.amax(-1, keepdim=True))).exp()
    sums = probs.cumsum(-1)
    uniform = torch.rand_like(sums[..., :1]) * (1 - 1e-9)
    place = torch.searchsorted(sums, sums[..., -1:] * uniform, right=True)
    return place.squeeze(-1).clamp(max=logs.size(-1) - 1)
