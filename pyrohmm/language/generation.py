"""Ancestral samples of sentences by an HMM in blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..distributions.block_hmm import BlockHMM
from .scoring import next_states
from .text import END, encode

AT_ONCE = 256  # sentences that are sampled as one batch


def generate(
    model: Any, count: int, generator: torch.Generator | None, max_words: int, prompt: str
) -> list[str]:
    """Samples of sentences of a ``LanguageModel`` after a prompt; contiguous ones are one text."""
    hmm, vocabulary, contiguous = (
        model.module(torch.tensor([1])),
        model.vocabulary,
        model.contiguous,
    )
    end = int(vocabulary.encode([END]))
    at_once = 1 if contiguous else AT_ONCE
    before = encode([prompt], vocabulary).values[0, :-1]  # without <eos>
    log_first, parts = next_states(hmm, before).unsqueeze(0), []
    for first in range(0, count, at_once):
        rows = log_first.expand(min(at_once, count - first), -1)
        codes, last = sample_sentences(hmm, rows, max_words, end, generator)
        parts.append(codes)
        if contiguous:
            log_first = hmm.transition.rows(last)
    lines = [" ".join(vocabulary.decode(codes)) for part in parts for codes in part]
    first = 1 if contiguous else count  # those that begin with the prompt
    return [f"{prompt} {line}".strip() for line in lines[:first]] + lines[first:]


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
