"""Sentences read as one text: the state goes on over ``<eos>`` from each to the next."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..chains.blocks import CarriedState
from ..data.sequences import Sequences
from ..distributions.block_hmm import BlockHMM, FinalState


def as_text(data: Sequences, num_pieces: int = 1) -> Sequences:
    """The tokens of all sequences in their order, as so many pieces of equal length, or fewer.

    Args:
        data: Sequences without gaps.
        num_pieces: The last may be shorter than the others.

    Example:
        >>> as_text(Sequences.from_list([[3, 1], [4, 5, 1]]), 2).values
        tensor([[3, 1, 4],
                [5, 1, 0]])
    """
    tokens = data.values[data.exists]
    return Sequences.from_list(tokens.split(-(-len(tokens) // num_pieces)))


def score_in_order(hmm: BlockHMM, data: Sequences) -> Tensor:
    r"""Log-probability of each sequence given all those before it, ``(N,)`` float64, in nats.

    They sum to the log-probability of the whole text, :func:`as_text`.

    Args:
        hmm: Of disjoint blocks, with inner products as transitions; its lengths are not read.
        data: N sequences without gaps, on its device.
    """
    scores = torch.empty(len(data), dtype=torch.float64)
    transition: Any = hmm.transition
    ending: FinalState | None = None
    for number, length in enumerate(data.lengths.tolist()):
        values = data.values[number : number + 1, :length]
        sentence: Any = hmm.replace(lengths=torch.tensor([length]))
        if ending is not None:
            sentence = sentence.continue_from(CarriedState.of(transition, *ending))
        scores[number] = sentence.log_prob(values)
        ending = sentence.final_state(values)
    return scores
