"""``MarkovChain``: each state depends on the one before it; ``PathFactors`` of any chain."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._checks import broadcast_shapes, check_log_simplex
from .._choices import CACHED, ON_DEVICE
from .._precision import recomputing
from ..ops import forward, recursions
from ..ops import markov as markov_ops
from ..ops.log_space import finite_or_zero, step_mask
from ..ops.recursions import Posterior
from .base import Chain, Core, Expansion, ExpectedCounts, entry


class MarkovRecursions(Chain):
    """Base of chains that are Markov, whose parameters determine the transition matrices.

    Besides ``cores`` it defines ``log_initial`` and :attr:`matrices`; expected counts of its
    parameters are gradients.

    Example:
        >>> from pyrohmm.ops.log_space import log  # with gradient zero at zero
        >>> class Ring(MarkovRecursions):  # each state is followed by itself or by the next one
        ...     cores = {"log_initial": ("K",), "log_moves": ("K", "M")}
        ...
        ...     def __init__(self, log_initial, log_moves):
        ...         super().__init__()
        ...         self.take(log_initial=log_initial, log_moves=log_moves)
        ...
        ...     @property
        ...     def matrices(self):
        ...         stay, go = self.log_moves.exp().unbind(-1)
        ...         eye = torch.eye(self.num_states)
        ...         rows = stay.unsqueeze(-1) * eye + go.unsqueeze(-1) * eye.roll(1, -1)
        ...         return log(rows).unsqueeze(-3)
        >>> moves = torch.tensor([[0.9, 0.1], [0.5, 0.5], [0.8, 0.2]]).log()
        >>> ring = Ring(torch.full((3,), 1 / 3).log(), moves)
        >>> levels = Normal(torch.tensor([0.0, 2.0, 4.0]), 1.0)
        >>> hmm = HMM.of(ring, levels, torch.tensor(4))
        >>> found = hmm.expected_counts(torch.tensor([0.0, 0.0, 2.0, 4.0]))
        >>> found.counts["log_moves"].sum().round()
        tensor(3.)
    """

    is_markov = True

    @property
    def matrices(self) -> Tensor:
        """Log transition matrices, ``(*b, 1|T-1, K, K)``."""
        raise NotImplementedError

    @property
    def log_transition(self) -> Tensor:
        r"""Log transition matrix ``(*b, K, K)``, or ``(*b, T-1, K, K)`` per step."""
        return self.matrices if self.per_step else self.matrices.squeeze(-3)

    def all_initial(self) -> Tensor:
        """Log-probabilities of the first state, ``(*b, K)``."""
        return self.log_initial

    def check_values(self) -> None:
        """Raise unless log-probabilities sum to one, in the rows of the matrices as well."""
        super().check_values()
        check_log_simplex("matrices", self.matrices)

    def log_evidence(self, log_likelihood: Tensor, lengths: Tensor) -> Tensor:
        r"""Log evidence :math:`\log p(x_{1:T})`, ``(*B)``, in nats, differentiable."""
        return recursions.log_evidence(self.log_initial, self.matrices, log_likelihood, lengths)

    def filtered(self, log_likelihood: Tensor, lengths: Tensor) -> Tensor:
        r"""Filtered :math:`\log p(z_t \mid x_{1:t})`, ``(*B, T, K)``; -inf at padded steps."""
        return recursions.filtered(self.log_initial, self.matrices, log_likelihood, lengths)

    def viterbi(self, log_likelihood: Tensor, lengths: Tensor) -> Tensor:
        """Most probable path, ``(*B, T)``; 0 at padded steps."""
        return recursions.viterbi(self.log_initial, self.matrices, log_likelihood, lengths)

    def sample_states(self, log_likelihood: Tensor, lengths: Tensor, num_samples: int) -> Tensor:
        """Sample paths from the posterior, ``(num_samples, *B, T)``; 0 at padded steps."""
        parts = self.log_initial, self.matrices, log_likelihood, lengths
        return recursions.sample_paths(*parts, num_samples=num_samples)[0]

    def log_prob(self, states: Tensor, exists: Tensor) -> Tensor:
        r"""Log-probability :math:`\log p(z_{1:T})` of paths."""
        before, after = states[..., :-1], states[..., 1:]
        if self.matrices.size(-3) == 1:
            taken = entry(self.matrices.squeeze(-3), before, after)
        else:
            taken = entry(self.matrices, before.unsqueeze(-1), after.unsqueeze(-1)).squeeze(-1)
        start = entry(self.log_initial, states[..., :1]).squeeze(-1)
        return start + taken.masked_fill(~exists[..., 1:], 0.0).sum(-1)

    def sample_prior(self, shape: torch.Size, num_steps: int) -> Tensor:
        """Sample paths of the chain."""
        return markov_ops.sample_chain(self.log_initial, self.matrices, shape, num_steps)

    def expanded(self, lengths: Tensor, num_steps: int) -> Expansion:
        """The Markov chain of the matrices."""
        chain = MarkovChain(self.all_initial(), self.log_transition, self.per_step)
        return Expansion(chain, torch.arange(self.num_states, device=self.log_initial.device))

    def stationary(self) -> Tensor:
        r"""Stationary distribution :math:`\pi = \pi A` of the states, ``(*b, K)``."""
        return markov_ops.stationary(self.log_transition)

    def posterior(self, log_likelihood: Tensor, lengths: Tensor) -> Posterior:
        """Log evidence, smoothed marginals and expected transition counts of each sequence."""
        return recursions.posterior(self.log_initial, self.matrices, log_likelihood, lengths)


_CONSTANT: dict[str, Core] = {"log_initial": ("K",), "log_transition": ("K", "K")}
_PER_STEP: dict[str, Core] = {"log_initial": ("K",), "log_transition": ("T-1", "K", "K")}


class MarkovChain(MarkovRecursions):
    r"""A Markov chain: :math:`p(z_{1:T}) = \pi_{z_1} \prod_t A_{z_{t-1} z_t}`.

    Args:
        log_initial: ``(*b, K)``.
        log_transition: ``(*b, K, K)``, row = from, column = to; ``(*b, T-1, K, K)`` with
            ``per_step``.
        per_step: Whether there is a matrix for each transition.
    """

    cores = _CONSTANT
    check_values = Chain.check_values  # the rows are parameters
    log_transition: Any = None  # an attribute, where other chains compute it

    def __init__(self, log_initial: Tensor, log_transition: Tensor, per_step: bool = False) -> None:
        super().__init__(per_step=per_step)
        self.take(log_initial=log_initial, log_transition=log_transition)
        if per_step:
            self.per_step, self.cores = True, _PER_STEP  # type: ignore[misc]

    @property
    def steps(self) -> dict[str, int]:
        """T by the name of the matrices, if there is one for each transition."""
        return {"log_transition": self.log_transition.size(-3) + 1} if self.per_step else {}

    @property
    def matrices(self) -> Tensor:
        """Log transition matrices, ``(*b, 1|T-1, K, K)``."""
        return self.log_transition if self.per_step else self.log_transition.unsqueeze(-3)

    def expected_counts(self, log_likelihood: Tensor, lengths: Tensor) -> ExpectedCounts:
        """Expected initial and transition counts by forward-backward."""
        parts = self.log_initial, self.matrices, log_likelihood, lengths
        found = recursions.expected_counts(*parts)
        return found if self.per_step else found.of_one_matrix()


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
        """Path factors of a Markov chain, broadcast to common batch dimensions."""
        batch = broadcast_shapes(
            initial.shape[:-1], transition.shape[:-3], likelihood.shape[:-2], lengths.shape
        )
        here = step_mask(lengths, likelihood.size(-2), likelihood.device)
        return cls(
            initial.double().expand(*batch, initial.size(-1)),
            transition.double(),
            likelihood.double().masked_fill(~here.unsqueeze(-1), 0.0),
            here.expand(*batch, here.size(-1)),
            torch.arange(initial.size(-1), device=initial.device) if state_of is None else state_of,
        )

    @recomputing
    def predicted(self) -> Tensor:
        r"""One-step predicted states :math:`\log p(z_t \mid x_{1:t-1})`, ``(*B, T, K)``."""
        steps, first = torch.tensor(self.likelihood.size(-2)), self.initial.unsqueeze(-2)
        if steps == 1:
            return first
        filtered = recursions.filtered(self.initial, self.transition, self.likelihood, steps)
        logs = self.transition
        if logs.shape[:-3].numel() > 1:
            logs = logs.expand(*self.initial.shape[:-1], *logs.shape[-3:])
        logs = logs.reshape(-1, *logs.shape[-3:])
        several = 1 if logs.shape[:2].numel() == 1 else int(steps) - 1  # steps a row, or each a row
        scores = filtered[..., :-1, :].reshape(-1, several, filtered.size(-1))
        rows = len(scores) if len(logs) > 1 else max(1, CACHED // logs[0].size(-1) // several)
        after = torch.cat([forward.log_sums(part, logs) for part in scores.split(rows)])
        return torch.cat([first, after.reshape(filtered[..., 1:, :].shape)], -2)

    def backward(self) -> Tensor:
        r"""Backward messages :math:`\log p(x_{t+1:T} \mid z_t)` plus a constant, ``(*B, T, K)``.

        Those of a chain whose rows sum to one: predictions of the chain reversed in time.
        """
        earlier, seen = self.transition.flip(-3).mT, self.likelihood.flip(-2)
        parts = torch.zeros_like(self.initial), earlier, seen, self.exists, self.state_of
        return PathFactors(*parts).predicted().flip(-2)

    def k_best(self, count: int) -> tuple[Tensor, Tensor]:
        """The most probable paths ``(*B, C, T)``, best first, and their log joint ``(*B, C)``.

        Where fewer than C paths are possible the rest have -inf, and hold 0.
        """
        initial, matrices, seen, lengths = *self[:3], self.exists.sum(-1)
        paths, possible = recursions.best_paths(initial, matrices, seen, lengths, count)
        chain = MarkovChain(initial.unsqueeze(-2), matrices.unsqueeze(-4), per_step=True)
        joint = chain.log_joint(seen.unsqueeze(-3), lengths.unsqueeze(-1), paths)
        real = self.exists.unsqueeze(-2) & possible.unsqueeze(-1)
        return self.state_of[paths].masked_fill(~real, 0), joint.masked_fill(~possible, -torch.inf)

    @recomputing
    def entropy(self) -> tuple[Tensor, Tensor]:
        r"""Entropy of the path given the observations ``(*B)``, in nats; zero if there is none.

        The log evidence less the expected log joint density. Also the logarithm of what remains of
        all paths, ``(*B)``: -inf if there is none, else 0.
        """
        batch, lengths = self.initial.shape[:-1], self.exists.sum(-1)
        size = max(1, ON_DEVICE // max(1, self.transition.numel()))
        if self.transition.shape[:-3].numel() == 1 and batch.numel() > size:
            shared = self._replace(transition=self.transition.reshape(self.transition.shape[-3:]))
            each = (shared[0].flatten(0, -2), shared[2].flatten(0, -3), shared[3].flatten(0, -2))
            rows = zip(*(part.split(size) for part in each))
            parts = [shared._replace(initial=i, likelihood=x, exists=e) for i, x, e in rows]
            nats, left = map(torch.cat, zip(*(part.entropy() for part in parts)))
            return nats.reshape(batch), left.reshape(batch)
        logs = self.initial, self.transition.expand(*batch, *self.transition.shape[-3:])
        found = recursions.expected_counts(*logs, self.likelihood, lengths)
        counts = *found.counts.values(), found.state_probs
        expected = sum(
            (count * finite_or_zero(part)).flatten(len(batch)).sum(-1)
            for count, part in zip(counts, (*logs, self.likelihood))
        )
        evidence = found.log_evidence
        return (evidence - expected).clamp(min=0.0), torch.where(evidence.isneginf(), evidence, 0.0)
