"""Probabilities of states in blocks by softmax of inner products: transitions, and emissions.

Transitions are on one level or two; scores of symbols exist only where a state may emit them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..._checks import check_floats, check_shape, check_tensor
from ..._precision import at_least_single, full_precision, recomputed
from ..log_space import log_softmax_of_parts
from ..tensor_cache import cached, cached_on, lazy
from .pairs import BlockPairs
from .states import Blocks
from .transitions import at_once

LOW = (torch.bfloat16, torch.float16)


def _log_sums(leave: Tensor, enter: Tensor, blocks: Blocks) -> Tensor:
    """Log-sum-exp of ``leave @ enter.T`` over each block, ``(K, B)``.

    The scores are computed some rows at a time, and again for the gradient.
    """

    def sums(part: Tensor, entered: Tensor) -> Tensor:
        scores = at_least_single(part @ entered.flatten(0, 1).mT).unflatten(-1, entered.shape[:2])
        return blocks.without_padding(scores, -torch.inf).logsumexp(-1)

    rows, entered = max(1, at_once(leave.device) // len(enter)), blocks.by_block(enter)
    return torch.cat([recomputed(sums, part, entered) for part in leave.split(rows)])


class InnerProductTransition:
    r"""Transitions whose logits are inner products of vectors of states in blocks.

    .. math:: p(j | i) = \mathrm{softmax}_j(u_i \cdot v_j)
              \quad\text{or}\quad
              p(j | i) = \mathrm{softmax}_b(s_{ib}) \,
              \mathrm{softmax}_{j \in b}(u_i \cdot v_j)

    On two levels, with block logits, any matrix can be written with enough dimensions, and only the
    pairs of blocks that occur in the sequences are computed. On one level the sum over all states
    is computed as well, in :math:`O(K^2 D)`, though never kept.

    Args:
        leave: ``(K, D)``, u.
        enter: ``(K, D)``, v.
        blocks: Which states are together.
        block_logits: ``(K, B)``, s; without them there is one level.

    Vectors may be in bfloat16 or float16, as networks under ``torch.autocast`` give them: then
    their products are computed in that, and all else in float32.

    Raises:
        TypeError: If a tensor is not floating point.
        ValueError: If shapes disagree.
    """

    def __init__(
        self, leave: Tensor, enter: Tensor, blocks: Blocks, block_logits: Tensor | None = None
    ) -> None:
        for name, tensor in (("leave", leave), ("enter", enter)):
            check_tensor(name, tensor)
            if tensor.dtype not in LOW:
                check_floats(name, tensor)
            check_shape(
                name, tensor, (blocks.num_states, leave.size(-1)), "(K, D)", "D is that of leave."
            )
        if block_logits is not None:
            check_floats("block_logits", block_logits)
            shape = (blocks.num_states, blocks.num_blocks)
            check_shape("block_logits", block_logits, shape, "(K, B)")
        self.leave, self.enter, self.blocks = leave, enter, blocks
        self.block_logits = block_logits

    @lazy
    def log_block_probs(self) -> Tensor:
        """Log-probability of the next block, log p(b | i), ``(K, B)``."""
        return self.log_block_probs_from(self.leave, self.block_logits)

    def log_block_probs_from(self, leave: Tensor, block_logits: Tensor | None) -> Tensor:
        """Log-probabilities ``(n, B)`` of the next block, from vectors ``leave`` ``(n, D)``."""
        if block_logits is not None:
            return block_logits.log_softmax(-1)
        with full_precision(leave):
            return _log_sums(leave, self.enter, self.blocks).log_softmax(-1)

    def log_probs_from(self, leave: Tensor, log_block_probs: Tensor) -> Tensor:
        """Log-probabilities of the next state, ``(n, K)``, from states with vectors ``(n, D)``."""
        with full_precision(leave):
            scores = at_least_single(leave @ self.enter.mT)
        return log_softmax_of_parts(scores, self.blocks.sizes, log_block_probs)

    def rows(self, states: Tensor) -> Tensor:
        """Log-probabilities of the next state, ``(n, K)``, from ``states`` ``(n,)``."""
        states = states.to(self.leave.device)
        leave = self.leave[states]
        if self.block_logits is None:
            with full_precision(leave):
                return at_least_single(leave @ self.enter.mT).log_softmax(-1)
        return self.log_probs_from(leave, self.block_logits[states].log_softmax(-1))

    @lazy
    def matrix(self) -> Tensor:
        """Log-probabilities of all transitions, ``(K, K)``; computed when first read."""
        return self.rows(torch.arange(self.blocks.num_states, device=self.leave.device))


def log_emission(emit: Tensor, words: Tensor, bias: Tensor, blocks: Blocks) -> Tensor:
    """Log-probabilities of symbols in the states of their blocks, ``(V, w)``; -inf beyond a block.

    Logits are inner products and a bias for each symbol; each state has a softmax over the symbols
    that it may emit, and no other logits are computed.

    Args:
        emit: ``(K, D)``, a vector for each state.
        words: ``(V, D)``, a vector for each symbol.
        bias: ``(V,)``.
        blocks: Which states may emit which symbol.
    """
    device, owner = emit.device, blocks.symbol_block
    every = torch.arange(len(owner), device="cpu")
    pairs = cached(
        owner, lambda: BlockPairs(owner * len(owner) + every, len(owner), device),
        f"{device}".encode(),
    )  # fmt: skip
    place = cached_on(device, pairs.index)
    biases = bias.new_full((len(pairs),), -torch.inf).index_copy(0, place, bias)
    vectors = words.index_select(0, cached_on(device, pairs.target))
    states = blocks.by_block(emit).index_select(0, cached_on(device, pairs.sources))
    found = [
        torch.baddbmm(bias.view(len(state), -1, 1), vector.view(len(state), -1, vector.size(-1)),
                      state.mT).log_softmax(1).flatten(0, 1)
        for bias, vector, state in zip(*(x.split(pairs.sizes) for x in (biases, vectors)),
                                       states.split(pairs.each))
    ]  # fmt: skip
    return blocks.without_others(torch.cat(found).index_select(0, place))
