"""Posterior queries of chains in blocks of states, of which some steps may be missing.

Without gradients. All are over the messages of :class:`.messages.LogChain`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..log_space import finite_or_zero
from .messages import Joint, LogChain
from .plan import PlannedChain

SMALL = -1000.0  # a logarithm whose exponential is zero


# Sums over transitions ---------------------------------------------------------------------------


def at_steps(chain: LogChain, tokens: Tensor, shape: torch.Size) -> Tensor:
    """Entries of tokens ``(*S, M)`` placed at their steps ``(*S, *B, T)``; 0 elsewhere."""
    out = tokens.new_zeros(*tokens.shape[:-1], shape.numel())
    out[..., chain.plan.where.to(out.device)] = tokens
    return out.reshape(*tokens.shape[:-1], *shape)


def in_order(chain: LogChain | PlannedChain, rows: Tensor) -> Tensor:
    """Results ``(N, ...)`` of the sequences in the order of the data, of those of the plan."""
    return rows[chain.plan.order.argsort().to(rows.device)]


def predictive(chain: LogChain) -> Tensor:
    """Log p(x_t | x_{1:t-1}) of each token, ``(M,)``; -inf from where it is impossible."""
    messages, subtracted = chain.forward()
    total = torch.cat([logs.logsumexp(-1) for logs in messages]).double() + torch.cat(subtracted)
    before = total[chain.plan.before.to(total.device)]
    before[: chain.counts[0]] = 0.0
    found = torch.where(total.isneginf(), -torch.inf, total - finite_or_zero(before))
    return found.masked_fill(chain.missing.to(found.device), 0.0)


def _shares(
    chain: LogChain, filtered: list[Tensor], smoothed: list[Tensor]
) -> Iterator[tuple[int, Joint, Tensor, Tensor]]:
    r"""Each step t with parts of its transitions, in which the states before and at it are joined.

    By :math:`\log p(z_{t-1} \mid z_t, x_{1:t-1})` ``(r, f, c)``, and
    :math:`p(z_{t-1}, z_t \mid x_{1:T})`.
    """
    for t in range(1, len(chain.steps)):
        for part in chain.joints(t):
            before = filtered[t - 1][part.rows].gather(1, part.before)
            joint = before.unsqueeze(-1) + part.log_probs
            share = joint - finite_or_zero(joint.logsumexp(-2, keepdim=True))
            after = smoothed[t][part.rows].gather(1, part.after)
            yield t, part, share, (share + after.unsqueeze(-2)).exp()


def entropy(chain: LogChain) -> tuple[Tensor, Tensor]:
    """Entropy of the posterior over paths in nats, ``(N,)``; 0 where none is possible.

    Also the logarithm of what remains of all paths, ``(N,)``: -inf where none is possible, else 0.
    """
    filtered = chain.filtered()
    smoothed = chain.smoothed(filtered)
    found = chain.ends([torch.special.entr(logs.exp()).sum(-1) for logs in smoothed])
    for _, part, share, probs in _shares(chain, filtered, smoothed):
        surprise = -(probs * share.clamp(min=SMALL)).sum((-1, -2))
        found.index_add_(0, part.rows, surprise)
    left = chain.ends([logs.logsumexp(-1) for logs in filtered])
    return in_order(chain, found).clamp(min=0.0), in_order(chain, left)


def transition_counts(chain: LogChain, filtered: list[Tensor], smoothed: list[Tensor]) -> Tensor:
    """Expected counts of transitions ``(N, K, K)``, added up in float64."""
    size = chain.transitions.num_states
    counts = torch.zeros(chain.counts[0], size + 1, size + 1, dtype=torch.float64)
    counts = counts.to(chain.device)
    for t, part, _, probs in _shares(chain, filtered, smoothed):
        before, after = states_at(chain, t - 1, part, part.before), states_at(chain, t, part)
        cells = part.rows.view(-1, 1, 1), before.unsqueeze(-1), after.unsqueeze(-2)
        counts.index_put_(cells, probs.double(), accumulate=True)
    return in_order(chain, counts)[:, :-1, :-1].to(chain.seen.dtype)


def states_at(chain: LogChain, t: int, part: Joint, places: Tensor | None = None) -> Tensor:
    """The states at places in the messages of step t, ``(r, c)``; K beyond those of a block."""
    places = part.after if places is None else places
    if chain.wide[t]:
        return places
    rows = part.rows.cpu()
    states = chain.transitions.places(chain.plan.block[chain.steps[t].start + rows])
    return states.to(chain.device).gather(1, places.expand(len(rows), -1))


def all_states(chain: LogChain, logs: list[Tensor], count: int) -> Tensor:
    """Messages of all states at ``count`` steps, ``(count, K)``; -inf where padded."""
    out = chain.seen.new_full((count, chain.transitions.num_states + 1), -torch.inf)
    for step, (t, part) in zip(chain.steps, enumerate(logs)):
        out[chain.plan.where[step].to(chain.device)] = chain.widened(t, part)
    return out[:, :-1]


# Paths -------------------------------------------------------------------------------------------


def k_best(chain: LogChain, count: int) -> tuple[Tensor, Tensor]:
    """The C best paths: states of the tokens ``(C, M)``, and log p(x, z) ``(N, C)``.

    Of equal paths the first. Where fewer are possible the rest have -inf, and hold states that mean
    nothing.
    """
    first = (chain.at_first_step() + chain.seen_at(0)).unsqueeze(-1)
    scores = torch.nn.functional.pad(first, (0, count - 1), value=-torch.inf)
    steps = [(scores, torch.zeros_like(scores, dtype=torch.long))]
    for t in range(1, len(chain.steps)):
        steps.append(_ranked(chain, t, steps[-1][0]))
    best = chain.seen.new_empty(chain.counts[0], count)
    pointer = torch.zeros(chain.counts[0], count, dtype=torch.long, device=chain.device)
    places: list[Tensor] = []
    for t in range(len(steps) - 1, -1, -1):
        ended = chain.counts[t + 1] if t + 1 < len(steps) else 0
        scores, origins = steps[t]
        last = scores[ended:].flatten(1)
        best[ended : chain.counts[t]], pointer[ended : chain.counts[t]] = _largest(last, count)
        here = pointer[: chain.counts[t]]
        places.append((here // count).mT)
        here.copy_(origins.flatten(1).gather(1, here))
    return _states(chain, places[::-1]), in_order(chain, best)


def sample(chain: LogChain, count: int) -> Tensor:
    """Sample paths from the posterior: states of the tokens, ``(count, M)``."""
    messages, places = chain.forward()[0], list[Tensor]()
    for t in range(len(chain.steps) - 1, -1, -1):
        score = messages[t].repeat(count, 1, 1)
        for part in chain.joints(t + 1) if places else ():
            after = places[-1][:, part.rows]
            column = (part.after == after.unsqueeze(-1)).byte().argmax(-1)  # (count, r)
            log_probs = part.log_probs.expand(len(part.rows), -1, -1)
            index = column.mT.unsqueeze(-2).expand(-1, log_probs.size(-2), -1)
            onward = log_probs.gather(-1, index).permute(2, 0, 1)
            score[:, part.rows.unsqueeze(-1), part.before] += onward.to(score.dtype)
        places.append(sample_places(score))
    return _states(chain, places[::-1])


def sample_places(scores: Tensor) -> Tensor:
    """Sample a place in the last dimension by logarithms of weights; beyond it if all are zero."""
    mass = (scores - finite_or_zero(scores.amax(-1, keepdim=True))).exp().cumsum(-1)
    uniform = torch.rand(mass.shape[:-1], dtype=mass.dtype, device=mass.device)
    return (mass <= uniform.unsqueeze(-1) * mass[..., -1:]).sum(-1)


def _states(chain: LogChain, places: list[Tensor]) -> Tensor:
    """The states ``(C, M)`` at places ``(C, n)`` in the messages of each step, on the CPU."""
    last, found = chain.transitions.num_states - 1, []
    for t, (step, place) in enumerate(zip(chain.steps, places)):
        place = place.cpu()
        if not chain.wide[t]:
            blocks = chain.plan.block[step]
            place = place.minimum(chain.transitions.states.sizes[blocks] - 1)  # none is possible
            place = chain.transitions.places(blocks).gather(1, place.mT).mT
        found.append(place.clamp(max=last))
    return torch.cat(found, -1)


def _ranked(chain: LogChain, t: int, before: Tensor) -> tuple[Tensor, Tensor]:
    """The C best paths into the states of step t, ``(n, S, C)``, of those of the step before.

    Their log p(x, z), -inf where there are fewer; and which of the paths before each comes from.
    """
    count, seen = before.size(-1), chain.seen_at(t)
    scores = seen.new_full((*seen.shape, count), -torch.inf)
    origins = torch.zeros_like(scores, dtype=torch.long)
    for part in chain.joints(t):
        places = part.before.expand(len(part.rows), -1)
        values = before[part.rows].gather(1, places.unsqueeze(-1).expand(-1, -1, count))
        new, sources = _extended(values, part.log_probs, count)
        states = places.gather(1, (sources // count).flatten(1)).view_as(sources)
        cells = part.rows.unsqueeze(-1), part.after
        scores[cells] = new
        origins[cells] = states * count + sources % count
    return scores + seen.unsqueeze(-1), origins


def _extended(before: Tensor, logs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The best of the paths into ``(*, from, C)``, one step on by ``logs`` ``(*, from, to)``.

    They come from the C states whose best paths are best.
    """
    logs, size = logs.mT, before.size(-2)
    best, states = _largest(logs + before[..., 0].unsqueeze(-2), min(count, size))
    if count == 1:
        return best, states
    states, order = states.sort(-1)
    none = best.gather(-1, order).isneginf().unsqueeze(-1)  # a state that may be there already
    several = before.unsqueeze(-3).expand(*states.shape[:-1], *before.shape[-2:])
    ranked = several.gather(-2, states.unsqueeze(-1).expand(*states.shape, count))
    onward = logs.expand(*states.shape[:-1], size).gather(-1, states)
    joint = onward.unsqueeze(-1) + ranked  # (*, to, C, C)
    scores, place = _largest(joint.masked_fill(none, -torch.inf).flatten(-2), count)
    return scores, states.gather(-1, place // count) * count + place % count


def _largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` largest in the last dimension and where they are, of equal ones the first."""
    if count == 1:
        best, places = values.max(-1, keepdim=True)
    else:
        best, places = values.sort(dim=-1, descending=True, stable=True)
    return best[..., :count], places[..., :count]
