"""``TabularHSMM`` and families of durations: how long the states of a semi-Markov model last.

A family of durations is called with K and returns a ``PyroModule`` whose call returns
log-probabilities ``(K, D)`` of durations of 1 to D steps. With ``statistics`` and ``m_step`` of a
:class:`DurationMStep` EM maximises it in closed form; else by gradient steps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from pyro.distributions import Beta, Dirichlet, Gamma, GammaPoisson, Poisson
from pyro.distributions.torch_distribution import TorchDistribution
from pyro.nn import PyroModule, PyroParam, PyroSample
from torch import Tensor
from torch.distributions import constraints

from .._arguments import Range, checked, explained
from .._checks import check_size
from ..distributions.hmm import HMM
from ..distributions.hsmm import HSMM
from ..ops.log_space import log
from ..ops.recursions import ExpectedCounts
from . import emissions
from .closed_form import Maximum, Statistics, check_mode, inside, is_free, row_mode, under
from .emissions import PointEmission
from .family import EmissionFamily, positive
from .tabular import TabularHMM

DurationFamily = Callable[[int], PyroModule]


@runtime_checkable
class DurationMStep(Protocol):
    """Durations whose M-step has a closed form: a ``PyroModule`` with these methods."""

    def statistics(self, counts: Tensor) -> Statistics:
        """Sufficient statistics from ``(R, K, D)``, expected numbers of segments."""

    def m_step(self, statistics: Statistics) -> Maximum:
        """The mode of the parameters: see :meth:`.closed_form.EmissionMStep.m_step`."""


@explained()
def truncated(distribution: TorchDistribution, max_duration: int) -> Tensor:
    """Log-probabilities of durations d with ``d - 1`` from a distribution of counts, given d <= D.

    Args:
        distribution: Of 0, 1, 2, ..., of batch shape ``(*B, K)``; it must have a mean.
        max_duration: D; what is longer has no probability, and the rest is normalised.

    Returns:
        ``(*B, K, D)``.

    Example:
        >>> truncated(Poisson(torch.tensor([1.0])), 3).exp()
        tensor([[0.4000, 0.4000, 0.2000]])
    """
    check_size("max_duration", max_duration)
    shape = (max_duration,) + (1,) * len(distribution.batch_shape)
    counts = torch.arange(max_duration).to(distribution.mean).reshape(shape)
    possible = distribution.support.check(counts)
    scores = distribution.log_prob(counts.masked_fill(~possible, 0.0))
    return scores.masked_fill(~possible, -torch.inf).movedim(0, -1).log_softmax(-1)


class _Durations(PyroModule):
    """What the families of this module share."""

    def __init__(self, num_states: int, max_duration: int) -> None:
        super().__init__()
        check_size("num_states", num_states)
        check_size("max_duration", max_duration)
        self.max_duration = max_duration

    def _prior(self, name: str, value: float | Tensor, *shape: int) -> None:
        self.register_buffer(name, positive(name, value, shape))


# Priors; functions that can be pickled, in a shell, for Pyro would rename them --------------------


def _dirichlet_prior(durations: Any) -> TorchDistribution:
    return Dirichlet(durations.concentration).to_event(1)


def _leave_prior(durations: Any) -> TorchDistribution:
    return Beta(durations.prior_leave, durations.prior_stay).to_event(1)


def _rate_prior(durations: Any) -> TorchDistribution:
    return Gamma(durations.concentration, durations.prior_rate).to_event(1)


def _average_prior(durations: Any) -> TorchDistribution:
    return Gamma(durations.concentration, durations.rate).to_event(1)


def _shape_prior(durations: Any) -> TorchDistribution:
    return Gamma(durations.shape_concentration, durations.shape_rate).to_event(1)


def free_durations(max_duration: int, concentration: float | Tensor = 1.0) -> DurationFamily:
    """Family of durations: a free probability of each, with Dirichlet priors.

    Site: ``duration.probs``, ``(K, D)``. EM has a closed form.

    Args:
        max_duration: D.
        concentration: Of the priors; a number, ``(D,)`` or ``(K, D)``.

    Example:
        >>> free_durations(4)(2)().shape
        torch.Size([2, 4])
    """
    check_size("max_duration", max_duration)
    return partial(FreeDurations, max_duration=max_duration, concentration=concentration)


class FreeDurations(_Durations):
    """A free probability of each duration: see :func:`free_durations`."""

    def __init__(
        self, num_states: int, max_duration: int, concentration: float | Tensor = 1.0
    ) -> None:
        super().__init__(num_states, max_duration)
        self._prior("concentration", concentration, num_states, max_duration)
        self.probs = PyroSample(partial(_dirichlet_prior))

    def forward(self) -> Tensor:
        """Log-probabilities of durations, ``(K, D)``."""
        return log(self.probs)

    def statistics(self, counts: Tensor) -> Statistics:
        """The counts themselves."""
        return {"probs": counts} if is_free(self, "probs") else {}

    def m_step(self, statistics: Statistics) -> Maximum:
        """Normalised counts, those of the prior included."""
        prior = self.concentration if "probs" in self._pyro_samples else None
        return {name: row_mode(counts, prior) for name, counts in statistics.items()}, []


def geometric_durations(
    max_duration: int, leave: float | Tensor = 1.0, stay: float | Tensor = 1.0
) -> DurationFamily:
    r"""Family of durations: geometric, as in a Markov chain, with Beta priors.

    .. math:: p(d) = q (1 - q)^{d - 1} \text{ for } d < D, \quad p(D) = (1 - q)^{D - 1}

    The last entry holds all that is longer, so that with sequences of up to D steps the model is
    that of a :class:`TabularHMM` with 1 - q on the diagonal.

    Site: ``duration.leave``, ``(K,)``, the probability q to leave at each step. EM has a closed
    form.

    Args:
        max_duration: D.
        leave: Of the prior, how many leaves it is worth, plus one; a number or ``(K,)``.
        stay: Of the prior, how many stays it is worth, plus one; a number or ``(K,)``.

    Example:
        >>> durations = geometric_durations(3)(1)
        >>> freeze(durations, "leave", torch.tensor([0.5]))
        >>> durations().exp()
        tensor([[0.5000, 0.2500, 0.2500]])
    """
    check_size("max_duration", max_duration)
    return partial(
        GeometricDurations, max_duration=max_duration, prior_leave=leave, prior_stay=stay
    )


class GeometricDurations(_Durations):
    """Geometric durations: see :func:`geometric_durations`."""

    def __init__(
        self,
        num_states: int,
        max_duration: int,
        prior_leave: float | Tensor = 1.0,
        prior_stay: float | Tensor = 1.0,
    ) -> None:
        super().__init__(num_states, max_duration)
        self._prior("prior_leave", prior_leave, num_states)
        self._prior("prior_stay", prior_stay, num_states)
        self.leave = PyroSample(partial(_leave_prior))

    def forward(self) -> Tensor:
        """Log-probabilities of durations, ``(K, D)``."""
        leave = self.leave.unsqueeze(-1)
        count = torch.arange(self.max_duration, device=leave.device)
        stays = torch.where(count > 0, count * log(1 - leave), 0.0)  # 0 times -inf is NaN
        return torch.where(count < self.max_duration - 1, stays + log(leave), stays)

    def statistics(self, counts: Tensor) -> Statistics:
        """Expected numbers of stays and of leaves."""
        if not is_free(self, "leave"):
            return {}
        stays = torch.arange(counts.size(-1), device=counts.device).to(counts)
        return {"leaves": counts[..., :-1].sum(-1), "stays": (counts * stays).sum(-1)}

    def m_step(self, statistics: Statistics) -> Maximum:
        """The share of leaves, with those of the prior; NaN where nothing determines it."""
        if not statistics:
            return {}, []
        leaves, stays = statistics["leaves"], statistics["stays"]
        if "leave" in self._pyro_samples:
            for name in ("prior_leave", "prior_stay"):
                check_mode(name, getattr(self, name))
            leaves, stays = leaves + self.prior_leave - 1, stays + self.prior_stay - 1
        return {"leave": leaves / (leaves + stays)}, []


def poisson_durations(
    max_duration: int, concentration: float | Tensor = 1.0, rate: float | Tensor = 0.1
) -> DurationFamily:
    """Family of durations: d - 1 is Poisson, given d <= D, each mean with a Gamma prior.

    Site: ``duration.rate``, ``(K,)``, the mean of d - 1 before the cut at D. EM takes gradient
    steps.

    Args:
        max_duration: D; choose it beyond any duration: what is longer has no probability.
        concentration: Of the prior; a number or ``(K,)``.
        rate: Of the prior; a number or ``(K,)``. By default it has a mean of ten steps.

    Example:
        >>> poisson_durations(4)(2)().shape
        torch.Size([2, 4])
    """
    check_size("max_duration", max_duration)
    return partial(
        PoissonDurations, max_duration=max_duration, concentration=concentration, prior_rate=rate
    )


class PoissonDurations(_Durations):
    """Poisson durations: see :func:`poisson_durations`."""

    def __init__(
        self,
        num_states: int,
        max_duration: int,
        concentration: float | Tensor = 1.0,
        prior_rate: float | Tensor = 0.1,
    ) -> None:
        super().__init__(num_states, max_duration)
        self._prior("concentration", concentration, num_states)
        self._prior("prior_rate", prior_rate, num_states)
        self.rate = PyroSample(partial(_rate_prior))

    def forward(self) -> Tensor:
        """Log-probabilities of durations, ``(K, D)``."""
        return truncated(Poisson(self.rate), self.max_duration)


def negative_binomial_durations(
    max_duration: int,
    concentration: float | Tensor = 1.0,
    rate: float | Tensor = 0.1,
    shape_concentration: float | Tensor = 2.0,
    shape_rate: float | Tensor = 0.5,
) -> DurationFamily:
    r"""Family of durations: d - 1 is negative binomial, given d <= D.

    With mean m and shape r the variance of d - 1 is :math:`m + m^2 / r`: r = 1 is geometric, a
    large r Poisson. Both have Gamma priors.

    Sites: ``duration.average``, ``(K,)``, the mean of d - 1 before the cut at D, and
    ``duration.shape``, ``(K,)``. EM takes gradient steps.

    Args:
        max_duration: D; choose it beyond any duration: what is longer has no probability.
        concentration: Of the prior of the mean; a number or ``(K,)``.
        rate: Of the prior of the mean; a number or ``(K,)``.
        shape_concentration: Of the prior of the shape; a number or ``(K,)``.
        shape_rate: Of the prior of the shape; a number or ``(K,)``.

    Example:
        >>> negative_binomial_durations(4)(2)().shape
        torch.Size([2, 4])
    """
    check_size("max_duration", max_duration)
    return partial(
        NegativeBinomialDurations, max_duration=max_duration, concentration=concentration,
        rate=rate, shape_concentration=shape_concentration, shape_rate=shape_rate,
    )  # fmt: skip


class NegativeBinomialDurations(_Durations):
    """Negative binomial durations: see :func:`negative_binomial_durations`."""

    def __init__(
        self,
        num_states: int,
        max_duration: int,
        concentration: float | Tensor = 1.0,
        rate: float | Tensor = 0.1,
        shape_concentration: float | Tensor = 2.0,
        shape_rate: float | Tensor = 0.5,
    ) -> None:
        super().__init__(num_states, max_duration)
        self._prior("concentration", concentration, num_states)
        self._prior("rate", rate, num_states)
        self._prior("shape_concentration", shape_concentration, num_states)
        self._prior("shape_rate", shape_rate, num_states)
        self.average = PyroSample(partial(_average_prior))
        self.shape = PyroSample(partial(_shape_prior))

    def forward(self) -> Tensor:
        """Log-probabilities of durations, ``(K, D)``."""
        shape = self.shape
        return truncated(GammaPoisson(shape, shape / self.average), self.max_duration)


def parametric_durations(distribution: Any, max_duration: int) -> DurationFamily:
    """Family of durations: d - 1 of any distribution on counts, given d <= D; without priors.

    Its arguments start at their values, and are fitted by maximum likelihood; EM takes gradient
    steps.

    Args:
        distribution: Of 0, 1, 2, ..., of batch shape ``(K,)``.
        max_duration: D; what is longer has no probability.

    Raises:
        ValueError: If the batch shape of ``distribution`` is not ``(K,)``, when it is called.

    Example:
        >>> parametric_durations(Poisson(torch.tensor([3.0, 5.0])), 20)(2)().shape
        torch.Size([2, 20])
    """
    check_size("max_duration", max_duration)
    family = emissions.parametric(distribution)
    return lambda num_states: ParametricDurations(family(num_states), max_duration)


class ParametricDurations(PyroModule):
    """Durations of any distribution on counts: see :func:`parametric_durations`."""

    def __init__(self, part: PyroModule, max_duration: int) -> None:
        super().__init__()
        self.part: PointEmission = part
        self.max_duration = max_duration

    def forward(self) -> Tensor:
        """Log-probabilities of durations, ``(K, D)``."""
        return truncated(self.part(), self.max_duration)


@checked(durations=None, emission=None, num_states=Range(2))
class TabularHSMM(TabularHMM):
    r"""Hidden semi-Markov model with Dirichlet priors on every row, and durations of any family.

    As :class:`TabularHMM`, but the states last for explicit durations, and none follows itself:
    the diagonal of ``transition`` is exactly zero. See :class:`HSMM`.

    ``fit_map``, ``fit_svi`` and NUTS read it by :class:`MarginalModel`; :class:`EnumeratedModel`
    has a site for each step of :meth:`HSMM.expanded`, for small K · D. ``fit_em`` maximises free
    and geometric durations in closed form, others by gradient steps.

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
        return chain | under("duration.", self.duration.statistics(expected.durations))

    def m_step(self, statistics: Statistics) -> Maximum:
        """Normalised counts, and durations in closed form if they have one."""
        chain = {name: value for name, value in statistics.items() if "." not in name}
        values, notes = super().m_step(chain)
        if isinstance(self.duration, DurationMStep):
            mode, remarks = self.duration.m_step(inside(statistics, "duration."))
            values, notes = values | under("duration.", mode), notes + remarks
        return values, notes
