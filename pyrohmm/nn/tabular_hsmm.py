"""``TabularHSMM``: a semi-Markov model whose probabilities are the parameters."""

from __future__ import annotations

import torch
from pyro.nn import PyroModule, PyroParam
from torch import Tensor
from torch.distributions import constraints

from .._checks import check_size
from ..distributions.hmm import HMM
from ..distributions.hsmm import HSMM
from ..ops.log_space import log
from ..ops.recursions import ExpectedCounts
from . import emissions
from .closed_form import Maximum, Statistics, inside, under
from .durations import DurationFamily, DurationMStep, free_durations
from .family import EmissionFamily
from .tabular import TabularHMM


class TabularHSMM(TabularHMM):
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
        if not callable(durations) or isinstance(durations, torch.distributions.Distribution):
            raise TypeError(
                "durations must be a family of durations, such as free_durations(max_duration); "
                f"got {type(durations).__name__}."
            )
        self.duration = durations(num_states)
        if not isinstance(self.duration, PyroModule):
            raise TypeError(
                "durations must return a PyroModule when it is called with K; got "
                f"{type(self.duration).__name__}."
            )
        self.censored_end, self.censored_start = censored_end, censored_start

    @classmethod
    def from_hmm(cls, hmm: HMM) -> TabularHSMM:
        """A module with the values of an :class:`HSMM` as parameters: points, without priors.

        Raises:
            TypeError: If ``hmm`` is not an ``HSMM``.
            ValueError: If its emission has a dimension of steps.
        """
        if not isinstance(hmm, HSMM):
            raise TypeError(f"hmm must be an HSMM; got {type(hmm).__name__}.")
        if hmm.emission_per_step:
            raise ValueError("hmm has parameters per step; a TabularHSMM has one set for all.")
        module = cls(
            hmm.num_states, free_durations(hmm.max_duration),
            lambda _: emissions.from_distribution(hmm.emission), censored_end=hmm.censored_end,
            censored_start=hmm.censored_start,
        )  # fmt: skip
        part: PyroModule = module
        for name, logs in (("initial", hmm.log_initial), ("transition", hmm.log_transition),
                           ("probs", hmm.log_duration)):  # fmt: skip
            part = module.duration if name == "probs" else module
            delattr(part, name)
            setattr(part, name, PyroParam(logs.detach().exp(), constraints.simplex))
        return module.to(hmm.log_initial.device)

    def forward(self, lengths: Tensor, observed: Tensor | None = None) -> HSMM:
        """Build the HSMM for sequences of ``lengths`` ``(*B)``."""
        return HSMM(
            log(self.initial), log(self.transition), self.duration(), self.emission(), lengths,
            observed, censored_end=self.censored_end, censored_start=self.censored_start,
        )  # fmt: skip

    def statistics(self, expected: ExpectedCounts) -> Statistics:
        """Expected counts of what is free: see :class:`ChainMStep`."""
        chain = super().statistics(expected)
        if not isinstance(self.duration, DurationMStep) or expected.durations is None:
            return chain
        begun = expected.initial if self.censored_start else None
        return chain | under("duration.", self.duration.statistics(expected.durations, begun))

    def m_step(self, statistics: Statistics) -> Maximum:
        """Normalised counts, and the mode of durations if they have an M-step."""
        chain = {name: value for name, value in statistics.items() if "." not in name}
        values, notes = super().m_step(chain)
        if isinstance(self.duration, DurationMStep):
            mode, remarks = self.duration.m_step(inside(statistics, "duration."))
            values, notes = values | under("duration.", mode), notes + remarks
        return values, notes
