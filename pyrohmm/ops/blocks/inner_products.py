"""Transitions between states in blocks: softmax of inner products, on one level or two."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..._checks import check_floats, check_shape, check_tensor
from ..._precision import at_least_single, full_precision, recomputed
from ..log_space import log_softmax_of_parts
from ..tensor_cache import lazy
from .plan import States
from .states import Blocks

LOW = (torch.bfloat16, torch.float16)
CHUNK = 1 << 23  # scores that exist at one time while all transitions of all states are summed


def _parts(scores: Tensor, states: States) -> Sequence[Tensor]:
    """The parts of scores ``(R, K)`` by blocks; in one tensor, where these are of one size."""
    if states.are_equal:
        return [scores.unflatten(-1, (-1, states.width))]
    return scores.split(states.sizes.tolist(), -1)


def _log_sums(leave: Tensor, enter: Tensor, states: States) -> Tensor:
    """Logarithms ``(K, B)`` of the sums of exp(leave @ enter.T) over each block.

    The scores are computed some rows at a time, and again for the gradient.
    """

    def sums(part: Tensor, enter: Tensor) -> Tensor:
        scores = at_least_single(part @ enter.mT)
        of_blocks = [cells.logsumexp(-1) for cells in _parts(scores, states)]
        return of_blocks[0] if states.are_equal else torch.stack(of_blocks, -1)

    rows = max(1, CHUNK // len(enter))
    return torch.cat([recomputed(sums, part, enter) for part in leave.split(rows)])


class InnerProductTransition:
    r"""Transitions whose logits are inner products of vectors of states, for disjoint blocks.

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
        blocks: Which states are together; disjoint.
        block_logits: ``(K, B)``, s; without them there is one level.

    Vectors may be in bfloat16 or float16, as networks under ``torch.autocast`` give them: then
    their products are computed in that, and all else in float32.

    Raises:
        TypeError: If a tensor is not floating point.
        ValueError: If blocks overlap or shapes disagree.
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
            return _log_sums(leave, self.enter, self.blocks.layout).log_softmax(-1)

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
