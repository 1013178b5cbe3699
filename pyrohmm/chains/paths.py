"""``PathFactors``: messages, the best paths and the entropy of a chain given the observations.

What is rarely asked is computed here for all chains at once: a chain whose next state depends on
more than the state is expanded to a Markov chain first (:meth:`Chain.expanded`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._checks import broadcast_shapes
from .._precision import recomputing
from ..ops.log_space import finite_or_zero, logsumexp, normalised
from ..ops.masks import exists
from .base import Chain


class PathFactors(NamedTuple):
    r"""Factors of the joint density of states and observations, of a whole batch, in float64.

    The K states are those of the expanded chain: a path of the model is one path of these.

    Attributes:
        initial: ``(*B, K)``, :math:`\log p(z_1)`.
        transition: ``(*b, 1|T-1, K, K)``, :math:`\log p(z_{t+1} \mid z_t)`.
        likelihood: ``(*B, T, K)``, :math:`\log p(x_t \mid z_t)`; 0 at padded steps.
        exists: ``(*B, T)``, which steps exist.
        state_of: ``(K,)``, the state of the model that each of the chain is.
    """

    initial: Tensor
    transition: Tensor
    likelihood: Tensor
    exists: Tensor
    state_of: Tensor

    @classmethod
    def of(cls, chain: Chain, log_likelihood: Tensor, lengths: Tensor) -> PathFactors:
        """Factors of ``chain`` and log-likelihoods ``(*B, T, K)`` of its states."""
        # in float64: sums over long sequences, and the tails of distributions
        wide = chain.map(lambda _, parameter, core: parameter.double())
        markov, state_of, allowed = wide.expanded(lengths, log_likelihood.size(-2))
        likelihood = log_likelihood.double().index_select(-1, state_of)
        if allowed is not None:
            likelihood = likelihood.masked_fill(~allowed, -torch.inf)
        return cls.joined(markov.log_initial, markov.matrices, likelihood, lengths, state_of)

    @classmethod
    def joined(
        cls,
        initial: Tensor,
        transition: Tensor,
        likelihood: Tensor,
        lengths: Tensor,
        state_of: Tensor | None = None,
    ) -> PathFactors:
        """Factors of a Markov chain, with the batch dimensions of all of them."""
        batch = broadcast_shapes(
            initial.shape[:-1], transition.shape[:-3], likelihood.shape[:-2], lengths.shape
        )
        here = exists(lengths, likelihood.size(-2), likelihood.device)
        return cls(
            initial.double().expand(*batch, initial.size(-1)),
            transition.double(),
            likelihood.double().masked_fill(~here.unsqueeze(-1), 0.0),
            here.expand(*batch, here.size(-1)),
            torch.arange(initial.size(-1), device=initial.device) if state_of is None else state_of,
        )

    def matrix(self, t: int) -> Tensor:
        """Log-probabilities ``(*b, K, K)`` of the transition to step ``t``, counted from 0."""
        return self.transition[..., t - 1 if self.transition.size(-3) > 1 else 0, :, :]

    @recomputing
    def predicted(self) -> Tensor:
        r"""Predicted states :math:`\log p(z_t \mid x_{1:t-1})`, ``(*B, T, K)``."""
        log_probs = self.initial
        predicted = [log_probs]
        for t in range(1, self.likelihood.size(-2)):
            filtered = normalised(log_probs + self.likelihood[..., t - 1, :])
            log_probs = logsumexp(filtered.unsqueeze(-1) + self.matrix(t), -2)
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

    @recomputing
    def k_best(self, count: int) -> tuple[Tensor, Tensor]:
        """The most probable paths ``(*B, C, T)``, best first, and their log joint ``(*B, C)``.

        The list Viterbi algorithm: the best paths into each state are kept at each step. Where
        fewer than C paths are possible the rest have -inf, and hold 0.
        """
        num_steps, num_states = self.likelihood.shape[-2:]
        first = self.initial + self.likelihood[..., 0, :]
        scores = first.new_full((*first.shape, count), -torch.inf)  # of the C best into each state
        scores[..., 0] = first
        same = torch.arange(num_states * count, device=first.device)
        pointers = []  # where each of the K C paths came from, among those of the step before
        for t in range(1, num_steps):
            extended = self.matrix(t).mT.unsqueeze(-1) + scores.unsqueeze(-3)  # (*B, to, from, C)
            ranked, order = extended.flatten(-2).sort(dim=-1, descending=True, stable=True)
            here = self.exists[..., t, None, None]
            arrived = ranked[..., :count] + self.likelihood[..., t, :, None]
            scores = torch.where(here, arrived, scores)
            origin = order[..., :count].flatten(-2)
            pointers.append(torch.where(here.squeeze(-1), origin, same))
        ranked, order = scores.flatten(-2).sort(dim=-1, descending=True, stable=True)
        log_joint, place = ranked[..., :count], order[..., :count]
        path = [self.state_of[place // count]]
        for pointer in reversed(pointers):
            place = pointer.gather(-1, place)
            path.append(self.state_of[place // count])
        paths = torch.stack(path[::-1], -1)
        real = self.exists.unsqueeze(-2) & ~log_joint.isneginf().unsqueeze(-1)
        return paths.masked_fill(~real, 0), log_joint.masked_fill(log_joint.isneginf(), -torch.inf)

    @recomputing
    def entropy(self) -> tuple[Tensor, Tensor]:
        """Entropy of the path given the observations ``(*B)``, in nats; zero if there is none.

        Also the logarithm of what remains of all paths, ``(*B)``: -inf if there is none, else 0.

        Source: Hernando, Crespi and Cybenko, 2005.
        """
        filtered = normalised(self.initial + self.likelihood[..., 0, :])
        entropy = torch.zeros_like(filtered)  # of the states before, given the state at t
        for t in range(1, self.likelihood.size(-2)):
            pairs = filtered.unsqueeze(-1) + self.matrix(t)
            predicted = logsumexp(pairs, -2)
            logs = pairs - finite_or_zero(predicted).unsqueeze(-2)  # of the states at t-1
            before = (logs.exp() * (entropy.unsqueeze(-1) - finite_or_zero(logs))).sum(-2)
            here = self.exists[..., t, None]
            updated = normalised(predicted + self.likelihood[..., t, :])
            filtered = torch.where(here, updated, filtered)
            entropy = torch.where(here, before, entropy)
        entropy = (filtered.exp() * (entropy - finite_or_zero(filtered))).sum(-1)
        return entropy.clamp(min=0.0), logsumexp(filtered, -1)
