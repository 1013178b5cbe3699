"""Dropout in the training of a neural HMM: of states, transitions, first states and words."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar

import torch
from pyro.distributions import Categorical
from torch import Tensor

from .._checks import check_size
from ..distributions.block_hmm import BlockHMM
from ..distributions.block_symbols import BlockSymbols
from ..distributions.hmm import HMM
from ..ops.blocks.states import Blocks


@dataclass(frozen=True)
class LinearDropout:
    """A share of states that changes linearly with the calls in training mode, then stays.

    A fit that goes on from its checkpoint with more steps may have a larger ``num_steps``.

    Args:
        begin: Share at the first call, at least 0 and less than 1.
        end: Share at call ``num_steps`` and after it.
        num_steps: Such as the number of steps of the fit.

    Raises:
        ValueError: If a number is out of range.

    Example:
        >>> share = LinearDropout(0.5, 0.0, 100)
        >>> share(0), share(50), share(200)
        (0.5, 0.25, 0.0)
    """

    begin: float
    end: float
    num_steps: int
    may_differ: ClassVar[tuple[str, ...]] = ("num_steps",)  # from that of a checkpoint

    def __post_init__(self) -> None:
        check_dropout("begin", self.begin)
        check_dropout("end", self.end)
        check_size("num_steps", self.num_steps)

    def __call__(self, step: int) -> float:
        """The share at a ``step``, from 0."""
        return self.begin + (self.end - self.begin) * min(1.0, step / self.num_steps)


def check_dropout(name: str, share: float) -> None:
    """Raise unless ``share`` may be left out."""
    if not isinstance(share, Real) or not 0 <= share < 1:
        raise ValueError(f"{name} must be at least 0 and less than 1; got {share!r}.")


def sample_kept_states(num_states: int, blocks: Blocks | None, dropout: float) -> Tensor:
    """States that dropout keeps, ascending: the same share of every block (section 4.3).

    Of k states ``round((1 - dropout) * k)`` are kept, at least one. Without blocks, or where they
    overlap, k is the number of all states, and each block that would have none keeps one more.
    """
    apart = blocks is not None and blocks.disjoint
    sizes = blocks.sizes if blocks is not None and apart else torch.tensor([num_states])
    num_kept = ((1 - dropout) * sizes + 0.5).floor().long().clamp(min=1)
    owner = torch.arange(len(sizes)).repeat_interleave(sizes)
    uniform = torch.rand(num_states, dtype=torch.float64)
    order = (owner + uniform).argsort()
    rank = torch.arange(num_states) - (sizes.cumsum(0) - sizes)[owner]
    kept = torch.zeros(num_states, dtype=torch.bool)
    kept[order[rank < num_kept[owner]]] = True
    if blocks is not None and not apart:
        places = uniform[blocks.states].masked_fill(blocks.states < 0, torch.inf).argmin(-1)
        kept[blocks.states.gather(-1, places.unsqueeze(-1))] = True
    return kept.nonzero().squeeze(-1)


@dataclass(frozen=True)
class TrainingNoise:
    r"""Dropout of transitions, columns, first states and words in training; all states remain.

    What is left out has probability zero, and the rest is normalised again. Of the states of a
    block at least one can be first, and at least one entered from each state, so that no sequence
    becomes impossible. All K² transitions are computed where some are left out: state dropout costs
    less.

    Args:
        transition: Of single transitions, chosen for each pair of states (unstructured dropout).
        column: Of states, which no transition enters.
        start: Of states, which are not first.
        word: Of words that tell no state of their block from another: uniform over those that the
            state may emit. Which they are is summed out, :math:`(1 - s) \, p(x|z) + s / V_z`.

    Raises:
        ValueError: If a share is not at least 0 and less than 1.

    Example:
        >>> module = ScalarHMM(2, 4, noise=TrainingNoise(word=0.5))
        >>> bool((module(torch.tensor([3])).emission.probs > 0.5 / 4).all())
        True
    """

    transition: float = 0.0
    column: float = 0.0
    start: float = 0.0
    word: float = 0.0

    def __post_init__(self) -> None:
        for name, share in vars(self).items():
            check_dropout(name, share)

    def __call__(self, hmm: HMM) -> HMM:
        """The HMM without what is left out this time; its states emit symbols."""
        blocks = hmm.blocks if isinstance(hmm, BlockHMM) else None
        initial, size = hmm.log_initial, hmm.num_states
        transition: Any = hmm.transition if isinstance(hmm, BlockHMM) else hmm.log_transition
        if self.start:
            initial = _only(initial, _sample_kept(torch.rand_like(initial), blocks, self.start))
        if self.transition or self.column:
            transition = hmm.log_transition
            columns = _sample_kept(torch.rand_like(initial), blocks, self.column)
            chances = torch.rand_like(transition).masked_fill(~columns, -1.0)
            transition = _only(transition, _sample_kept(chances, blocks, self.transition))
        if not isinstance(hmm, BlockHMM):
            count = initial.new_tensor(hmm.emission.logits.size(-1))
            emission = Categorical(logits=self._blurred(hmm.emission.logits, count))
            return HMM(initial, transition, emission, hmm.lengths, hmm.observed)
        symbols = hmm.symbols
        if self.word:
            rows = hmm.blocks.states[hmm.blocks.symbol_block]
            counts = torch.bincount(rows[rows >= 0], minlength=size).to(initial)
            table = self._blurred(hmm.log_emission, counts[rows.to(initial.device)])
            symbols = BlockSymbols(table, hmm.blocks)
        return BlockHMM(initial, transition, symbols, hmm.blocks, hmm.lengths, hmm.observed)

    def _blurred(self, log_probs: Tensor, count: Tensor) -> Tensor:
        """Log of (1 - s) p + s / count."""
        if not self.word:
            return log_probs
        return torch.logaddexp(
            log_probs + math.log1p(-self.word), math.log(self.word) - count.log()
        )


def _only(log_probs: Tensor, kept: Tensor) -> Tensor:
    """Log-probabilities of what is kept, normalised again."""
    return log_probs.masked_fill(~kept, -torch.inf).log_softmax(-1)


def _sample_kept(chances: Tensor, blocks: Blocks | None, share: float) -> Tensor:
    """Whether each number is at least ``share``, or the largest of its block, ``(*, K)``."""
    kept = chances >= share
    if blocks is None:
        return kept.scatter(-1, chances.argmax(-1, keepdim=True), True)
    rows = blocks.states.to(chances.device)
    places = chances[..., rows.clamp(min=0)].masked_fill(rows < 0, -torch.inf).argmax(-1)
    return kept.scatter(-1, rows[torch.arange(len(rows), device=rows.device), places], True)
