"""Ancestral sampling of observations given states."""

from __future__ import annotations

import torch
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor

from ..ops.sampling import CategoricalTable
from .hard_zeros import log_probs
from .observation import Streams, is_categorical


def sample_emission(emission: TorchDistribution, states: Tensor) -> Tensor:
    """Sample an observation ``(*B, T, *E)`` from each of ``states`` ``(*B, T)``."""
    if isinstance(emission, Streams):
        parts = (part.expand(emission.batch_shape) for part in emission.parts)
        return emission.join([sample_emission(part, states) for part in parts])
    time_major = states.movedim(-1, 0)
    if is_categorical(emission):
        return CategoricalTable(log_probs(emission)).sample(time_major).movedim(0, -1)
    values = [
        _sample_all_states(emission.expand(state.shape + emission.batch_shape[-1:]), state)
        for state in time_major
    ]
    return torch.stack(values, states.dim() - 1)


def sample_emission_per_step(emission: TorchDistribution, states: Tensor) -> Tensor:
    """As :func:`sample_emission`, from an emission of batch shape ``(*b, T, K)``."""
    return _sample_all_states(emission.expand(states.shape + emission.batch_shape[-1:]), states)


def _sample_all_states(emission: TorchDistribution, states: Tensor) -> Tensor:
    """Sample in all K states, keep the sample of ``states``: works for every distribution."""
    values = emission.sample()  # (*B, K, *E)
    index = states.reshape(states.shape + (1,) * (1 + len(emission.event_shape)))
    index = index.expand(*states.shape, 1, *emission.event_shape)
    return values.gather(states.dim(), index).squeeze(states.dim())
