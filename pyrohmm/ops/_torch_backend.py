"""The operations by torch (and numpy, for clusters), on any device."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from . import numpy_clusters, torch_chain, torch_chunks, torch_segments
from .blocks.messages import LogChain
from .blocks.plan import BlockChain
from .chain import Chain
from .log_space import finite_or_zero
from .masks import exists
from .numpy_clusters import Tables, Terms, Words
from .operations import Backend
from .segment_chain import SegmentChain

CHUNK = 1 << 24, 1 << 17  # numbers in float64 at once, on a device and in the cache of a core


class TorchBackend(Backend):
    """Operations of torch, one step at a time: see :class:`.operations.Backend`."""

    def take_rows(self, table: Tensor, rows: Tensor) -> Tensor:
        return table.index_select(0, rows)

    def add_rows(self, values: Tensor, rows: Tensor, out: Tensor) -> None:
        out.index_add_(0, rows, values.to(out.dtype))

    def add_products(self, weights: Tensor, rows: Tensor, out: Tensor) -> None:
        width = out.shape[:-2].numel() * (weights.size(-1) + rows.size(-1))
        size = max(32, CHUNK[rows.device.type == "cpu"] // max(width, 1))
        for weight, part in zip(weights.split(size, -2), rows.split(size, -2)):
            out += weight.double().mT @ part.double()

    def forward(
        self, initial: Tensor, transition: Tensor, likelihood: Tensor, lengths: Tensor,
        limits: tuple[float, float, float], alpha: Tensor, total: Tensor, evidence: Tensor,
        exact: Tensor,
    ) -> Tensor:  # fmt: skip
        watched = limits[0] >= 0
        weight, peak = _weigh(likelihood, watched)
        chunked = not watched and torch_chunks.chunk_length(transition, weight, lengths)
        solve = torch_chunks.forward_by_chunks if chunked else torch_chain.forward_by_steps
        solve(initial, transition, weight, lengths, limits, alpha, total, exact)
        if not bool(exact.all()):
            alpha.masked_fill_(~exact.unsqueeze(-1), 0.0)
            total.masked_fill_(~exact, 1.0)
        logs = total.double().log() + peak
        if bool((lengths < len(logs)).any()):
            padded = ~exists(lengths, len(logs), logs.device).movedim(-1, 0)
            logs = logs.masked_fill(padded, 0.0)
        torch.sum(logs, 0, out=evidence)
        return weight

    def backward(
        self, transition: Tensor, seen: Tensor, lengths: Tensor, watched: bool,
        factor: Tensor | None, alpha: Tensor, total: Tensor, exact: Tensor, gamma: Tensor,
        message: Tensor,
    ) -> None:  # fmt: skip
        chunked = not watched and torch_chunks.chunk_length(transition, seen, lengths)
        solve = torch_chunks.backward_by_chunks if chunked else torch_chain.backward_by_steps
        solve(transition, seen, lengths, alpha, total, exact, gamma, message)
        if not bool(exact.all()):
            gamma.masked_fill_(~exact.unsqueeze(-1), 0.0)
            message.masked_fill_(~exact.unsqueeze(-1), 0.0)
        if factor is not None:
            gamma.mul_(factor.unsqueeze(-1))
            message.mul_(factor.unsqueeze(-1))

    def log_space(
        self, chain: Chain, with_posterior: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        num_states, size = chain.likelihood.size(-1), chain.lengths.size(1)
        with torch.enable_grad():
            single = Chain(
                chain.initial.reshape(-1, 1, num_states),
                chain.transition.repeat_interleave(size, 1).requires_grad_(),  # one per sequence
                chain.likelihood.reshape(len(chain.likelihood), -1, 1, num_states).requires_grad_(),
                chain.lengths.reshape(-1, 1),
            )
            evidence, messages = torch_chain.log_space_by_steps(*single)
            counts, gamma = torch.autograd.grad(
                evidence.sum(), (single.transition, single.likelihood), materialize_grads=True
            )
        shape = chain.likelihood.shape
        messages = messages.detach().reshape(shape)
        return evidence.detach().flatten(), gamma.reshape(shape), counts, messages

    def viterbi(self, chain: Chain, best: Tensor) -> None:
        torch_chain.viterbi_by_steps(*chain, best)

    def sample_states(
        self, messages: Tensor, transposed: Tensor, lengths: Tensor, uniform: Tensor, states: Tensor
    ) -> None:
        torch_chain.sample_by_steps(messages, transposed, lengths, uniform, states)

    def segment_forward(self, chain: SegmentChain, filtering: bool) -> tuple[Tensor, ...]:
        return torch_segments.forward(chain, filtering)

    def segment_backward(
        self, chain: SegmentChain, arrive: Tensor, ends: Tensor, evidence: Tensor, weight: Tensor
    ) -> tuple[Tensor, ...]:
        return torch_segments.backward(chain, arrive, ends, evidence, weight)

    def segment_viterbi(self, chain: SegmentChain, best: Tensor) -> None:
        torch_segments.viterbi(chain, best)

    def segment_sample(
        self, chain: SegmentChain, arrive: Tensor, ends: Tensor, uniform: Tensor, states: Tensor
    ) -> None:
        torch_segments.sample_states(chain, arrive, ends, uniform, states)

    def block_evidence(self, chain: BlockChain) -> tuple[Tensor, Tensor]:
        evidence = LogChain(chain).log_evidence()
        return evidence, torch.ones(len(evidence), dtype=torch.bool)

    def block_final_state(self, chain: BlockChain) -> Tensor:
        return LogChain(chain).final_state()

    def enter_cluster(self, tables: Tables, terms: Terms, slot: int) -> None:
        numpy_clusters.enter_cluster(tables, terms, slot)

    def merge_clusters(self, tables: Tables, terms: Terms, keep: int, gone: int) -> None:
        numpy_clusters.merge_clusters(tables, terms, keep, gone)

    def best_merge(self, tables: Tables, terms: Terms) -> tuple[int, int]:
        return numpy_clusters.best_merge(tables, terms)

    def sweep_clusters(
        self, words: Words, labels: np.ndarray, counts: np.ndarray, marginals: np.ndarray,
        sizes: np.ndarray, terms: Terms,
    ) -> int:  # fmt: skip
        return numpy_clusters.sweep_clusters(words, labels, counts, marginals, sizes, terms)


def _weigh(likelihood: Tensor, watched: bool) -> tuple[Tensor, Tensor]:
    """Likelihoods over their peak ``(T, G, n, K)``, and the logarithms of the peaks."""
    peak = finite_or_zero(likelihood.amax(-1, keepdim=True))
    weight = likelihood - peak
    tiny = torch.finfo(likelihood.dtype).tiny
    floor = math.log(tiny) + 0.1  # exp takes long at the end of its range, and beyond
    low = weight < floor
    weight.clamp_(min=floor).exp_().masked_fill_(low, tiny if watched else 0.0)
    if watched:  # only hard zeros may be zero
        weight.masked_fill_(likelihood.isneginf(), 0.0)
    return weight, peak.squeeze(-1)


TORCH = TorchBackend()
