"""The recursions of chains with durations as torch operations, a step at a time.

For any device, and for second derivatives: :func:`forward` has a tape of T steps. Tensors are
those of :class:`.chain.SegmentChain`; a step holds the N * D * K segments that end or begin
there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..log_space import finite_or_zero, logsumexp
from .chain import SegmentChain


def _each(table: Tensor, count: int) -> Tensor:
    """A table ``(G, D, K)`` of groups for each sequence, ``(1|N, D, K)``."""
    return table if len(table) == 1 else table.repeat_interleave(count // len(table), 0)


def _weights(first: Tensor, others: Tensor, place: int | Tensor) -> Tensor:
    """Weights ``(1|N, D, K)`` of segments, of which the one of ``place`` + 1 steps is the first."""
    steps = torch.arange(others.size(1), device=others.device)
    return torch.where((steps == place).unsqueeze(-1), first, others)


def _tables(chain: SegmentChain) -> list[Tensor]:
    """Transitions, and weights of segments: between others, last, first, and both."""
    return [_each(part, len(chain.likelihood)) for part in chain[1:6]]


def _shifted(newest: Tensor, older: Tensor) -> Tensor:
    """Segments ``(N, D, K)``, one step longer, and those that are new."""
    return torch.cat([newest.unsqueeze(1), older[:, :-1]], 1)


def _running(chain: SegmentChain, t: int, arrived: Tensor, before: Tensor | None) -> Tensor:
    """Scores ``(N, D, K)`` of segments up to step t by their duration so far, without its weight.

    Those of sequences that have ended stay as they are.
    """
    if before is None:
        rest = chain.interior.size(1) - 1
        before = torch.nn.functional.pad(arrived.unsqueeze(1), (0, 0, 0, rest), value=-torch.inf)
        return before + chain.likelihood[:, t].unsqueeze(1)
    after = _shifted(arrived, before) + chain.likelihood[:, t].unsqueeze(1)
    alive = (chain.lengths > t).to(after.device)
    return torch.where(alive[:, None, None], after, before)


def forward(chain: SegmentChain, filtering: bool) -> tuple[Tensor, ...]:
    """Forward messages of a chain with durations, in logarithms; differentiable by the chain.

    Args:
        chain: The arguments.
        filtering: Whether to filter states: as if each step were the last, by the weights
            ``right_censored`` and ``both_censored``.

    Returns:
        Of segments that begin at each step and of those that end there, both together with the
        observations before and in them, ``(N, T, K)``; the log evidence ``(N,)``; and log
        p(x_{1:t}, z_t) ``(N, T, K)``, or an empty tensor. Padded steps hold anything.
    """
    steps = chain.likelihood.size(1)
    matrix, interior, right_censored, left_censored, both_censored = _tables(chain)
    arrived, running = chain.initial, None
    arrive, ends, filtered = [], [], []
    for t in range(steps):
        running = _running(chain, t, arrived, running)
        arrive.append(arrived)
        ends.append(logsumexp(running + _weights(left_censored, interior, t), 1))
        if filtering:
            filtered.append(logsumexp(running + _weights(both_censored, right_censored, t), 1))
        if t < steps - 1:
            arrived = logsumexp(ends[-1].unsqueeze(-1) + matrix, -2)
    assert running is not None
    last = (chain.lengths - 1).to(matrix.device).unsqueeze(-1)
    ended = logsumexp(running + _weights(both_censored, right_censored, last), 1)
    where = last.unsqueeze(-1).expand(-1, 1, ended.size(-1))
    scores = torch.stack(ends, 1).scatter(1, where, ended.unsqueeze(1))
    states = torch.stack(filtered, 1) if filtered else ended.new_zeros(0)
    return torch.stack(arrive, 1), scores, logsumexp(ended, -1), states


def backward(
    chain: SegmentChain, arrive: Tensor, ends: Tensor, evidence: Tensor, weight: Tensor
) -> tuple[Tensor, ...]:
    """Derivatives of the evidences times ``weight`` ``(N,)`` by the tensors of the chain.

    ``arrive``, ``ends`` and ``evidence`` are those of :func:`forward`.
    """
    count, steps, num_states = chain.likelihood.shape
    groups, size, _ = chain.interior.shape
    matrix, interior, right_censored, left_censored, both_censored = _tables(chain)
    whole, last = finite_or_zero(evidence), (chain.lengths - 1).to(evidence.device)
    gamma = torch.zeros_like(chain.likelihood)
    sums = [gamma.new_zeros(groups, size, num_states) for _ in range(4)]
    transitions = torch.zeros_like(chain.transition)
    later = gamma.new_full((count, size, num_states), -torch.inf)
    onward = gamma.new_full((count, num_states), -torch.inf)  # after a segment that ends here
    lasts = torch.arange(size, device=last.device)
    for t in range(steps - 1, -1, -1):
        onward = torch.where((last == t).unsqueeze(-1), torch.zeros_like(onward), onward)
        later = _shifted(onward, later) + chain.likelihood[:, t].unsqueeze(1)
        at_end = (t + lasts == last.unsqueeze(-1)).unsqueeze(-1)
        weights = (interior, right_censored) if t > 0 else (left_censored, both_censored)
        scores = later + torch.where(at_end, weights[1], weights[0])
        inside = logsumexp(scores, 1)
        flow = (arrive[:, t] - whole.unsqueeze(-1)).unsqueeze(1) + scores
        shares = flow.exp() * weight[:, None, None]
        covers = shares.flip(1).cumsum(1).flip(1)
        width = min(size, steps - t)
        gamma[:, t : t + width] += covers[:, :width]
        for of, where in zip(sums[:2] if t > 0 else sums[2:], (at_end, ~at_end)):
            of += shares.masked_fill(where, 0.0).reshape(groups, -1, size, num_states).sum(1)
        if t == 0:
            starts = covers[:, 0]
            continue
        row = matrix + inside.unsqueeze(1)
        flow = ends[:, t - 1].unsqueeze(-1) - whole[:, None, None] + row
        pairs = flow.exp() * weight[:, None, None]
        transitions += pairs.reshape(groups, -1, num_states, num_states).sum(1)
        onward = logsumexp(row, -1)
    return starts, transitions, *sums, gamma


def viterbi(chain: SegmentChain) -> Tensor:
    """Most probable paths ``(N, T)``; zeros at padded steps."""
    steps = chain.likelihood.size(1)
    matrix, interior, right_censored, left_censored, both_censored = _tables(chain)
    best = torch.zeros_like(chain.likelihood[..., 0], dtype=torch.long)
    last = (chain.lengths - 1).to(best.device)
    arrived, running = chain.initial, None
    lasted, origin = [], []
    for t in range(steps):
        running = _running(chain, t, arrived, running)
        at_end = (last == t)[:, None, None]
        among, at_last = (
            _weights(left_censored, interior, t),
            _weights(both_censored, right_censored, t),
        )
        score, longest = (running + torch.where(at_end, at_last, among)).max(1)
        lasted.append(longest)
        arrived, source = (score.unsqueeze(-1) + matrix).max(-2)
        origin.append(source)
    assert running is not None
    state = (
        (running + _weights(both_censored, right_censored, last.unsqueeze(-1))).amax(1).argmax(-1)
    )
    begin = torch.full_like(state, -1)  # of the segment that is read
    for t in range(steps - 1, -1, -1):
        here = state.unsqueeze(-1)
        opens = (last == t) | ((last > t) & (begin > t))
        source = origin[t].gather(-1, here).squeeze(-1)
        state = torch.where(opens & (last > t), source, state)
        span = lasted[t].gather(-1, state.unsqueeze(-1)).squeeze(-1)
        begin = torch.where(opens, t - span, begin)
        best[:, t] = state.masked_fill(last < t, 0)
    return best


def sample_states(chain: SegmentChain, arrive: Tensor, ends: Tensor, uniform: Tensor) -> Tensor:
    """Paths ``(S, N, T)`` sampled backwards, from the messages of the forward pass.

    ``uniform`` ``(S, N, T, 2)``, numbers from 0 to 1, decide on state and duration.
    """
    states = torch.zeros_like(uniform[..., 0], dtype=torch.long)
    samples, (count, steps, _) = len(states), chain.likelihood.shape
    size = chain.interior.size(1)
    matrix, interior, right_censored, left_censored, both_censored = _tables(chain)
    into = matrix.mT.expand(count, -1, -1)  # row = to
    last = (chain.lengths - 1).to(states.device)
    each = torch.arange(count, device=states.device)
    state = states.new_zeros(samples, count)
    begin = torch.full_like(state, -1)
    for t in range(steps - 1, -1, -1):
        ending, opens = last == t, (last == t) | ((last > t) & (begin > t))
        after = into[each, state].masked_fill(ending[:, None], 0.0)
        chosen = _choose(ends[:, t] + after, uniform[:, :, t, 0])
        state = torch.where(opens, chosen, state)
        span = min(size, t + 1)
        among, at_last = (
            _weights(left_censored, interior, t),
            _weights(both_censored, right_censored, t),
        )
        table = torch.where(ending[:, None, None], at_last, among)[:, :span]
        within = chain.likelihood[:, t + 1 - span : t + 1].flip(1).cumsum(1)
        scores = table + arrive[:, t + 1 - span : t + 1].flip(1) + within  # (N, span, K)
        lasted = _choose(scores.mT[each, state], uniform[:, :, t, 1])
        begin = torch.where(opens, t - lasted, begin)
        states[:, :, t] = state.masked_fill(last < t, 0)
    return states


def _choose(logs: Tensor, uniform: Tensor) -> Tensor:
    """An index for each row of ``logs`` ``(S, N, M)``, with probabilities in proportion to exp."""
    mass = (logs - finite_or_zero(logs.amax(-1, keepdim=True))).exp()
    sums = mass.cumsum(-1)
    place = (sums <= uniform.unsqueeze(-1) * sums[..., -1:]).sum(-1, keepdim=True)
    top = (mass > 0).long() * torch.arange(1, mass.size(-1) + 1, device=mass.device)
    return torch.minimum(place, (top.amax(-1, keepdim=True) - 1).clamp_(min=0)).squeeze(-1)
