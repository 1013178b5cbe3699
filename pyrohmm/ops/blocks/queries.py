"""Posterior queries of chains in blocks of states, of which some steps may be missing.

Without gradients. All are sums over the messages of :class:`.messages.LogChain`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..log_space import finite_or_zero, lazy_zeros
from .messages import LogChain, Messages
from .plan import bounds
from .transitions import CHUNK

SMALL = -1000.0  # a logarithm whose exponential is zero


class Pairs(NamedTuple):
    r"""Some tokens, and the states before and at them.

    Attributes:
        tokens: ``(n,)``, not of the first step.
        before, after: ``(n, f)`` and ``(n, c)`` states; K beyond a block.
        log_share: ``(n, f, c)``, :math:`\log p(z_{t-1} \mid z_t, x_{1:t-1})`.
    """

    tokens: Tensor
    before: Tensor
    after: Tensor
    log_share: Tensor


def predictive(chain: LogChain) -> Tensor:
    """Log p(x_t | x_{1:t-1}) of each token, ``(M,)``; -inf from where it is impossible."""
    messages, subtracted = chain.forward()
    total = torch.cat(chain.totals(messages)).double() + torch.cat(subtracted)
    before = total[chain.plan.before.to(total.device)]
    before[: len(chain.plan.lengths)] = 0.0
    found = torch.where(total.isneginf(), -torch.inf, total - finite_or_zero(before))
    return found.masked_fill(chain.missing.to(found.device), 0.0)


def pairs(chain: LogChain, filtered: Messages) -> Iterator[Pairs]:
    """The states before and at all later tokens, in parts, given :meth:`LogChain.filtered`."""
    step, plan = chain.transitions, chain.plan
    for tokens in chain.kinds(chain.later):
        if chain.are_known(tokens):
            for some in tokens.split(max(1, CHUNK // chain.seen.size(-1) ** 2)):
                before = plan.before[some]
                joint = chain.at(filtered, before).unsqueeze(-1) + chain.matrices(some)
                share = joint - finite_or_zero(joint.logsumexp(-2, keepdim=True))
                states, after = (step.places(plan.block[each]) for each in (before, some))
                yield Pairs(some, states, after, share)
            continue
        logs = chain.at(filtered, plan.before[tokens])
        blocks = plan.block[plan.before[tokens]], plan.block[tokens]
        arrived = finite_or_zero(step.sums(logs, *blocks)).unsqueeze(-2)
        for group, source, target in step.groups(*blocks):
            after = step.states_of(target).unsqueeze(0)
            for rows, log_probs in step.parts(source, target):
                before = step.states_of(source)[rows].unsqueeze(0)
                for row in group.split(1):
                    joint = logs[row][:, rows].unsqueeze(-1) + log_probs
                    share = joint - arrived[row][..., : len(after[0])]
                    yield Pairs(tokens[row], before, after, share)


def entropy(chain: LogChain) -> Tensor:
    """Entropy of the posterior over paths in nats, ``(N,)``; 0 where none is possible."""
    filtered, rank = chain.filtered(), chain.plan.rank.to(chain.device)
    smoothed = chain.smoothed(filtered)
    found = chain.of_tokens(smoothed, lambda logs: torch.special.entr(logs.exp()).sum(-1))
    found = found[chain.last.to(chain.device)]
    for tokens, _, after, share in pairs(chain, filtered):
        probs = share + chain.at(smoothed, tokens)[:, None, : after.size(1)]
        surprise = -(probs.exp() * share.clamp(min=SMALL)).sum((-1, -2))
        found.index_add_(0, rank[tokens.to(chain.device)], surprise)
    return found[chain.plan.order.argsort().to(chain.device)].clamp(min=0.0)


def transition_counts(chain: LogChain, filtered: Messages, smoothed: Messages) -> Tensor:
    """Expected counts of transitions ``(N, K, K)``."""
    plan, size = chain.plan, chain.transitions.num_states
    sequence, counts = plan.order[plan.rank], lazy_zeros(len(plan.order) * size**2, chain.seen)
    for tokens, before, after, share in pairs(chain, filtered):
        probs = (share + chain.at(smoothed, tokens)[:, None, : after.size(1)]).exp()
        if len(tokens) > 1:  # each pair of blocks once for a sequence, added up in float64
            keys = sequence[tokens] * len(plan.source) + plan.pair[tokens]
            _, kind = keys.unique(return_inverse=True)
            first = kind.argsort(stable=True)[bounds(kind.bincount())[:-1]]
            sums = probs.new_zeros(len(first), *probs.shape[1:], dtype=torch.float64)
            probs = sums.index_add_(0, kind.to(chain.device), probs.double()).to(probs.dtype)
            tokens, before, after = tokens[first], before[first], after[first]
        cells = (sequence[tokens].view(-1, 1, 1) * size + before.unsqueeze(-1)) * size
        cells = (cells + after.unsqueeze(-2)).to(chain.device)
        real = ((before < size).unsqueeze(-1) & (after < size).unsqueeze(-2)).to(chain.device)
        counts.index_add_(0, cells[real], probs[real])
    return counts.view(-1, size, size)


def left_out(chain: LogChain, past_alone: bool) -> Tensor:
    r"""Log :math:`p(z_t \mid x_{1:t-1}, x_{t+1:T})` of observed tokens, ``(M - G, K)``.

    Not normalised. With ``past_alone`` given :math:`x_{1:t-1}`.
    """
    assert chain.initial is not None
    step, plan, filtered = chain.transitions, chain.plan, chain.filtered()
    number = ((~chain.missing).cumsum(0) - 1).to(chain.device)
    logs = chain.initial.to(chain.seen).repeat(int((~chain.missing).sum()), 1)
    after = chain.kinds(chain.later)
    anything = torch.full_like(plan.block, step.all)
    for tokens in after:
        if not chain.kind(tokens):
            before = plan.before[tokens]
            found = step.sums(chain.at(filtered, before), plan.block[before], anything[before])
            logs[number[tokens.to(chain.device)]] = found.to(logs.dtype)
    if past_alone:
        return logs
    values = chain.backward()
    values = values._replace(within=values.within + chain.seen)
    for tokens in after:
        before = plan.before[tokens]
        if not chain.kind(before):
            here = chain.at(values, tokens)
            found = step.sums(here, anything[before], plan.block[tokens], back=True)
            logs[number[before.to(chain.device)]] += found
    return logs


def all_states(chain: LogChain, logs: Messages, count: int) -> Tensor:
    """Probabilities of all states at ``count`` steps, ``(count, K)``; 0 where padded."""
    size = chain.transitions.num_states
    out = lazy_zeros(count * size, chain.seen).view(-1, size)
    known = (~chain.missing).nonzero().squeeze(-1)
    states = chain.transitions.places(chain.plan.block[known])
    rows, real = chain.plan.where[known].unsqueeze(-1).expand_as(states), states < size
    probs = logs.within[known.to(chain.device)].exp()[real.to(chain.device)]
    out[rows[real].to(chain.device), states[real].to(chain.device)] = probs
    out[chain.plan.where[chain.missing].to(chain.device)] = logs.wide.exp()
    return out
