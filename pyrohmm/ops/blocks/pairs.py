"""Transition probabilities within the pairs of blocks that occur, by few products.

A pair is a block and the one after it. What is of a pair is a matrix ``(w, w)`` whose columns are
the states of the first block, so that a product gives those of all pairs from a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..._precision import at_least_single
from ..._transforms import transforming
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
        keys: ``(P,)``, of the pairs.
        sizes: Number of pairs of each group.
        sources, each: Source blocks of all groups, of each ``each``; the last may have fewer.
    """

    def __init__(self, keys: Tensor, count: int, device: torch.device) -> None:
        keys, index = keys.unique(return_inverse=True)
        first, number = (keys // count).unique_consecutive(return_counts=True)
        self.each = 1 if device.type == "cpu" else max(1, -(-len(first) // GROUPS))
        order = number.argsort(descending=True, stable=True)
        widths = number[order][:: self.each].repeat_interleave(self.each)[: len(first)]
        begin = offsets(widths)
        places = torch.arange(len(keys)) - offsets(number)[:-1].repeat_interleave(number)
        places += begin[order.argsort()].repeat_interleave(number)
        self.index, self._device = places[index], device
        self.sources = first[order]
        self.sizes = pad(begin[:-1][:: self.each], (0, 1), value=int(begin[-1])).diff().tolist()
        self.source = self.sources.repeat_interleave(widths)
        self.target = torch.zeros_like(self.source).index_copy(0, places, keys % count)
        self.keys = self.source * count + self.target

    def __len__(self) -> int:
        return len(self.target)

    def groups(self, *parts: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Of each group its source blocks ``(g,)``, targets ``(g C,)``, and part of all pairs."""
        sources, targets = (cached_on(self._device, x) for x in (self.sources, self.target))
        pieces = (x.split(self.sizes) for x in (targets, *parts))
        return zip(sources.split(self.each), *pieces)


# From the weights of each group of pairs in turn, (p, w, w), to the gradients of what is given
PairGradient = Callable[[Iterable[Tensor]], tuple[Tensor, ...]]


def softmax_of_pairs(
    pairs: BlockPairs, blocks: Blocks, leave: Tensor, enter: Tensor, logs: bool = False
) -> tuple[Tensor, PairGradient]:
    """Probabilities of the next state within its block, of pairs ``(P, w, w)``; their gradient.

    By one product for each group. Of states that a block does not have they mean nothing, and are
    zero to them.

    Args:
        pairs: Of the blocks.
        blocks: Which states are together.
        leave: Vectors u, ``(K, D)``.
        enter: Vectors v, ``(K, D)``.
        logs: Whether their logarithms are wanted, which have no gradient.
    """
    width, left, right = blocks.width, blocks.by_block(leave), blocks.by_block(enter)
    softmax = torch.log_softmax if logs else torch.softmax
    out = at_least_single(leave[:0]).new_empty(len(pairs), width, width)
    for sources, targets, found in pairs.groups(out):
        entered = right.index_select(0, targets).view(len(sources), -1, right.size(-1))
        scores = torch.bmm(entered, left.index_select(0, sources).mT).view(found.shape)
        softmax(_without(blocks, at_least_single(scores), targets), 1, out=found)

    def gradient(weights: Iterable[Tensor]) -> tuple[Tensor, ...]:
        to_left, to_right = torch.zeros_like(left), torch.zeros_like(right, dtype=out.dtype)
        for (sources, targets, found), weight in zip(pairs.groups(out), weights):
            changed = torch._softmax_backward_data(weight.to(found), found, 1, found.dtype)
            changed = changed.to(left.dtype).view(len(sources), -1, width)
            entered = right.index_select(0, targets).view(len(sources), -1, right.size(-1))
            to_left.index_copy_(0, sources, torch.bmm(changed.mT, entered))
            entered = torch.bmm(changed, left.index_select(0, sources))
            to_right.index_add_(0, targets, entered.view(len(targets), width, -1).to(out.dtype))
            del weight, changed, entered  # before those of the next group are made
        return blocks.of_states(to_left), blocks.of_states(to_right.to(right.dtype))

    return out, gradient


def log_softmax_of_pairs(pairs: BlockPairs, blocks: Blocks, leave: Tensor, enter: Tensor) -> Tensor:
    """Logarithms of :func:`softmax_of_pairs`; differentiable."""
    if not (torch.is_grad_enabled() or transforming()):
        return softmax_of_pairs(pairs, blocks, leave, enter, True)[0]
    source, target = (cached_on(leave.device, x) for x in (pairs.source, pairs.target))
    left, right = blocks.by_block(leave)[source], blocks.by_block(enter)[target]
    return _without(blocks, at_least_single(right @ left.mT), target).log_softmax(1)


def _without(blocks: Blocks, scores: Tensor, target: Tensor) -> Tensor:
    """Mask scores of pairs: -inf at padding states."""
    if blocks.are_equal:
        return scores
    beyond = cached_on(scores.device, blocks.states) < 0
    return scores.masked_fill(beyond[target].unsqueeze(-1), -torch.inf)


def logs_of_matrix(pairs: BlockPairs, blocks: Blocks, matrix: Tensor) -> Tensor:
    """Of log-probabilities ``(K, K)`` those of pairs, ``(P, w, w)``; any to and from no state."""
    places = tuple(cached_on(matrix.device, x) for x in (pairs.source, pairs.target))
    if not blocks.are_equal:
        for _ in range(2):
            matrix = blocks.by_block(matrix).flatten(0, 1).mT
    return matrix.view(2 * blocks.states.shape).permute(0, 2, 3, 1)[places]


def probs_of_matrix(
    pairs: BlockPairs, blocks: Blocks, matrix: Tensor
) -> tuple[Tensor, PairGradient]:
    """Of log-probabilities ``(K, K)`` the probabilities of pairs; and their gradient."""
    out = logs_of_matrix(pairs, blocks, matrix).exp_()

    def gradient(weights: Iterable[Tensor]) -> tuple[Tensor, ...]:
        found = matrix.new_zeros(2 * blocks.states.shape)
        cells = found.permute(0, 2, 3, 1)
        sources = cached_on(matrix.device, pairs.source)
        for (_, target, source, value), weight in zip(pairs.groups(sources, out), weights):
            cells.index_put_((source, target), weight.to(value) * value, accumulate=True)
        return (blocks.of_states(blocks.of_states(found).permute(1, 2, 0)).mT,)

    return out, gradient
