r"""Best paths of chains in blocks of states with missing steps, and the entropy over all paths.

As in :mod:`.block_missing` a step has the w states of its block, or all K where it is missing. No
K x K matrix is made: transitions within a gap are computed some rows at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .block_missing import GappedLogs, Messages
from .log_space import finite_or_zero

SMALL = -1000.0  # a logarithm whose exponential is zero


class _Ranked(NamedTuple):
    """The C best paths into each state of some steps, and where these come from.

    Attributes:
        scores: ``(n, S, C)``, log p(x, z); -inf where there are fewer.
        origins: ``(n, S, C)``, which of the paths into the states of the step before.
    """

    scores: Tensor
    origins: Tensor


def k_best(chain: GappedLogs, count: int) -> tuple[Tensor, Tensor]:
    """The C best paths: states ``(C, N, T)``, 0 where padded, and log p(x, z) ``(N, C)``.

    Of equal paths the first. Where fewer are possible the rest have -inf, and hold states that mean
    nothing.
    """
    within, wide = _ranked(chain, count)
    num_sequences, num_steps = chain.observed.shape
    ends = (chain.observed | chain.missing).sum(1) - 1
    best = chain.seen.new_empty(num_sequences, count)
    states = torch.zeros(count, num_sequences, num_steps, dtype=torch.long)
    pointer = torch.zeros(num_sequences, count, dtype=torch.long)
    for t in range(num_steps - 1, -1, -1):
        for part, mask, number in (
            (within, chain.observed, chain.token),
            (wide, chain.missing, chain.gap),
        ):
            rows = mask[:, t].nonzero().squeeze(-1)
            if not len(rows):
                continue
            last = rows[ends[rows] == t]
            if len(last):
                values, places = _largest(part.scores[number[last, t]].flatten(1), count)
                best[last], pointer[last] = values, places.cpu()
            place = pointer[rows] // count
            if part is within:
                place = chain.transitions.places(chain.path[rows, t]).gather(1, place)
            states[:, rows, t] = place.clamp(max=chain.transitions.num_states - 1).mT
            origins = part.origins[number[rows, t]].flatten(1)
            pointer[rows] = origins.gather(1, pointer[rows].to(origins.device)).cpu()
    return states, best


def entropy(chain: GappedLogs) -> Tensor:
    """Entropy of the posterior over paths in nats, ``(N,)``; 0 where none is possible."""
    step, path, token, gap = chain.transitions, chain.path, chain.token, chain.gap
    forward = chain.forward()
    # of the states before a step, given the state there
    out = Messages(*(torch.zeros_like(part) for part in forward))
    for t in range(1, chain.observed.size(1)):
        known, leaving, entering, inside = chain.arrivals(t)
        if len(known):
            before = token[known, t - 1]
            joint = forward.within[before].unsqueeze(-1) + chain.matrices(known, t)
            out.within[token[known, t]] = _mixed(joint, out.within[before])
        for n in leaving.tolist():
            before, (columns, logs) = gap[n, t - 1], step.columns_of(int(path[n, t]))
            joint = forward.wide[before].unsqueeze(-1) + logs
            out.within[token[n, t], : len(columns)] = _mixed(joint, out.wide[before])
        for n in entering.tolist():
            before, (rows, logs) = token[n, t - 1], step.rows_of(int(path[n, t - 1]))
            joint = forward.within[before, : len(rows), None] + logs
            out.wide[gap[n, t]] = _mixed(joint, out.within[before, : len(rows)])
        if len(inside):
            before, now = gap[inside, t - 1], gap[inside, t]
            arrived = finite_or_zero(step.onward(forward.wide[before])).unsqueeze(-2)
            for some, logs in step.all_rows():
                share = forward.wide[before, some].unsqueeze(-1) + logs - arrived
                out.wide[now] += _surprise(share, out.wide[before, some])
    result = chain.seen.new_zeros(len(path))
    last = (chain.observed | chain.missing).sum(1) - 1
    for n, t in enumerate(last.tolist()):
        kind, numbers = (0, token) if chain.observed[n, t] else (1, gap)
        logs, before = (part[kind][numbers[n, t]] for part in (forward, out))
        result[n] = _mixed(logs.unsqueeze(-1), before).squeeze(-1)
    return result.clamp(min=0.0)


def _mixed(joint: Tensor, before: Tensor) -> Tensor:
    """Entropy ``(*, to)`` of a state and those before it, given the next.

    Args:
        joint: ``(*, from, to)``, log-probabilities, not normalised.
        before: ``(*, from)``, entropy of the states before each.
    """
    return _surprise(joint - finite_or_zero(joint.logsumexp(-2, keepdim=True)), before)


def _surprise(logs: Tensor, before: Tensor) -> Tensor:
    """Sum over the states of :func:`_mixed` whose shares have the logarithms ``(*, from, to)``."""
    logs = logs.clamp(min=SMALL)
    return ((before.unsqueeze(-1) - logs) * logs.exp()).sum(-2)


def _ranked(chain: GappedLogs, count: int) -> tuple[_Ranked, _Ranked]:
    """The best paths into the states of observed steps, and into those of missing ones."""
    step, path, token, gap = chain.transitions, chain.path, chain.token, chain.gap
    initial = chain.log_initial.to(chain.seen)
    sizes = chain.seen.shape, (int(chain.missing.sum()), step.num_states)
    within, wide = (
        _Ranked(
            chain.seen.new_full((*size, count), -torch.inf),
            torch.zeros(*size, count, dtype=torch.long, device=chain.seen.device),
        )
        for size in sizes
    )
    rows = chain.observed[:, 0].nonzero().squeeze(-1)
    first = step.narrowed(initial.expand(len(rows), -1), path[rows, 0])
    within.scores[token[rows, 0], :, 0] = first + chain.seen[token[rows, 0]]
    wide.scores[gap[chain.missing[:, 0], 0], :, 0] = initial
    for t in range(1, chain.observed.size(1)):
        known, leaving, entering, inside = chain.arrivals(t)
        if len(known):
            before, logs = within.scores[token[known, t - 1]], chain.matrices(known, t)
            _keep(within, token[known, t], _extended(before, logs, count))
        for n in leaving.tolist():
            columns, logs = step.columns_of(int(path[n, t]))
            found = _extended(wide.scores[gap[n, t - 1]], logs, count)
            for kept, new in zip(within, found):
                kept[token[n, t], : len(columns)] = new
        now = token[chain.observed[:, t], t]
        within.scores[now] += chain.seen[now].unsqueeze(-1)
        for n in entering.tolist():
            rows, logs = step.rows_of(int(path[n, t - 1]))
            before = within.scores[token[n, t - 1], : len(rows)]
            _keep(wide, gap[n, t], _extended(before, logs, count))
        if len(inside):
            _extend_gaps(chain, wide, gap[inside, t - 1], gap[inside, t])
    return within, wide


def _extend_gaps(chain: GappedLogs, wide: _Ranked, before: Tensor, now: Tensor) -> None:
    """The best paths into missing steps from missing ones, some rows of transitions at a time."""
    count = wide.scores.size(-1)
    for some, logs in chain.transitions.all_rows():
        for source, target in zip(before.tolist(), now.tolist()):
            new = _extended(wide.scores[source, some], logs, count)
            both = [
                torch.cat([wide.scores[target], new.scores], -1),
                torch.cat([wide.origins[target], new.origins + some.start * count], -1),
            ]
            scores, place = _largest(both[0], count)
            wide.scores[target], wide.origins[target] = scores, both[1].gather(-1, place)


def _extended(before: Tensor, logs: Tensor, count: int) -> _Ranked:
    """The best of the paths into ``(*, from, C)``, one step on by ``logs`` ``(*, from, to)``.

    They come from the C states whose best paths are best.
    """
    logs, size = logs.mT, before.size(-2)
    best, states = _largest(logs + before[..., 0].unsqueeze(-2), min(count, size))
    states, order = states.sort(-1)
    none = best.gather(-1, order).isneginf().unsqueeze(-1)  # a state that may be there already
    several = before.unsqueeze(-3).expand(*states.shape[:-1], *before.shape[-2:])
    ranked = several.gather(-2, states.unsqueeze(-1).expand(*states.shape, count))
    joint = logs.gather(-1, states).unsqueeze(-1) + ranked  # (*, to, C, C)
    scores, place = _largest(joint.masked_fill(none, -torch.inf).flatten(-2), count)
    origins = states.gather(-1, place // count) * count + place % count
    return _Ranked(scores, origins)


def _keep(ranked: _Ranked, where: Tensor, new: _Ranked) -> None:
    for kept, each in zip(ranked, new):
        kept[where] = each


def _largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` largest in the last dimension and where they are, of equal ones the first."""
    best: list[Tensor] = []
    places: list[Tensor] = []
    for _ in range(count):
        if places:
            values = values.scatter(-1, places[-1].unsqueeze(-1), -torch.inf)
        largest = values.max(-1)
        best.append(largest.values)
        places.append(largest.indices)
    return torch.stack(best, -1), torch.stack(places, -1)
