r"""Chains whose symbols say in which block of states the state is, and what that saves.

``K`` states, ``V`` symbols, ``B`` blocks of at most ``w`` states each. Every symbol has a block:
the states that may emit it. A :class:`pyrohmm.BlockHMM` is an HMM with that constraint; it is as
exact as any, and a step costs :math:`w^2` in place of :math:`K^2`, so that there may be tens of
thousands of states.

References:
    Scaling Hidden Markov Language Models (Chiu and Rush, 2020),
    https://aclanthology.org/2020.emnlp-main.103
"""

from __future__ import annotations

import math
from functools import cached_property, partial
from itertools import pairwise

import torch
from torch import Tensor

from . import _blockwise, _lookup
from ._checks import (
    check_floats,
    check_integers,
    check_shape,
    check_size,
)
from ._lazy import lazy
from ._plan import States, bounds
from ._precision import differentiable_gradient, full_precision, in_full_precision

CHUNK = 1 << 23  # scores that exist at one time while all moves of all states are summed


class Blocks:
    """Which states may emit which symbol.

    Args:
        symbol_block: ``(V,)`` integers, the block of each symbol.
        states: For each of the B blocks, the states in it; a state may be in several.
        num_states: K; by default one more than the largest state.

    Raises:
        TypeError: If something does not hold integers.
        ValueError: If a block is empty, or has a state twice; or a state has no symbol, or is not
            one of 0 to K - 1.

    Example:
        >>> blocks = Blocks(torch.tensor([0, 0, 1]), [torch.tensor([0, 1]), torch.tensor([2])])
        >>> blocks.allowed
        tensor([[ True,  True, False],
                [ True,  True, False],
                [False, False,  True]])
    """

    def __init__(
        self, symbol_block: Tensor, states: list[Tensor], num_states: int | None = None
    ) -> None:
        check_integers("symbol_block", symbol_block)
        if symbol_block.dim() != 1 or len(symbol_block) == 0:
            raise ValueError(
                "symbol_block must have shape (V,) with at least one symbol; got shape "
                f"{tuple(symbol_block.shape)}."
            )
        if num_states is not None:
            check_size("num_states", num_states)
        for number, each in enumerate(states):
            check_integers(f"states of block {number}", each)
            if each.dim() != 1 or len(each) == 0 or len(each.unique()) < len(each):
                raise ValueError(
                    f"block {number} must have states, each once; got {each.tolist()[:10]}."
                )
        if int(symbol_block.min()) < 0 or int(symbol_block.max()) >= len(states):
            raise ValueError(
                f"symbol_block must lie between 0 and B - 1 = {len(states) - 1}; got values from "
                f"{int(symbol_block.min())} to {int(symbol_block.max())}."
            )
        self.symbol_block = symbol_block.cpu().long()
        sizes = torch.tensor([len(each) for each in states])
        members = torch.cat([each.cpu().long() for each in states])
        self._states = States(bounds(sizes), members, sizes, int(sizes.max()))
        self.num_states = int(members.max()) + 1 if num_states is None else num_states
        if int(members.min()) < 0 or int(members.max()) >= self.num_states:
            raise ValueError(
                f"states must lie between 0 and K - 1 = {self.num_states - 1}; got states from "
                f"{int(members.min())} to {int(members.max())}."
            )
        self.disjoint = torch.equal(members, torch.arange(self.num_states))
        used = torch.zeros(len(states), dtype=torch.bool)
        used[self.symbol_block] = True
        reached = torch.zeros(self.num_states, dtype=torch.bool)
        reached[members[used.repeat_interleave(sizes)]] = True
        if not bool(reached.all()):
            raise ValueError(
                "each state must be in a block that some symbol has; state "
                f"{int((~reached).byte().argmax())} of {self.num_states} is in none."
            )

    @property
    def num_symbols(self) -> int:
        """V."""
        return len(self.symbol_block)

    @property
    def num_blocks(self) -> int:
        """B."""
        return len(self._states.sizes)

    @property
    def sizes(self) -> Tensor:
        """Number of states of each block, ``(B,)``."""
        return self._states.sizes

    @property
    def width(self) -> int:
        """w, the number of states of the largest block."""
        return self._states.width

    @cached_property
    def states(self) -> Tensor:
        """States of each block, ``(B, w)``, -1 where a block has fewer than w."""
        return torch.nn.utils.rnn.pad_sequence(
            list(self._states.members.split(self.sizes.tolist())), True, -1
        )

    @property
    def allowed(self) -> Tensor:
        """Whether each state may emit each symbol, ``(K, V)`` booleans."""
        found = torch.zeros(self.num_symbols, self.num_states + 1, dtype=torch.bool)
        rows = self.states[self.symbol_block]
        found.scatter_(1, rows.masked_fill(rows < 0, self.num_states), True)
        return found[:, :-1].T.contiguous()

    def keep(self, states: Tensor) -> Blocks:
        """The blocks of some of the states, which are numbered anew in their order.

        Args:
            states: ``(n,)`` integers, ascending.

        Raises:
            ValueError: If a block would be empty, or ``states`` are not ascending.
        """
        check_integers("states", states)
        if states.dim() != 1 or bool((states.diff() <= 0).any()):
            raise ValueError(f"states must be ascending, each once; got {states.tolist()[:10]}.")
        if len(states) and not 0 <= int(states[0]) <= int(states[-1]) < self.num_states:
            raise ValueError(
                f"states must lie between 0 and K - 1 = {self.num_states - 1}; got states from "
                f"{int(states[0])} to {int(states[-1])}."
            )
        number = torch.full((self.num_states,), -1)
        number[states] = torch.arange(len(states))
        members = number[self._states.members]
        owner = torch.arange(self.num_blocks).repeat_interleave(self.sizes)
        kept = members >= 0
        sizes = torch.bincount(owner[kept], minlength=self.num_blocks)
        if not bool(sizes.all()):
            raise ValueError(f"no state of block {int((sizes == 0).byte().argmax())} is kept.")
        new = object.__new__(Blocks)
        new.symbol_block, new.num_states = self.symbol_block, len(states)
        new._states = States(bounds(sizes), members[kept], sizes, int(sizes.max()))
        new.disjoint = self.disjoint
        return new

    def places(self, states: Tensor) -> Tensor:
        """Which places of each block hold the states that :meth:`keep` keeps, ``(B, w')``.

        -1 where fewer than w' are kept, the number of the block that keeps most.
        """
        kept = torch.isin(self.states, states)
        order = (~kept).byte().argsort(dim=-1, stable=True)
        return order.masked_fill(~kept.gather(-1, order), -1)[:, : int(kept.sum(-1).max())]

    def __repr__(self) -> str:
        low, high = int(self.sizes.min()), self.width
        each = f"{low}" if low == high else f"{low} to {high}"
        return (
            f"Blocks({self.num_states} states and {self.num_symbols} symbols in "
            f"{self.num_blocks} blocks of {each} states)"
        )


def from_clusters(assignment: Tensor, states_per_cluster: int | Tensor) -> Blocks:
    """A block for each cluster of symbols; no state is in two.

    Args:
        assignment: ``(V,)`` integers, such as :func:`pyrohmm.clusters.brown` finds.
        states_per_cluster: Of each; or ``(C,)`` integers, such as
            :func:`pyrohmm.clusters.allocate` finds.

    Example:
        >>> from_clusters(torch.tensor([0, 1, 1, 2]), 4)
        Blocks(12 states and 4 symbols in 3 blocks of 4 states)
    """
    check_integers("assignment", assignment)
    if assignment.dim() != 1 or len(assignment) == 0:
        raise ValueError(
            "assignment must have shape (V,) with at least one symbol; got shape "
            f"{tuple(assignment.shape)}."
        )
    present = torch.bincount(assignment.clamp(min=0)) > 0
    if int(assignment.min()) < 0 or not bool(present.all()):
        raise ValueError(
            "assignment must number clusters from 0 on, each with a symbol; got numbers from "
            f"{int(assignment.min())} to {int(assignment.max())}, of which "
            f"{int(present.sum())} occur."
        )
    count = len(present)
    if isinstance(states_per_cluster, int):
        check_size("states_per_cluster", states_per_cluster)
        states_per_cluster = torch.full((count,), states_per_cluster)
    check_integers("states_per_cluster", states_per_cluster)
    check_shape("states_per_cluster", states_per_cluster, (count,), "(C,)")
    if int(states_per_cluster.min()) < 1:
        raise ValueError(
            f"states_per_cluster must be at least 1 for each; got {int(states_per_cluster.min())}."
        )
    sizes = states_per_cluster.cpu().long()
    return Blocks(assignment, list(torch.arange(int(sizes.sum())).split(sizes.tolist())))


def uniform(
    num_symbols: int,
    num_states: int,
    states_per_symbol: int,
    generator: torch.Generator | None = None,
) -> Blocks:
    """A block of its own for each symbol: states drawn uniformly, without regard to the others.

    A state that is in no block then takes the place of one that is in several.

    Args:
        num_symbols: V.
        num_states: K, at most V times ``states_per_symbol``.
        states_per_symbol: How many states may emit a symbol, at most K.
        generator: Source of randomness on the CPU; torch's global one by default.

    Raises:
        ValueError: If the sizes do not fit.

    Example:
        >>> uniform(5, 6, 2, torch.Generator().manual_seed(0)).sizes
        tensor([2, 2, 2, 2, 2])
    """
    sizes = {"num_symbols": num_symbols, "num_states": num_states,
             "states_per_symbol": states_per_symbol}  # fmt: skip
    for name, size in sizes.items():
        check_size(name, size)
    if not states_per_symbol <= num_states <= num_symbols * states_per_symbol:
        raise ValueError(
            f"num_states must lie between states_per_symbol = {states_per_symbol} and "
            f"num_symbols * states_per_symbol = {num_symbols * states_per_symbol}; got "
            f"{num_states}."
        )
    drawn = torch.stack(
        [torch.randperm(num_states, generator=generator)[:states_per_symbol]
         for _ in range(num_symbols)]
    )  # fmt: skip
    uses = torch.bincount(drawn.flatten(), minlength=num_states)
    flat = drawn.flatten()
    for state in (uses == 0).nonzero().flatten().tolist():
        spare = int((uses[flat] > 1).byte().argmax())
        uses[flat[spare]] -= 1
        uses[state] = 1
        flat[spare] = state
    rows = flat.reshape(drawn.shape).sort(-1).values
    return Blocks(torch.arange(num_symbols), list(rows), num_states)


# Emission -----------------------------------------------------------------------------------------


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
    if not blocks.disjoint:
        return _plain_log_emission(emit, words, bias, blocks)
    return _LogEmission.apply(emit, words, bias, blocks)


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
    found = logits - total.index_select(0, place).view_as(logits)
    return found.masked_fill(rows < 0, -torch.inf)


class _LogEmission(torch.autograd.Function):
    """:func:`log_emission` for disjoint blocks, one product for each."""

    @staticmethod
    def forward(ctx, emit, words, bias, blocks):
        order = blocks.symbol_block.argsort(stable=True).to(emit.device)
        vectors, biases = words[order], bias[order]
        table = emit.new_full((len(words), blocks.width), -torch.inf)
        for state, word in _parts(blocks):
            logits = torch.addmm(biases[word].unsqueeze(-1), vectors[word], emit[state].mT)
            table[word, : state.stop - state.start] = logits.log_softmax(0)
        place = order.argsort()
        ctx.blocks = blocks
        ctx.save_for_backward(emit, words, bias, table, order, place)
        return table[place]

    @staticmethod
    @in_full_precision
    def backward(ctx, weights):
        emit, words, bias, table, order, place = ctx.saved_tensors
        if torch.is_grad_enabled():
            plain = partial(_plain_log_emission, blocks=ctx.blocks)
            return (*differentiable_gradient(plain, (emit, words, bias), weights), None)
        words, weights, probs = words[order], weights[order], table.exp()
        to_emit, to_words = torch.zeros_like(emit), torch.empty_like(words)
        to_bias = words.new_empty(len(words))
        for state, word in _parts(ctx.blocks):
            width = state.stop - state.start
            weight = weights[word, :width]
            changed = weight - probs[word, :width] * weight.sum(0)
            torch.mm(changed.mT, words[word], out=to_emit[state])
            torch.mm(changed, emit[state], out=to_words[word])
            torch.sum(changed, 1, out=to_bias[word])
        return to_emit, to_words[place], to_bias[place], None


def _parts(blocks: Blocks) -> list[tuple[slice, slice]]:
    """For each block that some symbol has: its states, and its symbols sorted by block."""
    counts = torch.bincount(blocks.symbol_block, minlength=blocks.num_blocks)
    ends, starts = bounds(counts).tolist(), blocks._states.starts.tolist()
    parts = zip(pairwise(starts), pairwise(ends))
    return [(slice(*state), slice(*word)) for state, word in parts if word[0] < word[1]]


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
    kernels = _lookup.kernels("_compiled_blocks") if scores.device.type == "cpu" else None
    if kernels is not None:
        low = math.log(_blockwise.LEAST[scores.dtype])
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
    kernels = _lookup.kernels("_compiled_blocks") if scores.device.type == "cpu" else None
    if kernels is not None:
        low = math.log(_blockwise.LEAST[scores.dtype])
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


class Products:
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
