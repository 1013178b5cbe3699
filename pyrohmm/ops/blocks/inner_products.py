"""Probabilities of states in blocks by softmax of inner products: transitions, and emissions.

Transitions are on one level or two; scores of symbols exist only where a state may emit them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..._checks import check_floats, check_shape, check_tensor
from ..._precision import at_least_single, full_precision, recomputed, with_gradient
from ..log_space import log_softmax_of_parts
from ..tensor_cache import cached, cached_on, lazy
from .states import Blocks, offsets
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
    padded = partial(_padded, blocks)
    if emit.device.type != "cpu":
        return padded(emit, words, bias)
    return with_gradient(partial(_by_blocks, blocks), padded, emit, words, bias)


def _padded(blocks: Blocks, emit: Tensor, words: Tensor, bias: Tensor) -> Tensor:
    """Log emission table by one padded batched product."""

    def made() -> tuple[Tensor, Tensor]:
        owner, order = blocks.symbol_block, blocks.symbol_block.argsort(stable=True)
        counts = owner.bincount(minlength=blocks.num_blocks)
        rank = torch.arange(len(owner)) - offsets(counts)[owner[order]]
        most = int(counts.max())
        members = torch.full((len(counts), most), len(owner))
        members[owner[order], rank] = order
        return members, owner * most + rank[order.argsort()]

    places = cached(blocks.symbol_block, made)
    members, place = (cached_on(emit.device, part) for part in places)
    own = blocks.states.to(emit.device)
    vectors = pad(words, (0, 0, 0, 1))[members] @ emit[own.clamp(min=0)].mT  # (B, M, w)
    biases = pad(bias, (0, 1), value=-torch.inf)[members]
    table = (vectors + biases.unsqueeze(-1)).log_softmax(1)
    table = table.masked_fill((own < 0).unsqueeze(1), -torch.inf)
    return table.flatten(0, 1).index_select(0, place)


def _by_blocks(
    blocks: Blocks, emit: Tensor, words: Tensor, bias: Tensor
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, ...]]]:
    """Log emission table, one product per block, with its gradient."""
    order = blocks.symbol_block.argsort(stable=True).to(emit.device)
    place, vectors, biases = order.argsort(), words[order], bias[order]
    table = emit.new_full((len(words), blocks.width), -torch.inf)
    for state, word in _ranges(blocks):
        logits = torch.addmm(biases[word].unsqueeze(-1), vectors[word], emit[state].mT)
        table[word, : state.stop - state.start] = logits.log_softmax(0)

    def gradient(weights: Tensor) -> tuple[Tensor, ...]:
        weights, probs, vectors = weights[order], table.exp(), words[order]
        to_emit, to_words = torch.zeros_like(emit), torch.empty_like(words)
        to_bias = words.new_empty(len(words))
        for state, word in _ranges(blocks):
            width = state.stop - state.start
            weight = weights[word, :width]
            changed = weight - probs[word, :width] * weight.sum(0)
            torch.mm(changed.mT, vectors[word], out=to_emit[state])
            torch.mm(changed, emit[state], out=to_words[word])
            torch.sum(changed, 1, out=to_bias[word])
        return to_emit, to_words[place], to_bias[place]

    return table[place], gradient


def _ranges(blocks: Blocks) -> list[tuple[slice, slice]]:
    """For each block with symbols: its states, and the range of its symbols sorted by block."""
    counts = torch.bincount(blocks.symbol_block, minlength=blocks.num_blocks)
    ends, starts = offsets(counts).tolist(), blocks.starts.tolist()
    parts = zip(pairwise(starts), pairwise(ends))
    return [(slice(*state), slice(*word)) for state, word in parts if word[0] < word[1]]
