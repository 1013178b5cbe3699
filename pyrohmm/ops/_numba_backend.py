"""The operations by loops that Numba compiles, on the CPU.

Numba is imported when an operation is first called, and optional (extra ``compiled``).
"""

from __future__ import annotations

import math
from functools import cached_property
from importlib import import_module
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from .chain import Chain
from .operations import Backend
from .segment_chain import SegmentChain

FEW = 1 << 10  # numbers, for which an operation of torch takes less time than a call of a loop
WIDE = 1 << 14  # sums, from which on products of torch are faster


class NumbaBackend(Backend):
    """Compiled loops, where they are faster: see :class:`.operations.Backend`.

    With many states and many sequences matrix products are faster, and torch's are used.
    """

    @cached_property
    def _chain(self) -> ModuleType:
        return import_module("._numba_chain", __package__)

    @cached_property
    def _paths(self) -> ModuleType:
        return import_module("._numba_paths", __package__)

    @cached_property
    def _segments(self) -> ModuleType:
        return import_module("._numba_segments", __package__)

    def load(self) -> None:
        """Import Numba; raises ImportError if it is not installed."""
        _ = self._chain

    def take_rows(self, table: Tensor, rows: Tensor) -> Tensor:
        low, high = (int(end) for end in torch.aminmax(rows)) if len(rows) else (0, -1)
        if low < 0 or high >= len(table):
            raise IndexError(f"rows must lie between 0 and {len(table) - 1}; got {low} to {high}.")
        kernels, width = self._chain, table.size(1)
        out = table.new_empty(len(rows), width)
        kernels.run(kernels.take_rows, len(rows), width, table.contiguous(), rows, out)
        return out

    def add_rows(self, values: Tensor, rows: Tensor, out: Tensor) -> None:
        if values.numel() < FEW:
            super().add_rows(values, rows, out)
            return
        kernels, work = self._chain, values.numel() // len(out)
        kernels.run(kernels.add_rows, len(out), work, rows, values.contiguous(), out)

    def add_products(self, weights: Tensor, rows: Tensor, out: Tensor) -> None:
        if out.dim() > 2 or len(rows) * out.numel() < FEW**2 or out.numel() > WIDE:
            super().add_products(weights, rows, out)
            return
        kernels, sides = self._chain, [part.contiguous().numpy() for part in (weights, rows)]
        threads = kernels.threads_of(len(rows), len(rows) * out.numel())
        sums = [out.numpy(), *(np.zeros(out.shape) for _ in range(threads - 1))]

        def run(part: int) -> None:
            first, last = (len(rows) * end // threads for end in (part, part + 1))
            kernels.add_products(first, last, *sides, sums[part])

        kernels.share(run, threads)
        for more in sums[1:]:
            sums[0] += more

    def forward(
        self, initial: Tensor, transition: Tensor, likelihood: Tensor, lengths: Tensor,
        limits: tuple[float, float, float], alpha: Tensor, total: Tensor, evidence: Tensor,
        exact: Tensor,
    ) -> Tensor:  # fmt: skip
        if not _is_small(alpha):
            return super().forward(
                initial, transition, likelihood, lengths, limits, alpha, total, evidence, exact
            )
        kernels, (least, tiny, slack) = self._chain, limits
        steps, groups, size, num_states = alpha.shape
        many = size >= kernels.LANES // 2
        kernels.run(
            kernels.forward_lanes if many else kernels.forward_rows, groups * size,
            steps * num_states**2, initial.view(-1), transition, likelihood.view(-1),
            lengths.view(-1), least, math.log(torch.finfo(alpha.dtype).tiny), tiny, slack,
            alpha.view(-1), total.view(-1),
            evidence.view(-1), exact.view(-1),
        )  # fmt: skip
        return likelihood

    def backward(
        self, transition: Tensor, seen: Tensor, lengths: Tensor, watched: bool,
        factor: Tensor | None, alpha: Tensor, total: Tensor, exact: Tensor, gamma: Tensor,
        message: Tensor,
    ) -> None:  # fmt: skip
        if not _is_small(alpha):
            super().backward(
                transition, seen, lengths, watched, factor, alpha, total, exact, gamma, message
            )
            return
        kernels = self._chain
        steps, groups, size, num_states = alpha.shape
        factor = alpha.new_ones(exact.shape) if factor is None else factor.contiguous()
        many = size >= kernels.LANES // 2
        kernels.run(
            kernels.backward_lanes if many else kernels.backward_rows, groups * size,
            steps * num_states**2, transition, seen.view(-1), lengths.view(-1), factor.view(-1),
            math.log(torch.finfo(alpha.dtype).tiny), alpha.view(-1), total.view(-1),
            exact.view(-1), gamma.view(-1), message.view(-1),
        )  # fmt: skip

    def log_space(
        self, chain: Chain, with_posterior: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        initial, transition, likelihood, lengths = chain
        kernels, count, num_states = self._paths, lengths.numel(), likelihood.size(-1)
        messages, gamma = torch.zeros_like(likelihood), torch.zeros_like(likelihood)
        evidence = likelihood.new_zeros(lengths.shape)
        counts = likelihood.new_zeros(len(transition), count, num_states, num_states)
        kernels.run(
            kernels.log_space, count, 10 * len(likelihood) * num_states**2, initial, transition,
            transition.mT.contiguous(), transition.exp(), likelihood, lengths, with_posterior,
            messages, evidence, gamma, counts,
        )  # fmt: skip
        return evidence.flatten(), gamma, counts, messages

    def viterbi(self, chain: Chain, best: Tensor) -> None:
        if not _is_small(chain.likelihood):
            super().viterbi(chain, best)
            return
        kernels, (initial, transition, likelihood, lengths) = self._paths, chain
        steps, groups, size, num_states = likelihood.shape
        work, transition = steps * num_states**2, transition.contiguous()
        if size >= kernels.LANES // 2:
            kernels.run(
                kernels.viterbi_lanes, groups * size, work, initial.view(-1), transition,
                likelihood.view(-1), lengths.view(-1), best.view(steps, -1),
            )  # fmt: skip
            return
        kernels.run(
            kernels.viterbi_rows, groups * size, work, initial, transition,
            transition.mT.contiguous(), likelihood, lengths, torch.empty_like(likelihood), best,
        )  # fmt: skip

    def sample_states(
        self, messages: Tensor, transposed: Tensor, lengths: Tensor, uniform: Tensor, states: Tensor
    ) -> None:
        if not _is_small(messages):
            super().sample_states(messages, transposed, lengths, uniform, states)
            return
        kernels, work = self._paths, 10 * states.numel() * messages.size(-1) // lengths.numel()
        kernels.run(
            kernels.sample_states, lengths.numel(), work, messages, transposed, lengths,
            math.log(torch.finfo(messages.dtype).tiny), uniform, states,
        )  # fmt: skip

    def segment_forward(self, chain: SegmentChain, filtering: bool) -> tuple[Tensor, ...]:
        kernels, likelihood = self._segments, chain.likelihood
        arrive, ends = torch.zeros_like(likelihood), torch.zeros_like(likelihood)
        evidence = likelihood.new_zeros(len(likelihood))
        filtered = likelihood.new_zeros(likelihood.shape if filtering else (0, 0, 0))
        kernels.run(
            kernels.forward, len(likelihood), _segment_work(chain), *chain, filtering, arrive, ends,
            evidence, filtered,
        )  # fmt: skip
        return arrive, ends, evidence, filtered

    def segment_backward(
        self, chain: SegmentChain, arrive: Tensor, ends: Tensor, evidence: Tensor, weight: Tensor
    ) -> tuple[Tensor, ...]:
        kernels, count = self._segments, len(chain.lengths)
        threads = kernels.threads_of(count, count * _segment_work(chain))
        gamma, starts = torch.zeros_like(chain.likelihood), torch.zeros_like(chain.initial)
        tables = chain[1:6]
        sums = [[torch.zeros_like(table) for table in tables] for _ in range(threads)]
        constant = [part.numpy() for part in (*chain[1:], arrive, ends, evidence, weight)]

        def run(part: int) -> None:
            first, last = (count * end // threads for end in (part, part + 1))
            kernels.backward(
                first, last, *constant, starts.numpy(), gamma.numpy(),
                *(table.numpy() for table in sums[part]),
            )  # fmt: skip

        kernels.share(run, threads)
        return starts, *(torch.stack(parts).sum(0) for parts in zip(*sums)), gamma

    def segment_viterbi(self, chain: SegmentChain, best: Tensor) -> None:
        kernels = self._segments
        kernels.run(kernels.viterbi, len(best), _segment_work(chain), *chain, best)

    def segment_sample(
        self, chain: SegmentChain, arrive: Tensor, ends: Tensor, uniform: Tensor, states: Tensor
    ) -> None:
        kernels = self._segments
        work = 10 * len(states) * chain.likelihood[0].numel()
        kernels.run(
            kernels.sample_states, len(chain.lengths), work, *chain[1:], arrive, ends, uniform,
            states,
        )  # fmt: skip


def _is_small(messages: Tensor) -> bool:
    """Whether loops over messages ``(T, G, n, K)`` are faster than matrix products of torch."""
    return messages.size(-1) <= 128 or messages.shape[1:-1].numel() <= 4


def _segment_work(chain: SegmentChain) -> int:
    """Multiplications for each sequence of a chain with durations."""
    size, num_states = chain.interior.shape[1:]
    return chain.likelihood.size(1) * num_states * (num_states + 10 * size)


NUMBA = NumbaBackend()
