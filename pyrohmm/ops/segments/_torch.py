"""The recursions of chains with durations as torch operations, a step at a time.

For any device, and for second derivatives: :func:`forward` has a tape of T steps. Tensors are
those of :class:`SegmentChain`; a step holds the N * D * K segments that end or begin
there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..._checks import check_broadcast, check_same_device
from ..._transforms import transforming
from ..dense.chain import check_arguments
from ..log_space import finite_or_zero, logsumexp
from ..masks import exists


class SegmentChain(NamedTuple):
    """N sequences in G groups that share a matrix and tables of durations, all in float64."""

    initial: Tensor  # (N, K), log
    transition: Tensor  # (G, K, K), log
    weights: (
        Tensor  # (2, 2, G, D, K), log, of segments by how much is seen: is it first, is it last
    )
    likelihood: Tensor  # (N, T, K), log, 0 at padded steps
    lengths: Tensor  # (N,), on the CPU

    def detach(self) -> SegmentChain:
        """Copy as constants, contiguous in memory."""
        return SegmentChain(*(part.detach().contiguous() for part in self))


class Segmented(NamedTuple):
    """A chain, the batch shape of its N sequences, and the dtype of what it was made of.

    The largest log-likelihood of each step is taken from all of it, so that sums of many steps lose
    fewer digits; ``shift`` ``(N,)`` is what the log evidence lacks.
    """

    chain: SegmentChain
    shift: Tensor
    batch: torch.Size
    dtype: torch.dtype


def arrange(
    log_initial: Tensor,
    log_transition: Tensor,
    log_duration: Tensor,
    log_weights: Tensor,
    log_likelihood: Tensor,
    lengths: Tensor,
) -> Segmented:
    """Check the arguments, and bring them into one form by differentiable operations.

    ``log_weights`` ``(2, 2, *B, K, D)`` become ``weights``.
    """
    parts = check_arguments(log_initial, log_transition.unsqueeze(-3), log_likelihood, lengths)
    num_states = parts.initial.size(-1)
    shape = log_duration.shape
    if len(shape) < 2 or shape[-2] != num_states or shape[-1] < 1:
        raise ValueError(
            f"log_duration must have shape (*B, K, D) with K = {num_states} and D at least 1; got "
            f"{tuple(shape)}."
        )
    check_same_device({"log_likelihood": log_likelihood, "log_duration": log_duration})
    leads = {"log_duration": shape[:-2]}
    batch = check_broadcast({"the other arguments": parts.batch} | leads)
    leads["log_transition"] = log_transition.shape[:-2]
    split = max(
        len(batch) - len(lead) + place + 1 if size != 1 else 0
        for lead in leads.values()
        for place, size in enumerate((1, *lead), start=-1)
    )
    groups, count = math.prod(batch[:split]), math.prod(batch)

    def grouped(table: Tensor) -> Tensor:
        lead, core = table.shape[:-2], table.shape[-2:]
        lead = torch.Size((1,) * (len(batch) - len(lead))) + lead
        table = table.reshape(lead[:split] + core).double()
        return table.expand(batch[:split] + core).reshape(groups, *core)

    lengths = parts.lengths.expand(batch).reshape(count)
    likelihood = parts.logs.double()
    likelihood = likelihood.expand(*batch, *likelihood.shape[-2:])
    likelihood = likelihood.reshape(count, *likelihood.shape[-2:])
    if transforming() or bool((lengths < likelihood.size(1)).any()):
        padded = ~exists(lengths, likelihood.size(1), likelihood.device)
        likelihood = likelihood.masked_fill(padded.unsqueeze(-1), 0.0)
    largest = finite_or_zero(likelihood.detach().amax(-1, keepdim=True))
    likelihood, shift = likelihood - largest, largest.sum((-2, -1))
    initial = parts.initial.double().expand(*batch, num_states).reshape(count, num_states)
    tables = [grouped(table).mT for table in log_weights.flatten(0, 1)]
    weights = torch.stack(tables).unflatten(0, (2, 2))
    chain = SegmentChain(initial, grouped(log_transition), weights, likelihood, lengths)
    dtype = torch.promote_types(parts.dtype, log_duration.dtype)
    return Segmented(chain, shift, batch, dtype)


def _tables(chain: SegmentChain) -> tuple[Tensor, Tensor]:
    """Transitions ``(1|N, K, K)`` and weights ``(2, 2, 1|N, D, K)`` of each sequence."""
    each = 1 if len(chain.transition) == 1 else len(chain.likelihood) // len(chain.transition)
    return chain.transition.repeat_interleave(each, 0), chain.weights.repeat_interleave(each, 2)


def _weights(tables: Tensor, place: int | Tensor) -> Tensor:
    """Weights ``(1|N, D, K)`` of segments, of which the one of ``place`` + 1 steps is the first."""
    steps = torch.arange(tables.size(-2), device=tables.device)
    return torch.where((steps == place).unsqueeze(-1), tables[1], tables[0])


def _shifted(newest: Tensor, older: Tensor) -> Tensor:
    """Segments ``(N, D, K)``, one step longer, and those that are new."""
    return torch.cat([newest.unsqueeze(1), older[:, :-1]], 1)


def _running(chain: SegmentChain, t: int, arrived: Tensor, before: Tensor | None) -> Tensor:
    """Scores ``(N, D, K)`` of segments up to step t by their duration so far, without its weight.

    Those of sequences that have ended stay as they are.
    """
    if before is None:
        rest = chain.weights.size(-2) - 1
        before = torch.nn.functional.pad(arrived.unsqueeze(1), (0, 0, 0, rest), value=-torch.inf)
        return before + chain.likelihood[:, t].unsqueeze(1)
    after = _shifted(arrived, before) + chain.likelihood[:, t].unsqueeze(1)
    alive = (chain.lengths > t).to(after.device)
    return torch.where(alive[:, None, None], after, before)


def forward(
    chain: SegmentChain, filtering: bool, over: Callable[..., Tensor] = logsumexp
) -> tuple[Tensor, ...]:
    """Forward messages of a chain with durations, in logarithms; differentiable by the chain.

    Args:
        chain: The arguments.
        filtering: Whether to filter states: as if each step were the last.
        over: Sum over a dimension, or the maximum.

    Returns:
        Of segments that begin at each step and of those that end there, both together with the
        observations before and in them, ``(N, T, K)``; the log evidence ``(N,)``; and log
        p(x_{1:t}, z_t) ``(N, T, K)``, or an empty tensor. Padded steps hold anything.
    """
    steps = chain.likelihood.size(1)
    matrix, weights = _tables(chain)
    arrived, running = chain.initial, None
    arrive, ends, filtered = [], [], []
    for t in range(steps):
        running = _running(chain, t, arrived, running)
        arrive.append(arrived)
        ends.append(over(running + _weights(weights[:, 0], t), 1))
        if filtering:
            filtered.append(over(running + _weights(weights[:, 1], t), 1))
        if t < steps - 1:
            arrived = over(ends[-1].unsqueeze(-1) + matrix, -2)
    assert running is not None
    last = (chain.lengths - 1).to(matrix.device).unsqueeze(-1)
    ended = over(running + _weights(weights[:, 1], last), 1)
    where = last.unsqueeze(-1).expand(-1, 1, ended.size(-1))
    scores = torch.stack(ends, 1).scatter(1, where, ended.unsqueeze(1))
    states = torch.stack(filtered, 1) if filtered else ended.new_zeros(0)
    return torch.stack(arrive, 1), scores, over(ended, -1), states


def backward(
    chain: SegmentChain, arrive: Tensor, ends: Tensor, evidence: Tensor, weight: Tensor
) -> tuple[Tensor, ...]:
    """Derivatives of the evidences times ``weight`` ``(N,)`` by the tensors of the chain.

    ``arrive``, ``ends`` and ``evidence`` are those of :func:`forward`.
    """
    count, steps, num_states = chain.likelihood.shape
    groups, size = chain.weights.shape[2:4]
    matrix, weights = _tables(chain)
    whole, last = finite_or_zero(evidence), (chain.lengths - 1).to(evidence.device)
    gamma, sums = torch.zeros_like(chain.likelihood), torch.zeros_like(chain.weights)
    transitions = torch.zeros_like(chain.transition)
    later = gamma.new_full((count, size, num_states), -torch.inf)
    onward = gamma.new_full((count, num_states), -torch.inf)  # after a segment that ends here
    lasts = torch.arange(size, device=last.device)
    for t in range(steps - 1, -1, -1):
        onward = torch.where((last == t).unsqueeze(-1), torch.zeros_like(onward), onward)
        later = _shifted(onward, later) + chain.likelihood[:, t].unsqueeze(1)
        at_end = (t + lasts == last.unsqueeze(-1)).unsqueeze(-1)
        first = int(t == 0)
        scores = later + torch.where(at_end, weights[first, 1], weights[first, 0])
        inside = logsumexp(scores, 1)
        flow = (arrive[:, t] - whole.unsqueeze(-1)).unsqueeze(1) + scores
        shares = flow.exp() * weight[:, None, None]
        covers = shares.flip(1).cumsum(1).flip(1)
        width = min(size, steps - t)
        gamma[:, t : t + width] += covers[:, :width]
        for is_last, others in enumerate((at_end, ~at_end)):
            part = shares.masked_fill(others, 0.0).reshape(groups, -1, size, num_states)
            sums[first, is_last] += part.sum(1)
        if t == 0:
            starts = covers[:, 0]
            continue
        row = matrix + inside.unsqueeze(1)
        flow = ends[:, t - 1].unsqueeze(-1) - whole[:, None, None] + row
        pairs = flow.exp() * weight[:, None, None]
        transitions += pairs.reshape(groups, -1, num_states, num_states).sum(1)
        onward = logsumexp(row, -1)
    return starts, transitions, sums, gamma


def viterbi(chain: SegmentChain) -> Tensor:
    """Most probable paths ``(N, T)``; zeros at padded steps."""
    arrive, ends, *_ = forward(chain, False, torch.amax)
    return _walk_back(chain, arrive, ends, 1, lambda logs, *_: logs.argmax(-1))[0]


def sample_states(chain: SegmentChain, arrive: Tensor, ends: Tensor, uniform: Tensor) -> Tensor:
    """Paths ``(S, N, T)`` sampled backwards, from the messages of the forward pass.

    ``uniform`` ``(S, N, T, 2)``, numbers from 0 to 1, decide on state and duration.
    """

    def choose(logs: Tensor, t: int, of_duration: int) -> Tensor:
        return _choose(logs, uniform[:, :, t, of_duration])

    return _walk_back(chain, arrive, ends, len(uniform), choose)


def _walk_back(
    chain: SegmentChain, arrive: Tensor, ends: Tensor, samples: int,
    choose: Callable[[Tensor, int, int], Tensor],
) -> Tensor:  # fmt: skip
    """Paths ``(S, N, T)``, from the last segment to the first.

    Args:
        chain: The arguments.
        arrive: As :func:`forward` returns it.
        ends: As ``arrive``.
        samples: S.
        choose: An index for each row of scores ``(S, N, M)``, of t, of states (0) or durations (1).
    """
    count, steps, _ = chain.likelihood.shape
    matrix, weights = _tables(chain)
    into = matrix.mT.expand(count, -1, -1)  # row = to
    last = (chain.lengths - 1).to(ends.device)
    each = torch.arange(count, device=ends.device)
    states = torch.zeros(samples, count, steps, dtype=torch.long, device=ends.device)
    state = states[..., 0]
    begin = torch.full_like(state, -1)  # of the segment that is read
    for t in range(steps - 1, -1, -1):
        ending, opens = last == t, (last == t) | ((last > t) & (begin > t))
        after = into[each, state].masked_fill(ending[:, None], 0.0)
        state = torch.where(opens, choose(ends[:, t] + after, t, 0), state)
        span = slice(max(t + 1 - chain.weights.size(-2), 0), t + 1)
        ended, among = (_weights(weights[:, is_last], t) for is_last in (1, 0))
        table = torch.where(ending[:, None, None], ended, among)[:, : t + 1]
        entered, within = (part[:, span].flip(1).mT for part in (arrive, chain.likelihood))
        scores = (table.mT + entered)[each, state] + within[each, state].cumsum(-1)  # (S, N, span)
        begin = torch.where(opens, t - choose(scores, t, 1), begin)
        states[:, :, t] = state.masked_fill(last < t, 0)
    return states


def _choose(logs: Tensor, uniform: Tensor) -> Tensor:
    """An index for each row of ``logs`` ``(S, N, M)``, with probabilities in proportion to exp."""
    mass = (logs - finite_or_zero(logs.amax(-1, keepdim=True))).exp()
    sums = mass.cumsum(-1)
    place = (sums <= uniform.unsqueeze(-1) * sums[..., -1:]).sum(-1, keepdim=True)
    top = (mass > 0).long() * torch.arange(1, mass.size(-1) + 1, device=mass.device)
    return torch.minimum(place, (top.amax(-1, keepdim=True) - 1).clamp_(min=0)).squeeze(-1)
