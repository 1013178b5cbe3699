"""Dropout of states in the training of a neural HMM."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import ClassVar

import torch
from torch import Tensor

from .._checks import check_size
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
