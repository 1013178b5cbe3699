"""Ancestral sampling of observations given states."""

from __future__ import annotations

import torch
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor

from ..ops.sampling import CategoricalTable
from .autoregressive import Autoregressive
from .hard_zeros import log_probs
from .observation import Streams, is_categorical


def sample_emission(emission: TorchDistribution, states: Tensor) -> Tensor:
    """Sample an observation ``(*B, T, *E)`` from each of ``states`` ``(*B, T)``."""
    if isinstance(emission, Autoregressive):
        return sample_in_time(emission, states)
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


def sample_in_time(
    emission: Autoregressive,
    states: Tensor,
    values: Tensor | None = None,
    known: Tensor | None = None,
) -> Tensor:
    """Sample observations ``(*B, T, *E)`` one after the other, each given those before it.

    Args:
        emission: Of the observations.
        states: ``(*B, T)``.
        values: ``(*B, T, *E)``, observations that stand where they are ``known``.
        known: ``(*B, T)`` booleans; without them all are sampled.
    """
    events, at = (1,) * len(emission.event_shape), states.dim() - 1
    past = torch.empty(*states.shape[:-1], 0, *emission.event_shape).to(emission.history)
    for t, state in enumerate(states.unbind(-1)):
        now = sample_emission(emission.next(past), state.unsqueeze(-1))
        if values is not None and known is not None:
            fixed = known[..., t].reshape(*known.shape[:-1], 1, *events)
            given = values.narrow(values.dim() - 1 - len(events), t, 1)
            now = torch.where(fixed, given.to(now), now)
        past = torch.cat([past.to(now), now], at)
    return past


def sample_emission_per_step(emission: TorchDistribution, states: Tensor) -> Tensor:
    """Sample observations from an emission of batch shape ``(*b, T, K)``."""
    return _sample_all_states(emission.expand(states.shape + emission.batch_shape[-1:]), states)


def _sample_all_states(emission: TorchDistribution, states: Tensor) -> Tensor:
    """Sample in all K states, keep the sample of ``states``: works for every distribution."""
    values = emission.sample()  # (*B, K, *E)
    index = states.reshape(states.shape + (1,) * (1 + len(emission.event_shape)))
    index = index.expand(*states.shape, 1, *emission.event_shape)
    return values.gather(states.dim(), index).squeeze(states.dim())
