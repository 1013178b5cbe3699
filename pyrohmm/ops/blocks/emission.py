"""Emission log-probabilities of states in blocks: scores that exist only where they are allowed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from ..._precision import with_gradient
from .plan import bounds
from .states import Blocks


def log_emission(emit: Tensor, words: Tensor, bias: Tensor, blocks: Blocks) -> Tensor:
    """Log-probabilities of symbols in the states of their blocks, ``(V, w)``; -inf beyond a block.

    Logits are inner products and a bias for each symbol; each state has a softmax over the symbols
    that it may emit, and if blocks are disjoint no other logits are computed.

    Args:
        emit: ``(K, D)``, a vector for each state.
        words: ``(V, D)``, a vector for each symbol.
        bias: ``(V,)``.
        blocks: Which states may emit which symbol.
    """
    plain = partial(_plain_log_emission, blocks=blocks)
    if not blocks.disjoint:
        return plain(emit, words, bias)
    return with_gradient(partial(_by_blocks, blocks), plain, emit, words, bias)


def _plain_log_emission(emit: Tensor, words: Tensor, bias: Tensor, blocks: Blocks) -> Tensor:
    """:func:`log_emission` by the logits of all symbols in all states."""
    rows = blocks.states[blocks.symbol_block].to(emit.device)
    logits = words @ emit.mT + bias.unsqueeze(-1)
    return normalised(logits.gather(1, rows.clamp(min=0)), blocks)


def normalised(logits: Tensor, blocks: Blocks) -> Tensor:
    """Log-probabilities of symbols in the states of their blocks, ``(V, w)``; -inf beyond a block.

    Args:
        logits: ``(V, w)``, of each symbol in the states of its block; finite.
        blocks: Which states those are. Each state has a softmax over its symbols.
    """
    rows = blocks.states[blocks.symbol_block].to(logits.device)
    place = rows.masked_fill(rows < 0, blocks.num_states).flatten()
    peak = logits.new_full((blocks.num_states + 1,), -torch.inf)
    peak = peak.scatter_reduce(0, place, logits.detach().flatten(), "amax")
    shifted = (logits.flatten() - peak[place]).exp()
    total = peak + torch.zeros_like(peak).index_add(0, place, shifted).log()
    logs = logits - total.index_select(0, place).view_as(logits)
    return logs.masked_fill(rows < 0, -torch.inf)


def log_product(
    table: Tensor, words: Tensor, context: Tensor, symbols: Tensor, blocks: Blocks
) -> Tensor:
    r"""Log-probabilities of symbols under a product of experts, ``(M, w)``; -inf beyond a block.

    .. math:: p(x | z, c) = p(x | z) \, e^{c \cdot E_x} \Big/
              \sum_{x'} p(x' | z) \, e^{c \cdot E_{x'}}

    over the symbols of the block: one product of matrices for each block that occurs, in float64,
    as the experts may all but exclude each other.

    Args:
        table: ``(V, w)``, log p(x | z), of :func:`log_emission`.
        words: ``(V, D)``, E.
        context: ``(M, D)``, c.
        symbols: ``(M,)``, x.
        blocks: Which states may emit which symbol; disjoint.
    """
    owner, parts, order = blocks.symbol_block[symbols.cpu()], [], []
    for block in owner.unique().tolist():
        token = (owner == block).nonzero().squeeze(-1).to(table.device)
        word = (blocks.symbol_block == block).nonzero().squeeze(-1).to(table.device)
        width = int(blocks.sizes[block])
        scores, rows = context[token] @ words[word].mT, table[word, :width]
        scores = scores.double().log_softmax(-1)
        total = (scores.exp() @ rows.double().exp()).log()
        place = torch.searchsorted(word, symbols[token])
        product = rows[place] + (scores.gather(1, place.unsqueeze(-1)) - total).to(rows.dtype)
        space = (0, table.size(1) - width)
        parts.append(torch.nn.functional.pad(product, space, value=-torch.inf))
        order.append(token)
    return torch.cat(parts)[torch.cat(order).argsort()]


def _by_blocks(
    blocks: Blocks, emit: Tensor, words: Tensor, bias: Tensor
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, ...]]]:
    """:func:`log_emission` for disjoint blocks, one product for each; and its gradient."""
    order = blocks.symbol_block.argsort(stable=True).to(emit.device)
    place, vectors, biases = order.argsort(), words[order], bias[order]
    table = emit.new_full((len(words), blocks.width), -torch.inf)
    for state, word in _parts(blocks):
        logits = torch.addmm(biases[word].unsqueeze(-1), vectors[word], emit[state].mT)
        table[word, : state.stop - state.start] = logits.log_softmax(0)

    def gradient(weights: Tensor) -> tuple[Tensor, ...]:
        weights, probs, vectors = weights[order], table.exp(), words[order]
        to_emit, to_words = torch.zeros_like(emit), torch.empty_like(words)
        to_bias = words.new_empty(len(words))
        for state, word in _parts(blocks):
            width = state.stop - state.start
            weight = weights[word, :width]
            changed = weight - probs[word, :width] * weight.sum(0)
            torch.mm(changed.mT, vectors[word], out=to_emit[state])
            torch.mm(changed, emit[state], out=to_words[word])
            torch.sum(changed, 1, out=to_bias[word])
        return to_emit, to_words[place], to_bias[place]

    return table[place], gradient


def _parts(blocks: Blocks) -> list[tuple[slice, slice]]:
    """For each block that some symbol has: its states, and its symbols sorted by block."""
    counts = torch.bincount(blocks.symbol_block, minlength=blocks.num_blocks)
    ends, starts = bounds(counts).tolist(), blocks.layout.starts.tolist()
    parts = zip(pairwise(starts), pairwise(ends))
    return [(slice(*state), slice(*word)) for state, word in parts if word[0] < word[1]]
