"""The recursions of chains with durations by compiled loops, on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from .._numba_math import run, share, threads_of
from . import _loops
from .chain import SegmentChain


def _work(chain: SegmentChain) -> int:
    """Multiplications for each sequence."""
    size, num_states = chain.weights.shape[3:]
    return chain.likelihood.size(1) * num_states * (num_states + 10 * size)


def forward(chain: SegmentChain, filtering: bool) -> tuple[Tensor, ...]:
    """Forward messages, evidence, filtered states: see :func:`._torch.forward`."""
    likelihood = chain.likelihood
    arrive, ends = torch.zeros_like(likelihood), torch.zeros_like(likelihood)
    evidence = likelihood.new_zeros(len(likelihood))
    filtered = likelihood.new_zeros(likelihood.shape if filtering else (0, 0, 0))
    results = arrive, ends, evidence, filtered
    run(_loops.forward, len(likelihood), _work(chain), *chain, filtering, *results)
    return results


def backward(
    chain: SegmentChain, arrive: Tensor, ends: Tensor, evidence: Tensor, weight: Tensor
) -> tuple[Tensor, ...]:
    """Derivatives of the evidences times ``weight``: see :func:`._torch.backward`."""
    count = len(chain.lengths)
    threads = threads_of(count, count * _work(chain))
    gamma, starts = torch.zeros_like(chain.likelihood), torch.zeros_like(chain.initial)
    sums = [[torch.zeros_like(table) for table in chain[1:3]] for _ in range(threads)]
    constant = [part.numpy() for part in (*chain[1:], arrive, ends, evidence, weight)]

    def run_part(part: int) -> None:
        first, last = (count * end // threads for end in (part, part + 1))
        results = (table.numpy() for table in (starts, gamma, *sums[part]))
        _loops.backward(first, last, *constant, *results)

    share(run_part, threads)
    return starts, *(torch.stack(parts).sum(0) for parts in zip(*sums)), gamma


def viterbi(chain: SegmentChain) -> Tensor:
    """Most probable paths ``(N, T)``; zeros at padded steps."""
    arrive, ends = torch.zeros_like(chain.likelihood), torch.zeros_like(chain.likelihood)
    run(_loops.largest, len(ends), _work(chain), *chain, arrive, ends)
    best = ends.new_full((), -1.0).expand(1, *ends.shape[:2], 2)
    return sample_states(chain, arrive, ends, best)[0]


def sample_states(chain: SegmentChain, arrive: Tensor, ends: Tensor, uniform: Tensor) -> Tensor:
    """Paths ``(S, N, T)`` sampled backwards, where ``uniform`` is not negative; else the best."""
    states = torch.zeros(uniform.shape[:-1], dtype=torch.long)
    work = 10 * len(states) * chain.likelihood[0].numel()
    run(_loops.walk_back, len(chain.lengths), work, *chain[1:], arrive, ends, uniform, states)
    return states
