"""Sentences by an HMM in blocks: log-probabilities of them and of their words, and samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor

from ..analysis.prediction import predictive_log_prob
from ..data.batches import cut_by_steps
from ..data.sequences import Sequences
from ..distributions.block_hmm import BlockHMM
from ..distributions.hmm import HMM
from ..nn.neural import NeuralHMM
from ..ops.blocks.inner_products import InnerProductTransition
from .text import as_text


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


STEPS = 8192  # that are evaluated at once
WINDOW = 1024  # tokens of one text that are evaluated at once


def score(module: NeuralHMM, data: Sequences, contiguous: bool) -> Tensor:
    """Log-probability of each of N sequences, ``(N,)`` float64; contiguous: given those before."""
    if contiguous:
        return -torch.stack([nats.sum() for nats in surprisal(module, data, contiguous)])
    scores = torch.empty(len(data), dtype=torch.float64)
    for chosen, hmm, values in _parts(module, data):
        scores[chosen] = hmm.log_prob(values).double().cpu()
    return scores


def surprisal(module: NeuralHMM, data: Sequences, contiguous: bool) -> list[Tensor]:
    """Minus the log-probability of each word given those before it, by sequence, in nats."""
    if contiguous:
        nats = _surprisal_of_text(module, as_text(data).values[0])
        return list(nats.split(data.lengths.tolist()))
    found: list[Tensor] = [torch.empty(0)] * len(data)
    for chosen, hmm, values in _parts(module, data):
        logs = predictive_log_prob(hmm, values).cpu()
        for place, row, length in zip(chosen.tolist(), logs, data.lengths[chosen].tolist()):
            found[place] = -row[:length]
    return found


def _parts(module: NeuralHMM, data: Sequences) -> Iterator[tuple[Tensor, HMM, Tensor]]:
    """Sequences of about equal length: their places, their HMM and their values."""
    device = next(module.parameters()).device
    for chosen in cut_by_steps(data.lengths, data.lengths.argsort(), STEPS):
        part = data[chosen].to(device)
        yield chosen, module(part.lengths), part.values


def _surprisal_of_text(module: NeuralHMM, tokens: Tensor) -> Tensor:
    """Surprisal of each token of one text ``(T,)``, a window at a time."""
    hmm = cast(BlockHMM, module(torch.tensor([1])))
    log_first, found = hmm.log_initial, []
    for values in tokens.to(log_first.device).split(WINDOW):
        window = BlockHMM(
            log_first, hmm.transition, hmm.symbols, hmm.blocks, torch.tensor([len(values)]),
            validate_args=False,
        )  # fmt: skip
        found.append(-predictive_log_prob(window, values.unsqueeze(0))[0].cpu())
        log_first = next_states(window, values)
    return torch.cat(found)
