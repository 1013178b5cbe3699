r"""Chains in blocks of states by compiled scaled messages, for models on the CPU.

What scaled messages lose
-------------------------
Messages are probabilities that sum to one at each step, and what is below ``LEAST`` in them counts
as zero. The paths lost in this way may matter later, so each sequence carries a bound on their
mass, over what is left: what a step loses is added, and the sum divided by the norm of each step.
Mostly that ends at the next step: if m is the mass that enters a block, and a the least probability
of a transition there, what is left has at least a m in each state before that is seen, and what was
lost, x, at most x. So it is at most x / (a m) of what is left in each state, and stays that however
long the sequence, for both go on by the same products. A sequence whose lost paths may be more than
rounding of its evidence is redone in logarithms. (The backward pass needs no such care: there, a
message is zero only if all paths through that state and time have less than ``LEAST`` together.)
"""

from __future__ import annotations

import math
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..._precision import differentiable_gradient, in_full_precision
from ..log_space import finite_or_zero
from .messages import LogChain
from .plan import BlockChain, Plan, Scores, States

# What is below that counts as zero: probabilities, messages and likelihoods over their maximum.
LEAST = {torch.float32: 1e-32, torch.float64: 1e-290}


def _mixed(count: int) -> Tensor:
    """The numbers below ``count``, such that equal parts of them hold large and small alike."""
    threads = max(1, min(torch.get_num_threads(), count))
    return torch.cat([torch.arange(part, count, threads) for part in range(threads)])


class _Forward:
    """Forward pass by scaled messages; sequences in the order of the plan.

    Attributes:
        evidence: ``(N,)`` float64, log.
        sound: ``(N,)``, whether what was lost is surely less than rounding of the evidence.
        lost: ``(N,)`` float64, bound on the mass that the last steps lost, over what is left.
        lowest: ``(P,)``, the least probability of each pair; 0 if a positive one was cut off, and
            negative, the least positive one, where some are zero by themselves.
        alpha: ``(M, w)``, filtered probabilities of each token.
        norm: ``(M,)``, likelihood of each token given those before, over its maximum.
        seen: ``(M, w)``, likelihood of each token in its states, over its maximum.
        block_probs: ``(B, K)``, probability of the next block; empty if there is one level.
        probs: Transition probabilities of the pairs, within the blocks.
    """

    def __init__(self, kernels: ModuleType, chain: BlockChain) -> None:
        plan, states, _, _, log_block_probs, log_first, log_seen = chain
        self.least = LEAST[log_seen.dtype]
        self.kernels, self.plan, self.states = kernels, plan, states
        empty = log_seen.new_empty(0, 0)
        self.block_probs = (
            empty if log_block_probs is None else log_block_probs.mT.exp().contiguous()
        )
        peak = finite_or_zero(log_seen.amax(-1))
        self.seen, cut = self._exp(log_seen - peak.unsqueeze(-1))
        first, cut_first = self._exp(log_first)
        count = len(plan.lengths)
        cut[:count] |= cut_first
        self.alpha, self.norm = torch.empty_like(self.seen), torch.ones_like(peak)
        self.evidence = torch.zeros(count, dtype=torch.float64)
        self.evidence.index_add_(0, plan.rank, peak.double())
        self.sound = torch.ones(count, dtype=torch.bool)
        self.lost = torch.zeros(count, dtype=torch.float64)
        self.lowest = log_seen.new_empty(len(plan.source))
        self.scores = Scores(chain)
        self.probs: Tensor | None = self.probs_of_pairs()
        mean, number = plan.size // max(len(plan.source), 1), torch.finfo(log_seen.dtype)
        kernels.run(
            kernels.forward, count, mean * len(plan.begins), _mixed(count), plan.lengths,
            plan.begins, plan.block, states.sizes, states.starts, plan.pair, plan.base,
            plan.stride, self.probs, self.lowest, self.block_probs, self.least, number.tiny,
            number.eps, first, self.seen, cut, self.alpha, self.norm, self.evidence, self.lost,
            self.sound,
        )  # fmt: skip

    def _exp(self, logs: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities, zero below the least; and of which rows one was cut off there."""
        low = math.log(self.least)
        below = logs < low
        probs = logs.clamp(min=low).exp_().masked_fill_(below, 0.0)  # it takes long where it is 0
        return probs, (below & ~logs.isneginf()).any(-1)

    def probs_of_pairs(self) -> Tensor:
        """Transition probabilities of the pairs; writes the least of each to ``lowest``."""
        kernels, plan, states, scores = self.kernels, self.plan, self.states, self.scores
        probs, low = scores(), math.log(self.least)
        parts = plan.source, plan.target, states.sizes, plan.base, plan.stride, low
        if scores.enter is None:
            count = len(plan.source)
            kernels.run(
                kernels.exp_of_pairs, count, 10 * plan.size // max(count, 1), _mixed(count),
                *parts, probs, self.lowest,
            )  # fmt: skip
            return probs
        units = len(plan.pairs_of) - 1
        kernels.run(
            kernels.softmax_of_pairs, units, 10 * plan.size // max(units, 1), _mixed(units),
            plan.pairs_of, *parts, probs, self.lowest,
        )  # fmt: skip
        return probs


class _Scaled(torch.autograd.Function):
    """Log evidence by scaled messages ``(N,)`` in the order of the plan, and whether it is sound.

    Gradients are analytic; those that will be differentiated have a tape of T steps.
    """

    @staticmethod
    def forward(
        ctx: Any, kernels: ModuleType, plan: Plan, states: States, *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        chain = BlockChain(plan, states, *tensors)  # type: ignore[arg-type]
        forward = _Forward(kernels, chain)
        ctx.save_for_backward(*tensors)
        ctx.forward = forward
        ctx.mark_non_differentiable(forward.sound)
        value = forward.evidence.masked_fill(~forward.sound, 0.0)
        return value.to(chain.log_seen.dtype), forward.sound

    @staticmethod
    @in_full_precision
    def backward(ctx: Any, weights: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        forward: _Forward = ctx.forward
        plan, states, sound = forward.plan, forward.states, forward.sound
        none = None, None, None
        if torch.is_grad_enabled():
            evidence = partial(_evidence, plan, states, sound)
            return (*none, *differentiable_gradient(evidence, ctx.saved_tensors, weights))
        probs, forward.probs = forward.probs, None
        if probs is None:  # a second time, through a graph that was retained
            probs = forward.probs_of_pairs()
        kernels = forward.kernels
        gamma, message = torch.zeros_like(forward.seen), torch.empty_like(forward.seen)
        count, good = len(plan.lengths), sound.clone()
        mean = plan.size // max(len(plan.source), 1)
        kernels.run(
            kernels.backward, count, mean * len(plan.begins), _mixed(count), plan.lengths,
            plan.begins, plan.block, states.sizes, states.starts, plan.pair, plan.base,
            plan.stride, probs, forward.block_probs, forward.least, forward.seen, forward.alpha,
            forward.norm, weights.contiguous(), gamma, message, good,
        )  # fmt: skip
        if not torch.equal(good, sound):  # only the backward pass left the range
            return (*none, *_gradients(plan, states, ctx.saved_tensors, weights))
        by_transition: tuple[Tensor | None, ...] = none
        if any(ctx.needs_input_grad[3:6]):
            by_transition = _transition_gradients(forward, probs, message)
            if ctx.saved_tensors[2] is None:
                by_transition = (*by_transition[:2], None)
        return (*none, *by_transition, gamma[:count], gamma)


def _transition_gradients(
    forward: _Forward, probs: Tensor, message: Tensor
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Gradients by ``leave``, ``enter`` and ``log_block_probs``; ``probs`` are overwritten."""
    plan, states, scores, sound = forward.plan, forward.states, forward.scores, forward.sound
    alpha, kernels = forward.alpha, forward.kernels
    if not bool(sound.all()):
        message[~sound[plan.rank]] = 0.0
        alpha = alpha.masked_fill(~sound[plan.rank].unsqueeze(-1), 0.0)
    pairs, by_block = len(plan.source), torch.zeros_like(forward.block_probs)
    schedule = plan.tokens_of.diff().argsort(descending=True, stable=True)[_mixed(pairs)]
    work = plan.size // max(pairs, 1) * (2 + len(plan.tokens) // max(pairs, 1))
    kernels.run(
        kernels.gradients_of_pairs, pairs, work, schedule, plan.tokens_of, plan.tokens,
        plan.before, plan.block, states.sizes, states.starts, plan.base, plan.stride,
        forward.least, alpha, message, forward.block_probs, probs, probs, by_block,
    )  # fmt: skip
    return *scores.gradients(probs), by_block.mul_(forward.block_probs).mT


def _evidence(plan: Plan, states: States, sound: Tensor, *tensors: Any) -> Tensor:
    """Log evidence of the sequences that are sound, by torch in logarithms; 0 for the others."""
    return LogChain(BlockChain(plan, states, *tensors)).log_evidence().masked_fill(~sound, 0.0)


def _gradients(
    plan: Plan, states: States, tensors: tuple[Tensor | None, ...], weights: Tensor
) -> list[Tensor | None]:
    """The gradient of the evidence times ``weights``, by torch in logarithms."""
    with torch.enable_grad():
        inputs = [None if part is None else part.detach().requires_grad_() for part in tensors]
        evidence = LogChain(BlockChain(plan, states, *inputs)).log_evidence()  # type: ignore[arg-type]
        wanted = [part for part in inputs if part is not None]
        gradients = iter(torch.autograd.grad(evidence, wanted, weights, allow_unused=True))
    return [None if part is None else next(gradients) for part in inputs]


def log_evidence(kernels: ModuleType, chain: BlockChain) -> tuple[Tensor, Tensor]:
    """Log evidence ``(N,)`` in the order of the plan, and where it is sound; differentiable."""
    return _Scaled.apply(kernels, *chain)


def final_state(kernels: ModuleType, chain: BlockChain) -> Tensor | None:
    """Log p(z_T | x_{1:T}) ``(N, w)`` in the order of the plan; None if logarithms are needed."""
    plan, sizes = chain.plan, chain.states.sizes
    forward = _Forward(kernels, chain)
    last = plan.begins[plan.lengths - 1] + torch.arange(len(plan.lengths))
    beyond = torch.arange(chain.states.width) >= sizes[plan.block[last]].unsqueeze(-1)
    probs = forward.alpha[last].masked_fill_(beyond, 0.0)
    cut = (probs == 0).logical_and_(~beyond).any(-1) & (forward.lost > 0)
    return probs.log() if bool((forward.sound & ~cut).all()) else None
