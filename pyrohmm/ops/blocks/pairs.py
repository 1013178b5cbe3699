"""Transition probabilities within the pairs of blocks that occur, by few products.

A pair is a block and the one after it. What is of a pair is a matrix ``(w, w)`` whose columns are
the states of the first block, so that a product gives those of all pairs from a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..._precision import at_least_single, with_gradient
from ..log_space import finite_or_zero
from ..tensor_cache import cached_on
from .states import Blocks, offsets

GROUPS = 4  # products on an accelerator, where a launch takes longer than some padding


class BlockPairs:
    """Distinct pairs of blocks, in groups whose scores are one product.

    On a CPU a group is the pairs from one block, which stay in its cache. On an accelerator it is
    those from several blocks with about as many targets, padded by pairs of which nothing is read.

    Args:
        keys: Of any shape, ``source * count + target`` of ``count`` blocks.
        count: B.
        device: Where products are computed.

    Attributes:
        index: The pair of each key.
        source, target: ``(P,)``.
    """

    def __init__(self, keys: Tensor, count: int, device: torch.device) -> None:
        keys, index = keys.unique(return_inverse=True)
        first, number = (keys // count).unique_consecutive(return_counts=True)
        self._size = 1 if device.type == "cpu" else max(1, -(-len(first) // GROUPS))
        order = number.argsort(descending=True, stable=True)
        widths = number[order][:: self._size].repeat_interleave(self._size)[: len(first)]
        begin = offsets(widths)
        places = torch.arange(len(keys)) - offsets(number)[:-1].repeat_interleave(number)
        places += begin[order.argsort()].repeat_interleave(number)
        self.index, self._device = places[index], device
        self._sources = first[order]
        self._sizes = pad(begin[:-1][:: self._size], (0, 1), value=int(begin[-1])).diff().tolist()
        self.source = self._sources.repeat_interleave(widths)
        self.target = torch.zeros_like(self.source).index_copy(0, places, keys % count)
        self._keys = self.source * count + self.target

    def __len__(self) -> int:
        return len(self.target)

    def groups(self, *parts: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Of each group its source blocks ``(g,)``, targets ``(g C,)``, and part of all pairs."""
        sources, targets = (cached_on(self._device, x) for x in (self._sources, self.target))
        pieces = (x.split(self._sizes) for x in (targets, *parts))
        return zip(sources.split(self._size), *pieces)

    @property
    def keys(self) -> Tensor:
        """The keys of the pairs ``(P,)``, on the device."""
        return cached_on(self._device, self._keys)


def transition_probs(
    pairs: BlockPairs,
    blocks: Blocks,
    leave: Tensor,
    enter: Tensor,
    log_block_probs: Tensor,
    logs: bool = False,
) -> Tensor:
    """Transition probabilities ``(P, w, w)`` between the states of pairs of blocks; differentiable.

    Args:
        pairs: Of the blocks.
        blocks: Which states are together.
        leave: Vectors u, ``(K, D)``.
        enter: Vectors v, ``(K, D)``.
        log_block_probs: log p(b | i), ``(K, B)``.
        logs: Whether their logarithms are wanted.

    What is of states that a block does not have means nothing from them, and is zero to them.
    """
    parts = pairs, blocks, logs
    return with_gradient(partial(_by_groups, *parts), partial(_at_once, *parts),
                         leave, enter, log_block_probs)  # fmt: skip


def _at_once(
    pairs: BlockPairs, blocks: Blocks, logs: bool, leave: Tensor, enter: Tensor, log_shares: Tensor
) -> Tensor:
    """Transition probabilities of all pairs, by differentiable operations."""
    source, target = (cached_on(leave.device, x) for x in (pairs.source, pairs.target))
    left, right = blocks.by_block(leave)[source], blocks.by_block(enter)[target]
    scores = _without(blocks, at_least_single(right @ left.mT), target)
    found = scores.log_softmax(1) + _shares(pairs, blocks, log_shares)
    return found if logs else found.exp()


def _shares(pairs: BlockPairs, blocks: Blocks, values: Tensor) -> Tensor:
    """Gather values by state and next block ``(K, B)`` for each pair, ``(P, 1, w)``."""
    by_pair = blocks.by_block(values).mT.flatten(0, 1)
    return by_pair.index_select(0, pairs.keys).unsqueeze(1)


def _without(blocks: Blocks, scores: Tensor, target: Tensor) -> Tensor:
    """Mask scores of pairs: -inf at padding states."""
    if blocks.are_equal:
        return scores
    beyond = cached_on(scores.device, blocks.states) < 0
    return scores.masked_fill(beyond[target].unsqueeze(-1), -torch.inf)


def _by_groups(
    pairs: BlockPairs, blocks: Blocks, logs: bool, leave: Tensor, enter: Tensor, log_shares: Tensor
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, ...]]]:
    """Transition probabilities of pairs by one product per group, and their gradient."""
    width = blocks.width
    left, right = blocks.by_block(leave), blocks.by_block(enter)
    shares = _shares(pairs, blocks, log_shares if logs else log_shares.exp())
    least = torch.finfo(shares.dtype).tiny
    out = at_least_single(leave[:0]).new_empty(len(pairs), width, width)
    for sources, targets, share, found in pairs.groups(shares, out):
        entered = right.index_select(0, targets).view(len(sources), -1, right.size(-1))
        scores = torch.bmm(entered, left.index_select(0, sources).mT).view(found.shape)
        scores = _without(blocks, at_least_single(scores), targets)
        if logs:
            torch.log_softmax(scores, 1, out=found).add_(share)
        else:
            torch.softmax(scores, 1, out=found).mul_(share)

    def gradient(weights: Tensor) -> tuple[Tensor, ...]:
        to_left, to_right = torch.zeros_like(left), torch.zeros_like(right, dtype=out.dtype)
        to_share = torch.empty_like(shares)
        for sources, targets, share, found, weight, total in pairs.groups(
            shares, out, weights, to_share
        ):
            if logs:
                changed, within = weight, (found - finite_or_zero(share)).exp_()
            else:
                changed, within = weight * found, found
            torch.sum(changed, 1, keepdim=True, out=total)
            some = total if logs else total / share.clamp(min=least)
            changed = torch.addcmul(changed, within, some, value=-1).to(left.dtype)
            changed = changed.reshape(len(sources), -1, width)
            entered = right.index_select(0, targets).view(len(sources), -1, right.size(-1))
            to_left.index_copy_(0, sources, torch.bmm(changed.mT, entered))
            entered = torch.bmm(changed, left.index_select(0, sources))
            to_right.index_add_(0, targets, entered.view(len(targets), width, -1).to(out.dtype))
        by_block = out.new_zeros(blocks.num_blocks**2, width)
        by_block.index_add_(0, pairs.keys, to_share.squeeze(1))
        to_shares = by_block.view(-1, blocks.num_blocks, width).mT
        return tuple(blocks.of_states(x) for x in (to_left, to_right.to(right.dtype), to_shares))

    return out, gradient


def probs_of_matrix(
    pairs: BlockPairs, blocks: Blocks, matrix: Tensor, logs: bool = False
) -> Tensor:
    """As :func:`transition_probs`, of log-probabilities ``(K, K)``; any to and from no state."""
    places = tuple(cached_on(matrix.device, x) for x in (pairs.source, pairs.target))

    def by_pair(matrix: Tensor) -> Tensor:
        return matrix.unflatten(0, (-1, width)).unflatten(-1, (-1, width)).permute(0, 2, 3, 1)

    def taken(matrix: Tensor) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor]]]:
        out = by_pair(matrix)[places]
        out = out if logs else out.exp_()

        def gradient(weights: Tensor) -> tuple[Tensor]:
            found = torch.zeros_like(matrix)
            for _, target, source, weight, value in pairs.groups(places[0], weights, out):
                weight = weight if logs else weight * value
                by_pair(found).index_put_((source, target), weight, accumulate=True)
            return (found,)

        return out, gradient

    def twin(matrix: Tensor) -> Tensor:
        found = by_pair(matrix)[places]
        return found if logs else found.exp()

    width = blocks.width
    if not blocks.are_equal:
        for _ in range(2):
            matrix = blocks.by_block(matrix).flatten(0, 1).mT
    return with_gradient(taken, twin, matrix.contiguous())
