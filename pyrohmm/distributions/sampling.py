"""Ancestral sampling: paths of states, and observations given states."""

from __future__ import annotations

import torch
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor

from .observation import Streams, is_categorical, log_probs


class _Table:
    """Rows of probabilities, drawn from by inverting their cumulative sums, all in one search."""

    def __init__(self, logits: Tensor) -> None:
        """``logits`` ``(*b, M, V)``: M rows, and a batch of such tables."""
        sums = logits.double().exp().cumsum(-1)
        sums = sums / sums[..., -1:]
        self.batch, self.width = logits.shape[:-2], logits.size(-1)
        self.rows = logits.size(-2)
        count = torch.arange(sums[..., 0].numel(), device=logits.device)
        self.sums = (sums.reshape(-1, self.width) + count.unsqueeze(-1)).flatten()

    def draw(self, rows: Tensor) -> Tensor:
        """A column for each of ``rows`` ``(*S, *b)``."""
        rows = rows.to(self.sums.device)
        if self.batch:
            tables = torch.arange(self.batch.numel(), device=rows.device).reshape(self.batch)
            rows = rows + tables * self.rows
        chance = torch.rand(rows.shape, dtype=torch.float64, device=rows.device) * (1 - 1e-9)
        found = (
            torch.searchsorted(self.sums, (rows + chance).contiguous(), right=True)
            - rows * self.width
        )
        return found.clamp_(max=self.width - 1)


def _draw_rows(logits: Tensor, like: Tensor) -> Tensor:
    """Draw from ``logits`` ``(*b, V)`` for each entry of ``like`` ``(*S, *b)``."""
    return _Table(logits.unsqueeze(-2)).draw(like)


def sample_emission(emission: TorchDistribution, states: Tensor) -> Tensor:
    """Draw an observation ``(*B, T, *E)`` from each of ``states`` ``(*B, T)``."""
    if isinstance(emission, Streams):
        parts = (part.expand(emission.batch_shape) for part in emission.parts)
        return emission.join([sample_emission(part, states) for part in parts])
    first = states.movedim(-1, 0)
    if is_categorical(emission):
        return _Table(log_probs(emission)).draw(first).movedim(0, -1)
    drawn = [
        _pick(emission.expand(state.shape + emission.batch_shape[-1:]), state) for state in first
    ]
    return torch.stack(drawn, states.dim() - 1)


def sample_emission_per_step(emission: TorchDistribution, states: Tensor) -> Tensor:
    """As :func:`sample_emission`, from an emission of batch shape ``(*b, T, K)``."""
    return _pick(emission.expand(states.shape + emission.batch_shape[-1:]), states)


def _pick(emission: TorchDistribution, states: Tensor) -> Tensor:
    """Draw in all K states, keep the one of ``states``: works for every distribution."""
    every = emission.sample()  # (*B, K, *E)
    index = states.reshape(states.shape + (1,) * (1 + len(emission.event_shape)))
    index = index.expand(*states.shape, 1, *emission.event_shape)
    return every.gather(states.dim(), index).squeeze(states.dim())
