"""A chain's factors as posterior queries read them, and messages in logarithms."""

from __future__ import annotations

from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from ..distributions.autoregressive import Autoregressive
from ..distributions.block_hmm import BlockHMM
from ..distributions.hmm import HMM
from ..distributions.hsmm import HSMM
from ..distributions.second_order_hmm import SecondOrderHMM
from ..ops import semi_markov


class ChainFactors(NamedTuple):
    r"""Factors of the joint density for the whole batch, in float64.

    Those of an :class:`HSMM` are of a Markov chain of K · D states: state k · D + a - 1 is the
    state k in the a-th step of its segment. With ``censored_start`` each state k has D others
    behind those, in which the first segment is seen for the a-th step. Those of a
    :class:`SecondOrderHMM` are of pairs of states: see :meth:`SecondOrderHMM.expanded`. A path of
    the K states is one path of these.

    Attributes:
        initial: ``(*B, K)``, :math:`\log p(z_1)`.
        transition: ``(*b, 1|T-1, K, K)``, :math:`\log p(z_{t+1} \mid z_t)`.
        likelihood: ``(*B, T, K)``, :math:`\log p(x_t \mid z_t)`; 0 at padded steps.
        exists: ``(*B, T)``, which steps exist.
        observed: ``(*B, T)``, which of them are observed.
        state_of: ``(K,)``, the state of the model that each of the chain is.
    """

    initial: Tensor
    transition: Tensor
    likelihood: Tensor
    exists: Tensor
    observed: Tensor
    state_of: Tensor

    def matrix(self, t: int) -> Tensor:
        """Log-probabilities ``(*b, K, K)`` of the transition to step ``t``, counted from 0."""
        return self.transition[..., t - 1 if self.transition.size(-3) > 1 else 0, :, :]

    def predicted(self) -> Tensor:
        r"""Predicted states :math:`\log p(z_t \mid x_{1:t-1})`, ``(*B, T, K)``."""
        log_probs = self.initial
        predicted = [log_probs]
        for t in range(1, self.likelihood.size(-2)):
            filtered = normalised(log_probs + self.likelihood[..., t - 1, :])
            log_probs = (filtered.unsqueeze(-1) + self.matrix(t)).logsumexp(-2)
            predicted.append(log_probs)
        return torch.stack(predicted, -2)

    def backward(self) -> Tensor:
        r"""Backward messages :math:`\log p(x_{t+1:T} \mid z_t)` plus a constant, ``(*B, T, K)``."""
        message = torch.zeros_like(self.initial)
        messages = [message]
        for t in range(self.likelihood.size(-2) - 1, 0, -1):
            later = (self.likelihood[..., t, :] + message).unsqueeze(-2)
            earlier = normalised((self.matrix(t) + later).logsumexp(-1))
            message = torch.where(self.exists[..., t, None], earlier, message)
            messages.append(message)
        return torch.stack(messages[::-1], -2)


def chain_factors(hmm: HMM, values: Tensor) -> ChainFactors:
    """Join the parameters of ``hmm`` and observations ``(*B, T, *E)``."""
    if isinstance(hmm, HSMM):
        factors = _chain_of_ages(hmm, values)
    elif isinstance(hmm, SecondOrderHMM):
        factors = hmm.expanded().log_factors(values)
    else:
        factors = hmm.log_factors(values)
    initial, transition, likelihood = factors
    states = torch.arange(initial.size(-1), device=initial.device)
    if isinstance(hmm, SecondOrderHMM):
        states = states % hmm.num_states
    else:  # ages of a state stand side by side
        states = states // (len(states) // hmm.num_states)
    batch = torch.broadcast_shapes(hmm.batch_shape, likelihood.shape[:-2])
    exists = hmm.exists.expand(*batch, hmm.num_steps)
    # in float64: sums over long sequences, and the tails of distributions
    return ChainFactors(
        initial.double().expand(*batch, initial.size(-1)),
        transition.double(),
        likelihood.double().masked_fill(~exists.unsqueeze(-1), 0.0),
        exists,
        exists if hmm.observed is None else exists & hmm.observed,
        states,
    )


def _chain_of_ages(hsmm: HSMM, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    r"""Factors of :class:`ChainFactors`; the last step holds, if it must, that a segment ends.

    A segment of age a goes on with probability S(a + 1) / S(a), and ends with w(a) / S(a), where w
    are the weights of its durations, or of what is seen of the first one, and S is their survival.
    """
    likelihood = hsmm.log_likelihood(values).double()
    matrix, duration = hsmm.log_transition.double(), hsmm.log_duration.double()
    interior, _, left, _ = semi_markov.segment_weights(duration, *hsmm.chain.censored)
    weights = torch.stack([interior, left] if hsmm.censored_start else [interior], -2)
    survival = semi_markov.log_survival(weights)
    lasted = finite_or_zero(survival)  # ages that are never reached are never left
    ends = (weights - lasted).flatten(-2).unsqueeze(-1)
    goes_on = survival[..., 1:] - lasted[..., :-1]
    goes_on = torch.nn.functional.pad(goes_on, (0, 1), value=-torch.inf).flatten(-2)[..., :-1]
    num_states, size = ends.shape[-3:-1]
    after = matrix.unsqueeze(-2) + ends  # (*b, from, age, to)
    wide = after.new_full((*after.shape, size), -torch.inf)
    wide[..., 0] = after
    age = torch.arange(size - 1, device=wide.device)
    for state in range(num_states):
        wide[..., state, age, state, age + 1] = goes_on[..., state, :]
    initial = hsmm.log_initial.double()
    first = initial.new_full((*initial.shape, size), -torch.inf)
    first[..., -hsmm.max_duration] = initial
    likelihood = likelihood.repeat_interleave(size, -1)
    if not hsmm.censored_end:
        steps = torch.arange(hsmm.num_steps)
        last = (steps == hsmm.lengths.unsqueeze(-1) - 1).unsqueeze(-1).to(likelihood.device)
        end = ends.flatten(-3).unsqueeze(-2)
        likelihood = torch.where(last, likelihood + end, likelihood)
    return first.flatten(-2), wide.flatten(-4, -3).flatten(-2).unsqueeze(-3), likelihood


def in_blocks(hmm: HMM) -> TypeGuard[BlockHMM]:
    """Whether queries are computed from block to block, not by the matrix of all transitions."""
    return isinstance(hmm, BlockHMM) and hmm.carried is None


def normalised(scores: Tensor) -> Tensor:
    """Subtract the log of the sum over the last dimension; where all are -inf they stay so."""
    return scores - finite_or_zero(scores.logsumexp(-1, keepdim=True))


def finite_or_zero(logs: Tensor) -> Tensor:
    """Zero for minus infinity, so that subtracting it makes no NaN."""
    return logs.masked_fill(logs.isneginf(), 0.0)


def refuse_autoregressive(hmm: HMM, purpose: str) -> None:
    """Raise if the emission depends on the observations before, which ``purpose`` does not know."""
    if not isinstance(hmm, BlockHMM) and isinstance(hmm.emission, Autoregressive):
        raise ValueError(
            f"{purpose} needs observations that depend on the state alone; the emission of hmm is "
            f"{type(hmm.emission).__name__}. hmm.posterior, hmm.forecast and continuation know of "
            "earlier observations."
        )


def check_possible(log_evidence: Tensor) -> None:
    """Raise if a sequence has probability zero."""
    count = int(log_evidence.isneginf().sum())
    if count:
        raise ValueError(
            f"values must be possible under the model; {count} of {log_evidence.numel()} sequences "
            "have probability zero, so that nothing follows from them. Leave them out: their "
            "hmm.log_prob(values) is -inf."
        )
