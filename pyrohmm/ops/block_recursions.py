r"""Exact recursions for chains in which a symbol says to which block of states the state belongs.

Between two symbols only the moves from the one's block to the other's matter, so that a step costs
the product of the sizes of the two blocks, whatever the number of states. The laws of the moves
from block to block are computed once for each pair of blocks that occurs in the data.

A law is a product, :math:`p(j | i) = p(b | i) \, p(j | i, b)` for state j in block b: ``shares``
are the first factor, ``laws`` the second, a softmax of scores within each block. Any chain can be
written like that. Where states are in several blocks there are no shares, and laws are those of the
moves themselves.

What scaled messages lose
-------------------------
Messages are probabilities that sum to one at each step, and what is below ``LEAST`` in them counts
as zero. The paths that are lost so may turn out to matter later, so that each sequence carries a
bound on them, over what is left: what a step loses is added, and the sum divided by the norm of
each step. Mostly that ends at the next step: if m is the mass that enters a block, and a the least
law of its moves there, what is left has at least a m in each state before that is seen, and what
was lost, x, at most x. So it is at most x / (a m) of what is left in each state, and stays that
however long the sequence, for both go on by the same products. A sequence whose lost paths may be
more than rounding of its evidence is redone in logarithms. (Going back needs no such care: there, a
message is zero only if all paths through that state and time have less than ``LEAST`` together.)
"""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .._precision import differentiable_gradient, in_full_precision
from . import lookup
from .block_plan import Plan, Scores, States, make_plan
from .log_space import logsumexp

# What is below that counts as zero: laws, shares, messages and likelihoods over their maximum.
LEAST = {torch.float32: 1e-32, torch.float64: 1e-290}


# Compiled, in the range of probabilities ----------------------------------------------------------


def _mixed(count: int) -> Tensor:
    """The numbers below ``count``, such that equal parts of them hold large and small alike."""
    threads = max(1, min(torch.get_num_threads(), count))
    return torch.cat([torch.arange(part, count, threads) for part in range(threads)])


class _Forward:
    """The way forward by scaled messages; sequences in the order of the plan.

    Attributes:
        evidence: ``(N,)`` float64, the logarithm.
        sound: ``(N,)``, whether what was lost is surely less than rounding of the evidence.
        lost: ``(N,)`` float64, bound on what the last steps lost, over what is left.
        lowest: ``(P,)``, the least law of each pair; 0 if a positive one was cut off, and negative,
            the least positive one, where some are zero by themselves.
        alpha: ``(M, w)``, the law of the state of each token given what was seen up to it.
        norm: ``(M,)``, likelihood of each token given those before, over its maximum.
        seen: ``(M, w)``, likelihood of each token in its states, over its maximum.
        shares: ``(B, K)``, probability of the next block; empty if there is one level.
        laws: Those of the pairs.
    """

    def __init__(
        self,
        plan: Plan,
        states: States,
        leave: Tensor,
        enter: Tensor | None,
        log_shares: Tensor | None,
        log_first: Tensor,
        log_seen: Tensor,
        kernels: ModuleType,
    ) -> None:
        self.least = LEAST[log_seen.dtype]
        self.kernels, self.plan, self.states = kernels, plan, states
        empty = leave.new_empty(0, 0)
        self.shares = empty if log_shares is None else log_shares.mT.exp().contiguous()
        peak = log_seen.amax(-1)
        peak = peak.masked_fill(peak.isneginf(), 0.0)
        self.seen, cut = self._exp(log_seen - peak.unsqueeze(-1))
        first, cut_first = self._exp(log_first)
        count = len(plan.lengths)
        cut[:count] |= cut_first
        self.alpha, self.norm = torch.empty_like(self.seen), torch.ones_like(peak)
        self.evidence = torch.zeros(count, dtype=torch.float64)
        self.evidence.index_add_(0, _rank(plan), peak.double())
        self.sound = torch.ones(count, dtype=torch.bool)
        self.lost = torch.zeros(count, dtype=torch.float64)
        self.lowest = leave.new_empty(len(plan.source))
        self.scores = Scores(plan, states, leave, enter)
        self.laws: Tensor | None = self.laws_of_pairs()
        mean, number = plan.size // max(len(plan.source), 1), torch.finfo(log_seen.dtype)
        kernels.run(
            kernels.forward, count, mean * len(plan.begins), _mixed(count), plan.lengths,
            plan.begins, plan.block, states.sizes, states.starts, plan.pair, self.scores.base,
            self.scores.stride, self.laws, self.lowest, self.shares, self.least, number.tiny,
            number.eps, first, self.seen, cut, self.alpha, self.norm, self.evidence, self.lost,
            self.sound,
        )  # fmt: skip

    def _exp(self, logs: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities, zero below the least; and of which rows one was cut off there."""
        low = math.log(self.least)
        below = logs < low
        probs = logs.clamp(min=low).exp_().masked_fill_(below, 0.0)  # it takes long where it is 0
        return probs, (below & ~logs.isneginf()).any(-1)

    def laws_of_pairs(self) -> Tensor:
        """The laws of the pairs; notes the least of each."""
        kernels, plan, states, scores = self.kernels, self.plan, self.states, self.scores
        laws, low = scores(), math.log(self.least)
        parts = plan.source, plan.target, states.sizes, scores.base, scores.stride, low
        if scores.enter is None:
            laws, count = laws.clone() if scores.dense else laws, len(plan.source)
            kernels.run(
                kernels.exp_of_pairs, count, 10 * plan.size // max(count, 1), _mixed(count),
                *parts, laws, self.lowest,
            )  # fmt: skip
            return laws
        units = len(plan.pairs_of) - 1
        kernels.run(
            kernels.softmax_of_pairs, units, 10 * plan.size // max(units, 1), _mixed(units),
            plan.pairs_of, *parts, laws, self.lowest,
        )  # fmt: skip
        return laws


class _Scaled(torch.autograd.Function):
    """Log evidence by scaled messages ``(N,)`` in the order of the plan, and whether it is sound.

    Gradients are analytic; those that will be differentiated have a tape of T steps.
    """

    @staticmethod
    def forward(ctx, plan, states, leave, enter, log_shares, log_first, log_seen, kernels):
        forward = _Forward(plan, states, leave, enter, log_shares, log_first, log_seen, kernels)
        sound = forward.sound
        ctx.save_for_backward(leave, enter, log_shares, log_first, log_seen)
        ctx.forward = forward
        ctx.mark_non_differentiable(sound)
        return forward.evidence.masked_fill(~sound, 0.0).to(log_seen.dtype), sound

    @staticmethod
    @in_full_precision
    def backward(ctx, weights, _):
        given = ctx.saved_tensors
        log_shares: Tensor | None = given[2]
        forward = ctx.forward
        alpha, norm, seen, shares, sound = (
            forward.alpha, forward.norm, forward.seen, forward.shares, forward.sound
        )  # fmt: skip
        kernels, plan, states, scores = (
            forward.kernels,
            forward.plan,
            forward.states,
            forward.scores,
        )
        if torch.is_grad_enabled():
            evidence = partial(_evidence, plan, states, sound)
            return (None, None, *differentiable_gradient(evidence, given, weights), None)
        laws, forward.laws = forward.laws, None
        if laws is None:  # a second time, through a graph that was retained
            laws = forward.laws_of_pairs()
        gamma, message = torch.zeros_like(seen), torch.empty_like(seen)
        count, good = len(plan.lengths), sound.clone()
        mean = plan.size // max(len(plan.source), 1)
        kernels.run(
            kernels.backward, count, mean * len(plan.begins), _mixed(count), plan.lengths,
            plan.begins, plan.block, states.sizes, states.starts, plan.pair, scores.base,
            scores.stride, laws, shares, forward.least, seen, alpha, norm, weights.contiguous(),
            gamma, message, good,
        )  # fmt: skip
        if not torch.equal(good, sound):  # only the way back left the range
            return (None, None, *_gradients(plan, states, given, weights), None)
        to_leave = to_enter = to_shares = None
        if any(ctx.needs_input_grad[2:5]):
            if not bool(sound.all()):
                message[~sound[_rank(plan)]] = 0.0
                alpha = alpha.masked_fill(~sound[_rank(plan)].unsqueeze(-1), 0.0)
            pairs, changed = len(plan.source), torch.zeros_like(shares)
            moved = torch.zeros_like(laws) if scores.dense else laws
            uses = plan.tokens_of.diff()
            schedule = uses.argsort(descending=True, stable=True)[_mixed(pairs)]
            kernels.run(
                kernels.gradients_of_pairs, pairs,
                plan.size // max(pairs, 1) * (2 + len(plan.tokens) // max(pairs, 1)), schedule,
                plan.tokens_of, plan.tokens, plan.before, plan.block, states.sizes, states.starts,
                scores.base, scores.stride, forward.least, alpha, message, shares, laws, moved,
                changed,
            )  # fmt: skip
            to_leave, to_enter = scores.gradients(moved)
            if log_shares is not None:
                to_shares = (changed.mul_(shares)).mT
        first = gamma[: len(plan.lengths)]
        return None, None, to_leave, to_enter, to_shares, first, gamma, None


def _rank(plan: Plan) -> Tensor:
    """Which of the sequences, in the order of the plan, each token belongs to."""
    counts = torch.cat([plan.begins[1:], plan.begins.new_full((1,), len(plan.where))])
    counts = counts - plan.begins
    return torch.arange(len(plan.where)) - plan.begins.repeat_interleave(counts)


# Plain, in logarithms -----------------------------------------------------------------------------


class Logs:
    """The same chain in logarithms, by operations of torch: for any device, and always exact."""

    def __init__(
        self,
        plan: Plan,
        states: States,
        leave: Tensor,
        enter: Tensor | None,
        log_shares: Tensor | None,
        log_first: Tensor,
        log_seen: Tensor,
    ) -> None:
        self.plan, self.first, self.seen = plan, log_first, log_seen
        self.sizes, self.device = states.sizes, log_seen.device
        self.base, self.stride = plan.base, plan.stride
        scores = Scores(plan, states, leave, enter)
        if enter is None:
            self.base, self.stride, self.laws = scores.base, scores.stride, scores()
            return
        assert log_shares is not None
        laws = [log_seen.new_zeros(0)]
        for rows, targets, _ in scores._sources():
            found = leave[rows] @ scores._entered(targets).mT
            widths = self.sizes[targets].tolist()
            share = log_shares[rows][:, targets.to(self.device)].unsqueeze(-1)
            if len(set(widths)) == 1:
                cells = found.unflatten(-1, (len(widths), -1)).log_softmax(-1)
                laws.append((cells + share).flatten())
            else:
                parts = zip(found.split(widths, -1), share.unbind(1))
                laws.append(
                    torch.cat([each.log_softmax(-1) + own for each, own in parts], -1).flatten()
                )
        self.laws = torch.cat(laws)

    def matrices(self, tokens: Tensor) -> Tensor:
        """Logarithms of the moves to ``tokens`` ``(m,)`` from those before, ``(m, w, w)``."""
        plan, width = self.plan, self.seen.size(-1)
        pair, own = plan.pair[tokens], torch.arange(width)
        height = self.sizes[plan.source[pair]].unsqueeze(-1)
        breadth = self.sizes[plan.target[pair]].unsqueeze(-1)
        exists = (own < height).unsqueeze(-1) & (own < breadth).unsqueeze(-2)
        places = self.base[pair].unsqueeze(-1) + own * self.stride[pair].unsqueeze(-1)
        places = (places.unsqueeze(-1) + own).masked_fill(~exists, 0)
        found = self.laws[places.to(self.device)]
        return found.masked_fill(~exists.to(self.device), -torch.inf)

    def steps(self) -> list[slice]:
        """The tokens of each step."""
        ends = [*self.plan.begins.tolist(), len(self.plan.where)]
        return [slice(begin, end) for begin, end in pairwise(ends)]

    def messages(self) -> tuple[list[Tensor], list[Tensor]]:
        """Logarithms of p(x_{1:t}, z_t) less the largest, of the tokens of each step, ``(n_t, w)``.

        And what was taken away from each, ``(n_t,)`` float64: logarithms of thousands of steps have
        no digits left for the law of a state.
        """
        found: list[Tensor] = []
        taken: list[Tensor] = []
        for step in self.steps():
            seen = self.seen[step]
            if not found:
                message, before = self.first + seen, seen.new_zeros(len(seen), dtype=torch.float64)
            else:
                moves = self.matrices(torch.arange(step.start, step.stop))
                alpha, before = found[-1][: len(seen)], taken[-1][: len(seen)]
                message = logsumexp(alpha.unsqueeze(-1) + moves, -2) + seen
            peak = message.detach().amax(-1)
            peak = peak.masked_fill(peak.isneginf(), 0.0)
            found.append(message - peak.unsqueeze(-1))
            taken.append(before + peak.double())
        return found, taken

    def ends(self, each: list[Tensor]) -> Tensor:
        """What ``each`` step holds of the sequences that end there; in the order of the plan."""
        parts = []
        for now, then in zip(each, [*each[1:], each[0][:0]]):
            parts.append(now[len(then) :])
        return torch.cat(parts[::-1])

    def log_evidence(self) -> Tensor:
        """Log evidence ``(N,)`` in the order of the plan."""
        messages, taken = self.messages()
        value = logsumexp(self.ends(messages), -1)
        return (value.double() + self.ends(taken)).to(value.dtype)

    def viterbi(self) -> Tensor:
        """The place in its block of each token's state on the most probable path, ``(M,)``."""
        scores, origins = [self.first + self.seen[self.steps()[0]]], []
        for step in self.steps()[1:]:
            moves = self.matrices(torch.arange(step.start, step.stop))
            best = (scores[-1][: len(moves)].unsqueeze(-1) + moves).max(-2)
            origins.append(best.indices)
            score = best.values + self.seen[step]
            peak = score.amax(-1, keepdim=True)
            scores.append(score - peak.masked_fill(peak.isneginf(), 0.0))
        found: list[Tensor] = []
        for t in range(len(scores) - 1, -1, -1):
            place = scores[t].argmax(-1)
            if found:
                after = origins[t].gather(-1, found[-1].unsqueeze(-1)).squeeze(-1)
                place = torch.cat([after, place[len(after) :]])
            found.append(place)
        return torch.cat(found[::-1])

    def sample(self, count: int) -> Tensor:
        """Draw paths given the values: places in the blocks, ``(count, M)``."""
        (messages, _), steps = self.messages(), self.steps()
        found: list[Tensor] = []
        for t in range(len(steps) - 1, -1, -1):
            score = messages[t].expand(count, *messages[t].shape)
            if found:
                after = found[-1]  # (count, n)
                moves = self.matrices(torch.arange(steps[t + 1].start, steps[t + 1].stop))
                index = after.mT.unsqueeze(-2).expand(-1, moves.size(-2), -1)
                onward = moves.gather(-1, index).permute(2, 0, 1)  # (count, n, w)
                ending = torch.zeros_like(score[:, after.size(1) :])
                score = score + torch.cat([onward, ending], 1)
            peak = score.amax(-1, keepdim=True)
            mass = (score - peak.masked_fill(peak.isneginf(), 0.0)).exp().cumsum(-1)
            chance = torch.rand(mass.shape[:-1], dtype=mass.dtype, device=mass.device)
            drawn = (mass <= chance.unsqueeze(-1) * mass[..., -1:]).sum(-1)
            last = self.sizes[self.plan.block[steps[t]]].to(drawn.device) - 1
            found.append(drawn.minimum(last))  # also where no path is possible
        return torch.cat(found[::-1], -1)


def _evidence(plan: Plan, states: States, sound: Tensor, *given: Any) -> Tensor:
    """Log evidence of the sequences that are sound, by plain logarithms; 0 for the others."""
    return Logs(plan, states, *given).log_evidence().masked_fill(~sound, 0.0)


def _gradients(
    plan: Plan, states: States, given: tuple[Tensor | None, ...], weights: Tensor
) -> list[Tensor | None]:
    """The gradient of the evidence times ``weights``, by plain logarithms."""
    with torch.enable_grad():
        inputs = [None if each is None else each.detach().requires_grad_() for each in given]
        evidence = Logs(plan, states, *inputs).log_evidence()  # type: ignore[arg-type]
        wanted = [each for each in inputs if each is not None]
        found = iter(torch.autograd.grad(evidence, wanted, weights, allow_unused=True))
    return [None if each is None else next(found) for each in inputs]


# Both ---------------------------------------------------------------------------------------------


def planned(
    blocks: Tensor, lengths: Tensor, states: States, log_first: Tensor, log_seen: Tensor
) -> tuple[Plan, Tensor, Tensor]:
    """A plan, and in its order what begins ``(N, w)`` and what is seen ``(M, w)``."""
    plan, device = make_plan(blocks, lengths, states), log_seen.device
    first = log_first[plan.order.to(device)]
    return plan, first, log_seen.flatten(0, 1)[plan.where.to(device)]


def log_evidence(
    blocks: Tensor,
    lengths: Tensor,
    states: States,
    leave: Tensor,
    enter: Tensor | None,
    log_shares: Tensor | None,
    log_first: Tensor,
    log_seen: Tensor,
) -> Tensor:
    """Log-probability of sequences ``(N,)``, in nats; differentiable.

    Args:
        blocks: ``(N, T)``, block of each step, on the CPU.
        lengths: ``(N,)``, on the CPU.
        states: Of each block.
        leave: ``(K, D)``, vectors of states; or, without ``enter``, log-probabilities ``(K, K)``.
        enter: ``(K, D)``; scores of moves are inner products.
        log_shares: ``(K, B)``, log-probability of the next block; with ``enter`` only.
        log_first: ``(N, w)``, log-probability of the first state, in the first block.
        log_seen: ``(N, T, w)``, log-probability of each step in the states of its block; -inf
            where a block has fewer states than w.
    """
    plan, first, seen = planned(blocks, lengths, states, log_first, log_seen)
    kernels = lookup.kernels("_numba_blocks") if log_seen.device.type == "cpu" else None
    if kernels is None:
        value = Logs(plan, states, leave, enter, log_shares, first, seen).log_evidence()
    else:
        value, sound = _Scaled.apply(plan, states, leave, enter, log_shares, first, seen, kernels)
        if not bool(sound.all()):
            lost = (~sound).nonzero().squeeze(-1)
            rows = plan.order[lost]
            part = make_plan(blocks[rows], lengths[rows], states)
            chosen = log_seen[rows].flatten(0, 1)[part.where]
            redone = Logs(
                part, states, leave, enter, log_shares, log_first[rows][part.order], chosen
            ).log_evidence()
            value = value.index_put((lost[part.order],), redone)
    return value[plan.order.argsort().to(value.device)]


def last_laws(
    blocks: Tensor,
    lengths: Tensor,
    states: States,
    leave: Tensor,
    enter: Tensor | None,
    log_shares: Tensor | None,
    log_first: Tensor,
    log_seen: Tensor,
) -> Tensor:
    """Logarithms of the laws of the last states in their blocks, given everything; ``(N, w)``.

    Args as those of :func:`log_evidence`; without gradients. -inf where that is impossible.
    """
    with torch.no_grad():
        plan, first, seen = planned(blocks, lengths, states, log_first, log_seen)
        kernels = lookup.kernels("_numba_blocks") if log_seen.device.type == "cpu" else None
        chain = plan, states, leave, enter, log_shares, first, seen
        found = None
        if kernels is not None:
            forward = _Forward(*chain, kernels)
            last = forward.alpha[plan.begins[plan.lengths - 1] + torch.arange(len(lengths))]
            own = states.sizes[blocks.gather(1, lengths.unsqueeze(-1) - 1)][plan.order]
            beyond = torch.arange(states.width) >= own
            last.masked_fill_(beyond, 0.0)
            cut = (last == 0).logical_and_(~beyond).any(-1) & (forward.lost > 0)
            if bool((forward.sound & ~cut).all()):
                found = last.log()
        if found is None:
            logs = Logs(*chain)
            found = logs.ends(logs.messages()[0])
            total = found.logsumexp(-1, keepdim=True)
            found = torch.where(total.isneginf(), -torch.inf, found - total)
        return found[plan.order.argsort().to(found.device)]
