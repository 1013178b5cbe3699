r"""Exact recursions for chains in which a symbol says to which block of states the state belongs.

Between two symbols only the transitions from the one's block to the other's matter, so that a step
costs the product of the sizes of the two blocks, whatever the number of states. The probabilities
of these transitions are computed once for each pair of blocks that occurs in the data. They are
products, :math:`p(j | i) = p(b | i) \, p(j | i, b)` for state j in block b, whose second factor is
a softmax of scores within the block (any chain can be written like that); where states are in
several blocks, they are given as they are.

On a CPU compiled loops scale messages: float64, and of sum one at each step. Transition
probabilities have the dtype of the model. This is exact within rounding: logarithms of
probabilities that are not zero are raised to ``LOW`` at least, so that products of them stay in the
range of float64. If a *likelihood* or a first state was raised, or a message fell below ``LEAST``,
the sequence is computed in logarithms. Raised *transitions* are more frequent, as
softmaxes in float32 are cut early. They only add paths; the share of the evidence that is of paths
with such a transition is at most the expected number of them, which the backward pass bounds. Where
that is more than rounding, the sequence is computed in logarithms, too.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..._precision import with_gradient
from ..backends import NUMBA, compiled, pick
from ..log_space import finite_or_zero
from ..tensor_cache import cached, cached_on
from .messages import LogChain
from .plan import PlannedChain, States, make_plan, score_gradients, scores

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


def plan_chain(
    blocks: Tensor,
    lengths: Tensor,
    states: States,
    leave: Tensor,
    enter: Tensor | None,
    log_block_probs: Tensor | None,
    log_first: Tensor,
    log_seen: Tensor,
) -> PlannedChain:
    """Chain in the order of its plan.

    Args:
        blocks: ``(N, T)``, block of each step, on the CPU; B where it is missing.
        lengths: ``(N,)``, number of steps that exist, on the CPU.
        states: Of each block.
        leave: ``(K, D)``, vectors of states; without ``enter``, log p(j | i), ``(K, K)``.
        enter: ``(K, D)``, vectors of states: scores are inner products; or None.
        log_block_probs: ``(K, B)``, log p(b | i); with ``enter`` only.
        log_first: ``(N, w)``, log-probability of the first state, in the first block.
        log_seen: ``(N, T, w)``, log p(x_t | z_t) in the states of the block; -inf beyond them.
    """
    device, steps = log_seen.device, lengths.numpy().tobytes()
    plan = cached(blocks, lambda: make_plan(blocks, lengths, states), states, steps)
    order, where = cached_on(device, plan.order), cached_on(device, plan.where)
    first, seen = log_first.index_select(0, order), log_seen.flatten(0, 1).index_select(0, where)
    return PlannedChain(plan, states, leave, enter, log_block_probs, first, seen)


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


def log_evidence(
    chain: PlannedChain, log_initial: Tensor | None = None, log_missing: Tensor | None = None
) -> Tensor:
    r"""Log evidence :math:`\log p(x_{1:T})` in nats, ``(N,)`` in the order of the plan.

    Differentiable. The other arguments are those of :class:`.messages.LogChain`, where steps are
    missing.
    """
    kernels = _kernels(chain)
    if kernels is None:
        return LogChain(chain, log_initial, None, log_missing).log_evidence()
    with torch.no_grad():
        passes = Passes(kernels, chain.detached())
    tensors: Any = chain[2:]
    sound = passes.sound
    moving = any(part is not None and part.requires_grad for part in tensors[:3])

    def gradient(weights: Tensor) -> tuple[Tensor | None, ...]:
        gamma, message, _ = passes.backward(weights)
        by_transition = passes.transition_gradients(message) if moving else (None, None, None)
        gamma = gamma.to(weights.dtype)
        return *by_transition, gamma[: len(weights)], gamma

    def twin(*tensors: Any) -> Tensor:
        exact = LogChain(PlannedChain(*chain[:2], *tensors)).log_evidence()
        return exact.masked_fill(~sound, 0.0)

    scaled = passes.evidence.masked_fill(~sound, 0.0).to(chain.log_seen.dtype)
    value = with_gradient(lambda *_: (scaled.clone(), gradient), twin, *tensors)
    return value if bool(sound.all()) else torch.where(sound, value, LogChain(chain).log_evidence())


@torch.no_grad()
def final_state_log_probs(chain: PlannedChain) -> Tensor:
    r"""Log-probabilities of the final states, :math:`\log p(z_T \mid x_{1:T})`, ``(N, w)``.

    Of the states of each sequence's last block, in the order of the plan; -inf where that is
    impossible. No gradients.
    """
    kernels = _kernels(chain)
    if kernels is not None:
        plan, passes = chain.plan, Passes(kernels, chain)
        if bool(passes.sound.all()) and not bool(passes.raised.any()):
            last = plan.begins[plan.lengths - 1] + torch.arange(len(plan.lengths))
            return passes.alpha[last].log().to(chain.log_seen.dtype)
    return LogChain(chain).final_state()


def _kernels(chain: PlannedChain) -> ModuleType | None:
    """The compiled loops, if they compute this chain."""
    if pick(chain.log_seen.device) is not NUMBA:
        return None
    if bool((chain.plan.block == len(chain.states.sizes)).any()):
        return None
    return compiled("blocks._numba")
