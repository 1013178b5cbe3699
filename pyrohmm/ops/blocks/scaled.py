r"""Chains in blocks of states by compiled scaled messages, for models on the CPU.

Messages are float64 and sum to one at each step; transition probabilities have the dtype of the
model. Exact within rounding
----------------------------
Logarithms of probabilities that are not zero are raised to ``LOW`` at least, so that products of
them stay in the range of float64. If a *likelihood* or a first state was raised, or a message fell
below ``LEAST``, the sequence is computed in logarithms. Raised *transitions* are more frequent, as
softmaxes in float32 are cut early. They only add paths; the share of the evidence that is of paths
with such a transition is at most the expected number of them, which the backward pass bounds. Where
that is more than rounding, the sequence is computed in logarithms, too.
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
from .plan import Plan, PlannedChain, States, score_gradients, scores

LOW = {torch.float32: -75.0, torch.float64: -150.0}
LEAST = 1e-100


def _mixed(count: int) -> Tensor:
    """The numbers below ``count``, such that equal parts of them hold large and small alike."""
    threads = max(1, min(torch.get_num_threads(), count))
    return torch.cat([torch.arange(part, count, threads) for part in range(threads)])


def _raised(logs: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities in float64, none but zeros below the least; and where one was."""
    low = LOW[torch.float64]
    below = logs < low
    probs = logs.clamp(min=low).double().exp_()
    zero = logs.isneginf()
    return probs.masked_fill_(zero, 0.0), below & ~zero


class Passes:
    """Forward and backward passes; sequences in the order of the plan.

    Attributes:
        evidence: ``(N,)`` float64, log.
        sound: ``(N,)``, whether it is exact.
        raised: ``(P,)``, whether a transition of a pair was raised.
        alpha: ``(M, w)``, filtered probabilities of each token.
        probs: Transition probabilities of the pairs, within the blocks.
    """

    def __init__(self, kernels: ModuleType, chain: PlannedChain) -> None:
        plan, *_, log_block_probs, log_first, log_seen = chain
        self.kernels, self.chain, count = kernels, chain, len(plan.lengths)
        self.raised = torch.zeros(len(plan.source), dtype=torch.bool)
        self.block_probs = torch.empty(0, 0, dtype=torch.float64)
        if log_block_probs is not None:  # (B, K)
            block_probs, raised = _raised(log_block_probs.mT)
            self.block_probs = block_probs.contiguous()
            self.raised |= bool(raised.any())
        peak = finite_or_zero(log_seen.amax(-1))
        self.seen, cut = _raised(log_seen - peak.unsqueeze(-1))
        first, cut_first = _raised(log_first)
        self.sound = ~cut_first.any(-1)
        self.sound[plan.rank[cut.any(-1)]] = False
        self.alpha, self.norm = torch.zeros_like(self.seen), torch.ones(len(peak)).double()
        self.evidence = torch.zeros(count, dtype=torch.float64)
        self.evidence.index_add_(0, plan.rank, peak.double())
        self.probs: Tensor | None = self.probs_of_pairs()
        self._run(
            kernels.forward, self.probs, self.block_probs, first, self.seen, LEAST, self.alpha,
            self.norm, self.evidence, self.sound,
        )  # fmt: skip
        if bool(self.raised.any()):
            uses = self.backward(torch.ones(count).double())[2] * math.exp(LOW[log_seen.dtype])
            self.sound &= uses < torch.finfo(log_seen.dtype).eps

    def _run(self, loop: Any, *arguments: Any) -> None:
        """Run a loop over sequences."""
        plan, states = self.chain.plan, self.chain.states
        mean = plan.size // max(len(plan.source), 1)
        self.kernels.run(
            loop, len(plan.lengths), mean * len(plan.begins), _mixed(len(plan.lengths)),
            plan.lengths, plan.begins, plan.block, states.sizes, states.starts, plan.pair,
            plan.base, plan.stride, *arguments,
        )  # fmt: skip

    def probs_of_pairs(self) -> Tensor:
        """Transition probabilities of the pairs, within the blocks."""
        kernels, plan, probs = self.kernels, self.chain.plan, scores(self.chain)
        of_matrix = self.chain.enter is None
        loop = kernels.exp_of_pairs if of_matrix else kernels.softmax_of_pairs
        count = len(plan.source) if of_matrix else len(plan.pairs_of) - 1
        kernels.run(
            loop, count, 10 * plan.size // max(count, 1), _mixed(count),
            *(() if of_matrix else (plan.pairs_of,)), plan.source, plan.target,
            self.chain.states.sizes, plan.base, plan.stride, LOW[probs.dtype], probs, self.raised,
        )  # fmt: skip
        return probs

    def backward(self, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Smoothed marginals and messages ``(M, w)``; expected uses of raised transitions."""
        if self.probs is None:  # a second time, through a graph that was retained
            self.probs = self.probs_of_pairs()
        gamma, message = torch.zeros_like(self.seen), torch.zeros_like(self.seen)
        uses = torch.zeros_like(self.evidence)
        self._run(
            self.kernels.backward, self.probs, self.block_probs, self.raised, self.seen,
            self.alpha, self.norm, self.sound, weights.double().contiguous(), gamma, message, uses,
        )  # fmt: skip
        return gamma, message, uses

    def transition_gradients(self, message: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Gradients by ``leave``, ``enter`` and ``log_block_probs``; takes the probabilities."""
        chain, probs, self.probs = self.chain, self.probs, None
        assert probs is not None
        plan, states = chain.plan, chain.states
        pairs, by_block = len(plan.source), torch.zeros_like(self.block_probs)
        schedule = plan.tokens_of.diff().argsort(descending=True, stable=True)[_mixed(pairs)]
        work = plan.size // max(pairs, 1) * (2 + len(plan.tokens) // max(pairs, 1))
        self.kernels.run(
            self.kernels.gradients_of_pairs, pairs, work, schedule, plan.tokens_of, plan.tokens,
            plan.before, plan.block, states.sizes, states.starts, plan.base, plan.stride,
            torch.finfo(probs.dtype).tiny, self.alpha, message, self.block_probs, probs, by_block,
        )  # fmt: skip
        shares = None if chain.log_block_probs is None else by_block.mul_(self.block_probs).mT
        return *score_gradients(chain, probs), None if shares is None else shares.to(probs.dtype)


class _Scaled(torch.autograd.Function):
    """Log evidence by scaled messages ``(N,)`` in the order of the plan, and whether it is sound.

    Gradients are analytic; those that will be differentiated have a tape of T steps.
    """

    @staticmethod
    def forward(
        ctx: Any, kernels: ModuleType, plan: Plan, states: States, *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        chain = PlannedChain(plan, states, *tensors)  # type: ignore[arg-type]
        ctx.passes = passes = Passes(kernels, chain)
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(passes.sound)
        value = passes.evidence.masked_fill(~passes.sound, 0.0)
        return value.to(chain.log_seen.dtype), passes.sound

    @staticmethod
    @in_full_precision
    def backward(ctx: Any, weights: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        passes: Passes = ctx.passes
        plan, states = passes.chain[:2]
        none = None, None, None
        if torch.is_grad_enabled():
            evidence = partial(_evidence, plan, states, passes.sound)
            return (*none, *differentiable_gradient(evidence, ctx.saved_tensors, weights))
        gamma, message, _ = passes.backward(weights)
        by_transition: tuple[Tensor | None, ...] = none
        if any(ctx.needs_input_grad[3:6]):
            by_transition = passes.transition_gradients(message)
        gamma = gamma.to(weights.dtype)
        return (*none, *by_transition, gamma[: len(weights)], gamma)


def _evidence(plan: Plan, states: States, sound: Tensor, *tensors: Any) -> Tensor:
    """Log evidence of the sequences that are sound, by torch in logarithms; 0 for the others."""
    return LogChain(PlannedChain(plan, states, *tensors)).log_evidence().masked_fill(~sound, 0.0)


def log_evidence(kernels: ModuleType, chain: PlannedChain) -> tuple[Tensor, Tensor]:
    """Log evidence ``(N,)`` in the order of the plan, and where it is sound; differentiable."""
    return _Scaled.apply(kernels, *chain)


def final_state(kernels: ModuleType, chain: PlannedChain) -> Tensor | None:
    """Log p(z_T | x_{1:T}) ``(N, w)`` in the order of the plan; None if logarithms are needed."""
    plan, passes = chain.plan, Passes(kernels, chain)
    if not bool(passes.sound.all()) or bool(passes.raised.any()):
        return None
    last = plan.begins[plan.lengths - 1] + torch.arange(len(plan.lengths))
    return passes.alpha[last].log().to(chain.log_seen.dtype)
