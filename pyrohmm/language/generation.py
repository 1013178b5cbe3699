"""Sentences sampled from an HMM in blocks, many at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from ..distributions.block_hmm import BlockHMM


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
    sizes = hmm.blocks.sizes
    owner = torch.arange(hmm.blocks.num_blocks).repeat_interleave(sizes)
    place = torch.arange(hmm.blocks.num_states) - (sizes.cumsum(0) - sizes)[owner]
    words = torch.full((count, max_words), end)
    unfinished = torch.arange(count)  # sentences that have not ended
    states = _choose(log_first, generator)
    last = states.clone()
    for step in range(max_words):
        if step > 0:
            rows = hmm.transition.rows(states)  # type: ignore[union-attr]  # blocks are disjoint
            states = _choose(rows, generator)
        emitted = hmm.log_emission[:, place[states].to(hmm.log_emission.device)].mT  # (n, V)
        impossible = hmm.blocks.symbol_block != owner[states].unsqueeze(-1)
        words[unfinished, step] = _choose(
            emitted.masked_fill(impossible.to(emitted.device), -torch.inf), generator
        )
        last[unfinished] = states
        continues = words[unfinished, step] != end
        unfinished, states = unfinished[continues], states[continues]
        if len(unfinished) == 0:
            break
    lengths = (words != end).sum(-1)
    return [row[:length] for row, length in zip(words, lengths.tolist())], last


def _choose(log_probs: Tensor, generator: torch.Generator | None) -> Tensor:
    """A column sampled for each row of log-probabilities, ``(n,)``, on the CPU."""
    return torch.multinomial(log_probs.exp().cpu(), 1, generator=generator).squeeze(-1)
