"""Families of durations: how long the states of a semi-Markov model last.

A family of durations is called with K and returns a ``PyroModule`` whose call returns
log-probabilities ``(K, D)`` of durations of 1 to D steps. With ``statistics`` and ``m_step`` of a
:class:`DurationMStep` EM maximises it exactly; else by gradient steps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from pyro.distributions import Beta, Dirichlet, Gamma, GammaPoisson, Poisson
from pyro.distributions.torch_distribution import TorchDistribution
from pyro.nn import PyroModule
from torch import Tensor

from .._checks import check_size
from ..ops.log_space import log
from . import emissions
from .closed_form import Family, Maximum, Statistics, check_mode, sample_rows, with_prior
from .duration_modes import (
    BOUND,
    Derivatives,
    beta,
    expected_log,
    free_probs,
    gamma,
    geometric,
    maximum,
    negative_binomial,
    poisson,
)
from .emissions import PointEmission
from .family import positive

DurationFamily = Callable[[int], PyroModule]


@runtime_checkable
class DurationMStep(Protocol):
    """Durations with an M-step of their own: a ``PyroModule`` with these methods."""

    def statistics(self, counts: Tensor, left_censored: Tensor | None) -> Statistics:
        """Sufficient statistics of the parameters.

        Args:
            counts: ``(R, K, D)``, expected numbers of segments by their whole durations.
            left_censored: ``(R, K)``, how many of these are first segments that were there
                before the data, and so are found in proportion to their length; None if
                there are none.
        """

    def m_step(self, statistics: Statistics) -> Maximum:
        """The mode of the parameters: see :meth:`.closed_form.EmissionMStep.m_step`."""


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


class _Durations(Family):
    """Base of the families of this module.

    Attributes:
        gammas: Of each positive parameter the buffers with concentration and rate of its Gamma
            prior, by name.
    """

    gammas: ClassVar[dict[str, tuple[str, str]]] = {}

    def __init__(
        self, num_states: int, max_duration: int, **hyperparameters: float | Tensor
    ) -> None:
        super().__init__()
        check_size("num_states", num_states)
        check_size("max_duration", max_duration)
        self.max_duration = max_duration
        for name, value in hyperparameters.items():
            self.register_buffer(name, positive(name, value, (num_states,)))
        for name in self.gammas:
            self.set_priors(**{name: partial(_gamma_prior, name=name)})

    def statistics(self, counts: Tensor, left_censored: Tensor | None) -> Statistics:
        """The counts themselves, if a parameter is free."""
        if not any(self.is_free(name) for name in (*self._pyro_samples, *self._pyro_params)):
            return {}
        return (
            {"counts": counts}
            if left_censored is None
            else {"counts": counts, "left_censored": left_censored}
        )

    def m_step(self, statistics: Statistics) -> Maximum:
        """The mode, the cut at D included; NaN where nothing determines it."""
        return self._mode(**statistics) if statistics else {}, []

    def _mode(self, counts: Tensor, left_censored: Tensor | None = None) -> dict[str, Tensor]:
        raise NotImplementedError

    def _newton(
        self,
        counts: Tensor,
        left_censored: Tensor | None,
        logs: Callable[[Tensor, int], Derivatives],
        *starts: tuple[Tensor, ...],
    ) -> dict[str, Tensor]:
        """The mode of positive parameters with Gamma priors, by their logarithms.

        Args:
            counts: ``(R, K, D)``.
            left_censored: ``(R, K)``, or None.
            logs: Unnormalised probabilities of durations, of :mod:`.duration_modes`.
            starts: Of all parameters, each ``(R, K)``.
        """
        names = list(self.gammas)
        for name in filter(self.has_prior, names):
            check_mode(self.gammas[name][0], getattr(self, self.gammas[name][0]))
        free = torch.tensor([self.is_free(name) for name in names], device=counts.device)
        point = torch.stack([torch.stack(torch.broadcast_tensors(*part), -1) for part in starts])
        for i, name in enumerate(names):
            if not free[i]:
                point[..., i] = getattr(self, name).detach()
        # a parameter without a prior has a flat one: a Gamma density of 1 and 0
        has_prior = torch.tensor([float(self.has_prior(name)) for name in names]).to(counts)
        priors = [[getattr(self, part) for part in pair] for pair in self.gammas.values()]
        shapes, rates = (torch.stack(part, -1).to(counts) for part in zip(*priors))
        shapes, rates = 1 + has_prior * (shapes - 1), has_prior * rates

        def objective(theta: Tensor) -> Derivatives:
            likelihood = expected_log(counts, left_censored, logs(theta, self.max_duration))
            return likelihood + gamma(theta, shapes, rates)

        found = maximum(objective, point.log().clamp(-BOUND, BOUND), free).exp()
        unknown = (counts.sum(-1, keepdim=True) == 0) & (has_prior == 0)
        found = found.masked_fill(unknown, torch.nan)
        return {name: found[..., i] for i, name in enumerate(names) if free[i]}


def _gamma_prior(durations: _Durations, name: str) -> TorchDistribution:
    return Gamma(*(getattr(durations, part) for part in durations.gammas[name])).to_event(1)


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
        shape = num_states, max_duration
        self.register_buffer("concentration", positive("concentration", concentration, shape))
        self.add_parameters(probs=shape)

    def probs_prior(self) -> TorchDistribution:
        """Dirichlet rows."""
        return Dirichlet(self.concentration)

    def forward(self) -> Tensor:
        """Log-probabilities of durations, ``(K, D)``."""
        return log(self.probs)

    def _mode(self, counts: Tensor, left_censored: Tensor | None = None) -> dict[str, Tensor]:
        prior = self.concentration if self.has_prior("probs") else None
        return {"probs": free_probs(with_prior(counts, prior), left_censored)}

    def sample_parameters(self, statistics: Statistics, current: Statistics) -> Statistics:
        """Rows from their Dirichlet posteriors."""
        if not self.has_prior("probs"):
            return {}
        return {"probs": sample_rows(statistics["counts"] + self.concentration)}


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
        super().__init__(num_states, max_duration, prior_leave=prior_leave, prior_stay=prior_stay)
        self.add_parameters(leave=(num_states,))

    def leave_prior(self) -> TorchDistribution:
        """Beta probabilities."""
        return Beta(self.prior_leave, self.prior_stay)

    def forward(self) -> Tensor:
        """Log-probabilities of durations, ``(K, D)``."""
        leave = self.leave.unsqueeze(-1)
        count = torch.arange(self.max_duration, device=leave.device)
        stays = torch.where(count > 0, count * log(1 - leave), 0.0)  # 0 times -inf is NaN
        return torch.where(count < self.max_duration - 1, stays + log(leave), stays)

    def _mode(self, counts: Tensor, left_censored: Tensor | None = None) -> dict[str, Tensor]:
        """The share of leaves, with those of the prior; by Newton steps if some are censored."""
        stays = torch.arange(counts.size(-1), device=counts.device).to(counts)
        leaves, stays = counts[..., :-1].sum(-1), (counts * stays).sum(-1)
        prior_leave = prior_stay = torch.ones_like(self.prior_leave)
        if self.has_prior("leave"):
            prior_leave, prior_stay = self.prior_leave, self.prior_stay
            for name in ("prior_leave", "prior_stay"):
                check_mode(name, getattr(self, name))
        leaves, stays = leaves + prior_leave - 1, stays + prior_stay - 1
        share = leaves / (leaves + stays)
        if left_censored is None:
            return {"leave": share}

        def objective(theta: Tensor) -> Derivatives:
            likelihood = expected_log(counts, left_censored, geometric(theta, self.max_duration))
            prior = beta(theta, prior_leave.unsqueeze(-1), prior_stay.unsqueeze(-1))
            return likelihood + prior

        start = share.nan_to_num(0.5).logit().clamp(-BOUND, BOUND)[None, ..., None]
        found = maximum(objective, start, torch.ones_like(counts[0, 0, :1]).bool())
        return {"leave": torch.where(share.isnan(), share, found.squeeze(-1).sigmoid())}


def poisson_durations(
    max_duration: int, concentration: float | Tensor = 1.0, rate: float | Tensor = 0.1
) -> DurationFamily:
    """Family of durations: d - 1 is Poisson, given d <= D, each mean with a Gamma prior.

    Site: ``duration.rate``, ``(K,)``, the mean of d - 1 before the cut at D. EM maximises it by
    Newton steps in one dimension.

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

    gammas: ClassVar[dict[str, tuple[str, str]]] = {"rate": ("concentration", "prior_rate")}

    def __init__(
        self,
        num_states: int,
        max_duration: int,
        concentration: float | Tensor = 1.0,
        prior_rate: float | Tensor = 0.1,
    ) -> None:
        super().__init__(
            num_states, max_duration, concentration=concentration, prior_rate=prior_rate
        )

    def forward(self) -> Tensor:
        """Log-probabilities of durations, ``(K, D)``."""
        return truncated(Poisson(self.rate), self.max_duration)

    def _mode(self, counts: Tensor, left_censored: Tensor | None = None) -> dict[str, Tensor]:
        return self._newton(counts, left_censored, poisson, (_mean_count(counts),))


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
    ``duration.shape``, ``(K,)``. EM maximises them by Newton steps in two dimensions.

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

    gammas: ClassVar[dict[str, tuple[str, str]]] = {
        "average": ("concentration", "rate"),
        "shape": ("shape_concentration", "shape_rate"),
    }

    def __init__(
        self,
        num_states: int,
        max_duration: int,
        concentration: float | Tensor = 1.0,
        rate: float | Tensor = 0.1,
        shape_concentration: float | Tensor = 2.0,
        shape_rate: float | Tensor = 0.5,
    ) -> None:
        super().__init__(
            num_states, max_duration, concentration=concentration, rate=rate,
            shape_concentration=shape_concentration, shape_rate=shape_rate,
        )  # fmt: skip

    def forward(self) -> Tensor:
        """Log-probabilities of durations, ``(K, D)``."""
        shape = self.shape
        return truncated(GammaPoisson(shape, shape / self.average), self.max_duration)

    def _mode(self, counts: Tensor, left_censored: Tensor | None = None) -> dict[str, Tensor]:
        """The best of what is found from several shapes: there may be more than one maximum."""
        mean = _mean_count(counts)
        starts = ((mean, torch.full_like(mean, shape)) for shape in (0.5, 3.0, 30.0))
        return self._newton(counts, left_censored, negative_binomial, *starts)


def _mean_count(counts: Tensor) -> Tensor:
    """The mean of d - 1 in ``(R, K, D)``, for Newton steps to start from."""
    steps = torch.arange(counts.size(-1), device=counts.device).to(counts)
    return ((counts * steps).sum(-1) + 0.1) / (counts.sum(-1) + 0.1)


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
