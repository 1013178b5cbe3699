"""Best paths of chains in blocks of states, and paths sampled from the posterior."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..log_space import finite_or_zero
from .messages import LogChain, Messages

FEW = 8  # of how many best numbers one after the other is found faster than by sorting


class Ranked(NamedTuple):
    """The C best paths into each state of some tokens, and where these come from.

    Attributes:
        scores: ``(n, S, C)``, log p(x, z); -inf where there are fewer.
        origins: ``(n, S, C)``, which of the paths into the states of the token before.
    """

    scores: Tensor
    origins: Tensor


def k_best(chain: LogChain, count: int) -> tuple[Tensor, Tensor]:
    """The C best paths: states of the tokens ``(C, M)``, and log p(x, z) ``(N, C)``.

    Of equal paths the first. Where fewer are possible the rest have -inf, and hold states that mean
    nothing.
    """
    plan = chain.plan
    first = chain.at_first_step()
    first = first._replace(within=first.within + chain.seen[chain.steps[0]])
    scores = [Messages(*(_alone(part, count) for part in first))]
    origins = [Messages(*(torch.zeros_like(part, dtype=torch.long) for part in scores[0]))]
    for t in range(1, len(chain.steps)):
        ranked = _ranked(chain, t, scores[-1])
        scores.append(ranked[0])
        origins.append(ranked[1])
    best = chain.seen.new_empty(len(plan.lengths), count)
    places = torch.zeros(chain.size, count, dtype=torch.long)
    pointer = torch.zeros(len(plan.lengths), count, dtype=torch.long)
    for t in range(len(chain.steps) - 1, -1, -1):
        for tokens in _by_kind(chain, chain.steps[t]):
            rank = tokens - chain.steps[t].start
            last = tokens[ended := plan.lengths[rank] == t + 1]
            if len(last):
                values, where = _largest(chain.at(scores[t], last, t).flatten(1), count)
                best[rank[ended].to(best.device)] = values
                pointer[rank[ended]] = where.cpu()
            places[tokens] = pointer[rank] // count
            before = chain.at(origins[t], tokens, t).flatten(1)
            pointer[rank] = before.gather(1, pointer[rank].to(before.device)).cpu()
    return states_at(chain, places.mT), best[plan.order.argsort().to(best.device)]


def sample(chain: LogChain, count: int) -> Tensor:
    """Sample paths from the posterior: states of the tokens, ``(count, M)``."""
    messages, plan, step = chain.forward()[0], chain.plan, chain.transitions
    places = torch.zeros(count, chain.size, dtype=torch.long)
    for t in range(len(chain.steps) - 1, -1, -1):
        score = Messages(*(part.repeat(count, 1, 1) for part in messages[t]))
        later = chain.steps[t + 1] if t + 1 < len(chain.steps) else slice(0, 0)
        for tokens in chain.kinds(later):
            before, after = plan.before[tokens], places[:, tokens]
            if chain.are_known(tokens):
                log_probs = chain.matrices(tokens)
                index = after.mT.unsqueeze(-2).expand(-1, log_probs.size(-2), -1)
                onward = log_probs.gather(-1, index.to(log_probs.device)).permute(2, 0, 1)
            else:
                states = _states(chain, tokens, after).flatten()
                onward = step.into(plan.block[before].repeat(count), states)
                onward = onward.view(count, len(tokens), -1)
            kind, rows = chain.kind(before), chain.rows(before, t)
            score[kind].index_add_(1, rows, onward.to(score[kind].dtype))
        for tokens in _by_kind(chain, chain.steps[t]):
            kind = chain.kind(tokens)
            found = sample_places(score[kind][:, chain.rows(tokens, t)]).cpu()
            sizes = torch.cat([step.states.sizes, torch.tensor([step.num_states])])
            places[:, tokens] = found.minimum(sizes[plan.block[tokens]] - 1)  # none is possible
    return states_at(chain, places)


def states_at(chain: LogChain, places: Tensor) -> Tensor:
    """The states at places ``(C, M)`` in the blocks of tokens, on the CPU."""
    out = torch.empty_like(places)
    for tokens in _by_kind(chain, slice(0, chain.size)):
        out[:, tokens] = _states(chain, tokens, places[:, tokens])
    return out


def sample_places(scores: Tensor) -> Tensor:
    """Sample a place in the last dimension by logarithms of weights; beyond it if all are zero."""
    mass = (scores - finite_or_zero(scores.amax(-1, keepdim=True))).exp().cumsum(-1)
    uniform = torch.rand(mass.shape[:-1], dtype=mass.dtype, device=mass.device)
    return (mass <= uniform.unsqueeze(-1) * mass[..., -1:]).sum(-1)


def _by_kind(chain: LogChain, tokens: slice) -> list[Tensor]:
    """The observed ones of some tokens, and the missing ones."""
    numbers = torch.arange(*tokens.indices(chain.size))
    if not chain.has_gaps:
        return [numbers]
    parts = (numbers[chain.missing[numbers] == missing] for missing in (False, True))
    return [part for part in parts if len(part)]


def _states(chain: LogChain, tokens: Tensor, places: Tensor) -> Tensor:
    """The states at places ``(C, n)`` of tokens that are all missing, or none."""
    if chain.kind(tokens):
        return places
    states = chain.transitions.places(chain.plan.block[tokens]).gather(1, places.mT).mT
    return states.clamp(max=chain.transitions.num_states - 1)


def _alone(logs: Tensor, count: int) -> Tensor:
    """As the best of C paths, of which there are no others."""
    return torch.nn.functional.pad(logs.unsqueeze(-1), (0, count - 1), value=-torch.inf)


def _ranked(chain: LogChain, t: int, before: Messages) -> tuple[Messages, Messages]:
    """The best paths into the states of step ``t``: scores and origins."""
    plan, now, count = chain.plan, chain.steps[t], before.within.size(-1)
    scores = Messages(*(_alone(part, count) for part in chain.full(now, -torch.inf)))
    origins = Messages(*(torch.zeros_like(part, dtype=torch.long) for part in scores))
    for tokens in chain.kinds(now):
        values = chain.at(before, plan.before[tokens], t - 1)
        if chain.are_known(tokens):
            new = _extended(values, chain.matrices(tokens), count)
        else:
            new = _onward(chain, tokens, values)
        kind, rows = chain.kind(tokens), chain.rows(tokens, t)
        scores[kind][rows], origins[kind][rows] = new
    scores.within.add_(chain.seen[now].unsqueeze(-1))
    return scores, origins


def _onward(chain: LogChain, tokens: Tensor, values: Tensor) -> Ranked:
    """The best paths into tokens from, in or to missing steps, some transitions at a time.

    Args:
        chain: The chain.
        tokens: ``(n,)``, one of :meth:`LogChain.kinds`.
        values: ``(n, *, C)``, of the best paths into the states of the tokens before.
    """
    step, count = chain.transitions, values.size(-1)
    blocks = chain.plan.block[chain.plan.before[tokens]], chain.plan.block[tokens]
    found: dict[int, Ranked] = {}
    for group, source, target in step.groups(*blocks):
        for part, logs in step.parts(source, target):
            for row in group.tolist():
                new = _extended(values[row, part], logs, count)
                new = new._replace(origins=new.origins + part.start * count)
                if row in found:
                    scores, origins = (torch.cat(pair, -1) for pair in zip(found[row], new))
                    best, place = _largest(scores, count)
                    new = Ranked(best, origins.gather(-1, place))
                found[row] = new
        for row in group.tolist():
            beyond = 0 if target == step.all else step.states.width - len(found[row].scores)
            found[row] = Ranked(
                torch.nn.functional.pad(found[row].scores, (0, 0, 0, beyond), value=-torch.inf),
                torch.nn.functional.pad(found[row].origins, (0, 0, 0, beyond)),
            )
    return Ranked(*(torch.stack(parts) for parts in zip(*(found[row] for row in sorted(found)))))


def _extended(before: Tensor, logs: Tensor, count: int) -> Ranked:
    """The best of the paths into ``(*, from, C)``, one step on by ``logs`` ``(*, from, to)``.

    They come from the C states whose best paths are best.
    """
    logs, size = logs.mT, before.size(-2)
    best, states = _largest(logs + before[..., 0].unsqueeze(-2), min(count, size))
    if count == 1:
        return Ranked(best, states)
    states, order = states.sort(-1)
    none = best.gather(-1, order).isneginf().unsqueeze(-1)  # a state that may be there already
    several = before.unsqueeze(-3).expand(*states.shape[:-1], *before.shape[-2:])
    ranked = several.gather(-2, states.unsqueeze(-1).expand(*states.shape, count))
    joint = logs.gather(-1, states).unsqueeze(-1) + ranked  # (*, to, C, C)
    scores, place = _largest(joint.masked_fill(none, -torch.inf).flatten(-2), count)
    origins = states.gather(-1, place // count) * count + place % count
    return Ranked(scores, origins)


def _largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` largest in the last dimension and where they are, of equal ones the first."""
    if count > FEW:
        ranked = values.sort(dim=-1, descending=True, stable=True)
        return ranked.values[..., :count], ranked.indices[..., :count]
    best: list[Tensor] = []
    places: list[Tensor] = []
    for _ in range(count):
        if places:
            values = values.scatter(-1, places[-1].unsqueeze(-1), -torch.inf)
        largest = values.max(-1)
        best.append(largest.values)
        places.append(largest.indices)
    return torch.stack(best, -1), torch.stack(places, -1)
