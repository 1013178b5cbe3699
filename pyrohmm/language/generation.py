"""Sentences sampled from an HMM in blocks, many at a time."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from ..distributions.block_hmm import BlockHMM
from ..ops.blocks.inner_products import InnerProductTransition


def next_states(hmm: BlockHMM, codes: Tensor) -> Tensor:
    """Log-probabilities of the state of the next word ``(K,)`` after words ``(n,)``, or none."""
    if not len(codes):
        return hmm.log_initial
    transition = cast(InnerProductTransition, hmm.transition)
    values = codes.unsqueeze(0).to(hmm.log_initial.device)
    alone = cast(BlockHMM, hmm.replace(lengths=torch.tensor([len(codes)])))
    ending = alone.final_state(values)
    possible = ending.states[0] >= 0
    rows = transition.rows(ending.states[0][possible])  # (n, K)
    log_probs = ending.log_probs[0][possible].unsqueeze(-1)
    return (log_probs.to(rows) + rows).logsumexp(0).log_softmax(-1)


def sample_sentences(
    hmm: BlockHMM, log_first: Tensor, max_words: int, end: int, generator: torch.Generator | None
) -> tuple[list[Tensor], Tensor]:
    """Ancestral samples of sentences as codes, in a batch; only rows of A in use are computed.

    Args:
        hmm: Its blocks are disjoint.
        log_first: ``(n, K)``, log-probabilities of the first state of each of n sentences.
        max_words: Sentences that have not ended after so many words are cut off.
        end: Code of ``<eos>``, which is left out of them.
        generator: Source of randomness on the CPU; torch's global one by default.

    Returns:
        The n sentences, and the last state of each ``(n,)``, which emitted ``<eos>`` if it ended.
    """
    count = len(log_first)
    words = torch.full((count, max_words), end)
    unfinished = torch.arange(count)  # sentences that have not ended
    states = choose(log_first, generator)
    last = states.clone()
    for step in range(max_words):
        if step > 0:
            rows = hmm.transition.rows(states)  # type: ignore[union-attr]  # blocks are disjoint
            states = choose(rows, generator)
        words[unfinished, step] = choose(emitted_by(hmm, states), generator)
        last[unfinished] = states
        continues = words[unfinished, step] != end
        unfinished, states = unfinished[continues], states[continues]
        if len(unfinished) == 0:
            break
    lengths = (words != end).sum(-1)
    return [row[:length] for row, length in zip(words, lengths.tolist())], last


def emitted_by(hmm: BlockHMM, states: Tensor) -> Tensor:
    """Log-probabilities of all words in some states ``(n,)`` on the CPU, ``(n, V)``."""
    sizes = hmm.blocks.sizes
    owner = torch.arange(hmm.blocks.num_blocks).repeat_interleave(sizes)[states]
    place = states - (sizes.cumsum(0) - sizes)[owner]
    emitted = hmm.log_emission[:, place.to(hmm.log_emission.device)].mT
    impossible = hmm.blocks.symbol_block != owner.unsqueeze(-1)
    return emitted.masked_fill(impossible.to(emitted.device), -torch.inf)


def choose(scores: Tensor, generator: torch.Generator | None) -> Tensor:
    """A column ``(n,)`` on the CPU, sampled for each row of unnormalised log-probabilities."""
    return torch.multinomial(scores.softmax(-1).cpu(), 1, generator=generator).squeeze(-1)
