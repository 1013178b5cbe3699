"""Log-probabilities of sentences and of their words by an HMM in blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor

from ..analysis.queries import predictive_log_prob
from ..data.batches import cut_by_steps
from ..data.sequences import Sequences
from ..distributions.block_hmm import BlockHMM
from ..distributions.hmm import HMM
from ..nn.neural import NeuralHMM
from ..ops.blocks.inner_products import InnerProductTransition
from .text import as_text

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
