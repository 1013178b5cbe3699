"""``MarkovChain``: each state depends on the state before it."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from .._arrays import from_numpy
from ..ops import recursions
from ..ops import stationary as stationary_ops
from ..ops.recursions import Posterior
from ..ops.sampling import CategoricalTable
from .base import Chain, Core, Expansion, ExpectedCounts, entry, sample_markov


class MarkovRecursions(Chain):
    """A Markov chain under any parameters: a subclass says which matrices they make.

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

    ops: ClassVar[Any] = recursions
    is_markov = True

    @property
    def matrices(self) -> Tensor:
        """``(*b, 1|T-1, K, K)``, log-probabilities of transitions."""
        raise NotImplementedError

    @property
    def log_transition(self) -> Tensor:
        r"""``(*b, K, K)``, or ``(*b, T-1, K, K)`` per step."""
        return self.matrices if self.per_step else self.matrices.squeeze(-3)

    @property
    def tables(self) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """The first state's log-probabilities and the matrices."""
        return self.log_initial, self.matrices

    def log_prob(self, states: Tensor, exists: Tensor) -> Tensor:
        r"""Log-probability :math:`\log p(z_{1:T})` of paths."""
        rows = self.matrices.flatten(-2)
        cells = (states[..., :-1] * self.num_states + states[..., 1:]).unsqueeze(-1)
        taken = rows.expand(*cells.shape[:-1], rows.size(-1)).gather(-1, cells).squeeze(-1)
        start = entry(self.log_initial, states[..., :1]).squeeze(-1)
        return start + taken.masked_fill(~exists[..., 1:], 0.0).sum(-1)

    def sample_prior(self, shape: torch.Size, num_steps: int) -> Tensor:
        """Paths of the chain."""
        tables = [CategoricalTable(matrix) for matrix in self.matrices.unbind(-3)]
        return sample_markov(self.log_initial, tables, shape, num_steps)

    def expanded(self, lengths: Tensor, num_steps: int) -> Expansion:
        """The Markov chain of the matrices."""
        chain = MarkovChain(self.log_initial, self.log_transition, self.per_step)
        return Expansion(chain, torch.arange(self.num_states, device=self.log_initial.device))

    def stationary(self) -> Tensor:
        r"""Stationary :math:`\pi = \pi A`: see :mod:`pyrohmm.ops.stationary`."""
        return stationary_ops.stationary(self.log_transition)

    def posterior(self, log_likelihood: Tensor, lengths: Tensor) -> Posterior:
        """Smoothed marginals, and expected transitions ``(*B, K, K)`` of each sequence."""
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

    def __init__(self, log_initial: Tensor, log_transition: Tensor, per_step: bool = False) -> None:
        super().__init__(per_step=per_step)
        self.take(log_initial=log_initial)
        self._table: Tensor = from_numpy("log_transition", log_transition)
        self.per_step = per_step

    @property
    def cores(self) -> dict[str, Core]:  # type: ignore[override]
        """Core dimensions of the first state's probabilities and of the matrix or matrices."""
        return _PER_STEP if self.per_step else _CONSTANT

    @property
    def steps(self) -> dict[str, int]:
        """T by the name of the matrices, if there is one for each transition."""
        return {"log_transition": self.log_transition.size(-3) + 1} if self.per_step else {}

    @property
    def log_transition(self) -> Tensor:
        r"""``(*b, K, K)``, or ``(*b, T-1, K, K)`` per step."""
        return self._table

    @property
    def matrices(self) -> Tensor:
        """``(*b, 1|T-1, K, K)``."""
        return self.log_transition if self.per_step else self.log_transition.unsqueeze(-3)

    def expected_counts(self, log_likelihood: Tensor, lengths: Tensor) -> ExpectedCounts:
        """Expected counts: see :func:`pyrohmm.ops.recursions.expected_counts`."""
        return self.named(
            recursions.expected_counts(self.log_initial, self.matrices, log_likelihood, lengths)
        )

    def named(self, found: recursions.ExpectedCounts) -> ExpectedCounts:
        """Counts of the recursions under the names of the parameters."""
        pairs = found.transitions if self.per_step else found.transitions.squeeze(-3)
        counts = {"log_initial": found.initial, "log_transition": pairs}
        return ExpectedCounts(found.log_evidence, found.state_probs, counts)

    def path_counts(self, states: Tensor, exists: Tensor) -> dict[str, Tensor]:
        """First states and transitions of paths, counted."""
        if self.per_step:
            return super().path_counts(states, exists)
        size, weights = self.num_states, exists.expand(states.shape).to(self.log_initial.dtype)
        cells = states[..., :-1] * size + states[..., 1:]
        pairs = weights.new_zeros(*states.shape[:-1], size * size)
        pairs = pairs.scatter_add_(-1, cells, weights[..., 1:]).unflatten(-1, (size, size))
        first = weights.new_zeros(*states.shape[:-1], size)
        first = first.scatter_add_(-1, states[..., :1], weights[..., :1])
        return {
            "log_initial": first.sum_to_size(self.log_initial.shape),
            "log_transition": pairs.sum_to_size(self.log_transition.shape),
        }
