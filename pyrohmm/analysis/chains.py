"""The arguments of a chain as posterior queries read them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..distributions.hmm import HMM

# What the queries share ---------------------------------------------------------------------------


class _Chain(NamedTuple):
    """Parameters and data of the whole batch; a padded step has log-likelihood 0."""

    initial: Tensor  # (*B, K)
    transition: Tensor  # (*b, 1|T-1, K, K)
    likelihood: Tensor  # (*B, T, K)
    exists: Tensor  # (*B, T)

    def matrix(self, t: int) -> Tensor:
        """Log-probabilities of the move that leads to step ``t``, counted from 0."""
        return self.transition[..., t - 1 if self.transition.size(-3) > 1 else 0, :, :]


def _read(hmm: HMM, values: Tensor) -> _Chain:
    """Join parameters and data."""
    initial, transition, likelihood = hmm.log_factors(values)
    batch = torch.broadcast_shapes(hmm.batch_shape, likelihood.shape[:-2])
    exists = hmm.exists.expand(*batch, hmm.num_steps)
    # in float64: sums over long sequences, and the tails of distributions
    return _Chain(
        initial.double().expand(*batch, hmm.num_states),
        transition.double(),
        likelihood.double().masked_fill(~exists.unsqueeze(-1), 0.0),
        exists,
    )


def _known(hmm: HMM, chain: _Chain) -> Tensor:
    """Which steps exist and are observed, ``(*B, T)``."""
    return chain.exists if hmm.observed is None else chain.exists & hmm.observed


def _predicted(chain: _Chain) -> Tensor:
    """Law of each state given the observations before it, as logarithms, ``(*B, T, K)``."""
    law = chain.initial
    laws = [law]
    for t in range(1, chain.likelihood.size(-2)):
        filtered = _normalised(law + chain.likelihood[..., t - 1, :])
        law = (filtered.unsqueeze(-1) + chain.matrix(t)).logsumexp(-2)
        laws.append(law)
    return torch.stack(laws, -2)


def _onward(chain: _Chain) -> Tensor:
    """Log p(x_{t+1:T} | z_t), up to a constant for each step, ``(*B, T, K)``."""
    message = torch.zeros_like(chain.initial)
    messages = [message]
    for t in range(chain.likelihood.size(-2) - 1, 0, -1):
        seen = (chain.likelihood[..., t, :] + message).unsqueeze(-2)
        arrived = _normalised((chain.matrix(t) + seen).logsumexp(-1))
        message = torch.where(chain.exists[..., t, None], arrived, message)
        messages.append(message)
    return torch.stack(messages[::-1], -2)


def _normalised(scores: Tensor) -> Tensor:
    """Subtract the log of the sum; where every score is -inf they stay so."""
    return scores - _finite(scores.logsumexp(-1, keepdim=True))


def _finite(norm: Tensor) -> Tensor:
    """Zero for minus infinity, so that subtracting it makes no NaN."""
    return norm.masked_fill(norm.isneginf(), 0.0)


def _over_events(mask: Tensor, hmm: HMM) -> Tensor:
    """Give a mask of steps the dimensions of an observation."""
    return mask.reshape(mask.shape + (1,) * len(hmm.emission.event_shape))


def _check_possible(log_evidence: Tensor) -> None:
    """Raise if a sequence has probability zero."""
    count = int(log_evidence.isneginf().sum())
    if count:
        raise ValueError(
            f"values must be possible under the model; {count} of {log_evidence.numel()} sequences "
            "have probability zero, so that nothing follows from them. Leave them out: their "
            "hmm.log_prob(values) is -inf."
        )


def _check_constant(hmm: HMM, name: str) -> None:
    """Raise if the parameters change with the step."""
    if hmm.transition_per_step or hmm.emission_per_step:
        raise ValueError(
            f"{name} needs a model that does not change with the step; this one has parameters per "
            "step. Extend them, and mark the steps to come as not observed."
        )
