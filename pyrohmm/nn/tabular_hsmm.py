"""``TabularHSMM``: a semi-Markov model whose probabilities are the parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._checks import check_size
from ..chains.base import ExpectedCounts
from ..distributions.hmm import HMM
from ..distributions.structured_hmm import HSMM
from .closed_form import ConjugateSampler, Maximum, Statistics, inside, under
from .durations import DurationFamily, DurationMStep, free_durations
from .family import Emission, EmissionFamily, build_part
from .tabular import ChainTables, TabularHMM


class TabularHSMM(TabularHMM, builds=HSMM):
    r"""Hidden semi-Markov model with Dirichlet priors on every row, and durations of any family.

    As :class:`TabularHMM`, but the states last for explicit durations, and none follows itself:
    the diagonal of ``transition`` is exactly zero. See :class:`HSMM`.

    ``fit_map``, ``fit_svi`` and NUTS read it by :class:`MarginalModel`; :class:`EnumeratedModel`
    has a site for each step of :meth:`HSMM.expanded`, for small K · D. ``fit_em`` maximises
    durations exactly, and by gradient steps only those of :func:`parametric_durations`.

    Sites: ``initial`` ``(K,)``, ``transition`` ``(K, K)``, and those of ``duration`` and
    ``emission``.

    Args:
        num_states: K, at least 2.
        durations: A family of durations, such as :func:`free_durations`, :func:`poisson_durations`,
            :func:`negative_binomial_durations`, :func:`geometric_durations` or
            :func:`parametric_durations`: called with K, it returns a ``PyroModule`` that returns
            log-probabilities ``(K, D)``.
        emission: An emission family: see :class:`TabularHMM`.
        initial_concentration: Of the prior of the first state; a number or ``(K,)``.
        transition_concentration: Of the priors of the rows; a number, ``(K,)`` or ``(K, K)``.
        initial_allowed: ``(K,)`` booleans, in which states a sequence may begin; all by default.
        transition_allowed: ``(K, K)`` booleans, which transitions between different states are
            possible; all by default.
        censored_end: Whether the last segment may go on after the data: see :class:`HSMM`.
        censored_start: Whether the first segment was there before the data: see :class:`HSMM`.

    Raises:
        ValueError: If ``num_states`` is less than two, or a concentration is not positive or has
            the wrong shape.

    Example:
        >>> _ = pyro.set_rng_seed(0)
        >>> module = TabularHSMM(2, poisson_durations(30), categorical(6))
        >>> hsmm = module(torch.tensor([3, 1]))  # a sample from the prior
        >>> hsmm.log_transition.exp(), hsmm.log_duration.shape
        (tensor([[0., 1.],
                [1., 0.]]), torch.Size([2, 30]))
    """

    def __init__(
        self,
        num_states: int,
        durations: DurationFamily,
        emission: EmissionFamily,
        initial_concentration: float | Tensor = 1.0,
        transition_concentration: float | Tensor = 1.0,
        *,
        initial_allowed: Tensor | None = None,
        transition_allowed: Tensor | None = None,
        censored_end: bool = True,
        censored_start: bool = False,
    ) -> None:
        check_size("num_states", num_states, 2)
        others = ~torch.eye(num_states, dtype=torch.bool)
        if transition_allowed is not None and transition_allowed.shape == others.shape:
            others = others & transition_allowed.bool()
        elif transition_allowed is not None:
            others = transition_allowed  # of a wrong shape, which is reported
        super().__init__(
            num_states, emission, initial_concentration, transition_concentration,
            initial_allowed=initial_allowed, transition_allowed=others,
        )  # fmt: skip
        kind, example = "a family of durations", "free_durations(max_duration)"
        self.duration = build_part("durations", kind, example, durations, num_states)
        if isinstance(self.duration, Emission):
            raise TypeError(
                f"durations must be {kind}; got that of a {type(self.duration).__name__}. They "
                "come before emission."
            )
        self.censored_end, self.censored_start = censored_end, censored_start

    @classmethod
    def _like(cls, hmm: Any, emission: Any) -> ChainTables:
        durations = free_durations(hmm.max_duration)
        return cls(
            hmm.num_states, durations, emission, censored_end=hmm.censored_end,
            censored_start=hmm.censored_start,
        )  # fmt: skip

    def _take_values(self, hmm: HMM) -> None:
        ChainTables._take_values(self, hmm)
        self.duration.set_points(probs=hmm.chain.log_duration.exp())

    def forward(self, lengths: Tensor, observed: Tensor | None = None) -> HSMM:
        """Build the HSMM for sequences of ``lengths`` ``(*B)``."""
        tables: dict[str, Any] = self.tables()
        return HSMM(
            **tables, log_duration=self.duration(), emission=self.emission(), lengths=lengths,
            observed=observed, censored_end=self.censored_end, censored_start=self.censored_start,
        )  # fmt: skip

    def statistics(self, expected: ExpectedCounts) -> Statistics:
        """Expected counts of what is free: see :class:`ChainMStep`."""
        chain = super().statistics(expected)
        if not isinstance(self.duration, DurationMStep):
            return chain
        left_censored = expected.counts["log_initial"] if self.censored_start else None
        lasted = self.duration.statistics(expected.counts["log_duration"], left_censored)
        return chain | under("duration.", lasted)

    def m_step(self, statistics: Statistics) -> Maximum:
        """Normalised counts, and the mode of durations if they have an M-step."""
        chain = {name: value for name, value in statistics.items() if "." not in name}
        values, notes = super().m_step(chain)
        if isinstance(self.duration, DurationMStep):
            mode, remarks = self.duration.m_step(inside(statistics, "duration."))
            values, notes = values | under("duration.", mode), notes + remarks
        return values, notes

    def sample_parameters(self, statistics: Statistics, current: Statistics) -> Statistics:
        """Rows of probabilities, and durations if they can be sampled."""
        samples = super().sample_parameters(statistics, current)
        if isinstance(self.duration, ConjugateSampler):
            own = (inside(each, "duration.") for each in (statistics, current))
            samples |= under("duration.", self.duration.sample_parameters(*own))
        return samples
