"""Families of durations: how long the states of a semi-Markov model last.

A family of durations is called with K and returns a ``PyroModule`` whose call returns
log-probabilities ``(K, D)`` of durations of 1 to D steps. With ``statistics`` and ``m_step`` of a
:class:`DurationMStep` EM maximises it exactly; else by gradient steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from pyro.distributions import Beta, Dirichlet, Gamma, GammaPoisson, Poisson
from pyro.distributions.torch_distribution import TorchDistribution
from pyro.nn import PyroModule, PyroSample
from torch import Tensor

from .._checks import check_size
from ..ops.log_space import log
from . import emissions
from .closed_form import Maximum, Statistics, check_mode, is_free, with_prior
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


class _Durations(PyroModule):
    """What the families of this module share."""

    def __init__(self, num_states: int, max_duration: int) -> None:
        super().__init__()
        check_size("num_states", num_states)
        check_size("max_duration", max_duration)
        self.max_duration = max_duration

    def _prior(self, name: str, value: float | Tensor, *shape: int) -> None:
        self.register_buffer(name, positive(name, value, shape))

    def _counts(self, counts: Tensor, left_censored: Tensor | None, *names: str) -> Statistics:
        """The statistics, if one of the parameters ``names`` is free."""
        free = any(is_free(self, name) for name in names)
        given = (
            {"counts": counts}
            if left_censored is None
            else {"counts": counts, "left_censored": left_censored}
        )
        return given if free else {}

    def _mode(
        self,
        statistics: Statistics,
        logs: Callable[[Tensor, int], Derivatives],
        priors: dict[str, tuple[Tensor, Tensor]],
        starts: Sequence[tuple[Tensor, ...]],
    ) -> dict[str, Tensor]:
        """The mode of positive parameters with Gamma priors, by their logarithms.

        Args:
            statistics: From :meth:`_counts`.
            logs: Unnormalised probabilities of durations, of :mod:`.duration_modes`.
            priors: Concentration and rate of each parameter's prior, by its name.
            starts: Of all parameters, each ``(R, K)``.
        """
        counts, left_censored = statistics["counts"], statistics.get("left_censored")
        free = torch.tensor([is_free(self, name) for name in priors], device=counts.device)
        point = torch.stack([torch.stack(torch.broadcast_tensors(*part), -1) for part in starts])
        for i, name in enumerate(priors):
            if not free[i]:
                point[..., i] = getattr(self, name).detach()
        # a parameter without a prior has a flat one: a Gamma density of 1 and 0
        flat = [torch.tensor([float(name in self._pyro_samples) for name in priors]).to(counts)]
        shapes, rates = (torch.stack(part, -1).to(counts) for part in zip(*priors.values()))
        shapes, rates = 1 + flat[0] * (shapes - 1), flat[0] * rates

        def objective(theta: Tensor) -> Derivatives:
            likelihood = expected_log(counts, left_censored, logs(theta, self.max_duration))
            return likelihood + gamma(theta, shapes, rates)

        found = maximum(objective, point.log().clamp(-BOUND, BOUND), free).exp()
        unknown = (counts.sum(-1, keepdim=True) == 0) & (flat[0] == 0)
        found = found.masked_fill(unknown, torch.nan)
        return {name: found[..., i] for i, name in enumerate(priors) if free[i]}


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

    def statistics(self, counts: Tensor, left_censored: Tensor | None) -> Statistics:
        """The counts themselves."""
        return self._counts(counts, left_censored, "probs")

    def m_step(self, statistics: Statistics) -> Maximum:
        """Normalised counts, those of the prior included."""
        if not statistics:
            return {}, []
        prior = self.concentration if "probs" in self._pyro_samples else None
        counts = with_prior(statistics["counts"], prior)
        return {"probs": free_probs(counts, statistics.get("left_censored"))}, []


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

    def statistics(self, counts: Tensor, left_censored: Tensor | None) -> Statistics:
        """The counts themselves."""
        return self._counts(counts, left_censored, "leave")

    def m_step(self, statistics: Statistics) -> Maximum:
        """The share of leaves, with those of the prior; NaN where nothing determines it.

        First segments that were there before the data have a part in it by Newton steps.
        """
        if not statistics:
            return {}, []
        counts, left_censored = statistics["counts"], statistics.get("left_censored")
        stays = torch.arange(counts.size(-1), device=counts.device).to(counts)
        leaves, stays = counts[..., :-1].sum(-1), (counts * stays).sum(-1)
        prior_leave = prior_stay = torch.ones_like(self.prior_leave)
        if "leave" in self._pyro_samples:
            prior_leave, prior_stay = self.prior_leave, self.prior_stay
            for name in ("prior_leave", "prior_stay"):
                check_mode(name, getattr(self, name))
        leaves, stays = leaves + prior_leave - 1, stays + prior_stay - 1
        share = leaves / (leaves + stays)
        if left_censored is None:
            return {"leave": share}, []

        def objective(theta: Tensor) -> Derivatives:
            likelihood = expected_log(counts, left_censored, geometric(theta, self.max_duration))
            prior = beta(theta, prior_leave.unsqueeze(-1), prior_stay.unsqueeze(-1))
            return likelihood + prior

        start = share.nan_to_num(0.5).logit().clamp(-BOUND, BOUND)[None, ..., None]
        found = maximum(objective, start, torch.ones_like(counts[0, 0, :1]).bool())
        return {"leave": torch.where(share.isnan(), share, found.squeeze(-1).sigmoid())}, []


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

    def statistics(self, counts: Tensor, left_censored: Tensor | None) -> Statistics:
        """The counts themselves."""
        return self._counts(counts, left_censored, "rate")

    def m_step(self, statistics: Statistics) -> Maximum:
        """The mode, the cut at D included; NaN where nothing determines it."""
        if not statistics:
            return {}, []
        if "rate" in self._pyro_samples:
            check_mode("concentration", self.concentration)
        priors = {"rate": (self.concentration, self.prior_rate)}
        starts = [(_mean_count(statistics["counts"]),)]
        return self._mode(statistics, poisson, priors, starts), []


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

    def statistics(self, counts: Tensor, left_censored: Tensor | None) -> Statistics:
        """The counts themselves."""
        return self._counts(counts, left_censored, "average", "shape")

    def m_step(self, statistics: Statistics) -> Maximum:
        """The mode, the cut at D included; NaN where nothing determines it.

        The best of what is found from several shapes, as there may be more than one maximum.
        """
        if not statistics:
            return {}, []
        for name, prior in (("average", "concentration"), ("shape", "shape_concentration")):
            if name in self._pyro_samples:
                check_mode(prior, getattr(self, prior))
        priors = {
            "average": (self.concentration, self.rate),
            "shape": (self.shape_concentration, self.shape_rate),
        }
        mean = _mean_count(statistics["counts"])
        starts = [(mean, torch.full_like(mean, shape)) for shape in (0.5, 3.0, 30.0)]
        return self._mode(statistics, negative_binomial, priors, starts), []


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
