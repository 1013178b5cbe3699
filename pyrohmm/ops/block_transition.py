"""Transitions between states in blocks: softmax of inner products, on one level or two."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .._checks import check_floats, check_shape
from .._lazy import lazy
from .._precision import differentiable_gradient, full_precision, in_full_precision
from . import block_recursions, lookup
from .block_plan import States
from .blocks import Blocks

CHUNK = 1 << 23  # scores that exist at one time while all moves of all states are summed


# Laws of moves ------------------------------------------------------------------------------------


class _SumsOfBlocks(torch.autograd.Function):
    """Logarithms ``(K, B)`` of the sums of exp(leave @ enter.T) over each block.

    The scores are computed some rows at a time, and again for the gradient.
    """

    @staticmethod
    def forward(ctx, leave, enter, states):
        ctx.states = states
        sums = leave.new_empty(len(leave), len(states.sizes))
        rows = max(1, CHUNK // len(enter))
        for part, out in zip(leave.split(rows), sums.split(rows)):
            _sum_blocks(part @ enter.mT, states, out)
        ctx.save_for_backward(leave, enter, sums)
        return sums

    @staticmethod
    @in_full_precision
    def backward(ctx, weights):
        leave, enter, sums = ctx.saved_tensors
        if torch.is_grad_enabled():
            plain = differentiable_gradient(
                lambda leave, enter: _plain_sums(leave @ enter.mT, ctx.states),
                (leave, enter),
                weights,
            )
            return (*plain, None)
        to_leave, to_enter = torch.empty_like(leave), torch.zeros_like(enter)
        rows = max(1, CHUNK // len(enter))
        parts = (each.split(rows) for each in (leave, sums, weights.contiguous(), to_leave))
        for part, total, weight, out in zip(*parts):
            shares = _weigh_blocks(part @ enter.mT, ctx.states, total, weight)
            torch.mm(shares, enter, out=out)
            to_enter.addmm_(shares.mT, part)
        return to_leave, to_enter, None


def _plain_sums(scores: Tensor, states: States) -> Tensor:
    """Logarithms of the sums over each block, by operations of torch."""
    parts = scores.split(states.sizes.tolist(), -1)
    return torch.stack([each.logsumexp(-1) for each in parts], -1)


def _sum_blocks(scores: Tensor, states: States, out: Tensor) -> None:
    kernels = lookup.kernels("_numba_blocks") if scores.device.type == "cpu" else None
    if kernels is not None:
        low = math.log(block_recursions.LEAST[scores.dtype])
        work = 10 * scores.size(1)
        kernels.run(kernels.sums_of_blocks, len(scores), work, scores, states.starts, low, out)
        return
    if _are_equal(states):
        torch.logsumexp(scores.unflatten(-1, (-1, states.width)), -1, out=out)
        return
    out.copy_(_plain_sums(scores, states))


def _are_equal(states: States) -> bool:
    """Whether all blocks have as many states, so that there is one operation for all."""
    return bool((states.sizes == states.width).all())


def _weigh_blocks(scores: Tensor, states: States, sums: Tensor, weights: Tensor) -> Tensor:
    """Softmax in each block, times the weight of the block; ``scores`` are overwritten."""
    kernels = lookup.kernels("_numba_blocks") if scores.device.type == "cpu" else None
    if kernels is not None:
        low = math.log(block_recursions.LEAST[scores.dtype])
        kernels.run(
            kernels.weighted_softmax_of_blocks, len(scores), 10 * scores.size(1), scores,
            states.starts, low, sums, weights,
        )  # fmt: skip
        return scores
    if _are_equal(states):
        cells = scores.unflatten(-1, (-1, states.width))
        cells.sub_(sums.unsqueeze(-1)).exp_().mul_(weights.unsqueeze(-1))
        return scores
    parts = zip(scores.split(states.sizes.tolist(), -1), sums.unbind(-1), weights.unbind(-1))
    for each, total, weight in parts:
        each.sub_(total.unsqueeze(-1)).exp_().mul_(weight.unsqueeze(-1))
    return scores


class InnerProductTransition:
    r"""Moves whose logits are inner products of vectors of states, for blocks that are disjoint.

    .. math:: p(j | i) = \mathrm{softmax}_j(u_i \cdot v_j)
              \quad\text{or}\quad
              p(j | i) = \mathrm{softmax}_b(s_{ib}) \,
              \mathrm{softmax}_{j \in b}(u_i \cdot v_j)

    In two levels, any matrix can be written with enough dimensions, and what is computed for some
    sequences are the pairs of blocks that occur in them. On one level the sum over all states is
    computed as well, in :math:`O(K^2 D)`, though never kept.

    Args:
        leave: ``(K, D)``, u.
        enter: ``(K, D)``, v.
        blocks: Which states are together.
        block_logits: ``(K, B)``, s; without them there is one level.
    """

    def __init__(
        self, leave: Tensor, enter: Tensor, blocks: Blocks, block_logits: Tensor | None = None
    ) -> None:
        if not blocks.disjoint:
            raise ValueError(
                "blocks must be disjoint, and their states in order; these overlap. Give the "
                "logarithms of a matrix of probabilities instead."
            )
        for name, tensor in (("leave", leave), ("enter", enter)):
            check_floats(name, tensor)
            check_shape(name, tensor, (blocks.num_states, leave.size(-1)), "(K, D)")
        if block_logits is not None:
            check_floats("block_logits", block_logits)
            shape = (blocks.num_states, blocks.num_blocks)
            check_shape("block_logits", block_logits, shape, "(K, B)")
        self.leave, self.enter, self.blocks = leave, enter, blocks
        self.block_logits = block_logits

    @lazy
    def log_shares(self) -> Tensor:
        """Log-probability of the next block, ``(K, B)``."""
        return self.shares_of(self.leave, self.block_logits)

    def shares_of(self, leave: Tensor, block_logits: Tensor | None) -> Tensor:
        """The same from states with the vectors ``leave`` ``(n, D)``, ``(n, B)``."""
        if block_logits is not None:
            return block_logits.log_softmax(-1)
        with full_precision(leave):
            return _SumsOfBlocks.apply(leave, self.enter, self.blocks._states).log_softmax(-1)

    def moves_of(self, leave: Tensor, log_shares: Tensor) -> Tensor:
        """Log-probabilities of the next state, ``(n, K)``, from states with vectors ``(n, D)``."""
        with full_precision(leave):
            parts = (leave @ self.enter.mT).split(self.blocks.sizes.tolist(), -1)
        shares = log_shares.unsqueeze(-1).unbind(-2)
        return torch.cat([each.log_softmax(-1) + own for each, own in zip(parts, shares)], -1)

    def rows(self, states: Tensor) -> Tensor:
        """Log-probabilities of the next state, ``(n, K)``, from ``states`` ``(n,)``."""
        leave = self.leave[states]
        if self.block_logits is None:
            with full_precision(leave):
                return (leave @ self.enter.mT).log_softmax(-1)
        return self.moves_of(leave, self.block_logits[states].log_softmax(-1))

    @lazy
    def matrix(self) -> Tensor:
        """All of them, ``(K, K)``; computed when it is read."""
        return self.rows(torch.arange(self.blocks.num_states, device=self.leave.device))
